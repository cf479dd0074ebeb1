"""The thread that notes, beside a generation's record, how much memory this pod uses.

After a kill for want of memory the next life reads there what this one needed. The kill comes without a signal and
mostly between two saves, so the thread looks at the memory every `LOOK_S` and changes the note when more is in use
than the note says. A life whose memory does not grow writes once.

One process of a pod keeps the note, the one that answers the hook. It takes the note away at its end, unless the kernel
has killed another process of its container. Whatever fails here is nothing to training and saving, and is not logged:
a volume that takes no note takes no ckpt either, and that is logged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from migrator.ckpt import memory_note
from migrator.ckpt.memory_note import MemoryNote
from migrator.errors import StorageNotFoundError
from migrator.platform import container, memory
from migrator.save.attempt_factory import AttemptFactory
from migrator.save.context import SaveContext
from migrator.save.reply import Pod
from migrator.storage.base import Storage

FIRST_S = 2.0
"""Seconds from the beginning of a life to the first note: a job that fails at once writes none."""
LOOK_S = 1.0
"""Seconds between two looks at the memory."""
GROWN = 0.02
"""The note is written anew if this part of the limit more is in use than it says; without a limit, of what it says."""
_RETRY_AT_MOST_S = 60.0
"""Maximum time in seconds until a note that could not be written is tried again; each time it takes twice as long."""
_END_S = 1.0
"""Maximum time, in seconds, that the end of a life waits for its note to be deleted."""


class MemoryKeeper(threading.Thread):
    """One thread, one Event, one `close()`."""

    def __init__(
        self,
        context: SaveContext,
        attempts: AttemptFactory,
        pod: Pod,
        *,
        look: Callable[[], memory.Memory | None] = memory.of_container,
    ) -> None:
        super().__init__(name="migrator-memory", daemon=True)
        self._context = context
        self._attempts = attempts
        self._pod = pod
        self._look = look
        self._is_mine = pod.position == 0 and context.writes and context.generation.is_claimed
        self._is_closed = threading.Event()
        self._note: MemoryNote | None = None
        """What was written."""
        self._may_be_there = False
        """A write that failed may have acted all the same."""
        self._peak = 0
        self._kills: int | None = None
        """How many processes had been killed for memory when this life began."""

    def start(self) -> None:
        if self._is_mine:
            super().start()

    def run(self) -> None:
        found = self._look()
        self._kills = None if found is None else found.kills
        wait_s = FIRST_S
        while not self._is_closed.wait(wait_s):
            try:
                self._refresh(self._look())
                wait_s = LOOK_S
            except StorageNotFoundError:
                return  # a later life has taken it away, and goes on without this one
            except Exception:
                wait_s = min(2 * wait_s, _RETRY_AT_MOST_S)
        with suppress(Exception):
            self._end(self._look())

    def close(self) -> None:
        """This life ends knowingly. May be called twice. Does not wait long: the storage may hang."""
        self._is_closed.set()
        if self.ident is not None and self is not threading.current_thread():
            self.join(_END_S)

    def _refresh(self, found: memory.Memory | None) -> None:
        """Write the note if it says too little."""
        self._peak = max(self._peak, memory.peak_of_process(), found.used if found else 0)
        if found is not None and found.limit is not None:
            self._peak = min(self._peak, found.limit)  # pages that two processes share are counted twice
        note = self._made(found)
        if self._note is None:
            self._may_be_there = True
            memory_note.put_note(*self._place, note)
            self._note = note
            return
        is_same_copy = (note.copy, note.copied) == (self._note.copy, self._note.copied)
        if note.peak - self._note.peak >= GROWN * (note.limit or self._note.peak) or not is_same_copy:
            memory_note.change_note(*self._place, note)
            self._note = note

    def _end(self, found: memory.Memory | None) -> None:
        killed = self._killed(found)
        if killed:
            self._peak = max(self._peak, memory.peak_of_process())
            memory_note.put_note(*self._place, replace(self._made(found), killed=killed))
        elif self._may_be_there:
            memory_note.delete_note(*self._place)

    def _killed(self, found: memory.Memory | None) -> int:
        """How many processes of this container the kernel has killed for memory in this life."""
        if found is None or found.kills is None or self._kills is None:
            return 0
        return max(0, found.kills - self._kills)

    def _made(self, found: memory.Memory | None) -> MemoryNote:
        return MemoryNote(
            peak=self._peak,
            limit=found.limit if found else None,
            # Each rank of the pod takes memory for its own copies.
            copy=self._pod.ranks * self._attempts.copy_bytes,
            copied=self._pod.ranks * self._attempts.copied_bytes,
            kills=self._kills,
            killed=self._killed(found),
            container=container.container_life(),
            pod=container.pod_name(),
        )

    @property
    def _place(self) -> tuple[Storage, int, int]:
        return self._context.storage, self._context.generation.number, self._context.rank
