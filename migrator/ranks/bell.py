"""How a rank hears at once that there is something to read, without asking for it again and again.

A thread of each rank waits in the store for a key of its rank with the next number. Whoever writes something that all
have to read sets that key for all ranks, in one call. So a thousand idle ranks cost the store nothing, and hear of a
notice as soon as two do.

The wait has no end, since the store's library prints a line each time one ends in vain. A rank that closes sets its own
key. Where the store has ended, or hangs for good, the thread is left where it is: nothing can wake it any more while
the interpreter ends, so it cannot break into that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_LONG = timedelta(days=30)


def ring(store: Any, name: str, size: int) -> None:
    """Wake the threads of all ranks."""
    number = store.add(f"{name}/count", 1)
    store.multi_set([_key(name, rank, number) for rank in range(size)], ["1"] * size)


def _key(name: str, rank: int, number: int) -> str:
    return f"{name}/{rank}/{number}"


class Bell(threading.Thread):
    """One thread, one connection."""

    def __init__(self, store: Any, name: str, rank: int, on_ring: Callable[[], None], *, number: int = 1) -> None:
        super().__init__(name="migrator-bell", daemon=True)
        self._store = store
        self._prefix = name
        self._rank = rank
        self._on_ring = on_ring
        self.number = number
        self.is_closed = False

    def run(self) -> None:
        while not self.is_closed:
            key = _key(self._prefix, self._rank, self.number)
            try:
                self._store.wait([key], _LONG)
                if not self.is_closed:
                    self._on_ring()
                self._store.delete_key(key)
            except RuntimeError:  # the store is gone: whoever asks it something finds out
                break
            self.number += 1

    def nudge(self, store: Any) -> None:
        """Go on to the next number: the ring with this one was not heard."""
        store.set(_key(self._prefix, self._rank, self.number), "1")

    def close(self, store: Any, timeout_s: float) -> None:
        """End the thread, through another connection than its own."""
        self.is_closed = True
        if self.is_alive():
            store.set(_key(self._prefix, self._rank, self.number), "1")
            self.join(timeout_s)
