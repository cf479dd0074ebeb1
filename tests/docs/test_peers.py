"""The comparison with other libraries (`benchmarks/peers.py`) runs, sees what is lost, and of ours nothing is."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.harness import DEADLINE_S, ROOT, until

pytestmark = pytest.mark.processes

CARELESS, OURS = "torch.save, in place", "migrator"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The rows of a coarse run, by library."""
    scratch, cache = tmp_path_factory.mktemp("peers"), tmp_path_factory.mktemp("cache")
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--only", f"{CARELESS};{OURS}"]
    done = subprocess.run(
        [*command, "--stride", "9973", "--cuts", "2", "--kills", "7"],
        env={**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert list(scratch.iterdir()) == []  # nothing is left behind
    return {row[0]: row for row in rows[2:]}


def counts(row: list[str]) -> tuple[list[int], list[int], list[int], list[int]]:
    """(flips, cuts, kills, full disks), each with its outcomes behind the number that were made."""
    if row[2].startswith("does not run"):
        pytest.fail(row[2])
    if row[10] == "-":
        pytest.skip("LOUD: processes cannot be traced here")
    numbers = list(map(int, row[2:16]))
    return numbers[:4], numbers[4:8], numbers[8:12], numbers[12:]


@pytest.mark.long
def test_the_sweeps_see_what_is_lost(table: dict[str, list[str]]) -> None:
    """A file that is written in place is lost to a kill and to a full disk, and its flipped bits are not found."""
    flips, cuts, kills, full = counts(table[CARELESS])
    for made, *outcomes in (flips, cuts, kills):
        assert made == sum(outcomes)
        assert made > 0
    assert flips[2] > 0
    assert kills[3] > 0
    assert full[1] < full[0]
    assert table[CARELESS][-2].startswith("no")


@pytest.mark.long
def test_nothing_of_ours_is_lost(table: dict[str, list[str]]) -> None:
    """By the same sweeps: no wrong load, no kill that leaves less than the state before, all synced, all told."""
    flips, cuts, kills, full = counts(table[OURS])
    for made, *outcomes in (flips, cuts, kills):
        assert made == sum(outcomes)
        assert made > 1
    assert (flips[2], cuts[2]) == (0, 0)
    assert kills[2:] == [0, 0]
    assert full[0] == full[1] > 0
    assert table[OURS][-2:] == ["yes", "yes"]


def test_the_workers_end_with_their_command(tmp_path: Path) -> None:
    """A run that is itself killed leaves no process behind, neither a worker nor what a worker has forked."""
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--only", CARELESS, "--stride", "1"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL) as process:
        try:
            (worker,) = until(lambda: children(process.pid), "a worker")
            ends = [os.pidfd_open(worker), until(lambda: a_child(worker), "a process that saves or loads")]
        finally:
            process.kill()
    for end in ends:
        with os.fdopen(end, closefd=True):
            assert select.select([end], [], [], DEADLINE_S)[0]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def a_child(pid: int) -> int | None:
    """A handle that tells when it has ended; it may have just now."""
    for child in children(pid):
        with suppress(ProcessLookupError):
            return os.pidfd_open(child)
    return None
