"""What `tests.support.mutants` changes, and that it notices when a test does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import chance
from tests.support.mutants import EXPLAINED, ROOT, SUBJECTS, Bench, all_of, mutants_of, source_of

SAMPLE = '''
"""A docstring() == 1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from here import there


class Disk:
    """One more."""

    def __repr__(self) -> str:
        return "a" if self.is_a is True else "b"

    def put(self, name: str, *, exclusive: bool = True) -> int | None:
        if name in self.names and (
            exclusive or self.is_full
        ):
            raise ValueError(f"{name == 1} is taken", exclusive is True)
        log("put", is_there=True)
        self.sync(name)
        self.rename(name)
        while not self.is_done:
            self.at = max(self.at + 1, 2)
        fd = os.open(name, os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC)
        try:
            return fd
        finally:
            self.close(
                fd,
            )
'''

CHANGES = [
    ("Disk.put", "def put(self, name: str, *, exclusive: bool = True) -> int | None:", "True to False"),
    ("Disk.put", "if name in self.names and (", "negate"),
    ("Disk.put", "if name in self.names and (", "in to not in"),
    ("Disk.put", "if name in self.names and (", "and to or"),
    ("Disk.put", "exclusive or self.is_full", "or to and"),
    ("Disk.put", 'raise ValueError(f"{name == 1} is taken", exclusive is True)', "drop raise"),
    ("Disk.put", "self.sync(name)", "drop call"),
    ("Disk.put", "self.sync(name)", "swap with next"),
    ("Disk.put", "self.rename(name)", "drop call"),
    ("Disk.put", "while not self.is_done:", "negate"),
    ("Disk.put", "self.at = max(self.at + 1, 2)", "max to min"),
    ("Disk.put", "self.at = max(self.at + 1, 2)", "1 to 0"),
    ("Disk.put", "fd = os.open(name, os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC)", "drop os.O_EXCL"),
    ("Disk.put", "fd = os.open(name, os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC)", "drop os.O_WRONLY"),
    ("Disk.put", "self.close(", "drop call"),
]


def test_what_is_changed_is_what_a_tired_hand_would_change() -> None:
    """Calls, checks, conditions, flags; not texts, logs, types or docstrings."""
    assert [mutant.id for mutant in mutants_of("disk", SAMPLE)] == [
        f"disk.{function} | {line} | {change}" for function, line, change in CHANGES
    ]


def test_each_is_one_change_and_can_be_read_by_python() -> None:
    """What stands before and behind the change stays as it is, to the byte; no two give the same text."""
    made = {mutant.id: mutant.of(SAMPLE) for mutant in mutants_of("disk", SAMPLE)}
    assert len({*made.values(), SAMPLE}) == len(made) + 1
    for text in made.values():
        ast.parse(text)
    function = "disk.Disk.put | "
    assert "self.rename(name)\n        self.sync(name)" in made[f"{function}self.sync(name) | swap with next"]
    assert "while not (not self.is_done):" in made[f"{function}while not self.is_done: | negate"]
    assert "name not in self.names and (\n" in made[f"{function}if name in self.names and ( | in to not in"]
    assert "max(self.at + 0, 2)" in made[f"{function}self.at = max(self.at + 1, 2) | 1 to 0"]


def test_names_stay_when_other_lines_come_and_go() -> None:
    """They have no line numbers; of equal changes in equal lines the second is #2."""
    moved = SAMPLE.replace("class Disk", "X = 1\n\n\nclass Disk").replace(
        "self.is_done:", "self.is_done:\n            1"
    )
    assert {mutant.id for mutant in mutants_of("disk", moved)} == {mutant.id for mutant in mutants_of("disk", SAMPLE)}
    twice = "def f():\n    g()\n    if x:\n        g()\n"
    assert [mutant.id for mutant in mutants_of("m", twice)] == [
        "m.f | g() | drop call",
        "m.f | if x: | negate",
        "m.f | g() | drop call #2",
    ]


@pytest.mark.parametrize("module", SUBJECTS)
def test_every_mutant_can_be_read_and_named(module: str) -> None:
    """Of the modules themselves: all parse, all differ, no two have one name."""
    source = source_of(module)
    mutants = all_of(module)
    assert len({mutant.id for mutant in mutants}) == len(mutants) > 0
    for mutant in chance.some(module, mutants, 0.4):
        text = mutant.of(source)
        assert text != source
        ast.parse(text)


def test_no_explanation_is_stale() -> None:
    """What is explained is still there: a line that has changed has to be looked at again."""
    there = {mutant.id for module in SUBJECTS for mutant in all_of(module)}
    assert EXPLAINED.keys() <= there, sorted(EXPLAINED.keys() - there)
    assert all(EXPLAINED.values())


def test_only_the_unchanged_code_says_how_long_its_tests_take(tmp_path: Path) -> None:
    """A mutant is in place while its tests run, and at no other time: no stage takes it for the code itself."""
    runs: list[tuple[bool, bool]] = []

    class Watched(Bench):
        def _run(self, stage: tuple[str, ...], *, deadline_s: float, compiles: bool = False) -> tuple[str, float]:
            runs.append(
                (compiles, (self.tree / "migrator" / "ckpt/digests.py").read_text() == source_of("ckpt/digests"))
            )
            return "", 1.0

    bench = Watched(tmp_path)
    bench.try_it(all_of("ckpt/digests")[0], [("quick",), ("slow",)])

    assert runs == [(True, True), (False, False)] * 2


@pytest.mark.processes
def test_a_commit_without_its_sync_is_noticed() -> None:
    """Really run: the very line that makes the bytes durable."""
    mutant = "storage/posix_calls.write_synced | os.fsync(fd) | drop call"
    command = [sys.executable, "-m", "tests.support.mutants", "--jobs", "1", "--stages", "1", "--only", mutant]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=110)

    assert done.returncode == 0, done.stderr
    assert f"killed    {mutant}  tests/unit/storage/test_posix.py::" in done.stdout
    assert "1 of 1 killed or explained" in done.stdout
