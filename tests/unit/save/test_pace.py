"""Periodic saves that cost the loop too much pause between their writes."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.save import attempt_factory
from migrator.save.attempt_factory import AttemptFactory
from migrator.save.pace import CHEAP, PAUSE_MAX_S, PAUSED_MAX_S, PAUSED_SHARE, STRETCH_MAX, Pace

STEP_S = 0.1
EVERY_S = 10.0
WRITE_S = 0.05


class Loop:
    """Steps and saves, by a clock that only goes on when one of them takes time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pace = Pace(lambda: self.now_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def step(self, seconds: float = STEP_S) -> None:
        self.now_s += seconds
        self.pace.at_step()

    def steps(self, seconds: float = EVERY_S) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def save(self, *steps_s: float, is_waited_for: bool = False, is_saved: bool = True) -> None:
        """The loop takes so long for each step beside it. It begins in the middle of a step, and ends in one."""
        self.now_s += STEP_S / 2
        self.pace.begin(is_waited_for=is_waited_for)
        self.pace.attempt()
        self.step(STEP_S / 2)
        for step_s in steps_s:
            self.step(step_s)
        self.pace.end(is_saved=is_saved)
        self.step()

    def write(self, *, seconds: float = WRITE_S, is_urgent: bool = False) -> float:
        """How long it pauses behind a write."""
        self.now_s += seconds
        before_s = self.now_s
        self.pace.pause(lambda: is_urgent)
        return self.now_s - before_s


SLOW = (2 * STEP_S,) * 5
"""Half a second more, of ten."""


@pytest.fixture
def loop() -> Loop:
    found = Loop()
    found.steps()
    return found


def slow(loop: Loop, saves: int, **given: Any) -> None:
    for _ in range(saves):
        loop.save(*SLOW, **given)
        loop.steps()


def made_slow(loop: Loop) -> Loop:
    """Its next save writes at half the speed, and has begun."""
    slow(loop, 4)
    loop.pace.begin(is_waited_for=False)
    loop.pace.attempt()
    assert loop.pace.stretch == 2.0
    assert loop.write() == 0.0, "nobody knows how long the first write took"
    return loop


def test_saves_that_cost_nothing_write_as_fast_as_they_can(loop: Loop) -> None:
    """And those that cost less than one percent."""
    for steps in ((), (STEP_S,) * 10, (1.5 * STEP_S,), (0.5 * STEP_S,) * 10):
        for _ in range(10):
            loop.save(*steps)
            loop.steps()
    loop.pace.begin(is_waited_for=False)
    assert [loop.write() for _ in range(9)] == [0.0] * 9


def test_saves_that_cost_too_much_write_more_slowly(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """Twice as slowly, then four times, up to eight, and each time it is said."""
    caplog.set_level(logging.INFO, logger="migrator")
    found = []
    for _ in range(13):
        slow(loop, 1)
        found.append(loop.pace.stretch)
    assert found == [1.0] * 3 + [2.0] * 3 + [4.0] * 3 + [STRETCH_MAX] * 4
    levels = [record.levelno for record in caplog.records if "save_slows_steps" in record.getMessage()]
    assert levels == [logging.WARNING] * 3


def test_saves_that_got_cheap_write_faster_again(loop: Loop) -> None:
    """The data may be on another disk by now."""
    slow(loop, 20)
    for _ in range(3 * CHEAP + 1):
        loop.save(*(STEP_S,) * 10)
        loop.steps()
    assert loop.pace.stretch == 1.0


def test_a_pause_is_as_long_as_the_write_before(loop: Loop) -> None:
    """At twice the time; and all pauses of a save together are no more than a quarter of the time between two."""
    made_slow(loop)
    pauses = [loop.write() for _ in range(1000)]
    assert pauses[0] == pytest.approx(WRITE_S)
    assert sum(pauses) == pytest.approx(PAUSED_SHARE * (EVERY_S + sum(SLOW) + 2 * STEP_S), rel=0.02)
    assert pauses[-1] == 0.0
    assert loop.pace.paused_s == pytest.approx(sum(pauses))


def test_no_pause_is_long(loop: Loop) -> None:
    """Whatever a write took, and however rare saves are."""
    slow(loop, 30)
    loop.steps(10_000.0)
    loop.pace.begin(is_waited_for=False)
    loop.pace.attempt()
    pauses = [loop.write(seconds=20.0) for _ in range(1000)]
    assert max(pauses) == pytest.approx(PAUSE_MAX_S)
    assert sum(pauses) == pytest.approx(PAUSED_MAX_S)


def test_what_comes_before_a_write_is_none(loop: Loop) -> None:
    """A save waits for its safe point, and an attempt that is thrown away has written for nothing."""
    made_slow(loop)
    assert loop.write() > 0
    loop.now_s += 20.0
    loop.pace.attempt()
    assert loop.write() == 0.0


def test_no_pause_where_somebody_waits(loop: Loop) -> None:
    """From the moment on in which he comes."""
    made_slow(loop)
    assert loop.write(is_urgent=True) == 0.0
    assert loop.write() > 0


def test_a_save_that_the_script_asked_for_is_not_judged_and_does_not_pause(loop: Loop) -> None:
    """`save_ckpt()`: the loop may wait for it."""
    slow(loop, 10, is_waited_for=True)
    assert loop.pace.stretch == 1.0
    made_slow(loop)
    loop.pace.end(is_saved=True)
    loop.pace.begin(is_waited_for=True)
    assert [loop.write() for _ in range(9)] == [0.0] * 9


def test_a_save_that_came_to_nothing_is_not_judged(loop: Loop) -> None:
    """It is tried again at once, so its share of the time would be large."""
    slow(loop, 10, is_saved=False)
    assert loop.pace.stretch == 1.0


def test_one_slow_save_is_an_accident(loop: Loop) -> None:
    """Or two."""
    for _ in range(10):
        slow(loop, 2)
        loop.save()
        loop.steps()
    assert loop.pace.stretch == 1.0


def test_an_evaluation_beside_a_save_is_not_its_cost(loop: Loop) -> None:
    """Nor is the wait of the loop at the gate, in the first interval: no pause would make it shorter."""
    for _ in range(10):
        loop.save(STEP_S, 3.0, STEP_S)
        loop.steps()
    for _ in range(10):
        loop.pace.begin(is_waited_for=False)
        loop.step(3 * STEP_S)
        loop.pace.end(is_saved=True)
        loop.steps()
    assert loop.pace.stretch == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_uneven_steps_are_not_a_save_s_cost(loop: Loop, seed: int) -> None:
    """Every fourth one takes three times as long, and all of them are noisy."""
    draws = random.Random(seed)
    for number in range(3000):
        if number % 60 == 40:
            loop.pace.begin(is_waited_for=False)
        if number % 60 == 50:
            loop.pace.end(is_saved=True)
        loop.step(STEP_S * draws.lognormvariate(0, 0.3) * (3 if number % 4 == 0 else 1))
    assert loop.pace.stretch == 1.0


@pytest.mark.parametrize(("is_apart", "done", "pauses"), [(True, 1, True), (False, 1, False), (True, 2, False)])
def test_it_pauses_when_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, is_apart: bool, done: int, pauses: bool
) -> None:
    """Before, a pause would be one of the loop at the gate; and behind the last write there is nothing to spread."""
    leaving = SimpleNamespace(notice=None, advanced_s=0.0)
    monkeypatch.setattr(
        attempt_factory, "Attempt", lambda *_, on_block, **__: SimpleNamespace(is_apart=is_apart, on_block=on_block)
    )
    made = AttemptFactory(None, leaving, None, None, None)  # type: ignore[arg-type]
    waits, asked = [False], list[bool]()

    def pause(is_urgent: Any) -> None:
        for waits[0], leaving.notice in ((False, None), (True, None), (False, "leave")):
            asked.append(is_urgent())
        leaving.notice = None

    monkeypatch.setattr(made.pace, "pause", pause)
    attempt: Any = made.make(SimpleNamespace(step=1), is_leaving=False, is_urgent=lambda: waits[0])  # type: ignore[arg-type]
    attempt.on_block(done, 2)
    assert asked == ([False, True, True] if pauses else [])
    made.end()
