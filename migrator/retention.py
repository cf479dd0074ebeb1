"""Which ckpts are deleted, and above all which are not.

Nothing is deleted before what replaces it is whole and durable. A life deletes in
its own generation, and in earlier ones of its lineage once none of them can still
be saving; if a later life exists it deletes nothing at all: it may be the one that
was thought dead. Other lineages are never touched.

Of a ckpt the manifest goes first: from then on it does not exist, and a crash leaves
only bytes that the next commit sweeps, never a ckpt with a part missing.

A failure here costs room on the volume, so it is told and never raised.
"""

from __future__ import annotations

import logging

from migrator import lineage
from migrator.errors import CkptCorrupt, CkptMismatch, StorageError
from migrator.events import log
from migrator.lineage import Generation
from migrator.manifest import NAME, parse_ckpt_name
from migrator.storage import LocalStorage


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
        for name in _superfluous(storage, generation, keep=max(1, keep), bad=bad):
            if name == current or not (sweeps or NAME in storage.list(name)):
                continue
            _delete(storage, name)
            gone.append(name)
        if gone:
            storage.sync_directory()
    except StorageError as error:
        log("retention_failed", level=logging.WARNING, error=error)
    if gone:
        log("retired", ckpts=",".join(gone))
    return gone


def _superfluous(storage: LocalStorage, generation: Generation, *, keep: int, bad: frozenset[str]) -> list[str]:
    """What may go, oldest first."""
    if max(lineage.numbers(storage), default=0) > generation.number:
        return []
    committed = lineage.ckpts(storage, generation.lineage)
    kept = _newest_whole(storage, committed, keep=keep, bad=bad)
    if not kept or _age(kept[0])[0] != generation.number:
        # What was there before stays until this life has shown that it can commit.
        return []
    for name in kept:
        # That they can be listed does not mean that a node crash leaves them there.
        storage.sync_directory(name)
    storage.sync_directory()
    ours = _where_to_delete(storage, generation)
    remains = [name for name in lineage.uncommitted(storage, ours) if _age(name) < _age(kept[0])]
    old = [name for name in committed if _age(name) < _age(kept[-1])] if len(kept) == keep else []
    return sorted([*remains, *(name for name in old if _age(name)[0] in ours)], key=_age)


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


def _age(name: str) -> tuple[int, int]:
    return parse_ckpt_name(name) or (0, 0)
