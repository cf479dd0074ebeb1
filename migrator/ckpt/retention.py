"""Which ckpts are deleted, and above all which are not.

Nothing is deleted before its replacement is whole and durable. A life deletes in its own
generation, and in earlier ones of its lineage once none of them can still be saving. If a
later life exists, it deletes nothing at all: it may itself be the one that was thought
dead. While another life has come further, it deletes in its own generation only: the next
life will go on from the other one. Other lineages are never touched.

The manifest of a ckpt is deleted first: from then on the ckpt does not exist, and a crash
leaves only bytes that the next commit sweeps, never a ckpt with a missing part. The same
rules hold for what dead writers left.

A failure here costs room on the volume, so it is logged and never raised.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from migrator.ckpt import catalog, generations, leaving_mark, memory_note, names
from migrator.ckpt.generations import Generation
from migrator.ckpt.names import MANIFEST, file_in, is_part_name, manifest_name, parse_ckpt_name, parse_rank_record_name
from migrator.errors import CkptCorrupt, CkptMismatch, StorageError, StorageNotFoundError
from migrator.events import log
from migrator.storage.base import Storage


def retire(
    storage: Storage,
    generation: Generation,
    *,
    keep: int,
    bad: frozenset[str] = frozenset(),
    sweeps: bool = True,
) -> list[str]:
    """After a commit: delete all ckpts of the lineage but the newest `keep` whole ones.

    `bad` ckpts were found corrupt while loading and do not count. Without `sweeps`,
    directories that are not committed stay: another rank may be about to commit one. Returns the names of the ckpts
    that were deleted.
    """
    gone: list[str] = []
    try:
        kept, is_furthest = _kept(storage, generation, keep=max(1, keep), bad=bad)
        if not kept:
            return gone
        ours = _where_to_delete(storage, generation) if is_furthest else frozenset({generation.number})
        for name in _superfluous(storage, generation, kept, ours, is_full=len(kept) == max(1, keep)):
            if not (sweeps or MANIFEST in storage.list(name)):
                continue
            if _is_fenced(storage, generation):
                return gone  # a later life has begun, and may be loading
            _delete(storage, name)
            gone.append(name)
        if sweeps and not _is_fenced(storage, generation):
            _sweep(storage, generation, kept, ours)
    except StorageError as error:
        log("retention_failed", level=logging.WARNING, error=error)
    finally:
        if gone:
            _make_durable(storage)
            log("retired", ckpts=",".join(gone))
    return gone


def _is_fenced(storage: Storage, generation: Generation) -> bool:
    return max(generations.numbers(storage), default=0) > generation.number


def _kept(storage: Storage, generation: Generation, *, keep: int, bad: frozenset[str]) -> tuple[list[str], bool]:
    """The ckpts that stay, furthest first and durable, and whether this life has come furthest. Empty: all stay."""
    if _is_fenced(storage, generation):
        return [], False
    committed = catalog.furthest_first(storage, generation)
    kept = _newest_whole(storage, committed, keep=keep, bad=bad)
    is_furthest = bool(kept) and _age(kept[0])[0] == generation.number
    if not is_furthest:
        # The ckpts of others stay until this life has come further.
        own = [name for name in committed if _age(name)[0] == generation.number]
        kept = _newest_whole(storage, own, keep=keep, bad=bad)
    for name in kept:
        # A listed ckpt may still be lost by a crash of the node.
        catalog.make_durable(storage, name)
    return kept, is_furthest


def _superfluous(
    storage: Storage, generation: Generation, kept: list[str], ours: frozenset[int], *, is_full: bool
) -> list[str]:
    """What may be deleted, oldest first."""
    # A directory that has come further may be committed at this moment, by a life that was thought dead.
    remains = [name for name in catalog.uncommitted(storage, ours) if _reach(name) < _reach(kept[0])]
    committed = catalog.furthest_first(storage, generation) if is_full else []
    behind = committed[committed.index(kept[-1]) + 1 :] if kept[-1] in committed else []
    old = [name for name in behind if _age(name)[0] in ours]
    return sorted([*remains, *old], key=_age)


def _newest_whole(storage: Storage, committed: list[str], *, keep: int, bad: frozenset[str]) -> list[str]:
    kept: list[str] = []
    for name in committed:
        if len(kept) == keep:
            break
        if name in bad:
            continue
        try:
            catalog.whole(storage, name)
        except CkptCorrupt:
            continue
        except CkptMismatch:
            pass  # written by a newer version of the package: it counts
        kept.append(name)
    return kept


def _where_to_delete(storage: Storage, generation: Generation) -> frozenset[int]:
    earlier = generation.proven - {generation.number}
    if any(leaving_mark.is_leaving(storage, number) for number in earlier):
        return frozenset({generation.number})
    return generation.proven


def _delete(storage: Storage, name: str) -> None:
    storage.delete(manifest_name(name))
    # Before any part is deleted: else a crash could bring the manifest back without them.
    with suppress(StorageNotFoundError):
        storage.make_durable(name)
    storage.delete_all(name)


def _sweep(storage: Storage, generation: Generation, kept: list[str], ours: frozenset[int]) -> None:
    """What dead writers left: unfinished files, old marks and notes, files that a ckpt does not need."""
    began = storage.modified(names.record_name(generation.number))
    for directory in ("", names.GENERATIONS):
        for leftover in storage.leftovers(directory):
            written = storage.modified(leftover)
            # What is newer than our own record may belong to a life that is just beginning.
            if began is not None and written is not None and written < began:
                storage.delete_all(leftover)
    for number in ours - {generation.number}:
        # None of them is leaving any more: otherwise `ours` would be this generation alone.
        leaving_mark.unmark_leaving(storage, number)
    # What they say was logged when this life began.
    memory_note.forget_notes(storage, ours - {generation.number})
    for name in kept[1:]:
        if _age(name)[0] in ours:
            _sweep_ckpt(storage, name)


def _sweep_ckpt(storage: Storage, name: str) -> None:
    """Delete what the manifest of a ckpt does not name. No process writes there, because it is not the newest."""
    try:
        needed = {part.name for part in catalog.whole(storage, name).parts}
    except (CkptCorrupt, CkptMismatch):
        return
    ours = [found for found in storage.list(name) if is_part_name(found) or parse_rank_record_name(found) is not None]
    for found in ours:
        if found not in needed:
            storage.delete(file_in(name, found))
    for leftover in storage.leftovers(name):
        storage.delete_all(leftover)


def _make_durable(storage: Storage) -> None:
    try:
        storage.make_durable()
    except StorageError as error:
        log("retention_failed", level=logging.WARNING, error=error)


def _age(name: str) -> tuple[int, int]:
    return parse_ckpt_name(name) or (0, 0)


def _reach(name: str) -> tuple[int, int]:
    generation, step = _age(name)
    return step, generation
