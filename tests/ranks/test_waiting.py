"""Late is not lost: how long ranks wait for one another, and what makes them stop."""

from __future__ import annotations

import time

from tests.ranks.test_idle import TINY
from tests.support.harness import Job
from tests.support.rank_history import whole_steps

# One save, in which rank 1 is much slower than the others are patient.
SLOW = (
    TINY.replace(
        "# before\n",
        """
from migrator.ranks import timing
from migrator.save import attempt as saving
timing.STALL_S = 1.0
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
    assert not gang.events("saving_alone"), gang.text
    assert not gang.events("rank_lost"), gang.text
    assert len(whole_steps(job)) == 1


def test_a_save_that_failed_is_not_waited_for_again(job: Job) -> None:
    """A full disk, an `except`, and another try at the same step: an error at once, and the next step is saved."""
    script = (
        TINY.replace(
            "# before\n",
            """
from migrator.save import attempt as saving
from migrator.errors import StorageFullError
share = saving.Attempt.share

def fails_once(attempt):
    if os.environ["RANK"] == "1" and attempt.name.endswith("4"):
        raise StorageFullError("the disk is full")
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
group = migrator._session._saver._strategy
if rank == 1:
    group._hear_order = lambda target: (group._orders.miss(target, "the test wants it"), False)[1]

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
