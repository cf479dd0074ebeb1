"""How records reach rank 0 from ranks that do not see the root: through the job's store."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from migrator.errors import SaveFailed
from migrator.ranks import large_values
from migrator.ranks.peers import Peers


class ThroughStore:
    """The exchange of a job whose root only rank 0 sees. It writes for all."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks

    def _key(self, ckpt: str, rank: int) -> str:
        return self._ranks.key(f"record/{ckpt}/{rank}")

    def forget(self, ckpt: str) -> None:
        """It is committed: its manifest has what the records said."""
        for rank in range(self._ranks.size):
            self._ranks.later(partial(large_values.delete, key=self._key(ckpt, rank)))

    def put(self, ckpt: str, rank: int, data: bytes) -> None:
        key = self._key(ckpt, rank)
        if self._ranks.call(lambda store: large_values.put(store, key, data)) is None:
            raise SaveFailed("the job's store does not answer, and this rank does not see the root of the ckpts")

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        found = {}
        for rank in sorted(ranks):
            data = self._ranks.call(partial(_found, self._key(ckpt, rank)))
            if data:
                found[rank] = data
        return found

    def is_committed(self, ckpt: str) -> bool:
        return any(json.loads(line.info)["ckpt"] == ckpt for line in self._ranks.lines("saved"))


def _found(key: str, store: Any) -> bytes:
    return large_values.get(store, key) if store.check([key]) else b""
