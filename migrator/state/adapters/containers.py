"""dict, list, set, deque, tensor and array: restored in place, so that references of the script stay valid."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from migrator.ckpt.codec import MAX_DEPTH, Stored, StoredArray
from migrator.state.adapters.base import SCALARS, Adapter, is_large, shape_of
from migrator.state.places import Places


class Endless:
    """Replaces, in a copy, a container that contains itself or is nested too deeply. It cannot be stored."""


def copied(value: Any, within: frozenset[int] = frozenset()) -> Any:
    """A copy that does not change with the original. Large tensors are not copied but referenced.

    `within`: the ids of the containers around the value.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if isinstance(value, (dict, list, tuple, deque)) and (id(value) in within or len(within) > MAX_DEPTH):
        return Endless()
    if isinstance(value, dict):
        # Copied in a single call, during which no other thread of the script can change it.
        items = dict(value)
        # If all values are scalars, one pass over their types is much faster than a call per value.
        if not set(map(type, items.values())) <= SCALARS:
            within |= {id(value)}
            items = {key: item if type(item) in SCALARS else copied(item, within) for key, item in items.items()}
        return _same_kind(value, items)
    if isinstance(value, (list, deque)):
        elements = list(value)
        if not set(map(type, elements)) <= SCALARS:
            within |= {id(value)}
            elements = [item if type(item) in SCALARS else copied(item, within) for item in elements]
        return deque(elements, value.maxlen) if isinstance(value, deque) else elements
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        within |= {id(value)}
        return tuple([item if type(item) in SCALARS else copied(item, within) for item in value])
    if isinstance(value, (set, frozenset)):
        return set(value) if isinstance(value, set) else frozenset(value)
    if isinstance(value, Tensor):
        return value.detach() if is_large(value) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    return value  # numpy scalars, dtypes, devices are immutable; the codec refuses anything else


def _same_kind(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    return OrderedDict(items) if isinstance(like, OrderedDict) else items


def put_back(saved: Any, live: Any, places: Places | None = None) -> Any:
    """`saved`, written into the objects of `live` where the kinds are equal, so that references stay valid.

    But not into an object that, by `places`, holds another value of the ckpt.
    """
    if places is not None and places.has_another(live, saved):
        return in_types_of(live, _on_devices_of(live, saved))
    back = _put_back(saved, live, places)
    if places is not None and back is live:
        places.note(live, saved)
    return back


def _on_devices_of(live: Any, saved: Any) -> Any:
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        return saved.to(live.device)
    if isinstance(live, dict) and isinstance(saved, dict):
        return {key: _on_devices_of(live.get(key), item) for key, item in saved.items()}
    if isinstance(live, list) and isinstance(saved, list):
        return [_on_devices_of(live[i] if i < len(live) else None, item) for i, item in enumerate(saved)]
    return saved


def _put_back(saved: Any, live: Any, places: Places | None) -> Any:
    if isinstance(live, dict) and isinstance(saved, dict):
        merged = {key: put_back(item, live.get(key), places) for key, item in saved.items()}
        live.clear()
        live.update(merged)
        return live
    if isinstance(live, list) and isinstance(saved, list):
        room = [*live, *[None] * max(0, len(saved) - len(live))]
        live[:] = [put_back(item, old, places) for item, old in zip(saved, room, strict=False)]
        return live
    if (isinstance(live, set) and isinstance(saved, set)) or (isinstance(live, deque) and isinstance(saved, deque)):
        live.clear()
        cast(Any, live.update if isinstance(live, set) else live.extend)(saved)
        return live
    if _fits_in_place(saved, live):
        if saved.data_ptr() != live.data_ptr():
            with torch.no_grad():
                live.copy_(saved)
        return live
    if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray):
        if live.shape == saved.shape and live.dtype == saved.dtype and live.flags.writeable:
            if live.ctypes.data != saved.ctypes.data:
                live[...] = saved
            return live
        return saved
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        return saved.to(live.device)
    return saved


def in_types_of(live: Any, saved: Any) -> Any:
    """`saved`, with a Counter or defaultdict where `live` has one: a ckpt contains plain dicts."""
    if isinstance(live, dict) and isinstance(saved, dict):
        items = {key: in_types_of(live.get(key), item) for key, item in saved.items()}
        if isinstance(live, Counter):
            return Counter(items)
        return defaultdict(live.default_factory, items) if isinstance(live, defaultdict) else _same_kind(saved, items)
    if type(live) is list and type(saved) is list:
        return [in_types_of(live[i] if i < len(live) else None, item) for i, item in enumerate(saved)]
    return saved


def _fits_in_place(saved: Any, live: Any) -> bool:
    return (
        isinstance(saved, Tensor)
        and isinstance(live, Tensor)
        and saved.shape == live.shape
        and saved.dtype == live.dtype
        and is_writable(live)
    )


def is_writable(tensor: Tensor) -> bool:
    """Whether each element has its own memory and can be written."""
    if tensor.layout is not torch.strided:
        return False
    is_expanded = any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return not is_expanded and not tensor.is_inference()


class Container(Adapter):
    """A dict, list, set or deque, restored in place."""

    kind = "container"
    may_lack = True

    def capture(self) -> Any:
        return copied(self.target)

    def differences(self, value: Any) -> list[str]:
        for family in (dict, list, set, deque):
            if isinstance(self.target, family) != isinstance(value, family):
                return [f": a {type(self.target).__name__} here, a {type(value).__name__} there"]
        return []

    def restore(self, value: Any, places: Places | None = None) -> None:
        put_back(value, self.target, places)


class TensorOrArray(Adapter):
    """One torch tensor or numpy array, restored in its own memory."""

    kind = "tensor"

    def capture(self) -> Any:
        return copied(self.target)

    def differences(self, value: Any) -> list[str]:
        if isinstance(self.target, Tensor) != isinstance(value, (Tensor, Stored)):
            there = "ndarray" if isinstance(value, StoredArray) else type(value).__name__
            return [f": a {type(self.target).__name__} here, a {there} there"]
        if shape_of(value) != shape_of(self.target):
            return [f": shape is {shape_of(self.target)} here, {shape_of(value)} there"]
        if value.dtype != self.target.dtype:
            return [f": dtype is {self.target.dtype} here, {value.dtype} there"]
        return []

    def restore(self, value: Any) -> None:
        put_back(value, self.target)
