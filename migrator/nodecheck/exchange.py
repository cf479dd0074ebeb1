"""How the ranks of a node check exchange what they found: through the job's store, never by a collective.

A collective needs all ranks, and the check exists because one of them may be dead.
Each rank writes its report under its own key. The rank that reports last writes the
*minutes*: all reports, in one value. If a rank stays silent, any rank writes the minutes
at the deadline. The first minutes count (`compare_set`), and all ranks decide by them, so
all come to the same verdict.

The ranks meet under a name that is new each time, since an agent's store still holds
the keys of earlier lives. Rank 0 draws the name, and lists the id of each rank that has
answered. A rank that finds its own id in the list knows that rank 0 means this life.

The price: without the store there are no minutes. Then each rank says what it knows by
itself: the host of the store is lost.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from migrator.errors import RanksError
from migrator.nodecheck.waiting import StillRunning, Waiter

Value = TypeVar("Value")
Reports = dict[int, dict[str, Any]]
"""What ranks have said, by rank."""

ANSWER_S = 10.0
"""Maximum time, in seconds, that the store may take to answer a call that waits for nothing."""
_FIRST_LOOK_S, _LOOK_S = 0.01, 0.25
"""Time, in seconds, between two looks for a key: at first, and at most. The store's own wait prints a warning with a
stack when its time is over."""
_LEAVE_S = 5.0
"""Maximum time, in seconds, that a rank stays until all others have read the minutes too."""
AGENT = "torchrun's agent"
"""Who serves the store under torchrun, unless rank 0 does."""
_OPENED = "migrator/nodecheck/opened"
"""The key of the name that rank 0 has drawn."""


class StoreLost(Exception):  # noqa: N818 - the name says what was found
    """The job's store does not answer, or the connection to it broke."""


class NotInTime(Exception):  # noqa: N818
    """Rank 0 has not come, or went on without this rank."""


class StoodStill(Exception):  # noqa: N818
    """This process was frozen for so long that the others have gone on without it."""


@dataclass(frozen=True)
class Place:
    """This rank, and the job's store."""

    rank: int
    size: int
    host: str = ""
    port: int = 0
    server: str = "rank 0"
    """Who serves the store, for messages."""
    serves: bool = False
    """This rank has to start the store for the check."""
    ends_with_check: bool = False
    """Rank 0 serves the store for the check alone. The script behind the check may use the same port."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}" if self.host else "none"


class Exchange:
    """The store, as one rank uses it during one check."""

    def __init__(self, place: Place, waiter: Waiter, *, answer_s: float = ANSWER_S) -> None:
        self._place = place
        self._waiter = waiter
        self._answer_s = answer_s
        self._server: Any = None
        self._store: Any = None
        self._name = ""

    def connect(self, timeout_s: float) -> None:
        """Connect to the store; on the rank that serves it, start it."""
        place = self._place
        if place.serves:
            try:
                self._server = self._ask("start the store", lambda: self._new(timeout_s, is_master=True), timeout_s)
            except StoreLost as error:
                # Mostly a wrong setting, and not a node that has to be replaced.
                raise RanksError(
                    f"rank 0 cannot serve the store of the node check at port {place.port} ({error}). MASTER_ADDR has "
                    "to be the address of rank 0, and no other process may use MASTER_PORT there."
                ) from error
        self._store = self._ask("connect to the store", lambda: self._new(timeout_s), timeout_s)

    def store_for_group(self, group: str) -> Any:
        """A connection of its own for the process group of one round, and keys of its own.

        One connection serves one call at a time, so a group that hangs would hold back the reports.
        """
        # Without a server this is refused at once; the store's own client would retry until its timeout.
        socket.create_connection((self._place.host, self._place.port), timeout=self._answer_s).close()
        prefixed: Any = distributed.PrefixStore  # type: ignore[attr-defined]
        return prefixed(f"{self._name}/{group}", self._new(self._answer_s))

    def arrive(self, note: Mapping[str, Any], timeout_s: float) -> Reports:
        """Meet the other ranks: the notes of all that have come in time.

        `NotInTime`: rank 0 has not come, or goes on without this rank.
        """
        end_s = time.monotonic() + timeout_s
        mine = {"id": uuid.uuid4().hex, "note": dict(note)}
        # Rank 0 waits for late ranks until its deadline, and may have come last itself.
        met = self._open(mine, end_s) if self._place.rank == 0 else self._answer_rank_0(mine, end_s + self._answer_s)
        return {rank: said["note"] for rank, said in met.items()}

    def _open(self, mine: Mapping[str, Any], end_s: float) -> Reports:
        self._name = f"migrator/nodecheck/{mine['id']}"
        hello = {rank: f"{self._name}/hello/{rank}" for rank in range(self._place.size)}
        self._set(hello[0], mine)
        self._ask("open the check", lambda: self._store.set(_OPENED, str(mine["id"])))
        self._wait_for(hello.values(), end_s)
        met = self._those_there(hello)
        self._set(f"{self._name}/begin", met)
        return met

    def _answer_rank_0(self, mine: Mapping[str, Any], end_s: float) -> Reports:
        rank, seen = self._place.rank, ""
        for _ in self._looks(end_s):
            if not self._has(_OPENED):
                continue
            opened = self._get(_OPENED).decode()
            if opened != seen:
                seen, self._name = opened, f"migrator/nodecheck/{opened}"
                self._set(f"{self._name}/hello/{rank}", mine)
            if not self._has(f"{self._name}/begin"):
                continue
            met = _by_rank(self._get(f"{self._name}/begin"))
            # Otherwise the name is that of an earlier life, whose keys an agent's store keeps.
            if met.get(rank, {}).get("id") == mine["id"]:
                return met
        raise NotInTime("rank 0 did not begin the check with this rank in time")

    def gather(self, topic: str, report: Mapping[str, Any], timeout_s: float) -> Reports:
        """The minutes of this topic: the reports of all ranks that have reported in time, the same on all ranks.

        `StoodStill`: this rank has missed the others, or they have missed the store that it serves.
        """
        end_s = time.monotonic() + timeout_s
        keys = {rank: f"{self._name}/{topic}/{rank}" for rank in range(self._place.size)}
        self._set(keys[self._place.rank], report)
        count = self._ask("count the reports", lambda: self._store.add(f"{self._name}/{topic}/count", 1))
        has_all = count == self._place.size
        has_minutes = not has_all and self._wait_for([self._minutes(topic)], end_s)
        stood_still_s = self._waiter.stood_still_s
        is_host = self._place.rank == 0 and self._place.server != AGENT
        if stood_still_s > self._answer_s and (is_host or not (has_all or has_minutes)):
            raise StoodStill(f"it stood still for {stood_still_s:.1f} s")
        if has_minutes:
            return _by_rank(self._get(self._minutes(topic)))
        found = json.dumps(self._those_there(keys))
        # The first one counts, also if another rank has seen more or fewer reports.
        return _by_rank(
            self._ask("write the minutes", lambda: self._store.compare_set(self._minutes(topic), "", found))
        )

    def has_minutes(self, topic: str) -> bool:
        """The other ranks are through with this topic."""
        return self._has(self._minutes(topic))

    def leave(self, readers: Iterable[int], *, is_end: bool) -> None:
        """Keep the store until all readers have read the minutes, at most `_LEAVE_S`.

        `is_end`: this process ends, and the store may end with it or with its agent.
        """
        place, all_left, expected = self._place, f"{self._name}/all left", {*readers}
        if place.rank not in expected or not (is_end or place.ends_with_check):
            return
        try:
            # The script behind the check may serve a store at the same port. It must not be looked for at this one.
            watched = None if place.serves or is_end or not place.ends_with_check else self._watch_server()
            left = self._ask("leave", lambda: self._store.add(f"{self._name}/left", 1))
            if left >= len(expected):
                self._ask("leave", lambda: self._store.set(all_left, "1"))
            if place.rank == 0 or place.server == AGENT:
                self._wait_for([all_left], time.monotonic() + _LEAVE_S)
            if watched is not None:
                self._end_of(watched)
        except StoreLost:
            pass  # The verdict stands.

    def _watch_server(self) -> socket.socket:
        """A connection that says nothing: it is closed when the server ends.

        The store's own client would print a warning with a stack then.
        """
        try:
            return socket.create_connection((self._place.host, self._place.port), timeout=self._answer_s)
        except OSError as error:
            raise StoreLost(str(error)) from error

    def _end_of(self, watched: socket.socket) -> None:
        self.close()
        with watched, contextlib.suppress(OSError):
            watched.settimeout(_LEAVE_S)
            watched.recv(1)

    def close(self) -> None:
        """End the server, if this rank has it, and the connections."""
        held = [self._store, self._server]
        self._store = self._server = None
        try:
            self._ask("close the store", held.clear)
        except StoreLost:
            pass

    def _minutes(self, topic: str) -> str:
        return f"{self._name}/{topic}/minutes"

    def _new(self, timeout_s: float, *, is_master: bool = False) -> Any:
        place, timeout = self._place, timedelta(seconds=timeout_s)
        store: Any = vars(distributed)["TCPStore"]
        return store(place.host, place.port, None, is_master, timeout=timeout, wait_for_workers=False)

    def _set(self, key: str, value: Mapping[Any, Any]) -> None:
        self._ask("write a report", lambda: self._store.set(key, json.dumps(value)))

    def _get(self, key: str) -> bytes:
        found: bytes = self._ask("read a report", lambda: self._store.get(key))
        return found

    def _those_there(self, keys: Mapping[int, str]) -> Reports:
        def read() -> Reports:
            return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

        return self._ask("read the reports", read)

    def _has(self, *keys: str) -> bool:
        return self._ask("look for a report", lambda: bool(self._store.check([*keys])))

    def _wait_for(self, keys: Iterable[str], end_s: float) -> bool:
        """Whether all keys are there before the deadline."""
        wanted = [*keys]
        return any(self._has(*wanted) for _ in self._looks(end_s))

    def _looks(self, end_s: float) -> Iterator[None]:
        """Once, and then again and again until the deadline."""
        pause_s = _FIRST_LOOK_S
        yield
        while (left_s := end_s - time.monotonic()) > 0:
            self._waiter.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LOOK_S)
            yield

    def _ask(self, what: str, call: Callable[[], Value], waits_s: float = 0.0) -> Value:
        """Call the store. `waits_s`: the time, in seconds, that the call itself may wait."""
        where = f"the job's store at {self._place.address}, which {self._place.server} serves,"
        try:
            return self._waiter.within(waits_s + self._answer_s, what, call)
        except StillRunning as error:
            raise StoreLost(f"{where} does not answer ({error})") from error
        except (RuntimeError, OSError, ValueError) as error:
            raise StoreLost(f"{where} is lost ({what}: {_first_line(error)})") from error


def _by_rank(text: bytes) -> Reports:
    return {int(rank): said for rank, said in json.loads(text).items()}


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
