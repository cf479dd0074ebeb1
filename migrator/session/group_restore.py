"""Reading one ckpt into everything registered, on all ranks.

A ckpt counts as loaded when every rank has verified every byte of it. One that a single rank
cannot use is used by none.
"""

from __future__ import annotations

from typing import Any

from migrator.ckpt import catalog, codec
from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest
from migrator.ckpt.names import manifest_name
from migrator.errors import CkptCorrupt, CkptMismatch, MigratorError, RanksError
from migrator.ranks import large_values
from migrator.session import restore
from migrator.session.rank_group import RankGroup
from migrator.session.restore_plan import Loaded, RestorePlan
from migrator.state.registry import Registry
from migrator.storage.base import Storage

_LOAD_S = 1800.0
"""Maximum time, in seconds, that a rank that has loaded waits for the other ranks to have loaded."""


class GroupRestore:
    """One rank's part in it."""

    def __init__(self, group: RankGroup, storage: Storage, registry: Registry) -> None:
        self._group = group
        self._ranks = group.ranks
        self._storage = storage
        self._registry = registry
        self._loads = 0
        if group.shares_root:
            storage.read_with_others()

    def load(self, name: str) -> Loaded:
        """Load this ckpt on all ranks, or raise on all of them."""
        self._loads += 1
        self._ranks.hurry()
        what, bad, fatal = f"load {self._loads} {name}", "", ""
        loaded: Loaded | None = None
        error: Exception | None = None
        try:
            if self._group.shares_root:
                loaded = restore.load(self._storage, name, self._registry, rank=self._ranks.rank, size=self._ranks.size)
            else:
                loaded = self._load_apart(name, what)
        except CkptCorrupt as found:
            error, bad = found, str(found)
        except Exception as found:
            error, fatal = found, f"{type(found).__name__}: {found}"
        self._ranks.tell(what, {"bad": bad, "fatal": fatal}, topic=what)
        verdict = self._group.agree(what, what, _worst, "each rank has to call load_ckpt()", at_most_s=_LOAD_S)
        self._ranks.relax()
        if fatal and error is not None:
            raise error
        if verdict["fatal"]:
            raise CkptMismatch(f"rank {verdict['rank']} could not load {name}: {verdict['fatal']}")
        if verdict["bad"]:
            raise error or CkptCorrupt(f"rank {verdict['rank']} found {verdict['bad']}")
        assert loaded is not None
        return loaded

    def _load_apart(self, name: str, what: str) -> Loaded:
        """Rank 0 reads. The others get the manifest through the job's store and the tensors by the process group."""
        from torch import distributed

        ranks, key = self._ranks, self._ranks.key(what)
        tensors: dict[str, Any] = {}
        if ranks.rank == 0:
            try:
                manifest = catalog.whole(self._storage, name)
                data = self._storage.get(manifest_name(name), limit=MANIFEST_LIMIT)
                tensors = restore.read(self._storage, manifest, {})
                catalog.make_durable(self._storage, name)
            except MigratorError as error:
                ranks.tell(f"{what} read", {"bad": str(error)})
                raise
            if ranks.call(lambda store: large_values.put(store, key, data), timeout_s=_LOAD_S) is None:
                raise RanksError("the job's store does not answer: the ckpt cannot be handed to the other ranks")
            ranks.tell(f"{what} read", {"tensors": restore.described(tensors)})
        found = ranks.gather(f"{what} read", "rank 0 reads the ckpt", of={0}, at_most_s=_LOAD_S)[0]
        if "bad" in found:
            raise CkptCorrupt(f"rank 0 found {found['bad']}")
        try:
            if ranks.rank != 0:
                data = ranks.call(lambda store: large_values.get(store, key), timeout_s=_LOAD_S)
                if data is None:
                    gone = "ended" if ranks.store_is_unreachable else "did not answer"
                    raise RanksError(f"the job's store {gone} while the ckpt was handed over")
                manifest = Manifest.from_bytes(data)
                tensors = restore.made(found["tensors"])
        except Exception:
            ranks.tell(f"{what} ready", False, topic=what)
            raise
        # From here on all ranks do the same or none does: a collective cannot be given up halfway.
        ranks.tell(f"{what} ready", True, topic=what)
        ready: dict[str, bool] = self._group.agree(
            f"{what} ready", what, dict, "each rank makes room for the ckpt", at_most_s=_LOAD_S
        )
        if ranks.rank == 0:
            ranks.later(lambda store: large_values.delete(store, key))
        if not all(ready.values()):
            raise RanksError(f"not all ranks could make room for {name}")
        group = distributed.new_group(backend="gloo")
        for tensor in tensors.values():
            distributed.broadcast(codec.as_bytes(tensor), src=0, group=group)
        distributed.destroy_process_group(group)
        plan = RestorePlan(manifest, self._registry, rank=ranks.rank, size=ranks.size)
        return plan.restore(tensors)


def _worst(votes: dict[int, dict[str, str]]) -> dict[str, Any]:
    """Of the reports of all ranks on a ckpt, the first reason not to use it, if there is one."""
    for kind in ("fatal", "bad"):
        for rank, vote in votes.items():
            if vote[kind]:
                return {"rank": rank, "fatal": "", "bad": "", kind: vote[kind]}
    return {"rank": 0, "fatal": "", "bad": ""}
