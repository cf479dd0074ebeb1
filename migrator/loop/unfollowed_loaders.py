"""Loaders that the script draws from over several steps without `batches()`: no ckpt holds their place.

After a resume such a loader begins anew and hands out other batches than without the stop. Examples are
`batch = next(iterator)` with `safe_point()`, and a second loader beside that of the loop. No error comes
of it, so a warning is logged.

A loader that is gone over between two safe points (an evaluation, a rollout) is simply gone over again.
A loader that is registered, or whose sampler is, is left to the script.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from migrator.data.sampler import ElasticSampler
from migrator.events import log


class UnfollowedLoaders:
    """Iterators of DataLoaders that were made outside of `batches()`."""

    def __init__(self, registered: Mapping[str, Any], is_fetching: Callable[[], bool]) -> None:
        """`is_fetching`: whether `batches()` is asking for an iterator or a batch right now."""
        self._registered = registered
        self._made: list[tuple[weakref.ref[Any], type, list[int]]] = []
        """Iterator, type of its dataset, and how many batches it had handed out at the last safe point."""
        self._has_warned = False
        self._before = before = DataLoader.__iter__

        def make(loader: DataLoader[Any]) -> Any:
            iterator = before(loader)
            if not self._has_warned and not is_fetching() and not self._goes_on_by_itself(loader):
                self._made.append((weakref.ref(iterator), type(loader.dataset), [0]))
            return iterator

        DataLoader.__iter__ = make  # type: ignore[method-assign]

    def remove(self) -> None:
        DataLoader.__iter__ = self._before  # type: ignore[method-assign]

    def look(self) -> None:
        """At a safe point: log a warning if a loader was drawn from both before and after the last one."""
        if not self._made:
            return
        self._made = [made for made in self._made if made[0]() is not None]
        for iterator, dataset, at in self._made:
            before, at[0] = at[0], getattr(iterator(), "_num_yielded", 0)
            if 0 < before < at[0] and not self._has_warned:
                self._has_warned = True
                log(
                    "loader_not_followed",
                    level=logging.WARNING,
                    dataset=dataset.__name__,
                    means="a loader is drawn from over several steps, but not by batches(): a resume begins it anew. "
                    "Take the batches from migrator.batches(loader); of a second loader beside it, draw the samples "
                    "at random (torch.randint), or make one dataset of the two (torch.utils.data.StackDataset)",
                )
        if self._has_warned:
            self._made.clear()

    def _goes_on_by_itself(self, loader: Any) -> bool:
        parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        known = [target for target in self._registered.values() if not isinstance(target, ElasticSampler)]
        return any(part is target for part in parts for target in known)
