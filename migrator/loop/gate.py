"""What keeps optimizers from changing state while it is being read.

From a safe point to the next `optimizer.step()` no large state changes, so a save
can read it from a side thread while the loop goes on. The gate is the one lock
between the two: a step waits at it while a save reads, and a save waits at it from
a step to the next safe point.

    FRESH   nothing was trained or loaded       -> LOADED, DIRTY, CLEAN
    LOADED  the state is that of a ckpt         -> LOADED, DIRTY, CLEAN
    CLEAN   the state is that of `capture`      -> DIRTY, CLEAN
    DIRTY   an optimizer stepped since          -> CLEAN

Of several ranks some may have begun the next epoch while another one, behind the same
step, still evaluates. Nothing was trained in between, so the captures of the earlier
turns of a step are *kept*: they can be saved until the next optimizer step.

The hooks are global ones: an optimizer that is not registered changes the same
weights, and a step inside `backward()` or a compiled graph counts as well. A
thread that is already between a step and a safe point never waits.
"""

from __future__ import annotations

import enum
import threading
import time
from typing import Any, NoReturn, Protocol

import torch

from migrator.ckpt.point import Point, Turns
from migrator.state.capture import Capture, Capturer

_TICK_S = 0.05
"""Seconds of one piece of a wait. Between the pieces the main thread can run Python signal handlers."""
_HOLD_S = 1.0
"""Maximum time, in seconds, that the loop stays at a safe point that is to be saved while no save takes it."""
_KEPT = 4
"""Maximum number of captures of earlier turns that are kept: the first one and the newest."""


class Phase(enum.Enum):
    FRESH = "fresh"
    LOADED = "loaded"
    CLEAN = "clean"
    DIRTY = "dirty"


_ALLOWED = {
    Phase.FRESH: {Phase.LOADED, Phase.DIRTY, Phase.CLEAN},
    Phase.LOADED: {Phase.LOADED, Phase.DIRTY, Phase.CLEAN},
    Phase.CLEAN: {Phase.DIRTY, Phase.CLEAN},
    Phase.DIRTY: {Phase.CLEAN},
}


class WayOut(Protocol):
    """How a thread that waits at the gate leaves the process."""

    def may_leave(self) -> bool:
        """The outcome of the last save is known, or is not worth waiting for any more."""

    def leave(self) -> NoReturn:
        """End the thread that calls it."""


class Steps(Protocol):
    """What follows the steps of the optimizers, in the threads that step."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def is_trained_by_hand(self) -> bool:
        """Something was trained of which no hook is called. Asked only while nothing else was trained."""


class Gate:
    """The lock between the training loop and a save."""

    def __init__(self, capturer: Capturer, way_out: WayOut | None = None) -> None:
        """Without `way_out` a thread that waits at the gate never leaves from there."""
        self._capturer = capturer
        self._way_out = way_out
        self._steps: Steps | None = None
        self._cond = threading.Condition()
        self.phase = Phase.FRESH
        self.capture: Capture | None = None
        self.is_due = False
        """A save waits for a safe point: the next capture takes everything."""
        self.holds_main = False
        """There are objects that change outside steps: the main thread stays in a safe point while a save reads."""
        self.loop_waits = False
        """The main thread makes no step until a save is over, because it waits for that save."""
        self.is_leaving = False
        """No step is made any more, whatever happens."""
        self.is_closed = False
        """The main thread will make no more safe points."""
        self.at: Point = (0, 0)
        """The last safe point: its step, and the number of rounds entered since."""
        self.agrees = False
        """Several ranks decide together how far the loop goes on when leaving."""
        self.limit: Point | None = None
        """When leaving together: the loop goes on up to this safe point; None: not at all."""
        self.hold_at: Point | None = None
        """The loop stays at this safe point until the save that is meant for it has begun."""
        self._is_shut = False
        self._waiting = 0
        self._hooks: list[Any] = []

        self._takers = 0
        self._least_step = 0
        self._exact: Point | None = None
        self._kept: list[Capture] = []
        """Captures of the earlier turns of this step, lowest first; only with several ranks."""
        self._pinned: list[Capture] = []
        """Captures that a save reads, or will read."""
        self._is_entering = False
        """The loop is making a new safe point out of the last one."""
        self._held = 0
        """Number of calls in which the main thread stays in a safe point."""
        self.stood_s = 0.0
        """Seconds that the loop has stood here for saves, since the process began."""

    # The training side.

    def install(self, steps: Steps | None = None) -> None:
        """Watch all optimizers of this process; `steps`, if given, is called before and after each of their steps."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._steps = steps

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self._steps is not None:
                self._steps.before_step(optimizer)
            if self.phase is not Phase.DIRTY:
                self._enter()

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self._steps is not None:
                self._steps.after_step(optimizer)

        # A compiled step would be traced through the hooks, with guards on our state and warnings about our calls.
        before, after = map(torch.compiler.disable, (before, after))
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forget(self) -> None:
        """In a forked child: its steps are its own, and none of them waits here."""
        self._steps = None
        self.phase = Phase.DIRTY  # a thread between a step and a safe point never waits

    def _enter(self) -> None:
        """Wait until no save reads, then let the step change state."""
        with self._cond:
            if self._is_held_here():
                self._hold()
            self._compare()
            if self._is_shut or self.is_leaving:
                self._wait_while_shut()
            # Another thread may have come through first: backward() steps on as many as there are devices.
            if self.phase is not Phase.DIRTY:
                self._to(Phase.DIRTY)

    def _compare(self) -> None:
        """Check that the safe points of this step that saves are reading have not changed.

        An operation under way writes first and counts its version when it is done, so the save may have missed it.
        The thread that trains is between two operations here, and sees all changes of its own.
        """
        for capture in self._pinned if self.phase is Phase.CLEAN else ():
            if capture.step == self.at[0]:
                # A change that was found once stays: the save may have read while a tensor was exchanged.
                capture.changed = capture.changed or self._capturer.changed(capture)

    def _wait_while_shut(self) -> None:
        self._waiting += 1
        self._cond.notify_all()
        try:
            # Bounded by the save: every attempt opens the gate when it ends, and its writes have deadlines.
            while self._is_shut or self.is_leaving:
                if self.is_leaving and self._way_out is not None and self._way_out.may_leave():
                    self._way_out.leave()
                if self.is_leaving and self._may_go_on():
                    return
                self._stand()
        finally:
            self._waiting -= 1

    def _stand(self) -> None:
        """One piece of a wait of the loop."""
        start_s = time.monotonic()
        self._cond.wait(_TICK_S)
        self.stood_s += time.monotonic() - start_s

    def _may_go_on(self) -> bool:
        """The process is leaving, but the loop has to reach another safe point first."""
        if self.agrees:
            return not self._is_shut and self.limit is not None and self.at < self.limit
        return self._needs_another()

    def _needs_another(self) -> bool:
        """The process is leaving, but this safe point cannot be saved any more: the loop must reach the next one."""
        return self.phase is Phase.CLEAN and not self._is_savable(self.capture)

    @property
    def is_unsavable(self) -> bool:
        """This safe point cannot be saved any more; the next one is needed."""
        with self._cond:
            return self._needs_another()

    def park(self) -> None:
        """Between two batches: stay until the process may leave. Returns only if another safe point is needed."""
        with self._cond:
            self._held += 1
            try:
                if self.phase is not Phase.DIRTY:
                    self._wait_while_shut()
            finally:
                self._held -= 1

    def pass_on(self) -> None:
        """The loop is about to make a new safe point out of the last one, with no step between them."""
        with self._cond:
            if self.agrees and self.phase is Phase.CLEAN:
                if self.is_leaving:
                    self._wait_while_shut()
                # Under the same lock as the wait: a notice that comes now must see that the loop is about to enter.
                self._is_entering = True

    def may_pass_on(self) -> bool:
        """As `pass_on()`, where the loop must neither wait nor leave; returns False if it would have to."""
        with self._cond:
            if self.is_leaving:
                return False
            self._is_entering = self.agrees and self.phase is Phase.CLEAN
            return True

    def publish(self, capture: Capture, *, may_stay: bool = True) -> None:
        """The main thread stands at a safe point and its state is `capture`."""
        with self._cond:
            self._compare()
            self._is_entering = False
            self._keep_earlier(capture)
            self.capture = capture
            self._to(Phase.CLEAN)
            self.at = capture.at
            self._cond.notify_all()
            if may_stay and self.is_due and (self.holds_main or self.is_leaving):
                self._stay()
            elif may_stay and self._takers:
                # A save waits for exactly this safe point, and would wake up after the next step has begun.
                while self._takers and self._is_wanted(capture) and not self._is_shut and not self.is_leaving:
                    self._stand()
            if may_stay and self.hold_at == capture.at:
                self._hold()

    def _keep_earlier(self, capture: Capture) -> None:
        """A new safe point replaces the last one. Other ranks may still want to save that one, so it may be kept."""
        before = [*self._kept, self.capture] if self.capture is not None else []
        self._kept = []
        if self.agrees and self.phase is Phase.CLEAN and not self.holds_main:
            # The thread that trains is between two operations: all changes it made show by now.
            earlier = [one for one in before if one.step == capture.step and one.turn < capture.turn]
            whole = [one for one in earlier if self._is_whole(one) and not self._capturer.changed(one)]
            self._kept = whole[:1] + whole[1:][1 - _KEPT :]
        for one in before:
            if not (one.pins or any(one is kept for kept in self._kept)):
                self._capturer.release(one)

    def _is_held_here(self) -> bool:
        """All ranks will save a safe point of this step, and no save has taken it on this rank yet."""
        return self.hold_at is not None and self._is_savable(self._capture_of(self.hold_at))

    def _hold(self) -> None:
        """Wait for the save of all ranks: once the loop has gone on, this safe point is lost."""
        at, end_s = self.hold_at, time.monotonic() + _HOLD_S
        while self.hold_at == at and not self._is_shut and not self.is_leaving:
            if time.monotonic() > end_s:
                self.hold_at = None
                return
            self._stand()

    def _stay(self) -> None:
        self._held += 1
        try:
            # The save takes the gate within a tick; from then on the gate is shut until the reading is done.
            # A safe point that it cannot take, has thrown away, or does not want is not worth waiting in.
            while self.is_due and self._is_wanted(self.capture) and not self._is_shut and not self.is_leaving:
                self._stand()
            self._wait_while_shut()
        finally:
            self._held -= 1

    def loaded(self, step: int = 0) -> None:
        with self._cond:
            self._to(Phase.LOADED)
            self.at = (step, 0)

    def close(self) -> None:
        """The main thread is on its way out and reaches no further safe point; threads that wait for one are woken."""
        with self._cond:
            self.is_closed = True
            self._cond.notify_all()

    def _to(self, phase: Phase) -> None:
        if phase not in _ALLOWED[self.phase]:
            raise AssertionError(f"gate: {self.phase.name} -> {phase.name}")
        self.phase = phase

    # The saving side.

    @property
    def someone_waits(self) -> bool:
        return self._waiting > 0 or self._held > 0

    def announce(self, *, is_leaving: bool = False) -> None:
        """A save is wanted: captures are whole from now on; when leaving, no new step begins."""
        with self._cond:
            self.is_due = True
            self.is_leaving = self.is_leaving or is_leaving
            self._cond.notify_all()

    def hold(self, at: Point | None) -> None:
        """Make the loop stay at this safe point when it gets there; None: at none."""
        with self._cond:
            self.hold_at = at
            self._cond.notify_all()

    def stop(self) -> tuple[Point | None, Turns, bool]:
        """Let the loop begin nothing new.

        Returns the safe point where it is, or will be next; what of that step can be saved; whether anything was
        trained.

        One act under the lock: between looking and stopping the loop could go on.
        """
        with self._cond:
            self.is_due = self.is_leaving = True
            self.limit = None
            self._cond.notify_all()
            trained = self._has_trained()
            reach = self._reach()
            return reach, self._turns(reach), trained

    def stop_here(self) -> tuple[Point | None, Turns, bool]:
        """As `stop()`, and let the loop go on to that safe point, and no further."""
        with self._cond:
            self.is_due = self.is_leaving = True
            trained = self._has_trained()
            self.limit = self._reach()
            self._cond.notify_all()
            return self.limit, self._turns(self.limit), trained

    @property
    def has_trained(self) -> bool:
        """There is a safe point of this life, or there will be one."""
        with self._cond:
            return self._has_trained()

    def _has_trained(self) -> bool:
        if self.phase in (Phase.FRESH, Phase.LOADED) and self._steps is not None and self._steps.is_trained_by_hand():
            self._to(Phase.DIRTY)
        return self.phase in (Phase.CLEAN, Phase.DIRTY)

    @property
    def reach(self) -> Point | None:
        """The safe point that can be saved next: the last one, or else the one to come; None: there is none."""
        with self._cond:
            return self._reach()

    def _reach(self) -> Point | None:
        if self._is_entering:
            return self.at[0], self.at[1] + 1
        if self.phase in (Phase.FRESH, Phase.LOADED):
            return self.at
        savable = self._savable()
        if savable:
            return savable[-1].at
        return None if self.is_closed else (self.at[0] + 1, 0)

    def _savable(self) -> list[Capture]:
        """What can be saved of the present step, lowest turn first."""
        found = [*self._kept, self.capture] if self.capture is not None else []
        return [capture for capture in found if self._is_savable(capture)]

    def _turns(self, reach: Point | None) -> Turns:
        """The turns of the step of `reach` that can be saved, or will be."""
        if reach is None:
            return ()
        turns = {}
        if self.phase is Phase.CLEAN and reach[0] == self.at[0]:
            # Those that are kept are compared once more before other ranks rely on them.
            found = (c for c in self._savable() if c is self.capture or not self._capturer.changed(c))
            turns = {capture.turn: capture.place for capture in found}
        return tuple(sorted({reach[1]: "", **turns}.items()))

    def can_save(self, point: Point) -> bool:
        """The loop is there, or will be, or its state at that safe point is still kept."""
        with self._cond:
            reach = self._reach()
            return reach is not None and (
                reach <= point or (reach[0] == point[0] and point[1] in dict(self._turns(reach)))
            )

    def let(self, limit: Point) -> None:
        """The loop may go on up to this safe point."""
        with self._cond:
            self.limit = limit
            self._cond.notify_all()

    def is_at(self, point: Point) -> bool:
        """The loop has come there, and nothing was trained since."""
        with self._cond:
            return self._is_at(point)

    def _is_at(self, point: Point) -> bool:
        return self.phase is Phase.CLEAN and self.at[0] == point[0] and self.at >= point

    def is_lost(self, point: Point) -> bool:
        """The loop has come there, but that safe point has changed or was never copied whole: waiting does not help."""
        with self._cond:
            capture = self._capture_of(point)
            return self._is_at(point) and (
                capture is None or not self._is_whole(capture) or (self.holds_main and capture is not self.capture)
            )

    def take(self, wait_s: float, *, least_step: int = 0, exact: Point | None = None) -> Capture | None:
        """Shut the gate on a safe point that can be saved, and pin it. None: there is none yet."""
        with self._cond:
            self._least_step, self._exact = least_step, exact
            if not self._is_wanted(self._asked_for()):
                self._takers += 1
                self._cond.wait(wait_s)
                self._takers -= 1
            capture = self._asked_for()
            if capture is None or not self._is_wanted(capture):
                return None
            self._is_shut = True
            if self.hold_at is not None and capture.at >= self.hold_at:
                self.hold_at = None
            capture.pins += 1
            self._pinned.append(capture)
            self._cond.notify_all()
            return capture

    def _asked_for(self) -> Capture | None:
        """What the save that waits would take, if it can be saved."""
        return self.capture if self._exact is None else self._capture_of(self._exact)

    def _capture_of(self, point: Point) -> Capture | None:
        found = [*self._kept, self.capture] if self.capture is not None else []
        return next((capture for capture in found if capture.at == point), None)

    @staticmethod
    def _is_whole(capture: Capture) -> bool:
        return not (capture.spoiled or capture.missing)

    def _is_savable(self, capture: Capture | None) -> bool:
        if self.phase is not Phase.CLEAN or capture is None or not self._is_whole(capture):
            return False
        if not self.holds_main:
            return True
        # If closed, the main thread trains no more.
        return capture is self.capture and (self._held > 0 or self.is_closed)

    @property
    def is_over(self) -> bool:
        """There is no safe point that can be saved, and there will be none."""
        with self._cond:
            return self.is_closed and not self._is_savable(self.capture)

    def _is_wanted(self, capture: Capture | None) -> bool:
        if capture is None or not self._is_savable(capture):
            return False
        return capture.step >= self._least_step if self._exact is None else capture.at == self._exact

    def open(self) -> None:
        """The reading is done, or given up: steps may go on."""
        with self._cond:
            self._is_shut = False
            self._cond.notify_all()

    def end_save(self, *, keep_due: bool = False) -> None:
        """The save is over, whether it succeeded or not."""
        with self._cond:
            self._is_shut = False
            self.is_due = keep_due
            self._cond.notify_all()

    def found_changed(self, capture: Capture) -> list[str]:
        """The objects that changed outside a step: those that the training thread found, and those found now."""
        with self._cond:
            self._compare()
            return capture.changed

    def spoil(self, capture: Capture) -> None:
        """This safe point cannot be saved any more."""
        with self._cond:
            capture.spoiled = True
            self._cond.notify_all()

    def unpin(self, capture: Capture) -> None:
        with self._cond:
            capture.pins -= 1
            if capture.pins:
                return
            self._pinned = [one for one in self._pinned if one is not capture]
            if capture is not self.capture and not any(one is capture for one in self._kept):
                self._capturer.release(capture)
