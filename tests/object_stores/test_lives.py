"""Several lives of one job on one bucket at the same time: they begin together, overlap, and wake up late.

On a store that honours conditional writes, on one that ignores them, and on one that refuses them.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator

import pytest

from migrator.storage.object_storage import ObjectStorage
from migrator.storage.s3_client import S3Client
from tests.object_stores.conftest import BUCKET, CONDITIONS, store_with
from tests.support import chance
from tests.support.bucket import Bucket, reach
from tests.support.halting_jobs import HALTING, ends, next_life, pod, said_of_saves, stops, wakes
from tests.support.harness import Job, until

long = pytest.mark.long


@pytest.fixture
def store(
    job: Job, conditions: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """A store for the job, whose script halts itself where it is told to."""
    with store_with(conditions, request) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        prefix = uuid.uuid4().hex[:12]
        job.url = f"s3://{BUCKET}/{prefix}"
        job.env |= {**env, "MIGRATOR_EVERY": "off"}
        job.use(HALTING)
        # s3fs in one half of all jobs.
        if chance.dice(request.node.name).random() < 0.5:
            job.env["NO_OBSTORE"] = "1"
        yield Bucket(ObjectStorage(S3Client(BUCKET), prefix, "default"))


# Lives that begin together.


@long
@pytest.mark.parametrize("conditions", CONDITIONS)
def test_lives_that_claim_at_the_same_moment_have_different_numbers(job: Job, store: Bucket) -> None:
    """Three of them stand before the same PUT. Each trains under a number of its own, and none writes over another."""
    lives = [job.run(MIGRATOR_SIGNAL=pod(job, i), HALT="claim:1", MIGRATOR_EVERY="10") for i in range(3)]
    for life in lives:
        stops(life, "claim:1")
    for life in lives:
        life.kill(signal.SIGCONT)
    for life in lives:
        life.wait_for("committed")
    for life in lives:
        ends(life)

    claimed = sorted(int(life.events("generation_claimed")[0]["generation"]) for life in lives)
    assert len({*claimed}) == 3, claimed
    assert store.lives() == claimed
    assert {int(name[:6]) for name in store.whole()} >= {claimed[-1]}
    next_life(job, store)


@long
@pytest.mark.parametrize("conditions", CONDITIONS)
def test_a_life_that_is_paused_before_its_record_has_another_number_than_the_next_one(
    job: Job, store: Bucket, conditions: str
) -> None:
    """Its number was free when it looked. When it wakes up, the other life trains and has committed."""
    first = job.run(HALT="record:1", STEPS="40", MIGRATOR_EVERY="10")
    stops(first, "record:1")
    second = job.run(MIGRATOR_SIGNAL=pod(job, 2), MIGRATOR_EVERY="10")
    until(lambda: len(second.events("committed")) == 3, "three commits", context=lambda: second.text)
    wakes(first)
    assert first.wait() == 0, first.text
    ends(second)

    claimed = [int(life.events("generation_claimed")[0]["generation"]) for life in (first, second)]
    # Without conditions the claim keeps the number for the one that is paused.
    assert claimed == ([2, 1] if conditions == "honoured" else [1, 2])
    assert store.lives() == [1, 2]
    next_life(job, store)


# A writer that is paused in a save, and wakes up when a later life has gone on.

SAVING = ("part", "finish", "commit", "put", "answered")
MOMENTS = (*SAVING, "retire")
PAUSES = [(conditions, moment, further) for conditions in CONDITIONS for moment in MOMENTS for further in (False, True)]


@pytest.mark.parametrize(("conditions", "moment", "further"), chance.some("pauses", PAUSES, 0.01))
def test_a_periodic_save_that_is_paused_until_a_later_life_has_committed(
    job: Job, store: Bucket, moment: str, further: bool
) -> None:
    """It becomes a whole ckpt or none. `further`: the paused life then trains further than the one that replaced it."""
    halt = "retire:1" if moment == "retire" else f"{moment}:2"
    old = job.run(HALT=halt, MIGRATOR_EVERY="20", MIGRATOR_KEEP="1", S="0.005")
    stops(old, halt)
    before = store.whole()[0]
    assert reach(before)[0] >= (40 if moment in ("answered", "retire") else 20)

    end = 80 if further else 160
    later = job.run(MIGRATOR_SIGNAL=pod(job, 2), MIGRATOR_EVERY="10", S="0.005", STEPS=str(end))
    assert later.wait() == 0, later.text
    assert later.events("loaded")[0]["ckpt"] == before
    theirs = [name for name in store.whole() if name.startswith("000002")]
    assert theirs, later.text

    wakes(old)
    old.wait_for("^step 120$")
    ends(old)
    # What it says of its saves is true, and what the other life has is as it was.
    for name in said_of_saves(old)["committed"][-1:]:
        assert name in store.whole(), old.text
    assert [name for name in store.whole() if name.startswith("000002")] == theirs
    assert old.events("later_life"), old.text
    assert (store.whole()[0] in theirs) == (not further)
    last = next_life(job, store)
    assert last.events("fork"), last.text
    assert store.orphans() == []


@long
@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("moment", SAVING)
def test_a_last_save_that_is_paused_until_its_grace_is_over(job: Job, store: Bucket, moment: str) -> None:
    """The next life waits no longer than the grace, and goes on; what the sleeper saves is whole or none."""
    first = job.run()
    first.wait_for("^step 20$")
    ends(first)
    (before,) = store.whole()
    old = job.run(HALT=f"{moment}:1", MIGRATOR_GRACE_S="4")
    old.wait_for("^step 40$")
    old.kill()
    stops(old, f"{moment}:1")
    later = job.run(MIGRATOR_SIGNAL=pod(job, 2), MIGRATOR_EVERY="10", STEPS="80")
    assert later.wait() == 0, later.text
    if moment != "answered":
        (waited,) = later.events("waiting_for_leaving")
        assert float(waited["at_most_s"]) <= 4.0
        assert later.events("loaded")[0]["ckpt"] == before
    theirs = [name for name in store.whole() if name.startswith("000003")]
    wakes(old)
    assert old.wait() == 143, old.text

    said = old.events("leaving")
    saved = {event["ckpt"] for event in said} - {"None"}
    assert saved <= {*store.whole()}, old.text
    assert saved or said_of_saves(old)["failed"] or old.events("left_hard"), old.text
    assert bool(old.events("later_life")) == (bool(saved) and moment != "answered"), old.text
    assert [name for name in store.whole() if name.startswith("000003")] == theirs
    next_life(job, store)
    assert store.orphans() == []


# Lives that overlap as Kubernetes starts them.


@long
@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("moment", SAVING)
def test_a_life_that_starts_while_the_old_one_still_saves_goes_on_from_that_save(
    job: Job, store: Bucket, moment: str
) -> None:
    """However far the save has come. Nothing is lost, and nobody says so."""
    old = job.run(HALT=f"{moment}:1", HOW="hold")
    old.wait_for("^step 40$")
    old.kill()
    old.wait_for(f"^halts {moment}:1$")
    later = job.run(MIGRATOR_SIGNAL=pod(job, 2), MIGRATOR_EVERY="10", STEPS="100")
    if moment != "answered":
        later.wait_for("waiting_for_leaving")
    (job.directory / "go").touch()

    assert old.wait() == 143, old.text
    assert later.wait() == 0, later.text
    (saved,) = said_of_saves(old)["committed"]
    assert later.events("loaded")[0]["ckpt"] == saved
    assert not old.events("later_life")
    assert not later.events("fork")
    next_life(job, store)
    assert store.orphans() == []
