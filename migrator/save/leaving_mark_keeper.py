"""The mark beside a generation's record which says that its last ckpt is still coming, and its heartbeat.

A life that starts meanwhile waits for that ckpt.
"""

from __future__ import annotations

import logging

from migrator.ckpt import leaving_mark
from migrator.ckpt.leaving_mark import Heartbeat, LeavingMark
from migrator.errors import MigratorError
from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.platform import process_identity
from migrator.save.context import SaveContext


class LeavingMarkKeeper:
    """Puts the mark before the last save and removes it after. A failure is logged: the save does not depend on it."""

    def __init__(self, context: SaveContext, leaving: Leaving) -> None:
        self._context = context
        self._leaving = leaving
        self._heartbeat: Heartbeat | None = None

    def put(self) -> None:
        if not self._is_this_rank_s:
            return
        # A save of several ranks goes on if one of them dies, so the end of one process must not end the wait.
        by = process_identity.mine() if self._context.size == 1 else None
        number = self._context.generation.number
        try:
            mark = LeavingMark(max(1.0, self._leaving.left_s), by, beat=0)
            leaving_mark.put_mark(self._context.storage, number, mark)
            self._heartbeat = Heartbeat(self._context.storage, number, mark)
            self._heartbeat.start()
        except MigratorError as error:
            log("storage_warning", level=logging.WARNING, why=error)

    def stop_beating(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()

    def remove(self, *, is_certain: bool) -> None:
        """`is_certain`: the ckpt is there, or there will be none. If not, another rank may still commit one."""
        if not self._is_this_rank_s or (self._context.size > 1 and not is_certain):
            return
        try:
            leaving_mark.unmark_leaving(self._context.storage, self._context.generation.number)
        except MigratorError as error:
            log("storage_warning", level=logging.WARNING, why=error)

    @property
    def _is_this_rank_s(self) -> bool:
        context = self._context
        is_mine = context.writes and (self._leaving.pod_is_dying or context.rank == 0)
        return is_mine and context.generation.is_claimed
