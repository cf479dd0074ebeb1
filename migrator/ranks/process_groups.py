"""Makes it safe for a script to destroy its process group and make another one in the same process.

If rank 0 serves the job's store, the server runs as long as this life needs it, and keeps the keys of the destroyed
group. torch uses the same server and the same key names for the next group, so gloo would read old addresses, connect
to ports where nobody listens, and hang. So each further group gets a key prefix of its own.

The price: all processes of such a group must have called `listening()`, and their number must not change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import distributed

from migrator.errors import UsageError


class Regroup:
    """Adds a prefix to the keys of every process group that is made from now on."""

    def __init__(self, nonce: str, rank: int, size: int) -> None:
        self._module: Any = vars(distributed)["distributed_c10d"]
        self._before = before = self._module.rendezvous
        prefixed: Any = distributed.PrefixStore  # type: ignore[attr-defined]
        groups = 0

        def rendezvous(url: str, rank_now: int = -1, size_now: int = -1, **more: Any) -> Iterator[tuple[Any, int, int]]:
            nonlocal groups
            groups += 1  # equal on all ranks, since all of them make each group together
            said = (rank_now, "RANK", rank), (size_now, "WORLD_SIZE", size)
            # Checked before connecting, because the address may be that of this life's store.
            _check(rank, size, *(_said(given, name, known) for given, name, known in said))
            for store, rank_found, size_found in before(url, rank_now, size_now, **more):
                _check(rank, size, rank_found, size_found)
                yield prefixed(f"migrator/{nonce}/group {groups}", store), rank_found, size_found

        self._module.rendezvous = rendezvous

    def remove(self) -> None:
        self._module.rendezvous = self._before


def _said(given: int, variable: str, known: int) -> int:
    """The argument, else the environment variable, else the known value."""
    found = os.environ.get(variable, "")
    return given if given != -1 else int(found) if found.isdecimal() else known


def _check(rank: int, size: int, rank_now: int, size_now: int) -> None:
    if (rank_now, size_now) != (rank, size):
        raise UsageError(
            f"init_process_group(): this process is rank {rank_now} of {size_now} now, and was rank {rank} of {size} "
            "in listening(). Call migrator.close() before you make the new group, and register() and listening() "
            "after it; or start new processes, which resume on any number of ranks."
        )
