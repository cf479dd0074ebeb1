"""`batches()`: the training loop's own line, where safe points come from.

Each time the loop asks for the next batch, the one before is finished. If an
optimizer stepped since the last safe point, that moment is one: everything the
loop would need to start again there is whole. Batches between two steps
(accumulation) belong together without anybody saying so, and the cursor moves
by what the loop was handed, never by what loader workers have fetched ahead.

Only the first live `batches()` makes safe points; one inside it (an evaluation)
hands its batches through. A loader whose sampler is an `ElasticSampler` starts in
the middle of its epoch. Any other loader is started as its epoch was started, with
the same random state, and the batches already trained are drawn again and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from torch.utils.data import BatchSampler

from migrator import randomness
from migrator.errors import UsageError
from migrator.events import log
from migrator.sampler import ElasticSampler

Batch = TypeVar("Batch")


class Training(Protocol):
    """What the loop needs of the rest."""

    @property
    def is_leaving(self) -> bool: ...

    def boundary(self) -> None:
        """The loop stands between two batches; a safe point if something stepped."""

    def entered(self) -> None:
        """A loop begins: a safe point, if anything was trained."""

    def left_early(self) -> None:
        """The loop was left by `break` or an exception, inside a batch."""

    def park(self) -> None:
        """Stay until the state is safe, then leave; returns if that takes another safe point."""

    def park_for_good(self) -> NoReturn:
        """The same, when there can be no further safe point."""

    def body_mark(self) -> object:
        """Changes whenever a step or a backward pass happened."""


class Place:
    """Where the loops stand; part of every capture, and read back from a ckpt.

    Loaders have no names, so they are told apart by the order in which their loops
    first begin in a life (their slot). A slot that begins again has a new round:
    what the others did before belongs to the last one.
    """

    def __init__(self) -> None:
        self.slots: dict[int, dict[str, Any]] = {}
        self.pending: dict[int, dict[str, Any]] = {}
        self.random_at_safe_point: dict[str, Any] | None = None
        self._loaders: list[Any] = []

    def slot_of(self, loader: Any) -> int:
        for slot, known in enumerate(self._loaders):
            if known is loader:
                return slot
        self._loaders.append(loader)
        return len(self._loaders) - 1

    def begin(self, slot: int, origin: dict[str, Any]) -> dict[str, Any]:
        if slot in self.slots:
            self.slots.clear()
        state = self.slots[slot] = {"handed": 0, "is_over": False, "origin": origin}
        return state

    def state(self) -> dict[str, Any]:
        return {"slots": {slot: dict(state) for slot, state in self.slots.items()}}

    def load(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        self.pending = dict(state["slots"])
        self.slots = dict(state["slots"])
        self.random_at_safe_point = random


class Batches(Generic[Batch]):
    """What `batches(loader)` returns: iterates as the loader does, and `len()` is the whole epoch."""

    def __init__(self, loader: Any, iterate: Callable[[Any], Iterator[Batch]]) -> None:
        self._loader = loader
        self._iterate = iterate

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate(self._loader)


class Loops:
    """All `batches()` of a life; at most one of them makes safe points at a time."""

    def __init__(self, training: Training, place: Place, registered: list[Any]) -> None:
        self._training = training
        self._place = place
        self._registered = registered
        self._live: _Loop | None = None
        self._has_warned = False

    def iterate(self, loader: Any) -> Iterator[Any]:
        """The generator behind one `for`."""
        if self._live is not None:
            yield from loader
            return
        loop = self._live = _Loop(loader, self._training, self._place, self._registered)
        # From here to the end of this block, whatever way it is left, the loop is the live one.
        try:
            yield from self._run(loop)
        finally:
            self._live = None

    def _run(self, loop: _Loop) -> Iterator[Any]:
        training = self._training
        loop.start()
        mark, unused = training.body_mark(), 0
        while True:
            if training.is_leaving:
                training.park()
            try:
                batch = next(loop.iterator)
            except StopIteration:
                loop.over()
                return
            except Exception as error:
                # Loader workers die with the process group when the pod is stopped. That is no failure of the run.
                if not training.is_leaving:
                    raise
                log("loader_error_swallowed", level=logging.WARNING, error=error)
                training.park_for_good()
            loop.handed()
            try:
                yield batch
            except GeneratorExit:
                training.left_early()
                raise
            training.boundary()
            now = training.body_mark()
            unused += now == mark
            if unused and loop.has_stepped and not self._has_warned:
                self._warn_unused()
            mark = now

    def count_current(self) -> None:
        """At a safe point: what was handed out is trained."""
        if self._live is not None:
            self._live.count()

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

    def __init__(self, loader: Any, training: Training, place: Place, registered: list[Any]) -> None:
        self._loader = loader
        self._training = training
        self._place = place
        self._sampler = _elastic_sampler(loader, registered)
        self._handed = 0
        self._counted = 0
        self._batch_size = 0
        self._batches_left = 0
        self._state: dict[str, Any] = {}
        self.iterator: Iterator[Any] = iter(())
        self.has_stepped = False

    def start(self) -> None:
        """Make the loader's iterator stand where this iteration begins."""
        place, slot = self._place, self._place.slot_of(self._loader)
        resumed = place.pending.pop(slot, None)
        if self._sampler is not None:
            self._start_sampler(self._sampler)
        if resumed is None:
            place.pending.clear()
            self._state = place.begin(slot, self._origin())
            self._training.entered()
            self.iterator = iter(self._loader)
            return
        self._state = place.slots[slot] = resumed
        self._handed = self._counted = resumed["handed"] if self._sampler is None else 0
        now = place.random_at_safe_point
        if resumed["is_over"] and self._sampler is None:
            self.iterator = iter(())
        else:
            self._return_to_origin(resumed["origin"])
            self.iterator = iter(self._loader)
            if self._sampler is None:
                self._drop(resumed["handed"])
        if now is not None:
            randomness.restore(now)
            place.random_at_safe_point = None

    def _start_sampler(self, sampler: ElasticSampler) -> None:
        sampler.begin()
        if sampler.advanced_by_itself:
            log(
                "epoch_advanced",
                level=logging.WARNING,
                epoch=sampler.epoch,
                means="call sampler.set_epoch(epoch) before each epoch",
            )
        self._batch_size = self._loader.batch_size or 1
        samples = sampler.left()
        whole, rest = divmod(samples, self._batch_size)
        self._batches_left = whole + (rest > 0 and not getattr(self._loader, "drop_last", False))

    def _origin(self) -> dict[str, Any]:
        """What a second start needs to hand out the same batches in the same order."""
        return {
            "random": randomness.capture(),
            "others": [_state_of(other) for other in _order_makers(self._loader)],
        }

    def _return_to_origin(self, origin: dict[str, Any]) -> None:
        randomness.restore(origin["random"])
        for other, state in zip(_order_makers(self._loader), origin["others"], strict=False):
            if state is not None:
                _set_state(other, state)

    def _drop(self, count: int) -> None:
        for done in range(count):
            try:
                next(self.iterator)
            except StopIteration:
                raise UsageError(
                    f"the ckpt was made after {count} batches of this epoch, but the loader ended after {done}. "
                    "Did the data or the batch size change? An ElasticSampler can go on with another batch size."
                ) from None

    def handed(self) -> None:
        self._handed += 1

    def count(self) -> None:
        """Everything handed out so far is trained: move the cursor."""
        self.has_stepped = True
        new = self._handed - self._counted
        self._counted = self._handed
        self._state["handed"] = self._handed
        if self._sampler is None or new == 0:
            return
        if self._handed >= self._batches_left:
            self._sampler.finish()
        else:
            self._sampler.advance(new * self._batch_size * self._sampler.size)

    def over(self) -> None:
        self._state["is_over"] = True


def _elastic_sampler(loader: Any, registered: list[Any]) -> ElasticSampler | None:
    """The registered `ElasticSampler` of this loader, or a reason why it cannot be followed."""
    own = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    sampler = next((s for s in (own, inner, batch_sampler) if isinstance(s, ElasticSampler)), None)
    if sampler is None:
        return None
    if not any(known is sampler for known in registered):
        raise UsageError(
            "batches(loader): the loader's ElasticSampler is not registered, so its place would not be saved. "
            'Call migrator.register("sampler", sampler) before listening().'
        )
    if sampler is not own or (batch_sampler is not None and type(batch_sampler) is not BatchSampler):
        raise UsageError(
            f"batches(loader): the loader groups samples by a {type(batch_sampler).__name__}, whose batch sizes are "
            "not known, so the place in the epoch cannot be counted. Give DataLoader(sampler=..., batch_size=...), or "
            "use this batch sampler over a sampler of its own: its batches are then drawn again on resume."
        )
    return sampler


def _order_makers(loader: Any) -> list[Any]:
    """Objects outside the global random state that decide which batches come."""
    found: list[Any] = []
    for owner in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        for candidate in (getattr(owner, "generator", None), owner if owner is not loader else None):
            known = candidate is None or isinstance(candidate, ElasticSampler)
            if not known and not any(candidate is other for other in found) and _state_of(candidate) is not None:
                found.append(candidate)
    return found


def _state_of(maker: Any) -> Any:
    if hasattr(maker, "get_state") and hasattr(maker, "set_state"):
        return maker.get_state()
    if hasattr(maker, "state_dict") and hasattr(maker, "load_state_dict"):
        return maker.state_dict()
    return None


def _set_state(maker: Any, state: Any) -> None:
    if hasattr(maker, "set_state"):
        maker.set_state(state)
    else:
        maker.load_state_dict(state)
