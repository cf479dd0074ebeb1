"""The sign of life of a process that leaves: its mark on the volume changes as long as it lives.

A thread of its own writes, so that neither a long sync nor a busy interpreter looks like
the end. It writes into the mark's file without a sync and without giving it a new name:
another client of a network volume sees that when it opens the file, and a beat that comes
late brings no mark back that was taken away.
"""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import replace

from migrator.ckpt import generations as lineage
from migrator.errors import StorageError
from migrator.events import log
from migrator.ckpt.generations import LeavingMark
from migrator.storage.posix import LocalStorage


class Heartbeat(threading.Thread):
    """One thread, one Event, one `close()`."""

    def __init__(self, storage: LocalStorage, generation: int, mark: LeavingMark) -> None:
        super().__init__(name="migrator-heartbeat", daemon=True)
        self._storage = storage
        self._generation = generation
        self._mark = mark
        self._is_closed = threading.Event()

    def run(self) -> None:
        beat, has_warned = 0, False
        while not self._is_closed.wait(lineage.BEAT_S):
            beat += 1
            try:
                lineage.beat(self._storage, self._generation, replace(self._mark, beat=beat))
            except StorageError as error:
                if error.errno == errno.ENOENT:
                    return  # the mark was taken away
                # The next beat may get through, and a life that waits takes this one for dead without it.
                if not has_warned:
                    log("storage_warning", level=logging.WARNING, why=error)
                has_warned = True

    def close(self) -> None:
        """May be called twice. Not waited for: the storage may hang."""
        self._is_closed.set()
