"""The line for KubeDL's autoscaler: it reads what was given, or drops it, and nothing makes it crash."""

from __future__ import annotations

import ast
import io
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from migrator import errors, events
from migrator.platform.progress_line import ProgressLine, line
from tests.support.harness import ROOT
from tests.support.kubedl import Crash, Seen, read

GOOD: dict[str, Any] = {
    "epoch": 3, "batch": 50, "batches": 1563, "latency_s": 0.258, "loss": 2.5284, "accuracy": 42.19
}  # fmt: skip
WHOLE = st.integers() | st.integers(0, 20_000) | st.integers(-20, 200)
NUMBERS = st.floats() | st.floats(-2, 200) | st.floats(0, 1) | st.integers(-10, 1000).map(float)
VALUES = st.fixed_dictionaries(
    {"epoch": WHOLE, "batch": WHOLE, "batches": WHOLE, "latency_s": NUMBERS, "loss": NUMBERS, "accuracy": NUMBERS}
)


# What the reader is: first its defects, for which the line has to allow.


def test_the_lines_of_kubedls_own_tutorial_are_read_as_kubedl_reads_them() -> None:
    """Its batch is right only if the epoch has one digit and the batch two; 100 percent is read as nothing."""
    text = (
        "Epoch: [{}][{}/1563]\tTime  0.258 ( 0.385)\tData  0.155 ( 0.170)\t"
        "Loss 2.5e+00 (2.6e+00)\tAcc@1  42.19\tAcc@5 {}"
    )

    assert read(text.format(7, "  50", " 64.06")) == Seen(7, 50, 0.258, 64.06)
    assert read(text.format(17, "  50", " 64.06")) == Seen(17, 17, 0.258, 64.06)
    assert read(text.format(7, "   5", " 64.06")) == Seen(7, 1563, 0.258, 64.06)
    assert read(text.format(7, "  50", "100.00")) == Seen(7, 50, 0.258, 0.0)


@pytest.mark.parametrize("text", ["Epoch 3", "Epoch: [3][4/9]\tTime 0.258\t\t\t\tAcc 5.00", "see /data/Epoch-3/x"])
def test_other_lines_with_its_word_crash_it(text: str) -> None:
    """The reader of these tests sees what must never be printed."""
    with pytest.raises(Crash):
        read(text)


# What the line is.


def test_the_line_has_six_fields_in_the_form_of_the_tutorial() -> None:
    """Epoch and batch, time, loss and accuracy stand where KubeDL's tutorial shows them."""
    assert line(**GOOD, ranks=2) == (
        "Epoch: [3][0050/1563]\tTime  0.258\tRate 3.876/s\tLoss 2.5284e+00\tRanks 2\tAcc  42.19"
    )


CAN_BE_TOLD = st.fixed_dictionaries(
    {
        "epoch": st.integers(0, 9),
        "batch": st.integers(0, 9999),
        "batches": WHOLE,
        "latency_s": st.floats(0, 1),
        "loss": NUMBERS,
        "accuracy": st.floats(0, 100),
    }
)


@given(CAN_BE_TOLD)
def test_what_is_read_is_what_was_given(values: dict[str, Any]) -> None:
    """To the milliseconds and hundredths that the form has."""
    seen = read(line(**values))

    assert seen is not None
    assert (seen.epoch, seen.batch) == (values["epoch"], values["batch"])
    assert seen.latency_s == pytest.approx(values["latency_s"], abs=0.000501)
    assert seen.accuracy == pytest.approx(values["accuracy"], abs=0.00501)


@given(VALUES)
@example({**GOOD, "latency_s": 100.456})
@example({**GOOD, "latency_s": 99.9996})
@example({**GOOD, "latency_s": -0.25})
@example({**GOOD, "latency_s": math.nan})
@example({**GOOD, "accuracy": math.nan})
@example({**GOOD, "epoch": 100, "batch": 3})
@example({**GOOD, "epoch": 10, "batch": 12345})
@example({**GOOD, "accuracy": 100.0})
def test_whatever_is_given_it_reads_the_nearest_or_nothing(values: dict[str, Any]) -> None:
    """Never a number that is not the nearest one the form can tell, and never a crash."""
    text = line(**values)
    seen = read(text)

    assert text.count("\t") == 5
    assert len(text.splitlines()) == 1
    latency_s, accuracy = values["latency_s"], values["accuracy"]
    if seen is None:
        assert not (0 <= latency_s <= 1 and math.isfinite(accuracy))
        return
    assert seen.epoch == min(max(values["epoch"], 0), 9)
    assert seen.batch == min(max(values["batch"], 0), 9999)
    assert latency_s >= 0
    assert seen.latency_s == pytest.approx(latency_s, abs=0.000501)
    assert seen.accuracy == pytest.approx(min(max(accuracy, 0.0), 100.0), abs=0.00501)


@given(VALUES)
def test_a_person_sees_every_true_number(values: dict[str, Any]) -> None:
    """Where KubeDL is shown another one, the true one stands behind it."""
    first, *_, last = line(**values).split("\t")

    shown = re.findall(r"-?[0-9]+", first)
    assert str(values["epoch"]) in shown
    assert str(values["batch"]) in [number.lstrip("0") or "0" for number in shown]
    if not math.isnan(values["accuracy"]) and not 0 <= values["accuracy"] <= 100:
        assert f"({values['accuracy']:g})" in last


# How it is printed.


class Output(io.StringIO):
    """Standard output, with the pieces in which it came."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)

    def flush(self) -> None:
        self.pieces.append("flushed")


@contextmanager
def output() -> Iterator[Output]:
    """A fixture would come too early: pytest puts an output of its own in this place when a test begins."""
    made = Output()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", made)
        yield made


def test_it_comes_in_one_piece_at_once() -> None:
    """Another thread's line does not come between its text and its end, and KubeDL need not wait for it."""
    with output() as out:
        ProgressLine(is_shown=True, ranks=2).print(**GOOD)

    assert out.pieces == [line(**GOOD, ranks=2) + "\n", "flushed"]


def test_other_ranks_print_nothing() -> None:
    """Their output may be that of the same pod."""
    printed = ProgressLine(is_shown=False, ranks=2)
    with output() as out:
        for _ in range(2):
            printed.print(**GOOD)

    assert out.pieces == []


def test_tensors_and_numpy_numbers_are_numbers() -> None:
    """As they come out of a loop."""
    with output() as out:
        ProgressLine(is_shown=True, ranks=1).print(
            epoch=torch.tensor(3),
            batch=np.int64(50),
            batches=1563,
            latency_s=np.float32(0.258),
            loss=torch.tensor([2.5284], requires_grad=True).sum(),
            accuracy=torch.tensor(42.19),
        )

    assert out.getvalue() == line(**GOOD) + "\n"


WRONG = {"epoch": "3", "batch": 1.5, "batches": None, "latency_s": "0.2", "loss": torch.ones(2), "accuracy": [1.0]}


@pytest.mark.parametrize("is_shown", [True, False])
def test_the_first_call_refuses_what_is_no_number(is_shown: bool) -> None:
    """All of it at once, and on every rank."""
    with output() as out, pytest.raises(errors.UsageError) as refused:
        ProgressLine(is_shown=is_shown, ranks=1).print(**WRONG)

    assert str(refused.value) == (
        "progress(...): epoch is '3', expected a whole number; batch is 1.5, expected a whole number; "
        "batches is None, expected a whole number; latency_s is '0.2', expected a number, or a tensor of one element; "
        "loss is tensor([1., 1.]), expected a number, or a tensor of one element; "
        "accuracy is [1.0], expected a number, or a tensor of one element"
    )
    assert out.pieces == []


@pytest.mark.parametrize("name", WRONG)
def test_a_later_call_never_ends_the_training(name: str) -> None:
    """An accuracy that is None once in an epoch costs a line that is not read."""
    printed = ProgressLine(is_shown=True, ranks=1)
    with output() as out:
        printed.print(**GOOD)
        printed.print(**{**GOOD, name: WRONG[name]})

    first, second = out.getvalue().splitlines()
    assert read(first) is not None
    assert read(second) is None
    assert second.count("\t") == 5


@pytest.mark.parametrize("number", [10**5000, -(10**5000)], ids=["large", "negative"])
def test_a_number_without_end_is_no_error(number: int) -> None:
    """Python refuses to write it, and float() to take it."""
    with output() as out:
        ProgressLine(is_shown=True, ranks=1).print(**dict.fromkeys(GOOD, number))

    assert read(out.getvalue().rstrip("\n")) is None


def test_an_output_that_is_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it may be gone, and some programs have none."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    closed = io.StringIO()
    closed.close()
    for output in (Gone(), closed, None):
        monkeypatch.setattr(sys, "stdout", output)
        ProgressLine(is_shown=True, ranks=1).print(**GOOD)


# What else we print.

ODD = st.text([*map(chr, range(0x300))]) | st.lists(
    st.sampled_from(["Epoch", "Ep", "och", "\t", "\n", "\r", "\x0b", "\x85", "\u2028", " ", "[3]", "12", "\\", '"'])
).map("".join)


@given(
    event=st.sampled_from([*events.EVENTS]),
    fields=st.dictionaries(st.sampled_from(["why", "ckpt", "means", "step"]), ODD | NUMBERS | WHOLE),
)
def test_no_event_is_read_as_progress_or_crashes_it(event: str, fields: dict[str, Any]) -> None:
    """Whatever its fields hold: paths, names of objects, errors of others."""
    text = events.line(event, fields)

    assert "\t" not in text
    assert text.splitlines() == [text]
    assert read(f"2026-11-18 14:56:30,049 migrator rank 0: {text}") is None


@pytest.mark.parametrize("kind", [errors.CkptMismatch, errors.StorageError])
@given(text=ODD)
def test_no_error_of_ours_is_read_as_progress_or_crashes_it(kind: type[errors.MigratorError], text: str) -> None:
    """A traceback in the log ends with its text."""
    for shown in str(kind(text)).split("\n"):
        assert read(f"migrator.errors.{kind.__name__}: {shown}") is None


def test_no_other_text_of_ours_has_the_word() -> None:
    """Neither in the package, nor in the hooks, nor in the examples; comments and docstrings aside."""
    found = []
    for path in [*(ROOT / "migrator").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            (path.name, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
            if "Epoch" in node.value
        ]
    for path in (ROOT / "hooks").iterdir():
        found += [(path.name, text) for text in path.read_text().splitlines() if "Epoch" in text]

    assert sorted(found) == [("events.py", "Epoch"), ("progress_line.py", "Epoch")]
