"""Iterators that scripts wrap around `batches()`: `enumerate`, `zip`, a progress bar.

After a resume in mid-epoch the first batch is not the first of the epoch, so iterators that
count batches must begin at another number. The counts of `enumerate` and `tqdm` are set. Another
iterator in the same `zip` is moved on by as many items, if its place is no more than a count.
Other iterators that count or keep batches cannot be set. They are refused when the loop begins
for the first time, not at the resume.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, GeneratorType
from typing import Any

from migrator.errors import UsageError
from migrator.events import log
from migrator.platform import script_frames

_PASSES_ON = (map, filter, itertools.chain, itertools.starmap, itertools.takewhile, itertools.filterfalse)
"""These hand on what they get and keep nothing of it."""

_WRAPPERS: frozenset[type] = frozenset(
    {enumerate, zip, *_PASSES_ON, GeneratorType} | {kind for kind in vars(itertools).values() if isinstance(kind, type)}
)
_COUNTABLE: list[Iterable[object]] = [
    *(range(1), range(1 << 70), [], (), "", b"", set(), itertools.count()),
    *({}, {}.values(), {}.items()),
]
_FOLLOWS_BY_COUNT = tuple(type(iter(one)) for one in _COUNTABLE)
"""Iterators whose only state is how many items they have handed out."""

_TOGETHER = (
    "for ... in zip({order}): where the {other} would stand after a resume in mid-epoch is not known. "
    "Make one loader of the two (torch.utils.data.StackDataset), or draw the second one's samples inside the dataset. "
    "To count, use enumerate(migrator.batches(loader))."
)
_FIRST = (
    "for ... in zip({other}, batches(loader)): zip has taken the {other}'s item before batches() can say how far the "
    "epoch is. Put batches() first: zip(migrator.batches(loader), ...), or count with enumerate(...)."
)
_KEEPS = (
    "itertools.{name} around batches(loader) counts or keeps batches itself, and would begin anew after a resume in "
    "mid-epoch. Write it into the loop: for i, batch in enumerate(migrator.batches(loader)): if i >= n: break"
)
SIDE_BY_SIDE = (
    "batches(loader): two loops go on side by side, and only the place of the one that began first would be saved. "
    "Make one loader of the two (torch.utils.data.StackDataset), or draw the second one's samples inside the dataset. "
    "If the first one was left half way, drop its iterator before beginning anew. "
    "A loader that only evaluates needs no batches()."
)


class Between:
    """The iterators between one iterator of `batches()` and the loop, from the inside out."""

    def __init__(self, iterator: Any, frame: FrameType | None) -> None:
        """`frame`: the frame that called the iterator's first `next()`."""
        self._counters: list[Any] = []
        self._zips: list[tuple[Any, list[Any]]] = []
        self._generators: list[FrameType] = []
        self._is_chained = False
        """There is an `itertools.chain`: what is outside it counts the batches of other loops as well."""
        self._unknown: list[str] = []
        self.calls_script = False
        """Functions of the script are called while the next batch is fetched, and may raise."""
        # Not isinstance(): it reads `__class__` of all objects, and some do more than return it.
        candidates = [held for held in gc.get_objects() if type(held) in _WRAPPERS]
        frame = script_frames.script(frame)
        inner: Any = iterator
        while inner is not None:
            inner = self._climb(inner, candidates)
            # The caller is a generator of the script, or the loop.
            caller = frame
            inner = None
            if caller is not None and caller.f_code.co_name == "__next__":
                self._unknown.append(type(caller.f_locals.get("self")).__name__)
            if caller is not None and script_frames.is_generator(caller):
                if not script_frames.is_delegating(caller):
                    self._generators.append(caller)
                inner = next((c for c in candidates if getattr(c, "gi_frame", None) is caller), None)
                frame = script_frames.script(caller.f_back)

    def _climb(self, inner: Any, candidates: list[Any]) -> Any:
        """Follow the iterators that are written in C."""
        while True:
            around = next((c for c in candidates if c is not inner and _takes_from(c, inner)), None)
            if around is None:
                return inner
            if self._is_chained and isinstance(around, (enumerate, zip)):
                self._unknown.append(type(around).__name__)
            elif isinstance(around, enumerate):
                self._counters.append(around)
            elif isinstance(around, zip):
                self._zips.append((inner, list(around.__reduce__()[1])))
            elif isinstance(around, itertools.chain):
                self._is_chained = True
            elif isinstance(around, _PASSES_ON):
                self.calls_script = True
            else:
                raise UsageError(_KEEPS.format(name=type(around).__name__))
            inner = around

    def check(self) -> None:
        """Raise for iterators that could not be set after a resume."""
        for ours, sides in self._zips:
            place = next(i for i, side in enumerate(sides) if side is ours)
            for number, side in enumerate(sides):
                if side is ours:
                    continue
                if (
                    isinstance(side, GeneratorType)
                    and side.gi_frame is not None
                    and script_frames.is_ours(side.gi_frame)
                ):
                    raise UsageError(SIDE_BY_SIDE)
                name = type(side).__name__.lstrip("_")
                if not isinstance(side, _FOLLOWS_BY_COUNT):
                    raise UsageError(_TOGETHER.format(order=f"batches(loader), {name}", other=name))
                if number < place:
                    raise UsageError(_FIRST.format(other=name))

    @property
    def starts(self) -> list[int]:
        """The first index of each `enumerate`."""
        return [start_of(counter) for counter in self._counters]

    def go_on_at(self, done: int, starts: list[int]) -> None:
        """Set all counts: `done` batches of this epoch are trained already. `starts`: as noted when the epoch began."""
        for what in self._unknown:
            _warn(what, "if it counts batches, let it use `.done` of what batches() returns")
        # If none were noted, each began at 0 when the loop was looked at.
        for counter, before in zip(self._counters, starts or [0] * len(self._counters), strict=False):
            start = start_of(counter)
            if start == before + done and start != before:
                continue  # it begins at a number of the script's own that was saved
            if start != before or not _add_to_enumerate(counter, done):
                _warn("enumerate", "count with `.done` of what batches() returns")
        for ours, sides in self._zips:
            for side in sides:
                if side is ours:
                    continue
                if sys.getrefcount(side) > _HELD_BY_ZIP:
                    # The script holds it as well, so it may be at another place than that of this epoch.
                    _warn(f"zip(..., {type(side).__name__})", "make it anew for each epoch, or register what it counts")
                    continue
                next(itertools.islice(side, done, done), None)
        for frame in self._generators:
            if not _set_progress_bar(frame, done):
                _warn(
                    f"{frame.f_code.co_name}()",
                    "if it counts batches, let it use `.done` of what batches() returns",
                )


def _takes_from(outer: Any, inner: Any) -> bool:
    if isinstance(outer, GeneratorType):
        return False
    held = gc.get_referents(outer)
    return any(one is inner or (type(one) is tuple and any(part is inner for part in one)) for one in held)


def _warn(what: str, advice: str) -> None:
    log(
        "count_begins_anew",
        level=logging.WARNING,
        what=what,
        means=f"the epoch goes on in its middle, and what stands between batches() and the loop began at 0: {advice}",
    )


# enumerate: in CPython its index lies right after the head of the object. That is tried before it is relied on.

_INDEX_AT = object.__basicsize__


def _index_of(counter: Any) -> ctypes.c_ssize_t:
    return ctypes.c_ssize_t.from_address(id(counter) + _INDEX_AT)


@functools.cache
def _is_index_known() -> bool:
    """Try it on an `enumerate` of our own, at the same moment: while it asks for its next item."""
    if sys.implementation.name != "cpython" or enumerate.__basicsize__ < _INDEX_AT + ctypes.sizeof(ctypes.c_ssize_t):
        return False
    probe: Any

    def one() -> Iterator[None]:
        if _index_of(probe).value == 70_707:
            _index_of(probe).value += 3
        yield
        yield

    probe = enumerate(one(), 70_707)
    return [next(probe)[0], next(probe)[0]] == [70_710, 70_711]


def start_of(counter: Any) -> int:
    """The index that an `enumerate` hands out next."""
    return int(counter.__reduce__()[1][1])


def _add_to_enumerate(counter: Any, done: int) -> bool:
    """Add `done` to the next index of an `enumerate` that is asking for its batch; False if that is not possible."""
    if not _is_index_known():
        return False
    start = start_of(counter)
    if _index_of(counter).value != start:  # larger than a machine word
        return False
    _index_of(counter).value = start + done
    return True


# tqdm: its generator counts in a local variable, and writes that to the bar from time to time.


def _set_progress_bar(frame: FrameType, done: int) -> bool:
    bar: Any = frame.f_locals.get("self")
    if frame.f_code.co_name != "__iter__" or not type(bar).__module__.startswith("tqdm"):
        return False
    if getattr(bar, "disable", False) or "last_print_n" not in frame.f_locals:
        return True  # a bar that shows nothing, or one around a bar that is set
    bar.initial = bar.n = bar.last_print_n = at = bar.initial + done
    local = frame.f_locals
    local["n"] = local["last_print_n"] = at
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    bar.refresh()
    return True


def _held_by_zip() -> int:
    """The reference count of an iterator that only `zip`, our list and the loop variable hold."""
    probe = zip(iter([0]), iter([0]), strict=False)
    sides = list(probe.__reduce__()[1])
    for side in sides:
        held = sys.getrefcount(side)
    return held


_HELD_BY_ZIP = _held_by_zip()
