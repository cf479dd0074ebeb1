"""Which lives of the job continue one another, and so which ckpts are ours.

Each life claims a number of its own, once, by writing a record exclusively. The record
says which life it continues. The ckpts of the lineage are those of this life, of the
one it continues, and so on.

A record of a newer format may say something that this version does not understand, for
example that its life began without the ckpts before it. No life guesses what such a
record means: it ends with an error that says what to do. Marks and notes have no format:
unknown fields in them are ignored, and without them only time or a message is lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from migrator.ckpt.names import GENERATIONS, parse_ckpt_name, parse_record_name, record_name
from migrator.ckpt.sealed import check_format, seal, unseal
from migrator.errors import CkptCorrupt, CkptMismatch, StorageExistsError, StorageNotFoundError
from migrator.events import log
from migrator.storage.base import Storage

GENERATION_FORMAT = 1
"""Of the record of a life. As in the manifest, fields that may be ignored need no new number."""

RECORD_LIMIT = 1 << 20
"""Bytes that are read of a record, a mark or a note at most."""


@dataclass(frozen=True)
class Generation:
    """This life's place among all lives of the job."""

    number: int
    continues: int | None
    lineage: tuple[int, ...]
    """The generations whose ckpts can be loaded, this one first."""
    proven: frozenset[int]
    """Those that are known without guessing past an unreadable record. Only their files are ever deleted."""
    differs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Script and arguments where they differ: (of the life that is continued, of this one)."""
    is_claimed: bool = True
    """False: this life leaves before it trains, and has no record."""


def not_claimed(storage: Storage, *, fresh: bool) -> Generation:
    """For a life that leaves at once. A number of its own would stop the life that goes on from deleting anything."""
    taken = numbers(storage)
    number = max(taken, default=0) + 1
    continues = None if fresh else max(taken, default=None)
    # Nothing is loaded, trained or deleted by it.
    lineage, proven = _lineage(storage, number, continues, taken, may_guess=True)
    return Generation(number, continues, lineage, proven, is_claimed=False)


def claim(storage: Storage, *, fresh: bool, about: Mapping[str, Any]) -> Generation:
    """Take the next number, for good. `fresh` begins a new lineage.

    `CkptMismatch` if an earlier life of the lineage has a record of a newer format: this version cannot know whether
    the ckpts before it may be loaded. Then no number is taken.
    """
    taken: set[int] = set()
    while True:
        taken |= numbers(storage)
        number = max(taken, default=0) + 1
        continues = None if fresh else max(taken, default=None)
        lineage, proven = _lineage(storage, number, continues, taken)
        record = {"format": GENERATION_FORMAT, "generation": number, "continues": continues, "about": dict(about)}
        # A crash must not leave this record without the one it continues, whose writer may have died before the sync.
        with suppress(StorageNotFoundError):  # the very first life
            storage.make_durable(GENERATIONS)
        try:
            storage.put(record_name(number), seal("generation", record), exclusive=True)
        except StorageExistsError:
            # Another life was quicker, so this one continues it.
            taken.add(number)
            continue
        break
    differs = {} if continues is None else _differences(read_about(storage, continues), about)
    return Generation(number, continues, lineage, proven, differs)


def numbers(storage: Storage) -> set[int]:
    """All generations that have a record or a ckpt."""
    records = {number for name in storage.list(GENERATIONS) if (number := parse_record_name(name)) is not None}
    return records | {generation for generation, _ in ckpt_directories(storage)}


def _lineage(
    storage: Storage, number: int, continues: int | None, taken: set[int], *, may_guess: bool = False
) -> tuple[tuple[int, ...], frozenset[int]]:
    """The lineage, and the lives of it that are certain. `may_guess`: also past records of a newer version."""
    lineage, proven, is_proven = [number], {number}, True
    while continues is not None:
        lineage.append(continues)
        if is_proven:
            proven.add(continues)
        try:
            continues = _read_continues(storage, continues)
        except (CkptCorrupt, CkptMismatch) as error:
            if isinstance(error, CkptMismatch) and not may_guess:
                raise
            # A lineage with too many ckpts does no harm, as the newest wins. One with too few would lose work.
            log("generation_unreadable", level=logging.WARNING, generation=continues, error=error)
            continues = max((n for n in taken if n < lineage[-1]), default=None)
            is_proven = False
    return tuple(lineage), frozenset(proven)


def _read_continues(storage: Storage, number: int) -> int | None:
    record = _read_record(storage, number)
    continues = record["continues"]
    if continues is None or (type(continues) is int and 0 < continues < number):
        return continues
    raise CkptCorrupt(f"generation {number} claims to continue {continues!r:.80}")


def _read_record(storage: Storage, number: int) -> dict[str, Any]:
    try:
        record = unseal("generation", storage.get(record_name(number), limit=RECORD_LIMIT))
    except StorageNotFoundError as error:
        raise CkptCorrupt(str(error)) from error
    way_out = (
        "start without the ckpts: MIGRATOR_RESUME=never. To go on as if that life had never been, delete "
        f"{storage.where(record_name(number))}"
    )
    known = range(1, GENERATION_FORMAT + 1)
    check_format(record.get("format", 1), known, f"the record of generation {number}", way_out)
    if not record.keys() >= {"generation", "continues", "about"} or record["generation"] != number:
        raise CkptCorrupt(f"the record of generation {number} is not its own")
    return record


def read_about(storage: Storage, number: int) -> dict[str, Any]:
    """What a life recorded about itself; empty if that is damaged, `CkptMismatch` if a newer version wrote it."""
    try:
        about = _read_record(storage, number)["about"]
    except CkptCorrupt:
        return {}
    return about if isinstance(about, dict) else {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    # As JSON, so that a tuple here equals a list there.
    return {
        key: (there[key], here[key])
        for key in ("script", "argv")
        if key in there and key in here and json.dumps(there[key]) != json.dumps(here[key])
    }


def ckpt_directories(storage: Storage) -> list[tuple[int, int]]:
    return [place for name in storage.list() if (place := parse_ckpt_name(name)) is not None]
