"""The gate's moments that last too short for a real job to be stopped in them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from migrator.ranks.protocol import Point
from migrator.state.capture import Capture, Capturer
from migrator.loop.gate import Gate, Phase
from migrator.state.registry import Registry
from tests.support.harness import until


@pytest.fixture
def gate() -> Gate:
    made = Gate(Capturer(Registry()))
    made.agrees = True
    made.publish(taken(1))
    return made


def taken(step: int, turn: int = 0, *, place: str = "next epoch", **more: Any) -> Capture:
    return Capture(step, {}, {}, {}, {"loops": {place: {"handed": 0}}}, turn=turn, **more)


def place_of(turn: int, place: str = "next epoch") -> tuple[int, str]:
    return turn, taken(1, turn, place=place).place


HERE = (0, "")


def test_news_at_a_safe_point_find_the_loop_there(gate: Gate) -> None:
    assert gate.stop() == ((1, 0), (HERE,), True)


def test_news_on_the_way_to_a_new_round_find_the_loop_behind_it(gate: Gate) -> None:
    """What it comes to is not known yet, and what it has can be saved."""
    gate.pass_on()

    assert gate.stop() == ((1, 1), (HERE, (1, "")), True)
    assert gate.is_at((1, 0))
    assert not gate.is_at((1, 1))
    gate.publish(taken(1, turn=1), may_stay=False)
    assert gate.take(0, exact=(1, 1)) is not None


def test_the_safe_point_of_others_is_taken_and_no_other(gate: Gate) -> None:
    assert gate.take(0, exact=(2, 0)) is None
    assert gate.take(0, exact=(1, 0)) is not None


def test_a_lost_safe_point_is_no_reach(gate: Gate) -> None:
    """What cannot be saved is not offered: the next one is."""
    assert gate.capture is not None
    gate.spoil(gate.capture)

    assert gate.is_lost((1, 0))
    assert gate.stop() == ((2, 0), (HERE,), True)


def test_a_loop_that_has_ended_has_the_last_safe_point_or_none(gate: Gate) -> None:
    gate.close()
    assert gate.stop() == ((1, 0), (HERE,), True)

    assert gate.capture is not None
    gate.spoil(gate.capture)
    assert gate.stop() == (None, (), True)


def test_who_has_settled_goes_on_to_there_and_no_further(gate: Gate) -> None:
    assert gate.settle_here() == ((1, 0), (HERE,), True)
    assert gate.limit == (1, 0)


# What is kept of a step whose next epoch has begun.


def next_turn(gate: Gate, **more: Any) -> None:
    """Another round of the loop begins, without a step."""
    gate.pass_on()
    gate.publish(taken(gate.at[0], gate.at[1] + 1, **more), may_stay=False)


def step(gate: Gate) -> None:
    gate._enter()


@pytest.fixture
def released(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """What was given back for reuse, in order."""
    found: list[Point] = []
    monkeypatch.setattr(gate._capturer, "release", lambda capture: found.append(capture.at))
    return found


@pytest.fixture
def changed(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> set[Point]:
    """The safe points whose large tensors are not theirs any more."""
    found: set[Point] = set()
    monkeypatch.setattr(gate._capturer, "changed", lambda capture: ["averaged"] if capture.at in found else [])
    return found


def test_the_safe_point_before_the_epoch_can_be_saved_from_within_the_next_one(gate: Gate) -> None:
    """Until the next step, which changes what it is made of."""
    before = gate.capture
    next_turn(gate)

    assert gate.stop() == ((1, 1), (HERE, place_of(1)), True)
    assert gate.can_save((1, 0))
    assert gate.is_at((1, 0))
    capture = gate.take(0, exact=(1, 0))
    assert capture is before
    assert capture is not None
    gate.unpin(capture)
    gate.open()
    gate.is_leaving = False

    step(gate)

    assert gate.stop() == ((2, 0), (HERE,), True)
    assert not gate.can_save((1, 0))
    assert not gate.is_at((1, 0))
    assert gate.take(0, exact=(1, 0)) is None


def test_without_other_ranks_nothing_is_kept(gate: Gate, released: list[Point]) -> None:
    gate.agrees = False
    next_turn(gate)

    assert released == [(1, 0)]
    assert gate.take(0, exact=(1, 0)) is None


def test_what_was_kept_is_given_back_behind_the_next_step_and_once(gate: Gate, released: list[Point]) -> None:
    next_turn(gate)
    next_turn(gate)
    step(gate)
    assert released == []

    gate.publish(taken(2))

    assert released == [(1, 0), (1, 1), (1, 2)]


def test_what_is_still_read_is_given_back_when_that_is_over(gate: Gate, released: list[Point]) -> None:
    next_turn(gate)
    capture = gate.take(0, exact=(1, 0))
    assert capture is not None
    gate.open()
    step(gate)
    gate.publish(taken(2))
    assert released == [(1, 1)]

    gate.unpin(capture)

    assert released == [(1, 1), (1, 0)]


def test_what_is_kept_stays_kept_when_a_save_of_it_is_over(gate: Gate, released: list[Point]) -> None:
    next_turn(gate)
    capture = gate.take(0, exact=(1, 0))
    assert capture is not None
    gate.unpin(capture)

    assert released == []
    assert gate.take(0, exact=(1, 0)) is capture


def test_only_the_first_and_the_newest_are_kept(gate: Gate, released: list[Point]) -> None:
    """Of a script that goes round without ever training."""
    for _ in range(20):
        next_turn(gate)

    assert [turn for turn, _ in gate.stop()[1]] == [0, 17, 18, 19, 20]
    assert released == [(1, turn) for turn in range(1, 17)]
    assert gate.is_lost((1, 5))


def test_what_changed_on_the_way_to_the_next_epoch_is_not_kept(gate: Gate, changed: set[Point]) -> None:
    """An average that is updated there: the safe point before it is gone, and nobody is told of it."""
    changed.add((1, 0))
    next_turn(gate)

    assert gate.stop() == ((1, 1), (place_of(1),), True)
    assert not gate.can_save((1, 0))
    assert gate.is_lost((1, 0))


def test_what_changed_within_the_next_epoch_is_not_offered(gate: Gate, changed: set[Point]) -> None:
    next_turn(gate)
    changed.add((1, 0))

    assert gate.stop() == ((1, 1), (place_of(1),), True)
    assert not gate.can_save((1, 0))


def test_what_turned_out_to_have_changed_is_offered_no_more(gate: Gate) -> None:
    """Found while it was saved: the ranks agree anew, on something else."""
    next_turn(gate)
    capture = gate.take(0, exact=(1, 0))
    assert capture is not None
    gate.spoil(capture)
    gate.open()
    gate.unpin(capture)

    assert gate.is_lost((1, 0))
    assert not gate.is_lost((1, 1))
    assert gate.stop() == ((1, 1), (place_of(1),), True)


def test_the_newest_is_lost_and_the_one_before_it_is_not(gate: Gate) -> None:
    next_turn(gate, missing=frozenset({"costly"}))

    assert gate.stop() == ((1, 0), (HERE,), True)


def test_what_lacks_an_object_is_not_kept(gate: Gate) -> None:
    """It was too costly to copy at each safe point."""
    gate.publish(taken(2, missing=frozenset({"costly"})))
    next_turn(gate)

    assert gate.stop() == ((2, 1), (place_of(1),), True)


def test_what_changes_outside_of_steps_is_saved_only_where_the_loop_stands(gate: Gate) -> None:
    next_turn(gate)
    gate.holds_main = True

    assert gate.is_lost((1, 0))
    assert not gate.is_lost((1, 1))  # it may still come to stand there
    assert gate.stop() == ((2, 0), (HERE,), True)
    gate.close()
    assert gate.stop() == ((1, 1), (place_of(1),), True)


def test_what_a_save_reads_is_looked_at_in_the_next_epoch_too(gate: Gate, changed: set[Point]) -> None:
    """The thread that trains sees what its own operations did, at the next round and before the next step."""
    capture = gate.take(0, exact=(1, 0))
    assert capture is not None
    gate.open()
    next_turn(gate)
    changed.add((1, 0))
    step(gate)

    assert capture.changed == ["averaged"]


def test_what_was_exchanged_while_it_was_read_stays_so_when_it_is_put_back(gate: Gate, changed: set[Point]) -> None:
    capture = gate.take(0, exact=(1, 0))
    assert capture is not None
    gate.open()
    changed.add((1, 0))
    next_turn(gate)
    changed.clear()

    assert gate.found_changed(capture) == ["averaged"]


def test_a_loop_that_has_ended_in_the_next_epoch_has_both(gate: Gate) -> None:
    next_turn(gate)
    gate.close()

    assert gate.stop() == ((1, 1), (HERE, place_of(1)), True)
    assert gate.settle_here() == ((1, 1), (HERE, place_of(1)), True)


def test_a_loop_that_is_kept_from_the_next_epoch_is_let_into_it_and_no_further(gate: Gate) -> None:
    """It stands before it until the others say that they can save nothing else."""
    assert gate.stop() == ((1, 0), (HERE,), True)
    training = threading.Thread(target=lambda: (next_turn(gate), gate.park()))
    training.start()
    try:
        until(lambda: gate.someone_waits, "the loop to wait")
        assert gate.reach == (1, 0)

        gate.let((1, 1))

        capture = gate.take(5, exact=(1, 1))
        assert capture is not None
        assert gate.can_save((1, 0))
        assert gate.phase is Phase.CLEAN
    finally:
        gate.is_leaving = False
        gate.open()
        training.join(5)


def test_who_is_past_the_target_in_the_same_step_goes_no_further(gate: Gate) -> None:
    next_turn(gate)
    gate.stop()
    gate.let((1, 0))

    assert not gate._may_go_on()


def test_the_place_tells_a_loop_of_one_rank_from_the_next_epoch_of_another(gate: Gate) -> None:
    """But not by what its loader looks like: each rank may have data of its own."""
    assert place_of(1, "evaluation | Data[3]") != place_of(1, "train | Data[3]")
    assert place_of(1, "train | Data[3]") == place_of(1, "train | Data[4]")
    assert place_of(0, "evaluation") == place_of(0, "train") == HERE


def test_a_step_waits_for_the_save_of_a_safe_point_that_is_kept(gate: Gate) -> None:
    """All ranks are to save it: once this one has stepped it is lost."""
    next_turn(gate)
    gate.hold((1, 0))
    training = threading.Thread(target=step, args=(gate,))
    training.start()
    try:
        capture = gate.take(5, exact=(1, 0))
        assert capture is not None
        assert gate.hold_at is None
        assert gate.phase is Phase.CLEAN
    finally:
        gate.open()
        training.join(5)
    assert gate.phase is Phase.DIRTY


def test_a_step_does_not_wait_for_ever(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migrator.loop.gate._HOLD_S", 0.01)
    next_turn(gate)
    gate.hold((1, 0))

    step(gate)

    assert gate.phase is Phase.DIRTY
    assert gate.hold_at is None
