"""One iteration over one loader, followed so that a resume goes on after the last batch that was trained.

A loader whose sampler is a registered `ElasticSampler` starts in the middle of its epoch. Any
other loader is started as its epoch was started, with the same random state, and the batches
that were trained already are drawn again and dropped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol

from torch.utils.data import BatchSampler, DistributedSampler

from migrator.data.sampler import ElasticSampler
from migrator.errors import UsageError
from migrator.events import log
from migrator.loop import worker_seeds
from migrator.loop.drawn_order import DrawnOrder
from migrator.loop.fingerprint import fingerprint
from migrator.loop.generators import restore_generators, state_of
from migrator.loop.loader_state import LoaderState
from migrator.loop.position import Label, Place
from migrator.platform import script_frames
from migrator.state import random_state

_RESUMES_ITSELF = (
    "batches(loader): the loader is registered and goes on in mid-epoch by itself, so its batches would be skipped "
    "twice. Do not register the loader; batches() follows it."
)


class Training(Protocol):
    """What a loop needs of the safe points."""

    @property
    def is_leaving(self) -> bool: ...

    @property
    def has_notice(self) -> bool:
        """A notice came. True at once after SIGTERM, even if the watcher has not read of it yet."""

    @property
    def epoch(self) -> object:
        """The epochs that `migrator.epochs()` counts; None if it is not used."""

    @property
    def has_unsaved(self) -> bool:
        """Something was trained since the last safe point."""

    @property
    def is_decided(self) -> bool:
        """The process is leaving, and the outcome of its last save is known."""

    def handing_out(self) -> None:
        """The loop gets its next batch."""

    def boundary(self) -> None:
        """The loop stands between two batches: a safe point if an optimizer stepped."""

    def entered(self, *, is_new_round: bool) -> None:
        """A loop begins: a safe point if something was trained, and if a resume from here repeats none of it."""

    def left_early(self, *, at_will: bool | None) -> bool:
        """The loop was left inside a batch; returns whether it is over.

        `at_will`: True after `break`, False after an exception, None if it cannot be known.
        """

    def park(self) -> None:
        """Wait until the state is saved, then leave. Returns if another safe point is needed for that."""

    def park_for_good(self) -> NoReturn:
        """The same where no other safe point can come."""

    def body_mark(self) -> object:
        """Changes with each step and each backward pass."""


class FollowedLoop:
    """One iteration over one loader."""

    def __init__(
        self,
        loader: Any,
        training: Training,
        place: Place,
        registered: Mapping[str, Any],
        called: tuple[str | None, tuple[str, str]],
    ) -> None:
        self._loader = loader
        self._training = training
        self._place = place
        self._generators = {n: target for n, target in registered.items() if random_state.is_generator(target)}
        found = _elastic_sampler(loader, registered)
        self._sampler = None if found is None else registered[found]
        if callable(getattr(loader, "load_state_dict", None)) and any(loader is t for t in registered.values()):
            raise UsageError(_RESUMES_ITSELF)
        self.label = Label.of(
            loader,
            name=called[0],
            sampler=found,
            site=called[1],
            is_by_hand=script_frames.is_asked_by_hand(sys._getframe()),
        )
        self._loader_state = LoaderState(loader)
        self._before = 0
        """Batches of this epoch that an earlier life trained; only for a loader with an `ElasticSampler`."""
        self._handed = 0
        self._counted = 0
        self._batch_size = getattr(loader, "batch_size", None) or 1
        self._is_resumed = False
        self._resumed_from: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._goes_on_after_load = False
        self._at = ""
        self._began_in = -1
        """The sampler's epoch at the start of this iteration."""
        self._batches_left = 0
        self._state: dict[str, Any] = {}
        self.iterator: Iterator[Any] = iter(())
        self.has_stepped = False
        self._is_touched = False
        """The loop was left with something trained after the last safe point."""

    def start(self, at: str) -> None:
        """Make the loader's iterator, at the batch where this iteration begins.

        `at`: the loop's place in the script.
        """
        place, label = self._place, self.label
        self._at = at
        resumed = place.take_pending(label)
        if self._sampler is not None:
            self._start_sampler(self._sampler)
            if resumed is not None and resumed["handed"] and not self._sampler.cursor:
                # The ckpt is from the end of an epoch, and a script that counts by steps begins with the next one.
                resumed = None
        if resumed is not None and self._has_gone_on(resumed):
            resumed = None
        if place.is_first(label):
            if resumed is None and self._sampler is None:
                self._loader_state.check()
            worker_seeds.warn_of_what_persists(self._loader, self._loader_state.generators)
        alike = place.meets_another(label, self._loader, fingerprint, self._epoch)
        if resumed is None:
            is_new_round = place.is_new_round(label)
            self._state = {
                "handed": 0,
                "is_over": False,
                "batch_size": self._batch_size,
                "origin": self._origin(),
                "alike": alike,
                "at": at,
            }
            place.begin(label, self._state)
            self._training.entered(is_new_round=is_new_round)
            self.iterator = worker_seeds.begin(self._loader)
            return
        self._is_resumed = True
        self._resumed_from = (dict(resumed), place.random_at_safe_point)
        self._check_batch_size(resumed["batch_size"])
        self._state = place.noted[label.text] = resumed
        self._handed = self._counted = resumed["handed"] if self._sampler is None else 0
        is_at_safe_point = True
        if resumed["is_over"] and self._sampler is None:
            self.iterator = iter(())
        else:
            self._return_to_origin(resumed["origin"])
            self.iterator = worker_seeds.begin(self._loader)
            if self._sampler is None:
                order = DrawnOrder(self.iterator, self._loader)
                self._drop(resumed["handed"])
                order.remove()
                self._check_order(order)
                self._loader_state.check_shared(self._at_safe_point(resumed))
            # With no batch handed out, the safe point was before the iterator was made. So the random numbers
            # that were drawn to make it have to be drawn again.
            is_at_safe_point = resumed["handed"] > 0
        if is_at_safe_point and place.random_at_safe_point is not None:
            random_state.restore(place.random_at_safe_point)
            restore_generators(self._generators, place.generators_at_safe_point)
            self._loader_state.restore_generators(resumed.get("now", {}))
        if not place.pending:
            # Kept until then: of the loops that had begun, only the last one was at the safe point.
            place.random_at_safe_point = None

    def _has_gone_on(self, resumed: Mapping[str, Any]) -> bool:
        """The ckpt is from the end of an epoch, and the script, which counts by steps, begins with the next one."""
        makers = resumed["origin"].get("makers")
        is_at_end = resumed["is_over"] or (
            isinstance(getattr(self._loader, "sampler", None), DistributedSampler)
            and resumed["handed"] >= len(self._loader)
        )
        return bool(is_at_end and makers and self._loader_state.is_next_epoch(makers))

    def _start_sampler(self, sampler: ElasticSampler) -> None:
        self._goes_on_after_load = sampler.is_resumed
        sampler.begin()
        if sampler.advanced_by_itself:
            log(
                "epoch_advanced",
                level=logging.WARNING,
                epoch=sampler.epoch,
                means="call sampler.set_epoch(epoch) before each epoch",
            )
        self._began_in = sampler.epoch
        samples = sampler.left()
        whole, rest = divmod(samples, self._batch_size)
        self._batches_left = whole + (rest > 0 and not getattr(self._loader, "drop_last", False))
        self._before = -(-sampler.cursor // (self._batch_size * sampler.size))

    def _origin(self) -> dict[str, Any]:
        """What is needed to begin this epoch again with the same batches in the same order."""
        return {
            "random": random_state.capture(),
            "generators": {name: state_of(target) for name, target in self._generators.items()},
            "makers": self._loader_state.state() if self._sampler is None else None,
        }

    def _return_to_origin(self, origin: dict[str, Any]) -> None:
        random_state.restore(origin["random"])
        if self._sampler is not None:
            return
        if "makers" in origin:
            try:
                restore_generators(self._generators, origin["generators"])
                self._loader_state.restore(origin["makers"])
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                if isinstance(error, UsageError):
                    raise
                raise UsageError(
                    f"batches(loader) at {self.label.shown}: what the ckpt holds of the loader's samplers and "
                    f"generators does not fit those here ({type(error).__name__}: {error}). Make them as they "
                    "were, or begin the epoch anew: MIGRATOR_LOOPS=anew."
                ) from error
        elif any(state is not None for state in origin.get("others", ())):
            raise UsageError(
                f"the ckpt was made by an older version of migrator, in the middle of an epoch of a loader with "
                f"generators of its own ({self.label.shown}): they were saved in a form that is not read any more. "
                "Begin the interrupted epoch anew: MIGRATOR_LOOPS=anew."
            )

    def _check_order(self, order: DrawnOrder) -> None:
        now = self._place.random_at_safe_point
        if now is not None and order.is_lost(now):
            raise UsageError(
                f"batches(loader) at {self.label.shown}: the sampler draws the order of the samples bit by bit from "
                "the global random state, and the script draws from that in between, so it cannot be drawn again "
                "without the script. Give the sampler a generator of its own, or let it draw the whole order when it "
                "begins; or begin the epoch anew: MIGRATOR_LOOPS=anew."
            )

    def _at_safe_point(self, resumed: dict[str, Any]) -> dict[str, Any]:
        """By path: the state that each generator of the loader had at the safe point of the ckpt."""
        found = dict(resumed.get("now", {}))
        for path, generator in self._loader_state.generators.items():
            name = next((n for n, known in self._generators.items() if known is generator), None)
            if name in self._place.generators_at_safe_point:
                found[path] = self._place.generators_at_safe_point[name]
        return found

    def _check_batch_size(self, there: int) -> None:
        if self._sampler is None and there != self._batch_size:
            raise UsageError(
                f"batches(loader): the batch size is {self._batch_size} here, {there} in the ckpt, which was made in "
                "the middle of an epoch of this loader. Use the old batch size for the rest of the epoch, "
                "or an ElasticSampler, which can go on with another one."
            )

    def _drop(self, count: int) -> None:
        for done in range(count):
            try:
                next(self.iterator)
            except StopIteration:
                raise UsageError(
                    f"the ckpt was made after {count} batches of this epoch, but the loader ended after {done}. "
                    "Did the data or the batch size change? An ElasticSampler can go on with another batch size."
                ) from None

    @property
    def starts(self) -> list[int]:
        """The first index of each `enumerate` around the loop, in this epoch."""
        return list(self._state.get("starts", ()))

    @starts.setter
    def starts(self, starts: list[int]) -> None:
        self._state["starts"] = starts

    @property
    def batches_handed(self) -> int:
        """Batches that the loop got in this life, or that were dropped for it."""
        return self._handed

    @property
    def batches_done(self) -> int:
        """Batches of this epoch before the next one, counted over all lives of the job."""
        return self._before + self._handed

    def handed(self) -> None:
        """The loop gets a batch."""
        self._handed += 1

    def count(self) -> None:
        """At a safe point: all batches handed out so far are trained, so move the cursor."""
        new = self._handed - self._counted
        if new and not self.has_stepped and not self._is_resumed:
            self._place.check_nothing_is_left_out(self.label)
        self.has_stepped = self.has_stepped or new > 0
        self._counted = self._handed
        self._state["handed"] = self._handed
        self._state["now"] = self._loader_state.generator_states(but=self._generators.values())
        if self._sampler is None:
            return
        if self._state["is_over"] or (new and self._handed >= self._batches_left):
            self._sampler.finish()
        elif new:
            self._sampler.advance(new * self._batch_size * self._sampler.size)

    def leave(self) -> None:
        """The loop was left by `break` after something was trained in it: the epoch is over."""
        self._state["is_over"] = True
        if self._sampler is not None:
            self._sampler.finish()

    def left(self, *, is_over: bool) -> None:
        """The loop was left inside a batch.

        A `break` before anything is trained ends the epoch if this is the loop that the ckpt was in. Another loop over
        the same data, left that way, only looked at a batch.
        """
        self._is_touched |= self._training.has_unsaved
        is_same = self._resumed_from is not None and self._resumed_from[0].get("at") == self._at
        if is_over and is_same and not self._has_trained:
            self.leave()

    @property
    def _epoch(self) -> object:
        """What tells this epoch from others; None if the script does not say."""
        return self._began_in if self._sampler is not None else self._training.epoch

    @property
    def _has_trained(self) -> bool:
        return self.has_stepped or self._is_touched

    def over(self) -> None:
        """The loader has no batch left."""
        self._state["is_over"] = True

    def end(self, *, may_end_workers: bool) -> None:
        """The iteration has ended, in whatever way."""
        self._place.end(self.label)
        self._place.let_go(self.label, self._epoch if self._has_trained else None)
        if not self._has_trained and not self._state.get("is_over"):
            if self._resumed_from is not None:
                self._place.put_back(self.label, *self._resumed_from)
            if self._sampler is not None and self._goes_on_after_load:
                self._sampler.resume_again()
        if may_end_workers:
            # Otherwise torch waits up to five seconds for each worker that is busy.
            for worker in getattr(self.iterator, "_workers", ()):
                worker.terminate()


def _elastic_sampler(loader: Any, registered: Mapping[str, Any]) -> str | None:
    """The name of the registered `ElasticSampler` of this loader, if it has one. Raises if it cannot be followed."""
    own = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = (getattr(batch_sampler, "sampler", None), getattr(own, "sampler", None))
    sampler = next((s for s in (own, *inner, batch_sampler) if isinstance(s, ElasticSampler)), None)
    if sampler is None:
        return None
    name = next((name for name, known in registered.items() if known is sampler), None)
    if name is None:
        raise UsageError(
            "batches(loader): the loader's ElasticSampler is not registered, so its place would not be saved. "
            'Call migrator.register("sampler", sampler) before listening().'
        )
    if sampler is not own or (batch_sampler is not None and type(batch_sampler) is not BatchSampler):
        grouping = type(batch_sampler or own).__name__
        raise UsageError(
            f"batches(loader): the loader groups samples by a {grouping}, whose batch sizes are "
            "not known, so the place in the epoch cannot be counted. Give DataLoader(sampler=..., batch_size=...), or "
            "use this batch sampler over a sampler of its own: its batches are then drawn again on resume."
        )
    return name
