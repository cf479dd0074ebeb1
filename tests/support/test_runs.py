"""A run of the tests: what it draws, what it calls quick, what it says it left out, and that nothing outlives it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import chance, guardian
from tests.support.harness import ROOT, until
from tests.support.rank_processes import is_running

pytestmark = pytest.mark.processes


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of its own with this one's `conftest.py`."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import scratch, fork_server, job\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:cacheprovider\nmarkers =\n quick\n slow\n processes\n long\n sweep\n timeout\n"
    )
    return tmp_path


def start(suite: Path, text: str, *arguments: str, place: str = "test_it.py") -> subprocess.Popen[str]:
    (suite / place).parent.mkdir(parents=True, exist_ok=True)
    (suite / place).write_text(text)
    # A run of its own: nothing of this one's is handed on.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", guardian.VARIABLE))}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-s", *arguments, str(suite)],
        cwd=suite,
        env={**env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(suite: Path, text: str, *arguments: str, place: str = "test_it.py") -> str:
    """What pytest wrote."""
    said, _ = start(suite, text, *arguments, place=place).communicate(timeout=60)
    return said


# What it draws.

DRAWS = """
import pytest
from tests.support import chance

@pytest.mark.parametrize("number", chance.some("numbers", range(100), 0.1))
def test_it(number):
    print("drew", number, chance.dice("it").random())
"""


def drawn(text: str) -> list[str]:
    return re.findall(r"drew (.*)", text)


def test_a_seed_draws_the_same_again_and_each_run_draws_another(suite: Path) -> None:
    """A failure that came by chance comes again with the seed that the run has printed."""
    one, other = run(suite, DRAWS), run(suite, DRAWS)
    seed = re.findall(r"drawn again by --seed=(\d+)", one)
    assert len(seed) == 1

    again = run(suite, DRAWS, f"--seed={seed[0]}")

    assert len(drawn(one)) == 10
    assert drawn(again) == drawn(one)
    assert drawn(other) != drawn(one)


def test_workers_draw_from_the_same_seed(suite: Path) -> None:
    """They have to collect the same tests."""
    assert "10 passed" in run(suite, DRAWS, "-n", "2")


def test_nothing_is_left_out_of_a_whole_run(suite: Path) -> None:
    """`make sweeps` runs everything."""
    assert len(drawn(run(suite, DRAWS, "--whole"))) == 100


def test_a_share_is_never_empty() -> None:
    """However small it is; of nothing it is nothing."""
    assert len(chance.some("few", [1, 2, 3], 0.01)) == 1
    assert chance.some("none", [], 0.5) == []


# What is quick.

STARTS = """
import os, subprocess, sys
import pytest

def test_popen():
    subprocess.run([sys.executable, "-c", ""])

def test_fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

@pytest.mark.processes
def test_marked():
    subprocess.run([sys.executable, "-c", ""])

def test_nothing():
    pass
"""


def test_a_quick_test_that_starts_a_process_fails(suite: Path) -> None:
    """`make quick` stays quick."""
    said = run(suite, STARTS, "-rA")

    assert re.findall(r"^(PASSED|FAILED) \S+::(\w+)", said, re.MULTILINE) == [
        ("PASSED", "test_marked"),
        ("PASSED", "test_nothing"),
        ("FAILED", "test_popen"),
        ("FAILED", "test_fork"),
    ]
    assert "elsewhere it is marked `processes`" in said


def test_no_unit_test_starts_a_process(suite: Path) -> None:
    """Neither unsaid, nor with a mark or a fixture that says so; nor do long variants, which are not quick."""
    unit = "tests/unit/room/test_it.py"
    plain = STARTS.replace("@pytest.mark.processes", "@pytest.mark.long")
    failed = [("FAILED", "test_popen"), ("FAILED", "test_fork"), ("FAILED", "test_marked")]
    ended = re.compile(r"^(PASSED|FAILED) \S+::(\w+)", re.MULTILINE)

    assert ended.findall(run(suite, plain, "-rA", place=unit)) == [("PASSED", "test_nothing"), *failed]
    assert "1 deselected" in run(suite, plain, "-m", "quick", place=unit)
    for text in (STARTS, "def test_it(job):\n    pass\n"):
        assert "no test in tests/unit does: move it to one of tests/jobs" in run(suite, text, place=unit)


def test_what_is_quick_is_said_by_the_directory(suite: Path) -> None:
    """Where whole jobs, ranks and pods are tested nothing is; elsewhere what no fixture and no mark speaks against."""
    text = "def test_it():\n    pass\n"

    assert "1 passed" in run(suite, text, "-m", "quick", place="tests/unit/room/test_it.py")
    assert "1 deselected" in run(suite, text, "-m", "quick", place="tests/jobs/test_it.py")
    slow = f"import pytest\n\n@pytest.mark.slow\n{text}"
    assert "1 deselected" in run(suite, slow, "-m", "quick", place="tests/unit/room/test_it.py")


# What it says it left out.

SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_traced(number):
    pytest.skip("LOUD: strace is missing, and so on")

@pytest.mark.parametrize("tool", ["busybox", "busybox sh"])
def test_shell(tool):
    pytest.skip(f"LOUD: {tool} is missing")

def test_root():
    pytest.skip("LOUD: no tmpfs can be mounted here: not root")

def test_by_design():
    pytest.skip("only on Mars")
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_left_out_is_said_in_one_line_with_the_way_to_get_it(suite: Path, workers: str) -> None:
    """How many tests for want of what, and the one command that installs it."""
    assert (
        "SKIPPED LOUDLY: 2 need busybox, 3 need strace; install: apt-get install busybox strace; "
        "1 (no tmpfs can be mounted here)\n"
    ) in run(suite, SKIPS, "-n", workers)


def test_nothing_is_said_where_nothing_is_missing(suite: Path) -> None:
    """Tests skipped on purpose are not listed."""
    assert "LOUDLY" not in run(suite, SKIPS, "-k", "design")


# What it leaves behind.

LEAVES = """
import subprocess, sys, time
from pathlib import Path

def test_it(job, in_memory):
    job.write('''
        import os, subprocess, sys, tempfile, time
        from multiprocessing import get_context
        if __name__ == "__main__":
            sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
            alone = subprocess.Popen(sleeps, start_new_session=True)
            spawned = get_context("spawn").Process(target=time.sleep, args=(60,))
            spawned.start()
            tempfile.mkdtemp(prefix="pymp-")
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            print("pids", os.getpid(), alone.pid, spawned.pid)
            print("scratch", tempfile.gettempdir(), len(os.listdir(tempfile.gettempdir())) > 0)
            time.sleep(60)
    ''')
    life = job.run()
    life.wait_for("^scratch")
    Path(SAID).write_text(life.text + f"memory {in_memory}")
    time.sleep(60)
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_that_is_killed_leaves_nothing_behind(suite: Path, workers: str) -> None:
    """SIGKILL to all of pytest: what its tests had started ends, whatever session it is in, and its directories go."""
    said = suite / "said"
    tests = start(suite, LEAVES.replace("SAID", repr(str(said))), "-n", workers)
    try:
        until(lambda: said.exists() and "memory" in said.read_text(), "the test to run", 60)
        text = said.read_text()
        pids = [int(pid) for pid in re.findall(r"^pids (.*)$", text, re.MULTILINE)[0].split()]
        scratch = Path(re.findall(r"^scratch (\S+) True$", text, re.MULTILINE)[0])
        memory = Path(re.findall(r"^memory (\S+)$", text, re.MULTILINE)[0])
        assert memory.is_dir()
        marks = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
        mark = next(m for m in marks if m.startswith(guardian.VARIABLE.encode())).decode().partition("=")[2]
        marked = guardian.marked(mark)
        assert set(pids) <= set(marked)
        assert len(marked) >= len(pids) + 2, "the fork server, and a child that nobody named"
    finally:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        assert tests.stdout is not None
        tests.stdout.close()

    until(lambda: not any(map(is_running, marked)), "what it started to end", 20)
    until(lambda: not scratch.exists() and not memory.exists(), "its temporary files to go", 20)


# What CI sweeps.


def sweeps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweeps", ROOT / ".ci" / "sweeps.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["sweeps"] = found
    spec.loader.exec_module(found)
    return found


def test_whatever_a_change_touches_in_the_package_is_swept() -> None:
    """A new module belongs to an area, or somebody says here that it needs no sweep; areas name tests that exist."""
    areas = sweeps()
    needs_none = {"__init__", "errors", "events", "api", "grace"}
    modules = [path.relative_to(ROOT) for path in (ROOT / "migrator").rglob("*.py")]

    without = {".".join(path.with_suffix("").parts[1:]) for path in modules if not areas.areas_of([str(path)])}

    assert without == needs_none
    for area in areas.AREAS:
        for name in area.tests:
            assert (ROOT / "tests" / f"{name}.py").exists()


def test_ci_sweeps_what_a_change_deserves() -> None:
    """By the paths alone."""
    areas = sweeps()

    assert [area.name for area in areas.areas_of(["migrator/storage/posix.py"])] == ["storage and ckpt"]
    assert [area.name for area in areas.areas_of(["hooks/preStop.sh"])] == ["hooks, notices and leaving"]
    assert areas.areas_of(["README.md", "docs/files.md"]) == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('5 passed in 1.00s')", 0),
        ("print('FAILED tests/a.py::test_b'); raise SystemExit(1)", 1),
        ("print('5 passed in 1.00s', flush=True); signal.pause()", None),
        ("print('FAILED tests/a.py::test_b', flush=True); signal.pause()", 1),
        ("print('1 failed, 9 passed in 479.15s (0:07:59)', flush=True); signal.pause()", 1),
    ],
)
def test_a_sweep_that_is_ended_behind_a_failure_has_failed(script: str, expected: int | None) -> None:
    """pytest exits with 2 when it is interrupted, whatever happened before."""
    command = [sys.executable, "-c", f"import signal, sys; sys.excepthook = lambda *_: None; {script}"]
    assert sweeps().run(command, 1.0) == expected
