"""Periodic saves that cost the loop too much write more slowly."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.save import attempt_factory
from migrator.save.attempt_factory import AttemptFactory
from migrator.save.pace import PAUSED_SHARE, STRETCH_MAX, Pace

STEP_S = 0.1
EVERY_S = 10.0
WRITE_S = 0.05


class Loop:
    """Steps and saves, by a clock that only goes on when one of them takes time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.paused_s = 0.0
        self.pace = Pace(lambda: self.now_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.paused_s += seconds

    def steps(self, seconds: float = EVERY_S, step_s: float = STEP_S) -> None:
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            self.pace.at_step()

    def save(self, *, takes_s: float = 1.0, step_s: float = STEP_S, counts: bool = True) -> None:
        """Steps beside it take so long."""
        self.pace.begin(counts=counts)
        self.steps(takes_s, step_s)
        self.pace.end()
        self.now_s += step_s
        self.pace.at_step()

    def write(self, is_urgent: bool = False) -> float:
        """How long it pauses behind a write."""
        before_s = self.paused_s
        self.now_s += WRITE_S
        self.pace.pause(lambda: is_urgent)
        return self.paused_s - before_s


@pytest.fixture
def loop() -> Loop:
    found = Loop()
    found.steps()
    return found


def slow(loop: Loop, saves: int, **given: Any) -> None:
    """Saves beside which a step takes twice as long: half a second of ten."""
    for _ in range(saves):
        loop.save(step_s=2 * STEP_S, **given)
        loop.steps()


def test_saves_that_cost_nothing_write_as_fast_as_they_can(loop: Loop) -> None:
    """And those that cost less than one percent."""
    for _ in range(10):
        loop.save()
        loop.steps()
        loop.save(takes_s=0.1, step_s=1.5 * STEP_S)
        loop.steps()
    loop.pace.begin(counts=True)
    assert (loop.pace.stretch, loop.write()) == (1.0, 0.0)


def test_saves_that_cost_too_much_write_more_slowly(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """Twice as slowly, then four times, up to eight, and each time it is said."""
    caplog.set_level(logging.INFO, logger="migrator")
    found = []
    for _ in range(10):
        slow(loop, 1)
        found.append(loop.pace.stretch)
    assert found == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, *[STRETCH_MAX] * 4]
    levels = [record.levelno for record in caplog.records if "save_slows_steps" in record.getMessage()]
    assert levels == [logging.WARNING] * 3


def test_a_pause_is_as_long_as_the_write_before(loop: Loop) -> None:
    """At twice the time; and all pauses of a save together are no more than a quarter of the time between two."""
    slow(loop, 3)
    loop.pace.begin(counts=True)
    assert loop.pace.stretch == 2.0
    assert loop.write() == pytest.approx(WRITE_S)
    pauses = [loop.write() for _ in range(1000)]
    assert sum(pauses) + WRITE_S == pytest.approx(PAUSED_SHARE * (EVERY_S + 1.0 + 2 * STEP_S), rel=0.01)
    assert pauses[-1] == 0.0


def test_no_pause_where_somebody_waits(loop: Loop) -> None:
    """The loop at the gate, or a pod that must leave."""
    slow(loop, 3)
    loop.pace.begin(counts=True)
    assert loop.write(is_urgent=True) == 0.0
    assert loop.write() > 0


def test_one_slow_save_is_an_accident(loop: Loop) -> None:
    """Every other one."""
    for _ in range(10):
        slow(loop, 1)
        loop.save()
        loop.steps()
    assert loop.pace.stretch == 1.0


def test_an_evaluation_beside_a_save_is_not_its_cost(loop: Loop) -> None:
    """A save costs no more than the time that it takes: here less than one percent."""
    for _ in range(10):
        loop.pace.begin(counts=True)
        loop.now_s += 0.05
        loop.pace.end()
        loop.now_s += 5.0
        loop.pace.at_step()
        loop.steps()
    assert loop.pace.stretch == 1.0


def test_a_save_that_the_loop_waits_for_costs_what_it_costs(loop: Loop) -> None:
    """`save_ckpt()`: nothing is to be learned from it, neither that it is slow nor what is usual."""
    slow(loop, 10, counts=False)
    assert loop.pace.stretch == 1.0
    slow(loop, 3)
    loop.pace.begin(counts=True)
    assert loop.pace.stretch == 2.0


@pytest.mark.parametrize("is_leaving", [False, True])
def test_only_a_save_that_goes_on_pauses(monkeypatch: pytest.MonkeyPatch, is_leaving: bool) -> None:
    """And its pause ends when the loop comes to the gate, or a notice."""
    gate, leaving = SimpleNamespace(someone_waits=False), SimpleNamespace(notice=None, advanced_s=0.0)
    monkeypatch.setattr(attempt_factory, "Attempt", lambda *_, on_block, **__: on_block)
    context: Any = SimpleNamespace(gate=gate)
    made = AttemptFactory(context, leaving, None, None, None)  # type: ignore[arg-type]
    asked: list[bool] = []

    def pause(is_urgent: Any) -> None:
        for gate.someone_waits, leaving.notice in ((False, None), (True, None), (False, "leave")):
            asked.append(is_urgent())
        leaving.notice = None

    monkeypatch.setattr(made._pace, "pause", pause)
    on_block: Any = made.make(SimpleNamespace(step=1), is_leaving=is_leaving)  # type: ignore[arg-type]
    on_block(1, 2)
    assert asked == ([] if is_leaving else [False, True, True])
    made.end()
