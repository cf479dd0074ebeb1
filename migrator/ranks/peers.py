"""The ranks of this job, and what they tell one another.

What all have to read is in one *shared log*: notices, orders, decisions. What only those need who decide or collect for
all (reports) is in logs of its own, which nobody else reads: a thousand ranks would otherwise fetch a thousand reports
each. All of it lies in the job's own store, the one the process group was made with, under a name that is new in each
life: keys of earlier lives are still there when an agent serves the store.

Each rank has one thread and one connection for it, so a store that does not answer (its host is frozen) holds back
nobody but this thread; the others see that no answer came and go on without. A second thread waits for the ring that
says that the log has grown (`bell.py`).

The training thread never waits for the store, but in `listening()` and `load_ckpt()`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from migrator.ranks import bell
from migrator.platform import container as environment
from migrator.ranks.protocol import Board, Line, Point
from migrator.errors import RanksError, UsageError
from migrator.events import log
from migrator.ranks.timing import GONE_S, HUNG_S, Pace
from migrator.ranks.shared_log import SharedLog

FEW = 16
"""So many ranks all read everything, and decide and collect as soon as they can. Of more, the lowest do."""
REPORTS = frozenset({"reach", "alone", "failed", "out", "bye"})
"""What is said to those who decide or collect for all."""
_PASSING = frozenset({"order", "missed", "saved"})
"""Lines that matter for one save. Of those only the last are kept."""
_KEPT = 64
_LAST = frozenset({"out", "bye"})
"""Behind these lines of all ranks the store may end."""
_LOOK_S = 0.2
"""A thread that waits for an answer looks so often whether it still may come; it is woken when it has."""
_HUNG_LOOKS = 8
_CONNECT_S = 20.0
_SAID_S = 0.5
"""Who was to say something for all has said it by then, or died before."""
_BELL_S = 1.0
_ASKED = 64
"""Of so many ranks that have not beaten yet it is asked at a time whether they have."""
_FIND_S = 0.5
_FIND_AT_MOST_S = 10.0
"""So long between two looks whether the store is there again."""
_RECONNECT_S = 1.0
_UNHEARD_S = 2.0
"""A line whose ring does not come in this time was written by a rank that died before it rang."""
_NOTHING_UNHEARD = (0, 0.0)


@dataclass(frozen=True)
class Once:
    """A line that one rank says for all who want to say it."""

    line: Line
    claim: str
    """Whoever comes first to this name says it."""
    is_said: Callable[[list[Line]], bool]
    """Whether it was said. Who claimed it may have died before."""


def place() -> tuple[int, int]:
    """(rank, size) of this process in its job."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"listening(): WORLD_SIZE={size}, but there is no process group, through which the ranks would agree on "
            "what they save. Call torch.distributed.init_process_group() before listening()."
        )
    return 0, 1


def join() -> Ranks:
    """Meet the others: all ranks call this at the same place. Main thread."""
    from torch import distributed

    rank, size = place()
    served = _store_of(distributed)
    host, port = served.host, served.port
    nonce = _handed_out(distributed, uuid.uuid4().hex[:16])
    connect = functools.partial(_connected, distributed, host, port)
    try:
        store, waiting = connect(_CONNECT_S)
    except (OSError, RuntimeError, ValueError) as error:
        raise RanksError(
            f"listening(): the job's store at {host}:{port} does not answer ({error}). "
            "It is served by rank 0, or by the agent of torchrun: see whether that is still there."
        ) from error
    return Ranks(rank, size, nonce, store, waiting=waiting, connect=connect, served=served)


def _connected(distributed: Any, host: str, port: int, timeout_s: float) -> tuple[Any, Any]:
    """A connection to ask by, and one to wait by."""
    # Where nobody listens this is refused at once; the store's own client would try again and again.
    socket.create_connection((host, port), timeout=timeout_s).close()
    timeout = timedelta(seconds=timeout_s)
    first = distributed.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    return first, distributed.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)


def _store_of(distributed: Any) -> Any:
    """The store that the process group was made with."""
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):
        raise UsageError(
            f"listening(): the process group was made with a {type(store).__name__}; the ranks can agree only through "
            "a TCPStore. Use init_process_group() with env:// (the default, torchrun's) or tcp://."
        )
    return store


def _handed_out(distributed: Any, nonce: str) -> str:
    """Rank 0's word on all ranks."""
    import torch

    device = "cpu"
    if "nccl" in distributed.get_backend():
        device = f"cuda:{torch.cuda.current_device()}"
    told = torch.tensor(list(nonce.encode("ascii")), dtype=torch.uint8, device=device)
    distributed.broadcast(told, src=0)
    return bytes(told.tolist()).decode("ascii")


class Ranks(threading.Thread):
    """One thread, one connection, one `close()`; and the bell's. Nobody else touches the store."""

    def __init__(
        self,
        rank: int,
        size: int,
        nonce: str,
        store: Any,
        *,
        waiting: Any = None,
        connect: Callable[[float], tuple[Any, Any]] | None = None,
        served: Any = None,
    ) -> None:
        super().__init__(name="migrator-ranks", daemon=True)
        self.rank = rank
        self.size = size
        self.nonce = nonce
        self.pace = Pace(size)
        self.is_busy = False
        self.advanced = 0
        """Grows whenever this rank writes something, or sees that others do; the beats tell it."""
        self.on_lines: Callable[[list[Line]], None] = lambda _: None
        """Called in this thread with what is new in the log."""
        self.left_s: Callable[[], float | None] = lambda: None
        """The time left, if this rank must leave."""
        self._store = store
        self._connect = connect
        # On rank 0 the server may live in this object: it must outlive a script that destroys its process group.
        self._served = served
        self._bell = None if waiting is None else bell.Bell(waiting, self.key("bell"), rank, self._rung)
        self._all = SharedLog(store, self.key("log"))
        self._reports: dict[str, SharedLog] = {}
        self._followed: tuple[str, ...] = ()
        self._cond = threading.Condition()
        self._outbox: list[Line | Once] = []
        self._calls: list[tuple[Callable[[Any], Any], list[Any]]] = []
        self._late: list[tuple[float, Once]] = []
        self._sent = 0
        self._lines: list[Line] = []
        self._board: Board | None = None
        self._is_rung = False
        self._unheard = _NOTHING_UNHEARD
        self._claims: collections.deque[str] = collections.deque()
        self._has_read: set[str] = set()
        self._calling_since: float | None = None
        self._hung = (0.0, 0)
        self._is_lost = False
        self._is_closed = False
        self.is_done = False
        """This rank does not need the store any more: its script has ended, or all that it had to say is said."""
        self._beat = 0
        self._next_beat_s = 0.0
        self._beating: set[int] = set()
        self._next_asked = 0
        self._beats: dict[int, _Beat] = {}
        if rank == 0 or size <= FEW:
            self.follow("leave")

    def start(self) -> None:
        super().start()
        if self._bell is not None:
            self._bell.start()
        # Also where `listening()` fails on its way.
        atexit.register(self.close)

    # What other threads ask.

    @property
    def board(self) -> Board:
        """What was read so far."""
        with self._cond:
            if self._board is None:
                self._board = Board(tuple(self._lines))
            return self._board

    def lines(self, what: str) -> list[Line]:
        return self.board.named(what)

    @property
    def is_cut_off(self) -> bool:
        """The connection to the store broke; it may be slow otherwise."""
        return self._is_lost

    @property
    def is_lost(self) -> bool:
        """The store is gone, or does not answer."""
        since = self._calling_since
        if self._is_lost or since is None:
            return self._is_lost
        # A busy interpreter may keep this thread from noticing an answer that is there, and then
        # keeps the one that asks here as well: so count how often was asked, too.
        before, looks = self._hung
        self._hung = (since, looks + 1 if since == before else 1)
        return time.monotonic() - since > self.pace.hung_s(self.left_s()) and self._hung[1] > _HUNG_LOOKS

    def post(self, line: Line | Once, *, timeout_s: float | None = None) -> bool:
        """Say something. True: it was said, here or by another rank, and what had been said before was read."""
        patience_s = self.pace.hung_s(self.left_s()) if timeout_s is None else timeout_s
        with self._cond:
            # What nobody waits for goes out when the store is back.
            if self._is_closed or (self._is_lost and timeout_s != 0):
                return False
            self._outbox.append(line)
            mine = self._sent + len(self._outbox)
            self._cond.notify_all()
            end_s = time.monotonic() + patience_s
            while self._sent < mine and not self._is_gone(timeout_s) and time.monotonic() < end_s:
                self._cond.wait(_LOOK_S)
            return self._sent >= mine

    def call(self, what: Callable[[Any], Any], *, timeout_s: float | None = None) -> Any:
        """What `what(store)` returns, called in this thread; None if that takes too long or the store is gone."""
        answer: list[Any] = []
        patience_s = self.pace.hung_s(self.left_s()) if timeout_s is None else timeout_s
        with self._cond:
            self._calls.append((what, answer))
            self._cond.notify_all()
            end_s = time.monotonic() + patience_s
            while not answer and not self._is_gone(timeout_s) and not self._is_closed and time.monotonic() < end_s:
                self._cond.wait(_LOOK_S)
        return answer[0] if answer else None

    def _is_gone(self, timeout_s: float | None) -> bool:
        """The store is lost; whoever has patience takes one that only hangs for slow."""
        return self._is_lost if timeout_s is not None and timeout_s > HUNG_S else self.is_lost

    def wait(self, timeout_s: float) -> None:
        """Until there is something new to read, but not for long."""
        with self._cond:
            self._cond.wait(timeout_s)

    def follow(self, topic: str) -> None:
        """Read the reports of this topic from now on, those from before as well."""
        with self._cond:
            if topic not in self._followed:
                self._reports.setdefault(topic, SharedLog(self._store, self.key(topic)))
                self._followed = (*self._followed, topic)
                self._cond.notify_all()

    def unfollow(self, topic: str) -> None:
        with self._cond:
            self._followed = tuple(other for other in self._followed if other != topic)

    def has_read(self, topic: str) -> bool:
        """Whether the reports of this topic were read, at least once."""
        return topic in self._has_read

    def is_alive_there(self, rank: int) -> bool:
        """Whether another rank showed signs of life lately; only known while busy."""
        return self._silence_s(rank) < self.pace.stale_s

    def advanced_there(self, rank: int) -> int:
        """How often another rank has said that it goes on."""
        with self._cond:
            return self._watched(rank).advanced

    def _silence_s(self, rank: int) -> float:
        """Counted as far as the store answered: its silence says nothing of the rank."""
        with self._cond:
            beat = self._watched(rank)
            return beat.read_s - beat.changed_s

    def _watched(self, rank: int) -> _Beat:
        return self._beats.setdefault(rank, _Beat(time.monotonic()))

    def gather(
        self, what: str, why: str, *, of: set[int] | None = None, at_most_s: float = float("inf"), topic: str = ""
    ) -> dict[int, Any]:
        """Wait until each rank has posted such a line; what they say by rank. Main thread.

        Nobody is waited for who shows no sign of life.
        """
        wanted = set(range(self.size)) if of is None else of
        end_s = time.monotonic() + at_most_s
        self.hurry()
        # That one has ended is a report, too.
        topics = {topic, "leave"} - {"", *self._followed}
        for one in topics:
            self.follow(one)
        try:
            while True:
                found = {line.rank: line.info for line in reversed(self.lines(what))}
                missing = wanted - found.keys()
                if not missing:
                    return {rank: json.loads(found[rank]) for rank in sorted(wanted)}
                ended = {line.rank for line in self.lines("bye")}
                silent = sorted(rank for rank in missing if rank in ended or self._silence_s(rank) > GONE_S)
                if self._is_lost or silent or time.monotonic() > end_s:
                    who = ", ".join(map(str, silent or sorted(missing)))
                    lost = "the job's store does not answer; " if self._is_lost else ""
                    raise RanksError(f"{lost}waited for rank {who} in vain: {why}")
                self.wait(0.05)
        finally:
            for one in topics:
                self.unfollow(one)

    def said_in(self, topic: str) -> dict[int, Any]:
        """What was said in this topic so far, by rank. Main thread."""
        texts = self.call(lambda _: self._log_of(topic).read(), timeout_s=GONE_S)
        if texts is None:
            raise RanksError("the job's store does not answer: see whether rank 0, or the agent of torchrun, is there")
        return {line.rank: json.loads(line.info) for line in _lines_of(texts)}

    def tell(self, what: str, info: Any, *, topic: str = "") -> None:
        """Post a line with anything JSON can hold; `RanksError` if that cannot be done."""
        line = Line(what, self.rank, info=json.dumps(info))
        if topic:
            is_there = self.call(lambda store: self._log_of(topic).post(line.to_text()), timeout_s=GONE_S) is not None
        else:
            is_there = self.post(line, timeout_s=GONE_S)
        if not is_there:
            raise RanksError("the job's store does not answer: see whether rank 0, or the agent of torchrun, is there")

    def tell_news(self, deadline_s: float) -> None:
        """This pod must leave, and so the others with it. Of many ranks that are told at once one says so."""
        self.hurry()
        left_s = round(deadline_s - time.monotonic(), 3)
        line = Line("news", self.rank, info=json.dumps({"grace_left_s": left_s}))
        # An earlier deadline is news as well.
        claim = f"news/{int(left_s)}"
        said_s = time.monotonic()

        def is_said(lines: list[Line]) -> bool:
            left = [_left_s(other) for other in lines if other.what == "news"]
            return any(other < left_s + (time.monotonic() - said_s) + 1.0 for other in left)

        self.post(Once(line, claim, is_said), timeout_s=0)

    def hurry(self) -> None:
        """Something is going on: look often, and show that this rank is alive."""
        with self._cond:
            if not self.is_busy:
                now_s = time.monotonic()
                for beat in self._beats.values():
                    beat.changed_s = beat.read_s = now_s
            self.is_busy = True
            self._cond.notify_all()

    def relax(self) -> None:
        """What made this rank busy is over."""
        self.is_busy = False

    def later(self, what: Callable[[Any], Any]) -> None:
        """Call `what(store)` in this thread; nobody waits for it."""
        with self._cond:
            self._calls.append((what, []))
            self._cond.notify_all()

    def forget_old(self) -> None:
        """A save of all ranks is committed, so all have read what was said before it. One rank deletes that."""
        self.later(lambda _: self._all.trim(_KEPT))

    def key(self, what: str) -> str:
        """A key of this life."""
        return f"migrator/{self.nonce}/{what}"

    def key_of(self, what: str, point: Point) -> str:
        return self.key(f"{what}/{point[0]}.{point[1]}")

    # The threads.

    def _rung(self) -> None:
        with self._cond:
            self._is_rung = True
            self._cond.notify_all()

    def _pause_s(self) -> float:
        if not self.is_busy:
            return self.pace.idle_look_s
        return self.pace.busy_look_s(leads=self.rank == 0 or bool(self._followed))

    def run(self) -> None:
        while True:
            with self._cond:
                if not (self._outbox or self._calls or self._is_rung or self._is_closed):
                    self._cond.wait(self._pause_s())
                out = list(self._outbox)
                calls, self._calls = self._calls, []
                was_rung, self._is_rung = self._is_rung, False
                if self._is_closed and not out:
                    return
            fresh: list[Line] = []
            reports: list[Line] = []
            try:
                self._calling_since = time.monotonic()
                self._exchange(out, fresh, reports)
                for what, answer in calls:
                    self._calling_since = time.monotonic()
                    answer.append(what(self._store))
                self._calling_since = time.monotonic()
                self._see_to_bell(is_unheard=bool(fresh) and not was_rung and not out)
                self._calling_since = None
            except Exception as error:  # whatever it is, the others must be able to go on without the store
                self._take_in(fresh, reports)  # it is not fetched again
                self._lose(error)
                if not self._find_again():
                    return
                continue
            with self._cond:
                self._outbox = self._outbox[len(out) :]
                self._sent += len(out)
                if out or calls:
                    self._cond.notify_all()
            self._take_in(fresh, reports)

    def _take_in(self, fresh: list[Line], reports: list[Line]) -> None:
        if fresh or reports:
            with self._cond:
                self._lines = _shortened(self._lines + fresh + reports)
                self._board = None
                self._cond.notify_all()
        if fresh:
            self._hand_on(fresh)

    def _hand_on(self, fresh: list[Line]) -> None:
        try:
            self.on_lines(fresh)
        except Exception as error:  # this thread must live on: the others wait for what it posts
            log("watch_weak", level=logging.WARNING, way="board", error=repr(error))

    def _exchange(self, out: list[Line | Once], fresh: list[Line], reports: list[Line]) -> None:
        """Say what is to be said, and put what is new into the lists."""
        start_s = time.monotonic()
        reports += self._send(out)
        read_s = time.monotonic()
        fresh += _lines_of(self._all.read())
        now_s = time.monotonic()
        self.pace.round_trip_s = max(now_s - read_s, 0.5 * self.pace.round_trip_s)
        self._send_what_nobody_said(fresh, start_s)
        self._forget_claims(fresh)
        for topic in self._followed:
            reports += _lines_of(self._reports[topic].read())
            self._has_read.add(topic)
        if self.is_busy and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.pace.beat_s
            self._exchange_beats()

    def _see_to_bell(self, *, is_unheard: bool) -> None:
        """Whoever was about to ring may have died: its number is passed over."""
        if self._bell is None:
            return
        if not (self._bell.is_alive() or self._bell.is_closed):
            raise RuntimeError("the connection by which this rank is rung for broke")
        number, since_s = self._unheard
        if number == self._bell.number and time.monotonic() > since_s + _UNHEARD_S:
            if number <= int(self._store.add(self.key("bell/count"), 0)):  # else it was heard
                self._bell.nudge(self._store)
            self._unheard = _NOTHING_UNHEARD
        elif number != self._bell.number:
            self._unheard = (self._bell.number, time.monotonic()) if is_unheard else _NOTHING_UNHEARD

    def _send(self, out: list[Line | Once]) -> list[Line]:
        """Returns the reports among them that this rank does not read: its own it knows."""
        is_for_all, own = False, []
        for item in out:
            line = item
            if isinstance(item, Once):
                line = item.line
                if self._store.add(self.key(f"said/{item.claim}"), 1) > 1:
                    self._late.append((time.monotonic() + _SAID_S, item))
                    continue
            assert isinstance(line, Line)
            if line.what in _LAST and self._bell is not None:
                self._bell.close(self._store, _BELL_S)
            topic = "leave" if line.what in REPORTS else ""
            self._log_of(topic).post(line.to_text())
            is_for_all = is_for_all or not topic
            if topic and topic not in self._followed:
                own.append(line)
        if is_for_all:
            bell.ring(self._store, self.key("bell"), self.size)
        return own

    def _send_what_nobody_said(self, fresh: list[Line], now_s: float) -> None:
        if not self._late:
            return
        lines = self._lines + fresh
        self._late = [(end_s, once) for end_s, once in self._late if not once.is_said(lines)]
        self._send([once.line for end_s, once in self._late if now_s > end_s])
        self._late = [(end_s, once) for end_s, once in self._late if now_s <= end_s]

    def _forget_claims(self, fresh: list[Line]) -> None:
        """Who was first to say something about a save long past does not matter any more."""
        if self.rank == 0:
            self._claims += [claim_of(line) for line in fresh if line.what in _PASSING and line.point is not None]
            while len(self._claims) > _KEPT:
                self._store.delete_key(self.key(f"said/{self._claims.popleft()}"))

    def _log_of(self, topic: str) -> SharedLog:
        if not topic:
            return self._all
        return self._reports.setdefault(topic, SharedLog(self._store, self.key(topic)))

    def _exchange_beats(self) -> None:
        self._beat += 1
        self._store.set(self._beat_key(self.rank), f"{self._beat} {self.advanced}")
        with self._cond:
            watched = [rank for rank in self._beats if rank != self.rank]
        self._beating |= self._begun([rank for rank in watched if rank not in self._beating])
        there = [rank for rank in watched if rank in self._beating]
        beats = self._store.multi_get([self._beat_key(rank) for rank in there]) if there else []
        now_s, found = time.monotonic(), dict(zip(there, beats, strict=True))
        with self._cond:
            for rank in watched:
                self._beats[rank].take(found.get(rank, b""), now_s)

    def _begun(self, ranks: list[int]) -> set[int]:
        """Those that have shown signs of life. A key that does not exist would be waited for."""
        if ranks and self._store.check([self._beat_key(rank) for rank in ranks]):
            return set(ranks)
        self._next_asked = (self._next_asked + _ASKED) % max(1, len(ranks))
        some = (ranks[self._next_asked :] + ranks[: self._next_asked])[:_ASKED]
        return {rank for rank in some if self._store.check([self._beat_key(rank)])}

    def _beat_key(self, rank: int) -> str:
        return self.key(f"beat/{rank}")

    def _lose(self, error: Exception) -> None:
        with self._cond:
            self._is_lost = True
            self._calling_since = None
            is_missed = not self._is_closed and not self.is_done
            self._cond.notify_all()
        if is_missed:
            log("store_lost", level=logging.WARNING, why=str(error).splitlines()[0] if str(error) else repr(error))

    def _find_again(self) -> bool:
        """A connection may break although the store is there; False: it was not found while this rank lived."""
        pause_s = _FIND_S
        while self._connect is not None and not self.is_done:
            with self._cond:
                self._cond.wait_for(lambda: self._is_closed, pause_s)
                if self._is_closed:
                    return False
            if self._has_connected():
                with self._cond:
                    self._is_lost = False
                    self._is_rung = True
                    self._cond.notify_all()
                log("store_found")
                return True
            pause_s = pause_s if self.is_busy else min(2 * pause_s, _FIND_AT_MOST_S)
        return False

    def _has_connected(self) -> bool:
        assert self._connect is not None
        try:
            store, waiting = self._connect(_RECONNECT_S)
            self._all.store = store
            if not self._all.is_here():
                return False
            if self._bell is not None:
                self._bell.close(store, _BELL_S)
                # What was rung for before is read now.
                number = int(store.add(self.key("bell/count"), 0)) + 1
                self._bell = bell.Bell(waiting, self.key("bell"), self.rank, self._rung, number=number)
                self._bell.start()
        except (OSError, RuntimeError, ValueError):
            return False
        self._store = store
        for reports in self._reports.values():
            reports.store = store
        return True

    def close(self) -> None:
        """Send what is to be sent, then stop. May be called twice.

        No thread of ours may come back from the store's C++ code while the interpreter ends.
        """
        with self._cond:
            self._is_closed = True
            self._cond.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(HUNG_S)
        if self._bell is not None and not self.is_alive() and not self._is_lost:
            with contextlib.suppress(RuntimeError):
                self._bell.close(self._store, _BELL_S)
        atexit.unregister(self.close)

    def let_go(self) -> None:
        """Behind `close()`, where the process goes on: a group made at this address gets a store without our keys, and
        no connection stays."""
        self._served = self._store = self._connect = self._bell = None
        for one in (self._all, *self._reports.values()):
            one.store = None


class _Beat:
    """What is known of another rank's life."""

    def __init__(self, now_s: float) -> None:
        self.changed_s = self.read_s = now_s
        self.advanced = 0
        self._text = b""

    def take(self, text: bytes, now_s: float) -> None:
        self.read_s = now_s
        if text != self._text:
            self._text, self.changed_s = text, now_s
            self.advanced = int(text.split()[-1]) if text else 0


def claim_of(line: Line) -> str:
    """For a line about a safe point."""
    assert line.point is not None
    return f"{line.what}/{line.point[0]}.{line.point[1]}"


def _lines_of(texts: list[str]) -> list[Line]:
    return [line for line in map(Line.of, texts) if line is not None]


def _shortened(lines: list[Line]) -> list[Line]:
    """Without what was said of saves long past."""
    passing = [line for line in lines if line.what in _PASSING]
    if len(passing) < 2 * _KEPT:
        return lines
    dropped = {id(line) for line in passing[:-_KEPT]}
    return [line for line in lines if id(line) not in dropped]


def _left_s(news: Line) -> float:
    try:
        return float(json.loads(news.info)["grace_left_s"])
    except (ValueError, TypeError, LookupError):
        return 0.0


def here(signal: os.PathLike[str] | str) -> Mapping[str, Any]:
    """What tells a rank's pod: ranks with the same container and signal file are in one."""
    return {"pid": os.getpid(), "container": environment.container(), "signal": os.fspath(signal)}
