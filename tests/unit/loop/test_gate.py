"""The gate's moments that last too short for a real job to be stopped in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from migrator.ckpt.point import Point
from migrator.loop.gate import Gate, Phase
from migrator.state.capture import Capture, Capturer
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


def test_notice_at_a_safe_point_find_the_loop_there(gate: Gate) -> None:
    assert gate.stop() == ((1, 0), (HERE,), True)


def test_notice_on_the_way_to_a_new_round_find_the_loop_behind_it(gate: Gate) -> None:
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


def test_a_rank_that_saves_alone_goes_on_to_there_and_no_further(gate: Gate) -> None:
    assert gate.stop_here() == ((1, 0), (HERE,), True)
    assert gate.limit == (1, 0)


class Steps:
    """Notes the calls that the gate makes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_trained = False

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("before")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("after")

    def is_trained_by_hand(self) -> bool:
        self.calls.append("by hand?")
        return self.has_trained


class WayOut:
    """Ends the wait of a thread by an exception, when it may."""

    is_decided = False

    def may_leave(self) -> bool:
        return self.is_decided

    def leave(self) -> NoReturn:
        raise SystemExit(143)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=1.0)


def test_a_step_while_leaving_ends_its_thread_when_the_outcome_is_known(optimizer: torch.optim.Optimizer) -> None:
    """While leaving, a step waits until the outcome is known, and then its thread leaves and nothing is trained."""
    way_out, steps = WayOut(), Steps()
    gate = Gate(Capturer(Registry()), way_out)
    gate.publish(taken(1))
    gate.install(steps)
    gate.announce(is_leaving=True)
    try:
        way_out.is_decided = True
        with pytest.raises(SystemExit):
            optimizer.step()
    finally:
        gate.remove()

    assert steps.calls == ["before"]
    assert gate.phase is Phase.CLEAN


def test_a_forked_child_passes_the_gate_that_its_parent_shut(optimizer: torch.optim.Optimizer) -> None:
    """The save that would open it again is in the parent. Nothing follows the steps of the child."""
    steps = Steps()
    gate = Gate(Capturer(Registry()))
    gate.publish(taken(1))
    gate.install(steps)
    assert gate.take(0, exact=(1, 0)) is not None
    try:
        gate.forget()
        optimizer.step()
    finally:
        gate.remove()

    assert steps.calls == []


def test_training_without_an_optimizer_is_asked_for_only_while_nothing_else_was_trained() -> None:
    """It compares the contents of tensors, which costs time."""
    steps = Steps()
    gate = Gate(Capturer(Registry()))
    gate.install(steps)
    try:
        assert not gate.has_trained
        steps.has_trained = True
        assert gate.has_trained
        assert gate.phase is Phase.DIRTY
        assert gate.has_trained
    finally:
        gate.remove()

    assert steps.calls == ["by hand?", "by hand?"]


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
    assert gate.stop_here() == ((1, 1), (HERE, place_of(1)), True)


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


def gate_of(**registered: Any) -> tuple[Gate, Callable[..., Capture]]:
    registry = Registry()
    for name, value in registered.items():
        registry.add(name, value)
    capturer = Capturer(registry)
    gate = Gate(capturer)

    def capture(step: int, *, full: bool = True) -> Capture:
        return capturer.take(step, None, full=full)

    return gate, capture


def started(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_a_step_waits_while_a_save_reads() -> None:
    """The pre-hook of any optimizer is the gate, and the save sees that somebody stands there."""
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate, capture = gate_of(weight=weight.data)
    gate.install()
    try:
        gate.publish(capture(1))
        assert gate.take(0) is not None
        thread = started(optimizer.step)
        until(lambda: gate.someone_waits, "the step at the gate")
        assert not weight.any()

        gate.open()

        assert ended(thread)
        assert weight.all()
        assert gate.phase is Phase.DIRTY
        assert gate.take(0) is None
    finally:
        gate.remove()


def test_two_threads_that_step_at_once_pass_the_gate_both() -> None:
    """A backward pass steps on a thread per device: whoever comes second finds the state DIRTY and goes on."""
    gate, capture = gate_of(metrics={})
    errors: list[BaseException] = []

    def step() -> None:
        try:
            gate._enter()
        except BaseException as error:
            errors.append(error)

    gate.publish(capture(1))
    gate.take(0)
    threads = [started(step), started(step)]
    until(lambda: gate._waiting == 2, "both at the gate")
    gate.open()

    assert all(map(ended, threads))
    assert errors == []
    assert gate.phase is Phase.DIRTY


def test_a_safe_point_that_lacks_something_does_not_hold_the_loop() -> None:
    """What was captured before the save was due cannot be saved: to stay there would be to wait for ever."""
    gate, capture = gate_of(metrics={})
    gate.holds_main = True
    lacking = capture(1)
    lacking.missing = frozenset({"metrics"})
    gate.announce()

    assert ended(started(lambda: gate.publish(lacking)))


def test_a_safe_point_thrown_away_at_once_does_not_hold_the_loop() -> None:
    """The save may be over before the loop has seen it begin."""
    gate, capture = gate_of(metrics={})
    gate.holds_main = True
    gate.announce()
    thread = started(lambda: gate.publish(capture(1)))
    until(lambda: gate._held, "the loop in the safe point")

    with gate._cond:
        taken = gate.take(0)
        assert taken is not None
        gate.spoil(taken)
        gate.open()
        gate.unpin(taken)

    assert ended(thread)


def test_a_safe_point_before_the_one_that_is_due_does_not_hold_the_loop() -> None:
    """A periodic save waits for its own step, which the loop must be let go to make."""
    gate, capture = gate_of(metrics={})
    gate.holds_main = True
    gate.announce()
    thread = started(lambda: gate.publish(capture(4)))
    until(lambda: gate._held, "the loop in the safe point")

    assert gate.take(0.2, least_step=5) is None

    assert ended(thread)


def test_a_loop_that_has_ended_is_as_good_as_held() -> None:
    """An object that changes outside steps is not lost because the loop will never stand at a safe point again."""
    gate, capture = gate_of(metrics={})
    gate.publish(capture(1))
    gate.holds_main = True
    assert gate.take(0) is None

    gate.close()

    assert gate.take(0) is not None
    assert not gate.is_over
