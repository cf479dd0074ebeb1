"""A healthy job of several ranks is left alone: nothing is asked of its training thread, and it ends as it would."""

from __future__ import annotations

import re
import time

import pytest

from tests.support.harness import Job
from tests.support.rank_processes import Gang

TINY = """
import os
import time
import torch
from torch import distributed
from migrator import migrator

# before
distributed.init_process_group("gloo", **make())
rank = int(os.environ["RANK"])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"step": 0}
for name, value in {"model": model, "optimizer": optimizer, "state": state}.items():
    migrator.register(name, value)
migrator.listening(every=os.environ.get("EVERY", "off"))
if migrator.resume:
    migrator.load_ckpt()
# watch
for batch in migrator.batches(range(int(os.environ.get("STEPS", "8")))):
    model(torch.ones(1, 2)).sum().backward()
    for param in model.parameters():
        distributed.all_reduce(param.grad)
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
print("done", state["step"])
if os.environ.get("LATE_RANK") == str(rank):
    time.sleep(1.0)
# end
if os.environ.get("DESTROYS") == "1":
    distributed.destroy_process_group()
"""
TINY = TINY.replace("# before\n", "make = dict\n# before\n")


def finish(gang: Gang) -> Gang:
    """A job that ended as if we were not there."""
    assert gang.wait() == [0] * gang.size, gang.text
    assert gang.text.count("\ndone ") == gang.size, gang.text
    for word in ("signal", "store_lost", "left_hard", "rank_lost", "watch_weak"):
        assert not gang.events(word), gang.text
    assert "Traceback" not in gang.text
    assert "terminate called" not in gang.text
    return gang


# Whatever talks to others: each call is told, with its thread and what of ours it came from.
WATCH = """
import functools
import sys
import threading

told = {}

def watched(owner, name):
    was = getattr(owner, name)

    @functools.wraps(was)
    def call(*args, **named):
        frame, ours = sys._getframe(1), ""
        while frame is not None and not ours:
            if "/migrator/" in frame.f_code.co_filename:
                ours = frame.f_code.co_qualname
            frame = frame.f_back
        key = (threading.current_thread().name, name, ours)
        told[key] = told.get(key, 0) + 1
        return was(*args, **named)

    setattr(owner, name, call)

for name in ("set", "get", "add", "append", "check", "wait", "compare_set", "multi_get", "multi_set", "num_keys"):
    watched(distributed.TCPStore, name)
for name in ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "new_group"):
    watched(distributed, name)
"""
TELL = """
for (thread, name, ours), count in told.items():
    print("call", thread, name, ours or "-", count)
"""


@pytest.mark.parametrize(("every", "steps"), [("off", "100"), ("3", "60"), ("0.2s", "100")])
def test_the_training_thread_asks_nothing_of_others(job: Job, every: str, steps: str) -> None:
    """Between `listening()` and the end: no collective and no store call of ours, with periodic saves or without."""
    script = (
        TINY.replace("# watch\n", WATCH)
        .replace("# end\n", TELL)
        .replace('state["step"] += 1', 'state["step"] += 1; time.sleep(0.02)')
    )
    gang = finish(job.write(script).gang(2, EVERY=every, STEPS=steps, DESTROYS="1"))

    for text in gang.texts:
        calls = re.findall(r"^call (\S+) (\S+) (\S+) (\d+)$", text, re.MULTILINE)
        ours = [call for call in calls if call[2] != "-"]
        assert {thread for thread, *_ in ours} <= {"migrator-ranks", "migrator-bell"}, text
        assert ("MainThread", "all_reduce", "-", str(2 * int(steps))) in calls, (
            "the script's own collectives are not seen"
        )
        assert {name for thread, name, *_ in ours if thread == "migrator-ranks"} >= {"add"}, "nothing was watched"
    assert bool(job.ckpts()) == (every != "off")


# The thread is inside the store's code nearly all the time, so that no end is a matter of luck.
BUSY = """
from migrator.ranks.peers import Peers
exchange = Peers._exchange

def exchanges(self, *lists):
    for _ in range(2000):
        self._store.add("migrator/tests", 0)
    return exchange(self, *lists)

Peers._exchange = exchanges
"""


def end_well(job: Job, times: int) -> None:
    job.write(TINY.replace("# watch\n", BUSY)).whole_end = True
    for turn in range(times):
        late = {"LATE_RANK": str(turn % 4 // 2)} if turn % 4 in (1, 2) else {}
        gang = job.gang(
            2, DESTROYS=str(turn % 2), EVERY="3" if turn % 3 == 0 else "off", MIGRATOR_JOB=f"job-{turn}", **late
        )
        finish(gang)
        assert not job.signal.exists(), "the signal file was left behind"


@pytest.mark.timeout(60)
def test_six_of_six_end_with_0(job: Job) -> None:
    """Rank 0, whose process serves the store, first or last; with and without `destroy_process_group()`."""
    end_well(job, 6)


@pytest.mark.long
def test_thirty_of_thirty_end_with_0(job: Job) -> None:
    """A thread inside the store's C++ code at the interpreter's end made 134 of it in 26 of 30."""
    end_well(job, 30)


def test_ranks_that_leave_end_with_143_through_the_whole_end(job: Job) -> None:
    """As a fresh interpreter's: no thread of ours is inside the store's or gloo's C++ code when it ends."""
    job.write(TINY).whole_end = True
    for turn in range(3):
        gang = job.gang(2, STEPS="100000", MIGRATOR_JOB=f"job-{turn}")
        gang.wait_for("listening ")
        gang.kill(ranks=[turn % 2])

        assert gang.wait() == [143, 143], gang.text
        assert "terminate called" not in gang.text


OUTLIVES_THE_STORE = """
from pathlib import Path
from migrator.ranks.peers import Peers
exchange = Peers._exchange

class SaysBye:
    def __init__(self, store):
        self.store, self.has_said_bye = store, False

    def __getattr__(self, name):
        return getattr(self.store, name)

    def append(self, key, text):
        self.store.append(key, text)
        self.has_said_bye = "bye" in text

    def add(self, key, number):
        count = self.store.add(key, number)
        # Rank 0 writes its pid behind listening(), where this is called already.
        served_by = Path("/proc") / (Path("pid-0").read_text() if self.has_said_bye else "none")
        while served_by.exists() and " Z " not in (served_by / "stat").read_text():
            time.sleep(0.01)
        return count

def exchanges(self, *lists):
    if rank == 1 and not isinstance(self._store, SaysBye):
        self._store = SaysBye(self._store)
    return exchange(self, *lists)

Peers._exchange = exchanges
Path("pid-0").write_text(str(os.getpid())) if rank == 0 else None
distributed.barrier()
"""


def test_a_store_that_ends_behind_the_last_word_is_not_missed(job: Job) -> None:
    """Who serves it may end as soon as it has read that nobody needs it, and faster than the others read on."""
    finish(job.write(TINY.replace("# watch\n", OUTLIVES_THE_STORE)).gang(2))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_ends_much_later_than_the_other_finds_nothing_amiss(job: Job, late: int) -> None:
    """The store may be gone by then. The signal file stays as long as a rank of the pod trains."""
    script = TINY.replace(
        "time.sleep(1.0)", "time.sleep(3.5); print('file', os.path.exists(os.environ['MIGRATOR_SIGNAL']))"
    )
    gang = job.write(script).gang(2, LATE_RANK=str(late))

    assert gang.wait() == [0, 0], gang.text
    assert re.findall(r"^file (.*)$", gang.text, re.MULTILINE) == ["True"]
    assert not job.signal.exists()
    assert not gang.events("signal")


SLOW_COMMIT = """
from migrator.save import attempt as saving
commit = saving.Attempt.commit

def commits(self):
    time.sleep(1.5)
    return commit(self)

saving.Attempt.commit = commits
"""


@pytest.mark.parametrize("late", [0, 1])
def test_a_save_that_is_due_at_the_very_end_keeps_nobody(job: Job, late: int) -> None:
    """The save before it is not committed yet when the script ends: no rank is left waiting for another one's share."""
    job.write(TINY.replace("# watch\n", SLOW_COMMIT))
    start_s = time.monotonic()

    finish(job.gang(2, EVERY="3", STEPS="6", LATE_RANK=str(late)))

    assert time.monotonic() - start_s < 20
    assert job.ckpts()[-1] == "000001-000000000006"


def test_ranks_without_a_process_group_are_told_what_to_do(job: Job) -> None:
    """WORLD_SIZE says that there are others, and nothing connects them: a UsageError on each, at once."""
    script = TINY.replace('distributed.init_process_group("gloo", **make())\n', "")
    gang = job.write(script).gang(2)

    assert gang.wait() == [1, 1]
    for text in gang.texts:
        assert "UsageError: listening(): WORLD_SIZE=2, but there is no process group" in text
        assert "init_process_group() before listening()" in text
    assert not job.root.exists()


def test_ranks_that_met_through_a_file_are_told_what_to_do(job: Job) -> None:
    """Through a FileStore nothing can be agreed on: a UsageError on each, at once."""
    make = """
def make():
    store = distributed.FileStore(os.path.abspath("store"), 2)
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": 2}
"""
    # Nobody ends while the other one may still be connecting: it would take that for a failure of the network.
    script = TINY.replace("# before\n", make).replace("rank = int", "distributed.barrier()\nrank = int")
    gang = job.write(script).gang(2)

    assert gang.wait() == [1, 1], gang.text
    for text in gang.texts:
        assert "UsageError: listening(): the process group was made with a FileStore" in text
        assert "env://" in text


def test_how_often_a_save_is_made_is_what_rank_0_says(job: Job) -> None:
    """Ranks that counted differently would never save the same step."""
    gang = finish(job.write(TINY).gang(2, each={0: {"EVERY": "4"}, 1: {"EVERY": "3"}}))

    assert job.ckpts() == ["000001-000000000004", "000001-000000000008"], gang.text


SAVES = """
time.sleep(0.3)
print("saved", migrator.save_ckpt())
"""


def test_a_save_asked_for_comes_before_one_that_is_ordered_ahead(job: Job) -> None:
    """The script stands still until it is made, so that the step of the other one would never come."""
    gang = finish(job.write(TINY.replace("# end\n", SAVES)).gang(2, EVERY="5", STEPS="4"))

    assert gang.text.count("\nsaved 000001-000000000004\n") == 2, gang.text
    assert job.ckpts() == ["000001-000000000004"]


SLOW_COMMIT = """
from migrator.save.attempt import Attempt
commit = Attempt.commit

def slowly(self):
    time.sleep(0.3)
    return commit(self)

Attempt.commit = slowly
"""


def test_asked_for_by_all_and_gone_on_at_once(job: Job) -> None:
    """The order of a slower rank is no other save than the one a quicker rank has made its share of already."""
    script = (
        TINY.replace("# end\n", "time.sleep(0.5)\n")
        .replace("# watch\n", SLOW_COMMIT)
        .replace(
            'state["step"] += 1', 'state["step"] += 1; migrator.save_ckpt(wait=False) if state["step"] == 5 else None'
        )
    )
    gang = finish(job.write(script).gang(2, STEPS="40"))

    assert job.ckpts() == ["000001-000000000005"], gang.text
    assert not gang.events("save_retry"), gang.text


def test_a_slow_load_is_no_sign_of_death(job: Job) -> None:
    """A rank that reads for longer than a silent one is waited for is heard all the while."""
    slow = """
import migrator.ranks.peers
import migrator.session.restore
migrator.ranks.peers.GONE_S = 1.5
read = migrator.session.restore.read

def slowly(*args):
    time.sleep(4.0 if os.environ["RANK"] == "1" else 0.0)
    return read(*args)

migrator.session.restore.read = slowly
"""
    script = TINY.replace(
        "make = dict\n",
        "make = dict\n"
        + slow.replace("migrator.", "ours.").replace(
            "import ours.ranks.peers\nimport ours.session.restore\n",
            "import migrator.ranks.peers, migrator.session.restore\nimport sys\nours = sys.modules['migrator']\n",
        ),
    )
    finish(job.write(script).gang(2, EVERY="4"))
    again = finish(job.write(script).gang(2))

    assert len(again.events("loaded")) == 2, again.text
