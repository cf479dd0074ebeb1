"""Lines that one rank writes for all: the first rank that claims a line writes it.

When a node pool is drained, a thousand ranks notice it in the same second, and one
line is enough. So each rank that wants to write such a line first increases a
counter of the store. The one that finds 1 writes the line; the others wait, and
write it themselves if it does not appear in time: the first one may have died.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from migrator.ranks.protocol import Line

_WRITTEN_S = 0.5
"""Time, in seconds, in which the rank with the claim writes the line; after it the other ranks write it themselves."""
KEPT = 64
"""Number of lines about past saves, and of claims to such lines, that are kept. Older ones are deleted."""


@dataclass(frozen=True)
class Once:
    """A line that only one of the ranks that want to write it writes."""

    line: Line
    claim: str
    """The name of the claim. The first rank that takes it writes the line."""
    is_said: Callable[[list[Line]], bool]
    """Whether these lines contain it. The rank that took the claim may have died before it wrote the line."""


def claim_of(line: Line) -> str:
    """The name of the claim for a line that is written once for each safe point."""
    assert line.point is not None
    return f"{line.what}/{line.point[0]}.{line.point[1]}"


class Claims:
    """The claims of one rank. Used by the thread that calls the store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._waiting: list[tuple[float, Once]] = []
        """Lines that another rank should write, each with the time at which this rank writes it instead."""
        self._kept: collections.deque[str] = collections.deque()

    def take(self, store: Any, once: Once) -> bool:
        """Whether this rank is the first one, and has to write the line now."""
        if store.add(f"{self._prefix}/{once.claim}", 1) == 1:
            return True
        self._waiting.append((time.monotonic() + _WRITTEN_S, once))
        return False

    def overdue(self, lines: list[Line], now_s: float) -> list[Line]:
        """The lines that no rank has written in time: this rank has to write them now, and then call `drop_overdue`."""
        self._waiting = [(end_s, once) for end_s, once in self._waiting if not once.is_said(lines)]
        return [once.line for end_s, once in self._waiting if now_s > end_s]

    def drop_overdue(self, now_s: float) -> None:
        self._waiting = [(end_s, once) for end_s, once in self._waiting if now_s <= end_s]

    @property
    def is_waiting(self) -> bool:
        """This rank waits for lines that another rank should write."""
        return bool(self._waiting)

    def forget_old(self, store: Any, fresh: list[Line]) -> None:
        """Delete the claims of saves that are long over, so that the store does not grow. One rank does this."""
        self._kept += [claim_of(line) for line in fresh]
        while len(self._kept) > KEPT:
            store.delete_key(f"{self._prefix}/{self._kept.popleft()}")
