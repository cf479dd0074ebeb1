"""Which values of a ckpt have one place in this life, while they are put back.

A script may begin with one tensor in two places, `best = model.state_dict()`, and hold two of them when it is saved: it
has put a copy into one of the places meanwhile. In the next life there is one again. What is put back into the second
place must not change the first one, so the second place gets an object of its own. The same holds for arrays, dicts,
lists, sets and deques.

If both hold the same in the ckpt, they stay one, as the script has made them. Of large tensors that a save reads where
they are the ckpt tells: one that is in two places is stored once. So two of them are two, even if they are equal.

Only places that are exactly one are found, and not two that overlap in part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from migrator.ckpt.codec import as_bytes
from migrator.state.adapters.base import LARGE_BYTES


def place_of(value: Tensor | np.ndarray[Any, Any]) -> tuple[Any, ...] | None:
    """Equal for two handles of the same elements, also for an array and a tensor; None if there are none."""
    if isinstance(value, np.ndarray):
        as_array = (value.ctypes.data, value.shape, value.strides, value.dtype.str)
        if not value.size or not value.flags.writeable:
            return as_array if value.size else None
        try:
            value = torch.from_numpy(value)
        except (TypeError, ValueError):  # text, times, or it goes backwards
            return as_array
    if value.layout is not torch.strided or value.numel() == 0 or value.data_ptr() == 0:
        return None
    kind = (value.dtype, value.device, value.is_conj(), value.is_neg())
    return (value.data_ptr(), tuple(value.shape), value.stride(), *kind)


class Places:
    """What is put, or will be put, into which place."""

    def __init__(self, apart: set[int]) -> None:
        """`apart`: the ids of those tensors of the ckpt that are two if there are two of them."""
        self._apart = apart
        self._saved: dict[Any, tuple[Any, Any]] = {}

    def note(self, live: Any, saved: Any) -> None:
        """`saved` is put into `live`, unless something else is."""
        key = _key(live)
        if key is not None:
            self._saved.setdefault(key, (live, saved))

    def has_another(self, live: Any, saved: Any) -> bool:
        """Whether another value is put into `live`, and both are two: then `saved` needs a place of its own."""
        key = _key(live)
        return key in self._saved and not is_same(self._saved[key][1], saved, self._apart)


def _key(live: Any) -> Any:
    if isinstance(live, (Tensor, np.ndarray)):
        return place_of(live)
    return id(live) if isinstance(live, (dict, list, set, deque)) else None


def is_same(one: Any, other: Any, apart: Collection[int] = ()) -> bool:
    """Whether two values are equal: type by type, and tensors and arrays bit by bit.

    Large tensors with ids in `apart` are not, unless they are one.
    """
    if one is other:
        return True
    if isinstance(one, (Tensor, np.ndarray)) and isinstance(other, (Tensor, np.ndarray)):
        if id(one) in apart and id(other) in apart and one.nbytes > LARGE_BYTES:
            return False
        is_alike = tuple(one.shape) == tuple(other.shape) and _kind_of(one) == _kind_of(other)
        return is_alike and np.array_equal(_bytes_of(one), _bytes_of(other))
    if isinstance(one, np.generic) and isinstance(other, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(is_same(item, other[key], apart) for key, item in one.items())
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(is_same(*pair, apart) for pair in zip(one, other, strict=True))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _kind_of(value: Tensor | np.ndarray[Any, Any]) -> str:
    """The same for an array and a tensor of the same type."""
    return value.dtype.name if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")


def _bytes_of(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return as_bytes(plain).numpy()
