"""Killed or frozen at each named event, a job loses nothing that was acknowledged, and its next life goes on.

First each scenario runs undisturbed; what it logs says at which events its processes can be struck. Then one process,
or one of two ranks, sends itself SIGKILL or SIGSTOP at the very moment it has logged an event, and the job is started
again without faults. Over both lives it must have trained what the undisturbed job trains, step by step, and end with
the same state to the last bit; and the later life must not begin before anything that was acknowledged.

An event joins by existing: one that is new in `events.EVENTS` is a test here, and the tests fail until a scenario
brings it about or `NOT_REACHED` says why none does. Each run draws some of them; with `--whole` and the long variants
it is all.

The price: of the moments between two events this says nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt.leaving_mark import LeavingMark
from migrator.events import EVENTS
from migrator.notice.signal_file import RESUME, SignalFile
from migrator.platform import process_identity
from tests.support import chance
from tests.support.harness import ROOT, ForkServer, Job, Process, events_in, until
from tests.support.rank_processes import Gang, is_running, state_of

long = pytest.mark.long
CHANCES = 5
"""In so many lives an event that comes by chance has to come once."""
EVENTFUL = ROOT / "tests" / "support" / "scripts" / "eventful.py"
GRACE_S = {1: 2.0, 2: 4.0}
"""Of one process, and of each of two ranks."""
AFTER_S = 4.0
"""So long after its deadline, or after the loss of its peer, a rank has ended for sure."""
FREEZE_S = 0.3
"""A freeze that ends. Longer than whatever polls, shorter than the grace."""
STEPS = 18

NOT_REACHED: dict[str, str] = {
    "loader_not_followed": "a line at a safe point; nothing is done on the volume for it",
    "own_of_another_rank": "a line of a load that changes nothing on the volume, as `random_derived`, which is swept",
    "exit_code_changed": "the process does nothing behind it but end; the ckpt is committed and answered for before it",
    "signal_early": "a life that is told so early touches nothing on the volume: jobs/test_early_notice.py",
    "memory_before": "it takes a life of two seconds that was killed; nothing is written for it: pods/test_memory.py",
    "fork": "it takes two lives at once: jobs/test_notices.py",
    **dict.fromkeys(
        ("count_begins_anew", "loops_alike", "workers_persist", "loader_too_large"),
        "a line of a loop's beginning, where nothing is on its way to the volume: jobs/test_ordinary_scripts.py",
    ),
    **dict.fromkeys(
        ("other_requires_grad", "other_strides"),
        "a line before the first step, where nothing is on its way to the volume",
    ),
    **dict.fromkeys(
        ("changed_while_copied", "stale_state", "unstorable"),
        "a line about an object; the save goes on as any other: unit/state/test_capture.py, test_last_storable.py",
    ),
    "rank_newer": "a rank that cannot be counted on, as one that is lost, which is swept: ranks/test_versions.py",
    "agent_ended": "it takes an agent that starts ranks again: ranks/test_dying_pod.py",
    "store_found": "it takes a network that breaks: ranks/test_broken_connections.py",
    "save_too_long": "a line behind a save that went well: ranks/test_shutdown_timeout.py",
    "grace_too_short": "a line of a start that goes on as any other: jobs/test_grace.py",
    **dict.fromkeys(
        ("node_check", "node_round", "node_times", "node_slow", "node_fault", "nodes_good"),
        "a line of the check before the training, which touches no volume: ranks/test_nodecheck.py",
    ),
    "saves_slow_training": "a line behind saves that went well: unit/save/test_cost.py",
    **dict.fromkeys(
        ("comm_hook_not_saved", "comm_hook_waits"),
        "a line at a step, where nothing is on its way to the volume: unit/state/test_comm_hooks.py",
    ),
    "trained_by_hand": "from there on safe points are made as in any other loop: jobs/test_ordinary_scripts.py",
}
"""Events that no scenario brings about, and why."""

OF_RANKS = {
    *("ckpt_bad", "loaded", "random_derived", "ranks_differ", "roots_apart", "store_lost"),
    *("agreed", "saving_alone", "agreed_anew", "share_taken_over", "rank_lost"),
    *("save_given_up", "part_written", "committed", "joined", "save_failed", "save_retry", "retired"),
    *("signal", "leaving"),
}
"""What each of two ranks is killed at, some of it in every test run; the long one takes all events."""
FROZEN_RANKS = {"agreed", "part_written", "committed", "signal"}
"""The same for a rank that freezes."""


# What can happen to a job.


@dataclass(frozen=True)
class Scenario:
    """One life that is struck, and what lies on the volume when it begins."""

    name: str
    env: Mapping[str, str]
    size: int = 1
    each: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Further variables for single ranks."""
    argv: Sequence[str] = ()
    after: str | None = None
    """The preparation on whose volume it begins."""
    damage: Callable[[Path], None] = lambda directory: None
    """What becomes of that volume in between: called with the job's directory."""
    always: Mapping[str, str] = field(default_factory=dict)
    """Variables of all lives, the later ones too."""
    roots: str = "shared"
    begins_at: int = 0
    """The step that is safe already when it begins."""
    is_its_own_reference: bool = False
    """It trains something else than the plain job does; nobody stops it."""


@dataclass(frozen=True)
class Preparation:
    """A life that left two ckpts, one on the way and one at its end."""

    name: str
    size: int = 1
    always: Mapping[str, str] = field(default_factory=dict)


def newest_part_is_damaged(directory: Path) -> None:
    """One bit of the newest ckpt's first part is another one."""
    part = min(max(directory.glob("0*-0*")).glob("part-*"))
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)


def life_before_was_killed(directory: Path) -> None:
    """On this machine, while it saved."""
    mark = LeavingMark(1.0, {**process_identity.mine(), "started": "1"})
    (directory / "generations" / "000001.leaving").write_bytes(mark.to_bytes())


def volume_is_in_a_bad_way(directory: Path) -> None:
    """The newest ckpt is damaged, the record of the life before as well, and that one has not said that it is gone."""
    newest_part_is_damaged(directory)
    (directory / "generations" / "000001.json").write_text("{}")
    (directory / "generations" / "000001.leaving").write_text('{"grace_s": 1.0}')


def odd(*what: str, **more: str) -> dict[str, str]:
    return {"ODD": ",".join(what), **more}


NO_RESTART_LEFT = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
OFF, EVERY_3, KEEP_1 = {"MIGRATOR_EVERY": "off"}, {"MIGRATOR_EVERY": "3"}, {"MIGRATOR_KEEP": "1"}

PREPARATIONS = [
    Preparation("one"),
    Preparation("two", 2),
    Preparation("plain loader", always={"LOADER": "plain"}),
    Preparation("plain loader, to grow", always={"LOADER": "plain", "DRAWS": "no"}),
]
SCENARIOS = [
    # One process.
    Scenario(
        "periodic",
        {
            **EVERY_3,
            **KEEP_1,
            **odd("costly", "asks", "replaced already"),
            "STOP": "14",
            "STOP_HOW": "file",
            "AWAIT": "committed:3",
        },
    ),
    Scenario(
        "leaving",
        {
            **OFF,
            **odd("handler of its own", "silenced", "no mark", "failing last part", "no directory", "hangs"),
            "STOP": "8",
        },
        after="one",
        damage=life_before_was_killed,
        begins_at=5,
    ),
    Scenario(
        "oddities",
        {
            **OFF,
            **KEEP_1,
            **NO_RESTART_LEFT,
            **odd(
                *("alias", "no inotify", "told at once", "looks first", "no set_epoch", "another optimizer"),
                *("fd taken", "nonsense", "swapped when saved", "failing part", "nothing deleted"),
            ),
            "MIGRATOR_TYPO": "1",
            "STOP": "16",
        },
        argv=["--lr=2"],
        after="one",
        begins_at=5,
    ),
    Scenario("a volume in a bad way", EVERY_3, after="one", damage=volume_is_in_a_bad_way, begins_at=3),
    Scenario(
        "started over",
        {**EVERY_3, **odd("slow part", "failing loader"), "STOP": "8", "MIGRATOR_RESUME": "never"},
        after="one",
    ),
    Scenario("of the predecessor", {**EVERY_3, "STOP": "8"}, always={"LEGACY": "1"}),
    Scenario("bare loop", OFF, always={"LOOP": "bare", **OFF}, is_its_own_reference=True),
    Scenario(
        "another loop",
        EVERY_3,
        after="plain loader",
        always={"LOADER": "wrapped"},
        begins_at=5,
        is_its_own_reference=True,
    ),
    # Two ranks.
    Scenario(
        "two, periodic",
        {**EVERY_3, **KEEP_1, **odd("asks"), "STOP": "14", "STOP_RANK": "1", "STOP_HOW": "file"},
        size=2,
    ),
    Scenario(
        "two, damaged",
        {**OFF, **odd("told at once"), "STOP": "8"},
        size=2,
        after="two",
        damage=newest_part_is_damaged,
        begins_at=3,
    ),
    Scenario(
        "two, failing",
        {**OFF, **odd("one rank: failing part", "one rank: failing last part", ODD_RANK="1"), "STOP": "13"},
        size=2,
    ),
    Scenario("two, given up", {**EVERY_3, **odd("slow part"), "STOP": "8"}, size=2),
    Scenario("two, anew", {**OFF, **odd("one rank: swapped when told", ODD_RANK="1"), "STOP": "8"}, size=2),
    Scenario("two, unlike", {**EVERY_3, **odd("unlike"), "STOP": "8"}, size=2),
    Scenario(
        "two, the leader lost",
        {**OFF, "STOP": "8"},
        size=2,
        each={0: odd("lost"), 1: odd("loses the other")},
    ),
    Scenario(
        "two, the other lost",
        {**OFF, "STOP": "8"},
        size=2,
        each={0: odd("loses the other"), 1: odd("lost")},
    ),
    Scenario("two, roots apart", {**EVERY_3, "STOP": "8"}, size=2, roots="own"),
    Scenario(
        "two, grown",
        EVERY_3,
        size=2,
        after="plain loader, to grow",
        always={"LOADER": "plain"},
        begins_at=5,
        is_its_own_reference=True,
    ),
]
UNDISTURBED = {
    1: Scenario("undisturbed", OFF, is_its_own_reference=True),
    2: Scenario("two, undisturbed", OFF, size=2, is_its_own_reference=True),
}
"""What a job of so many ranks trains if nobody touches it."""


# One life, and several in a row.


@dataclass(frozen=True)
class Life:
    """What came of one life: of each rank its output and its exit code."""

    texts: list[str]
    codes: list[int]
    answered: int = 0
    """The step that the hook was told is safe."""

    def logged(self, rank: int) -> Iterator[tuple[str, int]]:
        """The events of a rank in their order, each with its number among those of the same name."""
        seen: Counter[str] = Counter()
        for event in re.findall(r"migrator rank \d+: (\w+)", self.texts[rank]):
            if event in EVENTS:
                seen[event] += 1
                yield event, seen[event]

    def acknowledged(self) -> int:
        """The last step that somebody was told is durable."""
        text = "\n".join(self.texts)
        told = [int(fields["step"]) for fields in events_in(text, "committed")]
        told += [int(fields["step"]) for fields in events_in(text, "leaving") if fields["why"] == "saved"]
        told += [int(step) for step in re.findall(r"^saved \d+-(\d+)$", text, re.MULTILINE)]
        return max([self.answered, *told])

    def __str__(self) -> str:
        return "\n".join(f"--- rank {rank}, {code}\n{self.texts[rank]}" for rank, code in enumerate(self.codes))


@dataclass
class Lineage:
    """The steps that count: those up to where a later life went on from are the earlier ones', the others its own."""

    trained: dict[int, dict[int, str]] = field(default_factory=dict)
    """By the number of the step, of each rank that told so, what it trained."""
    drew: dict[int, dict[int, str]] = field(default_factory=dict)
    final: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    def add(self, life: Life) -> int | None:
        """One more life. The step it went on from; None: it ended before it knew."""
        text = "\n".join(life.texts)
        began = {int(step) for step in re.findall(r"^resumed (\d+)$", text, re.MULTILINE)}
        if not began:
            return None
        assert len(began) == 1, f"ranks go on from different steps\n{life}"
        first = began.pop()
        assert set(self.trained) >= set(range(1, first + 1)), f"it goes on from a step that no life trained\n{life}"
        for what, steps in (("trained", self.trained), ("drew", self.drew)):
            for step in [step for step in steps if step > first]:
                del steps[step]
            for rank, said in enumerate(life.texts):
                for number, line in re.findall(rf"^{what} (\d+) (.*)$", said, re.MULTILINE):
                    assert int(number) > first, f"step {number} was trained although it was there\n{life}"
                    steps.setdefault(int(number), {})[rank] = line
        self.final = re.findall(r"^final (.*)$", text, re.MULTILINE)
        self.own = re.findall(r"^own (.*)$", text, re.MULTILINE)
        return first

    def assert_equals(self, other: Lineage, *, with_draws: bool, context: object) -> None:
        """The same steps with the same samples and losses, and the same end, to the last bit.

        A rank that was lost in mid-step may not have told of it. What a lost rank drew is lost with it.
        """
        assert set(self.trained) == set(other.trained), context
        pairs = [(self.trained, other.trained), *([(self.drew, other.drew)] if with_draws else [])]
        for mine, theirs in pairs:
            for step, lines in theirs.items():
                found = mine.get(step, {})
                assert found.items() <= lines.items(), f"step {step}: {found}, undisturbed {lines}\n{context}"
        assert self.final == other.final, context
        assert self.own == other.own or not with_draws, context


class Trial:
    """A job on a volume of its own that lives as a scenario says, and then until it is done."""

    def __init__(self, server: ForkServer, directory: Path, scenario: Scenario) -> None:
        directory.mkdir(parents=True)
        self._job = Job(server, directory).use(EVENTFUL)
        self._job.env["MIGRATOR_GRACE_S"] = str(GRACE_S[scenario.size])
        self.scenario = scenario

    def begin_on(self, volume: Path) -> None:
        # With the modification times: marks are dated by them.
        shutil.copytree(volume, self._job.root)
        self.scenario.damage(self._job.root / "default")

    def start(self, *, strike: tuple[int, Mapping[str, str]] | None = None) -> Process | Gang:
        """The life of the scenario; `strike`: a rank, and what makes it strike itself."""
        scenario = self.scenario
        each = {rank: dict(more) for rank, more in scenario.each.items()}
        if strike is not None:
            each.setdefault(strike[0], {}).update(strike[1])
        return self._start({**scenario.env, **scenario.always}, each, scenario.argv)

    def start_next(self) -> Process | Gang:
        """One more life, in new pods, that nothing disturbs."""
        for pod in [self._job.signal.parent, self._job.directory / "pod-1"]:
            with contextlib.suppress(NotADirectoryError):
                shutil.rmtree(pod, ignore_errors=True)
            pod.unlink(missing_ok=True)
        return self._start({**EVERY_3, **self.scenario.always}, {}, [])

    def _start(self, env: Mapping[str, str], each: Mapping[int, Mapping[str, str]], argv: Sequence[str]) -> Any:
        if self.scenario.size == 1:
            return self._job.run(*argv, env={**env, **each.get(0, {})})
        size, roots = self.scenario.size, self.scenario.roots
        return self._job.gang(size, *argv, pods=size, roots=roots, env=env, each=each)

    def ended(self, life: Process | Gang) -> Life:
        """Once all of its processes have ended."""
        codes = [life.wait()] if isinstance(life, Process) else life.wait()
        texts = [life.text] if isinstance(life, Process) else life.texts
        return Life(texts, codes, self._answered())

    def _answered(self) -> int:
        steps = [0]
        for file in (self._job.signal, self._job.directory / "pod-1" / "signal"):
            said = SignalFile(file).read()
            if said is not None and said.word == RESUME:
                steps.append(int(said.fields["step"]))
        return max(steps)

    @property
    def volume(self) -> Path:
        return self._job.root

    def end(self) -> None:
        self._job.end()


# What the undisturbed lives show.


class Survey:
    """Each scenario as nobody disturbs it. Run once, also if several workers share the tests."""

    def __init__(self, server: ForkServer, directory: Path, *, backwards: bool) -> None:
        self._server = server
        self._directory = directory
        self._backwards = backwards

    def volume(self, name: str) -> tuple[Path, Life]:
        """What a preparation leaves behind."""
        preparation = next(p for p in PREPARATIONS if p.name == name)
        # Else the notice could find the first save under way, and end it for the newer step.
        env = {**EVERY_3, "STOP": "5", "AWAIT_CKPT": "1"}
        scenario = Scenario(f"prepared {name}", env, size=preparation.size, always=preparation.always)
        life = self._undisturbed(scenario, [143] * preparation.size)
        volume = self._place(scenario) / "ckpts"
        # The first save takes the state of its step or, where its thread wakes up late, of the next one.
        steps = sorted(path.parent.name[-1] for path in volume.glob("*/*/manifest.json"))
        assert steps in (["3", "5"], ["4", "5"]), life
        return volume, life

    def life(self, scenario: Scenario) -> Life:
        """The life that will be struck."""
        return self._undisturbed(scenario)

    def lineage(self, scenario: Scenario) -> Lineage:
        """What was trained before the scenario begins."""
        lineage = Lineage()
        if scenario.after is not None:
            lineage.add(self.volume(scenario.after)[1])
        return lineage

    def reference(self, scenario: Scenario) -> Lineage:
        """What the job has to come to."""
        if not scenario.is_its_own_reference:
            scenario = UNDISTURBED[scenario.size]
        lineage = self.lineage(scenario)
        lineage.add(self.life(scenario))
        assert len(lineage.final) == scenario.size
        return lineage

    @cached_property
    def all(self) -> dict[str, Life]:
        """By the name of each scenario."""
        # Two workers that begin at different ends meet in the middle.
        order = list(reversed(SCENARIOS)) if self._backwards else SCENARIOS
        with ThreadPoolExecutor(2) as pool:
            lives = list(pool.map(self.life, order))
        found = {scenario.name: life for scenario, life in zip(order, lives, strict=True)}
        return {scenario.name: found[scenario.name] for scenario in SCENARIOS}

    def places(self, event: str, *, size: int) -> list[tuple[Scenario, int, int]]:
        """Where it comes: scenario, rank, and how often on that rank. The first scenarios come first."""
        found = []
        for scenario in SCENARIOS:
            for rank in range(scenario.size if scenario.size == size else 0):
                times = Counter(name for name, _ in self.all[scenario.name].logged(rank))[event]
                if times:
                    found.append((scenario, rank, times))
        return found

    def _place(self, scenario: Scenario) -> Path:
        return self._directory / re.sub(r"\W+", "-", scenario.name)

    def _undisturbed(self, scenario: Scenario, codes: list[int] | None = None) -> Life:
        place = self._place(scenario)
        result = place.with_suffix(".json")
        # Whoever comes second waits here for the first; the kernel lets go of the lock should that one die.
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if result.exists():
                return Life(**json.loads(result.read_text()))
            shutil.rmtree(place, ignore_errors=True)
            trial = Trial(self._server, place, scenario)
            try:
                if scenario.after is not None:
                    trial.begin_on(self.volume(scenario.after)[0])
                life = trial.ended(trial.start())
            finally:
                trial.end()
            assert codes is None or life.codes == codes, life
            result.write_text(json.dumps(vars(life)))
            return life


@pytest.fixture(scope="module")
def survey(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Survey:
    base, worker = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_WORKER")
    shared = (base if worker is None else base.parent) / "event-sweep"
    shared.mkdir(exist_ok=True)
    return Survey(fork_server, shared, backwards=worker is not None and worker.endswith("1"))


# Struck, and started again.


@dataclass(frozen=True)
class Strike:
    """At which line of its log which rank of a scenario strikes itself, and how."""

    scenario: Scenario
    rank: int
    event: str
    number: int
    how: str
    """`SIGKILL`; `SIGSTOP`, and later it goes on or is killed; `replaced`: frozen until another life is over."""

    @property
    def env(self) -> dict[str, str]:
        by = "SIGKILL" if self.how == "SIGKILL" else "SIGSTOP"
        return {"DIE_AT": f"{self.event}:{self.number}", "DIE_BY": by}

    def __str__(self) -> str:
        return f"{self.scenario.name!r}, rank {self.rank}, {self.how} at {self.event}:{self.number}"


class Sweep:
    """Does what strikes say, each on a volume of its own."""

    def __init__(self, server: ForkServer, directory: Path, survey: Survey) -> None:
        self._server = server
        self._directory = directory
        self._survey = survey

    def run(self, strikes: Sequence[Sequence[Strike]], *, at_once: int = 2) -> None:
        """One of each; they wait more than they work. What is wrong with one is told with its name."""
        with ThreadPoolExecutor(at_once) as pool:
            for failure in pool.map(self._failure, range(len(strikes)), strikes):
                if failure is not None:
                    raise failure

    def _failure(self, number: int, strikes: Sequence[Strike]) -> AssertionError | None:
        """In one scenario an event may have come by chance; then it is struck at in another one that logs it."""
        for attempt in range(CHANCES):
            directory = self._directory / f"strike-{number}-{attempt}"
            strike = strikes[attempt % len(strikes)]
            trial = Trial(self._server, directory, strike.scenario)
            try:
                self._run(trial, strike)
            except NotStruck as error:
                failure: AssertionError | None = error
                continue
            except AssertionError as error:
                return AssertionError(f"{strike}:\n{error}")
            finally:
                trial.end()
            shutil.rmtree(directory)
            return None
        return AssertionError(f"{', '.join(map(str, strikes))}: not once in {CHANCES} lives\n{failure}")

    def _run(self, trial: Trial, strike: Strike) -> None:
        scenario, survey = strike.scenario, self._survey
        lineage, safe = survey.lineage(scenario), scenario.begins_at
        if scenario.after is not None:
            trial.begin_on(survey.volume(scenario.after)[0])
        running = trial.start(strike=(strike.rank, strike.env))
        if isinstance(running, Gang):
            struck = self._lose_a_rank(trial, running, strike)
        elif strike.how == "SIGKILL":
            wait_until_killed(running)
            struck = trial.ended(running)
        elif strike.how == "SIGSTOP":
            struck = self._freeze_for_a_while(trial, running, strike)
        else:
            self._replace(trial, running, strike)
            return
        lineage.add(struck)
        if scenario.damage is None or "committed ckpt=" in str(struck):
            # Else it may have named the ckpt that it was about to load, and that the test has damaged.
            safe = max(safe, struck.acknowledged())
        self._assert_goes_on(trial, lineage, safe, str(struck))

    def _assert_goes_on(self, trial: Trial, lineage: Lineage, safe: int, before: str) -> Life:
        """The next life, without faults, trains on from what is safe to the same end as if nothing had happened."""
        life = trial.ended(trial.start_next())
        context = f"{before}\n--- the next life\n{life}"
        assert life.codes == [0] * trial.scenario.size, context
        first = lineage.add(life)
        assert first is not None, context
        assert first >= safe, f"step {safe} was acknowledged, and is lost\n{context}"
        reference = self._survey.reference(trial.scenario)
        grew = self._survey.life(trial.scenario)
        is_derived = "random_derived" in "".join(life.texts) and "random_derived" not in "".join(grew.texts)
        lineage.assert_equals(reference, with_draws=not is_derived, context=context)
        return life

    def _freeze_for_a_while(self, trial: Trial, running: Process, strike: Strike) -> Life:
        """It goes on, and ends as it would have without."""
        wait_until_frozen(running)
        time.sleep(FREEZE_S)
        running.kill(signal.SIGCONT)
        life, undisturbed = trial.ended(running), self._survey.life(strike.scenario)
        assert life.codes == undisturbed.codes, life
        if life.codes == [143]:
            assert life.acknowledged() == undisturbed.acknowledged(), life
        return life

    def _replace(self, trial: Trial, running: Process, strike: Strike) -> None:
        """A node hangs and its pod is replaced; when all is done it wakes up, and goes on where it was."""
        wait_until_frozen(running)
        lineage, safe = self._survey.lineage(strike.scenario), strike.scenario.begins_at
        frozen = Life([running.text], [0])
        lineage.add(frozen)
        second = self._assert_goes_on(trial, lineage, max(safe, frozen.acknowledged()), running.text)
        running.kill(signal.SIGCONT)
        # One that wakes up before it has loaded finds its ckpts gone, and says by whom.
        assert running.wait() in (0, 143) or "NoUsableCkpt: a later life of the job (generation " in running.text
        # It may have saved since, in the place of its own generation. What came after it still counts.
        self._assert_goes_on(trial, lineage, second.acknowledged(), f"{running.text}\n--- the second life\n{second}")

    def _lose_a_rank(self, trial: Trial, gang: Gang, strike: Strike) -> Life:
        """The other one ends in time, with what it has if it can; by itself, or since its pod is deleted as well."""
        victim, (other,) = gang[strike.rank], [rank for rank in range(gang.size) if rank != strike.rank]
        if strike.how == "SIGKILL":
            wait_until_killed(victim)
        else:
            wait_until_frozen(victim)
        if is_running(gang[other].pid) and "signal source=" not in gang[other].text:
            gang.kill(signal.SIGTERM, [other])
        try:
            gang[other].wait(GRACE_S[2] + AFTER_S)
        except AssertionError:
            raise AssertionError(f"rank {other} outlives its deadline\n{gang.text}") from None
        victim.end()
        life = trial.ended(gang)
        trained, _, behind = life.texts[other].partition("signal source=")
        # A rank whose state changed outside a step has nothing to save until its next safe point.
        is_whole = "changed_outside_step" not in behind
        if is_whole and behind and "\ntrained" in trained and strike.scenario.roots == "shared":
            told = gang[other].events("leaving")
            assert told, f"rank {other} had notice, and left without a word\n{life}"
            assert told[0]["ckpt"] != "None", f"rank {other} was whole, and saved nothing\n{life}"
        return life


class NotStruck(AssertionError):  # noqa: N818 - says what it is
    """The event did not come in this life: some come only as ranks happen to run."""


def wait_until_killed(process: Process) -> None:
    if process.wait() != -signal.SIGKILL:
        raise NotStruck(process.text)


def wait_until_frozen(process: Process) -> None:
    until(lambda: state_of(process.pid) in ("T", "Z", ""), "it to strike itself", context=lambda: process.text)
    if state_of(process.pid) != "T":
        raise NotStruck(process.text)


@pytest.fixture
def sweep(fork_server: ForkServer, tmp_path: Path, survey: Survey) -> Sweep:
    return Sweep(fork_server, tmp_path, survey)


# The tests.


def test_every_event_is_brought_about_or_explained(survey: Survey) -> None:
    """A new event is swept, or somebody has to say in `NOT_REACHED` why it can not be."""
    reached = {
        event for life in survey.all.values() for rank in range(len(life.texts)) for event, _ in life.logged(rank)
    }

    assert EVENTS.keys() - reached - NOT_REACHED.keys() == set(), "neither brought about nor explained"
    assert NOT_REACHED.keys() & reached == set(), "explained, and yet it comes"
    assert NOT_REACHED.keys() <= EVENTS.keys()


@pytest.mark.parametrize("size", [1, 2])
def test_the_undisturbed_job_trains_each_sample_once_an_epoch(survey: Survey, size: int) -> None:
    """What the others are compared with is itself right, and scenarios that are stopped train the same up to there."""
    reference = survey.reference(UNDISTURBED[size])

    assert sorted(reference.trained) == list(range(1, STEPS + 1))
    by_epoch: dict[str, list[int]] = {}
    for lines in reference.trained.values():
        assert len(lines) == size
        for line in lines.values():
            by_epoch.setdefault(line.split()[0], []).extend(map(int, line.split(" ids ")[1].split()))
    assert {epoch: sorted(ids) for epoch, ids in by_epoch.items()} == {str(e): list(range(24)) for e in range(3)}
    for scenario in SCENARIOS:
        if scenario.size == size and not scenario.is_its_own_reference:
            lineage = survey.lineage(scenario)
            lineage.add(survey.life(scenario))
            for step, told in lineage.trained.items():
                assert told.items() <= reference.trained[step].items(), scenario.name


def some_events(how: str, most: set[str], share: float) -> list[Any]:
    """Some of those that matter most, other ones in each run; the long variant takes all."""
    usual = chance.some(how, sorted(most), share)
    return [pytest.param(event, marks=() if event in usual else long) for event in sorted(EVENTS)]


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=long), pytest.param("replaced", marks=long)])
@pytest.mark.parametrize("event", some_events("struck at", set(EVENTS), 0.35))
def test_one_process_is_struck_at(sweep: Sweep, survey: Survey, event: str, how: str) -> None:
    """What was acknowledged is there, and the job ends as if nothing had happened."""
    places = survey.places(event, size=1)
    if not places:
        assert survey.places(event, size=2) or event in NOT_REACHED, f"no scenario brings about {event}"
        pytest.skip(NOT_REACHED.get(event, "comes only with several ranks"))
    sweep.run([[Strike(scenario, rank, event, 1, how) for scenario, rank, _ in places]])


@pytest.mark.parametrize("event", some_events("killed", OF_RANKS, 0.3))
def test_one_of_two_ranks_is_killed_at(sweep: Sweep, survey: Survey, event: str) -> None:
    """Leader or not: the other one leaves in time, and both go on from what was acknowledged."""
    sweep.run(strikes_of_ranks(survey, event, "SIGKILL"))


@pytest.mark.parametrize("event", some_events("frozen", FROZEN_RANKS, 0.25))
def test_one_of_two_ranks_freezes_at(sweep: Sweep, survey: Survey, event: str) -> None:
    """As a node that hangs: the other one leaves in time without it, and both go on from what was acknowledged."""
    sweep.run(strikes_of_ranks(survey, event, "SIGSTOP"))


def strikes_of_ranks(survey: Survey, event: str, how: str) -> list[list[Strike]]:
    """On each rank that logs it, the first time it does."""
    by_rank: dict[int, list[Strike]] = {}
    for scenario, rank, _ in survey.places(event, size=2):
        by_rank.setdefault(rank, []).append(Strike(scenario, rank, event, 1, how))
    if not by_rank:
        assert survey.places(event, size=1) or event in NOT_REACHED, f"no scenario brings about {event}"
        pytest.skip("no scenario of two ranks brings it about")
    return list(by_rank.values())


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_struck_at_every_line_of_a_life(sweep: Sweep, survey: Survey, scenario: Scenario) -> None:
    """SIGKILL at each occurrence of each event, whatever it is."""
    life = survey.life(scenario)
    strikes = [
        [Strike(scenario, rank, event, number, "SIGKILL")]
        for rank in range(scenario.size)
        for event, number in life.logged(rank)
    ]
    sweep.run(strikes, at_once=3)
