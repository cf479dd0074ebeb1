"""Which ranks are alive: a counter that each busy rank increases in the store, its beat.

A rank is silent while its beat does not change. Silence is measured between two
answers of the store: if the store itself hangs, that says nothing about the ranks.

Only ranks that a caller asks about are watched, so the cost does not grow with
the square of the number of ranks.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_ASKED = 64
"""Maximum number of ranks without a beat that are looked up in one exchange."""


class Liveness:
    """The beats of this rank and of the ranks that it watches. Any thread may ask."""

    def __init__(self, rank: int, prefix: str) -> None:
        self._rank = rank
        self._prefix = prefix
        self._lock = threading.Lock()
        self._beat = 0
        self._watched: dict[int, _Beat] = {}
        self._beating: set[int] = set()
        """Watched ranks that have a key in the store. Reading a key that does not exist would block."""
        self._next_asked = 0

    def silence_s(self, rank: int) -> float:
        """For how many seconds the beat of this rank has not changed, as far as the store has answered."""
        with self._lock:
            beat = self._of(rank)
            return beat.read_s - beat.changed_s

    def advanced(self, rank: int) -> int:
        """How often another rank has reported progress."""
        with self._lock:
            return self._of(rank).advanced

    def start_again(self) -> None:
        """Measure silence from now on: an idle rank sends no beats."""
        now_s = time.monotonic()
        with self._lock:
            for beat in self._watched.values():
                beat.changed_s = beat.read_s = now_s

    def exchange(self, store: Any, advanced: int) -> None:
        """Send the beat of this rank and read the beats of the watched ranks."""
        self._beat += 1
        store.set(self._key(self._rank), f"{self._beat} {advanced}")
        with self._lock:
            watched = [rank for rank in self._watched if rank != self._rank]
        self._beating |= self._started(store, [rank for rank in watched if rank not in self._beating])
        there = [rank for rank in watched if rank in self._beating]
        beats = store.multi_get([self._key(rank) for rank in there]) if there else []
        now_s, found = time.monotonic(), dict(zip(there, beats, strict=True))
        with self._lock:
            for rank in watched:
                self._watched[rank].take(found.get(rank, b""), now_s)

    def _started(self, store: Any, ranks: list[int]) -> set[int]:
        """Those of `ranks` that have a key in the store. All of them in one call, or a few of them one by one."""
        if ranks and store.check([self._key(rank) for rank in ranks]):
            return set(ranks)
        self._next_asked = (self._next_asked + _ASKED) % max(1, len(ranks))
        some = (ranks[self._next_asked :] + ranks[: self._next_asked])[:_ASKED]
        return {rank for rank in some if store.check([self._key(rank)])}

    def _of(self, rank: int) -> _Beat:
        return self._watched.setdefault(rank, _Beat(time.monotonic()))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


class _Beat:
    """The last beat of one rank, and when it changed."""

    def __init__(self, now_s: float) -> None:
        self.changed_s = self.read_s = now_s
        self.advanced = 0
        self._text = b""

    def take(self, text: bytes, now_s: float) -> None:
        self.read_s = now_s
        if text != self._text:
            self._text, self.changed_s = text, now_s
            self.advanced = int(text.split()[-1]) if text else 0
