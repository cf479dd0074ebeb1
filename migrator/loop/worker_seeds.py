"""Seeds for the workers of a loader with `persistent_workers=True`.

Such workers draw their seed once and keep their random streams from one epoch to the next, so
an epoch that is begun again after a resume would get other random numbers. Here they are seeded
anew at the start of each epoch. The seed follows from the random state of the main process,
and nothing is drawn from that state.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils import data as torch_data
from torch.utils.data import DataLoader

from migrator.events import log


def _are_persistent(loader: Any) -> bool:
    return bool(
        isinstance(loader, DataLoader) and getattr(loader, "persistent_workers", False) and loader.num_workers > 0
    )


def begin(loader: Any) -> Iterator[Any]:
    """The loader's iterator. Persistent workers draw the same random numbers as new ones would."""
    if not _are_persistent(loader):
        return iter(loader)
    seed = _seed_for_workers(loader)
    if loader._iterator is None:
        with _replaced(loader, "worker_init_fn", _Seeded(loader.worker_init_fn, seed)):
            return iter(loader)
    # The message that begins another epoch in a worker carries `_shared_seed`; only torch's iterable pipes use it.
    with _replaced(loader._iterator, "_shared_seed", _SeedOnArrival(seed)):
        return iter(loader)


def warn_of_what_persists(loader: Any, generators: Iterable[str]) -> None:
    """Log what persistent workers keep from one epoch to the next, which is lost at a resume.

    `generators`: paths of those that the loader holds.
    """
    if not _are_persistent(loader):
        return
    kept = [path for path in generators if path.startswith("dataset")]
    if loader.worker_init_fn is not None:
        kept.append("worker_init_fn")
    if kept:
        log(
            "workers_persist",
            level=logging.WARNING,
            what=", ".join(kept),
            means="persistent_workers=True: what these hold in the workers goes on from epoch to epoch, and begins "
            "anew after a resume; with persistent_workers=False each epoch begins as it did",
        )


def _seed_for_workers(loader: Any) -> int:
    """Computed from the random state that torch would draw the seed from, without changing that state."""
    source = loader.generator if loader.generator is not None else torch.default_generator
    return xxhash.xxh3_64(bytes(source.get_state().tolist())).intdigest() >> 1


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Seeded:
    """A `worker_init_fn` that calls the script's own one and then seeds the worker."""

    def __init__(self, init: Callable[[int], None] | None, seed: int) -> None:
        self._init, self._seed = init, seed

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        _seed_worker(self._seed, worker)


def _seed_worker(seed: int, worker: int) -> None:
    """Seed this worker as torch seeds a new one."""
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    np.random.seed(np.random.SeedSequence((seed, worker)).generate_state(4))


class _SeedOnArrival:
    """Seeds the worker that unpickles it, and becomes None there."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> Any:
        return _seed_this_worker, (self._seed,)


def _seed_this_worker(seed: int) -> None:
    info = torch_data.get_worker_info()
    if info is not None:
        _seed_worker(seed, info.id)


class WorkersSeededApart:
    """Persistent workers, of all loaders, draw their seed from a generator of their own.

    They draw it once in each life of the job, and not at the same moment in each. Drawn from the script's generator,
    it would change what the script draws afterwards.
    """

    def __init__(self) -> None:
        self._before = before = DataLoader._get_iterator

        def get_iterator(loader: DataLoader[Any]) -> Any:
            if not _are_persistent(loader):
                return before(loader)
            apart = torch.Generator().manual_seed(_seed_for_workers(loader))
            with _replaced(loader, "generator", apart):
                return before(loader)

        DataLoader._get_iterator = get_iterator  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        DataLoader._get_iterator = self._before  # type: ignore[method-assign]
