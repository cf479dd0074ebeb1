"""The fault table (`benchmarks/faults.py`) runs, keeps its aims, sees when one is missed, and its page has all rows."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.docs.test_pages import doc, table
from tests.support.harness import ROOT, processes_with, until

FAULTS = ROOT / "benchmarks" / "faults.py"
QUICK = "process killed"
Judge = Callable[..., Any]
SHORT = ["pod preempted", "scale up 3 to 4", "scale down 4 to 3"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("faults")


@pytest.fixture
def judge(faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Makes the row of a job with these diaries, of so many samples in one epoch."""

    def judged(*lives: dict[str, Any], is_announced: bool, samples: int = 20) -> Any:
        monkeypatch.setattr(faults, "SAMPLES", samples)
        monkeypatch.setattr(faults, "EPOCHS", 1)
        write_diaries(tmp_path / "diaries", lives)
        row = faults.Row("a fault", is_announced)
        job = SimpleNamespace(history=faults.History(tmp_path / "diaries"), faults_at=[], stops=[])
        faults.judge(row, SimpleNamespace(lost_at_most=0 if is_announced else 3), job)
        return row

    return judged


def run(tmp_path: Path, *arguments: str, timeout_s: float) -> dict[str, Any]:
    numbers = tmp_path / "numbers.json"
    done = subprocess.run(
        [sys.executable, str(FAULTS), "--json", str(numbers), *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_with(tmp_path) == []
    assert list(tmp_path.iterdir()) == [numbers], "what the pods wrote is removed"
    rows = {row["name"]: row for row in json.loads(numbers.read_text())["rows"]}
    for name, row in rows.items():
        assert f"| {name} " in done.stdout
        if row["not_run"] is None:
            assert len(row["ranks"]) > 1, f"{name}: nothing was started again"
            assert row["next_step_s"], name
    return rows


# Real runs.


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_fault_without_notice_costs_no_more_than_the_interval(tmp_path: Path) -> None:
    rows = run(tmp_path, "--only", QUICK, timeout_s=220)
    row = rows[QUICK]
    # None, if the other ranks had their agents' notice and could save before they knew of it.
    assert max(row["lost"]) <= 10
    # Their samples are trained again, 48 in each step of four ranks. Not all ranks may have made the last one.
    assert 48 * (sum(row["lost"]) - 1) < row["again"] <= 48 * sum(row["lost"]) or not any(row["lost"])


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_notice_costs_no_step(tmp_path: Path) -> None:
    rows = run(tmp_path, "--only", "; ".join(SHORT), timeout_s=580)
    assert list(rows) == SHORT
    assert [rows[name]["again"] for name in SHORT] == [0] * len(SHORT)


@pytest.mark.processes
@pytest.mark.sweep
@pytest.mark.timeout(2400)
def test_the_whole_table(tmp_path: Path) -> None:
    rows = run(tmp_path, timeout_s=2380)
    assert not any(row["wrong"] for row in rows.values())


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(tmp_path: Path, number: int) -> None:
    command = [sys.executable, str(FAULTS), "--only", "scale up 3 to 4", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        until(lambda: any(tmp_path.rglob("*-of-3.jsonl")), "ranks that train")
        process.send_signal(number)
        process.communicate(timeout=60)

    assert process.returncode != 0
    assert processes_with(tmp_path) == []


# What it counts.


def write_diaries(directory: Path, lives: Sequence[dict[str, Any]]) -> None:
    """Each life: `begins`, how far it `trains`, the `lives` up to it, and `ids` that it trains instead of its own."""
    directory.mkdir()
    for number, life in enumerate(lives, 1):
        for rank in range(2):
            lines: list[dict[str, Any]] = [{"at": number, "begins": life["begins"], "lives": life["lives"]}]
            for step in range(life["begins"] + 1, life["trains"] + 1):
                ids = life.get("ids", {}).get((step, rank), [2 * (step - 1) + rank])
                lines.append({"at": number + step / 100, "step": step, "epoch": 0, "ids": ids})
            if number == len(lives):
                lines.append({"over": life["trains"], "weights": life.get("weights", "aa")[rank]})
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (directory / f"{number}-{rank}-of-2.jsonl").write_text(text)


FIRST = {"begins": 0, "trains": 6, "lives": [[1, 0]]}


@pytest.mark.parametrize(
    ("begins", "is_announced", "is_wrong"), [(6, True, False), (5, True, True), (4, False, False), (2, False, True)]
)
def test_steps_that_are_lost_are_counted(judge: Judge, begins: int, is_announced: bool, is_wrong: bool) -> None:
    """Those behind the ckpt: with a notice none may be, without one no more than the interval, here 3."""
    row = judge(FIRST, {"begins": begins, "trains": 10, "lives": [[1, 0], [2, begins]]}, is_announced=is_announced)
    assert row.lost == [6 - begins]
    assert bool(row.wrong) == is_wrong
    assert (row.missed, row.twice, row.again) == (0, 0, 2 * (6 - begins))


def test_a_sample_that_is_left_out_and_one_that_comes_twice_are_seen(judge: Judge) -> None:
    """The second life goes on from step 6. It leaves out two samples, and trains one of the first life again."""
    ids = {(8, 0): [], (8, 1): [0]}
    row = judge(FIRST, {"begins": 6, "trains": 10, "lives": [[1, 0], [2, 6]], "ids": ids}, is_announced=True)
    assert (row.lost, row.missed, row.twice) == ([0], 2, 1)
    assert row.wrong == ["2 samples missed, 1 twice in the weights"]


def test_a_branch_that_nobody_continues_is_not_in_the_weights(judge: Judge) -> None:
    """The second life began from an old ckpt, and the third one from a newer one of the first life."""
    second = {"begins": 3, "trains": 5, "lives": [[1, 0], [2, 3]]}
    third = {"begins": 6, "trains": 10, "lives": [[1, 0], [3, 6]]}
    row = judge(FIRST, second, third, is_announced=False)
    assert row.lost == [3, 2]
    assert (row.missed, row.twice, row.again) == (0, 0, 4)


def test_weights_that_differ_are_seen(judge: Judge) -> None:
    row = judge({**FIRST, "weights": "ab"}, is_announced=True, samples=12)
    assert row.wrong == ["weights differ: life 1, the end"]
    assert "MISSED" in row.cells[-1]


# Its page.


def test_the_page_has_a_row_for_each_fault(faults: ModuleType) -> None:
    """In the table of a real run, and in that of what others document; both as they are printed."""
    names = [scenario.name for scenario in faults.SCENARIOS]
    assert [row[0] for row in table(doc("faults.md"), *faults.HEADER)] == names
    assert faults.documented() in doc("faults.md")


def test_the_page_shows_a_run_that_kept_all_aims(faults: ModuleType) -> None:
    assert {row[-1] for row in table(doc("faults.md"), *faults.HEADER)} == {"kept"}
