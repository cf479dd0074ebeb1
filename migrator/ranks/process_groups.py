"""A script that destroys its process group and makes another one, in the same process.

Where rank 0 serves the job's store, the store stays there as long as this life needs it, with the keys of the group
that was destroyed. torch gives the next group of the process the same server and the same names of keys, so gloo would
connect to addresses that nobody listens at any more, and hang. So each further group gets keys of its own.

The price: a process that does not listen cannot be in such a group, and neither can another number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import distributed

from migrator.errors import UsageError


class Regroup:
    """Every process group that is made from now on."""

    def __init__(self, nonce: str, rank: int, size: int) -> None:
        self._module: Any = vars(distributed)["distributed_c10d"]
        self._before = before = self._module.rendezvous
        prefixed: Any = distributed.PrefixStore  # type: ignore[attr-defined]
        groups = 0

        def rendezvous(url: str, rank_now: int = -1, size_now: int = -1, **more: Any) -> Iterator[tuple[Any, int, int]]:
            nonlocal groups
            groups += 1  # on each rank alike: all of them make a group together
            said = (rank_now, "RANK", rank), (size_now, "WORLD_SIZE", size)
            # Before it is tried: the address may still be that of this life's store.
            _check(rank, size, *(_said(given, name, known) for given, name, known in said))
            for store, rank_found, size_found in before(url, rank_now, size_now, **more):
                _check(rank, size, rank_found, size_found)
                yield prefixed(f"migrator/{nonce}/group {groups}", store), rank_found, size_found

        self._module.rendezvous = rendezvous

    def remove(self) -> None:
        self._module.rendezvous = self._before


def _said(given: int, variable: str, known: int) -> int:
    """An argument, or what stands for it in the environment; where neither says it, what is known."""
    found = os.environ.get(variable, "")
    return given if given != -1 else int(found) if found.isdecimal() else known


def _check(rank: int, size: int, rank_now: int, size_now: int) -> None:
    if (rank_now, size_now) != (rank, size):
        raise UsageError(
            f"init_process_group(): this process is rank {rank_now} of {size_now} now, and was rank {rank} of {size} "
            "in listening(). Call migrator.close() before the group is made anew, and register() and listening() "
            "behind it; or start the processes anew, which resumes on any number of ranks."
        )
