"""A note of the ckpt that a life goes on from. By it an earlier life finds out that its own save came too late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from migrator.ckpt.generations import RECORD_LIMIT
from migrator.ckpt.names import GENERATIONS, note_name, parse_note_name
from migrator.errors import StorageError
from migrator.storage.base import Storage

_LOOKS_S = 2.0
"""Maximum wait, in seconds, for a later life to finish its second look for ckpts."""


def go_on(storage: Storage, generation: int, find: Callable[[], list[str]]) -> list[str]:
    """The ckpts that this life may load, best first. Writes a note of the one it goes on from.

    An earlier life that commits later reads the note, and reports that this life does not have its ckpt. So this life
    looks twice, before and after it writes the note. With one look, a ckpt could be committed after the look, and its
    writer could look for the note before it is written: neither life would notice. During the second look the note
    says that this life is still looking.
    """
    found = find()
    while True:
        note = {"from": found[0] if found else None}
        storage.put(note_name(generation), json.dumps({**note, "looks": True}).encode("ascii"), exclusive=False)
        again = find()
        if again[:1] == found[:1]:
            storage.put(note_name(generation), json.dumps(note).encode("ascii"), exclusive=False)
            return again
        found = again


def gone_on_without(storage: Storage, generation: int, ckpt: str) -> str | None:
    """A description of the later life that has begun and does not have this ckpt; None if there is none.

    A life without a note has not looked yet, and will find the ckpt. A life whose note says that it looks again is
    waited for.
    """
    end_s = time.monotonic() + _LOOKS_S
    while True:
        later, note = _latest_note(storage, generation)
        if later is None or note.get("from", "") == ckpt:
            return None
        if note.get("looks") is not True or time.monotonic() > end_s:
            break
        time.sleep(0.02)
    origin = note.get("from", "a ckpt that is not known")
    begun = "began anew" if origin is None else f"went on from {origin!s:.80}"
    return f"a later life of the job (generation {later}) {begun} and does not have it"


def _latest_note(storage: Storage, generation: int) -> tuple[int | None, dict[str, Any]]:
    """The latest life after this one that has looked for ckpts, and its note; empty if the note cannot be read."""
    noted = {number for name in storage.list(GENERATIONS) if (number := parse_note_name(name)) is not None}
    later = max((number for number in noted if number > generation), default=None)
    if later is None:
        return None, {}
    try:
        note = json.loads(storage.get(note_name(later), limit=RECORD_LIMIT))
    except (StorageError, ValueError, RecursionError):
        note = {}
    return later, note if isinstance(note, dict) else {}
