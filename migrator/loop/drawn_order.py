"""Finds out whether a sampler draws the order of the samples while the loop goes on.

Such a sampler shares the global random state with the script. What the script draws between
two batches then belongs to the order, and is missing when the epoch is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import RandomSampler

from migrator.loop.generators import are_equal
from migrator.state import random_state


class DrawnOrder:
    """Takes the place of a sampler's iterator while an epoch is replayed, and notes which generators it draws from."""

    def __init__(self, iterator: Any, loader: Any) -> None:
        self._drawn: set[str] = set()
        sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(loader, "sampler", None) if sampler is None else sampler
        inner = getattr(sampler, "sampler", sampler)
        is_of_torch = all(type(part).__module__.startswith("torch.") for part in (sampler, inner))
        draws_at_once = is_of_torch and not (isinstance(inner, RandomSampler) and inner.replacement)
        self._iterator = iterator
        self._order: Any = getattr(iterator, "_sampler_iter", None)
        self._is_put = self._order is not None and not draws_at_once and not getattr(loader, "num_workers", 0)
        self._has_begun = False
        if self._is_put:
            iterator._sampler_iter = self

    def __iter__(self) -> DrawnOrder:
        return self

    def __next__(self) -> Any:
        before = random_state.capture() if self._has_begun else None
        self._has_begun = True
        try:
            return next(self._order)
        finally:
            if before is not None:
                self._drawn |= _different(before)

    def remove(self) -> None:
        """Put the sampler's own iterator back."""
        if self._is_put:
            self._iterator._sampler_iter = self._order

    def is_lost(self, at_safe_point: Mapping[str, Any]) -> bool:
        """The order cannot be drawn again: the script has drawn from the same generator."""
        return bool(self._drawn & _different(at_safe_point))


def _different(before: Mapping[str, Any]) -> set[str]:
    """The generators of the main process whose state has changed since `before`."""
    now = random_state.capture()
    return {name for name in now if name in before and not are_equal(now[name], before[name])}
