"""A healthy run is never disturbed: by its own children, by other owners of signals, or by how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT, Job, Process, until

SCRIPT = """
import asyncio
import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import torch
from migrator import migrator

state = {"step": 0}
migrator.register("state", state)

def train(steps):
    for _ in range(steps):
        state["step"] += 1
        migrator.safe_point()
        print(f"step {state['step']}\\n", end="")

def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

# before
migrator.listening()
train(5)
# body
train(5)
time.sleep(0.05)  # for notice that would be none of ours
print("done")
"""


def write(job: Job, body: str, *, before: str = "") -> Job:
    """A short run with this in its middle, and this before `listening()`."""
    return job.write(SCRIPT.replace("# before\n", before).replace("# body\n", body))


def finish(run: Process) -> str:
    """The text of a run that ended as if we were not there."""
    assert run.wait() == 0, run.text
    assert "\ndone\n" in run.text, run.text
    assert not run.events("signal"), run.text
    assert "Traceback" not in run.text
    return run.text


# Children.

FORKED = """
codes = set()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(99)
    os.kill(pid, signal.SIGTERM)
    codes.add(code_of(pid))
    train(1)
print("children", codes)
"""


def test_sigterm_to_a_forked_child_is_not_our_notice(job: Job) -> None:
    """It dies of it, however early it comes; the parent, whose wakeup pipe it inherited, trains on."""
    text = finish(write(job, FORKED).run())

    assert "children {-15}" in text


BUFFERS = """
from migrator.storage import direct_io

memory = direct_io._memory(1 << 20)
memory[:4] = b"save"
pid = os.fork()
if pid == 0:
    os._exit(memory[:4] != bytes(4))
print("child", code_of(pid), "parent", bytes(memory[:4]))
"""


def test_a_forked_child_does_not_share_the_buffers_of_large_files(job: Job) -> None:
    """A loader's workers. The next save would copy each shared page, to a single one, before it writes it."""
    assert "child 0 parent b'save'" in finish(write(job, BUFFERS).run())


FORKED_AND_SAVES = """
pid = os.fork()
if pid == 0:
    try:
        migrator.save_ckpt()
    except BaseException as error:
        print(f"child {type(error).__name__}: {error}\\n", end="", flush=True)
        os._exit(7)
    os._exit(0)
print("code", code_of(pid))
print("saved", migrator.save_ckpt())
"""


def test_a_forked_child_that_saves_is_told_that_it_cannot(job: Job) -> None:
    """Nobody would answer it there. The parent saves as before."""
    text = finish(write(job, FORKED_AND_SAVES).run())
    assert "child UsageError: save_ckpt() was called in a forked child" in text
    assert "\ncode 7\n" in text
    assert "\nsaved 000001-" in text


MULTIPROCESSING = """
context = multiprocessing.get_context("fork")
process = context.Process(target=time.sleep, args=(60,))
process.start()
process.terminate()
process.join()
train(1)
pool = context.Pool(2)
assert pool.map(abs, [-1, -2]) == [1, 2]
pool.terminate()
pool.join()
ended = context.Process(target=sys.exit, args=(4,))
ended.start()
ended.join()
print("codes", process.exitcode, ended.exitcode)
print("signal file", open(os.environ["MIGRATOR_SIGNAL"]).read().split())
"""


def test_children_of_multiprocessing_end_as_they_are_told(job: Job) -> None:
    """`Process.terminate`, `Pool.terminate`, a normal end: none of them is notice, none takes the signal file away."""
    run = write(job, MULTIPROCESSING).run()
    text = finish(run)

    assert "codes -15 4" in text
    assert f"signal file ['init', 'pids={run.pid}', " in text


ENDING = """
pid = os.fork()
if pid == 0:
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    sys.exit(5)
assert code_of(pid) == 5
other = os.fork()
if other == 0:
    raise RuntimeError("in the child")
assert code_of(other) == 1
assert os.path.exists(os.environ["MIGRATOR_SIGNAL"])
print("ready")
while True:
    train(1)
    time.sleep(0.002)
"""


def test_a_child_that_ends_takes_nothing_with_it(job: Job) -> None:
    """It runs the interpreter's whole end, atexit and all; afterwards the parent still hears and saves."""
    job.whole_end = True
    run = write(job, ENDING).run()
    run.wait_for("^ready$")
    run.kill()

    assert run.wait() == 143, run.text
    assert len(run.events("committed")) == 1
    assert job.signal.read_text().startswith("resume\n")


TRAINING_CHILD = """
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.grad = torch.ones(1)
optimizer.step()
train(1)
pid = os.fork()
if pid == 0:
    for _ in range(3):
        optimizer.step()
    os._exit(int(-weight.item()))
print("child stepped", code_of(pid), weight.item())
"""


def test_a_child_may_step_an_optimizer(job: Job) -> None:
    """There is no gate in it, nobody saves it and nothing waits."""
    assert "child stepped 4 -1.0" in finish(write(job, TRAINING_CHILD).run())


LOADER = """
from torch.utils.data import DataLoader
for persistent in (False, True):
    loader = DataLoader(range(40), batch_size=2, num_workers=2, persistent_workers=persistent)
    for batch in migrator.batches(loader):
        train(1)
        if batch[0] == 20:
            break
    assert sum(1 for _ in migrator.batches(loader)) == 20
    del loader
"""


def test_loader_workers_come_and_go(job: Job) -> None:
    """Their start, their end by the loader, and a loop left in the middle are nothing to us."""
    finish(write(job, LOADER).run())


SUBPROCESS = """
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print("code", child.wait())

def status(**how):
    lines = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, **how).stdout.splitlines()
    masks = dict(line.split(":") for line in lines if line.startswith("Sig"))
    return [int(masks[name], 16) >> (signal.SIGTERM - 1) & 1 for name in ("SigBlk", "SigIgn", "SigCgt")]

print("plain", status(), "forked", status(preexec_fn=lambda: None))
pid = os.fork()
if pid == 0:
    is_blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    print("child", is_blocked, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    sys.stdout.flush()
    os._exit(0)
code_of(pid)
"""


def test_other_programs_start_with_ordinary_signals(job: Job) -> None:
    """SIGTERM is neither blocked nor ignored in them, and ends them; a forked child has its default again."""
    text = finish(write(job, SUBPROCESS).run())

    assert "code -15" in text
    assert "plain [0, 0, 0] forked [0, 0, 0]" in text
    assert "child False True" in text


# Other owners of signals.

CHILD_OF_A_SAVE = """
from migrator.storage.posix import PosixStorage
put = PosixStorage.put
holds, go = threading.Event(), threading.Event()

def held(self, name, data, **how):
    if name.endswith("manifest.json"):
        holds.set()
        go.wait()
    put(self, name, data, **how)

PosixStorage.put = held
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.grad = torch.ones(1)
os.kill(os.getpid(), signal.SIGTERM)
holds.wait()
pid = os.fork()
if pid == 0:
    optimizer.step()
    os._exit(int(-weight.item()))
print("child stepped", code_of(pid))
go.set()
time.sleep(60)
"""


def test_a_child_forked_while_a_save_is_under_way_does_not_wait_for_it(job: Job) -> None:
    """The parent's gate is shut and stays so; the thread that would open it is not in the child."""
    run = write(job, CHILD_OF_A_SAVE).run()

    assert run.wait() == 143, run.text
    assert "\nchild stepped 1\n" in run.text
    assert len(run.events("committed")) == 1


ASYNCIO = """
import glob

def heard():
    print("usr1 heard\\n", end="")

async def main():
    loop = asyncio.get_running_loop()
    if STEAL == "before":
        loop.add_signal_handler(signal.SIGUSR1, heard)
        migrator.listening()
    else:
        migrator.listening()
        loop.add_signal_handler(signal.SIGUSR1, heard)
        loop.add_signal_handler(signal.SIGTERM, heard)
    while True:
        train(1)
        await asyncio.sleep(0.002)

asyncio.run(main())
"""


@pytest.mark.parametrize("steal", ["before", "after"])
def test_asyncio_may_own_the_wakeup_fd(job: Job, steal: str) -> None:
    """It takes the pipe for itself; the next safe point takes it back, and both go on hearing their signals."""
    head = SCRIPT.partition("# before")[0]
    run = job.write(head + f"STEAL = {steal!r}\n" + ASYNCIO).run()
    run.wait_for("^step 5$")
    run.kill(signal.SIGUSR1)
    run.wait_for("^usr1 heard$")
    assert not run.events("signal")
    run.kill()

    assert run.wait() == 143, run.text
    assert len(run.events("committed")) == 1


HUNG = """
import ctypes
lock = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    train(1)
    print("hangs\\n", end="")
    libc.pthread_mutex_lock(lock)  # for ever, and no signal handler of Python's runs meanwhile

asyncio.run(main())
"""


def test_a_main_thread_that_hangs_in_c_is_saved_though_asyncio_took_the_wakeup_fd(job: Job) -> None:
    """Only the interpreter's own C handler still runs, so the fd must be ours again."""
    run = write(job, HUNG).run()
    run.wait_for("^hangs$")
    run.kill()

    run.wait_for("migrator rank 0: committed ckpt=000001-000000000006 ")
    assert run.wait() == 143, run.text


HANDLER = """
def on_sigterm(number, frame):
    print("the script's own handler\\n", end="")
    ENDING
signal.signal(signal.SIGTERM, on_sigterm)
"""
FOR_EVER = """
while True:
    train(1)
    time.sleep(0.002)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise RuntimeError('now')"])
def test_the_scripts_own_handler_is_kept_and_called(job: Job, when: str, ending: str) -> None:
    """Set before or after `listening()`: it runs as well, but it cannot end the process before the save."""
    handler = HANDLER.replace("ENDING", ending)
    body = FOR_EVER if when == "before" else handler + FOR_EVER
    run = write(job, body, before=handler if when == "before" else "").run()
    run.wait_for("^step 20$")
    run.kill()

    assert run.wait() == 143, run.text
    assert "\nthe script's own handler\n" in run.text
    assert len(run.events("handler_held_back")) == (ending != "pass")
    assert len(run.events("committed")) == 1


OTHERS = """
got = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGWINCH):
    signal.signal(number, lambda number, frame: got.append(number))
    os.kill(os.getpid(), number)
train(1)
print("got", len(got))
"""


def test_other_signals_are_somebody_elses(job: Job) -> None:
    """Only SIGTERM says that the pod must leave, though all of them come through the same pipe."""
    assert "got 5" in finish(write(job, OTHERS).run())


# How a run ends.


def test_a_clean_end_takes_the_signal_file_away(job: Job) -> None:
    """A hook that comes later finds that there is nobody to wait for."""
    run = write(job, "print('file', os.path.exists(os.environ['MIGRATOR_SIGNAL']))\n").run()

    assert "file True" in finish(run)
    assert not job.signal.exists()


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("raise RuntimeError('mine')", 1), ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT)],
)
def test_a_run_that_ends_by_itself_ends_with_its_own_code(job: Job, ending: str, code: int) -> None:
    """An exit code, an exception, Ctrl-C: none of them becomes 143, and the signal file goes all the same."""
    run = write(job, f"{ending}\ntime.sleep(60)\n").run()

    assert run.wait() == code, run.text
    assert not job.signal.exists()
    assert not run.events("leaving")


MANY = """
import gc
import os
import signal
import sys
import time
import torch
from migrator import migrator

mode, count = sys.argv[1], int(sys.argv[2])
gc.collect()
gc.freeze()  # what the children did not make they need not clear away
codes = {}
for number in range(count):
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        break
    os.close(tell)
    if mode == "sigterm":
        os.read(ready, 1)
        time.sleep(number / count * 0.16)  # the interpreter's end takes most of 0.2 s
        os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    codes[code] = codes.get(code, 0) + 1
    os.close(ready)
else:
    print("codes", codes)
    os._exit(0)

state, weights = {"step": 0}, torch.zeros(1000)
migrator.register("state", state)
migrator.register("weights", weights)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
for _ in range(5):
    state["step"] += 1
    weights += 1
    migrator.safe_point()
if number % 3 == 0:
    migrator.save_ckpt(wait=number % 2 == 0)
os.write(tell, b".")
"""


def _codes(run: Process) -> dict[int, int]:
    assert run.wait(280) == 0, run.text
    found = json.loads(
        run.wait_for(r"^codes (\{.*\})$")[1].replace("{", '{"').replace(": ", '": ').replace(", ", ', "')
    )
    return {int(code): count for code, count in found.items()}


def _many(job: Job, mode: str, count: int) -> list[Process]:
    """As many processes as there are cores here, each with a job of its own and this many runs of it."""
    job.write(MANY).whole_end = True
    return [
        job.run(mode, str(count), MIGRATOR_JOB=f"job{i}", MIGRATOR_SIGNAL=str(job.directory / f"pod{i}" / "signal"))
        for i in range(2)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("each", [8, pytest.param(50, marks=pytest.mark.long)])
def test_a_finished_run_exits_0_every_time(job: Job, each: int) -> None:
    """Through the interpreter's whole end, with or without a save under way: no thread of ours is in its way."""
    runs = _many(job, "finish", each)

    assert [_codes(run) for run in runs] == [{0: each}, {0: each}], runs[0].text + runs[1].text
    assert all("Traceback" not in run.text and "save_failed" not in run.text for run in runs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("each", [8, pytest.param(40, marks=pytest.mark.long)])
def test_sigterm_while_a_run_finishes_is_no_failure(job: Job, each: int) -> None:
    """At any moment of its end it is either finished or has left: 0 or 143, never an abort or an error."""
    runs = _many(job, "sigterm", each)

    for run in runs:
        codes = _codes(run)
        assert codes.keys() <= {0, 143}, run.text
        assert "Traceback" not in run.text


LEAKS = """
import gc

def threads():
    return sorted(thread.name for thread in threading.enumerate())

def files():
    return sorted(os.listdir("/proc/self/fd"), key=int)

def show(what, value):
    print(what, json.dumps(value))

def idle():  # old ckpts are deleted behind the answer
    while migrator._session._saver.is_busy:
        time.sleep(0.001)
"""


def test_nothing_is_leaked(job: Job) -> None:
    """A hundred saves leave as many open files and threads as there were; at the end no thread of ours is left."""
    before = LEAKS + "atexit.register(lambda: show('at the end', threads()))\nshow('at first', threads())\n"
    body = """
migrator.save_ckpt()
idle()
one = files(), threads()
for _ in range(100):
    train(1)
    migrator.save_ckpt()
idle()
show("after one", one)
show("after many", (files(), threads()))
"""
    text = finish(write(job, body, before=before).run())
    shown = {
        line.partition(" [")[0]: json.loads(line[line.index("[") :]) for line in text.splitlines() if "[" in line[:12]
    }

    assert shown["after many"] == shown["after one"]
    assert {"migrator-watcher", "migrator-saver"} <= set(shown["after one"][1])
    assert shown["at the end"] == shown["at first"]


FAILING = """
migrator.save_ckpt()
job = os.environ["MIGRATOR_CKPT"] + "/default"
os.rename(job, "away")
open(job, "w").close()
while not os.path.exists("enough"):
    train(1)
    time.sleep(0.002)
os.remove(job)
os.rename("away", job)
train(5)
print("saved", migrator.save_ckpt())
"""


def test_a_periodic_save_that_fails_does_not_end_the_training(job: Job) -> None:
    """It is told each time, the ckpt before stays what it was, and when there is room again it is saved."""
    run = write(job, FAILING).run(MIGRATOR_EVERY="5")
    until(lambda: len(run.events("save_failed")) >= 3, "three failures", context=lambda: run.text)
    (job.directory / "enough").touch()
    text = finish(run)

    first = run.events("committed")[0]["ckpt"]
    for event in run.events("save_failed"):
        assert "A part of the path is a file; name a directory (MIGRATOR_CKPT)." in event["why"]
        assert event["before"] == first
    assert text.rpartition("\nsaved ")[2].split()[0] in job.ckpts()
    assert "no memory for a copy" not in text


# The import.

PROBE = """
import os
import sys
import threading

class Spy(dict):
    def _told(self, name):
        print("reads", name)
    def __getitem__(self, name):
        self._told(name)
        return super().__getitem__(name)
    def get(self, name, default=None):
        self._told(name)
        return super().get(name, default)
    def __contains__(self, name):
        self._told(name)
        return super().__contains__(name)

def opened(event, details):
    if event == "open" and not str(details[0]).endswith((".py", ".pyc", ".so")):
        print("opens", details[0])
    if event in ("subprocess.Popen", "os.fork", "socket.connect", "os.mkdir", "_thread.start_new_thread"):
        print("does", event)

WARM
before = set(sys.modules), threading.enumerate(), len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
os.environ = Spy(os.environ)
sys.addaudithook(opened)
IMPORT
os.environ = dict(os.environ)
after = set(sys.modules), threading.enumerate(), len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
assert before[1:] == after[1:], (before[1:], after[1:])
print("modules", *sorted(after[0] - before[0]))
"""


def _probe(what: str, *, warm: str = "") -> tuple[set[str], list[str]]:
    """Modules that an import brought, and what else it did."""
    code = PROBE.replace("WARM", warm).replace("IMPORT", what)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *acts, last = done.stdout.splitlines()
    return set(last.split()[1:]), acts


def test_a_bare_import_does_next_to_nothing() -> None:
    """`import migrator` brings no module but its own and those of typing: no thread, no file, no environment."""
    modules, acts = _probe("import migrator")

    # Listing the directories that those lie in is Python's own doing.
    assert [act for act in acts if not act.startswith("opens /proc")] == []
    assert {name for name in modules if name.split(".")[0] == "migrator"} == {"migrator"}
    assert not modules - {"migrator"} & {"torch", "numpy", "logging", "threading", "watchdog", "tqdm"}
    assert all(name.split(".")[0] in ("migrator", "typing", "_typing", "collections") for name in modules)


def test_taking_the_instance_brings_only_what_training_has_anyway() -> None:
    """With torch there already, what comes with `from migrator import migrator` is small and still does nothing."""
    warm = "import numpy, torch, torch.utils.data, logging"
    modules, acts = _probe("from migrator import migrator, ElasticSampler", warm=warm)

    assert [act for act in acts if not act.startswith("opens /proc")] == []
    assert {name.split(".")[0] for name in modules} <= {"migrator", "xxhash", "numpy"}
    assert len([name for name in modules if not name.startswith("migrator")]) < 10


# Where it may be called.


TWICE = """
try:
    migrator.listening()
except Exception as error:
    print("twice:", type(error).__name__, error)
"""


def test_listening_twice_is_refused_and_harmless(job: Job) -> None:
    """One life listens once; the first goes on."""
    assert "twice: UsageError listening() was called already: once is enough." in finish(write(job, TWICE).run())


def test_a_root_and_a_signal_file_that_are_not_there_are_made(job: Job, tmp_path: Path) -> None:
    """Nothing has to be prepared on a fresh volume or in a fresh container."""
    deep = tmp_path / "not" / "there"
    finish(
        write(job, "migrator.save_ckpt()\n").run(MIGRATOR_CKPT=str(deep / "a"), MIGRATOR_SIGNAL=str(deep / "b" / "c"))
    )

    assert len(list(deep.glob("a/default/*/manifest.json"))) == 1
    assert [path.name for path in (deep / "b").iterdir()] == ["c.ended"]
