"""How fast a place takes bytes: files like those of a save, written and deleted again.

They go the way of a save's parts (`Storage.upload`), to the sync or the last answer, so that no cache is measured. A
place that other pods use is quick at one moment and slow at the next: several files are written, and the slowest one
counts.

The price: a disk that is quick only for its first gigabytes looks quick. The files are smaller than that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from migrator.storage.base import Storage

_BLOCK = 64 << 20
"""Bytes that are drawn at random, so that nothing on the way can compress them; a file repeats them."""
_SMALL = 4096
"""Bytes of a small file, about those of a mark or of a manifest without much in it."""
_DIRECTORY = "probe"


@dataclass(frozen=True)
class Bandwidth:
    """What was measured."""

    size: int
    """Bytes of each large file."""
    each_s: tuple[float, ...]
    """Seconds that each of them took."""
    small_s: float
    """Seconds of the slowest small file."""

    @property
    def bytes_per_s(self) -> float:
        """Of the slowest file."""
        return self.size / max(*self.each_s, 1e-6)


def measure(storage: Storage, size: int, *, count: int, clock: Callable[[], float] = time.perf_counter) -> Bandwidth:
    """Write `count` files of so many bytes, and as many small ones. `check` has been called. Nothing is left behind."""
    block = memoryview(os.urandom(min(size, _BLOCK)))
    storage.expect(size)
    try:
        each_s, small_s = [], []
        for number in range(count):
            start_s = clock()
            with storage.upload(f"{_DIRECTORY}/large-{number}", size=size) as file:
                while file.bytes < size:
                    file.write([block[: size - file.bytes]], hold=True)
                file.finish()
            each_s.append(clock() - start_s)
            start_s = clock()
            storage.put(f"{_DIRECTORY}/small-{number}", bytes(block[:_SMALL]), exclusive=True)
            small_s.append(clock() - start_s)
    finally:
        storage.delete_all(_DIRECTORY)
    return Bandwidth(size, tuple(each_s), max(small_s))
