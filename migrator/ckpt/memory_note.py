"""A note of the memory that a life uses, on storage, for the life after one that ran out of it.

The kernel kills without a signal that could be caught, so nobody can write then. So the process that speaks for its
pod writes the note while it trains, and takes it away when it ends in any way that it notices. A note that is still
there belongs to a life that was killed.

A note is for people: nothing is decided by it but what a log line says. So it has no digest and no format, and one
that cannot be read counts as none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from migrator.ckpt.generations import RECORD_LIMIT
from migrator.ckpt.names import COUNT_MAX, GENERATIONS, memory_note_name, parse_memory_note_name
from migrator.errors import StorageError
from migrator.storage.base import Storage

_SIZE = 1024
"""Bytes of each note: it is changed in place, which keeps the size."""
_TEXT_AT_MOST = 64
"""Characters of a text in a note."""
_READ_AT_MOST = 256
"""Notes that are read of one life. Each pod has one."""


@dataclass(frozen=True)
class MemoryNote:
    """What is known of one pod, in bytes."""

    peak: int
    """In use at most, as far as was seen."""
    limit: int | None
    """Of the container; None: it has none."""
    copy: int
    """What a periodic save needs for the copies of all ranks of the pod."""
    copied: int
    """What of that was in use already, and so is in `peak`."""
    kills: int | None
    """How many processes the kernel had killed for memory in the container when the life began; None: unknown."""
    killed: int
    """How many it has killed since. Known only if the process that writes the note was not among them."""
    container: str
    """The container's own life (`container.container_life`), for which `kills` holds."""
    pod: str

    def to_bytes(self) -> bytes:
        """The same number of bytes whatever it says."""
        texts = {"container": self.container[:_TEXT_AT_MOST], "pod": self.pod[:_TEXT_AT_MOST]}
        return json.dumps({**asdict(self), **texts}).encode("ascii").ljust(_SIZE - 1) + b"\n"

    @staticmethod
    def from_json(found: Any) -> MemoryNote | None:
        """None if this is no note of ours."""
        if not isinstance(found, Mapping) or not found.keys() >= {field.name for field in fields(MemoryNote)}:
            return None
        numbers: dict[str, Any] = {name: found[name] for name in ("peak", "limit", "copy", "copied", "kills", "killed")}
        may_lack = {"limit", "kills"}
        if not all(_is_count(number) or (number is None and name in may_lack) for name, number in numbers.items()):
            return None
        texts: dict[str, Any] = {name: str(found[name])[:_TEXT_AT_MOST] for name in ("container", "pod")}
        return MemoryNote(**numbers, **texts)


def put_note(storage: Storage, generation: int, rank: int, note: MemoryNote) -> None:
    """Make the note durable. `rank`: the one that speaks for its pod."""
    storage.put(memory_note_name(generation, rank), note.to_bytes(), exclusive=False)


def change_note(storage: Storage, generation: int, rank: int, note: MemoryNote) -> None:
    """Change a note that is there. It outlives this process, and that is all it is for."""
    storage.change(memory_note_name(generation, rank), note.to_bytes())


def delete_note(storage: Storage, generation: int, rank: int) -> None:
    """This pod ends knowingly."""
    storage.delete(memory_note_name(generation, rank))


def notes_of(storage: Storage, generation: int) -> dict[int, MemoryNote]:
    """The notes that a life has left, by rank."""
    found = {}
    for number, rank in _listed(storage)[:_READ_AT_MOST]:
        if number != generation:
            continue
        try:
            note = MemoryNote.from_json(json.loads(storage.get(memory_note_name(number, rank), limit=RECORD_LIMIT)))
        except (StorageError, ValueError, RecursionError):
            continue
        if note is not None:
            found[rank] = note
    return found


def forget_notes(storage: Storage, generations: Collection[int]) -> None:
    """Delete the notes of lives that are over."""
    for number, rank in _listed(storage):
        if number in generations:
            storage.delete(memory_note_name(number, rank))


def _listed(storage: Storage) -> list[tuple[int, int]]:
    """(generation, rank) of each note, the latest lives first."""
    found = map(parse_memory_note_name, storage.list(GENERATIONS))
    return sorted((place for place in found if place is not None), key=lambda place: (-place[0], place[1]))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < COUNT_MAX
