"""Fixtures of all tests, and what a run does before its first test and after its last one."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from migrator.testing import container
from tests.support import chance, guardian
from tests.support.harness import ForkServer, Job, Tally
from tests.support.warm_pods import WarmShim

# torch's store asks the name service for the host of each connection, and answers nobody meanwhile. Where that question
# is lost now and then, all ranks of a test would stand still for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

UNIT = "tests/unit"
"""No test in this directory starts a process."""
WITH_PROCESSES = ("tests/jobs", "tests/ranks", "tests/pods", "tests/object_stores")
"""All tests in these may start processes. Elsewhere one of these fixtures says so, or the mark `processes`."""
STARTS_PROCESSES = {"fork_server", "kubelet"}
MEMORY = Path("/dev/shm")
LEAST_MEMORY = 1 << 30
"""Bytes that have to be free there. A container often has 64 MiB: then its disk is used."""


# What belongs to the whole run.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="of all that the tests draw at random; without it a new one each run"
    )
    parser.addoption("--whole", action="store_true", help="nothing is left out of sweeps that are sampled otherwise")


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {}).get("seed", config.getoption("--seed"))
    config.stash[SEED] = random.SystemRandom().randrange(1_000_000) if given is None else given
    chance.begin(config.stash[SEED], whole=config.getoption("--whole"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of pytest-xdist draw from the seed of the one that started them."""
    node.workerinput["seed"] = node.config.stash[SEED]


SEED = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is quick. Tests with the longest timeout start first: otherwise one worker would finish long after."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not may_start_processes(item) and not marks & {"slow", "long", "sweep"}:
            item.add_marker("quick")
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


def may_start_processes(item: pytest.Item) -> bool:
    """By its directory; where that does not say it, by its fixtures and its mark."""
    directory = item.path.parent.relative_to(item.config.rootpath).as_posix() + "/"
    says_so = any(item.iter_markers("processes")) or bool(STARTS_PROCESSES & set(getattr(item, "fixturenames", ())))
    if not directory.startswith(f"{UNIT}/"):
        return says_so or directory.startswith(tuple(f"{name}/" for name in WITH_PROCESSES))
    if says_so:
        raise pytest.UsageError(
            f"{item.nodeid} starts processes, and no test in {UNIT} does: move it to one of {', '.join(WITH_PROCESSES)}"
        )
    return False


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a search for garbage, which many tests ask for, need not go through it."""
    gc.collect()
    gc.freeze()


_alone: list[str] = []
"""The test that runs now, if it may not start a process."""


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if _alone and event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"):
        raise AssertionError(
            f"{_alone[-1]} starts a process ({event}): in {UNIT} no test does, elsewhere it is marked `processes`"
        )


sys.addaudithook(_forbid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that is said to need no process has none, its long variant neither."""
    if not may_start_processes(item):
        _alone.append(item.nodeid)
    try:
        return (yield)
    finally:
        _alone.clear()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What all workers counted together, how to draw the same again, and which tools are missing."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    counts: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "call":
            counts.update({what: number for what, number in report.user_properties if isinstance(number, int)})
    for what, number in sorted(counts.items()):
        terminalreporter.write_line(f"counted: {number:,} {what}")
    terminalreporter.write_line(
        f"what was drawn at random is drawn again by --seed={terminalreporter.config.stash[SEED]}"
    )
    reasons = [
        report.longrepr[2]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report, pytest.TestReport) and isinstance(report.longrepr, tuple)
    ]
    left_out = said_of_skips(reasons)
    if left_out:
        terminalreporter.write_line(left_out, yellow=True, bold=True)


def said_of_skips(reasons: list[str]) -> str:
    """In one line what was skipped since something is missing, and the command that installs it; empty: nothing was."""
    loud = [reason.partition("LOUD: ")[2] for reason in reasons if "LOUD: " in reason]
    tools = Counter(reason.split()[0] for reason in loud if " is missing" in reason)
    others = Counter(reason.partition(":")[0] for reason in loud if " is missing" not in reason)
    parts = [f"{count} ({reason})" for reason, count in sorted(others.items())]
    if tools:
        counts = ", ".join(f"{count} need {tool}" for tool, count in sorted(tools.items()))
        parts.insert(0, f"{counts}; install: apt-get install {' '.join(sorted(tools))}")
    return f"SKIPPED LOUDLY: {'; '.join(parts)}" if parts else ""


@pytest.fixture(scope="session", autouse=True)
def in_memory() -> Path:
    """A directory on a file system that has no disk: a sync takes no time there. `scratch` removes it."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= LEAST_MEMORY
    return Path(tempfile.mkdtemp(prefix="mgr-", dir=MEMORY if has_room else None))


@pytest.fixture(scope="session")
def new_directory(in_memory: Path) -> Callable[[], Path]:
    """Makes a new directory there, for fixtures of a module and for the examples of hypothesis."""
    return lambda: Path(tempfile.mkdtemp(dir=in_memory))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path, new_directory: Callable[[], Path]) -> Iterator[Path]:
    """In memory for a test that starts no process, and gone when it is over. Whole jobs use the disk, as they will."""
    if may_start_processes(request.node):
        yield tmp_path
        return
    made = new_directory()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def scratch(in_memory: Path) -> Iterator[Path]:
    """For temporary files of all that the tests start. Whatever way this run ends, neither is left of it."""
    # A short name: sockets lie in it, and theirs are limited.
    directory = Path(tempfile.mkdtemp(prefix="mgr-"))
    mark = f"{os.getpid()}-{directory.name}"
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guardian.__file__)), mark, str(directory), str(in_memory)],
        stdin=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(guardian.VARIABLE, mark)
        patch.setenv("TMPDIR", str(directory))
        yield directory
    assert watching.stdin is not None
    watching.stdin.close()
    assert watching.wait(2 * guardian.SWEEP_S) == 0, "the guardian did not end all that was left"


# What tests start.


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """For the numbers in the docs: the end of a test run shows the sum of each."""
    return record_property


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("forkserver"), scratch)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def warm_pods(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers in pods come out of the warm interpreter, in tests that have it at hand."""
    is_cold = request.node.get_closest_marker("cold") is not None
    if set(request.fixturenames) >= {"kubelet", "fork_server"} and not is_cold:
        server = request.getfixturevalue("fork_server")
        monkeypatch.setattr(container, "start_shim", lambda: WarmShim(server))


@pytest.fixture
def job(fork_server: ForkServer, tmp_path: Path) -> Iterator[Job]:
    """A training job with its own volume and signal file; nothing of it outlives the test."""
    made = Job(fork_server, tmp_path)
    yield made
    made.end()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A volume and settings for a life in this very process, whose loggers are afterwards as they were."""
    monkeypatch.setenv("MIGRATOR_CKPT", str(tmp_path / "ckpts"))
    monkeypatch.setenv("MIGRATOR_SIGNAL", str(tmp_path / "signal"))
    monkeypatch.setenv("MIGRATOR_EVERY", "off")
    names = ("migrator", "watchdog", "watchdog.observers.inotify")
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).disabled) for name in names}
    yield tmp_path
    for name, (level, disabled) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).disabled = disabled
