"""`batches()`: the training loop's own line, where safe points come from.

Each time the loop asks for the next batch, the one before is finished. If an
optimizer stepped since the last safe point, that moment is one: everything the
loop would need to start again there is whole. Batches between two steps
(accumulation) belong together without anybody saying so, and the cursor moves
by what the loop was handed, never by what loader workers have fetched ahead.

A loop that is left by `break` is over. One that is left by an exception is not,
and the iteration it was in is no safe point.

Only the first live `batches()` makes safe points; one inside it (an evaluation)
hands its batches through. A loader whose sampler is an `ElasticSampler` starts in
the middle of its epoch. Any other loader is started as its epoch was started, with
the same random state, and the batches already trained are drawn again and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

from migrator.platform import script_frames as frames
from migrator.state import random_state as randomness
from migrator.loop import loader_state as replay
from migrator.loop.wrapping_iterators import SIDE_BY_SIDE, Between
from migrator.errors import UsageError
from migrator.events import log
from migrator.loop.position import Label, Place
from migrator.data.sampler import ElasticSampler

Batch = TypeVar("Batch")

_NO_SECOND_START = (
    "batches(...) was given a {}, which can be iterated only once, so it could not be started again on resume. "
    "Give it the loader itself: enumerate(migrator.batches(loader))."
)
_SIDE_THREAD = (
    "batches(loader) is iterated in the thread {!r}. A finished batch is a safe point only where it is trained: "
    "iterate it in the main thread, and fetch ahead inside the loader (num_workers, prefetch_factor)."
)
_RESUMES_ITSELF = (
    "batches(loader): the loader is registered and goes on in mid-epoch by itself, so its batches would be skipped "
    "twice. Do not register the loader; batches() follows it."
)


class Training(Protocol):
    """What the loop needs of the rest."""

    @property
    def is_leaving(self) -> bool: ...

    @property
    def has_news(self) -> bool:
        """SIGTERM came, even if it has not got about yet."""

    @property
    def epoch(self) -> object:
        """What `migrator.epochs()` counts; None if it is not used."""

    @property
    def has_unsaved(self) -> bool:
        """Something was trained since the last safe point."""

    @property
    def is_decided(self) -> bool:
        """The process leaves, and nothing is left to lose."""

    def handing_out(self) -> None:
        """The loop gets its next batch."""

    def boundary(self) -> None:
        """The loop stands between two batches; a safe point if something stepped."""

    def entered(self, *, is_new_round: bool) -> None:
        """A loop begins: a safe point, if anything was trained and nothing of it would be done again."""

    def left_early(self, *, at_will: bool | None) -> bool:
        """The loop was left inside a batch: by `break`, by an exception, or nobody knows. Whether it is over."""

    def park(self) -> None:
        """Stay until the state is safe, then leave; returns if that takes another safe point."""

    def park_for_good(self) -> NoReturn:
        """The same, when there can be no further safe point."""

    def body_mark(self) -> object:
        """Changes whenever a step or a backward pass happened."""


class Batches(Generic[Batch]):
    """What `batches(loader)` returns: iterates as the loader does, and `len()` is the whole epoch."""

    def __init__(self, loader: Any, loops: Loops, called: tuple[str | None, tuple[str, str]]) -> None:
        self._loader = loader
        self._loops = loops
        self._called = called
        self.done = 0
        """How many batches of the epoch are behind the loop: inside it, the index of the batch at hand."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        held: list[Any] = []
        iterator = self._loops.iterate(self._loader, self, self._called, held)
        held.append(weakref.ref(iterator))
        return iterator

    def __getattr__(self, name: str) -> Any:
        # The loader's `dataset`, `sampler`, `batch_size` and whatever else scripts read there.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)


class Loops:
    """All `batches()` of a life; at most one of them makes safe points at a time."""

    def __init__(self, training: Training, place: Place, registered: Mapping[str, Any]) -> None:
        self._training = training
        self._place = place
        self.registered = registered
        self._live: _Loop | None = None
        self._has_warned = False
        self._looked_around: set[str] = set()
        self._start_late: set[str] = set()
        """Loops with an `enumerate` that does not begin at 0: perhaps each time at another number."""
        self._call_script: set[str] = set()
        """Loops that functions of the script's stand around."""
        self.is_fetching = False
        """A loader is asked for its iterator or a batch, on behalf of the live loop."""

    def batches(self, loader: Any, name: str | None) -> Batches[Any]:
        return Batches(loader, self, (name, frames.place_in_script(sys._getframe())))

    def iterate(
        self, loader: Any, batches: Batches[Any], called: tuple[str | None, tuple[str, str]], held: list[Any]
    ) -> Iterator[Any]:
        """The generator behind one `for`; `called`: by which name, and where; `held` is a way to it itself."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(_SIDE_THREAD.format(threading.current_thread().name))
        if self._live is not None:
            yield from self._inner(self._live, loader, batches)
            return
        if _is_one_shot(loader):
            raise UsageError(_NO_SECOND_START.format(type(loader).__name__))
        loop = self._live = _Loop(loader, self._training, self._place, self.registered, called)
        # From here to the end of this block, whatever way it is left, the loop is the live one.
        try:
            yield from self._run(loop, batches, held)
        finally:
            self._live = None
            loop.end(may_end_workers=self._training.is_decided)

    def _inner(self, outer: _Loop, loader: Any, batches: Batches[Any]) -> Iterator[Any]:
        """A loop inside another one, an evaluation for example, is not ours to follow."""
        before = outer.batches_handed
        for done, batch in enumerate(loader):
            if outer.batches_handed != before and self._live is outer:
                raise UsageError(SIDE_BY_SIDE)
            batches.done = done
            yield batch

    @property
    def is_live(self) -> bool:
        """A loop that makes safe points is under way."""
        return self._live is not None

    def _run(self, loop: _Loop, batches: Batches[Any], held: list[Any]) -> Iterator[Any]:
        training = self._training
        at = frames.loop_in_script(sys._getframe())
        with self._fetching():
            loop.start(at)
        self._look_around(loop, held[0]())
        mark, unused = training.body_mark(), 0
        while True:
            if training.is_leaving:
                training.park()
            try:
                with self._fetching():
                    batch = next(loop.iterator)
            except StopIteration:
                loop.over()
                batches.done = loop.batches_done
                return
            except Exception as error:
                # Loader workers die with the process group when the pod is stopped. That is no failure of the run.
                if not training.has_news:
                    raise
                log("loader_error_swallowed", level=logging.WARNING, error=error)
                training.park_for_good()
            batches.done = loop.batches_done
            loop.handed()
            training.handing_out()
            took = frames.takers(sys._getframe())
            try:
                yield batch
            except GeneratorExit:
                may_end = loop.label.text not in self._call_script
                at_will = frames.is_left_at_will(sys._getframe(), took=took, may_end=may_end)
                loop.left(is_over=training.left_early(at_will=at_will))
                raise
            training.boundary()
            now = training.body_mark()
            unused += now == mark
            if unused and not self._has_warned and (loop.has_stepped or self._trains()):
                self._warn_unused()
            mark = now

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        self.is_fetching = True
        try:
            yield
        finally:
            self.is_fetching = False

    def _look_around(self, loop: _Loop, iterator: Any) -> None:
        """What stands between this iteration and the script's loop: may it, and does it know where we are?"""
        label = loop.label.text
        if label in self._looked_around and not loop.batches_done and label not in self._start_late:
            return
        self._looked_around.add(label)
        between = Between(iterator, sys._getframe())
        if any(between.starts):
            self._start_late.add(label)
        if between.calls_script:
            self._call_script.add(label)
        between.check()
        if loop.batches_done:
            between.go_on_at(loop.batches_done, loop.starts)
        else:
            loop.starts = between.starts

    def count_current(self) -> None:
        """At a safe point: what was handed out is trained."""
        if self._live is not None:
            self._live.count()

    @property
    def has_trained(self) -> bool:
        """The live loop has made a safe point."""
        return self._live is not None and self._live.has_stepped

    def leave_live(self) -> None:
        """The live loop was left by `break`: it is over."""
        if self._live is not None:
            self._live.leave()

    def _trains(self) -> bool:
        return any(isinstance(target, nn.Module) and target.training for target in self.registered.values())

    def _warn_unused(self) -> None:
        self._has_warned = True
        log(
            "batch_unused",
            level=logging.WARNING,
            means="two batches were taken from migrator.batches() with neither a backward pass nor a step in between; "
            "if the loop looks ahead, the batch it holds back counts as trained and would be missing after a resume: "
            "train each batch before taking the next",
        )


class _Loop:
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
        self._generators = {n: target for n, target in registered.items() if randomness.is_generator(target)}
        found = _elastic_sampler(loader, registered)
        self._sampler = None if found is None else registered[found]
        if callable(getattr(loader, "load_state_dict", None)) and any(loader is t for t in registered.values()):
            raise UsageError(_RESUMES_ITSELF)
        self.label = Label.of(
            loader,
            name=called[0],
            sampler=found,
            site=called[1],
            is_by_hand=frames.is_asked_by_hand(sys._getframe()),
        )
        self._makers = replay.Makers(loader)
        self._before = 0
        """Batches of this epoch that an earlier life trained, of a loader whose sampler goes on by itself."""
        self._handed = 0
        self._counted = 0
        self._batch_size = getattr(loader, "batch_size", None) or 1
        self._is_resumed = False
        self._resumed_from: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._goes_on_after_load = False
        self._at = ""
        self._began_in = -1
        """The sampler's epoch."""
        self._batches_left = 0
        self._state: dict[str, Any] = {}
        self.iterator: Iterator[Any] = iter(())
        self.has_stepped = False
        self._is_touched = False
        """It was left with something trained of which there is no safe point."""

    def start(self, at: str) -> None:
        """Make the loader's iterator stand where this iteration begins; `at` is the loop's place in the script."""
        place, label = self._place, self.label
        self._at = at
        resumed = place.take_pending(label)
        if self._sampler is not None:
            self._start_sampler(self._sampler)
            if resumed is not None and resumed["handed"] and not self._sampler.cursor:
                # The ckpt stands at the end of an epoch, and a script that counts its epochs by steps is in the next.
                resumed = None
        if resumed is not None and self._has_gone_on(resumed):
            resumed = None
        if place.is_first(label):
            if resumed is None and self._sampler is None:
                self._makers.check()
            replay.say_what_persists(self._loader, self._makers)
        alike = place.meets_another(label, self._loader, replay.fingerprint, self._epoch)
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
            self.iterator = replay.begin(self._loader)
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
            self.iterator = replay.begin(self._loader)
            if self._sampler is None:
                order = replay.DrawnOrder(self.iterator, self._loader)
                self._drop(resumed["handed"])
                order.take_away()
                self._check_order(order)
                self._makers.check_shared(self._at_safe_point(resumed))
            # With nothing handed the safe point was right before the iterator was made: what making it drew counts.
            is_at_safe_point = resumed["handed"] > 0
        if is_at_safe_point and place.random_at_safe_point is not None:
            randomness.restore(place.random_at_safe_point)
            replay.restore_generators(self._generators, place.generators_at_safe_point)
            self._makers.restore_generators(resumed.get("now", {}))
        if not place.pending:
            # Until then: of the loops that had begun, only the last one stands at the safe point.
            place.random_at_safe_point = None

    def _has_gone_on(self, resumed: Mapping[str, Any]) -> bool:
        """The ckpt stands at the end of an epoch, and the script, which counts by steps, in the one behind it."""
        makers = resumed["origin"].get("makers")
        is_at_end = resumed["is_over"] or (
            isinstance(getattr(self._loader, "sampler", None), DistributedSampler)
            and resumed["handed"] >= len(self._loader)
        )
        return bool(is_at_end and makers and self._makers.is_next_epoch(makers))

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
        """What a second start needs to hand out the same batches in the same order."""
        return {
            "random": randomness.capture(),
            "generators": {name: replay.state_of(target) for name, target in self._generators.items()},
            "makers": self._makers.state() if self._sampler is None else None,
        }

    def _return_to_origin(self, origin: dict[str, Any]) -> None:
        randomness.restore(origin["random"])
        if self._sampler is not None:
            return
        if "makers" in origin:
            try:
                replay.restore_generators(self._generators, origin["generators"])
                self._makers.restore(origin["makers"])
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                if isinstance(error, UsageError):
                    raise
                raise UsageError(
                    f"batches(loader) at {self.label.shown}: what the ckpt holds of the loader's samplers and "
                    f"generators does not fit those here ({type(error).__name__}: {error}). Give them back as they "
                    "were, or begin the epoch anew: MIGRATOR_LOOPS=anew."
                ) from error
        elif any(state is not None for state in origin.get("others", ())):
            raise UsageError(
                f"the ckpt was made by an older version of migrator, in the middle of an epoch of a loader with "
                f"generators of its own ({self.label.shown}): they were saved in a form that is not read any more. "
                "Begin the interrupted epoch anew: MIGRATOR_LOOPS=anew."
            )

    def _check_order(self, order: replay.DrawnOrder) -> None:
        now = self._place.random_at_safe_point
        if now is not None and order.is_lost(now):
            raise UsageError(
                f"batches(loader) at {self.label.shown}: the sampler draws the order of the samples bit by bit from "
                "the global random state, and the script draws from that in between, so it cannot be drawn again "
                "without the script. Give the sampler a generator of its own, or let it draw the whole order when it "
                "begins; or begin the epoch anew: MIGRATOR_LOOPS=anew."
            )

    def _at_safe_point(self, resumed: dict[str, Any]) -> dict[str, Any]:
        """Generators that the loader draws from, by path, as the ckpt found them."""
        found = dict(resumed.get("now", {}))
        for path, generator in self._makers.generators.items():
            name = next((n for n, known in self._generators.items() if known is generator), None)
            if name in self._place.generators_at_safe_point:
                found[path] = self._place.generators_at_safe_point[name]
        return found

    def _check_batch_size(self, there: int) -> None:
        if self._sampler is None and there != self._batch_size:
            raise UsageError(
                f"batches(loader): the batch size is {self._batch_size} here, {there} in the ckpt, which was made in "
                "the middle of an epoch of this loader. Give back the old batch size for the rest of the epoch, "
                "or use an ElasticSampler, which can go on with another one."
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
        """Where each `enumerate` around it began in this epoch."""
        return list(self._state.get("starts", ()))

    @starts.setter
    def starts(self, starts: list[int]) -> None:
        self._state["starts"] = starts

    @property
    def batches_handed(self) -> int:
        return self._handed

    @property
    def batches_done(self) -> int:
        """Of the whole epoch, in all lives, before the batch that is handed next."""
        return self._before + self._handed

    def handed(self) -> None:
        self._handed += 1

    def count(self) -> None:
        """Everything handed out so far is trained: move the cursor."""
        new = self._handed - self._counted
        if new and not self.has_stepped and not self._is_resumed:
            self._place.check_nothing_is_left_out(self.label)
        self.has_stepped = self.has_stepped or new > 0
        self._counted = self._handed
        self._state["handed"] = self._handed
        self._state["now"] = self._makers.generator_states(but=self._generators.values())
        if self._sampler is None:
            return
        if self._state["is_over"] or (new and self._handed >= self._batches_left):
            self._sampler.finish()
        elif new:
            self._sampler.advance(new * self._batch_size * self._sampler.size)

    def leave(self) -> None:
        """Left by `break`, with something trained in it: the epoch is over."""
        self._state["is_over"] = True
        if self._sampler is not None:
            self._sampler.finish()

    def left(self, *, is_over: bool) -> None:
        """Left in the middle. Of the loop that is gone on with, a `break` before anything is trained says it is over.

        Of another loop over the same data it was only a look.
        """
        self._is_touched |= self._training.has_unsaved
        is_same = self._resumed_from is not None and self._resumed_from[0].get("at") == self._at
        if is_over and is_same and not self._has_trained:
            self.leave()

    @property
    def _epoch(self) -> object:
        """What tells this epoch from others, if the script says it."""
        return self._began_in if self._sampler is not None else self._training.epoch

    @property
    def _has_trained(self) -> bool:
        return self.has_stepped or self._is_touched

    def over(self) -> None:
        self._state["is_over"] = True

    def end(self, *, may_end_workers: bool) -> None:
        """Over, left or broken off."""
        self._place.end(self.label)
        self._place.let_go(self.label, self._epoch if self._has_trained else None)
        if not self._has_trained and not self._state.get("is_over"):
            if self._resumed_from is not None:
                self._place.put_back(self.label, *self._resumed_from)
            if self._sampler is not None and self._goes_on_after_load:
                self._sampler.resume_again()
        if may_end_workers:
            # torch would wait five seconds for each that is busy.
            for worker in getattr(self.iterator, "_workers", ()):
                worker.terminate()


def _is_one_shot(loader: Any) -> bool:
    """An iterator, not something that makes them; a class of the script's own may well be both."""
    makers = ("builtins", "itertools", "torch.utils.data.dataloader")
    return hasattr(loader, "__next__") and type(loader).__module__ in makers


def _elastic_sampler(loader: Any, registered: Mapping[str, Any]) -> str | None:
    """The name of the registered `ElasticSampler` of this loader, or a reason why it cannot be followed."""
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
