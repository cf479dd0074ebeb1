"""The hooks of the pod: real scripts in real shells, with a trainer in a process of its own."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import migrator.hooks
from migrator.notice.signal_file import INIT, RESUME, SAVE, Signal, SignalFile, open_deadline
from migrator.platform.container import container_life

pytestmark = pytest.mark.processes

REPO = Path(__file__).parent.parent.parent
PRESTOP = REPO / "hooks" / "preStop.sh"
POSTSTART = REPO / "hooks" / "postStart.sh"
SHELLS = ("dash", "busybox sh", "bash")
PATIENCE_S = 20.0

# Answers the requests it sees, in the way its second argument says. It ends with the tests, even killed ones.
TRAINER = """
import os, sys, time
from migrator.notice.signal_file import SignalFile, open_deadline

path, how = sys.argv[1:]
tests = os.getppid()
file, me, seen = SignalFile(path), os.getpid(), []
file.write("init", pids=me)
print("listening", flush=True)
while os.getppid() == tests:
    time.sleep(0.005)
    signal, mark = file.read(), file.fingerprint()
    if mark is None or open_deadline(signal, now=time.time(), mtime=mark[1] / 1e9, grace_s=30) is None:
        continue
    request = signal.fields.get("request")
    if request not in seen or how == "listens anew":
        seen.append(request)
        print("asked", request, flush=True)
    if how == "is told to save":
        sys.stdin.readline()
    if how in ("saves", "is told to save"):
        file.write("resume", request=file.read().fields["request"], ckpt="000001-000000000007", step=7)
    elif how == "says resume":
        file.write("resume")
    elif how == "fails":
        file.write("init", request=request, error="the volume is full: 3 of 90 MB left")
    elif how == "says nothing to save":
        file.write("init", error="nothing to save")
    elif how == "answers and dies":
        file.write("resume", request=request, ckpt="000001-000000000007")
        os._exit(0)
    elif how == "saves too late":
        file.write("resume", request=request, ckpt="000001-000000000007", late="a later life of the job went on")
    elif how == "finishes late":
        file.note_end()
        os._exit(0)
    elif how == "dies":
        os._exit(9)
    elif how == "finishes":
        file.remove()
        sys.exit(0)
    elif how == "listens anew":
        if len(seen) == 1:
            file.write("init", pids=me)
        else:
            file.write("resume", request=request, ckpt="000001-000000000007")
    elif how == "answers others":
        file.write("resume", request="somebody-else", ckpt="000001-000000000007")
    print("answered", time.monotonic(), flush=True)
"""


class Pod:
    """A container: its signal file, its logs, and the processes in it, all ended with the test."""

    def __init__(self, directory: Path, shell: str) -> None:
        self.directory = directory
        self.shell = shell.split()
        self.file = SignalFile(directory / "run" / "signal")
        self.logs = directory / "logs"
        self.settings = {"MIGRATOR_SIGNAL": str(self.file.path), "MIGRATOR_HOOK_LOGS": str(self.logs)}
        self.tools = os.environ["PATH"]
        self.started: list[subprocess.Popen[str]] = []

    def trainer(self, how: str) -> subprocess.Popen[str]:
        """A process that listens already."""
        process = self._start(
            [sys.executable, "-c", TRAINER, str(self.file.path), how],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)},
        )
        assert line_of(process) == "listening"
        return process

    def hook(self, script: Path = PRESTOP, *, user: int | None = None) -> subprocess.Popen[str]:
        return self._start([*self.shell, str(script)], env={"PATH": self.tools, **self.settings}, user=user)

    def stop(self, script: Path = PRESTOP, *, user: int | None = None) -> tuple[int, str]:
        """The hook's exit code and what it said."""
        return ended(self.hook(script, user=user))

    def tool(self, name: str, text: str) -> None:
        """Something done before the real tool of that name, each time the hook calls it."""
        tools = self.directory / "tools"
        tools.mkdir(exist_ok=True)
        (tools / name).write_text(f'#!/bin/sh\n{text}\nexec {shutil.which(name)} "$@"\n')
        (tools / name).chmod(0o755)
        self.tools = f"{tools}:{os.environ['PATH']}"

    def plain_sleep(self) -> None:
        self.tool("sleep", 'case $1 in *.*) echo "sleep: bad time" >&2; exit 1;; esac')

    def at_rests(self, *acts: str) -> None:
        """What happens at the first, second ... rest of the hook: its way to wait for an event."""
        cases = " ".join(f"{number}) {act};;" for number, act in enumerate(acts, 1))
        self.tool("sleep", f"echo >>rests; case $(grep -c '' rests) in {cases} esac")

    @property
    def log(self) -> list[str]:
        return self.log_of("preStop.log")

    def log_of(self, name: str) -> list[str]:
        path = self.logs / name
        return path.read_text().splitlines() if path.exists() else []

    def _start(self, command: list[str], *, env: dict[str, str], user: int | None = None) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=env, cwd=self.directory, user=user, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints, waited for with a deadline."""
    assert process.stdout is not None
    line, end_s = b"", time.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            assert selector.select(end_s - time.monotonic()), f"{process.args!r} printed nothing within {PATIENCE_S} s"
            # One by one: what a buffer took of the line after it would not be waited for any more.
            more = os.read(process.stdout.fileno(), 1)
            if not more:
                break
            line += more
    return line.decode().strip()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out == ""
    return process.returncode, err


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, f"did not come about within {PATIENCE_S} s"
        time.sleep(0.005)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name.split(maxsplit=1)[0]) is None:
        pytest.skip(f"LOUD: {name.split(maxsplit=1)[0]} is missing, so the hooks are not tested under it")
    return name


@pytest.fixture
def pod(tmp_path: Path, shell: str) -> Iterator[Pod]:
    (tmp_path / "a pod").mkdir()
    pod = Pod(tmp_path / "a pod", shell)
    yield pod
    pod.close()


@pytest.fixture
def dead() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_saved(pod: Pod) -> None:
    """The hook asks, the trainer saves, the hook ends with 0, says nothing and logs what the seed logged."""
    trainer = pod.trainer("saves")

    assert pod.stop() == (0, "")

    pod_name = re.escape(socket.gethostname())
    when = rf"2\d{{3}}-\d\d-\d\d \d\d:\d\d:\d\d {pod_name}"
    stop, saving, finish = pod.log
    assert re.fullmatch(rf"stop: [A-Z][a-z]{{2}} [A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d \S+ 2\d{{3}} {pod_name}", stop)
    assert re.fullmatch(rf"{when} saving ckpts\.\.\.", saving)
    assert re.fullmatch(rf"{when} finish ckpts!", finish)
    assert line_of(trainer).startswith("asked ")


def test_the_request_says_who_asks_and_until_when(pod: Pod) -> None:
    """It carries an id, the pod, the moment of SIGKILL, the hook and the trainers."""
    trainer = pod.trainer("is told to save")
    pod.settings["MIGRATOR_GRACE_S"] = "12.5"
    before = time.time()
    hook = pod.hook()
    asked = line_of(trainer)
    after = time.time()

    request = pod.file.read()
    assert request is not None
    assert request.word == SAVE
    assert asked == f"asked {request.fields['request']}"
    assert {"request", "pod", "container", "deadline", "hook", "pids"} == set(request.fields)
    assert container_life() == request.fields["container"]
    assert (trainer.pid,) == request.pids
    assert str(hook.pid) == request.fields["hook"]
    assert socket.gethostname() == request.fields["pod"]
    # A date without fractions may put the deadline up to a second early, never late.
    assert before + 11.4 <= float(request.fields["deadline"]) <= after + 12.5


def test_the_hook_ends_with_the_answer(pod: Pod) -> None:
    """The grace is the pod's: the hook does not keep it waiting once the state is safe."""
    trainer = pod.trainer("saves")

    hook = pod.hook()
    line_of(trainer)
    answered_at = float(line_of(trainer).split()[1])
    assert hook.wait(PATIENCE_S) == 0

    # 50 ms of polling and a few to log; the rest is for a busy machine.
    assert time.monotonic() - answered_at < 1.0


@pytest.mark.parametrize("how", ["says resume", "answers and dies"])
def test_any_answer_counts(pod: Pod, how: str) -> None:
    """The bare word of the seed is an answer, and so is the last act of a trainer."""
    pod.trainer(how)

    assert pod.stop() == (0, "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [("fails", "the volume is full: 3 of 90 MB left"), ("says nothing to save", "nothing to save")],
)
def test_a_failed_save_is_told(pod: Pod, how: str, reason: str) -> None:
    """The reason that the trainer gave is on stderr and in the log."""
    pod.trainer(how)

    assert (6, f"preStop: the trainer could not save: {reason}\n") == pod.stop()
    assert pod.log[-1].endswith(f" the trainer could not save: {reason}")


def test_a_save_that_nobody_goes_on_from_is_told(pod: Pod) -> None:
    """It is there, and a later life trains without it: that is not what exit code 0 says. Nor does a second hook."""
    pod.trainer("saves too late")

    for _ in range(2):
        assert pod.stop() == (8, "preStop: saved, but a later life of the job went on\n")


@pytest.mark.parametrize("word", [None, INIT, RESUME, "garbage", ""])
def test_nobody_to_ask(pod: Pod, word: str | None) -> None:
    """Without a signal file, or with one that names no trainer, the hook ends at once, and leaves its request there."""
    before = time.time()
    if word is not None:
        pod.file.path.parent.mkdir()
        pod.file.path.write_text(word)

    code, said = pod.stop()

    assert code == 3
    assert "no trainer listens" in said
    assert str(pod.file.path) in said
    assert pod.log[0].startswith("stop: ")
    assert pod.log[1].split(" ", 3)[3].startswith("no trainer listens")
    request = pod.file.read()
    assert request is not None
    assert set(request.fields) == {"request", "pod", "container", "deadline"}
    assert before < (is_open_here(pod) or 0.0) <= time.time() + 30
    assert list(pod.file.path.parent.iterdir()) == [pod.file.path]

    # A second hook has nobody to wait for either, and what the first one left stays.
    assert pod.stop()[0] == 3
    assert pod.file.read() == request


def is_open_here(pod: Pod) -> float | None:
    return open_deadline(pod.file.read(), now=time.time(), mtime=0.0, grace_s=30.0, container=container_life())


@pytest.mark.parametrize("where", ["in the way", "read-only"])
def test_a_request_that_cannot_be_left_is_told(open_pod: Pod, where: str) -> None:
    """There is still nobody to ask, so the code is the same."""
    directory = open_pod.file.path.parent
    if where == "in the way":
        open_pod.file.path.mkdir(parents=True)
    else:
        directory.mkdir(mode=0o555)
    open_pod.settings["MIGRATOR_HOOK_LOGS"] = "/dev/null"

    code, said = open_pod.stop(user=another_user())

    assert code == 3
    assert "cannot be left there" in said
    assert where == "read-only" or list(open_pod.file.path.iterdir()) == []


@pytest.mark.parametrize(
    "said",
    [
        Signal(INIT, {"pids": "1"}),
        Signal(RESUME, {"ckpt": "000001-000000000007"}),
        Signal(INIT, {"error": "the disk is full", "request": "r"}),
        Signal(SAVE, {"request": "r", "deadline": "99999999999", "pids": "1"}),
        Signal(SAVE, {"request": "r", "deadline": "99999999999"}),
    ],
    ids=["listens", "saved", "not saved", "asks", "asks nobody"],
)
def test_what_an_earlier_container_said_is_nothing(pod: Pod, said: Signal) -> None:
    """An emptyDir outlives it, and process 1 is alive in each; the request is to whom begins to listen here."""
    pod.file.write(said.word, **said.fields, container=container_life() + "1")

    code, told = pod.stop()

    assert code == 3, told
    assert is_open_here(pod)
    assert (pod.file.read() or said).fields.get("request") != "r"


def test_a_container_that_is_not_known_may_be_this_one(pod: Pod) -> None:
    """Whoever writes by hand, and scripts with an older version, say nothing of it."""
    pod.file.write(RESUME, ckpt="000001-000000000007")

    assert pod.stop() == (0, "")


def test_a_trainer_that_is_gone_is_not_waited_for(pod: Pod, dead: int) -> None:
    """The signal file outlives a crash of the container; its pids tell that nobody is there."""
    for message in (Signal(INIT), Signal(SAVE, {"request": "1", "deadline": str(time.time() + 1000)})):
        pod.file.write(message.word, **message.fields, pids=dead)

        code, said = pod.stop()

        assert (code, f"(pids {dead})" in said) == (3, True)
        assert is_open_here(pod)
        pod.file.remove()


def test_a_trainer_that_dies_is_not_waited_for(pod: Pod) -> None:
    """Its parent may never reap it, so a zombie counts as dead."""
    trainer = pod.trainer("dies")

    code, said = pod.stop()

    assert (4, f"preStop: the trainer died before it answered (pids {trainer.pid})\n") == (code, said)
    assert trainer.returncode is None, "it was reaped, so this did not try a zombie"


def test_one_of_several_trainers_is_enough(pod: Pod, dead: int) -> None:
    """The hook waits as long as any of the pod's processes lives."""
    trainer = pod.trainer("saves")
    pod.file.write(INIT, pids=f"{dead},{trainer.pid}")

    assert pod.stop() == (0, "")


def test_a_trainer_that_finishes_is_not_waited_for(pod: Pod) -> None:
    """A clean end takes the signal file away: there is nothing to save any more."""
    pod.trainer("finishes")

    code, said = pod.stop()

    assert code == 3
    assert said.startswith("preStop: the trainer finished by itself: it took the signal file away; ")
    assert is_open_here(pod)  # the container may have another trainer behind it


def test_a_trainer_that_finishes_behind_the_request_did_not_die(pod: Pod) -> None:
    """Its script was over when the request was written. It has noted its end, and nobody takes it for a crash."""
    pod.trainer("finishes late")

    assert pod.stop() == (3, "preStop: the trainer finished by itself\n")


def test_one_that_dies_beside_one_that_finishes_is_told(pod: Pod, dead: int) -> None:
    """All ranks of the pod have to have come to their end. What else is in that file is nothing."""
    trainer = pod.trainer("finishes late")
    pod.file.write(INIT, pids=f"{dead},{trainer.pid}")
    pod.file.path.with_name("signal.ended").write_text("\n\0x\n 7\n")

    code, _ = pod.stop()

    assert code == 4


def test_the_hook_gives_up_before_the_grace_is_over(pod: Pod) -> None:
    """A trainer that hangs costs the grace less a margin, never more."""
    pod.trainer("hangs")
    pod.settings["MIGRATOR_GRACE_S"] = "1"
    start = time.monotonic()

    code, said = pod.stop()

    took = time.monotonic() - start
    assert code == 5
    assert re.fullmatch(r"preStop: no answer from the trainer within 0\.9 s of a grace of 1 s\n", said)
    assert 0.85 < took < 1.5


def test_an_answer_to_somebody_else_is_not_ours(pod: Pod) -> None:
    """On a signal file that pods share, another pod's answer does not say that this one is safe."""
    pod.trainer("answers others")
    pod.settings["MIGRATOR_GRACE_S"] = "0.5"

    assert pod.stop()[0] == 5


def test_two_hooks_share_one_request(pod: Pod) -> None:
    """Kubernetes may call the hook again while it runs: the second waits for the answer to the first."""
    trainer = pod.trainer("is told to save")
    first = pod.hook()
    asked = line_of(trainer)
    second = pod.hook()
    wait_until(lambda: sum("saving ckpts" in line for line in pod.log) == 2)

    assert asked == f"asked {(pod.file.read() or Signal(SAVE)).fields['request']}"
    assert trainer.stdin is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()

    assert [ended(first), ended(second)] == [(0, ""), (0, "")]


def test_hooks_at_the_same_moment_share_one_request(pod: Pod) -> None:
    """However they interleave, the trainer is asked once and all of them get its answer."""
    trainer = pod.trainer("is told to save")
    hooks = [pod.hook() for _ in range(4)]
    asked = line_of(trainer)
    wait_until(lambda: sum("saving ckpts" in line for line in pod.log) == 4)

    assert asked == f"asked {(pod.file.read() or Signal(SAVE)).fields['request']}"
    assert trainer.stdin is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()

    assert [ended(hook) for hook in hooks] == [(0, "")] * 4
    assert [pod.file.path] == list(pod.file.path.parent.iterdir())


def test_a_second_hook_does_not_begin_a_new_grace(pod: Pod) -> None:
    """It gives up when the first one does, whatever it would have waited itself."""
    trainer = pod.trainer("hangs")
    pod.file.write(SAVE, request="first", deadline=time.time() + 1.5, pids=trainer.pid)
    start = time.monotonic()

    assert pod.stop()[0] == 5

    assert time.monotonic() - start < 2.0


def test_a_lock_left_by_a_killed_hook_is_no_obstacle(pod: Pod) -> None:
    """A hook that was killed while it wrote costs the next one half a second."""
    pod.trainer("saves")
    lock = pod.file.path.with_name(".signal.lock")
    lock.write_text("1\n")

    assert pod.stop() == (0, "")
    assert not lock.exists()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Signal(RESUME, {"request": "1", "ckpt": "000001-000000000007"}), 0),
        (Signal(RESUME, {"ckpt": "000001-000000000007"}), 0),
        (Signal(INIT, {"request": "1", "error": "disk full"}), 6),
    ],
)
def test_a_hook_after_the_answer_reports_it(pod: Pod, dead: int, answer: Signal, code: int) -> None:
    """Called again after the trainer has answered and left, the hook tells the same and asks nobody."""
    pod.file.write(answer.word, **answer.fields, pids=dead)

    assert code == pod.stop()[0]
    assert answer.word == (pod.file.read() or Signal(SAVE)).word


@pytest.mark.parametrize("deadline", [None, "70", "soon"])
def test_a_stale_request_is_asked_anew(pod: Pod, deadline: str | None) -> None:
    """A request of an earlier life is not joined: nobody is going to answer it."""
    trainer = pod.trainer("is told to save")
    pod.file.write(SAVE, request="old", deadline=deadline, pids=trainer.pid)
    hook = pod.hook()
    wait_until(lambda: (pod.file.read() or Signal(SAVE)).fields.get("request") != "old")
    assert trainer.stdin is not None
    trainer.stdin.write("\n" * 2)
    trainer.stdin.flush()

    assert ended(hook) == (0, "")
    assert (pod.file.read() or Signal(SAVE)).fields["request"] != "old"


def test_a_request_written_by_hand_is_taken_over(pod: Pod) -> None:
    """The bare word `save` names nobody who could be dead, so the hook asks and waits."""
    trainer = pod.trainer("saves")
    trainer.kill()
    trainer.wait()
    pod.file.path.write_text("save\n")
    hook = pod.hook()
    wait_until(lambda: (pod.file.read() or Signal(SAVE)).fields.get("hook") == str(hook.pid))

    pod.file.write(RESUME, ckpt="000001-000000000007")

    assert ended(hook) == (0, "")


def test_a_request_overwritten_by_a_starting_trainer_is_made_again(pod: Pod) -> None:
    """A trainer that begins to listen at that very moment is asked as well."""
    pod.trainer("listens anew")

    assert pod.stop() == (0, "")


def test_windows_line_ends_and_missing_ones_are_read(pod: Pod) -> None:
    """Both sides read the same from a file that another tool has touched."""
    trainer = pod.trainer("hangs")
    pod.file.path.write_bytes(f"init\r\npids={trainer.pid}\r\nrequest=1\r\nerror=disk full".encode())

    assert pod.stop() == (6, "preStop: the trainer could not save: disk full\n")


def test_a_huge_or_binary_file_is_no_notice(pod: Pod) -> None:
    """The hook ends, and takes nothing of it for an answer."""
    pod.file.path.parent.mkdir()
    for content in (b"x" * 1_000_000, bytes(range(256)) * 20, b"\0" * 5000, b"resume" * 10_000):
        pod.file.path.write_bytes(content)
        assert pod.stop()[0] == 3


def test_logs_that_cannot_be_written_do_not_matter(pod: Pod) -> None:
    """The save counts; the complaint is made once, on stderr."""
    pod.trainer("saves")
    (pod.directory / "plain").write_text("")
    pod.settings["MIGRATOR_HOOK_LOGS"] = str(pod.directory / "plain" / "logs")

    code, said = pod.stop()

    assert code == 0
    assert said == (
        f"preStop: cannot write {pod.directory}/plain/logs/preStop.log: "
        "name a directory that can be written in MIGRATOR_HOOK_LOGS\n"
    )


def test_logs_are_appended_to(pod: Pod) -> None:
    """What an earlier stop left there stays."""
    assert pod.stop()[0] == 3
    first = pod.log

    assert pod.stop()[0] == 3

    assert first == pod.log[: len(first)]
    assert 2 * len(first) == len(pod.log)


LOG_PLACES = [
    ({"MIGRATOR_HOOK_LOGS": "own", "MIGRATION_CKPT_PATH": "seed/m.pth", "MIGRATOR_CKPT": "ckpts"}, "own"),
    ({"MIGRATION_CKPT_PATH": "seed/m.pth", "MIGRATOR_CKPT": "ckpts"}, "seed"),
    ({"MIGRATION_CKPT_PATH": "m.pth"}, "."),
    ({"MIGRATOR_CKPT": "my ckpts"}, "my ckpts"),
    ({"MIGRATOR_CKPT": "s3://bucket/prefix"}, "run"),
    ({"MIGRATOR_HOOK_LOGS": "", "MIGRATION_CKPT_PATH": "", "MIGRATOR_CKPT": ""}, "run"),
    ({"MIGRATOR_SIGNAL": "", "MIGRATION_SIGNAL_PATH": "seed run/signal"}, "seed run"),
    ({"MIGRATOR_SIGNAL": "signal"}, "."),
    ({"MIGRATOR_HOOK_LOGS": "-n"}, "-n"),
]


@pytest.mark.parametrize(("settings", "place"), LOG_PLACES)
def test_where_the_logs_go(pod: Pod, settings: dict[str, str], place: str) -> None:
    """Both hooks write beside the ckpts if those are on a volume, else beside the signal file."""
    del pod.settings["MIGRATOR_HOOK_LOGS"]
    pod.settings.update(settings)
    pod.logs = pod.directory / place

    assert pod.stop()[0] == 3
    assert pod.stop(POSTSTART) == (0, "")

    assert [name for name in ("preStop.log", "postStart.log") if pod.log_of(name)] == [
        "preStop.log",
        "postStart.log",
    ]


@pytest.mark.parametrize("path", ["signal", "./a b/signal", "-r"])
def test_a_relative_signal_file_is_found(pod: Pod, path: str) -> None:
    """A path from the working directory works for both, blanks or a dash in it too."""
    pod.file = SignalFile(pod.directory / path)
    pod.settings["MIGRATOR_SIGNAL"] = path
    pod.trainer("saves")

    assert pod.stop() == (0, "")


def test_the_seeds_variable_names_the_signal_file(pod: Pod) -> None:
    """MIGRATION_SIGNAL_PATH is used where MIGRATOR_SIGNAL is not set."""
    pod.settings["MIGRATION_SIGNAL_PATH"] = pod.settings.pop("MIGRATOR_SIGNAL")
    pod.trainer("saves")

    assert pod.stop() == (0, "")


@pytest.mark.parametrize("grace", ["soon", "0", "-3", "1.2.3", "08x"])
def test_a_grace_that_is_no_number_is_named(pod: Pod, grace: str) -> None:
    """The hook goes on with Kubernetes' default: better to save than to complain."""
    pod.trainer("saves")
    pod.settings["MIGRATOR_GRACE_S"] = grace

    code, said = pod.stop()

    assert code == 0
    assert f"MIGRATOR_GRACE_S={grace} is no number of seconds" in said


@pytest.mark.parametrize(("grace", "seconds"), [("08", 8), ("30", 30), ("2.5", 2.5), (".75", 0.75), ("86400", 86400)])
def test_a_grace_is_read_as_decimal(pod: Pod, grace: str, seconds: float) -> None:
    """A leading zero makes no octal number of it, and fractions count."""
    trainer = pod.trainer("is told to save")
    pod.settings["MIGRATOR_GRACE_S"] = grace
    before = time.time()
    pod.hook()
    line_of(trainer)

    deadline = float((pod.file.read() or Signal(SAVE)).fields["deadline"])
    assert before + seconds - 0.2 <= deadline <= time.time() + seconds


@pytest.mark.parametrize("date", ["exit 0", 'set -- "${1%%%N*}%%N${1#*N}"'])
def test_plain_tools_are_enough(pod: Pod, date: str) -> None:
    """A sleep of whole seconds and a date that prints nothing for %N, or prints it as it is, do as well."""
    pod.plain_sleep()
    pod.tool("date", f"case $1 in *%N*) {date};; esac")
    pod.trainer("saves")

    assert pod.stop() == (0, "")
    assert pod.log[0].startswith("stop: ")


def test_a_sleep_of_whole_seconds_does_not_pass_the_deadline(pod: Pod) -> None:
    """With half a second left the hook gives up rather than sleep a whole one."""
    pod.plain_sleep()
    pod.trainer("hangs")
    pod.settings["MIGRATOR_GRACE_S"] = "1.5"
    start = time.monotonic()

    assert pod.stop()[0] == 5
    assert time.monotonic() - start < 1.5


def test_a_hook_waits_for_one_that_is_just_asking(pod: Pod) -> None:
    """While another hook holds the lock this one looks and writes nothing; then it joins that one."""
    trainer = pod.trainer("hangs")
    lock = pod.file.path.with_name(".signal.lock")
    lock.touch()
    seen = pod.directory / "seen"
    first = f"save\\nrequest=first\\ndeadline={time.time() + 20}\\npids={trainer.pid}\\n"
    pod.at_rests(
        f"cat run/signal >seen; printf '{first}' >run/signal; rm run/.signal.lock",
        "printf 'resume\\nrequest=first\\n' >run/signal",
    )

    assert pod.stop() == (0, "")
    assert seen.read_text() == f"init\npids={trainer.pid}\n"


def test_an_answer_to_whoever_asked_over_us_is_ours(pod: Pod) -> None:
    """A request that replaced ours, unlocked, is answered in its place."""
    trainer = pod.trainer("hangs")
    pod.at_rests(
        f"printf 'save\\nrequest=other\\npids={trainer.pid}\\n' >run/signal",
        "printf 'resume\\nrequest=other\\n' >run/signal",
    )

    assert pod.stop() == (0, "")


def test_the_last_act_of_a_trainer_is_seen(pod: Pod) -> None:
    """Dead is believed only at the second look: the answer may have come in between."""
    trainer = pod.trainer("hangs")
    pod.at_rests(f"kill -9 {trainer.pid}", "printf 'resume\\n' >run/signal")

    assert pod.stop() == (0, "")


@pytest.fixture
def open_pod(shell: str) -> Iterator[Pod]:
    """A pod in a directory that every user may enter."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        migrator.hooks.copy_to(directory)
        pod = Pod(Path(directory), shell)
        yield pod
        pod.close()


def another_user() -> int | None:
    """Root may write everywhere, so under root the hook runs as nobody."""
    return 65534 if os.geteuid() == 0 else None


def test_a_signal_file_that_cannot_be_written_is_told(open_pod: Pod) -> None:
    """The hook says so instead of waiting for an answer to a request that nobody saw."""
    trainer = open_pod.trainer("hangs")
    open_pod.settings["MIGRATOR_HOOK_LOGS"] = "/dev/null"
    directory = open_pod.file.path.parent
    directory.chmod(0o555)

    code, said = open_pod.stop(open_pod.directory / "preStop.sh", user=another_user())

    directory.chmod(0o755)
    assert code == 7
    assert f"cannot write the signal file {open_pod.file.path}: set MIGRATOR_SIGNAL" in said
    assert (INIT, (trainer.pid,)) == ((open_pod.file.read() or Signal(SAVE)).word, (trainer.pid,))


def test_a_signal_file_that_cannot_be_read_is_told(open_pod: Pod) -> None:
    """A hook that runs as another user says so instead of taking the file for empty."""
    open_pod.trainer("hangs")
    open_pod.file.path.chmod(0)

    code, said = open_pod.stop(open_pod.directory / "preStop.sh", user=another_user())

    assert code == 7
    assert f"cannot read the signal file {open_pod.file.path}: run the trainer and this hook as" in said


def test_a_directory_in_place_of_the_signal_file_is_told(pod: Pod) -> None:
    """Nothing is moved into it."""
    pod.file.path.mkdir(parents=True)

    assert pod.stop()[0] == 3
    assert list(pod.file.path.iterdir()) == []


def test_post_start_notes_the_start_and_touches_nothing(pod: Pod) -> None:
    """It may run after the trainer began to listen, and must not undo that."""
    pod.file.write(INIT, pids=7)
    before = pod.file.fingerprint()

    assert pod.stop(POSTSTART) == (0, "")

    (line,) = pod.log_of("postStart.log")
    assert re.fullmatch(r"start: [A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ 2\d{3} \S+", line)
    assert before == pod.file.fingerprint()


def test_post_start_never_fails(pod: Pod) -> None:
    """A postStart that fails would make Kubernetes kill the container."""
    (pod.directory / "plain").write_text("")
    pod.settings["MIGRATOR_HOOK_LOGS"] = str(pod.directory / "plain" / "logs")

    code, said = pod.stop(POSTSTART)

    assert code == 0
    assert "postStart: cannot write" in said


def test_shellcheck_finds_nothing() -> None:
    """The scripts are plain POSIX shell."""
    beside = Path(sys.executable).with_name("shellcheck")
    command = str(beside) if beside.exists() else shutil.which("shellcheck")
    if command is None:
        pytest.skip("LOUD: shellcheck is missing, so the hooks are not checked")

    checked = subprocess.run(
        [command, "--shell=sh", str(PRESTOP), str(POSTSTART)], capture_output=True, text=True, check=False
    )

    assert (checked.returncode, checked.stdout) == (0, "")


def run_copy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "migrator.hooks", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_the_hooks_can_be_copied_into_an_image(tmp_path: Path) -> None:
    """`python -m migrator.hooks DIR` makes the directory, and what it copies can be run; again is fine."""
    target = tmp_path / "my hooks" / "deep"
    for _ in range(2):
        done = run_copy(str(target))
        assert (done.returncode, done.stderr) == (0, "")
        assert f"copied {target}/preStop.sh\ncopied {target}/postStart.sh\n" == done.stdout

    for script in (PRESTOP, POSTSTART):
        copy = target / script.name
        assert script.read_bytes() == copy.read_bytes()
        assert not copy.is_symlink()
        assert stat.S_IMODE(copy.stat().st_mode) == 0o755
    assert len(list(target.iterdir())) == 2


def test_copying_needs_no_torch(tmp_path: Path) -> None:
    """A build step that copies two files does not wait for torch, and works where it is broken."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "migrator.hooks", str(tmp_path / "hooks")],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{REPO}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_copying_onto_a_file_is_refused(tmp_path: Path) -> None:
    """The error names what was found and what to give instead."""
    target = tmp_path / "preStop.sh"
    target.write_text("mine")

    done = run_copy(str(target))

    assert done.returncode == 1
    assert f"migrator.hooks: {target} is a file; name a directory for the hooks, for example /hooks\n" == done.stderr
    assert target.read_text() == "mine"


def test_copying_under_a_file_is_refused(tmp_path: Path) -> None:
    """A path that cannot be made is told in one line, without a traceback."""
    (tmp_path / "plain").write_text("")

    done = run_copy(str(tmp_path / "plain" / "hooks"))

    assert done.returncode == 1
    assert "cannot be put into" in done.stderr
    assert done.stderr.count("\n") == 1


def test_copying_nowhere_is_a_usage_error() -> None:
    """Without a directory the command says how it is used."""
    done = run_copy()

    assert done.returncode == 2
    assert "usage: python -m migrator.hooks" in done.stderr


@pytest.mark.long
def test_the_wheel_and_the_sdist_hold_the_hooks(tmp_path: Path) -> None:
    """The scripts lie once in the repository and arrive, as files, in what pip installs."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "migrator", source / "migrator", symlinks=True, ignore=ignore)
    shutil.copytree(REPO / "hooks", source / "hooks")
    shutil.copy(REPO / "pyproject.toml", source)
    for name in ("README.md", "LICENSE"):
        (source / name).touch()
    build = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def built(what: str, where: Path) -> Path:
        command = [sys.executable, "-c", build, what, str(tmp_path)]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=True, timeout=100)
        return tmp_path / done.stdout.splitlines()[-1]

    shutil.unpack_archive(built("build_sdist", source), tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    shutil.unpack_archive(built("build_wheel", unpacked), tmp_path / "installed", format="zip")

    for script in (PRESTOP, POSTSTART):
        assert script.read_bytes() == (tmp_path / "installed" / "migrator" / "hooks" / script.name).read_bytes()
