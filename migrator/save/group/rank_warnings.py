"""What the log says of other ranks' records: that they do not fit, cannot be read, or are not there."""

from __future__ import annotations

import logging

from migrator.events import log
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line
from migrator.ranks.shares import Gathering
from migrator.save.group.reasons import why_missing


class RankWarnings:
    """Logs each of them once in a life."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks
        self._has_named_unlike = False
        self._named_newer: set[int] = set()

    def name_odd(self, gathering: Gathering) -> None:
        """Ranks with other tensors than this one, and ranks of a newer version."""
        unlike = gathering.unlike()
        if unlike and not self._has_named_unlike:
            self._has_named_unlike = True
            names = sorted({name for names in unlike.values() for name in names})
            log(
                "ranks_differ",
                level=logging.WARNING,
                ranks=",".join(map(str, unlike)),
                objects=",".join(names),
                means="of the ranks named nothing is saved; what each rank has for itself is registered with own=True",
            )
            if self._ranks.rank == 0:
                self._ranks.post(Line("apart", 0))
        for rank in sorted(gathering.newer.keys() - self._named_newer):
            self._named_newer.add(rank)
            log("rank_newer", level=logging.WARNING, other=rank, why=gathering.newer[rank])

    def name_missing(self, gathering: Gathering) -> None:
        """Ranks whose own state is not in the ckpt."""
        for rank in sorted(set(range(self._ranks.size)) - gathering.alike().keys()):
            what = "its random states and all that is its own"
            why = why_missing(self._ranks, rank, gathering)
            log("rank_lost", level=logging.WARNING, lost=rank, means=what, why=why)
