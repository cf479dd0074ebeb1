"""The place in each loop of the script. It is part of every capture, and read back from a ckpt.

Each loop has a label that is the same in every life: the name that the script gives it, the
registered `ElasticSampler` it goes over, or else its place in the script and what its loader
looks like. A loop is noted once something was trained in it. When a noted loop begins again, a
new round (usually an epoch) begins, and the other noted loops belong to the last round.

Where a label could mean one of several loops, a resume is refused. It is never guessed.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler

from migrator.errors import UsageError
from migrator.events import log

_ANEW = "To go on with this ckpt as it is, begin the interrupted epoch at its start: MIGRATOR_LOOPS=anew."
_ALIKE = (
    "batches(loader) at {shown}: several loops that look alike ({looks}) were here, and the ckpt was made "
    "in the middle of one of them; which one cannot be told. Name them: migrator.batches(loader, name=...). " + _ANEW
)
_ELSEWHERE = (
    "the ckpt was made in the middle of a loop that this script has not come to, and it trains in another one, at "
    "{shown}: what was left of that epoch would never be trained.\n  in the ckpt: {there}\n  here:        {here}\n"
    "Was the script changed? A name keeps a loop recognisable: migrator.batches(loader, name=...). " + _ANEW
)
_ELASTIC = "sampler "
"""First word in the label of a loop over an `ElasticSampler`. No other label begins like that."""


class Label:
    """What identifies one loop of the script in every life."""

    def __init__(self, text: str, *, looks: str, shown: str, is_named: bool = False, is_sure: bool = False) -> None:
        self.text = text
        self.looks = looks
        self.shown = shown
        self.is_named = is_named
        """The script gave the loop a name."""
        self.is_sure = is_sure or is_named
        """The label alone identifies the loop, whichever loader object it goes over."""

    @classmethod
    def of(
        cls, loader: Any, *, name: str | None, sampler: str | None, site: tuple[str, str], is_by_hand: bool
    ) -> Label:
        """`is_by_hand`: the script calls `next()`. It may begin the loader anew at any place in the script."""
        looks = _looks(loader)
        if sampler is not None:
            text = f"{_ELASTIC}{sampler}" if name is None else f"{_ELASTIC}{sampler} {name}"
            return cls(text, looks=looks, shown=site[1], is_named=name is not None, is_sure=True)
        if name is not None:
            return cls(f"name {name}", looks=looks, shown=site[1], is_named=True)
        if is_by_hand:
            return cls(f"next() | {looks}", looks=looks, shown=site[1])
        return cls(f"{site[0]} | {looks}", looks=looks, shown=site[1])


class Place:
    """The loops that are noted in this life, and those of the ckpt that have not begun yet."""

    def __init__(self) -> None:
        self.noted: dict[str, dict[str, Any]] = {}
        self.pending: dict[str, dict[str, Any]] = {}
        """Loops that are noted in the ckpt and have not begun in this life yet."""
        self.random_at_safe_point: dict[str, Any] | None = None
        self.generators_at_safe_point: dict[str, Any] = {}
        self.ranks_changed = False
        """The ckpt was made by another number of ranks, so the number of batches that a rank got means nothing here."""
        self._met: dict[str, _Met] = {}
        self._looked_at: set[str] = set()
        """Loops that were begun in this life and left before anything was trained in them."""

    def is_first(self, label: Label) -> bool:
        """The loop has not begun in this life before."""
        return label.text not in self._met

    def take_pending(self, label: Label) -> dict[str, Any] | None:
        """What the ckpt noted of this loop. Loops noted before it are dropped: the script has gone past them."""
        key = label.text
        if key not in self.pending:
            key = f"{label.looks} 0"  # the label in ckpts of the first version
            if key not in self.pending:
                return None
        if self.pending[key].get("alike") and not label.is_named:
            raise UsageError(_ALIKE.format(shown=label.shown, looks=label.looks))
        behind = list(self.pending)
        for other in behind[: behind.index(key)]:
            del self.pending[other]
        found = self.pending.pop(key)
        if key in self.noted:
            self.noted = {label.text if k == key else k: state for k, state in self.noted.items()}
        return found

    def put_back(self, label: Label, state: dict[str, Any], random: dict[str, Any] | None) -> None:
        """The script left the loop without training anything in it: a later one may still go on from there."""
        self.pending[label.text] = state
        self.random_at_safe_point = random
        self._looked_at.add(label.text)

    def check_nothing_is_left_out(self, label: Label) -> None:
        """A loop that is not in the ckpt trains. Raise if the ckpt is in the middle of a loop that has not begun."""
        left = [key for key, state in self.pending.items() if not state.get("is_over") and key not in self._looked_at]
        if left:
            raise UsageError(_ELSEWHERE.format(shown=label.shown, there=", ".join(left), here=label.text))
        self.pending.clear()

    def meets_another(self, label: Label, loader: Any, data_of: Callable[[Any], str], epoch: object) -> bool:
        """Whether another loop had this label: over a loader still in use, over other data, or in this epoch.

        `epoch`: identifies the epoch; None if nothing does.
        """
        met = self._met.setdefault(label.text, _Met())
        if label.is_named:
            return False
        was_alike = met.is_alike
        if not label.is_sure:
            met.meet(loader, data_of)
        met.is_alike |= epoch is not None and met.trained_in == epoch
        if met.is_alike and not was_alike:
            log(
                "loops_alike",
                level=logging.WARNING,
                where=label.shown,
                loader=label.looks,
                means="several loops that look alike are here: other loaders, or one gone over more than once in an "
                "epoch. If a stop comes in the middle of one, a resume cannot tell which it was and is refused: name "
                "them, migrator.batches(loader, name=...)",
            )
        return met.is_alike

    def let_go(self, label: Label, epoch: object) -> None:
        """A loop has ended: do not keep its loader alive. `epoch`: the one it trained in, None if it did not."""
        if label.text in self._met:
            self._met[label.text].let_go()
            self._met[label.text].trained_in = epoch

    def is_new_round(self, label: Label) -> bool:
        return label.text in self.noted or not self.noted

    def begin(self, label: Label, state: dict[str, Any]) -> None:
        """A loop begins that is not in the ckpt."""
        if self.is_new_round(label):
            self.noted.clear()
        self.noted[label.text] = state

    def end(self, label: Label) -> None:
        """A loop has ended. An evaluation is not noted: it is repeated if it was interrupted."""
        if not self.noted.get(label.text, {}).get("handed", 1):
            del self.noted[label.text]

    def begin_anew(self) -> None:
        """A safe point between the loops: none of them is to be continued."""
        self.noted.clear()

    def state(self) -> dict[str, Any]:
        return {"loops": {label: dict(state) for label, state in self.noted.items()}}

    def load(self, state: dict[str, Any], random: dict[str, Any], generators: dict[str, Any], *, anew: bool) -> None:
        """Take the place from a ckpt. `anew`: interrupted epochs are begun at their start.

        On another number of ranks only loops over an `ElasticSampler` are continued. For other loops, the number of
        batches does not say which samples were trained, and a loader over a rank's share of the data looks different.
        """
        loops = state["loops"]
        kept = {} if anew else {k: loop for k, loop in loops.items() if not self.ranks_changed or _is_elastic(k)}
        self.pending, self.noted = dict(kept), dict(kept)
        self.random_at_safe_point = random
        self.generators_at_safe_point = generators
        left = [k for k, loop in loops.items() if k not in kept and loop.get("handed")]
        if anew:
            left = [k for k in left if not loops[k].get("is_over")]
        means = "MIGRATOR_LOOPS=anew: begun at its start, so what was trained of it is trained again"
        if not anew:
            means = "only an ElasticSampler can go on within an epoch on another number of ranks"
        if left:
            log("epoch_repeated", level=logging.WARNING, loader=", ".join(left), means=means)


def _is_elastic(label: str) -> bool:
    return label.startswith(_ELASTIC)


class _Met:
    """The loader last seen under a label, as long as the script uses it."""

    def __init__(self) -> None:
        self.is_alike = False
        self.trained_in: object = None
        """The epoch of the last loop in which something was trained."""
        self._data = ""
        self._weak: weakref.ref[Any] | None = None
        self._held: Any = None

    def meet(self, loader: Any, data_of: Callable[[Any], str]) -> None:
        before = self._weak() if self._weak is not None else self._held
        if before is loader or self.is_alike:
            return
        is_there = before is not None
        del before
        data, data_before = data_of(loader), self._data
        self.is_alike = (is_there and self._is_in_use(loader)) or data_before not in ("", data)
        self._data = data
        try:
            self._weak, self._held = weakref.ref(loader), None
        except TypeError:  # a list, a tuple, a range
            self._weak, self._held = None, loader

    def _is_in_use(self, loader: Any) -> bool:
        if self._weak is not None:
            gc.collect()  # it may be part of a reference cycle
            return self._weak() is not None
        return self._has_other_holders() and not (isinstance(loader, range) and loader == self._held)

    def let_go(self) -> None:
        if self._held is not None and not self._has_other_holders():
            self._held = None

    def _has_other_holders(self) -> bool:
        return sys.getrefcount(self._held) > _HELD_BY_US


_probe = _Met()
_probe._held = [0]
_HELD_BY_US = sys.getrefcount(_probe._held)


def _looks(loader: Any) -> str:
    data = getattr(loader, "dataset", loader)
    try:
        length = len(data)
    except (TypeError, NotImplementedError):
        length = None
    how = getattr(loader, "batch_sampler", None)
    how = getattr(loader, "sampler", None) if how is None or type(how) is BatchSampler else how
    return f"{type(loader).__name__} {type(data).__name__}[{length}] {type(how).__name__}"
