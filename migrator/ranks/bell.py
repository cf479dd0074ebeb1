"""How a rank learns at once that there are new lines, without polling.

A thread of each rank waits in the store for a key of its rank with the next number. A rank that writes a line for all
ranks sets these keys, in one call. So a thousand idle ranks cost the store nothing, and a notice reaches them as fast
as it reaches two.

The wait has no timeout, because the store's library prints a line for each wait that times out. To end its own thread,
a rank sets its own key. If the connection breaks, the thread ends by itself. If the store hangs, the thread stays in
its wait: nothing wakes it, so it cannot disturb the end of the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_FOREVER = timedelta(days=30)
"""Timeout of the wait; longer than any run."""


def ring(store: Any, name: str, size: int) -> None:
    """Wake the threads of all ranks."""
    number = store.add(f"{name}/count", 1)
    store.multi_set([_key(name, rank, number) for rank in range(size)], ["1"] * size)


def _key(name: str, rank: int, number: int) -> str:
    return f"{name}/{rank}/{number}"


class Bell(threading.Thread):
    """The thread that waits for rings. It needs a connection of its own."""

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
                self._store.wait([key], _FOREVER)
                if not self.is_closed:
                    self._on_ring()
                self._store.delete_key(key)
            except RuntimeError:  # the store is gone, as the next call to it will show
                break
            self.number += 1

    def nudge(self, store: Any) -> None:
        """Go on to the next number, because nobody will ring with this one."""
        store.set(_key(self._prefix, self._rank, self.number), "1")

    def close(self, store: Any, timeout_s: float) -> None:
        """End the thread. `store`: another connection than the one that the thread waits on."""
        self.is_closed = True
        if self.is_alive():
            store.set(_key(self._prefix, self._rank, self.number), "1")
            self.join(timeout_s)

    def close_behind_break(self, timeout_s: float) -> None:
        """Wait until the thread has ended: the connections broke, so it is on its way out of the store's C++ code.

        That takes a moment: the error of a broken connection carries a stack trace, whose names are looked up first.
        """
        self.is_closed = True
        if self.is_alive():
            self.join(timeout_s)
