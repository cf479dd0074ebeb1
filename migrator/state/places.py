"""Which tensors of a ckpt have one place in the memory of this life, while they are put back.

A script may begin with one tensor in two places, `best = model.state_dict()`, and hold two of them when it is saved: it
has put a copy into one of the places meanwhile. In the next life there is one again. What is put back into the second
place must not change the first one, so the second place gets a tensor of its own.

If both hold the same in the ckpt, they stay one, as the script has made them. Of large tensors that a save reads where
they are it is known better: one that is in two places is stored once, so two are two.

Only places that are exactly one are found: not two that merely overlap, and no arrays, dicts and lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from migrator.ckpt.codec import as_bytes
from migrator.state.adapters.base import is_large


def place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for two handles of the same elements; None if it has no memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return None
    kind = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *kind)


def were_two(tensor: Tensor) -> bool:
    """Two of a ckpt, which a save reads where they are, have this place: whether they were two when they were saved."""
    return is_large(tensor)


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Bit by bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (as_bytes(t.detach().resolve_conj().resolve_neg().cpu().contiguous()) for t in (one, other))
    return torch.equal(first, second)


class Places:
    """What is, or will be, in the places that are known."""

    def __init__(self, apart: set[int]) -> None:
        """`apart`: the ids of those tensors of the ckpt of which a save sees whether they are in two places."""
        self._apart = apart
        self._saved: dict[tuple[Any, ...], Tensor] = {}

    def note(self, live: Any, saved: Any) -> None:
        """`saved` is put into `live`, if it fits."""
        if isinstance(live, Tensor) and isinstance(saved, Tensor):
            place = place_of(live)
            if place is not None and live.shape == saved.shape and live.dtype == saved.dtype:
                self._saved.setdefault(place, saved)

    def is_another_s(self, live: Tensor, saved: Tensor) -> bool:
        """Whether something else has this place."""
        place = place_of(live)
        other = saved if place is None else self._saved.get(place, saved)
        if other is saved:
            return False
        if were_two(live) and {id(other), id(saved)} <= self._apart:
            return True
        return not is_equal(other, saved)
