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
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from torch import nn
from torch.utils.data import BatchSampler

from migrator import randomness
from migrator.errors import UsageError
from migrator.events import log
from migrator.sampler import ElasticSampler

Batch = TypeVar("Batch")

_NO_SECOND_START = (
    "batches(...) was given a {}, which can be iterated only once, so it could not be started again on resume. "
    "Give it the loader itself: enumerate(migrator.batches(loader)), zip(migrator.batches(loader), other)."
)
_SIDE_BY_SIDE = (
    "batches(loader): two loops go on side by side, and only the place of the one that began first would be saved. "
    "Make one loader of the two (torch.utils.data.StackDataset), or draw the second one's samples inside the dataset. "
    "If the first one was left half way, drop its iterator before beginning anew. "
    "A loader that only evaluates needs no batches()."
)


class Training(Protocol):
    """What the loop needs of the rest."""

    @property
    def is_leaving(self) -> bool: ...

    @property
    def has_news(self) -> bool:
        """SIGTERM came, even if it has not got about yet."""

    @property
    def is_decided(self) -> bool:
        """The process leaves, and nothing is left to lose."""

    def boundary(self) -> None:
        """The loop stands between two batches; a safe point if something stepped."""

    def entered(self, *, is_new_round: bool) -> None:
        """A loop begins: a safe point, if anything was trained and nothing of it would be done again."""

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

    Loaders have no names, so each gets a label: what it draws from and how, and among
    those alike the order in which their loops first begin in a life. A loop is noted
    once something was trained in it; when one that is noted begins again, a new round
    (mostly: an epoch) begins, and what the others did belongs to the last one.
    """

    def __init__(self) -> None:
        self.noted: dict[str, dict[str, Any]] = {}
        self.pending: dict[str, dict[str, Any]] = {}
        """What a ckpt noted of loops that have not begun in this life yet."""
        self.random_at_safe_point: dict[str, Any] | None = None
        self.ranks_changed = False
        """The ckpt was made by another number of ranks, so what was handed to one of them says nothing here."""
        self._known: dict[str, Callable[[], Any]] = {}

    def label_of(self, loader: Any) -> str:
        """The same for this loader in every life, and for one that takes its place when it is gone."""
        kind, number = _described(loader), 0
        while True:
            label = f"{kind} {number}"
            known = self._known.get(label)
            found = known() if known is not None else None
            if found is loader:
                return label
            if found is None:
                # A loader that is made anew for each epoch takes the place of the one before it.
                self._known[label] = _weakly(loader)
                return label
            number += 1

    def take_pending(self, label: str) -> dict[str, Any] | None:
        """What was noted of this loop; those noted before it are behind us then."""
        if label not in self.pending:
            return None
        behind = list(self.pending)
        for other in behind[: behind.index(label)]:
            del self.pending[other]
        return self.pending.pop(label)

    def is_new_round(self, label: str) -> bool:
        return label in self.noted or not self.noted

    def begin(self, label: str, state: dict[str, Any]) -> None:
        """A loop begins that is not one of the ckpt."""
        if self.is_new_round(label):
            if label in self.noted:
                self.pending.clear()
            self.noted.clear()
        self.noted[label] = state

    def end(self, label: str) -> None:
        """An evaluation leaves no trace: it is done anew, should it be interrupted."""
        if not self.noted.get(label, {}).get("handed", 1):
            del self.noted[label]

    def begin_anew(self) -> None:
        """The script says that it could start here, between its loops: none of them is to be continued."""
        self.noted.clear()

    def state(self) -> dict[str, Any]:
        return {"loops": {label: dict(state) for label, state in self.noted.items()}}

    def load(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        self.pending = dict(state["loops"])
        self.noted = dict(state["loops"])
        self.random_at_safe_point = random


def _described(loader: Any) -> str:
    data = getattr(loader, "dataset", loader)
    try:
        length = len(data)
    except (TypeError, NotImplementedError):
        length = None
    how = getattr(loader, "batch_sampler", None)
    how = getattr(loader, "sampler", None) if how is None or type(how) is BatchSampler else how
    return f"{type(loader).__name__} {type(data).__name__}[{length}] {type(how).__name__}"


def _is_one_shot(loader: Any) -> bool:
    """An iterator, not something that makes them; a class of the script's own may well be both."""
    makers = ("builtins", "itertools", "torch.utils.data.dataloader")
    return hasattr(loader, "__next__") and type(loader).__module__ in makers


def _weakly(loader: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(loader)
    except TypeError:  # a list, a tuple
        return lambda: loader


class Batches(Generic[Batch]):
    """What `batches(loader)` returns: iterates as the loader does, and `len()` is the whole epoch."""

    def __init__(self, loader: Any, iterate: Callable[[Any], Iterator[Batch]]) -> None:
        self._loader = loader
        self._iterate = iterate

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate(self._loader)

    def __getattr__(self, name: str) -> Any:
        # The loader's `dataset`, `sampler`, `batch_size` and whatever else scripts read there.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)


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
            yield from self._inner(self._live, loader)
            return
        if _is_one_shot(loader):
            raise UsageError(_NO_SECOND_START.format(type(loader).__name__))
        loop = self._live = _Loop(loader, self._training, self._place, self._registered)
        # From here to the end of this block, whatever way it is left, the loop is the live one.
        try:
            yield from self._run(loop)
        finally:
            self._live = None
            loop.end(may_end_workers=self._training.is_decided)

    def _inner(self, outer: _Loop, loader: Any) -> Iterator[Any]:
        """A loop inside another one, an evaluation for example, is not ours to follow."""
        before = outer.batches_handed
        for batch in loader:
            if outer.batches_handed != before and self._live is outer:
                raise UsageError(_SIDE_BY_SIDE)
            yield batch

    @property
    def is_live(self) -> bool:
        """A loop that makes safe points is under way."""
        return self._live is not None

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
                if not training.has_news:
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
            if unused and not self._has_warned and (loop.has_stepped or self._trains()):
                self._warn_unused()
            mark = now

    def count_current(self) -> None:
        """At a safe point: what was handed out is trained."""
        if self._live is not None:
            self._live.count()

    def _trains(self) -> bool:
        return any(isinstance(target, nn.Module) and target.training for target in self._registered)

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
        self._label = place.label_of(loader)
        self._batch_size = getattr(loader, "batch_size", None) or 1
        self._is_resumed = False
        self._batches_left = 0
        self._state: dict[str, Any] = {}
        self.iterator: Iterator[Any] = iter(())
        self.has_stepped = False

    def start(self) -> None:
        """Make the loader's iterator stand where this iteration begins."""
        place, label = self._place, self._label
        resumed = place.take_pending(label)
        if resumed is not None and place.ranks_changed and self._sampler is None and resumed["handed"]:
            log(
                "epoch_repeated",
                level=logging.WARNING,
                loader=label,
                means="only an ElasticSampler can go on within an epoch on another number of ranks",
            )
            resumed = None
        if self._sampler is not None:
            self._start_sampler(self._sampler)
            if resumed is not None and resumed["handed"] and not self._sampler.cursor:
                # The ckpt stands at the end of an epoch, and a script that counts its epochs by steps is in the next.
                resumed = None
        if resumed is None:
            is_new_round = place.is_new_round(label)
            self._state = {"handed": 0, "is_over": False, "batch_size": self._batch_size, "origin": self._origin()}
            place.begin(label, self._state)
            self._training.entered(is_new_round=is_new_round)
            self.iterator = iter(self._loader)
            return
        self._is_resumed = True
        self._check_batch_size(resumed["batch_size"])
        self._state = place.noted[label] = resumed
        self._handed = self._counted = resumed["handed"] if self._sampler is None else 0
        now = place.random_at_safe_point
        if resumed["is_over"] and self._sampler is None:
            self.iterator = iter(())
        else:
            self._return_to_origin(resumed["origin"])
            self.iterator = iter(self._loader)
            if self._sampler is None:
                self._drop(resumed["handed"])
            if resumed["handed"] == 0:
                # The safe point was right before the iterator was made: what making it drew counts.
                now = None
        if now is not None:
            randomness.restore(now)
        if not place.pending:
            # Until then: of the loops that had begun, only the last one stands at the safe point.
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
        samples = sampler.left()
        whole, rest = divmod(samples, self._batch_size)
        self._batches_left = whole + (rest > 0 and not getattr(self._loader, "drop_last", False))

    def _origin(self) -> dict[str, Any]:
        """What a second start needs to hand out the same batches in the same order."""
        return {
            "random": randomness.capture(),
            "is_reused": _is_reused(self._loader),
            "others": [_state_of(other) for other in _order_makers(self._loader)],
        }

    def _return_to_origin(self, origin: dict[str, Any]) -> None:
        if origin["is_reused"] and not _is_reused(self._loader):
            # Workers that persist draw their seed once, for the first epoch: get that over with.
            iter(self._loader)
        randomness.restore(origin["random"])
        for other, state in zip(_order_makers(self._loader), origin["others"], strict=False):
            if state is not None:
                _set_state(other, state)

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
    def batches_handed(self) -> int:
        return self._handed

    def handed(self) -> None:
        self._handed += 1

    def count(self) -> None:
        """Everything handed out so far is trained: move the cursor."""
        new = self._handed - self._counted
        if new and not self.has_stepped and not self._is_resumed:
            self._check_nothing_pends()
        self.has_stepped = self.has_stepped or new > 0
        self._counted = self._handed
        self._state["handed"] = self._handed
        if self._sampler is None or new == 0:
            return
        if self._handed >= self._batches_left:
            self._sampler.finish()
        else:
            self._sampler.advance(new * self._batch_size * self._sampler.size)

    def _check_nothing_pends(self) -> None:
        if self._place.pending:
            log(
                "loop_not_found",
                level=logging.WARNING,
                trains=self._label,
                ckpt=", ".join(self._place.pending),
                means="the ckpt was made in the middle of an epoch of another loader (type, data, length and sampler "
                "tell loaders apart), so this epoch began at its start",
            )
            self._place.pending.clear()

    def over(self) -> None:
        self._state["is_over"] = True

    def end(self, *, may_end_workers: bool) -> None:
        """Over, left or broken off."""
        self._place.end(self._label)
        if may_end_workers:
            # torch would wait five seconds for each that is busy.
            for worker in getattr(self.iterator, "_workers", ()):
                worker.terminate()


def _elastic_sampler(loader: Any, registered: list[Any]) -> ElasticSampler | None:
    """The registered `ElasticSampler` of this loader, or a reason why it cannot be followed."""
    own = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = (getattr(batch_sampler, "sampler", None), getattr(own, "sampler", None))
    sampler = next((s for s in (own, *inner, batch_sampler) if isinstance(s, ElasticSampler)), None)
    if sampler is None:
        return None
    if not any(known is sampler for known in registered):
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
    return sampler


def _is_reused(loader: Any) -> bool:
    """The next iteration takes over the workers of the last one."""
    return getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None


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
