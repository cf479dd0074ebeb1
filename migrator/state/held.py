"""Memory and containers that several registered objects share, while a ckpt is put back.

A script may begin with one tensor in two places, `best = model.state_dict()`, and hold two of them when it is saved: it
has put a copy into one of the places meanwhile. In the next life there is one again. Whatever is put back into the
second place must not change the first one: then the second place gets a new object.

If both hold the same in the ckpt, the ckpt does not tell whether they were one. Then they stay one, as the script made
them. Only of a large tensor it tells: one that is in two places is stored once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from migrator.ckpt.codec import as_bytes
from migrator.state.adapters.base import is_large


def span_of(value: Tensor | np.ndarray[Any, Any]) -> tuple[int, int]:
    """The addresses between which the elements lie."""
    if isinstance(value, np.ndarray):
        begin, size, steps = value.ctypes.data, value.itemsize, list(value.strides)
        is_empty = value.size == 0
    else:
        if value.layout is not torch.strided:
            return (0, 0)
        begin, size = value.data_ptr(), value.element_size()
        steps = [stride * size for stride in value.stride()]
        is_empty = begin == 0 or value.numel() == 0
    if is_empty:
        return (0, 0)
    reaches = [(length - 1) * step for length, step in zip(value.shape, steps, strict=True)]
    return (begin + sum(min(0, reach) for reach in reaches), begin + sum(max(0, reach) for reach in reaches) + size)


class Spans:
    """Addresses that are in use, and what for."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        """Of groups, which do not overlap: whatever does is in one of them."""
        self._groups: dict[int, tuple[int, list[tuple[tuple[int, int], Any]]]] = {}
        """By its begin: the end of a group, and the spans in it."""

    def add(self, span: tuple[int, int], owner: Any) -> None:
        begin, end = span
        if begin >= end:
            return
        inside = [(span, owner)]
        for other in self._touched(span):
            stop, spans = self._groups.pop(other)
            self._begins.remove(other)
            inside += spans
            begin, end = min(begin, other), max(end, stop)
        insort(self._begins, begin)
        self._groups[begin] = (end, inside)

    def within(self, span: tuple[int, int]) -> list[Any]:
        """The owners of what overlaps with this."""
        begin, end = span
        inside = [found for group in self._touched(span) for found in self._groups[group][1]]
        return [owner for (at, stop), owner in inside if at < end and stop > begin]

    def _touched(self, span: tuple[int, int]) -> list[int]:
        begin, end = span
        if begin >= end:
            return []
        first = bisect_right(self._begins, begin)
        if first and self._groups[self._begins[first - 1]][0] > begin:
            first -= 1
        return self._begins[first : bisect_left(self._begins, end)]


class Held:
    """What was put back so far, and where."""

    def __init__(self) -> None:
        self._spans = Spans()
        self._containers: dict[int, tuple[Any, Any]] = {}

    def note(self, live: Any, saved: Any, *, is_copied: bool = False) -> None:
        """`saved` is, or will be, in `live`. `is_copied`: a save writes a copy of it, whatever its size."""
        if isinstance(live, (Tensor, np.ndarray)):
            self._spans.add(span_of(live), (live, saved, is_copied))
        else:
            self._containers[id(live)] = (live, saved)

    def is_another_s(self, live: Any, saved: Any) -> bool | None:
        """Whether `live` holds something else that was put back: then `saved` needs a place of its own.

        None: it holds nothing yet.
        """
        if isinstance(live, (Tensor, np.ndarray)):
            others = [owner for owner in self._spans.within(span_of(live)) if owner[1] is not saved]
            if not others:
                return None
            return any(self._is_other(live, saved, *other) for other in others)
        if id(live) not in self._containers:
            return None
        before = self._containers[id(live)][1]
        return before is not saved and not is_same(before, saved)

    @staticmethod
    def _is_other(live: Any, saved: Any, other_live: Any, other_saved: Any, is_copied: bool) -> bool:
        if not is_one(live, other_live):
            return not is_same(live, saved)
        if isinstance(live, Tensor) and is_large(live) and not is_copied:
            return True  # they were two
        return not is_same(other_saved, saved)


def is_one(live: Any, other: Any) -> bool:
    """Whether two places are one: the same elements of the same memory."""
    if not (isinstance(live, Tensor) and isinstance(other, Tensor)):
        return live is other
    alike = live.dtype == other.dtype and live.shape == other.shape and live.stride() == other.stride()
    return alike and span_of(live) == span_of(other)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, type by type."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        with torch.no_grad():
            return np.array_equal(_bytes_of(one), _bytes_of(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return np.frombuffer(as_bytes(plain).numpy(), np.uint8) if plain.numel() else np.empty(0, np.uint8)
