"""The benchmarks of what users call run, leave nothing behind, and fill the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import DEADLINE_S, ROOT

pytestmark = pytest.mark.processes

PAGE = ROOT / "docs" / "benchmarks.md"
RUNS = {
    "time_to_safety": ["--mb", "1", "--rounds", "1", "--pause", "0", "--only", "migrator;torch.save + fsync;raw disk"],
    "stall": ["--mb", "1", "--short", "--step-ms", "10", "--only", "migrator;DCP async_save"],
    "notice": ["--rounds", "1", "--only", "SIGTERM, idle, 1 rank;file, listed, python, 1 rank"],
}
PARTS = {"growth": ["--short", "--only", "names;ckpts"]}
"""Has no numbers on the page."""


def run(name: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def places(page: Path) -> list[str]:
    return re.findall(r"<!-- (?:results|picture): ([\w.]+) -->", page.read_text())


@pytest.mark.parametrize(
    "name", ["notice", *(pytest.param(name, marks=pytest.mark.long) for name in RUNS | PARTS if name != "notice")]
)
def test_a_small_run_has_numbers_for_each_row_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    """Each row that was asked for is in a table, and the directory on the disk that is measured is empty again."""
    disk, numbers = tmp_path / "disk", tmp_path / "numbers.json"
    disk.mkdir()
    run(name, *(RUNS | PARTS)[name], "--dir", str(disk), "--json", str(numbers))

    found = json.loads(numbers.read_text())
    assert {one["row"] for one in found["values"]} == set((RUNS | PARTS)[name][-1].split(";"))
    assert found["skipped"] == {}
    assert {table["id"].partition(".")[0] for table in found["tables"]} == {name}
    assert list(disk.iterdir()) == []


def result(name: str, table: str) -> dict[str, Any]:
    machine = {"cores": 2, "architecture": "x86_64", "memory_gb": 8, "kernel": "6.1", "filesystem": "ext4"}
    machine |= {"python": "3.11", "torch": "2.13", "date": "2026-11-20", "load_before": 0.1}
    rows, bars = [["migrator", "0.125"]], [["migrator", 0.125]]
    tables = [{"id": table, "title": "How long", "header": ["", "s"], "rows": rows, "unit": "s", "bars": bars}]
    skipped = {"another": "is not here"}
    return {"name": name, "machine": machine, "options": {}, "tables": tables, "values": [], "skipped": skipped}


def test_the_numbers_go_to_their_places_on_the_page(tmp_path: Path) -> None:
    """A table and its picture replace what was there, what did not run is named, a second time changes nothing."""
    page, numbers = tmp_path / "benchmarks.md", tmp_path / "time_to_safety.json"
    page.write_text(PAGE.read_text())
    numbers.write_text(json.dumps(result("time_to_safety", "time_to_safety.save.1000")))

    run("report", str(numbers), "--page", str(page))
    first = page.read_text()
    run("report", str(numbers), "--page", str(page))

    assert page.read_text() == first
    assert "| migrator | 0.125 |" in first
    assert "- not run: another: is not here" in first
    assert "![How long](images/time_to_safety.save.1000.svg)" in first
    assert "0.125" in (tmp_path / "images" / "time_to_safety.save.1000.svg").read_text()
    assert places(page) == places(PAGE)


def test_each_place_on_the_page_belongs_to_a_benchmark() -> None:
    """A place that no script fills would stay empty for ever."""
    assert {place.partition(".")[0] for place in places(PAGE)} == {"machine", *RUNS}
