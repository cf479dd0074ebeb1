"""A proxy on loopback between clients and one HTTP server, with the faults of networks and of busy stores.

It reads where requests and answers begin and end, and carries them byte by byte: the server gets the `Host` that the
client signed. Faults are switched while it runs. Those of the network (`cut`, `stall`, `slow`) and of the store
(`move_clock`, `refuse_conditions`) last until `heal`; the others happen once, and `is_armed` says whether one of them
still waits for its request.

A request that was sent as a whole is carried on when its client has given up: it acts late, as behind a load balancer.
Of one that came in part the server hears a reset. An orderly end right behind the head of a PUT, before the first byte
of its body, makes SeaweedFS 4.48 write an empty object.

The price: one thread for each connection of a client, and no TLS.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.support.harness import DEADLINE_S

LARGE = 1024
"""Bytes of an answer, at least, for `corrupt_next_get`."""

_HOST = "127.0.0.1"
_READ = 1 << 16
"""Bytes that are read at a time."""
_SLICE_S = 0.05
"""Seconds that a slow connection takes for what it carries at a time."""
_BLOCKED_MS = 100
"""Milliseconds after which a thread that the server lets wait looks whether its connection was ended."""
_LINGER_S = 2.0
"""Seconds for a client to end a connection on which it was refused before it sent its body."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a close is a reset, and nothing that was not delivered is."""
_END_OF_HEAD = b"\r\n\r\n"
_DATE = re.compile(rb"(?im)^(date:[ \t]*)(.*?)(?=\r$)")


@dataclass(frozen=True)
class _Refusal:
    """An answer of the proxy itself, of which the server hears nothing."""

    status: str
    code: str
    why: str

    @property
    def body(self) -> bytes:
        return (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{self.code}</Code><Message>{self.why}</Message>'
            "<RequestId>0000000000000000</RequestId></Error>"
        ).encode()


_SLOW_DOWN = _Refusal("503 Slow Down", "SlowDown", "Please reduce your request rate.")
_NOT_IMPLEMENTED = _Refusal("501 Not Implemented", "NotImplemented", "A header you provided is not implemented.")


class FaultyProxy:
    """From a port of its own to `target_port`. Each connection of a client has one of its own to the server."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.connections = 0
        """How many were taken so far."""
        self.requests: Counter[str] = Counter()
        """How many came so far, by their method; those that never reached the server count as well."""
        self.lines: list[str] = []
        """The same one by one, in order: `PUT /bucket/key?partNumber=1`."""
        self.bytes_up = 0
        """How many went to the server so far, those of heads too."""
        self._changed = threading.Condition()
        """Guards all below, and wakes those that wait for the end of a fault."""
        self._open: set[_Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._is_cut = self._is_stalled = False
        self._rate: float | None = None
        self._free_s = 0.0
        """When a slow wire has carried what it was given so far."""
        self._clock_s = 0.0
        self._knows_conditions = True
        self._refusals = 0
        self._reset: tuple[int, int | None] | None = None
        """Bytes that may still pass, and the number of the only connection that counts."""
        self._truncated: int | None = None
        self._corrupted: int | None = None
        self._dropped: re.Pattern[str] | None = None
        self._listener = _bound()
        self.port: int = self._listener.getsockname()[1]
        self._accepts = self._listen()

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def open_connections(self) -> int:
        with self._changed:
            return len(self._open)

    @property
    def is_armed(self) -> bool:
        """Whether a fault that happens once has not happened yet."""
        with self._changed:
            faults = (self._reset, self._truncated, self._corrupted, self._dropped)
            return self._refusals > 0 or any(fault is not None for fault in faults)

    # Faults that last until `heal`.

    def cut(self) -> None:
        """All connections end, and new ones are refused, as where nobody listens."""
        with self._changed:
            if self._is_cut:
                return
            self._is_cut = True
            for connection in self._open:
                connection.end()
            self._changed.notify_all()
            self._listener.shutdown(socket.SHUT_RDWR)  # it no longer listens, and the port stays ours
        self._accepts.join(DEADLINE_S)

    def stall(self) -> None:
        """Connections are taken, and nothing gets through. What was sent meanwhile arrives when this is healed."""
        with self._changed:
            self._is_stalled = True

    def slow(self, bytes_per_s: float) -> None:
        """So many bytes get through in a second, in both directions and on all connections together."""
        with self._changed:
            self._rate, self._free_s = bytes_per_s, 0.0

    def move_clock(self, by_s: float) -> None:
        """The dates of all answers are this much later than the server's, or earlier."""
        with self._changed:
            self._clock_s = by_s

    def refuse_conditions(self) -> None:
        """A PUT with `If-None-Match` or `If-Match` is answered with 501, as by a store that does not know them."""
        with self._changed:
            self._knows_conditions = False

    def heal(self) -> None:
        """Ends all faults, also those that have not happened yet."""
        with self._changed:
            self._is_stalled, self._rate = False, None
            self._clock_s, self._knows_conditions = 0.0, True
            self._refusals, self._reset = 0, None
            self._truncated = self._corrupted = self._dropped = None
            if self._is_cut:
                self._is_cut = False
                self._accepts = self._listen()
            self._changed.notify_all()

    # Faults that happen once.

    def reset_after(self, bytes_up: int, *, connection: int | None = None) -> None:
        """The connection that carries this byte to the server is reset after it, on both sides.

        The bytes of all connections count together, and heads of requests count. `connection`: only the n-th one that
        is made from now on.
        """
        with self._changed:
            self._reset = bytes_up, None if connection is None else self.connections + connection

    def answer_503(self, count: int = 1) -> None:
        """The next requests are answered with `SlowDown`, and the server hears nothing of them."""
        with self._changed:
            self._refusals = count

    def truncate_next_get(self, size: int) -> None:
        """Of the next object that is read and has more bytes, so many arrive. Then the connection ends."""
        with self._changed:
            self._truncated = size

    def corrupt_next_get(self, least: int = LARGE) -> None:
        """One bit is flipped in the middle of the next answer with bytes of an object, if there are so many."""
        with self._changed:
            self._corrupted = least

    def drop_next_answer(self, method_and_pattern: str) -> None:
        """The next request whose line (`PUT /bucket/key`) matches is carried out, and its client is never told.

        A regular expression, matched from the beginning of the line. The connection ends without an answer.
        """
        with self._changed:
            self._dropped = re.compile(method_and_pattern)

    def close(self) -> None:
        """All connections end, and all threads."""
        self.cut()
        self._listener.close()
        end_s = time.monotonic() + DEADLINE_S
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        left = [thread.name for thread in threads if thread.is_alive()]
        assert not left, f"threads of the proxy still run after {DEADLINE_S} s: {left}"

    # For its threads.

    def _listen(self) -> threading.Thread:
        self._listener.listen(128)
        return self._run(self._accept)

    def _run(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=f"proxy-{self.port}", daemon=True)
        with self._changed:
            self._threads.add(thread)
            thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except ConnectionAbortedError:  # its client has gone already
                continue
            except OSError:
                return
            with self._changed:
                if self._is_cut:
                    near.close()
                    return
                self.connections += 1
                connection = _Connection(self, near, self.connections)
                self._open.add(connection)
                self._run(connection.run)

    def gate(self, connection: _Connection, size: int = 0) -> None:
        """Until so many bytes may pass."""
        with self._changed:
            self._changed.wait_for(lambda: connection.is_over or not self._is_stalled)
            if self._rate is not None:
                self._free_s = end_s = max(self._free_s, time.monotonic()) + size / self._rate
                while not connection.is_over and self._rate is not None and (left_s := end_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
            if connection.is_over:
                raise _EndError

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What is carried at a time."""
        step = _READ if self._rate is None else max(1, int(self._rate * _SLICE_S))
        for start in range(0, len(data), step):
            yield data[start : start + step]

    def meet(self, request: _Head) -> tuple[_Refusal | None, bool]:
        """By what a request is refused, if it is, and whether its answer is dropped."""
        with self._changed:
            self.requests[request.method] += 1
            self.lines.append(f"{request.method} {request.target}")
            if self._refusals > 0:
                self._refusals -= 1
                return _SLOW_DOWN, False
            if not self._knows_conditions and request.has_condition and request.method == "PUT":
                return _NOT_IMPLEMENTED, False
            if self._dropped is None or self._dropped.match(self.lines[-1]) is None:
                return None, False
            self._dropped = None
            return None, True

    def dated(self, head: bytes) -> bytes:
        """The head of an answer, with the date that the client is to see."""
        with self._changed:
            by_s = self._clock_s
        if not by_s:
            return head

        def moved(found: re.Match[bytes]) -> bytes:
            then_s = email.utils.parsedate_to_datetime(found[2].decode("ascii")).timestamp() + by_s
            return found[1] + email.utils.formatdate(then_s, usegmt=True).encode("ascii")

        return _DATE.sub(moved, head)

    def until_reset(self, connection: _Connection, size: int) -> int | None:
        """How many of these bytes still pass to the server before a reset; None: all, and no reset follows."""
        with self._changed:
            self.bytes_up += size
            if self._reset is None:
                return None
            left, only = self._reset
            if only not in (None, connection.number):
                return None
            self._reset = None if left <= size else (left - size, only)
            return left if left <= size else None

    def spoilt(self, size: int) -> tuple[int | None, int | None]:
        """Of the bytes of an object: after which one the connection ends, and which one is changed."""
        with self._changed:
            if self._truncated is not None and self._truncated < size:
                stop, self._truncated = self._truncated, None
                return stop, None
            if self._corrupted is not None and self._corrupted <= size:
                self._corrupted = None
                return None, size // 2
            return None, None

    def ended(self, connection: _Connection) -> None:
        with self._changed:
            self._open.discard(connection)

    def opened(self, connection: _Connection, far: socket.socket) -> _End:
        """The connection to the server, which ends from now on with the client's."""
        with self._changed:
            connection.far = _End(far)
            if connection.is_over:
                raise _EndError
            return connection.far


class _EndError(Exception):
    """Both connections end."""


class _ResetError(_EndError):
    """Both connections are reset."""


@dataclass(frozen=True)
class _Head:
    """The first lines of a request or of an answer."""

    raw: bytes
    first: str
    fields: Mapping[str, str]
    """Their names are in lower case."""

    @property
    def method(self) -> str:
        return self.first.split(" ")[0]

    @property
    def target(self) -> str:
        return self.first.split(" ")[1]

    @property
    def status(self) -> int:
        return int(self.first.split(" ")[1])

    @property
    def reads_object(self) -> bool:
        """A GET with a key behind the bucket; others ask for lists and settings."""
        return self.method == "GET" and "/" in self.target.partition("?")[0].strip("/")

    @property
    def has_condition(self) -> bool:
        return "if-none-match" in self.fields or "if-match" in self.fields

    @property
    def expects(self) -> bool:
        """The client waits to be told before it sends the body."""
        return self.fields.get("expect", "").lower() == "100-continue"


class _Body:
    """How much of a body is still to come. It keeps nothing."""

    def __init__(self, fields: Mapping[str, str], *, has_none: bool = False, until_end: bool = False) -> None:
        """`until_end`: without a length it ends with the connection."""
        self._is_chunked = not has_none and "chunked" in fields.get("transfer-encoding", "").lower()
        self.size = 0 if has_none else int(fields["content-length"]) if "content-length" in fields else None
        if self.size is None and not self._is_chunked and not until_end:
            self.size = 0
        self._left = 0 if self._is_chunked else self.size
        self._line = b""
        self._is_trailer = False
        self.is_over = not self._is_chunked and self._left == 0

    def take(self, data: bytes) -> int:
        """How many of the next bytes of the connection belong to it."""
        if self._is_chunked:
            return self._take_chunks(data)
        if self._left is None:
            return len(data)
        taken = min(self._left, len(data))
        self._left -= taken
        self.is_over = self._left == 0
        return taken

    def _take_chunks(self, data: bytes) -> int:
        at = 0
        while at < len(data) and not self.is_over:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or None]
            at = end or len(data)
            if end:
                line, self._line = self._line.strip(), b""
                if self._is_trailer:
                    self.is_over = not line
                else:
                    size = int(line.partition(b";")[0], 16)
                    self._is_trailer = size == 0
                    self._left = size + 2 if size else 0  # with the end of line behind it
        return at


class _End:
    """One of the two connections, and what was read from it and not carried yet."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.held = b""

    def reset(self) -> None:
        """Its close will be a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def read(self) -> bool:
        """False: the other side has ended it."""
        data = self.socket.recv(_READ)
        self.held += data
        return bool(data)

    def head(self) -> _Head | None:
        """None: there is more to come."""
        text, end, rest = self.held.partition(_END_OF_HEAD)
        if not end:
            return None
        self.held = rest
        first, *lines = text.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return _Head(text + end, first, fields)

    def take(self, body: _Body) -> bytes:
        """What is held of a body."""
        taken = body.take(self.held)
        data, self.held = self.held[:taken], self.held[taken:]
        return data


class _Answer:
    """What goes down to the client."""

    def __init__(self, body: _Body, *, is_dropped: bool, stop: int | None, flip: int | None) -> None:
        self.body = body
        self._is_dropped = is_dropped
        self._stop = stop
        self._flip = flip
        self._at = 0

    @property
    def has_stopped(self) -> bool:
        return self._stop is not None and self._at >= self._stop

    def next(self, data: bytes) -> bytes:
        """What is made of the next bytes."""
        start, self._at = self._at, self._at + len(data)
        if self._is_dropped:
            return b""
        if self._flip is not None and start <= self._flip < self._at:
            at = self._flip - start
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data if self._stop is None else data[: max(0, self._stop - start)]


class _Connection:
    """A client's connection and the one to the server, in a thread of their own."""

    def __init__(self, proxy: FaultyProxy, near: socket.socket, number: int) -> None:
        self.number = number
        self.is_over = False
        self.far: _End | None = None
        self._proxy = proxy
        self._near = _End(near)
        self._is_partial = False
        """The server has a part of a request."""
        self._is_deaf = False
        """It takes no more of it. It may have said why."""

    def end(self) -> None:
        """From any thread: wakes its own thread, whatever that waits for."""
        self.is_over = True
        for end in self._ends():
            # The server must not take this for the orderly end of a request; its own thread resets the connection.
            is_reset = self._is_partial and end is self.far
            with contextlib.suppress(OSError):
                end.socket.shutdown(socket.SHUT_RD if is_reset else socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            while self._one_request():
                pass
        except _ResetError:
            self._near.reset()
            self._is_partial = True
        except (_EndError, OSError):
            pass
        finally:
            if self._is_partial and self.far is not None:
                self.far.reset()
            for end in self._ends():
                end.socket.close()
            self._proxy.ended(self)

    def _ends(self) -> list[_End]:
        return [end for end in (self._near, self.far) if end is not None]

    def _wait(self, *ends: _End) -> bool:
        """Until one of them says something. False: one of them has ended."""
        found = select.poll()
        for end in ends:
            found.register(end.socket, select.POLLIN)
        ready = {number for number, _ in found.poll()}
        self._proxy.gate(self)
        return all(end.read() for end in ends if end.socket.fileno() in ready)

    def _one_request(self) -> bool:
        """False: there is no next one on this connection."""
        while (request := self._near.head()) is None:
            # A server that ends a connection ends the client's.
            if not self._wait(*self._ends()):
                return False
        refusal, is_dropped = self._proxy.meet(request)
        return self._carry(request, is_dropped=is_dropped) if refusal is None else self._refuse(request, refusal)

    def _refuse(self, request: _Head, refusal: _Refusal) -> bool:
        body = _Body(request.fields)
        while not body.is_over and not request.expects:
            if self._near.held:
                self._near.take(body)
            elif not self._wait(self._near):
                return False
        text = b"" if request.method == "HEAD" else refusal.body
        kept = "close" if request.expects else "keep-alive"
        self._send(
            f"HTTP/1.1 {refusal.status}\r\nContent-Type: application/xml\r\nContent-Length: {len(refusal.body)}\r\n"
            f"Connection: {kept}\r\n\r\n".encode()
            + text
        )
        if request.expects:
            # To close now would be a reset if the client has begun with the body, and could destroy the answer.
            self._near.socket.shutdown(socket.SHUT_WR)
            self._near.socket.settimeout(_LINGER_S)
            while self._near.read():
                self._near.held = b""
        return not request.expects

    def _carry(self, request: _Head, *, is_dropped: bool) -> bool:
        far = self.far or self._dialled()
        up, answer = _Body(request.fields), None
        self._is_partial, self._is_deaf = True, False
        self._send_up(far, request.raw)
        while not (up.is_over and answer is not None and answer.body.is_over):
            self._is_partial = not up.is_over
            if self._near.held and not up.is_over:
                self._send_up(far, self._near.take(up))
            elif answer is not None and far.held and not answer.body.is_over:
                self._send(answer.next(far.take(answer.body)))
                if answer.has_stopped:
                    return False
            elif answer is None and (head := far.head()) is not None:
                if head.status < 200:
                    self._send(head.raw)
                    continue
                answer = self._answer(request, head, is_dropped=is_dropped)
                if not is_dropped:
                    self._send(self._proxy.dated(head.raw))
                if answer.has_stopped:
                    return False
            elif not self._wait(far, *([] if up.is_over else [self._near])):
                return False
        return not is_dropped

    def _dialled(self) -> _End:
        try:
            return self._proxy.opened(self, socket.create_connection((_HOST, self._proxy.target_port), DEADLINE_S))
        except OSError:
            raise _ResetError from None  # the nearest to a refusal for a client that is connected

    def _answer(self, request: _Head, head: _Head, *, is_dropped: bool) -> _Answer:
        has_none = request.method == "HEAD" or head.status in (204, 304)
        body = _Body(head.fields, has_none=has_none, until_end=True)
        stop = flip = None
        if request.reads_object and head.status in (200, 206) and body.size is not None:
            stop, flip = self._proxy.spoilt(body.size)
        return _Answer(body, is_dropped=is_dropped, stop=stop, flip=flip)

    def _send(self, data: bytes) -> None:
        for piece in self._proxy.pieces(data):
            self._proxy.gate(self, len(piece))
            self._near.socket.sendall(piece)

    def _send_up(self, far: _End, data: bytes) -> None:
        for piece in self._proxy.pieces(data):
            self._proxy.gate(self, len(piece))
            left = self._proxy.until_reset(self, len(piece))
            if not self._is_deaf:
                try:
                    self._push(far, piece[:left])
                except OSError:
                    self._is_deaf = True
            if left is not None:
                raise _ResetError

    def _push(self, far: _End, data: bytes) -> None:
        """As `sendall`, and over when the connection is: that of the server cannot be ended from another thread."""
        found = select.poll()
        found.register(far.socket, select.POLLOUT)
        while data:
            found.poll(_BLOCKED_MS)
            if self.is_over:
                raise _EndError
            with contextlib.suppress(BlockingIOError):
                data = data[far.socket.send(data, socket.MSG_DONTWAIT) :]


def _bound() -> socket.socket:
    """A socket that listens on demand, and keeps its port when it does not."""
    while True:
        with socket.create_server((_HOST, 0)) as found:
            port = found.getsockname()[1]
        # A port that was asked for by its number stays with the socket when it stops listening.
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((_HOST, port))
        except OSError:  # taken meanwhile
            bound.close()
        else:
            return bound
