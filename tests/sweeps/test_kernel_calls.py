"""Every call by which a training process changes its volume, spoiled: the process dies, the call fails, or lies.

The program, its files and the kernel are real. An undisturbed life says which calls there are in each of its phases: a
start, a load, a save of each kind with the retention behind it. Then each of them is spoiled in a life of its own, on
a copy of the same volume, and the life after it, which nothing disturbs, has to find what was acknowledged.

What no test here can see: a sync that reports success and did nothing. It takes a loss of power to miss what was not
synced; see `tests.support.crashes`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from migrator.notice.signal_file import RESUME, SignalFile
from tests.support import chance, kernel
from tests.support.harness import ROOT, ForkServer, Job, Process, Tally, until
from tests.support.kernel import TRACE, Call, Strace, Trace

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(kernel.missing() is not None, reason=kernel.missing() or ""),
]

SHARE = 0.12
"""Of all points, other ones in each run; with `--whole` all of them."""
AT_ONCE = 3
"""So many lives run side by side."""
SAVED_BEFORE, SAVE_AT, PERIODIC_AT, STEPS = 2, 3, 4, 5
"""The steps of the ckpt that a life finds, of the save in it (a periodic one is told of earlier), and of its end."""
KILL = "signal=KILL"
NOTHING = "retval=0"
NAMING = ("link", "rename", "unlink", "mkdir", "rmdir")
"""Calls that can report success and have done nothing, as a network file system's answer to a repeated call may."""
CHANGING_FAILS = ("ENOSPC", "EIO", "EDQUOT", "EROFS")
OPENING_FAILS = ("EMFILE", "EIO", "EROFS", "ENOSPC", "EDQUOT")
READING_FAILS = ("EIO", "ESTALE")
PERMANENT = ("EROFS",)
"""Failures after which nothing is tried again."""


@dataclass(frozen=True)
class Phase:
    """A part of a life whose calls are spoiled."""

    name: str
    waits_at: str
    """The script's name for the moment before it."""
    is_first: bool = False
    """On an empty volume; else there are ckpts."""
    env: tuple[tuple[str, str], ...] = ()


PHASES = {
    phase.name: phase
    for phase in (
        Phase("first start", "listening", is_first=True),
        Phase("start", "listening"),
        Phase("load", "load"),
        Phase("reading thread", "read"),
        Phase("periodic save", "periodic", env=(("MIGRATOR_EVERY", str(PERIODIC_AT)), ("SAVE_AT", str(PERIODIC_AT)))),
        Phase("asked save", "asked"),
        Phase("leaving save", "leaving"),
    )
}
SAVES = ("periodic save", "asked save", "leaving save")
WRITING = ("first start", "start", *SAVES)


@dataclass(frozen=True)
class Step:
    """One call of a phase on the job's directory."""

    phase: Phase
    call: Call
    place: str

    @property
    def path(self) -> str:
        """The first of its paths, relative to the root."""
        return self.place.split()[1]

    @property
    def is_close_of_written(self) -> bool:
        """The last moment at which some volumes tell that they could not store the bytes."""
        return self.call.name == "close" and self.place.endswith(".tmp")

    def failures(self) -> tuple[str, ...]:
        if self.call.name == "openat":
            return OPENING_FAILS if self.call.is_changing else ("EMFILE", *READING_FAILS)
        return CHANGING_FAILS if self.call.is_changing or self.is_close_of_written else READING_FAILS


@dataclass(frozen=True)
class Point:
    """One call, and what becomes of it."""

    step: Step
    fault: str
    for_good: bool = False
    """So do all calls of this name in the phase, from the first one on, on whatever file."""

    @property
    def inject(self) -> str:
        when = "1+" if self.for_good else self.step.call.number
        return f"{self.step.call.name}:{self.fault}:when={when}"

    def path(self, job: Job) -> Path | None:
        """The file whose calls are counted."""
        return None if self.for_good else Path(os.path.normpath(job.root / self.step.path))

    @property
    def is_kill(self) -> bool:
        return self.fault == KILL

    @property
    def may_pass(self) -> bool:
        """A failure after which the same may go well the next time, and it does."""
        return not self.for_good and self.fault.removeprefix("error=") not in PERMANENT

    def __str__(self) -> str:
        which = "each" if self.for_good else self.step.call.number
        return f"{self.step.phase.name}, {self.fault}, {which}: {self.step.place}"


class Sweep:
    """The volume and the recordings that the points of all tests have in common."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self._server = server
        self._directory = directory
        self._recorded: dict[Phase, tuple[list[Step], set[str]]] = {}
        self._numbers = count()

    @cached_property
    def reference(self) -> dict[int, str]:
        """Of each step the digest of the run that nothing ever disturbed."""
        job = self._job()
        life = ended(job, SAVE_AT="0")
        return digests(life)

    @cached_property
    def history(self) -> Path:
        """A volume with two ckpts, and what two killed lives left behind: one that was leaving, and one that began."""
        job = self._job()
        for step in (1, SAVED_BEFORE):
            ended(job, SAVE_AT=str(step), STEPS=str(step))
        for phase, call in (("leaving", "link:signal=KILL:when=1"), ("listening", "link:signal=KILL:when=2")):
            life, trace = traced(job, phase, inject=call, env={"NAMES": "history"})
            assert life.wait() == -9, life.text
            trace.end()
        age_marks(job)
        assert len(job.ckpts()) == 2
        assert len(leftovers(job)) >= 4, leftovers(job)
        return job.root

    def steps(self, name: str) -> list[Step]:
        """The calls of a phase on the job's directory, in order."""
        return self._recording(PHASES[name])[0]

    def beside(self, name: str) -> set[str]:
        """Places of the changing calls that the same life made outside that phase or in other threads."""
        return self._recording(PHASES[name])[1]

    def _recording(self, phase: Phase) -> tuple[list[Step], set[str]]:
        if phase not in self._recorded:
            job = self._job(phase)
            life, trace = traced(job, phase.waits_at, env=dict(phase.env))
            assert life.wait() == (143 if phase.waits_at == "leaving" else 0), life.text
            own, beside = [], set()
            thread = thread_of(life)
            is_over = False
            for call in trace.calls():
                is_over |= call.paths == (f"/end of {phase.waits_at}",)
                if not is_of_volume(call, job):
                    continue
                assert call.is_known, f"{call}: does it change a volume?"
                step = Step(phase, call, call.place(job.root))
                if call.thread == thread and not is_over:
                    own.append(step)
                elif call.is_changing:
                    beside.add(step.place)
            self._recorded[phase] = own, beside
            job.end()
        return self._recorded[phase]

    def _job(self, phase: Phase | None = None) -> Job:
        """A job with a volume of its own; the phase says what lies on it."""
        directory = self._directory / str(next(self._numbers))
        directory.mkdir()
        job = Job(self._server, directory).use(ROOT / "tests" / "support" / "scripts" / "swept.py")
        job.env = {"SAVE_AT": str(SAVE_AT), "STEPS": str(STEPS), "MIGRATOR_EVERY": "off"}
        if phase is not None:
            job.env["MIGRATOR_KEEP"] = "1"
            if not phase.is_first:
                shutil.copytree(self.history, job.root)
        return job

    def all(self, points: Iterable[Point]) -> int:
        """Visit a share of the points; their number. Fails with everything that was found wrong."""
        assert self.reference
        points = list(points)
        # Drawn by what they print, which names no thread and no directory: the same seed draws the same again.
        points = chance.some([str(point) for point in points], points, SHARE)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = [problem for problem in pool.map(self._visit, points) if problem]
        assert not found, f"{len(found)} of {len(points)} points:\n" + "\n\n".join(found)
        assert points, "nothing to spoil"
        return len(points)

    def _visit(self, point: Point) -> str:
        """What is wrong there, if anything."""
        job = self._job(point.step.phase)
        lives: list[Process] = []
        try:
            phase = point.step.phase
            life, trace = traced(job, phase.waits_at, inject=point.inject, path=point.path(job), env=dict(phase.env))
            lives.append(life)
            life.wait()
            self._check_spoiled(point, job, life, trace.calls())
            acknowledged = max(steps_acknowledged(job, life), default=0 if point.step.phase.is_first else SAVED_BEFORE)
            # As if time had gone by: else the next life waits for this one, and keeps what it left.
            age_marks(job)
            after = job.run(SAVE_AT=str(STEPS))
            lives.append(after)
            after.wait()
            self._check_after(job, after, acknowledged)
        except AssertionError as error:
            return "\n".join([f"{point}:", str(error), *(life.text for life in lives)])
        finally:
            job.end()
        shutil.rmtree(job.directory)
        return ""

    def _check_spoiled(self, point: Point, job: Job, life: Process, calls: list[Call]) -> None:
        """What the spoiled life did and said."""
        spoiled = [call for call in calls if call.is_spoiled]
        assert spoiled, "no call was spoiled"
        assert point.for_good or spoiled[0].place(job.root) == point.step.place, f"{spoiled[0]} was spoiled"
        assert_no_sync_repeated(calls)
        if point.is_kill:
            assert life.returncode == -9
            return
        phase = point.step.phase
        ends_well = 143 if phase.waits_at == "leaving" else 0
        assert life.returncode in (ends_well, *(() if phase.name in SAVES else (1,))), "its exit code"
        if life.returncode == 1:
            assert_ends_with_our_error(life)
            return
        assert "Traceback" not in life.text
        self._check_training(life, least=1 if not phase.is_first else 0)
        if point.for_good and phase.waits_at == "leaving":
            # The answer is a file as well; the log has the truth in any case.
            assert life.events("leaving")[0]["ckpt"] in ("None", *job.ckpts())
        elif phase.waits_at == "leaving":
            assert_answered(job, must_be_saved=point.may_pass)
        else:
            assert ENDED.search(life.text)
        if phase.waits_at == "asked":
            assert re.search(r"^(saved 00|not saved: .)", life.text, re.MULTILINE)

    def _check_after(self, job: Job, after: Process, acknowledged: int) -> None:
        """What the life after it found."""
        assert after.returncode == 0, "the life after it"
        self._check_training(after, least=acknowledged)
        assert ENDED.search(after.text)
        assert len(job.ckpts()) == 1
        assert leftovers(job) == []

    def _check_training(self, life: Process, *, least: int) -> None:
        """It went on from a step that is at least this one, and each step is that of the undisturbed run."""
        found = re.search(r"^begins at (\d+) (\w+)$", life.text, re.MULTILINE)
        assert found is not None
        begun = int(found[1])
        assert begun >= least, f"begins at {begun}; {least} was acknowledged"
        assert begun == 0 or found[2] == self.reference[begun], "what was loaded is not what the step had"
        trained = digests(life)
        assert trained == {step: self.reference[step] for step in trained}, "other weights"
        assert list(trained) == list(range(begun + 1, max(trained) + 1)), "not each step once"


def traced(
    job: Job,
    phase: str,
    *,
    inject: str | None = None,
    path: Path | None = None,
    env: dict[str, str] | None = None,
    by: type[Trace] = TRACE,
) -> tuple[Process, Trace]:
    """A life that the tracer has taken hold of where this phase begins, and that goes on."""
    fifo = job.directory / "fifo"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    life = job.run(env={"NAMES": "spoiled", **(env or {})}, PHASE=phase, FIFO=str(fifo))
    life.wait_for(r"^at \w+ (\d+)$")
    trace = job.ends(by(thread_of(life), fifo.with_name("calls"), inject=inject, path=path))
    os.close(until(lambda: opened(fifo), "the script to wait at its phase", context=lambda: life.text))
    return life, trace


def opened(fifo: Path) -> int | None:
    """A pipe that somebody reads from; it is never fd 0."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def thread_of(life: Process) -> int:
    return int(re.findall(r"^at \w+ (\d+)$", life.text, re.MULTILINE)[0])


ENDED = re.compile(r"\nended\n(.* retired .*\n)?\Z")
"""Old ckpts are deleted when the script has its answer."""


def ended(job: Job, **env: str) -> Process:
    """A life that nothing disturbs, when it has come to its end."""
    life = job.run(**env)
    assert life.wait() == 0, life.text
    return life


def is_of_volume(call: Call, job: Job) -> bool:
    """It is about the job's directory, the root, or the directory that holds the root's name."""
    return call.below(job.root) or call.paths == (str(job.root.parent),)


def digests(life: Process) -> dict[int, str]:
    """Of each step that was trained."""
    return {int(step): digest for step, digest in re.findall(r"^step (\d+) (\w+)$", life.text, re.MULTILINE)}


def steps_acknowledged(job: Job, life: Process) -> set[int]:
    """By the log, by the script's `save_ckpt()` and by the answer to the hook."""
    found = {int(event["step"]) for name in ("committed", "joined", "loaded") for event in life.events(name)}
    found |= {int(step) for step in re.findall(r"^saved \d+-(\d+)$", life.text, re.MULTILINE)}
    answer = SignalFile(job.signal).read()
    if answer is not None and answer.word == RESUME:
        found.add(int(answer.fields["step"]))
    return found


def age_marks(job: Job) -> None:
    for mark in job.root.glob("*/generations/*.leaving"):
        os.utime(mark, (0, 0))


def leftovers(job: Job) -> list[str]:
    """What is neither the record of a life, nor a manifest, nor a part that a manifest names."""
    there = {path for path in job.root.glob("*/**/*") if path.is_file() or not any(path.iterdir())}
    there |= {path for path in job.root.iterdir() if path.is_file()}
    records = {path for path in there if re.search(r"/generations/\d{6}\.(json|from)$", str(path))}
    manifests = {path for path in there if path.name == "manifest.json"}
    parts = {
        manifest.with_name(part["name"])
        for manifest in manifests
        for part in json.loads(manifest.read_text())["manifest"]["parts"]
    }
    return sorted(str(path.relative_to(job.root)) for path in there - records - manifests - parts)


def assert_no_sync_repeated(calls: list[Call]) -> None:
    """A file whose sync failed is neither synced again nor given a name: only a new file is to be believed.

    A directory may be synced again: it holds names, and these are made anew or were never taken back.
    """
    failed: set[str] = set()
    for call in calls:
        is_file = bool(call.paths) and call.paths[0].endswith(".tmp")
        if call.name in ("fsync", "link", "rename") and is_file:
            assert call.paths[0] not in failed, f"{call.name} of a file whose sync had failed: {call.paths[0]}"
        if call.name == "fsync" and is_file and call.has_failed:
            failed.add(call.paths[0])


def assert_ends_with_our_error(life: Process) -> None:
    """The traceback's last word is an error of ours with advice, and nothing was trained."""
    last = life.text.rpartition("Traceback (most recent call last):\n")[2]
    error = "\n".join(line for line in last.splitlines() if not line.startswith("  "))
    assert re.match(r"migrator\.errors\.(Storage\w*Error|NoUsableCkpt): .*\. [A-Z].*\.$", error, re.DOTALL), error
    assert digests(life) == {}


def assert_answered(job: Job, *, must_be_saved: bool) -> None:
    """What the hook is told is true: the ckpt it is told of is there, or the reason why there is none is."""
    answer = SignalFile(job.signal).read()
    assert answer is not None
    if answer.word == RESUME:
        assert answer.fields["ckpt"] in job.ckpts()
        return
    assert answer.fields["error"]
    assert not must_be_saved, "a failure that passed was not survived"


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return Sweep(fork_server, tmp_path_factory.mktemp("sweep"))


def spread(steps: Iterable[Step], choose: Callable[[Step], tuple[str, ...]]) -> Iterator[Point]:
    """One failure for each call; each kind has its turn."""
    for i, step in enumerate(steps):
        kinds = choose(step)
        yield Point(step, f"error={kinds[i % len(kinds)]}")


def once_each(steps: Iterable[Step]) -> list[Step]:
    """Every call that changes the volume, and each other way of looking at a place once."""
    steps = list(steps)
    first = {step.place: step for step in reversed(steps)}
    return [step for step in steps if step.call.is_changing or step.is_close_of_written or first[step.place] is step]


def usual(phases: Iterable[str]) -> list[Any]:
    """A periodic and an asked save write as a leaving one does; their sweeps take long."""
    long = {"periodic save", "asked save"}
    return [pytest.param(phase, marks=pytest.mark.long if phase in long else ()) for phase in phases]


@pytest.mark.parametrize("phase", usual([*WRITING, "load"]))
def test_killed_before_any_call_nothing_acknowledged_is_lost(sweep: Sweep, tally: Tally, phase: str) -> None:
    """SIGKILL before each call that changes the volume: the next life goes on from what was acknowledged, or newer."""
    steps = [step for step in sweep.steps(phase) if step.call.is_changing]
    tally("kills before a call", sweep.all(Point(step, KILL) for step in steps))


@pytest.mark.parametrize("phase", usual(PHASES))
def test_any_call_that_fails_is_survived_or_told(sweep: Sweep, tally: Tally, phase: str) -> None:
    """Each call that changes the volume fails once, and each way of reading it: training goes on or ends truthfully."""
    tally("calls that failed once", sweep.all(spread(once_each(sweep.steps(phase)), Step.failures)))


@pytest.mark.parametrize("phase", usual(SAVES))
def test_a_sync_that_failed_is_not_repeated_and_called_durable(sweep: Sweep, tally: Tally, phase: str) -> None:
    """EIO at each fsync: what could not be synced is neither synced again nor given a name; it is written anew."""
    steps = [step for step in sweep.steps(phase) if step.call.name == "fsync"]
    tally("syncs that failed", sweep.all(Point(step, "error=EIO") for step in steps))


@pytest.mark.parametrize("phase", usual(WRITING))
def test_a_call_that_reports_success_and_did_nothing_is_found_out(sweep: Sweep, tally: Tally, phase: str) -> None:
    """A link, rename, unlink, mkdir or rmdir that only says it was done."""
    steps = [step for step in sweep.steps(phase) if step.call.name in NAMING]
    tally("calls that lied", sweep.all(Point(step, NOTHING) for step in steps))


@pytest.mark.parametrize("phase", usual(SAVES))
def test_a_volume_that_fails_for_good_keeps_what_it_had(sweep: Sweep, tally: Tally, phase: str) -> None:
    """From the first call of a kind on all of them fail, on whatever file: the save is not made, and that is told."""
    first = {step.call.name: step for step in reversed(sweep.steps(phase)) if step.call.is_changing}
    first.pop("openat")  # not all of these are about the volume
    points = [Point(step, f"error={error}", for_good=True) for step in first.values() for error in ("ENOSPC", "EROFS")]
    tally("failures for good", sweep.all(points))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("phase", ["first start", "start", "load", "reading thread", "leaving save"])
def test_every_failure_at_every_call(sweep: Sweep, tally: Tally, phase: str) -> None:
    """The same with each kind of failure at each call; one kind of save stands for the others, which write alike."""
    steps = once_each(sweep.steps(phase))
    points = [Point(step, f"error={kind}") for step in steps for kind in step.failures()]
    tally("pairs of call and failure", sweep.all(points))


# The tracer itself.

NO_STRACE = pytest.mark.skipif(
    shutil.which("strace") is None or TRACE is Strace, reason="LOUD: strace is missing, with which it is compared"
)


@NO_STRACE
@pytest.mark.parametrize("phase", chance.some("compared", PHASES, 0.4))
def test_the_tracer_sees_what_strace_sees(sweep: Sweep, phase: str) -> None:
    """The same calls on the volume in the same order, with the same arguments and results."""
    seen: list[list[str]] = []
    for by in (Trace, Strace):
        job = sweep._job(PHASES[phase])
        life, trace = traced(job, PHASES[phase].waits_at, env=dict(PHASES[phase].env), by=by)
        life.wait()
        calls = [call for call in trace.calls() if call.thread == thread_of(life) and is_of_volume(call, job)]
        seen.append([f"{c.place(job.root)} {c.number} {c.is_changing} {c.is_known} {outcome(c)}" for c in calls])
        job.end()

    assert seen[0]
    assert seen[0] == seen[1], "\n".join(difflib.unified_diff(*seen, "ours", "strace", lineterm=""))


def outcome(call: Call) -> str:
    """The error, if it is one: descriptors and sizes are not the same in two lives."""
    return call.result.partition(" (")[0] if call.has_failed else "done"


@NO_STRACE
@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC", "retval=0", KILL])
@pytest.mark.parametrize("call", ["link", "fsync", "openat"])
def test_the_tracer_spoils_what_strace_spoils(sweep: Sweep, call: str, fault: str) -> None:
    """The same call of the same name on the same file, and the life ends with the same code."""
    steps = [s for s in sweep.steps("leaving save") if s.call.name == call and s.call.is_changing is (call != "openat")]
    point = Point(chance.dice(call).choice(steps), fault)
    if call == "openat" and fault == "retval=0":
        pytest.skip("a descriptor that is not there: what follows is not the same twice")
    ends = []
    for by in (Trace, Strace):
        job = sweep._job(point.step.phase)
        life, trace = traced(
            job, "leaving", inject=point.inject, path=point.path(job), env=dict(point.step.phase.env), by=by
        )
        life.wait()
        spoiled = [(c.place(job.root), c.number, c.has_failed) for c in trace.calls() if c.is_spoiled]
        ends.append((life.returncode, spoiled, [path.rpartition("-")[2] for path in job.ckpts()]))
        job.end()

    assert ends[0] == ends[1]
    assert len(ends[0][1]) == 1


@pytest.mark.skipif(TRACE is Strace, reason="this machine has another tracer")
@pytest.mark.parametrize(("fault", "code"), [("error=EIO", 5), ("retval=0", 0), (KILL, -9)])
def test_a_spoiled_call_is_not_made(tmp_path: Path, fault: str, code: int) -> None:
    """The process is told what the fault says, and the kernel has done nothing; the call before it was made."""
    made = tmp_path / "first", tmp_path / "second"
    script = """if True:
        import os, sys
        input()
        os.mkdir(sys.argv[1])
        try:
            os.mkdir(sys.argv[2])
        except OSError as error:
            sys.exit(error.errno)
    """
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, made)], stdin=subprocess.PIPE)
    trace = Trace(process.pid, tmp_path / "calls", inject=f"mkdir:{fault}:when=2")
    process.communicate(b"\n", 30)

    assert process.returncode == code
    assert [call.is_spoiled for call in trace.calls() if call.name == "mkdir"] == [False, True]
    assert [path.exists() for path in made] == [True, False]
