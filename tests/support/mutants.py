"""Whether the tests would notice: one line of the protocol is changed, and some test has to fail.

    source -> mutants -> a private copy of the tree -> the tests that know the module -> killed, or survived

A test that passes says little of a line that nothing holds to its place. So each module of the commit protocol is
changed at one place at a time, as a tired hand would: a sync that is left out, a check turned round, two calls in
the wrong order. What no test notices is either told in EXPLAINED, as a change that nobody can see from outside, or
it is a hole in the tests.

A mutant is named by its module, function, line of text and change, not by a line's number: so what was
explained stays explained when other lines come and go, and has to be looked at again when its own line changes.

    python -m tests.support.mutants --module storage/posix
    python -m tests.support.mutants --only _write_synced --list

Each is run in a process forked from one that has imported everything but `migrator`, in a copy of the tree of which
nothing else is changed. The tests come in stages, quick ones first, and end at the first failure. Who takes
much longer than the unchanged code is killed with all it has started, and that counts: a loop without end is seen.

The price: changes of one line only, and what several mistakes together would do is not asked.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import functools
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("migrator", "tests", "hooks", "examples", "yamls", "docs", "pyproject.toml", "README.md", "Makefile")
LEAST_DEADLINE_S, TIMES_DEADLINE = 60.0, 6.0
"""How long all tests of a stage may take: at least so long, and so many times what the unchanged code takes."""
LEAST_TEST_S, TIMES_TEST = 15.0, 10.0
"""The same of a single test."""
MEMORY = 8 << 30
"""A mutant that collects without end is stopped here, and not by the machine's memory."""
LEAST_BUSY_S = 20
"""Seconds of the processor that a mutant has beyond twice what the unchanged code takes: so a loop without end ends."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Subject:
    """A module, and the tests that know it, quick ones first: what survives a stage goes on to the next."""

    stages: tuple[tuple[str, ...], ...]
    functions: frozenset[str] = frozenset()
    """Only these are changed; all of them if there are none."""
    texts: frozenset[str] = frozenset()
    """Functions that only make text for people."""


_CRASHES = tuple(
    f"tests/sweeps/test_crashes.py::test_every_promise_is_kept_behind_a_crash_and_one_more[{search}]"
    for search in (
        "one after the other, keep 1",
        "killed while leaving, keep 1",
        "replaced while leaving, keep 1",
        "begun twice, keep 1",
        "overlapping, keep 1",
        "together, keep 1, 2 writers",
        "one after the other, keep 2, without links",
    )
)
_ALL_CRASHES = ("tests/sweeps/test_crashes.py",)
_STORAGE_FAULTS = ("tests/jobs/test_storage_faults.py", "-k", "not read_only and not longer_than_a_second")
_PROTOCOL = ("tests/unit/ckpt/test_retention.py", "-k", "any_moment")
_CONTRACT = ("tests/unit/storage/test_posix_contract.py",)
_ATTEMPT = "tests/unit/save/test_attempt.py"
_LIVES = tuple(f"tests/unit/ckpt/test_{name}.py" for name in ("generations", "catalog", "leaving_mark", "continuation"))

SUBJECTS = {
    **dict.fromkeys(
        ("storage/posix", "storage/posix_calls"),
        Subject(
            (
                ("tests/unit/storage/test_posix.py",),
                _CONTRACT,
                ("tests/unit/ckpt/test_tensor_file.py",),
                _CRASHES,
                _PROTOCOL,
                _STORAGE_FAULTS,
            )
        ),
    ),
    "ckpt/retention": Subject(
        (("tests/unit/ckpt/test_retention.py", "-k", "not any_moment and not disk"), _CRASHES, _PROTOCOL)
    ),
    **dict.fromkeys(
        ("ckpt/generations", "ckpt/catalog", "ckpt/leaving_mark", "ckpt/continuation"),
        Subject((_LIVES, _CRASHES, _PROTOCOL)),
    ),
    "ckpt/names": Subject((("tests/unit/ckpt/test_names.py", "tests/unit/ckpt/test_manifest.py"), _CRASHES)),
    "ckpt/sealed": Subject((("tests/unit/ckpt/test_manifest.py", "tests/unit/ckpt/test_rank_record.py"), _CRASHES)),
    "ckpt/rank_record": Subject((("tests/unit/ckpt/test_rank_record.py", "tests/unit/ranks/test_shares.py"), _CRASHES)),
    "ckpt/manifest": Subject((("tests/unit/ckpt/test_manifest.py",), _CRASHES, ("tests/sweeps/test_flipped_bits.py",))),
    "ranks/shares": Subject(
        (("tests/unit/ranks/test_shares.py", _ATTEMPT), _CRASHES, ("tests/ranks/test_lost_ranks.py",))
    ),
    # What the gate and the change detector have to do with it is asked by tests of their own, which take minutes.
    "save/attempt": Subject(
        ((_ATTEMPT,), _CRASHES, _STORAGE_FAULTS),
        functions=frozenset(
            f"Attempt.{name}"
            for name in (
                *("run", "standing", "share", "help", "_tell", "look", "is_committed", "commit"),
                *("_write_share", "_write"),
            )
        ),
    ),
    "save/commit": Subject(((_ATTEMPT,), _CRASHES, _STORAGE_FAULTS)),
    **dict.fromkeys(
        ("ckpt/tensor_file", "ckpt/part_writer", "ckpt/piece_digests"),
        Subject((("tests/unit/ckpt/test_tensor_file.py", _ATTEMPT), _CRASHES, ("tests/sweeps/test_flipped_bits.py",))),
    ),
    **dict.fromkeys(
        ("session/restore", "session/restore_plan", "session/candidates", "session/resume", "session/group_restore"),
        Subject(
            (
                (
                    "tests/unit/session/test_candidates.py",
                    "tests/unit/session/test_restore.py",
                ),
                ("tests/unit/state/test_adapters.py", "-k", "not new_process"),
                (
                    "tests/sweeps/test_hostile_files.py",
                    "-k",
                    "touche or sealed or strange_is_loaded or at_wrong_places",
                ),
                ("tests/sweeps/test_flipped_bits.py",),
                _CRASHES,
                ("tests/ranks/test_load.py",),
            )
        ),
    ),
    "ckpt/digests": Subject((("tests/unit/ckpt/test_tensor_file.py", _ATTEMPT), _CRASHES)),
}

EXPLAINED: dict[str, str] = {
    'storage/posix.PosixStorage.check | self.make_directory("") | drop call': (
        "put() makes the directory, in the same way and as durable"
    ),
    'storage/posix.PosixStorage.check | self.make_directory("") | swap with next': (
        "put() makes the directory, in the same way and as durable"
    ),
    "storage/posix.PosixStorage.get | while room > 0 and (piece := os.read(fd, min(room, _READ_MAX))): | > to >=": (
        "with no room left nothing is asked for, and nothing read ends the loop as well"
    ),
    "storage/posix.PosixUpload.close | if fd >= 0: | >= to >": (
        "a part would need the descriptor 0, which only a process without standard input gives away"
    ),
    "ckpt/retention._superfluous | remains = [name for name in catalog.uncommitted(storage, ours) if _reach(name) < "
    "_reach(kept[0])] | < to <=": "the newest ckpt is committed, so it is not among those that are not",
    'ckpt/rank_record.RankRecord.from_bytes | dict(zip(map(int, found["shares"]), parts, strict=True)), | True to False': (
        "the parts are made of these very shares, one of each, or it is an error before"
    ),
    "save/attempt.Attempt.share | if self._context.size > 1 and self._may_open: | > to >=": (
        "all that a job of one rank reads from live memory is in its one share"
    ),
    "save/attempt.Attempt.share | if self._context.size > 1: | > to >=": (
        "with one rank the part was proven a moment before; it would be asked once more, to the same end"
    ),
    "ckpt/leaving_mark.wait_for_leaving | for generation in sorted(lineage[1:], reverse=True): | True to False": (
        "all waits are counted from one beginning: the order changes only which is named first"
    ),
    "ckpt/tensor_file._fill | if place.end > place.start: | > to >=": "of an empty tensor no bytes are read in either case",
    "ckpt/tensor_file._fill.pieces | if start >= end: | >= to >": "one more piece, of no bytes",
    "session/restore.newest_usable | found.append(str(error)) | swap with next": "two lists; neither call looks at the other's",
    'session/restore_plan._check_random | set_state(torch.Generator(), states["torch"]) | swap with next': (
        "each refuses for itself; only which is named first is another"
    ),
    "save/attempt.Attempt.share | is_small = sum(self._tensors[key].nbytes for key in self._live) <= SMALL_BYTES | "
    "<= to <": "of state of exactly 64 MiB it makes no difference which way it takes",
    "ckpt/retention._kept | return [], False | False to True": "with no ckpt to keep the caller returns at once",
    "ckpt/catalog.beside.is_beside | return from_the_start or number > earliest | > to >=": (
        "what has the number of a life on the way was answered before"
    ),
    "ckpt/leaving_mark._Pulse.why_dead | if mark.beats and self._silent_s > SILENT_S: | > to >=": (
        "no two moments of a clock are so exactly apart"
    ),
    'ckpt/continuation.gone_on_without | if note.get("looks") is not True or time.monotonic() > end_s: | > to >=': (
        "no two moments of a clock are the same"
    ),
}
"""Mutants that no test can tell from the code, or that do no harm, and why."""


# What is changed.


@dataclass(frozen=True)
class Mutant:
    """One change of a module's text."""

    id: str
    module: str
    begin: int
    end: int
    """Bytes of the text that are replaced."""
    new: str

    def of(self, source: str) -> str:
        data = source.encode()
        return (data[: self.begin] + self.new.encode() + data[self.end :]).decode()


_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_OPPOSITES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)
_FLAGS_WITHOUT_EFFECT = ("O_RDONLY", "O_CLOEXEC")
"""The first is zero; the second Python sets anyway."""


def mutants_of(
    module: str, source: str, *, functions: frozenset[str] = frozenset(), texts: frozenset[str] = frozenset()
) -> list[Mutant]:
    """All single changes of this text, in the order of its lines."""
    finder = _Finder(source)
    finder.body(ast.parse(source).body, ())
    lines = source.encode().split(b"\n")
    seen: Counter[str] = Counter()
    made = []
    for change in sorted(finder.changes, key=lambda change: (change.line, change.begin, change.operator)):
        if (functions and change.function not in functions) or change.function in texts:
            continue
        text = lines[change.line - 1].decode().strip()
        seen[name := f"{module}.{change.function} | {text} | {change.operator}"] += 1
        nth = f" #{seen[name]}" if seen[name] > 1 else ""
        made.append(Mutant(name + nth, module, change.begin, change.end, change.new))
    return made


@dataclass(frozen=True)
class _Change:
    function: str
    line: int
    operator: str
    begin: int
    end: int
    new: str


class _Finder:
    """Walks a module and notes what could be changed."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.changes: list[_Change] = []

    def body(self, statements: Sequence[ast.stmt], inside: tuple[str, ...]) -> None:
        for statement, following in zip(statements, [*statements[1:], None], strict=True):
            self._statement(statement, inside)
            if following is not None and _is_plain_call(statement) and _is_plain_call(following):
                self._swap(statement, following, inside)

    def _statement(self, node: ast.stmt, inside: tuple[str, ...]) -> None:
        if _is_about_types(node) or _is_docstring(node) or _is_log(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name != "__repr__":
                here = (*inside, node.name)
                if not isinstance(node, ast.ClassDef):
                    for default in [*node.args.defaults, *node.args.kw_defaults]:
                        self._expression(default, here)
                self.body(node.body, here)
            return
        if _is_call(node):
            self._replace(node, node, "pass", "drop call", inside)
        if isinstance(node, ast.Raise):
            # What stands in it is text for people.
            self._replace(node, node, "pass", "drop raise", inside)
            return
        if isinstance(node, ast.If | ast.While):
            text = self._text(node.test)
            if not isinstance(node.test, ast.Constant):  # that is turned round for itself
                self._replace(node.test, node.test, f"not ({text})", "negate", inside)
            is_alone = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], _OPPOSITES)
            self._expression(node.test, inside, is_negated=is_alone)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "test") and isinstance(node, ast.AnnAssign | ast.If | ast.While):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.ExceptHandler | ast.match_case):
                    self.body(child.body, inside)
                elif isinstance(child, ast.withitem):
                    self._expression(child.context_expr, inside)
                elif isinstance(child, ast.expr):
                    self._expression(child, inside)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.body(value, inside)

    def _expression(self, node: ast.AST | None, inside: tuple[str, ...], *, is_negated: bool = False) -> None:
        if node is None or isinstance(node, ast.JoinedStr) or _is_named(node, "log"):
            return
        if isinstance(node, ast.Compare) and not is_negated:
            sides = [node.left, *node.comparators]
            for left, right, op in zip(sides[:-1], sides[1:], node.ops, strict=True):
                old, new = _COMPARED[type(op)]
                self._between(left, right, (old, new), inside)
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                self._between(left, right, (old, new), inside)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._replace(node, node, str(not node.value), f"{node.value} to {not node.value}", inside)
        elif isinstance(node, ast.BinOp):
            self._sum(node, inside)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
            new = "min" if node.func.id == "max" else "max"
            self._replace(node.func, node.func, new, f"{node.func.id} to {new}", inside)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                for part in (child.iter, *child.ifs):
                    self._expression(part, inside)
            elif isinstance(child, ast.keyword):
                self._expression(child.value, inside)
            elif isinstance(child, ast.expr):
                self._expression(child, inside)

    def _sum(self, node: ast.BinOp, inside: tuple[str, ...]) -> None:
        one = node.right
        if isinstance(node.op, ast.Add | ast.Sub) and isinstance(one, ast.Constant) and one.value == 1:
            self._replace(one, one, "0", "1 to 0", inside)
        if isinstance(node.op, ast.BitOr):
            for flag, other in ((node.right, node.left), (node.left, node.right)):
                if _is_flag(flag):
                    self._replace(node, node, self._text(other), f"drop {self._text(flag)}", inside)

    def _swap(self, one: ast.stmt, other: ast.stmt, inside: tuple[str, ...]) -> None:
        between = self._data[self._at(one.end_lineno, one.end_col_offset) : self._at(other.lineno, other.col_offset)]
        new = self._text(other) + between.decode() + self._text(one)
        self._replace(one, other, new, "swap with next", inside)

    def _between(self, left: ast.AST, right: ast.AST, change: tuple[str, str], inside: tuple[str, ...]) -> None:
        """The operator between two expressions; parentheses and comments may stand there, too."""
        old, new = change
        at = self._data.index(old.encode(), self._span(left)[1], self._span(right)[0])
        self._note(left, f"{old} to {new}", (at, at + len(old)), new, inside)

    def _replace(self, first: Any, last: Any, new: str, operator: str, inside: tuple[str, ...]) -> None:
        self._note(first, operator, (self._span(first)[0], self._span(last)[1]), new, inside)

    def _note(self, node: Any, operator: str, span: tuple[int, int], new: str, inside: tuple[str, ...]) -> None:
        self.changes.append(_Change(".".join(inside), node.lineno, operator, *span, new))

    def _span(self, node: Any) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: Any, column: Any) -> int:
        return int(self._starts[line - 1] + column)

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self._data[begin:end].decode()


def _is_about_types(node: ast.stmt) -> bool:
    is_checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return is_checking or any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_log(node)


def _is_plain_call(node: ast.stmt) -> bool:
    return _is_call(node) and node.lineno == node.end_lineno


def _is_log(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _is_named(node.value, "log")


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_flag(node: ast.expr) -> bool:
    is_os = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    return is_os and node.attr.startswith("O_") and node.attr not in _FLAGS_WITHOUT_EFFECT  # type: ignore[attr-defined]


@functools.cache
def source_of(module: str) -> str:
    """Read once: somebody may be writing it."""
    return (ROOT / "migrator" / f"{module}.py").read_text()


def all_of(module: str) -> list[Mutant]:
    subject = SUBJECTS[module]
    return mutants_of(module, source_of(module), functions=subject.functions, texts=subject.texts)


# What is run.


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    id: str
    by: str
    """The test that failed, "no end" or nothing: then all passed."""
    took_s: float


NO_END = "no end"


class Bench:
    """A private copy of the tree, in which one mutant after another is tried."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        self._out = directory / "out"
        self._scratch = directory / "scratch"
        self._usual_s: dict[tuple[str, ...], float] = {}
        self._longest_s: dict[tuple[str, ...], float] = {}
        self.tree.mkdir()
        skipped = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.tree / name, ignore=skipped, symlinks=True)
            elif (ROOT / name).exists():
                shutil.copy2(ROOT / name, self.tree / name)
        for module in SUBJECTS:
            (self.tree / "migrator" / f"{module}.py").write_text(source_of(module))

    def check(self, stages: Sequence[tuple[str, ...]]) -> None:
        """The unchanged copy passes, and it is the copy that is tested; and now it is known how long that takes."""
        for stage in stages:
            self._usual(stage)
        self._is_killed_at_import(stages[0])

    def _usual(self, stage: tuple[str, ...]) -> float:
        """The seconds that the unchanged code takes. What it imports is compiled on the way, for all that follow."""
        if stage not in self._usual_s:
            by, took_s = self._run(stage, deadline_s=900.0, compiles=True)
            if by:
                raise SystemExit(f"the unchanged code does not pass {' '.join(stage)}: {by}\n{self.said()}")
            self._usual_s[stage] = took_s
            print(f"{took_s:6.1f} s  unchanged {' '.join(stage)[:100]}", file=sys.stderr, flush=True)
        return self._usual_s[stage]

    def _is_killed_at_import(self, stage: tuple[str, ...]) -> None:
        init = self.tree / "migrator" / "__init__.py"
        with _changed(init, init.read_text() + "\nraise RuntimeError('this is the copy')\n"):
            by, _ = self._run(stage, deadline_s=LEAST_DEADLINE_S)
        if not by or "this is the copy" not in self.said():
            raise SystemExit(f"it is not the copy that is tested:\n{self.said()}")

    def try_it(self, mutant: Mutant, stages: Sequence[tuple[str, ...]]) -> Verdict:
        begin_s = time.monotonic()
        by = ""
        for stage in stages:
            deadline_s = max(LEAST_DEADLINE_S, TIMES_DEADLINE * self._usual(stage))  # asked of the unchanged code
            with _changed(self.tree / "migrator" / f"{mutant.module}.py", mutant.of(source_of(mutant.module))):
                by, _ = self._run(stage, deadline_s=deadline_s)
            if by:
                break
        return Verdict(mutant.id, by, time.monotonic() - begin_s)

    def said(self) -> str:
        """The end of what the last run printed."""
        return self._out.read_text(errors="replace")[-3000:]

    def _run(self, stage: tuple[str, ...], *, deadline_s: float, compiles: bool = False) -> tuple[str, float]:
        """The first test that fails, if any."""
        begin_s = time.monotonic()
        told, tells = os.pipe()
        self._scratch.mkdir()
        worker = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            try:
                self._become(stage, worker, tells, compiles=compiles)
            finally:
                os._exit(70)
        os.close(tells)
        try:
            is_over = _ends(pid, deadline_s)
        finally:
            _end_all_of(pid)
            with os.fdopen(told) as pipe:
                said = pipe.read()
            shutil.rmtree(self._scratch, ignore_errors=True)
        took_s = time.monotonic() - begin_s
        if not is_over:
            return NO_END, took_s
        if not said:  # ended by a test's own timeout, or by the kernel
            return NO_END, took_s
        code, failed, longest_s = json.loads(said)
        if code == 5:
            raise SystemExit(f"no test is named by {' '.join(stage)}")
        if compiles:
            self._longest_s[stage] = longest_s
        return ("" if code == 0 else failed or "it cannot be imported"), took_s

    def _become(self, stage: tuple[str, ...], worker: int, tells: int, *, compiles: bool) -> None:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:
            return
        if not compiles:
            busy_s = LEAST_BUSY_S + int(2 * self._usual(stage))
            resource.setrlimit(resource.RLIMIT_CPU, (busy_s, busy_s))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        out = os.open(self._out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.tree)
        # A process that a test starts is one of the copy, too.
        os.environ["PYTHONPATH"] = str(self.tree)
        os.environ["TMPDIR"] = str(self._scratch)
        tempfile.tempdir = None
        if not compiles:
            # Within a second a file of the same size passes for the one that was compiled.
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = not compiles
        sys.path[:] = [str(self.tree), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("migrator", "tests")]:
            del sys.modules[name]

        import pytest

        notes = _Notes()
        timeout_s = 120 if compiles else max(LEAST_TEST_S, TIMES_TEST * self._longest_s[stage])
        arguments = [*stage, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={self.tree}"]
        # It was imported before, and that is all it has to say.
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not long", f"--timeout={timeout_s}"]
        arguments += ["--whole", "--seed=0"]  # the same tests for the unchanged code and for each mutant
        code = pytest.main(arguments, plugins=[notes])
        os.write(tells, json.dumps([int(code), notes.failed, notes.longest_s]).encode())
        sys.stdout.flush()
        os._exit(int(code))


class _Notes:
    """Which test failed, and how long the longest took."""

    def __init__(self) -> None:
        self.failed = ""
        self.longest_s = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.longest_s = max(self.longest_s, report.duration)
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} is not imported"


class _changed:  # noqa: N801 - a context
    """Another text in a file of the copy, and nothing compiled from either."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._before = path.read_text()

    def __enter__(self) -> None:
        for compiled in (self._path.parent / "__pycache__").glob(f"{self._path.stem}.*.pyc"):
            compiled.unlink()
        self._path.write_text(self._text)

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._before)


def _ends(pid: int, deadline_s: float) -> bool:
    """Whether it ends in time; it is not waited for, so that its number stays its own."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], deadline_s)[0])
    finally:
        os.close(fd)


def _end_all_of(pid: int) -> None:
    """The process, its group, and whatever it has left to us: we are whom the kernel gives orphans to."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os.waitpid(pid, 0)
    while children := _children():
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def _children() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def warm_up() -> None:
    """Import what takes long, but nothing of ours."""
    import hypothesis
    import numpy
    import pytest
    import safetensors.torch
    import torch
    import torch.utils.data
    import xxhash

    assert not any(name.partition(".")[0] == "migrator" for name in sys.modules)
    torch.set_num_threads(1)
    del hypothesis, numpy, pytest, safetensors, xxhash
    gc.collect()
    gc.freeze()


def verdicts(mutants: Sequence[Mutant], *, jobs: int, at_most: int | None, directory: Path) -> Iterator[Verdict]:
    """Try them all, each worker in a copy of its own."""
    warm_up()
    told, tells = os.pipe()
    workers = []
    for worker in range(jobs):
        mine = mutants[worker::jobs]
        pid = os.fork()
        if pid == 0:
            os.close(told)
            _work(mine, at_most, directory / str(worker), tells)
        workers.append(pid)
    os.close(tells)
    with os.fdopen(told) as pipe:
        try:
            for line in pipe:
                yield Verdict(**json.loads(line))
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
    if any(codes):
        raise SystemExit("a worker has failed; see above")


def _work(mutants: Sequence[Mutant], at_most: int | None, directory: Path, tells: int) -> None:
    """A worker's life; it takes with it whatever its mutants have started."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        directory.mkdir()
        bench = Bench(directory)
        checked: set[str] = set()
        for mutant in mutants:
            stages = SUBJECTS[mutant.module].stages[:at_most]
            if mutant.module not in checked:
                checked.add(mutant.module)
                bench.check(stages[:1])
            verdict = bench.try_it(mutant, stages)
            os.write(tells, (json.dumps(vars(verdict)) + "\n").encode())
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):  # else it was told to end
            print(error, file=sys.stderr)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


# What is told.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", choices=SUBJECTS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--only", action="append", help="only those whose id has this in it (may be repeated)")
    parser.add_argument("--jobs", type=int, default=2, help="so many at the same time (2)")
    parser.add_argument("--sample", type=int, help="only so many, always the same ones")
    parser.add_argument("--list", action="store_true", help="name them and run nothing")
    parser.add_argument("--stages", type=int, help="only so many stages of tests, the quick ones")
    parser.add_argument("--explained", action="store_true", help="run those that are explained, too")
    arguments = parser.parse_args()
    mutants = [mutant for module in arguments.module or SUBJECTS for mutant in all_of(module)]
    mutants = [mutant for mutant in mutants if any(part in mutant.id for part in arguments.only or [""])]
    if arguments.list:
        print("\n".join(mutant.id for mutant in mutants))
        return 0
    explained = [] if arguments.explained else [mutant for mutant in mutants if mutant.id in EXPLAINED]
    mutants = [mutant for mutant in mutants if mutant not in explained]
    if arguments.sample is not None and arguments.sample < len(mutants):
        chosen = set(random.Random(0).sample(range(len(mutants)), arguments.sample))
        mutants = [mutant for i, mutant in enumerate(mutants) if i in chosen]
    for module in SUBJECTS:
        source_of(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with all that it has started and copied
    start_s = time.monotonic()
    found = [Verdict(mutant.id, "", 0.0) for mutant in explained]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        jobs, at_most = max(1, arguments.jobs), arguments.stages
        for verdict in verdicts(mutants, jobs=jobs, at_most=at_most, directory=Path(directory)):
            found.append(verdict)
            print(f"{verdict.took_s:6.1f} s  {_outcome(verdict):10}{verdict.id}  {verdict.by}", flush=True)
    return _report(found, time.monotonic() - start_s)


def _outcome(verdict: Verdict) -> str:
    if verdict.by:
        return "no end" if verdict.by == NO_END else "killed"
    return "explained" if verdict.id in EXPLAINED else "SURVIVED"


def _report(found: Sequence[Verdict], took_s: float) -> int:
    columns: list[tuple[str, Callable[[str], bool]]] = [
        ("mutants", lambda outcome: True),
        ("killed", lambda outcome: outcome == "killed"),
        ("timed out", lambda outcome: outcome == "no end"),
        ("explained", lambda outcome: outcome == "explained"),
        ("survived", lambda outcome: outcome == "SURVIVED"),
    ]
    print("\n" + f"{'module':12}" + "".join(f"{name:>11}" for name, _ in columns) + f"{'seconds':>11}")
    modules = list(dict.fromkeys(verdict.id.partition(".")[0] for verdict in found))
    for module in [*modules, "all"]:
        of_it = [verdict for verdict in found if module in ("all", verdict.id.partition(".")[0])]
        counts = [sum(is_it(_outcome(verdict)) for verdict in of_it) for _, is_it in columns]
        seconds = sum(verdict.took_s for verdict in of_it)
        print(f"{module:12}" + "".join(f"{count:11}" for count in counts) + f"{seconds:11.0f}")
    survivors = [verdict for verdict in found if _outcome(verdict) == "SURVIVED"]
    noticed = len(found) - len(survivors)
    print(f"{noticed} of {len(found)} killed or explained; {took_s:.0f} s")
    for verdict in survivors:
        print(f"SURVIVED {verdict.id}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
