"""Ranks that freeze, die, end or raise while others leave: whoever is whole saves in time, and says what was lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable

import pytest

from migrator.ckpt.manifest import Manifest
from tests.support.harness import ROOT, Job
from tests.support.rank_history import whole_steps
from tests.support.rank_processes import Gang

long = pytest.mark.long
LOSING = ROOT / "tests" / "support" / "scripts" / "losing.py"
GRACE_S = 8.0
IN_TIME_S = 6.0
"""The answer has come after so long at most: clearly before SIGKILL would."""


@pytest.fixture
def job(job: Job) -> Job:
    job.env["MIGRATOR_GRACE_S"] = str(GRACE_S)
    return job.use(LOSING)


def let_go(job: Job) -> None:
    (job.directory / "go").touch()


def others(size: int, lost: int) -> list[int]:
    return [rank for rank in range(size) if rank != lost]


def left(gang: Gang, ranks: Iterable[int]) -> tuple[str, int]:
    """These ranks left in time, all with the same ckpt: its name and step."""
    ranks = list(ranks)
    codes = [gang[rank].wait(GRACE_S + 5) for rank in ranks]
    assert codes == [143] * len(ranks), gang.text
    told = set()
    for rank in ranks:
        leaving = gang[rank].events("leaving")
        assert len(leaving) == 1, gang.text
        assert float(leaving[0]["since_signal_s"]) < IN_TIME_S, gang.text
        told.add((leaving[0]["ckpt"], leaving[0]["step"]))
    assert len(told) == 1, gang.text
    ckpt, step = told.pop()
    assert ckpt != "None", gang.text
    return ckpt, int(step)


def digest_of(gang: Gang, rank: int, step: int) -> str:
    """What this rank had after this step."""
    return gang[rank].wait_for(rf"^trained {step} (\w+)$").group(1)


def begins(gang: Gang) -> list[tuple[str, ...]]:
    """Of each rank the step, the digest and what is its own."""
    return [re.findall(r"^begins (\d+) (\w+) own (.*)$", text, re.MULTILINE)[0] for text in gang.texts]


def assert_goes_on(job: Job, size: int, step: int, digest: str) -> list[tuple[str, ...]]:
    """So many ranks load that very step and train on with the same weights; what they began with."""
    (job.directory / "go").unlink(missing_ok=True)
    assert step == max(whole_steps(job))
    gang = job.gang(size, UNTIL=str(step + 2))
    assert gang.wait() == [0] * size, gang.text
    began = begins(gang)
    assert {found[:2] for found in began} == {(str(step), digest)}, gang.text
    assert len({digest_of(gang, rank, step + 2) for rank in range(size)}) == 1, gang.text
    return began


def manifest_of(job: Job, ckpt: str) -> Manifest:
    return Manifest.from_bytes(next(job.root.glob(f"*/{ckpt}/manifest.json")).read_bytes())


def named(gang: Gang, event: str) -> set[int]:
    """The ranks that such lines name as lost."""
    return {int(fields["lost"]) for _, fields in gang.events(event)}


# Frozen, with the others inside a collective that never ends.


@pytest.mark.parametrize(
    ("frozen", "place", "step"),
    [
        (0, "drawn", 4),
        (1, "reduced", 5),
        pytest.param(0, "reduced", 5, marks=long),
        pytest.param(1, "drawn", 4, marks=long),
    ],
)
def test_a_frozen_rank_holds_back_nobody(job: Job, frozen: int, place: str, step: int) -> None:
    """The others hang in C inside the next all-reduce; rank 0 also serves the store. One step, and the others have it.

    Whether the frozen one gave its gradients before decides which step that is.
    """
    gang = job.gang(3, pods=3, HOLD=f"5:{place}", HOLD_RANK=str(frozen))
    gang.wait_for("^held", [frozen])
    gang.freeze(frozen)
    whole = others(3, frozen)
    gang.wait_for(f"^drawn {step + 1}$", whole)
    gang.kill(ranks=whole)

    ckpt, saved = left(gang, whole)

    assert saved == step
    assert frozen in named(gang, "rank_lost"), gang.text
    if frozen == 0:
        assert {rank for rank, _ in gang.events("saving_alone")} == set(whole), gang.text
    assert frozen in manifest_of(job, ckpt).extra["missing"]
    digest = digest_of(gang, whole[0], step)
    gang.end()
    assert_goes_on(job, 2, step, digest)


@pytest.mark.parametrize("frozen", [1, pytest.param(0, marks=long)])
def test_a_rank_that_thaws_after_the_others_left_leaves_with_their_ckpt(job: Job, frozen: int) -> None:
    """It finds on storage what they saved; its own save makes nothing worse."""
    gang = job.gang(2, pods=2, HOLD="5:reduced", HOLD_RANK=str(frozen))
    gang.wait_for("^held", [frozen])
    gang.freeze(frozen)
    gang.wait_for("^drawn 6$", others(2, frozen))
    gang.kill()
    ckpt, saved = left(gang, others(2, frozen))
    digest = digest_of(gang, 1 - frozen, 5)
    let_go(job)
    gang.thaw(frozen)

    assert gang[frozen].wait() == 143, gang.text
    assert saved == 5
    told = gang[frozen].events("leaving")[0]
    assert told["ckpt"] in (ckpt, ckpt.replace("05", "04")), gang.text
    assert_goes_on(job, 2, 5, digest)


# Stuck, but alive.


def test_a_rank_stuck_before_the_step_that_others_have_made(job: Job) -> None:
    """They save without it, in time; it saves what it has or finds theirs, and leaves as well."""
    gang = job.gang(2, pods=2, HOLD="5:reduced", HOLD_RANK="0")
    gang.wait_for("^held", [0])
    gang.wait_for("^drawn 6$", [1])
    gang.kill(ranks=[1])

    _, saved = left(gang, [1])

    assert saved == 5
    assert gang[0].wait() == 143, gang.text
    assert gang[0].events("leaving")[0]["step"] in ("4", "5"), gang.text
    assert_goes_on(job, 2, 5, digest_of(gang, 1, 5))


def test_a_step_that_no_rank_completes_is_not_waited_for(job: Job) -> None:
    """One rank is stuck behind its step, the other before it: the safe point before is whole on that one."""
    each = {0: {"HOLD": "5:reduced"}, 1: {"HOLD": "5:stepped"}}
    gang = job.gang(2, pods=2, HOLD_RANK="0 1", each=each)
    gang.wait_for("^held")
    gang.kill(ranks=[1])

    _, saved = left(gang, [0])

    assert saved == 4
    assert 0 in {rank for rank, _ in gang.events("saving_alone")}, gang.text
    gang.end()
    assert_goes_on(job, 2, 4, digest_of(gang, 0, 4))


# Killed.


@pytest.mark.parametrize("lost", [2, pytest.param(0, marks=long)])
def test_a_rank_killed_before_it_said_where_it_is(job: Job, lost: int) -> None:
    """It never reports; the collective of the others fails with the notice pending."""
    gang = job.gang(3, pods=3, HOLD="5:drawn", HOLD_RANK=str(lost))
    gang.wait_for("^held", [lost])
    gang.freeze(lost)
    whole = others(3, lost)
    gang.wait_for("^drawn 5$", whole)
    gang.kill(ranks=whole)
    gang.wait_for("signal source=", whole)
    gang.kill(signal.SIGKILL, [lost])

    _, saved = left(gang, whole)

    assert saved == 4
    assert lost in named(gang, "rank_lost"), gang.text
    assert_goes_on(job, 2, 4, digest_of(gang, whole[0], 4))


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
        pytest.param(0, signal.SIGSTOP, marks=long),
        pytest.param(1, signal.SIGKILL, marks=long),
    ],
)
def test_a_rank_lost_while_it_writes(job: Job, lost: int, how: int) -> None:
    """Another one writes its share."""
    gang = job.gang(3, pods=3, HOLD="5:drawn", HOLD_RANK="0 1 2", WRITE_RANK=str(lost))
    gang.wait_for("^held")
    gang.kill(ranks=[2])
    gang.wait_for("^writing", [lost])
    gang.kill(how, [lost])
    whole = others(3, lost)

    ckpt, saved = left(gang, whole)

    assert saved == 4
    taken = [fields for _, fields in gang.events("share_taken_over")]
    alone = gang.events("saving_alone")
    assert taken or alone, gang.text
    assert lost in named(gang, "rank_lost"), gang.text
    assert not [part.name for part in manifest_of(job, ckpt).parts if f"-rank-0000{lost}" in part.name]
    digest = digest_of(gang, whole[0], 4)
    gang.end()
    assert_goes_on(job, 2, 4, digest)


def test_a_rank_that_is_slow_to_write_is_not_lost(job: Job) -> None:
    """Another one has its share by then, and what is the slow one's own is waited for."""
    gang = job.gang(2, pods=2, HOLD="5:drawn", HOLD_RANK="0 1", WRITE_RANK="1")
    gang.wait_for("^held")
    gang.kill(ranks=[1])
    gang.wait_for("share_taken_over", [0])
    let_go(job)

    ckpt, saved = left(gang, [0, 1])

    assert saved == 4
    assert not gang.events("rank_lost"), gang.text
    assert "missing" not in manifest_of(job, ckpt).extra
    began = assert_goes_on(job, 2, 4, digest_of(gang, 0, 4))
    assert [found[2].split(",")[0] for found in began] == ["[0", "[1"]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_killed_after_it_has_written(job: Job, lost: int) -> None:
    """All that it had is in the ckpt, its own state too."""
    late = " ".join(map(str, others(3, lost)))
    gang = job.gang(3, pods=3, HOLD="5:drawn", HOLD_RANK="0 1 2", WROTE_RANK=str(lost), WRITE_RANK=late)
    gang.wait_for("^held")
    gang.kill(ranks=[1])
    whole = others(3, lost)
    gang.wait_for("^wrote", [lost])
    gang.wait_for("^writing", whole)
    gang.kill(signal.SIGKILL, [lost])
    gang[lost].wait()
    let_go(job)

    ckpt, saved = left(gang, whole)

    assert saved == 4
    assert "missing" not in manifest_of(job, ckpt).extra, gang.text
    assert not gang.events("rank_lost"), gang.text
    began = assert_goes_on(job, 3, 4, digest_of(gang, whole[0], 4))
    assert began[lost][2].startswith(f"[{lost}, "), began


# Ended.


@pytest.mark.parametrize(
    ("gone", "how"),
    [
        (0, "killed"),
        (0, "ends"),
        (1, "raises"),
        pytest.param(0, "raises", marks=long),
        pytest.param(1, "ends", marks=long),
        pytest.param(1, "killed", marks=long),
    ],
)
def test_a_rank_that_is_gone_while_others_still_evaluate(job: Job, gone: int, how: str) -> None:
    """It has ended, failed or died, and if it was rank 0 the store is gone with it; then a notice comes."""
    whole = others(3, gone)
    holding = "0 1 2" if how == "killed" else " ".join(map(str, whole))
    raising = {"RAISE": "after", "RAISE_RANK": str(gone)} if how == "raises" else {}
    gang = job.gang(3, pods=3, UNTIL="5", HOLD="after", HOLD_RANK=holding, **raising)
    gang.wait_for("^held", whole)
    if how == "killed":
        gang.wait_for("^held", [gone])
        gang.kill(signal.SIGKILL, [gone])
    assert gang[gone].wait() == {"ends": 0, "raises": 1, "killed": -9}[how], gang.text
    gang.kill(ranks=[2])
    if gone == 0:
        gang.wait_for("store_lost", whole)
        gang.kill(ranks=[1])

    _, saved = left(gang, whole)

    assert saved == 5
    assert gone in named(gang, "rank_lost"), gang.text
    assert_goes_on(job, 3, 5, digest_of(gang, whole[0], 5))


# Raising.


@pytest.mark.parametrize(
    ("raising", "place", "step"),
    [
        (1, "drawn", 4),
        (0, "reduced", 4),
        (1, "stepped", 5),
        pytest.param(0, "drawn", 4, marks=long),
        pytest.param(1, "reduced", 4, marks=long),
        pytest.param(0, "stepped", 5, marks=long),
    ],
)
def test_a_rank_that_raises_with_notice_pending(job: Job, raising: int, place: str, step: int) -> None:
    """All leave with what is whole: the step it had, or the one that it finished and others have as well."""
    env = {"RAISE": f"5:{place}", "RAISE_RANK": str(raising), "RAISE_NOTICE": "1"}
    gang = job.gang(2, pods=2, **env)

    ckpt, saved = left(gang, [1 - raising])

    assert gang[raising].wait() == 143, gang.text
    # The notice may reach the other rank before it steps: then it has the step before, and stays there.
    has_stepped = re.search("^trained 5 ", gang[1 - raising].text, re.MULTILINE) is not None
    assert saved in ((step, 5 if place != "drawn" else 4) if has_stepped else (4, step)), gang.text
    told = gang[raising].events("leaving")
    # A rank that cannot get to the step of the others may have saved the one before by itself; the higher one counts.
    assert [fields["ckpt"] for fields in told] in [[name] for name in (*job.ckpts(), "None")], gang.text
    assert ckpt == job.ckpts()[-1], gang.text
    assert_goes_on(job, 2, saved, digest_of(gang, 1 - raising, saved))


@pytest.mark.parametrize("raising", [1, pytest.param(0, marks=long)])
def test_a_rank_that_raises_without_notice_ends_the_job_and_no_ckpt(job: Job, raising: int) -> None:
    """Nobody hangs, and the ckpt of the life before is as it was."""
    before = job.gang(2, pods=2, HOLD="3:drawn", HOLD_RANK="0 1")
    before.wait_for("^held")
    before.kill(ranks=[0])
    ckpt, saved = left(before, [0, 1])
    start_s = time.monotonic()
    gang = job.gang(2, pods=2, RAISE="5:drawn", RAISE_RANK=str(raising))

    assert gang.wait(20.0) == [1, 1], gang.text

    assert time.monotonic() - start_s < 15.0
    assert "asked to raise" in gang[raising].text
    assert job.ckpts() == [ckpt]
    assert_goes_on(job, 2, saved, digest_of(before, 0, saved))


# Ranks that are not alike.


@pytest.mark.parametrize("slow", ["", "0"])
def test_ranks_that_hold_different_weights_get_those_of_rank_0(job: Job, slow: str) -> None:
    """On purpose or not, they are named; rank 0's come back on all, slow as it may be to write them."""
    gang = job.gang(3, pods=3, ALONE="1", HOLD="5:drawn", HOLD_RANK="0 1 2", WRITE_RANK=slow)
    gang.wait_for("^held")
    assert len({digest_of(gang, rank, 4) for rank in range(3)}) == 3
    gang.kill(ranks=[1])
    if slow:
        gang.wait_for("^writing", [0])
        time.sleep(0.7)
        let_go(job)

    _, saved = left(gang, range(3))

    assert saved == 4
    told = gang.events("ranks_differ")
    assert told, gang.text
    assert all(fields["objects"] == "model,optimizer" for _, fields in told), gang.text
    assert {fields["why"] for _, fields in gang.events("rank_lost")} == {
        '"it holds other tensors than rank 0: model, optimizer"'
    }, gang.text
    assert_goes_on(job, 2, 4, digest_of(gang, 0, 4))


@pytest.mark.parametrize("swapping", ["0 1", "1"])
def test_averaged_weights_in_place_when_the_notice_come(job: Job, swapping: str) -> None:
    """That safe point is lost on a rank, so all go on to the next one, and no averaged weight is in the ckpt."""
    reference = job.gang(2, MIGRATOR_JOB="unstopped", UNTIL="5")
    assert reference.wait() == [0, 0], reference.text
    gang = job.gang(2, pods=2, EMA_RANK=swapping)
    swapped = [int(rank) for rank in swapping.split()]
    gang.wait_for("^swapped", swapped)
    gang.wait_for("^drawn 5$")
    gang.kill(ranks=[0])
    gang.wait_for("agreed_anew")
    let_go(job)

    _, saved = left(gang, [0, 1])

    assert saved == 5
    assert digest_of(gang, 0, 5) == digest_of(reference, 0, 5)
    assert_goes_on(job, 2, 5, digest_of(reference, 0, 5))
