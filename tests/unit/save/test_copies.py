"""When memory for copies is taken, and when the loop waits instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from migrator.save import attempt_factory
from migrator.save.attempt_factory import AttemptFactory
from migrator.save.speed import Speed
from migrator.save.staging import StagingBuffer


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attempt_factory, "time", clock)
    return clock


def factory(clock: Clock, *, size: int, interval_s: float, bytes_per_s: float, loop_waits: bool = False) -> Any:
    """One whose loop steps that often, and whose saves are that fast; 0: none was measured."""
    gate = SimpleNamespace(capture=object(), loop_waits=loop_waits)
    tensors = [torch.empty(size, dtype=torch.uint8)]
    context: Any = SimpleNamespace(gate=gate, capturer=SimpleNamespace(live=lambda _: tensors))
    speed = Speed(30.0, warns=False)
    speed._bytes_per_s = bytes_per_s
    made: Any = AttemptFactory(context, None, speed, None, None)  # type: ignore[arg-type]
    for step_s in (0.0, 100.0, interval_s, 100.0):
        clock.now_s += step_s
        made.at_step()
    made._staging.prepare = lambda tensors: setattr(made, "has_prepared", True)
    made.has_prepared = False
    return made


@pytest.mark.parametrize(
    ("interval_s", "bytes_per_s", "prepares"),
    [(0.1, 1e9, True), (0.19, 1e9, True), (0.21, 1e9, False), (10.0, 0.0, False), (3.9, 0.0, True), (10.0, 1e7, True)],
)
def test_memory_is_taken_where_the_loop_will_come_to_the_gate(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, interval_s: float, bytes_per_s: float, prepares: bool
) -> None:
    """A loop that steps less often than two saves take goes on behind the last byte, without a copy.

    Its shortest step counts: the others had an evaluation before them.
    """
    monkeypatch.setattr(attempt_factory, "SMALL_BYTES", 1000)
    made = factory(clock, size=10**8, interval_s=interval_s, bytes_per_s=bytes_per_s)
    made.prepare()
    assert made.has_prepared is prepares
    assert made._staging.is_off is not prepares
    assert (made._staging.copies({"a": torch.zeros(3)}) is None) is not prepares
    made.end()
    assert not made._staging.is_off


def test_small_state_is_always_copied(clock: Clock) -> None:
    """It takes a moment, and the loop never waits."""
    made = factory(clock, size=1000, interval_s=100.0, bytes_per_s=1e9)
    made.prepare()
    assert made.has_prepared


@pytest.mark.parametrize("size", [1000, 100 << 20])
def test_nothing_is_copied_for_a_loop_that_waits_for_the_save(clock: Clock, size: int) -> None:
    """It makes no step meanwhile."""
    made = factory(clock, size=size, interval_s=0.001, bytes_per_s=1e6, loop_waits=True)
    made.prepare()
    assert not made.has_prepared


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_memory_that_cannot_be_had_costs_no_save(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A limit on the address space, which the cgroup does not show: the loop waits instead."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    staging = StagingBuffer()
    monkeypatch.setattr(torch, "zeros", refuse)
    staging.prepare([torch.ones(100)])
    assert staging.copies({"a": torch.ones(100)}) is None
