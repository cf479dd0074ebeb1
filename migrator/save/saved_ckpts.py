"""The ckpts of this life as its saving thread knows them, and what is done about them after a commit."""

from __future__ import annotations

import logging

from migrator.ckpt import continuation, retention
from migrator.errors import StorageError
from migrator.events import log
from migrator.save.context import SaveContext
from migrator.save.results import Saved


class SavedCkpts:
    """The newest one, those that are corrupt; retention, and the look for a later life."""

    def __init__(self, context: SaveContext, *, keep: int) -> None:
        self._context = context
        self._keep = keep
        self._later: str | None = None
        self.newest: Saved | None = None
        """The newest ckpt of this life, or the one it was loaded from."""
        self.bad: frozenset[str] = frozenset()
        """Ckpts that turned out to be corrupt while loading."""

    @property
    def name_of_newest(self) -> str:
        return self.newest.ckpt if self.newest else "none"

    def of_step(self, step: int) -> Saved | None:
        """The newest one, if it is of this step."""
        return self.newest if self.newest is not None and self.newest.step == step else None

    def retire(self, *, sweeps: bool = True) -> None:
        """Delete what is not kept any more."""
        context = self._context
        retention.retire(context.storage, context.generation, keep=self._keep, bad=self.bad, sweeps=sweeps)

    def look_for_later(self, saved: Saved) -> str | None:
        """Describes the later life that goes on without this ckpt, if there is one, and logs it."""
        context = self._context
        if not context.writes:
            return None
        try:
            late = continuation.gone_on_without(context.storage, context.generation.number, saved.ckpt)
        except StorageError as error:
            log("storage_warning", level=logging.WARNING, why=error)
            return None
        if late is not None and late != self._later:
            self._later = late
            log("later_life", level=logging.WARNING, ckpt=saved.ckpt, means=late)
        return late
