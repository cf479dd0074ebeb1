"""Says at the start of a life how much memory the one before it used, if that one was killed.

Who was killed because memory ran out cannot say so, and its exit code is known to Kubernetes only. Known is here: it
has left a memory note (`ckpt/memory_note.py`), so it did not end knowingly; its newest ckpt is not one that was made to
leave; and in a container that was not started anew, how often the kernel has killed. So the line says what is known,
and it is a warning only if memory did run out, or was nearly used up.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from migrator.ckpt import catalog
from migrator.ckpt.memory_note import MemoryNote, notes_of
from migrator.events import log
from migrator.platform import container, memory
from migrator.save.staging import ROOM_LEFT
from migrator.storage.base import Storage

NEAR = 0.9
"""The part of the limit from which on memory counts as nearly used up.

Between two looks a life may take a tenth more.
"""


def log_memory_before(storage: Storage, generation: int | None) -> None:
    """Log one line, or none. Whatever is found on storage, this never raises."""
    with suppress(Exception):
        cases = [] if generation is None else _cases(storage, generation)
        if cases:
            _log(max(cases, key=lambda case: (case.killed > 0, case.part)), generation)


@dataclass(frozen=True)
class _Case:
    """A pod of the life before that did not end knowingly."""

    rank: int
    note: MemoryNote
    killed: int
    """How many of its processes the kernel has certainly killed for memory."""

    @property
    def needed(self) -> int:
        """Bytes with which a copy would have been made beside what was in use."""
        note = self.note
        missing = max(0, note.copy - note.copied)
        return note.peak + missing + (ROOM_LEFT if note.copy else 0)

    @property
    def part(self) -> float:
        """Of the limit, what was in use with the copy of a periodic save."""
        note = self.note
        return (note.peak + max(0, note.copy - note.copied)) / note.limit if note.limit else 0.0

    @property
    def ran_out(self) -> bool:
        """It did, or probably."""
        return self.killed > 0 or self.part >= NEAR


def _cases(storage: Storage, generation: int) -> list[_Case]:
    notes = notes_of(storage, generation)
    if not notes:
        return []
    left = _ranks_that_left(storage, generation, notes.keys())
    cases = [_Case(rank, note, _killed(note)) for rank, note in notes.items()]
    return [case for case in cases if case.killed or case.rank not in left]


def _ranks_that_left(storage: Storage, generation: int, ranks: Any) -> set[int]:
    """Those whose state is in a ckpt that was made to leave: their note is only not deleted yet."""
    ckpts = catalog.ckpts(storage, (generation,))
    if not ckpts:
        return set()
    manifest = catalog.whole(storage, ckpts[0])
    if manifest.written.get("leaving") is not True:
        return set()
    missing = manifest.extra.get("missing")
    return set(ranks) - {rank for rank in (missing if isinstance(missing, list) else []) if isinstance(rank, int)}


def _killed(note: MemoryNote) -> int:
    """From the note itself; or, in the same container still, from what the kernel has counted since."""
    killed = note.killed
    if note.container and note.kills is not None and note.container == container.container_life():
        here = memory.of_container()
        killed = max(killed, (here.kills or 0) - note.kills) if here else killed
    return killed


def _log(case: _Case, generation: int | None) -> None:
    note = case.note
    numbers: dict[str, Any] = {
        "generation": generation,
        "pod": note.pod,
        "peak_bytes": note.peak,
        "limit_bytes": "none" if note.limit is None else note.limit,
        "copy_bytes": note.copy,
    }
    if case.ran_out:
        log("memory_before", level=logging.WARNING, **numbers, means=f"{_what(case)}; {_advice(case)}")
    else:
        log("memory_before", **numbers, means=f"{_what(case)}; {_rest(note)}")


def _what(case: _Case) -> str:
    note = case.note
    end = "the life before ended without a last save"
    if case.killed:
        end = f"memory ran out in the life before, and the kernel killed {case.killed} of its processes"
    limit = "has no limit" if note.limit is None else f"may use {_mi(note.limit)}"
    used = f"its container {limit} and was seen to use {_mi(note.peak)}"
    if not note.copy:
        return f"{end}; {used}"
    copied = "which is in that" if note.copied >= note.copy else "which is not in that"
    return f"{end}; {used}; a periodic save needs {_mi(note.copy)} for its copy, {copied}"


def _advice(case: _Case) -> str:
    limit = case.note.limit
    if limit is None:
        return f"set resources.requests.memory to {_mi(case.needed)} or more, so that the node has it"
    condition = "" if case.killed else "if the pod says OOMKilled or exit code 137, "
    return f"{condition}set resources.limits.memory above {_mi(max(limit, case.needed))}"


def _rest(note: MemoryNote) -> str:
    if note.limit is None:
        return "if the pod says OOMKilled, the node's memory ran out"
    return "if the pod says OOMKilled, it took the rest between two looks"


def _mi(size: int) -> str:
    """As in a yaml."""
    return f"{-(-size // (1 << 20))}Mi"
