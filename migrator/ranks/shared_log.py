"""A log in the job's store: ranks only append lines, and all ranks read them in the same order.

Each line is a key of its own with a number in its name, and a counter holds how many numbers are given out. So a reader
fetches only new lines. A writer takes the next number, then sets the key of this number. A writer that dies between the
two leaves a hole. A reader that finds a hole open for some time closes it for good; a late writer sees this and takes
another number. Otherwise one rank could skip a line that another rank still reads, and the ranks could differ on which
line is the first one of its kind.

Lines that no rank needs any more are deleted, so the store does not grow with the number of saves.
"""

from __future__ import annotations

import time
from typing import Any

HOLE_S = 0.5
"""Time, in seconds, after which a reader closes a number that has no line."""
_CLOSED = "\n"
_AT_ONCE = 256
"""Maximum number of lines that are fetched in one call."""


class SharedLog:
    """One log, read and written through one connection. Used by one thread."""

    def __init__(self, store: Any, name: str) -> None:
        self.store = store
        """The connection. Another one replaces it if it breaks."""
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
        """Append a line and return its number."""
        while True:
            start_s = time.monotonic()
            number = int(self.store.add(self._count, 1))
            is_there = self.store.compare_set(self._key(number), "", text) == text.encode()
            # A late writer may have set a key that was closed and then deleted, where nobody reads it.
            if is_there and (time.monotonic() - start_s < HOLE_S or not self._is_deleted(number)):
                return number

    def read(self) -> list[str]:
        """The new lines. If the store fails meanwhile: those that were fetched before."""
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
        """Some of these keys, none of them missing: reading a key that does not exist would block."""
        while keys and not self.store.check(keys):
            keys = keys[: len(keys) // 2]
        return keys

    def _skip_deleted(self) -> bool:
        """Skip deleted lines. False: the next line is not deleted."""
        if not self._is_deleted(self._read + 1):
            return False
        self._read = int(self.store.get(self._start)) - 1
        return True

    def _is_deleted(self, number: int) -> bool:
        return bool(self.store.check([self._start])) and number < int(self.store.get(self._start))

    def _one(self, key: str) -> bytes | None:
        """The next line, which is missing, or the mark that closes it; None if its writer may still write it."""
        now_s = time.monotonic()
        if self._hole_since is None:
            self._hole_since = now_s
        if now_s - self._hole_since < HOLE_S:
            return None
        return bytes(self.store.compare_set(key, "", _CLOSED))

    def is_here(self) -> bool:
        """Whether this store contains the lines that were read. Otherwise it is another store at the same address."""
        return int(self.store.add(self._count, 0)) >= self._read

    def trim(self, keep: int) -> None:
        """Delete the lines that were read, except the last `keep`. One rank calls this when all ranks have read
        them."""
        end = self._read - keep
        if end < self._first:
            return
        # First: a reader that misses a line looks here whether it was deleted.
        self.store.set(self._start, str(end + 1))
        for number in range(self._first, end + 1):
            self.store.delete_key(self._key(number))
        self._first = end + 1
