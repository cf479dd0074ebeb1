"""Which safe points all ranks are to save while training goes on, and which of them cannot be saved.

Said on the ranks' shared log, so that all ranks read the same in the same order.
"""

from __future__ import annotations

from migrator.ckpt.point import Point
from migrator.ranks.claims import Once, claim_of
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line


class Orders:
    """One rank's side."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks

    def give(self, target: Point) -> None:
        """All ranks are to save this safe point."""
        self._ranks.post(order(target, self._ranks.rank), timeout_s=0)

    def miss(self, target: Point, why: str) -> None:
        """This safe point cannot be saved here."""
        line = Line("missed", self._ranks.rank, point=target, info=why)
        self._ranks.post(_once(line), timeout_s=0)

    def missed(self, target: Point) -> str | None:
        """Why a rank cannot save this safe point."""
        for line in self._ranks.lines("missed"):
            if line.point == target:
                return f"rank {line.rank}: {line.info}"
        return None


def order(target: Point, rank: int) -> Once:
    """The line that orders a save. Of several ranks that want it one posts it."""
    return _once(Line("order", rank, point=target))


def _once(line: Line) -> Once:
    def is_said(lines: list[Line]) -> bool:
        return any(other.what == line.what and other.point == line.point for other in lines)

    return Once(line, claim_of(line), is_said)
