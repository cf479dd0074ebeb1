"""Notice that come before `listening()` is through: nothing is trained, and the process leaves with its exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from migrator.notice.signal_file import INIT, RESUME, SAVE, SignalFile
from migrator.platform.container import container_life
from tests.support.harness import ROOT, Job, Process, until
from tests.support.rank_processes import Gang

EARLY = """
import os
import signal
import sys
import time
import migrator

def wait_for(name):
    print(f"waits for {name}\\n", end="")
    while not os.path.exists(name):
        time.sleep(0.002)

if "watches" in sys.argv:
    migrator.watch()
wait_for("listen")
import torch
from migrator import migrator

state, weights = {"step": 0}, torch.zeros(1000)
migrator.register("state", state)
migrator.register("weights", weights)
migrator.watch()
if "own handler" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: print("the script's own handler\\n", end=""))
try:
    migrator.listening(every="off")
except Exception as error:
    print(type(error).__name__, error)
    ended = {signal.SIG_DFL: "default", signal.SIG_IGN: "ignored"}.get(signal.getsignal(signal.SIGTERM))
    print("SIGTERM is", ended, "and wakes", signal.set_wakeup_fd(-1))
    sys.exit(1)
print("listens\\n", end="")
if migrator.resume:
    migrator.load_ckpt()
while state["step"] < int(os.environ.get("STEPS", 10**9)):
    state["step"] += 1
    weights += 1
    migrator.safe_point()
    print(f"step {state['step']}\\n", end="")
    time.sleep(0.002)
"""


@pytest.fixture
def early(job: Job) -> Job:
    """A script that waits at its top until the file `listen` lies beside it."""
    return job.write(EARLY)


def let(job: Job, name: str = "listen") -> None:
    (job.directory / name).touch()


def ask(job: Job, **fields: object) -> None:
    """What a hook writes."""
    given = {"request": "r-1", "deadline": time.time() + 20, "container": container_life(), **fields}
    SignalFile(job.signal).write(SAVE, **given)


def assert_left(life: Process, *, source: str) -> None:
    """With the exit code, before a step, and without a trace on the volume."""
    assert life.wait() == 143, life.text
    assert "listens" not in life.text
    assert not re.search(r"^step ", life.text, re.MULTILINE), life.text
    assert [event["source"] for event in life.events("signal")] == [source], life.text
    assert not life.events("generation_claimed")


def trained(job: Job) -> str:
    """A life that was stopped while it trained; the ckpt that it left."""
    let(job)
    life = job.run()
    life.wait_for("^step 10$")
    life.kill()
    assert life.wait() == 143, life.text
    (job.directory / "listen").unlink()
    (ckpt,) = job.ckpts()
    return ckpt


# Before listening().


def test_sigterm_before_listening_is_kept_by_watch(early: Job) -> None:
    """Noticed at the top of the script, and the process leaves when it comes to listening()."""
    ckpt = trained(early)
    life = early.run("watches")
    life.wait_for("^waits for listen")
    life.kill()
    life.wait_for("signal_early")
    let(early)

    assert_left(life, source="SIGTERM")
    said = SignalFile(early.signal).read()
    assert said is not None
    assert (said.word, said.fields["ckpt"]) == (RESUME, ckpt)
    # The life that goes on has the number after that of the first: it is not kept from deleting by one that never was.
    last = early.run(STEPS="20")
    assert last.wait() == 0, last.text
    assert [event["continues"] for event in last.events("generation_claimed")] == ["1"]


def test_a_request_before_listening_is_kept_whoever_watches(early: Job) -> None:
    """The hook left it and went. It is answered all the same: another hook may ask."""
    ask(early)
    let(early)
    life = early.run()

    assert_left(life, source='"signal file"')
    said = SignalFile(early.signal).read()
    assert said is not None
    assert (said.word, said.fields["request"]) == (INIT, "r-1")
    assert said.fields["error"] == "nothing to save: nothing was trained yet"


def test_a_request_is_noticed_by_watch_as_it_comes(early: Job) -> None:
    """Not only at listening(): the log tells when it came."""
    life = early.run("watches")
    life.wait_for("^waits for listen")
    ask(early)
    life.wait_for("signal_early")
    let(early)

    assert_left(life, source='"signal file"')


@pytest.mark.parametrize("fields", [{"container": "another/1"}, {"deadline": 1}], ids=["another container", "over"])
def test_a_request_that_is_not_ours_any_more_disturbs_nobody(early: Job, fields: dict[str, object]) -> None:
    """That of the container before this one, or one whose deadline is over."""
    ask(early, **fields)
    let(early)
    life = early.run("watches", STEPS="3")

    assert life.wait() == 0, life.text
    assert "step 3" in life.text


def test_a_watched_script_that_nobody_tells_anything_is_as_without_it(early: Job) -> None:
    """It trains, is saved, and leaves; its own handler is still called."""
    let(early)
    life = early.run("watches", "own handler")
    life.wait_for("^step 10$")
    life.kill()

    assert life.wait() == 143, life.text
    assert "the script's own handler" in life.text
    assert len(early.ckpts()) == 1


WATCH = """
import multiprocessing, signal, sys, threading
import migrator
migrator.watch()
migrator.watch()
assert "torch" not in sys.modules
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("a child",))
    child.start()
    child.join()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    print("threads", sum(thread.name == "migrator-watcher" for thread in threading.enumerate()))
else:
    print("in a child SIGTERM is", signal.getsignal(signal.SIGTERM).name, flush=True)
"""


def test_watch_needs_no_torch_and_leaves_children_alone(tmp_path: Path) -> None:
    """A child of multiprocessing imports the script again; it has to end when it is terminated."""
    script = tmp_path / "script.py"
    script.write_text(WATCH)
    env = {"PYTHONPATH": str(ROOT), "MIGRATOR_SIGNAL": str(tmp_path / "pod" / "signal")}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["in a child SIGTERM is SIG_DFL", "a child", "threads 1"]
    assert not (tmp_path / "pod" / "signal").exists()


def test_watch_names_settings_that_cannot_be_used(early: Job) -> None:
    """At once, not minutes later in listening()."""
    life = early.run("watches", MIGRATOR_GRACE_S="soon", MIGRATOR_SIGNAL="~/signal")

    assert life.wait() == 1
    assert "MIGRATOR_GRACE_S is 'soon'" in life.text
    assert "MIGRATOR_SIGNAL is '~/signal'" in life.text


# In listening().


@pytest.mark.parametrize("how", ["SIGTERM", "signal file"])
def test_notice_end_the_wait_for_a_life_that_saves(early: Job, how: str) -> None:
    """The life before may take its whole grace; this one does not train any more and has nothing to wait for."""
    ckpt = trained(early)
    mark = early.root / "default" / "generations" / "000001.leaving"
    mark.write_text(json.dumps({"grace_s": 600}))
    let(early)
    life = early.run()
    life.wait_for("waiting_for_leaving")
    said = SignalFile(early.signal).read()
    assert said is not None
    assert (said.word, said.pids) == (INIT, (life.pid,))  # a hook that comes now asks, and waits for the answer

    if how == "SIGTERM":
        life.kill()
    else:
        ask(early)

    assert life.wait(10) == 143, life.text
    assert "listens" not in life.text
    said = SignalFile(early.signal).read()
    assert said is not None
    assert (said.word, said.fields["ckpt"]) == (RESUME, ckpt)
    mark.unlink()


HANGS = """
from migrator.storage.posix import PosixStorage

def check(self):
    print("hangs\\n", end="")
    time.sleep(60)

PosixStorage.check = check
"""


def test_listening_that_hangs_does_not_outlive_the_grace(early: Job) -> None:
    """As on a volume that does not answer: the process ends just before SIGKILL would end it."""
    early.write(EARLY.replace("import torch\n", f"import torch\n{HANGS}"))
    let(early)
    life = early.run(MIGRATOR_GRACE_S="1")
    life.wait_for("^hangs")
    life.kill()

    assert life.wait(20) == 143, life.text
    (event,) = life.events("left_hard")
    assert event["why"] == '"listening() was not over at the end of the grace"'


def test_deadlines_that_end_at_once_are_one_end(early: Job) -> None:
    """Two notices have a guard each: the log has one line, and it is written."""
    early.write(
        """
import sys, threading, time
from migrator.leaving.leaving import Leaving
from migrator.notice.sigterm import Sigterm
from migrator import events
events.ensure_visible()
class Slow:
    def write(self, text): pass
    def flush(self): time.sleep(0.2)
sys.stdout = Slow()
leaving, begin = Leaving(sigterm=Sigterm(), exit_code=143), threading.Barrier(8)
def end():
    begin.wait()
    leaving.exit_now("the end of the grace")
threads = [threading.Thread(target=end) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    )
    life = early.run()

    assert life.wait(20) == 143, life.text
    assert len(life.events("left_hard")) == 1


def test_listening_that_fails_leaves_nothing_behind(early: Job) -> None:
    """SIGTERM does what it did before, and no hook waits for a process that does not listen."""
    early.root.write_text("a file where the root should be")
    let(early)
    life = early.run()

    assert life.wait() == 1, life.text
    assert "StorageForeignError" in life.text
    assert "SIGTERM is default and wakes -1" in life.text
    assert not early.signal.exists()


def test_listening_that_fails_in_a_pod_that_leaves_is_no_failure_of_the_job(early: Job) -> None:
    """The exit code still says: start me again. The hook hears why nothing was saved."""
    early.root.write_text("a file where the root should be")
    ask(early)
    let(early)
    life = early.run()

    assert life.wait() == 143, life.text
    said = SignalFile(early.signal).read()
    assert said is not None
    assert (said.word, said.fields["request"]) == (INIT, "r-1")
    assert "listening() failed" in said.fields["error"]


def test_listening_that_fails_in_a_pod_that_leaves_waits_for_its_agent(early: Job) -> None:
    """An agent would start the rank again at once, inside the dying pod, as often as it may."""
    early.root.write_text("a file where the root should be")
    ask(early)
    let(early)
    life = early.run(TORCHELASTIC_RUN_ID="tests")
    life.wait_for("leaving why=")
    with pytest.raises(AssertionError, match="still running"):
        life.wait(0.5)
    life.kill()

    assert life.wait() == 143, life.text


# Several ranks.


def hears_sigterm(life: Process) -> bool:
    """It has a handler."""
    status = Path(f"/proc/{life.pid}/status").read_text()
    return bool(int(re.findall(r"^SigCgt:\s+(\S+)", status, re.MULTILINE)[0], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("told", [0, 1])
def test_a_rank_that_is_told_while_it_waits_for_the_others_leaves_with_them(job: Job, told: int) -> None:
    """It is in the middle of a collective; the other one has still to come, and must not begin to train."""
    job.use(ROOT / "tests" / "support" / "scripts" / "podded.py")
    job.root.mkdir()
    gang: Gang = job.gang(2, pods=2, each={1 - told: {"HOLD": "listen"}})
    gang.wait_for("^begins to listen$", ranks=[told])
    until(lambda: hears_sigterm(gang[told]), "the handler")
    gang.kill(ranks=[told])
    gang.wait_for("signal_early", ranks=[told])
    (job.root / "go").touch()

    assert gang.wait() == [143, 143], gang.text
    assert not re.search(r"^(resumed|trained) ", gang.text, re.MULTILINE), gang.text
    assert list(job.root.glob("*/generations/*.json")) == []


def test_a_rank_whose_others_never_come_leaves_alone_at_the_end_of_its_grace(job: Job) -> None:
    """It cannot tell them; they see that a rank is lost."""
    job.use(ROOT / "tests" / "support" / "scripts" / "podded.py")
    job.root.mkdir()
    gang: Gang = job.gang(2, pods=2, each={1: {"HOLD": "listen"}}, MIGRATOR_GRACE_S="1")
    gang.wait_for("^begins to listen$", ranks=[0])
    until(lambda: hears_sigterm(gang[0]), "the handler")
    gang.kill(ranks=[0])

    assert gang[0].wait(20) == 143, gang.text
    assert [event["why"] for event in gang[0].events("left_hard")]
    (job.root / "go").touch()
    assert gang[1].wait() not in (0, 143), gang.text


# The signal file.
