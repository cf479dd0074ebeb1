"""The gate's moments that last too short for a real job to be stopped in them."""

from __future__ import annotations

import pytest

from migrator.capture import Capture, Capturer
from migrator.gate import Gate
from migrator.registry import Registry


@pytest.fixture
def gate() -> Gate:
    made = Gate(Capturer(Registry()))
    made.agrees = True
    made.publish(taken(1))
    return made


def taken(step: int, turn: int = 0) -> Capture:
    return Capture(step, {}, {}, {}, None, turn=turn)


def test_news_at_a_safe_point_find_the_loop_there(gate: Gate) -> None:
    assert gate.stop() == ((1, 0), True)


def test_news_on_the_way_to_a_new_round_find_the_loop_behind_it(gate: Gate) -> None:
    """Told of the last safe point, the others would agree on one that is no more a moment later."""
    gate.pass_on()

    assert gate.stop() == ((1, 1), True)
    gate.publish(taken(1, turn=1), may_stay=False)
    assert gate.take(0, exact=(1, 1)) is not None


def test_the_safe_point_of_others_is_taken_and_no_other(gate: Gate) -> None:
    assert gate.take(0, exact=(2, 0)) is None
    assert gate.take(0, exact=(1, 0)) is not None


def test_a_lost_safe_point_is_no_reach(gate: Gate) -> None:
    """What cannot be saved is not offered: the next one is."""
    assert gate.capture is not None
    gate.spoil(gate.capture)

    assert gate.is_spoiled
    assert gate.stop() == ((2, 0), True)


def test_a_loop_that_has_ended_has_the_last_safe_point_or_none(gate: Gate) -> None:
    gate.close()
    assert gate.stop() == ((1, 0), True)

    assert gate.capture is not None
    gate.spoil(gate.capture)
    assert gate.stop() == (None, True)


def test_who_has_settled_goes_on_to_there_and_no_further(gate: Gate) -> None:
    assert gate.settle_here() == ((1, 0), True)
    assert gate.limit == (1, 0)
