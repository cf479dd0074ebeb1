"""Short texts that tell one data set, or one order of samples, from another.

A loader is often made anew for each epoch, and the attributes of a sampler are too many to
save. So a spread of the items, and of what is in them, is hashed: two that differ in none of
the items that were looked at are taken to be the same.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from migrator.state import random_state

LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), type, Tensor, np.ndarray, nn.Module, torch.optim.Optimizer),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.device, torch.dtype),
)
"""What is never looked into."""
LISTED = (list, tuple, dict, np.ndarray, Tensor)
"""Values that are too large to save and are compared by their mark instead."""
_SAMPLED = 256
"""Number of items of a list that a mark takes in; they are spread over all of it."""


def fingerprint(loader: Any) -> str:
    """Tells the data of one loader from that of another. The loader itself may be made anew for each epoch."""
    return xxhash.xxh3_64(repr(_printed(getattr(loader, "dataset", loader), 0)).encode()).hexdigest()


def mark(value: Any) -> str:
    """Tells two orders of samples apart."""
    if isinstance(value, (np.ndarray, Tensor)):
        flat = value.reshape(-1)
        count = len(flat)
        items: list[Any] = [flat[i].item() for i in _spread(count, _SAMPLED)] if _is_of_numbers(value) else []
    elif isinstance(value, dict):
        count, keys = len(value), list(value)
        items = [(repr(keys[i])[:100], _printed(value[keys[i]], 2)) for i in _spread(count, _SAMPLED)]
    else:
        count = len(value)
        items = [_printed(value[i], 2) for i in _spread(count, _SAMPLED)]
    return f"{count} {xxhash.xxh3_64(repr(items).encode()).hexdigest()}"


def attributes(part: Any) -> dict[str, Any]:
    """All attributes of an object, those in slots as well."""
    found = dict(getattr(part, "__dict__", {}))
    for cls in type(part).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if isinstance(name, str) and hasattr(part, name):
                found.setdefault(name, getattr(part, name))
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most `most` indices, evenly spread over `count` items."""
    return sorted({i * count // most for i in range(most)}) if count > most else list(range(count))


def _is_of_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) or value.dtype.kind in "biufc"


def _printed(value: Any, depth: int) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, type(None), range)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.shape), str(value.dtype), mark(value)
    if isinstance(value, (list, tuple)):
        return len(value), [_printed(value[i], depth + 1) for i in _spread(len(value), 16)]
    if depth > 3 or isinstance(value, (*LEAVES, dict)) or random_state.is_generator(value):
        return type(value).__name__
    return type(value).__name__, {name: _printed(item, depth + 1) for name, item in attributes(value).items()}
