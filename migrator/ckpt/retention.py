"""Which ckpts are deleted, and above all which are not.

Nothing is deleted before what replaces it is whole and durable. A life deletes in
its own generation, and in earlier ones of its lineage once none of them can still
be saving; if a later life exists it deletes nothing at all: it may be the one that
was thought dead. While another life has come further, it deletes in its own generation
only: the next life goes on from there. Other lineages are never touched.

Of a ckpt the manifest goes first: from then on it does not exist, and a crash leaves
only bytes that the next commit sweeps, never a ckpt with a part missing. What dead
writers left is swept on the same terms.

A failure here costs room on the volume, so it is told and never raised.
"""

from __future__ import annotations

import logging

from migrator.ckpt import generations as lineage
from migrator.errors import CkptCorrupt, CkptMismatch, StorageError
from migrator.events import log
from migrator.ckpt.generations import Generation
from migrator.ckpt.manifest import NAME, is_part_name, parse_ckpt_name
from migrator.ranks.shares import is_record_name
from migrator.storage.posix import LocalStorage


def retire(
    storage: LocalStorage,
    generation: Generation,
    *,
    keep: int,
    bad: frozenset[str] = frozenset(),
    current: str | None = None,
    sweeps: bool = True,
) -> list[str]:
    """After a commit: delete what the newest `keep` whole ckpts of the lineage make superfluous.

    `bad` ckpts turned out corrupt while loading: they do not count. `current` is being written.
    Without `sweeps` what was never committed stays: another rank may be about to commit it.
    Returns the names of what was deleted.
    """
    gone: list[str] = []
    try:
        kept, is_furthest = _kept(storage, generation, keep=max(1, keep), bad=bad)
        if not kept:
            return gone
        ours = _where_to_delete(storage, generation) if is_furthest else frozenset({generation.number})
        for name in _superfluous(storage, generation, kept, ours, is_full=len(kept) == max(1, keep)):
            if name == current or not (sweeps or NAME in storage.list(name)):
                continue
            if _is_fenced(storage, generation):
                return gone  # a later life has begun meanwhile, and may be loading
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


def _is_fenced(storage: LocalStorage, generation: Generation) -> bool:
    return max(lineage.numbers(storage), default=0) > generation.number


def _kept(storage: LocalStorage, generation: Generation, *, keep: int, bad: frozenset[str]) -> tuple[list[str], bool]:
    """The ckpts that stay, furthest first and durable, and whether this life has come furthest. None: all stay."""
    if _is_fenced(storage, generation):
        return [], False
    committed = lineage.furthest_first(storage, generation)
    kept = _newest_whole(storage, committed, keep=keep, bad=bad)
    is_furthest = bool(kept) and _age(kept[0])[0] == generation.number
    if not is_furthest:
        # What others saved stays until this life has shown that it can commit, and has come further.
        own = [name for name in committed if _age(name)[0] == generation.number]
        kept = _newest_whole(storage, own, keep=keep, bad=bad)
    for name in kept:
        # That they can be listed does not mean that a node crash leaves them there.
        lineage.make_durable(storage, name)
    return kept, is_furthest


def _superfluous(
    storage: LocalStorage, generation: Generation, kept: list[str], ours: frozenset[int], *, is_full: bool
) -> list[str]:
    """What may go, oldest first."""
    # What has come further may be committed this very moment, by a life that was thought dead, and would count.
    remains = [name for name in lineage.uncommitted(storage, ours) if _reach(name) < _reach(kept[0])]
    committed = lineage.furthest_first(storage, generation) if is_full else []
    behind = committed[committed.index(kept[-1]) + 1 :] if kept[-1] in committed else []
    old = [name for name in behind if _age(name)[0] in ours]
    return sorted([*remains, *old], key=_age)


def _newest_whole(storage: LocalStorage, committed: list[str], *, keep: int, bad: frozenset[str]) -> list[str]:
    kept: list[str] = []
    for name in committed:
        if len(kept) == keep:
            break
        if name in bad:
            continue
        try:
            lineage.whole(storage, name)
        except CkptCorrupt:
            continue
        except CkptMismatch:
            pass  # of a newer version of the package: not ours to judge, so it counts
        kept.append(name)
    return kept


def _where_to_delete(storage: LocalStorage, generation: Generation) -> frozenset[int]:
    earlier = generation.proven - {generation.number}
    if any(lineage.is_leaving(storage, number) for number in earlier):
        return frozenset({generation.number})
    return generation.proven


def _delete(storage: LocalStorage, name: str) -> None:
    storage.delete(f"{name}/{NAME}")
    # Before any part: else a crash could bring the manifest back without them.
    storage.sync_directory(name)
    storage.delete_directory(name)


def _sweep(storage: LocalStorage, generation: Generation, kept: list[str], ours: frozenset[int]) -> None:
    """What writers left behind that died: hidden files, marks that are over, what a ckpt does not need any more."""
    began = storage.modified(lineage.record_name(generation.number))
    for directory in ("", lineage.DIRECTORY):
        for name in storage.list(directory, aside=True):
            path = f"{directory}/{name}" if directory else name
            written = storage.modified(path)
            # A life that is beginning right now writes aside, too: what came after our own beginning may be its.
            if began is not None and written is not None and written < began:
                # A ckpt that was being deleted is a directory.
                storage.delete_directory(path)
    for number in ours - {generation.number}:
        # None of them is leaving any more: else only this generation would be ours.
        lineage.unmark_leaving(storage, number)
    for name in kept[1:]:
        if _age(name)[0] in ours:
            _sweep_ckpt(storage, name)


def _sweep_ckpt(storage: LocalStorage, name: str) -> None:
    """Of a ckpt that is not the newest nothing is needed but what its manifest names; nobody writes there."""
    try:
        needed = {part.name for part in lineage.whole(storage, name).parts}
    except (CkptCorrupt, CkptMismatch):
        return
    ours = [found for found in storage.list(name) if is_part_name(found) or is_record_name(found)]
    for found in (*(part for part in ours if part not in needed), *storage.list(name, aside=True)):
        storage.delete(f"{name}/{found}")


def _make_durable(storage: LocalStorage) -> None:
    try:
        storage.sync_directory()
    except StorageError as error:
        log("retention_failed", level=logging.WARNING, error=error)


def _age(name: str) -> tuple[int, int]:
    return parse_ckpt_name(name) or (0, 0)


def _reach(name: str) -> tuple[int, int]:
    generation, step = _age(name)
    return step, generation
