"""Whatever the hook finds in its pod: its exit code, what it says, what it logs, and that it is never late.

The trainers here are real ones, the shells too. What a trainer may answer, word by word, is in `pods/test_hooks.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from migrator.notice.signal_file import INIT, RESUME, SAVE, Signal, SignalFile
from tests.pods.test_hooks import SHELLS, ended, wait_until
from tests.pods.test_hooks import Pod as Container
from tests.support import chance
from tests.support.harness import ROOT, ForkServer, Job, Process, until
from tests.support.rank_processes import state_of

pytestmark = pytest.mark.processes

TRAIN = """
import os
import time
import torch

def wait_for(name):
    print(f"waits for {name}\\n", end="")
    while not os.path.exists(name):
        time.sleep(0.002)

if os.environ.get("STARTS_LATE"):
    wait_for("listen")

from migrator import migrator
from migrator.ckpt import piece_digests as parts
from migrator.save import attempt as saving
from migrator.ranks import shares as sharing
from migrator.errors import StorageError
from migrator.save.progress import ForHook
from migrator.storage.posix import PosixStorage

class Slow(dict):  # storage that takes its time for each MB
    write_part, write = staticmethod(saving.write_part), ForHook._write

    def write_slowly(*args, after_block, **more):
        def after(done, total):
            time.sleep(float(os.environ["BLOCK_S"]))
            after_block(done, total)
        return Slow.write_part(*args, after_block=after, **more)

    def told(self, done, total):
        print("tells the hook\\n", end="")
        Slow.write(self, done, total)

if os.environ.get("BLOCK_S"):
    parts.GROUP = sharing.SHARE_BYTES = 1
    saving.write_part, ForHook._write = Slow.write_slowly, Slow.told

put = PosixStorage.put
def commit(self, name, data, **how):
    if name.endswith("manifest.json") and os.environ.get("HOLD_COMMIT"):
        wait_for("commit")
    if name.endswith("manifest.json") and os.environ.get("FAIL_COMMIT"):
        raise StorageError(os.environ["FAIL_COMMIT"], errno=30)
    put(self, name, data, **how)
PosixStorage.put = commit

if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    torch.distributed.init_process_group("gloo")
state = {"step": 0}
weights = torch.nn.ParameterList(torch.zeros(250_000) for _ in range(int(os.environ.get("MB", "1"))))
optimizer = torch.optim.SGD(weights, lr=1.0)
for weight in weights:
    weight.grad = torch.ones_like(weight)
migrator.register("state", state)
migrator.register("weights", weights)
migrator.register("optimizer", optimizer)
migrator.listening(every="off")
print("listens\\n", end="")
if os.environ.get("LOADS_LATE"):
    wait_for("load")
if migrator.resume:
    migrator.load_ckpt()
    print(f"loaded {state['step']}\\n", end="")
if os.environ.get("TRAINS_LATE"):
    wait_for("train")
while state["step"] < int(os.environ.get("STEPS", 10**9)):
    state["step"] += 1
    optimizer.step()
    migrator.safe_point()
    print(f"step {state['step']}\\n", end="")
    time.sleep(0.005)
"""
WHEN = r"2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d \S+ "
SAVING = "saving ckpts..."
FINISH = "finish ckpts!"


@pytest.fixture(params=chance.some("shells", SHELLS, 0.3))
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Container]:
    """A container, with a blank in each of its paths."""
    name = str(request.param)
    if shutil.which(name.split(maxsplit=1)[0]) is None:
        pytest.skip(f"LOUD: {name.split(maxsplit=1)[0]} is missing, so the hooks are not tested under it")
    (tmp_path / "a pod").mkdir()
    container = Container(tmp_path / "a pod", name)
    container.settings["MIGRATOR_GRACE_S"] = "20"
    yield container
    container.close()


@pytest.fixture
def job(pod: Container, fork_server: ForkServer) -> Iterator[Job]:
    """The training script of that container."""
    made = Job(fork_server, pod.directory).write(TRAIN)
    made.signal = pod.file.path
    yield made
    made.end()


def stop(pod: Container, code: int, reason: str, *, asks: bool, within_s: float | None = None) -> None:
    """Run the hook: exit code, standard error and the log are of one mind, and it ends in time."""
    before, start_s = len(pod.log), time.monotonic()

    found, said = pod.stop()

    took_s = time.monotonic() - start_s
    assert (found, said) == (code, f"preStop: {reason}\n" if code else "")
    first, *lines = pod.log[before:]
    assert first.startswith("stop: ")
    assert [re.sub(f"^{WHEN}", "", line) for line in lines] == [SAVING, reason][not asks :]
    assert took_s < (within_s or float(pod.settings["MIGRATOR_GRACE_S"]))


def saved(pod: Container, *, asks: bool = True, within_s: float | None = None) -> Signal:
    """The hook ends with 0; the answer that it found."""
    stop(pod, 0, FINISH, asks=asks, within_s=within_s)
    answer = pod.file.read()
    assert answer is not None
    assert answer.word == RESUME
    return answer


def training(job: Job, **env: str) -> Process:
    life = job.run(**env)
    life.wait_for(r"^step \d+[02468]$")
    return life


def let(job: Job, name: str) -> None:
    (job.directory / name).touch()


# Nobody to ask.

LEFT = "; a trainer that begins to listen before the grace is over leaves at once"


def nobody(pod: Container) -> str:
    return (
        f"no trainer listens: there is no signal file at {pod.file.path}, "
        f"or nothing in it that a trainer of this container wrote{LEFT}"
    )


def test_no_trainer(pod: Container) -> None:
    """The container has none, or it has not come as far: there is nothing to wait for."""
    stop(pod, 3, nobody(pod), asks=False, within_s=2)


def test_a_trainer_that_has_finished(pod: Container, job: Job) -> None:
    """It took the signal file away; nothing is left to save."""
    assert job.run(STEPS="3").wait() == 0

    stop(pod, 3, nobody(pod), asks=False, within_s=2)


def test_a_trainer_that_has_crashed(pod: Container, job: Job) -> None:
    """Its signal file is still there and names a process that is not."""
    life = training(job)
    life.kill(signal.SIGKILL)
    life.wait()

    stop(pod, 3, f"no trainer: nobody of those named in {pod.file.path} is alive (pids {life.pid}){LEFT}", asks=False)


def test_a_trainer_that_crashes_while_it_saves(pod: Container, job: Job) -> None:
    """The hook sees it die, and does not wait for the deadline."""
    life = training(job, HOLD_COMMIT="1")
    hook = pod.hook()
    life.wait_for("^waits for commit")
    life.kill(signal.SIGKILL)
    life.wait()

    assert ended(hook) == (4, f"preStop: the trainer died before it answered (pids {life.pid})\n")
    assert [line.split(" ", 3)[3] for line in pod.log[1:]] == [
        SAVING,
        f"the trainer died before it answered (pids {life.pid})",
    ]


# No answer.


def test_a_trainer_that_hangs(pod: Container, job: Job) -> None:
    """Alive is not the same as awake: after the grace, less a margin, the hook gives up."""
    life = training(job)
    life.kill(signal.SIGSTOP)
    until(lambda: state_of(life.pid) == "T", "the trainer to stand still")
    pod.settings["MIGRATOR_GRACE_S"] = "1"

    stop(pod, 5, "no answer from the trainer within 0.9 s of a grace of 1 s", asks=True, within_s=1.6)


def test_a_save_that_takes_longer_than_the_grace(pod: Container, job: Job) -> None:
    """The hook gives up in time; the trainer goes on as long as it is let, and a later hook finds its answer."""
    life = training(job, HOLD_COMMIT="1")
    pod.settings["MIGRATOR_GRACE_S"] = "1"
    stop(pod, 5, "no answer from the trainer within 0.9 s of a grace of 1 s", asks=True, within_s=1.6)
    let(job, "commit")

    assert life.wait() == 143, life.text
    assert [saved(pod, asks=False).fields["ckpt"]] == job.ckpts()


# Answers.


def test_a_trainer_that_trains(pod: Container, job: Job) -> None:
    """It is saved; called again, the hook tells the same and asks nobody."""
    life = training(job)

    first = saved(pod)

    assert life.wait() == 143, life.text
    assert [first.fields["ckpt"]] == job.ckpts()
    assert saved(pod, asks=False, within_s=2) == first


def test_two_hooks_at_once(pod: Container, job: Job) -> None:
    """The trainer is asked once; both hooks get its answer."""
    life = training(job, HOLD_COMMIT="1")
    hooks = [pod.hook(), pod.hook()]
    life.wait_for("^waits for commit")
    wait_until(lambda: sum(SAVING in line for line in pod.log) == 2)
    let(job, "commit")

    assert [ended(hook) for hook in hooks] == [(0, ""), (0, "")]
    assert life.wait() == 143, life.text
    assert len(job.ckpts()) == len(life.events("committed")) == 1
    assert sum(line.endswith(FINISH) for line in pod.log) == 2


@pytest.mark.parametrize("where", ["LOADS_LATE", "TRAINS_LATE"])
def test_a_trainer_that_warms_up_after_a_load(pod: Container, job: Job, where: str) -> None:
    """Nothing was trained since: what it loaded, or is about to load, is what the next life begins with."""
    first = training(job)
    before = saved(pod).fields["ckpt"]
    assert first.wait() == 143, first.text
    life = job.run(**{where: "1"})
    life.wait_for("^waits for")

    answer = saved(pod)

    assert life.wait() == 143, life.text
    assert answer.fields["ckpt"] == before
    assert "request" in answer.fields
    assert job.ckpts() == [before]


def test_a_trainer_that_has_trained_nothing(pod: Container, job: Job) -> None:
    """There is nothing to save, and the hook does not say that there was."""
    life = job.run(TRAINS_LATE="1")
    life.wait_for("^waits for train")

    stop(pod, 6, "the trainer could not save: nothing to save: nothing was trained yet", asks=True)
    assert life.wait() == 143, life.text


def test_a_save_that_fails(pod: Container, job: Job) -> None:
    """The reason is told, and which ckpt is still there."""
    first = training(job)
    before = saved(pod).fields["ckpt"]
    assert first.wait() == 143, first.text
    life = training(job, FAIL_COMMIT="the disk is on fire")

    why = f"the disk is on fire (the ckpt before is untouched: {before})"
    stop(pod, 6, f"the trainer could not save: {why}", asks=True)

    assert life.wait() == 143, life.text
    stop(pod, 6, f"the trainer could not save: {why}", asks=False, within_s=2)
    assert job.ckpts() == [before]


# What an earlier life of the same container left there.


def test_the_answer_of_an_earlier_life_is_true_until_the_next_one_listens(pod: Container, job: Job) -> None:
    """Until then nobody has trained anything newer: the job goes on from that ckpt. Then the answer is history."""
    first = training(job)
    before = saved(pod)
    assert first.wait() == 143, first.text
    life = job.run(STARTS_LATE="1", MB="2", MIGRATOR_RESUME="never")
    life.wait_for("^waits for listen")

    assert saved(pod, asks=False, within_s=2) == before

    let(job, "listen")
    life.wait_for(r"^step \d+0$")
    after = saved(pod)
    assert life.wait() == 143, life.text
    assert after.fields["ckpt"] != before.fields["ckpt"]
    assert [before.fields["ckpt"], after.fields["ckpt"]] == job.ckpts()


@pytest.mark.parametrize("word", [INIT, SAVE])
def test_a_process_that_has_the_number_of_an_earlier_one_is_asked(pod: Container, job: Job, word: str) -> None:
    """A new container counts from 1 again. If it is the new trainer, it sees the request as soon as it listens."""
    life = job.run(STARTS_LATE="1")
    life.wait_for("^waits for listen")
    request = {"request": "old", "deadline": "1000000000"} if word == SAVE else {}
    pod.file.write(word, **request, pids=life.pid)
    hook = pod.hook()
    wait_until(lambda: (pod.file.read() or Signal(INIT)).fields.get("hook") == str(hook.pid))
    let(job, "listen")

    # Whether it has made a step by then is up to it.
    code, said = ended(hook)
    assert life.wait() == 143, life.text
    assert (code, said) == (6, "preStop: the trainer could not save: nothing to save: nothing was trained yet\n") or (
        (code, said, len(job.ckpts())) == (0, "", 1)
    )


def test_the_hook_does_not_take_itself_for_a_trainer(pod: Container) -> None:
    """Its own number may be that of the trainer of an earlier life."""
    script = ROOT / "hooks" / "preStop.sh"
    pod.file.write(INIT)
    write = 'printf "init\\npids=$$\\n" >"$MIGRATOR_SIGNAL"; exec "$@"'
    command = [*pod.shell, "-c", write, "sh", *pod.shell, str(script)]
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], **pod.settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=9,
    )

    assert done.returncode == 3, done.stderr
    assert "nobody of those named" in done.stderr


def test_all_that_an_earlier_life_may_leave_at_once(pod: Container, job: Job) -> None:
    """A request, a lock, a progress: none of them keeps a new life from being saved, and nothing of them is told."""
    pod.file.write(SAVE, request="old", deadline="1000000000", pids=1)
    progress = pod.file.path.with_name("signal.progress")
    progress.write_text("700 900\n")
    life = training(job)
    assert not progress.exists()
    # And what a hook that was killed left, at any time.
    pod.file.path.with_name(".signal.lock").write_text("1\n")
    progress.write_text("700 900\n")

    assert saved(pod).fields["request"] != "old"
    assert life.wait() == 143, life.text
    assert list(pod.file.path.parent.iterdir()) == [pod.file.path]


# How far a long save is.

FAR = rf"{WHEN}written (\d+) of (\d+) MB \((\d+) %\), (\d+) s of the grace left"


def far(pod: Container) -> list[tuple[int, ...]]:
    """MB written, MB in all, percent, seconds left: of each line that says so."""
    return [tuple(map(int, found.groups())) for line in pod.log if (found := re.fullmatch(FAR, line))]


def test_a_long_save_is_told_in_the_log_of_the_hook(pod: Container, job: Job) -> None:
    """Who reads preStop.log sees how far it is and how long it may still take; a line now and then, not one a poll."""
    life = training(job, MB="10", BLOCK_S="0.38")
    start_s = time.monotonic()

    answer = saved_in_a_while(pod)

    took_s = time.monotonic() - start_s
    assert life.wait() == 143, life.text
    assert answer.fields["ckpt"] == job.ckpts()[0]
    lines = far(pod)
    assert 2 <= len(lines) <= 1 + took_s / 2
    assert lines == sorted(lines)
    assert len({line[0] for line in lines}) == len(lines)
    assert all(total == 10 and percent == 10 * done for done, total, percent, _ in lines)
    assert all(20 - took_s - 1 <= left <= 19 for *_, left in lines)
    assert pod.log[-1].endswith(FINISH)
    assert len(pod.log) == 3 + len(lines)
    assert list(pod.file.path.parent.iterdir()) == [pod.file.path]


def saved_in_a_while(pod: Container) -> Signal:
    assert pod.stop() == (0, "")
    return pod.file.read() or Signal(INIT)


def test_a_save_of_less_than_a_second_tells_nothing(pod: Container, job: Job) -> None:
    """Nobody could read it before it is over."""
    life = training(job, MB="5", BLOCK_S="0.01")

    saved(pod)

    assert life.wait() == 143, life.text
    assert "tells the hook" not in life.text


def test_a_save_is_not_disturbed_by_a_place_that_takes_no_progress(pod: Container, job: Job) -> None:
    """What is only told may not cost what is saved."""
    life = training(job, MB="4", BLOCK_S="0.4")
    pod.file.path.with_name("signal.progress").mkdir()

    assert pod.stop() == (0, "")

    assert life.wait() == 143, life.text
    assert "tells the hook" in life.text
    assert far(pod) == []


def test_one_rank_of_a_pod_tells_the_hook(pod: Container, job: Job) -> None:
    """The one that answers it, of what it writes itself."""
    gang = job.gang(2, pods=[0, 0], MB="8", BLOCK_S="0.5")
    gang.wait_for(r"^step \d+0$")

    assert pod.stop() == (0, "")

    assert gang.wait() == [143, 143], gang.text
    assert ["tells the hook" in text for text in gang.texts] == [True, False]
    assert {line[1] for line in far(pod)} == {4}, pod.log
    assert list(pod.file.path.parent.iterdir()) == [pod.file.path]


def asking(pod: Container) -> None:
    wait_until(lambda: any(SAVING in line for line in pod.log))


GARBAGE = [
    b"",
    b"\n",
    b"garbage",
    b"1",
    b"1\n2",
    b"1 2 3",
    b" 1 2",
    b"1 ",
    b" ",
    b"-1 5",
    b"5 3",
    b"0 0",
    b"1 0",
    b"1.5 2",
    b"0x1 0x2",
    b"12345678901 12345678901",
    b"1 1234567890123",
    b"1234567890123 1",
    b"a[$(touch hacked)] 5",
    b"* *",
    b"\0 \0",
    bytes(range(256)),
    b"1 2\n" * 1000,
    b"1" * 5_000_000,
]


def test_what_is_no_progress_is_not_told(pod: Container) -> None:
    """Garbage, a gigabyte, a pipe, a directory: nothing is logged, nothing is run, and the hook is not late."""
    pod.settings["MIGRATOR_GRACE_S"] = "2.5"
    hooks = []
    for number in range(len(GARBAGE) + 4):
        signal_file = SignalFile(pod.directory / "run" / f"signal {number}")
        signal_file.write(INIT, pids=os.getpid())
        pod.settings |= {"MIGRATOR_SIGNAL": str(signal_file.path), "MIGRATOR_HOOK_LOGS": f"logs {number}"}
        hooks.append((time.monotonic(), pod.hook()))
    places = [pod.directory / "run" / f"signal {number}.progress" for number in range(len(hooks))]
    for number, place in enumerate(places):
        pod.logs = pod.directory / f"logs {number}"
        asking(pod)
        if number < len(GARBAGE):
            place.write_bytes(GARBAGE[number])
    pipe, directory, nowhere, huge = places[len(GARBAGE) :]
    os.mkfifo(pipe)
    directory.mkdir()
    nowhere.symlink_to("nowhere")
    huge.touch()
    os.truncate(huge, 1 << 30)

    for number, (start_s, hook) in enumerate(hooks):
        code, said = ended(hook)
        # The hook counts in hundredths and leaves a tenth of so short a grace; the rest is for starting many at once.
        assert time.monotonic() - start_s < 5
        assert code == 5
        assert re.fullmatch(r"preStop: no answer from the trainer within 2\.\d s of a grace of 2 s\n", said), (
            number,
            said,
        )
        pod.logs = pod.directory / f"logs {number}"
        assert far(pod) == []
        assert len(pod.log) == 3
    assert not (pod.directory / "hacked").exists()


def test_a_progress_of_before_is_not_told(pod: Container) -> None:
    """It is of an earlier life; what comes after it is notice, and the last of it is told by a hook that gives up."""
    pod.settings["MIGRATOR_GRACE_S"] = "4"
    pod.file.write(INIT, pids=os.getpid())
    progress = pod.file.path.with_name("signal.progress")
    progress.write_text("700 900\n")
    hook = pod.hook()
    asking(pod)
    at_s = time.monotonic()
    time.sleep(1.7)  # in which it looks more than once
    assert far(pod) == []
    progress.write_text("08 0900\n")
    wait_until(lambda: far(pod) != [])
    assert time.monotonic() - at_s < 3
    assert far(pod)[0][:3] == (8, 900, 0)

    code, said = ended(hook)

    assert code == 5
    assert re.fullmatch(
        r"preStop: no answer from the trainer within 3\.\d s of a grace of 4 s: written 8 of 900 MB \(0 %\)\n", said
    )


def test_no_more_than_a_line_every_two_seconds_is_told(pod: Container) -> None:
    """And the first after a second: however often the trainer tells, a log on a volume is not for that."""
    pod.settings["MIGRATOR_GRACE_S"] = "5"  # it gives up after 4.5 s
    pod.file.write(INIT, pids=os.getpid())
    hook = pod.hook()
    asking(pod)
    start_s, done = time.monotonic(), 0
    progress = pod.file.path.with_name("signal.progress")
    while hook.poll() is None:
        done += 1
        aside = progress.with_name("aside")
        aside.write_text(f"{done} 9999\n")
        aside.rename(progress)
        time.sleep(0.02)
        assert time.monotonic() - start_s > 0.8 or far(pod) == []

    assert ended(hook)[0] == 5
    assert len(far(pod)) == 2


def waits_for_a_reader(process: psutil.Process) -> bool:
    """Its last call opens a pipe that nobody reads."""
    try:
        return Path(f"/proc/{process.pid}/wchan").read_text() in ("wait_for_partner", "fifo_open")
    except OSError:
        return False


def test_a_log_that_hangs_does_not_keep_the_hook(pod: Container) -> None:
    """The line about the progress is written by itself: the volume is busy, and the answer does not wait for it."""
    pod.file.write(INIT, pids=os.getpid())
    hook = pod.hook()
    asking(pod)
    log = pod.logs / "preStop.log"
    aside = log.rename(pod.logs / "aside")
    os.mkfifo(log)
    pod.file.path.with_name("signal.progress").write_text("1 2\n")
    # Opening a pipe for writing waits until somebody reads it. The hook does that in a process of its own.
    until(lambda: any(map(waits_for_a_reader, psutil.Process(hook.pid).children(recursive=True))), "the hook to log")
    pipe = log.rename(pod.logs / "pipe")
    aside.rename(log)
    request = (pod.file.read() or Signal(INIT)).fields["request"]
    start_s = time.monotonic()
    pod.file.write(RESUME, request=request, ckpt="000001-000000000007")

    assert ended(hook) == (0, "")

    assert time.monotonic() - start_s < 1
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as read:  # lets the line come that waited
        waited: list[bytes] = []
        wait_until(lambda: bool(waited.append(read.read() or b"") or any(waited)))
    assert re.fullmatch(FAR, b"".join(waited).decode().strip())
    assert [line.split(" ", 3)[3] for line in pod.log[1:]] == [SAVING, FINISH]
