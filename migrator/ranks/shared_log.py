"""Lines that ranks only ever append to, in the job's store: read once each, and by all in the same order.

Each line is a key of its own with a number in its name, and a counter says how many numbers are given out. So a reader
fetches what is new and nothing else. A writer takes the next number, then puts its line there. One that dies between
the two leaves a hole: whoever finds it open for a while closes it for good, and a writer that comes late sees that and
takes another number. Otherwise one rank might read past a line that another one still finds, and the first line of a
kind would not be the same one for all.

Lines that nobody needs any more are deleted, so the store does not grow with the number of saves.
"""

from __future__ import annotations

import time
from typing import Any

HOLE_S = 0.5
"""A number that was given out and has no line for so long is closed."""
_CLOSED = "\n"
_AT_ONCE = 256
"""So many lines are fetched in one call."""


class SharedLog:
    """One log, seen through one connection. Not for several threads."""

    def __init__(self, store: Any, name: str) -> None:
        self.store = store
        """Another connection may take the place of one that broke."""
        self._name = name
        self._read = 0
        self._first = 1
        self._hole_since: float | None = None

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    @property
    def _count(self) -> str:
        return f"{self._name}/count"

    @property
    def _start(self) -> str:
        return f"{self._name}/start"

    def post(self, text: str) -> int:
        """Append a line; the number it got."""
        while True:
            start_s = time.monotonic()
            number = int(self.store.add(self._count, 1))
            is_there = self.store.compare_set(self._key(number), "", text) == text.encode()
            # Whoever is as late as that may have written where lines were closed and deleted.
            if is_there and (time.monotonic() - start_s < HOLE_S or not self._is_deleted(number)):
                return number

    def read(self) -> list[str]:
        """The lines behind those that were read before: those that were fetched, also where the store then fails."""
        found: list[str] = []
        try:
            self._fetch(found)
        except RuntimeError:
            if not found:
                raise
        return found

    def _fetch(self, found: list[str]) -> None:
        count = int(self.store.add(self._count, 0))
        while self._read < count:
            keys = [self._key(n) for n in range(self._read + 1, min(count, self._read + _AT_ONCE) + 1)]
            if there := self._there(keys):
                texts = self.store.multi_get(there)
            elif self._skip_deleted():
                continue
            elif (text := self._one(keys[0])) is not None:
                texts = [text]
            else:
                break
            self._read += len(texts)
            self._hole_since = None
            found += [text.decode("utf-8", errors="replace") for text in texts if text != _CLOSED.encode()]

    def _there(self, keys: list[str]) -> list[str]:
        """Those before the first that is missing, or some of them: a key that does not exist would be waited for."""
        while keys and not self.store.check(keys):
            keys = keys[: len(keys) // 2]
        return keys

    def _skip_deleted(self) -> bool:
        """Go on behind what is deleted; False: nothing there is."""
        if not self._is_deleted(self._read + 1):
            return False
        self._read = int(self.store.get(self._start)) - 1
        return True

    def _is_deleted(self, number: int) -> bool:
        return bool(self.store.check([self._start])) and number < int(self.store.get(self._start))

    def _one(self, key: str) -> bytes | None:
        """The next line, which is missing; None if its writer may still be about to write it."""
        now_s = time.monotonic()
        if self._hole_since is None:
            self._hole_since = now_s
        if now_s - self._hole_since < HOLE_S:
            return None
        return bytes(self.store.compare_set(key, "", _CLOSED))

    def is_here(self) -> bool:
        """Whether this store has what was read: else it is not the one of before."""
        return int(self.store.add(self._count, 0)) >= self._read

    def trim(self, keep: int) -> None:
        """Delete what was read, but for the last `keep` lines. For one rank, who knows that all have read them."""
        end = self._read - keep
        if end < self._first:
            return
        # First of all: whoever finds a line missing looks here.
        self.store.set(self._start, str(end + 1))
        for number in range(self._first, end + 1):
            self.store.delete_key(self._key(number))
        self._first = end + 1
