"""The policy of safe points: at which moments of the script the training could start again.

- The script marks them: with `batches()` each finished batch in which an optimizer stepped is one, and
  `safe_point()` is one where it is called.
- A script that marks none and has a single registered optimizer gets implied ones: after a step, the next
  forward pass or the next step is one. Such a script resumes at the start of the interrupted epoch.
- With several optimizers and no mark there is none, because nothing tells where an iteration is whole.

What an exception left half done is no safe point, until the script has trained a batch to its end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch

from migrator.errors import UsageError
from migrator.events import log
from migrator.loop import epoch_counters
from migrator.loop.batches import Batches, Loops
from migrator.loop.epoch_counters import EpochCounters
from migrator.loop.gate import Gate, Phase
from migrator.loop.iteration import Iteration
from migrator.loop.next_forward import NextForward
from migrator.loop.position import Place
from migrator.loop.training_by_hand import TrainingByHand
from migrator.loop.uneven_inputs import UnevenInputs
from migrator.loop.unfollowed_loaders import UnfollowedLoaders
from migrator.loop.unregistered_optimizers import UnregisteredOptimizers
from migrator.loop.worker_seeds import WorkersSeededApart
from migrator.state.capture import Capturer
from migrator.state.registry import Registry

MANY_STEPS = 200
"""Number of steps of one optimizer without a safe point after which a warning is logged."""


class Departure(Protocol):
    """What the loop asks about the notice and about the end of the process."""

    @property
    def has_notice(self) -> bool:
        """Whether there is a notice. True at once after SIGTERM, even before the watcher has read the signal."""

    @property
    def is_decided(self) -> bool:
        """The process is leaving, and the outcome of its last save is known."""

    @property
    def is_main_out(self) -> bool:
        """The main thread has left the script."""

    def may_have_stopped_script(self) -> bool:
        """The script may have ended its loop because it knows of the notice."""

    def leave_when_decided(self) -> NoReturn:
        """Wait for the outcome of the last save, and leave."""

    def note_marked(self) -> None:
        """The script marks its safe points."""

    def at_safe_point(self, step: int) -> None:
        """The main thread has reached this safe point, and has not captured it yet."""


class Checks(Protocol):
    """What has to be in order before anything is trained."""

    def before_safe_point(self) -> None:
        """Before the first safe point."""

    def before_step(self) -> None:
        """Before the first step of an optimizer."""


class SafePoints:
    """Follows the loop and the optimizers' steps, and captures the state at each safe point."""

    def __init__(
        self,
        registry: Registry,
        capturer: Capturer,
        gate: Gate,
        place: Place,
        counters: EpochCounters,
        *,
        departure: Departure,
        checks: Checks,
        has_other_ranks: bool,
    ) -> None:
        self._registry = registry
        self._capturer = capturer
        self._gate = gate
        self._place = place
        self._counters = counters
        self._departure = departure
        self._checks = checks
        self._has_other_ranks = has_other_ranks
        self._thread = threading.get_ident()
        self.loops = Loops(self, place, {name: adapter.target for name, adapter in registry})

        self.step = 0
        """Number of the last safe point, counted over all lives of the job."""
        self._turn = 0
        """Rounds of loops that were entered since then."""
        self.steps = 0
        """Steps of all optimizers in this life."""
        self._iteration = Iteration()
        self._finished: set[int] = set()
        """Optimizers that stepped since the last safe point."""
        self._finished_before: frozenset[int] | None = None
        """Optimizers that stepped before the last safe point, since the one before it; None: there was none."""
        self._unsaved_steps = 0
        self._gradients_at_safe_point: list[object] = [None] * len(registry.optimizers())
        self._is_marked = False
        """The script marks its safe points, by `batches()` or `safe_point()`."""
        self._postponed: Exception | None = None
        """An error that came where no exception gets through to the script."""

        self._by_hand = TrainingByHand(registry, capturer, gate)
        self._unregistered = UnregisteredOptimizers(registry)
        self._next_forward = NextForward(registry, self._before_forward)
        self._unfollowed: UnfollowedLoaders | None = None
        self._uneven: UnevenInputs | None = None
        self._seeds: WorkersSeededApart | None = None

    def install(self) -> None:
        """Begin to follow the optimizers, and replace the functions of torch that have to be known of."""
        self._gate.install(self)
        self._unfollowed = UnfollowedLoaders(self.loops.registered, lambda: self.loops.is_fetching)
        self._seeds = WorkersSeededApart()
        if self._has_other_ranks:
            self._uneven = UnevenInputs(lambda params: self._registry.owner_of(params) is not None)

    def remove(self) -> None:
        """Take all hooks away and put torch's own functions back."""
        self._gate.remove()
        for change in (self._seeds, self._unfollowed, self._uneven):
            if change is not None:
                change.remove()
        self._next_forward.stop()

    def forget(self) -> None:
        """In a forked child: nothing here is a safe point."""
        self._gate.forget()
        self._is_marked = self._next_forward.is_off = True

    def loaded(self, step: int) -> None:
        """The state is that of a ckpt of this step."""
        self.step = step
        self._gate.loaded(step)

    # What the script calls.

    def batches(self, loader: Any, name: str | None) -> Batches[Any]:
        """`migrator.batches()`"""
        self.mark()
        return self.loops.batches(loader, name)

    def epochs(self, total: int, *, name: str, start: int | None) -> Iterator[int]:
        """`migrator.epochs()`"""
        count = self._counters.begin(name, start, is_stopped=self.has_notice)
        return epoch_counters.run(count, total, self._next_epoch)

    def _next_epoch(self) -> None:
        # Where `batches()` notes the place in the epoch, it also notes when the next epoch begins.
        if not self._place.noted:
            self.entered(is_new_round=True)

    def reach_by_script(self) -> None:
        """`migrator.safe_point()`"""
        self.mark()
        if (why := self.why_not_whole()) is not None:
            raise UsageError(
                f"safe_point(): {why}. What is half done must not be saved: train a whole iteration first."
            )
        self.reach()

    def mark(self) -> None:
        """From now on only what the script marks is a safe point."""
        if not self._is_marked:
            self._is_marked = True
            self._departure.note_marked()
            self._next_forward.stop()

    def why_not_whole(self) -> str | None:
        """Why there can be no safe point right here; None: nothing speaks against it."""
        return self._iteration.why_not_whole() if self._gate.phase is Phase.DIRTY else None

    def raise_postponed(self) -> None:
        """Raise the error that could not be raised where it came."""
        error, self._postponed = self._postponed, None
        if error is not None:
            raise error

    # A safe point.

    def reach(self, *, may_stay: bool = True) -> None:
        """The loop could start again here: capture the state."""
        if self._gate.phase in (Phase.FRESH, Phase.LOADED):
            self._checks.before_safe_point()
        self.step += 1
        self._turn = 0
        self._unsaved_steps = 0
        self._iteration.is_whole()
        self._finished_before, self._finished = frozenset(self._finished), set()
        if not self.loops.is_live:
            self._place.begin_anew()
        self.loops.count_current()
        if self._is_marked and self._unfollowed is not None:
            self._unfollowed.look()
        self._gradients_at_safe_point = self._gradients()
        self._departure.at_safe_point(self.step)
        self._capture(may_stay=may_stay)

    def _reach_again(self, *, may_stay: bool = True) -> None:
        """A new round begins, and nothing was trained since the last safe point."""
        self._turn += 1
        self._capture(may_stay=may_stay)

    def _capture(self, *, may_stay: bool) -> None:
        loop = {**self._place.state(), "epochs": self._counters.state()}
        capture = self._capturer.take(self.step, loop, full=self._gate.is_due, turn=self._turn)
        self._gate.publish(capture, may_stay=may_stay)

    # What the loops say and ask.

    @property
    def is_leaving(self) -> bool:
        return self._gate.is_leaving

    @property
    def has_notice(self) -> bool:
        return self._departure.has_notice

    @property
    def epoch(self) -> object:
        return self._counters.now

    @property
    def has_unsaved(self) -> bool:
        return self._gate.phase is Phase.DIRTY or self.is_trained_by_hand()

    @property
    def is_decided(self) -> bool:
        return self._departure.is_decided

    def handing_out(self) -> None:
        self._iteration.begins()
        if not self.steps:
            self._by_hand.watch()

    def boundary(self) -> None:
        if self.is_trained_by_hand():
            self._by_hand.follow()
            self.reach()
        elif self._gate.phase is Phase.DIRTY:
            self.reach()

    def entered(self, *, is_new_round: bool) -> None:
        self.raise_postponed()
        if self._gate.phase is Phase.DIRTY:
            # What an exception left behind is whole again when the script has trained a batch to its end.
            if not self._iteration.is_broken_off:
                self.reach()
        elif self._gate.phase is Phase.CLEAN and is_new_round and not self._has_gradients_to_lose():
            # Before a second loop of the same epoch the last safe point stays. A script that resumes from here
            # would repeat what lies between the two loops, for example a scheduler's step.
            self._gate.pass_on()
            self._reach_again()

    def left_early(self, *, at_will: bool | None) -> bool:
        # Called while the loop's iterator is deleted: an exception would be printed and forgotten, so it is kept.
        try:
            return self._left_early(at_will=at_will)
        except Exception as error:
            self._postponed = error
            return False

    def _left_early(self, *, at_will: bool | None) -> bool:
        """A loop that was left by `break` is over, and that is a safe point if the step is complete.

        It is not over if the script may have left it because of the notice: then it is only interrupted.
        """
        if self._departure.is_main_out:
            return False  # a loop that nobody ended, at the end of the interpreter
        if not at_will:
            if at_will is False:
                self._iteration.is_broken_off |= self._gate.phase is Phase.DIRTY
            return False
        is_over = not self._departure.may_have_stopped_script()
        expected = self._finished_before
        if expected is None:
            expected = frozenset(id(o) for o in self._registry.optimizers())
        is_by_hand = self.is_trained_by_hand()
        if is_by_hand:
            self._by_hand.follow()
        if self._gate.phase is Phase.DIRTY or is_by_hand:
            if is_by_hand or self._finished == expected:
                if is_over:
                    self.loops.leave_live()
                self.reach(may_stay=False)
        elif is_over and self.loops.has_trained and not self._has_gradients_to_lose():
            self.loops.leave_live()
            if self._gate.phase is Phase.CLEAN and self._gate.may_pass_on():
                self._reach_again(may_stay=False)
        return is_over

    def park(self) -> None:
        self._gate.park()

    def park_for_good(self) -> NoReturn:
        before = self._gate.capture
        if before is not None and self._gate.is_unsavable:
            # The loop is still at that safe point; only its loader may have drawn random numbers since.
            again = self._capturer.take(self.step, before.loop, full=True, turn=self._turn)
            self._gate.publish(replace(again, random=before.random), may_stay=False)
        self._gate.close()
        self._departure.leave_when_decided()

    def body_mark(self) -> object:
        if not self.steps and not self._registry.optimizers():
            return object()  # nothing tells what such a script does, so each batch counts as used
        # A step that a scaler skips leaves no gradients and counts as none, but the scaler was updated.
        scales = [getattr(scaler, "_scale", None) for scaler in self._registry.scalers()]
        updates = [None if scale is None else (id(scale), scale._version) for scale in scales]
        return self.steps, self._gradients(), updates

    def _has_gradients_to_lose(self) -> bool:
        """Gradients were accumulated since the last safe point. No ckpt holds them."""
        return any(
            now is not None and now != before
            for now, before in zip(self._gradients(), self._gradients_at_safe_point, strict=True)
        )

    def _gradients(self) -> list[object]:
        """For each optimizer, what tells apart the gradients that its last parameter has had."""
        marks: list[object] = []
        for optimizer in self._registry.optimizers():
            params = optimizer.param_groups[-1]["params"]
            grad = params[-1].grad if params else None
            marks.append(None if grad is None else (id(grad), grad._version))
        return marks

    # What the gate says and asks: the optimizers' steps.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.raise_postponed()
        if self._uneven is not None:
            self._uneven.check()
        self._iteration.stepping.add(id(optimizer))
        if self._gate.phase in (Phase.FRESH, Phase.LOADED):
            self._checks.before_step()
        if self._gate.phase is Phase.LOADED:
            self._registry.first_step()
        self._unregistered.before_step(optimizer)
        if not self._is_marked and self._gate.phase is Phase.DIRTY and id(optimizer) in self._finished:
            self._imply()
        if self._is_marked and id(optimizer) in self._finished:
            self._unsaved_steps += 1
            if self._unsaved_steps == MANY_STEPS:
                log(
                    "no_safe_point",
                    level=logging.WARNING,
                    steps=self._unsaved_steps,
                    means="so many steps since the last safe point: nothing newer can be saved. The loop has to take "
                    "each batch from migrator.batches() (an iteration begun earlier and still held makes the safe "
                    "points of all), or to call migrator.safe_point()",
                )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1
        self._iteration.stepping.discard(id(optimizer))
        self._finished.add(id(optimizer))
        if not self._is_marked:
            self._next_forward.wait()
        self._unregistered.after_step(optimizer)

    def is_trained_by_hand(self) -> bool:
        """Registered tensors changed in this batch, and no optimizer has ever stepped: the script does it itself."""
        return self.steps == 0 and self.loops.is_live and self._by_hand.has_trained

    # Safe points that the script does not mark.

    def _before_forward(self) -> None:
        if self._gate.phase is Phase.DIRTY and self._finished:
            self._imply()

    def _imply(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if len(self._registry.optimizers()) == 1:
            if self._finished_before is None:
                log(
                    "implied_safe_points",
                    level=logging.WARNING,
                    means="an interrupted epoch is repeated from its start; "
                    "for batch in migrator.batches(loader) goes on within it",
                )
            self.reach()
            return
        self._unsaved_steps += 1
        if self._unsaved_steps == 3:
            log(
                "no_safe_point",
                level=logging.WARNING,
                optimizers=len(self._registry.optimizers()),
                means="with several optimizers (or none registered) it cannot be told where a step is whole: "
                "wrap the loader in migrator.batches(), or call migrator.safe_point(); until then nothing can be saved",
            )
