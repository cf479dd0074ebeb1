"""Whole jobs with their ckpts in S3: stopped, and resumed as if nothing had happened."""

from __future__ import annotations

import pytest

from migrator.errors import StorageError
from migrator.storage.locate import storage_at
from tests.object_stores.conftest import without_obstore
from tests.ranks.test_load import SAVES, finish, of_all, told
from tests.support import chance
from tests.support.harness import ROOT, Job
from tests.support.job_history import assert_as_if_nothing_had_happened, assert_each_sample_once, stopped, unstopped
from tests.support.rank_history import (
    assert_ranks_as_if_nothing_had_happened,
    stopped_ranks,
    unstopped_ranks,
)

SCRIPTS = ROOT / "tests" / "support" / "scripts"
SAMPLES = 38


def apart(moments: list[str], count: int) -> list[str]:
    """One of each of so many stretches of the job, and far from the next one: a stop goes on to the next safe point."""
    dice, length = chance.dice("moments"), len(moments) // count
    return [moments[length * i + dice.randrange(length // 2)] for i in range(count)]


def use(job: Job, client: str, script: str) -> Job:
    return job.write(script if client == "obstore" else without_obstore(script))


def test_a_job_that_is_stopped_three_times_ends_as_if_nothing_had_happened(stored: Job, client: str) -> None:
    """Everything that can be registered, bit for bit; the log says which library made the requests."""
    use(stored, client, (SCRIPTS / "everything.py").read_text())
    reference = unstopped(stored)

    story = stopped(stored, apart(reference.moments, 3))

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=3, samples=SAMPLES)
    assert all(life.events("storage")[0]["client"] == client for life in story.lives)


def test_ranks_that_are_stopped_end_as_if_nothing_had_happened(stored: Job, client: str) -> None:
    """Two ranks, each rank its own part, bit for bit."""
    use(stored, client, (SCRIPTS / "ranked.py").read_text())
    reference = unstopped_ranks(stored, 2)
    dice = chance.dice("ranks")

    story = stopped_ranks(stored, [(place, dice.randrange(2)) for place in apart(reference.moments, 2)], [2, 2, 2])

    assert_ranks_as_if_nothing_had_happened(story, reference)


@pytest.mark.long
def test_on_any_number_of_ranks_each_sample_is_trained_once(stored: Job) -> None:
    """Stopped on three ranks, resumed on two, stopped again, resumed on four."""
    stored.use(SCRIPTS / "ranked.py")
    reference = unstopped_ranks(stored, 2)
    moments = [place for place in reference.moments if place.startswith("0:") and place.endswith(":done")]

    story = stopped_ranks(stored, [(moments[1], 0), (moments[3], 1)], [3, 2, 4])

    ids = [number for number in story.ids if number < 1000]
    assert sorted(set(ids)) == list(range(len(set(ids)))), story.text


@pytest.mark.long
@pytest.mark.parametrize("source", [2, 4])
def test_what_any_number_of_ranks_saved_any_number_gets_back(stored: Job, source: int, client: str) -> None:
    """Weights, optimizer, sampler and state, the same on every rank."""
    saved = finish(use(stored, client, SAVES).gang(source, SAVE="3"))

    for size in (1, 3, source):
        gang = finish(stored.gang(size))
        assert of_all(told(gang, "begins")) == of_all(told(saved, "saved")), gang.text


@pytest.mark.long
def test_what_a_dead_life_left_is_swept_by_the_next_commit(stored: Job, url: str) -> None:
    """A part without a manifest, and an upload that nobody finished."""
    stored.use(SCRIPTS / "everything.py")
    first = stored.run(AT="1:3:drawn", HOW="sigterm")
    assert first.wait() == 143, first.text
    storage = storage_at(url, "default", grace_s=30.0)
    with storage.upload("000001-000000000001/part-00000-of-00001.safetensors") as part:
        part.write([memoryview(bytes(100))])
        part.finish()
    dead = storage.upload("000001-000000000002/part-00000-of-00001.safetensors")
    dead.write([memoryview(bytes(100))])

    second = stored.run(AT="2:3:drawn", HOW="sigterm")
    assert second.wait() == 143, second.text
    last = stored.run()
    assert last.wait() == 0, last.text

    ckpts = [name for name in storage.list() if name != "generations"]
    assert len(ckpts) == 2, ckpts
    assert all("manifest.json" in storage.list(name) for name in ckpts), ckpts
    with pytest.raises(StorageError):
        dead.finish()
    dead.close()
