"""Which ckpts of this life are committed, as one rank sees it, and which of them this rank committed."""

from __future__ import annotations

import json

from migrator.ckpt.catalog import whole
from migrator.ckpt.names import ckpt_name, parse_ckpt_name
from migrator.events import log
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line
from migrator.ranks.shares import OnStorage
from migrator.save.context import SaveContext
from migrator.save.results import Saved


class Commits:
    """One rank's view."""

    def __init__(self, context: SaveContext, ranks: Peers) -> None:
        self._context = context
        self._ranks = ranks
        self._exchange = context.exchange or OnStorage(context.storage)
        self.own: str | None = None
        """The newest ckpt that this rank itself committed. Only the rank that commits deletes old ckpts then."""

    def name(self, step: int) -> str:
        return ckpt_name(self._context.generation.number, step)

    def is_there(self, name: str) -> bool:
        return self._exchange.is_committed(name)

    def note_own(self, name: str) -> None:
        """This rank has committed it."""
        self.own = name
        self._post(name)

    def _post(self, name: str) -> None:
        """Ranks that do not see the root read it on the shared log."""
        if self._context.exchange is not None:
            self._ranks.post(Line("saved", self._ranks.rank, info=json.dumps({"ckpt": name})))
            self._context.exchange.forget(name)

    def furthest(self, names: set[str], *, is_alone: bool) -> Saved | None:
        """The ckpt with the highest step of those named that are committed; None if there is none.

        `is_alone`: ckpts that other ranks saved alone count as well, if they are further than those named.
        """
        if is_alone and self._context.writes:
            names = names | self._beyond(max(names))
        for name in sorted(names, reverse=True):
            if not self.is_there(name):
                continue
            parsed = parse_ckpt_name(name)
            assert parsed is not None
            step = parsed[1]
            if not self._context.writes:
                return Saved(name, step, 0, 0.0)
            size = whole(self._context.storage, name).bytes
            if self.own != name:
                log("joined", ckpt=name, step=step)
                self._post(name)
            return Saved(name, step, size, 0.0)
        return None

    def _beyond(self, name: str) -> set[str]:
        """Further ckpts of this life, saved by ranks that save alone. The job resumes from the furthest one."""
        number = self._context.generation.number
        found = {other: parse_ckpt_name(other) for other in self._context.storage.list()}
        return {other for other, parsed in found.items() if parsed and parsed[0] == number and other > name}
