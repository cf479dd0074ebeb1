"""The ranks of this job and the board they share.

The board lies in the job's own store, the one the process group was made with,
under a name that is new in each life: keys of earlier lives are still there when
an agent serves the store. Each rank has one thread and one connection for it, so
a store that does not answer (its host is frozen) holds back nobody but this
thread; the others see that no answer came and go on without.

The training thread never waits for the store, but in `listening()` and `load_ckpt()`.

The price: while nothing happens, each rank asks ten times a second whether the board has grown.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from migrator import environment
from migrator.agreement import Board, Line
from migrator.errors import RanksError, UsageError
from migrator.events import log

IDLE_POLL_S = 0.1
BUSY_POLL_S = 0.015
BEAT_S = 0.25
IDLE_BEAT_S = 1.0
STALE_S = 3.0
"""A rank whose beats stand still for so long is frozen, dead, or cut off."""
GONE_S = 60.0
"""In `listening()` and `load_ckpt()` a rank that does not beat is given so long."""
HUNG_S = 2.0
"""A call to the store that takes longer is not waited for any more."""
_HUNG_LOOKS = 20
_CONNECT_S = 20.0
_LOOKS_IN_VAIN = 32


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
    try:
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, None, False, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise RanksError(
            f"listening(): the job's store at {host}:{port} does not answer ({error}). "
            "It is served by rank 0, or by the agent of torchrun: see whether that is still there."
        ) from error
    return Ranks(rank, size, nonce, store, served)


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
    """One thread, one connection, one `close()`. Nobody else touches the store."""

    def __init__(self, rank: int, size: int, nonce: str, store: Any, served: Any = None) -> None:
        super().__init__(name="migrator-ranks", daemon=True)
        self.rank = rank
        self.size = size
        self.nonce = nonce
        self.is_busy = False
        self.on_lines: Callable[[list[Line]], None] = lambda _: None
        """Called in this thread with what is new on the board."""
        self._store = store
        # On rank 0 the server may live in this object: it must outlive a script that destroys its process group.
        self._served = served
        self._board, self._count = f"migrator/{nonce}/board", f"migrator/{nonce}/count"
        self._cond = threading.Condition()
        self._outbox: list[Line] = []
        self._calls: list[tuple[Callable[[Any], Any], list[Any]]] = []
        self._sent = 0
        self._lines: list[Line] = []
        self._read_bytes = 0
        self._seen_count = 0
        self._looks = 0
        self._calling_since: float | None = None
        self._hung = (0.0, 0)
        self._is_lost = False
        self._is_closed = False
        self.is_done = False
        """The script has ended on this rank: it does not need the store any more."""
        self._beat = 0
        self._all_beat = False
        self._next_beat_s = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}

    def start(self) -> None:
        super().start()
        # Also where `listening()` fails on its way.
        atexit.register(self.close)

    # What other threads ask.

    @property
    def board(self) -> Board:
        """What was read so far."""
        with self._cond:
            return Board(tuple(self._lines))

    def lines(self, what: str) -> list[Line]:
        with self._cond:
            return [line for line in self._lines if line.what == what]

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
        return time.monotonic() - since > HUNG_S and self._hung[1] > _HUNG_LOOKS

    def post(self, line: Line, *, timeout_s: float = HUNG_S) -> bool:
        """Put a line on the board; True when it is there and what was there before it was read."""
        with self._cond:
            if self._is_lost or self._is_closed:
                return False
            self._outbox.append(line)
            mine = self._sent + len(self._outbox)
            self._cond.notify_all()
            end_s = time.monotonic() + timeout_s
            while self._sent < mine and not self._is_gone(timeout_s) and time.monotonic() < end_s:
                self._cond.wait(0.05)
            return self._sent >= mine

    def call(self, what: Callable[[Any], Any], *, timeout_s: float = HUNG_S) -> Any:
        """What `what(store)` returns, called in this thread; None if that takes too long or the store is gone."""
        answer: list[Any] = []
        with self._cond:
            self._calls.append((what, answer))
            self._cond.notify_all()
            end_s = time.monotonic() + timeout_s
            while not answer and not self._is_gone(timeout_s) and not self._is_closed and time.monotonic() < end_s:
                self._cond.wait(0.05)
        return answer[0] if answer else None

    def _is_gone(self, patience_s: float) -> bool:
        """The store is lost; whoever has patience takes one that only hangs for slow."""
        return self._is_lost if patience_s > HUNG_S else self.is_lost

    def wait(self, timeout_s: float) -> None:
        """Until the board has grown, but not for long."""
        with self._cond:
            self._cond.wait(timeout_s)

    def is_alive_there(self, rank: int) -> bool:
        """Whether another rank showed signs of life lately; only known while busy."""
        return self._silence_s(rank) < STALE_S

    def _silence_s(self, rank: int) -> float:
        with self._cond:
            _, changed_s = self._beats.setdefault(rank, (b"", time.monotonic()))
        return time.monotonic() - changed_s

    def gather(
        self, what: str, why: str, *, of: set[int] | None = None, at_most_s: float = float("inf")
    ) -> dict[int, Any]:
        """Wait until each rank has posted such a line; what they say by rank. Main thread.

        Nobody is waited for who shows no sign of life.
        """
        wanted = set(range(self.size)) if of is None else of
        end_s = time.monotonic() + at_most_s
        self.hurry()
        while True:
            found = {line.rank: json.loads(line.info) for line in reversed(self.lines(what))}
            missing = wanted - found.keys()
            if not missing:
                return {rank: found[rank] for rank in sorted(wanted)}
            silent = sorted(rank for rank in missing if self._silence_s(rank) > GONE_S)
            if self._is_lost or silent or time.monotonic() > end_s:
                who = ", ".join(map(str, silent or sorted(missing)))
                lost = "the job's store does not answer; " if self._is_lost else ""
                raise RanksError(f"{lost}waited for rank {who} in vain: {why}")
            self.wait(0.05)

    def tell(self, what: str, info: Any) -> None:
        """Post a line with anything JSON can hold; `RanksError` if that cannot be done."""
        if not self.post(Line(what, self.rank, info=json.dumps(info)), timeout_s=GONE_S):
            raise RanksError("the job's store does not answer: see whether rank 0, or the agent of torchrun, is there")

    def tell_news(self, deadline_s: float) -> None:
        """This pod must leave, and so the others with it."""
        self.hurry()
        left_s = round(deadline_s - time.monotonic(), 3)
        self.post(Line("news", self.rank, info=json.dumps({"grace_left_s": left_s})), timeout_s=0)

    def hurry(self) -> None:
        """Something is going on: look often, and show that this rank is alive."""
        with self._cond:
            if not self.is_busy:
                now_s = time.monotonic()
                self._beats = {rank: (self._beats.get(rank, (b"", 0.0))[0], now_s) for rank in range(self.size)}
            self.is_busy = True
            self._cond.notify_all()

    def relax(self) -> None:
        """What made this rank busy is over."""
        self.is_busy = False

    # The thread.

    def run(self) -> None:
        while True:
            with self._cond:
                if not self._outbox and not self._calls and not self._is_closed:
                    self._cond.wait(BUSY_POLL_S if self.is_busy else max(IDLE_POLL_S, self.size * 0.002))
                out = list(self._outbox)
                calls, self._calls = self._calls, []
                if self._is_closed and not out:
                    return
            try:
                self._calling_since = time.monotonic()
                fresh = self._exchange(out)
                for what, answer in calls:
                    answer.append(what(self._store))
                self._calling_since = None
            except Exception as error:  # whatever it is, the others must be able to go on without the store
                self._lose(error)
                return
            with self._cond:
                self._outbox = self._outbox[len(out) :]
                self._sent += len(out)
                self._lines += fresh
                if fresh or out or calls:
                    self._cond.notify_all()
            if fresh:
                self._hand_on(fresh)

    def _hand_on(self, fresh: list[Line]) -> None:
        try:
            self.on_lines(fresh)
        except Exception as error:  # this thread must live on: the others wait for what it posts
            log("watch_weak", level=logging.WARNING, way="board", error=repr(error))

    def _exchange(self, out: list[Line]) -> list[Line]:
        store, fresh = self._store, []
        for line in out:
            store.append(self._board, line.to_text())
        self._looks += 1
        count = store.add(self._count, len(out))
        # The counter tells cheaply whether there is anything new; a rank that died between the two
        # calls has not moved it, so now and then the board itself is read.
        if count and (count != self._seen_count or self._looks % _LOOKS_IN_VAIN == 0):
            text = store.get(self._board)
            end = text.rfind(b"\n") + 1
            news = text[self._read_bytes : end].decode("utf-8", errors="replace").splitlines()
            fresh = [line for line in map(Line.of, news) if line is not None]
            self._read_bytes, self._seen_count = end, count
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + (BEAT_S if self.is_busy else IDLE_BEAT_S)
            self._exchange_beats()
        return fresh

    def _exchange_beats(self) -> None:
        self._beat += 1
        self._store.set(self._beat_key(self.rank), str(self._beat))
        if not self.is_busy:
            return
        keys = [self._beat_key(rank) for rank in range(self.size)]
        # A key that does not exist would be waited for.
        self._all_beat = self._all_beat or self._store.check(keys)
        if not self._all_beat:
            return
        beats = self._store.multi_get(keys)
        with self._cond:
            for rank, beat in enumerate(beats):
                if self._beats.get(rank, (b"", 0.0))[0] != beat:
                    self._beats[rank] = (beat, time.monotonic())

    def _beat_key(self, rank: int) -> str:
        return f"migrator/{self.nonce}/beat/{rank}"

    def _lose(self, error: Exception) -> None:
        with self._cond:
            self._is_lost = True
            self._calling_since = None
            is_missed = not self._is_closed and not self.is_done
            self._cond.notify_all()
        if is_missed:
            log("store_lost", level=logging.WARNING, why=str(error).splitlines()[0] if str(error) else repr(error))

    def close(self) -> None:
        """Send what is to be sent, then stop. May be called twice.

        No thread of ours may be inside the store's C++ code when the interpreter ends.
        """
        with self._cond:
            self._is_closed = True
            self._cond.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(HUNG_S)
        atexit.unregister(self.close)

    def let_go(self) -> None:
        """Behind `close()`, where the process goes on: a group made at this address gets a store without our keys."""
        self._served = None


def here(signal: os.PathLike[str] | str) -> Mapping[str, Any]:
    """What tells a rank's pod: ranks with the same container and signal file are in one."""
    return {"pid": os.getpid(), "container": environment.container(), "signal": os.fspath(signal)}
