"""How the ranks of a job exchange lines: one thread per rank, which calls the job's store.

What all ranks have to read is in one *shared log*: notices, orders, decisions. What
only the ranks that decide or collect have to read (reports) is in separate logs, by
topic: otherwise a thousand ranks would fetch a thousand reports each. The logs are
in the job's store, the one that the process group was made with, under a name that
is new in each life: an agent's store still holds the keys of earlier lives.

Only this thread calls the store. If the store does not answer (its host is frozen),
only this thread blocks, and other threads see the missing answer and go on without
the store. A second thread waits for the ring that announces new lines (`bell.py`).

The training thread waits for the store only in `listening()` and `load_ckpt()`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from migrator.ckpt.point import Point
from migrator.errors import RanksError
from migrator.events import log
from migrator.ranks import bell
from migrator.ranks.claims import KEPT, Claims, Once
from migrator.ranks.liveness import Liveness
from migrator.ranks.protocol import KnownLines, Line
from migrator.ranks.shared_log import SharedLog
from migrator.ranks.timing import GONE_S, HUNG_S, Timing

FEW = 16
"""Up to this number of ranks, every rank reads all lines and decides and collects as soon as it can. In larger jobs the
lowest ranks do."""
REPORTS = frozenset({"reach", "alone", "failed", "out", "bye"})
"""Lines that only the ranks that decide or collect read."""
_PASSING = frozenset({"order", "missed", "saved"})
"""Lines about one save. Only the newest `KEPT` of them are kept."""
_LAST = frozenset({"out", "bye"})
"""The last line of a rank is one of these. After them the store may end."""
_LOOK_S = 0.2
"""Maximum time, in seconds, between two checks whether an answer can still come. The answer itself wakes the waiter."""
_HUNG_LOOKS = 8
"""Minimum number of checks before a call without an answer counts as hung."""
_BELL_S = 1.0
"""Maximum time, in seconds, to wait for the bell's thread to end."""
_FIND_S = 0.5
"""Time, in seconds, from a lost connection to the first attempt to connect again."""
_FIND_AT_MOST_S = 10.0
"""Maximum time, in seconds, between two attempts to connect again."""
_RECONNECT_S = 1.0
"""Maximum time, in seconds, of one attempt to connect again."""
_UNHEARD_S = 2.0
"""Maximum time, in seconds, from a line to its ring. After it the rank that wrote the line counts as dead."""
_NOTHING_UNHEARD = (0, 0.0)
_NO_STORE = (
    "the job's store does not answer. Rank 0, or the agent of torchrun, serves it: check that this process still runs"
)


class Peers(threading.Thread):
    """The other ranks, as seen from this one. One thread, one connection, one `close()`; and those of the bell."""

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
        self.timing = Timing(size)
        self.is_busy = False
        self.advanced = 0
        """Counts the progress that this rank makes or sees on other ranks. It is sent with the beats."""
        self._on_lines: Callable[[list[Line]], None] | None = None
        self._left_s: Callable[[], float] | None = None
        self._store = store
        self._connect = connect
        # On rank 0 this object may own the server, which has to run on after the script destroys its process group.
        self._served = served
        self._bell = None if waiting is None else bell.Bell(waiting, self.key("bell"), rank, self._rung)
        self._all = SharedLog(store, self.key("log"))
        self._reports: dict[str, SharedLog] = {}
        self._followed: tuple[str, ...] = ()
        self._cond = threading.Condition()
        self._outbox: list[Line | Once] = []
        self._calls: list[tuple[Callable[[Any], Any], list[Any]]] = []
        self._claims = Claims(self.key("said"))
        self._liveness = Liveness(rank, self.key("beat"))
        self._sent = 0
        self._lines: list[Line] = []
        self._known: KnownLines | None = None
        self._is_rung = False
        self._unheard = _NOTHING_UNHEARD
        self._has_read: set[str] = set()
        self._calling_since: float | None = None
        self._hung = (0.0, 0)
        self._is_disconnected = False
        self._is_closed = False
        self.is_done = False
        """This rank does not need the store any more: its script has ended, or it has sent its last line."""
        self._next_beat_s = 0.0
        if rank == 0 or size <= FEW:
            self.follow("leave")

    @property
    def left_s(self) -> float | None:
        """Seconds left, if this rank must leave."""
        return None if self._left_s is None else self._left_s()

    def must_leave_within(self, left_s: Callable[[], float]) -> None:
        """This rank must leave, and `left_s` gives the seconds left: no wait for the store takes longer."""
        self._left_s = left_s

    def listen(self, on_lines: Callable[[list[Line]], None]) -> None:
        """Call `on_lines` with what is new in the log, in this thread; first, here and now, with what was read before.

        A line that comes at this moment may be given twice.
        """
        self._on_lines = on_lines
        on_lines(list(self.known.lines))

    def advance(self) -> None:
        """This rank has written something, or sees that others do."""
        self.advanced += 1

    def start(self) -> None:
        super().start()
        if self._bell is not None:
            self._bell.start()
        # Here, because `listening()` may fail after this.
        atexit.register(self.close)

    # Called by other threads.

    @property
    def known(self) -> KnownLines:
        """The lines that were read so far."""
        with self._cond:
            if self._known is None:
                self._known = KnownLines(tuple(self._lines))
            return self._known

    def lines(self, what: str) -> list[Line]:
        return self.known.named(what)

    @property
    def is_disconnected(self) -> bool:
        """The connection to the store broke. A store that only hangs is still connected."""
        return self._is_disconnected

    @property
    def store_is_unreachable(self) -> bool:
        """The connection to the store broke, or the store has not answered a call in time."""
        since = self._calling_since
        if self._is_disconnected or since is None:
            return self._is_disconnected
        # A busy interpreter may keep this thread from taking an answer that is there. It then slows down
        # the thread that asks here as well, so a minimum number of checks is required, too.
        before, looks = self._hung
        self._hung = (since, looks + 1 if since == before else 1)
        return time.monotonic() - since > self.timing.hung_s(self.left_s) and self._hung[1] > _HUNG_LOOKS

    def post(self, line: Line | Once, *, timeout_s: float | None = None) -> bool:
        """Send a line. True: this rank or another one has sent it, and all earlier lines were read."""
        patience_s = self.timing.hung_s(self.left_s) if timeout_s is None else timeout_s
        with self._cond:
            # A line that the caller does not wait for is sent when the store is back.
            if self._is_closed or (self._is_disconnected and timeout_s != 0):
                return False
            self._outbox.append(line)
            mine = self._sent + len(self._outbox)
            self._cond.notify_all()
            end_s = time.monotonic() + patience_s
            while self._sent < mine and not self._gives_up(timeout_s) and time.monotonic() < end_s:
                self._cond.wait(_LOOK_S)
            return self._sent >= mine

    def call(self, what: Callable[[Any], Any], *, timeout_s: float | None = None) -> Any:
        """Call `what(store)` in this thread and return its result; None if the store does not answer in time."""
        answer: list[Any] = []
        patience_s = self.timing.hung_s(self.left_s) if timeout_s is None else timeout_s
        with self._cond:
            self._calls.append((what, answer))
            self._cond.notify_all()
            end_s = time.monotonic() + patience_s
            while not answer and not self._gives_up(timeout_s) and not self._is_closed and time.monotonic() < end_s:
                self._cond.wait(_LOOK_S)
        return answer[0] if answer else None

    def _gives_up(self, timeout_s: float | None) -> bool:
        """Whether a caller with this timeout stops waiting. With a long timeout a store that hangs counts as slow."""
        if timeout_s is not None and timeout_s > HUNG_S:
            return self._is_disconnected
        return self.store_is_unreachable

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something new to read, at most `timeout_s` seconds."""
        with self._cond:
            self._cond.wait(timeout_s)

    def follow(self, topic: str) -> None:
        """Read the reports of this topic from now on, including earlier ones."""
        with self._cond:
            if topic not in self._followed:
                self._reports.setdefault(topic, SharedLog(self._store, self.key(topic)))
                self._followed = (*self._followed, topic)
                # What was read when it was followed before says nothing of what was reported since.
                self._has_read.discard(topic)
                self._cond.notify_all()

    def unfollow(self, topic: str) -> None:
        with self._cond:
            self._followed = tuple(other for other in self._followed if other != topic)

    def has_read(self, topic: str) -> bool:
        """Whether the reports of this topic were read since this rank follows it."""
        return topic in self._has_read

    def is_alive_there(self, rank: int) -> bool:
        """Whether another rank has sent a beat recently. Only known while this rank is busy."""
        return self._liveness.silence_s(rank) < self.timing.stale_s

    def advanced_there(self, rank: int) -> int:
        """How often another rank has reported progress."""
        return self._liveness.advanced(rank)

    def gather(
        self, what: str, why: str, *, of: set[int] | None = None, at_most_s: float = float("inf"), topic: str = ""
    ) -> dict[int, Any]:
        """Wait until each rank of `of` has sent such a line; the contents by rank. Main thread.

        `RanksError` if a rank has ended or shows no sign of life, or when `at_most_s` is over.
        """
        wanted = set(range(self.size)) if of is None else of
        start_s = time.monotonic()
        end_s = start_s + at_most_s
        self.hurry()
        # The line by which a rank says that it has ended is a report, too.
        topics = {topic, "leave"} - {"", *self._followed}
        for one in topics:
            self.follow(one)
        try:
            while True:
                # Read once: an answer and the end of its rank may arrive together, between two reads.
                known = self.known
                found = {line.rank: line.info for line in reversed(known.named(what))}
                missing = wanted - found.keys()
                if not missing:
                    return {rank: json.loads(found[rank]) for rank in sorted(wanted)}
                ended = {line.rank for line in known.named("bye")}
                silent = sorted(rank for rank in missing if rank in ended or self._liveness.silence_s(rank) > GONE_S)
                if self._is_disconnected or silent or time.monotonic() > end_s:
                    who = ", ".join(map(str, silent or sorted(missing)))
                    lost = "the job's store does not answer; " if self._is_disconnected else ""
                    how = f"did not answer within {time.monotonic() - start_s:.0f} s"
                    if silent and ended.issuperset(silent):
                        how = "ended without an answer"
                    raise RanksError(f"{lost}rank {who} {how}: {why}")
                self.wait(0.05)
        finally:
            for one in topics:
                self.unfollow(one)

    def said_in(self, topic: str) -> dict[int, Any]:
        """The reports of this topic so far, by rank. Main thread."""
        texts = self.call(lambda _: self._log_of(topic).read(), timeout_s=GONE_S)
        if texts is None:
            raise RanksError(_NO_STORE)
        return {line.rank: json.loads(line.info) for line in _lines_of(texts)}

    def tell(self, what: str, info: Any, *, topic: str = "") -> None:
        """Send a line with `info` as JSON; `RanksError` if the store does not answer."""
        line = Line(what, self.rank, info=json.dumps(info))
        if topic:
            is_there = self.call(lambda store: self._log_of(topic).post(line.to_text()), timeout_s=GONE_S) is not None
        else:
            is_there = self.post(line, timeout_s=GONE_S)
        if not is_there:
            raise RanksError(_NO_STORE)

    def tell_notice(self, deadline_s: float) -> None:
        """Tell all ranks that this pod must leave. If many ranks have a notice at the same time, one of them does
        it."""
        self.hurry()
        left_s = round(deadline_s - time.monotonic(), 3)
        line = Line("notice", self.rank, info=json.dumps({"grace_left_s": left_s}))
        # A notice with an earlier deadline is a notice of its own, so the claim contains the deadline.
        claim = f"notice/{int(left_s)}"
        said_s = time.monotonic()

        def is_said(lines: list[Line]) -> bool:
            left = [_left_s(other) for other in lines if other.what == "notice"]
            return any(other < left_s + (time.monotonic() - said_s) + 1.0 for other in left)

        self.post(Once(line, claim, is_said), timeout_s=0)

    def hurry(self) -> None:
        """From now on look often and send beats: a save or a round of answers is under way."""
        with self._cond:
            if not self.is_busy:
                self._liveness.start_again()
            self.is_busy = True
            self._cond.notify_all()

    def relax(self) -> None:
        """Look rarely again and send no beats."""
        self.is_busy = False

    def later(self, what: Callable[[Any], Any]) -> None:
        """Call `what(store)` in this thread without waiting for it."""
        with self._cond:
            self._calls.append((what, []))
            self._cond.notify_all()

    def forget_old(self) -> None:
        """After a save of all ranks is committed: all ranks have read the earlier lines, and one rank deletes them."""
        self.later(lambda _: self._all.trim(KEPT))

    def key(self, what: str) -> str:
        """The name of a key in the store. It contains the nonce of this life."""
        return f"migrator/{self.nonce}/{what}"

    def key_of(self, what: str, point: Point) -> str:
        return self.key(f"{what}/{point[0]}.{point[1]}")

    # The thread that calls the store.

    def _rung(self) -> None:
        with self._cond:
            self._is_rung = True
            self._cond.notify_all()

    def _pause_s(self) -> float:
        if not self.is_busy:
            return self.timing.idle_look_s
        return self.timing.busy_look_s(leads=self.rank == 0 or bool(self._followed))

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
            answers: list[tuple[list[Any], Any]] = []
            try:
                self._calling_since = time.monotonic()
                followed = self._exchange(out, fresh, reports)
                for what, answer in calls:
                    self._calling_since = time.monotonic()
                    answers.append((answer, what(self._store)))
                self._calling_since = time.monotonic()
                self._see_to_bell(is_unheard=bool(fresh) and not was_rung and not out)
                self._calling_since = None
            except Exception as error:  # after any error the other threads must be able to go on without the store
                self._take_in(fresh, reports, answers)  # these lines are not fetched again
                self._disconnect(error)
                if not self._find_again():
                    return
                continue
            self._take_in(fresh, reports, answers, sent=len(out), read=followed)

    def _take_in(
        self,
        fresh: list[Line],
        reports: list[Line],
        answers: list[tuple[list[Any], Any]],
        *,
        sent: int = 0,
        read: tuple[str, ...] = (),
    ) -> None:
        """Show the other threads what one exchange brought, all of it at once.

        A caller that learns that its line was sent, its call answered or a topic read finds the lines that were read
        with it.
        """
        with self._cond:
            if fresh or reports:
                self._lines = _shortened(self._lines + fresh + reports)
                self._known = None
            self._outbox = self._outbox[sent:]
            self._sent += sent
            self._has_read.update(read)
            for answer, found in answers:
                answer.append(found)
            if fresh or reports or sent or answers:
                self._cond.notify_all()
        if fresh:
            self._hand_on(fresh)

    def _hand_on(self, fresh: list[Line]) -> None:
        try:
            if self._on_lines is not None:
                self._on_lines(fresh)
        except Exception as error:  # this thread must go on: other threads wait for the lines that it sends
            log("watch_weak", level=logging.WARNING, way="shared log", error=repr(error))

    def _exchange(self, out: list[Line | Once], fresh: list[Line], reports: list[Line]) -> tuple[str, ...]:
        """Send `out`, and append the new lines to `fresh` and `reports`. Returns the topics whose reports were read."""
        start_s = time.monotonic()
        reports += self._send(out)
        # Before the shared log: a report that a rank has ended then arrives with all lines that it wrote before.
        followed = self._followed
        for topic in followed:
            reports += _lines_of(self._reports[topic].read())
        read_s = time.monotonic()
        fresh += _lines_of(self._all.read())
        now_s = time.monotonic()
        self.timing.round_trip_s = max(now_s - read_s, 0.5 * self.timing.round_trip_s)
        self._send_overdue(fresh, start_s)
        if self.rank == 0:
            passing = [line for line in fresh if line.what in _PASSING and line.point is not None]
            self._claims.forget_old(self._store, passing)
        if self.is_busy and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.timing.beat_s
            self._liveness.exchange(self._store, self.advanced)
        return followed

    def _see_to_bell(self, *, is_unheard: bool) -> None:
        """Skip a number of the bell that is never rung, because the rank that should ring has died."""
        if self._bell is None:
            return
        if not (self._bell.is_alive() or self._bell.is_closed):
            raise RuntimeError("the connection on which this rank waits for the bell broke")
        number, since_s = self._unheard
        if number == self._bell.number and time.monotonic() > since_s + _UNHEARD_S:
            if number <= int(self._store.add(self.key("bell/count"), 0)):  # a higher number was never given out
                self._bell.nudge(self._store)
            self._unheard = _NOTHING_UNHEARD
        elif number != self._bell.number:
            self._unheard = (self._bell.number, time.monotonic()) if is_unheard else _NOTHING_UNHEARD

    def _send(self, out: list[Line | Once]) -> list[Line]:
        """Write these lines. Returns the reports that this rank does not read back from the store."""
        is_for_all, own = False, []
        for item in out:
            line = item
            if isinstance(item, Once):
                line = item.line
                if not self._claims.take(self._store, item):
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

    def _send_overdue(self, fresh: list[Line], now_s: float) -> None:
        """Write the lines that another rank has claimed and not written in time."""
        if self._claims.is_waiting:
            self._send(list(self._claims.overdue(self._lines + fresh, now_s)))
            self._claims.drop_overdue(now_s)

    def _log_of(self, topic: str) -> SharedLog:
        if not topic:
            return self._all
        return self._reports.setdefault(topic, SharedLog(self._store, self.key(topic)))

    def _disconnect(self, error: Exception) -> None:
        with self._cond:
            self._is_disconnected = True
            self._calling_since = None
            is_missed = not self._is_closed and not self.is_done
            self._cond.notify_all()
        if is_missed:
            log("store_lost", level=logging.WARNING, why=str(error).splitlines()[0] if str(error) else repr(error))

    def _find_again(self) -> bool:
        """Connect again, since a connection may break although the store runs. False: not found before `close()`."""
        pause_s = _FIND_S
        while self._connect is not None and not self.is_done:
            with self._cond:
                self._cond.wait_for(lambda: self._is_closed, pause_s)
                if self._is_closed:
                    return False
            if self._has_connected():
                with self._cond:
                    self._is_disconnected = False
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
                # Lines that were announced meanwhile are read now, so their rings are skipped.
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
        """Send the remaining lines, then stop. May be called twice.

        No thread of this package may return from the store's C++ code while the interpreter ends: it would crash.
        """
        with self._cond:
            self._is_closed = True
            self._cond.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(HUNG_S)
        # If this thread still runs, the store hangs, and so does the bell's thread.
        if self._bell is not None and not self.is_alive():
            with contextlib.suppress(RuntimeError):
                if not self._is_disconnected:
                    self._bell.close(self._store, _BELL_S)
            self._bell.close_behind_break(_BELL_S)
        atexit.unregister(self.close)

    def let_go(self) -> None:
        """After `close()` in a process that goes on: end the server and the connections of this life.

        A process group that is made at the same address later then gets a store without our keys.
        """
        self._served = self._store = self._connect = self._bell = None
        for one in (self._all, *self._reports.values()):
            one.store = None


def _lines_of(texts: list[str]) -> list[Line]:
    return [line for line in map(Line.of, texts) if line is not None]


def _shortened(lines: list[Line]) -> list[Line]:
    """Without the lines about saves that are long over."""
    passing = [line for line in lines if line.what in _PASSING]
    if len(passing) < 2 * KEPT:
        return lines
    dropped = {id(line) for line in passing[:-KEPT]}
    return [line for line in lines if id(line) not in dropped]


def _left_s(notice: Line) -> float:
    try:
        return float(json.loads(notice.info)["grace_left_s"])
    except (ValueError, TypeError, LookupError):
        return 0.0
