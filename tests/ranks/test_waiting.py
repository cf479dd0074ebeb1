"""Late is not lost: how long ranks wait for one another, and what makes them stop."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.save.group.group import JointSaver
from migrator.ranks.timing import ATTEMPTS, Pace
from migrator.save.group.last_save import Missed
from tests.support.harness import Job
from tests.support.rank_history import whole_steps
from tests.ranks.test_idle import TINY

# One save, in which rank 1 is much slower than the others are patient.
SLOW = (
    TINY.replace(
        "# before\n",
        """
from migrator.ranks import timing as pace
from migrator.save import attempt as saving
pace.STALL_S = 1.0
share = saving.Attempt.share

def slowly(attempt):
    for _ in range(14):
        time.sleep(0.2)
        if os.environ["RANK"] == "1" and os.environ["WRITES"] == "1":
            attempt._on_block(1, 2)
    share(attempt)

if os.environ["RANK"] == "1":
    saving.Attempt.share = slowly
# before
""",
    )
    .replace('state["step"] += 1\n', 'state["step"] += 1\n    save(state["step"])\n')
    .replace(
        "# watch\n",
        """
def save(step):
    if step == 4:
        try:
            print("saved", migrator.save_ckpt())
        except Exception as error:
            print("failed", type(error).__name__, error)
""",
    )
)


def test_a_rank_that_writes_is_waited_for(job: Job) -> None:
    """The ranks' shares end further apart than a rank may be silent; and all hear the same of it."""
    gang = job.write(SLOW).gang(2, WRITES="1")

    assert gang.wait() == [0, 0], gang.text
    assert gang.text.count("\nsaved 000001-000000000004\n") == 2, gang.text
    assert whole_steps(job) == [4]


def test_a_rank_that_does_nothing_is_given_up(job: Job) -> None:
    """It is alive, and its storage hangs. Nobody is told of a ckpt that is not there."""
    gang = job.write(SLOW).gang(2, WRITES="0")

    assert gang.wait() == [0, 0], gang.text
    assert gang.text.count("\nfailed SaveFailed ") == 2, gang.text
    assert "rank 1 has not written what belongs to step 4 and was waited for" in gang[0].text, gang.text
    assert whole_steps(job) == [], gang.text


def test_a_save_that_is_missed_again_and_again_is_tried_again_at_its_next_time() -> None:
    """Each try is announced earlier; after some the next interval is waited for; and so on."""
    saver: Any = object.__new__(JointSaver)
    orders: list[tuple[int, int]] = []
    clock = time.monotonic()

    def missed(target: Any, capture: Any) -> None:
        raise Missed("rank 1: it has gone on already")

    saver.__dict__.update(
        _ranks=SimpleNamespace(rank=0, pace=Pace(2)),
        _aside=SimpleNamespace(prepare=lambda _: None, free=lambda: None),
        _live_bytes=lambda: 0,
        _together=SimpleNamespace(go_on=missed),
        _take_exactly=lambda target: None,
        _misses=0,
        _speed_since=(clock - 10.0, 0),
        _shop=SimpleNamespace(gate=SimpleNamespace(is_closed=False, at=(1000, 0))),
        _interval_end=lambda: clock + 600,
        _order=orders.append,
    )
    ordered = []
    for _ in range(2 * ATTEMPTS + 3):
        before = len(orders)
        saver._save_with_others((1000, 0))
        ordered.append(len(orders) > before)

    assert ordered == [True] * ATTEMPTS + [False] + [True] * ATTEMPTS + [False] + [True]
    assert saver._next_s == clock + 600
    ahead = [step - 1000 for step, _ in orders[:ATTEMPTS]]
    assert all(later >= 1.8 * earlier for earlier, later in itertools.pairwise(ahead)), ahead


@pytest.mark.parametrize("size", [2, 64, 1024, 4096])
def test_what_all_ranks_ask_of_the_store_is_bounded(size: int) -> None:
    pace = Pace(size)

    assert size / pace.idle_look_s <= 200
    assert size / pace.busy_look_s(leads=False) <= 2000 or size < 30
    assert size / pace.beat_s <= 1000
    assert pace.stale_s >= 8 * pace.beat_s
    assert 0.1 <= pace.ahead_s(0) <= 5


@pytest.mark.parametrize("grace_s", [5.0, 30.0, 600.0])
def test_the_waits_of_a_leave_fit_into_its_grace(grace_s: float) -> None:
    """Reports, the way to the target, others' states: behind all of them there is time to save alone."""
    pace = Pace(1024, round_trip_s=0.05)
    left_s = grace_s - pace.window_end_s(grace_s)
    left_s -= pace.patience_s(left_s, all_alive=False)
    left_s -= pace.states_s(left_s)

    assert pace.window_s(grace_s) <= pace.window_end_s(grace_s)
    assert left_s >= 0.3 * grace_s


def test_the_earliest_deadline_of_any_rank_counts(job: Job) -> None:
    """Rank 0 has two minutes, rank 1 is told a moment later and has six seconds; rank 2 does not come to its step."""
    script = TINY.replace(
        "    optimizer.zero_grad()\n",
        '    if rank == 2 and state["step"] == 5:\n'
        '        print("stays")\n'
        "        time.sleep(60)\n"
        "    optimizer.zero_grad()\n",
    )
    gang = job.write(script).gang(
        3, pods=3, each={0: {"MIGRATOR_GRACE_S": "120"}, 1: {"MIGRATOR_GRACE_S": "6"}}, PYTHONUNBUFFERED="1"
    )
    gang[2].wait_for("^stays")
    start_s = time.monotonic()
    gang.kill(ranks=[0])
    gang[0].wait_for("signal source=SIGTERM")
    gang.kill(ranks=[1])

    assert gang[0].wait() == gang[1].wait() == 143, gang.text
    assert time.monotonic() - start_s < 8, gang.text
    assert len(whole_steps(job)) == 1, gang.text


def test_what_is_exchanged_for_a_save_does_not_stay_in_the_store(job: Job) -> None:
    """Roots apart: the others' states go to rank 0 through the store, at each save."""
    script = TINY.replace(
        "# end\n",
        """
kept = distributed.distributed_c10d._get_default_store()
while hasattr(kept, "underlying_store"):
    kept = kept.underlying_store
print("kept", sum("/record/" in key for key in kept.list_keys()))
# end
""",
    )
    gang = job.write(script).gang(2, pods=2, roots="own", EVERY="2", STEPS="24", LATE_RANK="none")

    assert gang.wait() == [0, 0], gang.text
    assert len(gang[0].events("committed")) > 5, gang.text
    kept = [line for line in gang[0].text.splitlines() if line.startswith("kept ")]
    assert int(kept[0].split()[1]) <= 4, gang.text


def test_a_rank_in_a_long_step_is_waited_for(job: Job) -> None:
    """All are on their way to the same safe point, which takes longer than a quarter of the grace."""
    script = TINY.replace(
        "    optimizer.zero_grad()\n",
        '    if state["step"] == 5:\n'
        '        print("steps", flush=True)\n'
        "        time.sleep(3.0)\n"
        "    optimizer.zero_grad()\n",
    )
    gang = job.write(script).gang(2, MIGRATOR_GRACE_S="8")
    gang.wait_for("^steps")
    gang.kill(ranks=[1])

    assert gang.wait() == [143, 143], gang.text
    assert not gang.events("settled"), gang.text
    assert not gang.events("rank_lost"), gang.text
    assert len(whole_steps(job)) == 1


def test_a_save_that_failed_is_not_waited_for_again(job: Job) -> None:
    """A full disk, an `except`, and another try at the same step: an error at once, and the next step is saved."""
    script = (
        TINY.replace(
            "# before\n",
            """
import errno
from migrator.save import attempt as saving
from migrator.errors import StorageError
share = saving.Attempt.share

def fails_once(attempt):
    if os.environ["RANK"] == "1" and attempt.name.endswith("4"):
        raise StorageError("the disk is full", errno=errno.ENOSPC)
    share(attempt)

saving.Attempt.share = fails_once
# before
""",
        )
        .replace('state["step"] += 1\n', 'state["step"] += 1\n    save(state["step"])\n')
        .replace(
            "# watch\n",
            """
def save(step):
    for _ in range({4: 2, 5: 1}.get(step, 0)):
        try:
            print("saved", migrator.save_ckpt())
        except Exception as error:
            print("failed", type(error).__name__, error)
""",
        )
    )
    gang = job.write(script).gang(2)

    assert gang.wait() == [0, 0], gang.text
    assert gang.text.count("\nfailed SaveFailed ") == 4, gang.text
    assert gang.text.count("\nsaved 000001-000000000005\n") == 2, gang.text
    assert whole_steps(job) == [5]


def test_off_stays_off(job: Job) -> None:
    """A save of the script's that is missed orders no other one, which nobody has asked for."""
    script = TINY.replace(
        'state["step"] += 1\n', 'state["step"] += 1\n    save(state["step"])\n    time.sleep(0.02)\n'
    ).replace(
        "# watch\n",
        """
saver = migrator._life._saver
if rank == 1:
    saver._hear_order = lambda target: (saver._together.miss(target, "the test wants it"), False)[1]

def save(step):
    if step == 4 and rank == 0:
        try:
            print("saved", migrator.save_ckpt())
        except Exception as error:
            print("failed", type(error).__name__, error)
""",
    )
    gang = job.write(script).gang(2, STEPS="60")

    assert gang.wait() == [0, 0], gang.text
    assert "\nfailed SaveFailed " in gang.text, gang.text
    assert whole_steps(job) == [], gang.text


def test_what_is_exchanged_may_be_large(job: Job) -> None:
    """Roots apart, and a rank's own state above what the store takes at once: it is saved, and loaded again."""
    script = TINY.replace(
        'state = {"step": 0}', 'state = {"step": 0, "own": "x" * (9 << 20) + os.environ["RANK"]}'
    ).replace("    migrator.load_ckpt()\n", '    print("loaded", migrator.load_ckpt(), state["own"][-1])\n')
    gang = job.write(script).gang(2, pods=2, roots="own", EVERY="4")
    assert gang.wait() == [0, 0], gang.text
    assert not gang.events("store_lost"), gang.text
    assert gang[0].events("committed"), gang.text
    again = job.gang(2, pods=2, roots="own")

    assert again.wait() == [0, 0], again.text
    assert [f"loaded 000001-000000000008 {rank}" in again[rank].text for rank in (0, 1)] == [True, True], again.text
