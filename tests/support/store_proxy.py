"""A wire between one rank and the job's store that can be cut, held up and reset: a proxy on loopback.

What a stalled wire was given to carry arrives when it is mended, as with TCP over a network that lost packets. A
connection that is made meanwhile is taken, and nothing answers. A rank is put behind it by its MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time

from tests.support.harness import DEADLINE_S

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a close is a reset, and nothing that was not delivered is."""


class Wire:
    """From a port of its own to `target`. What dials it before anybody listens there is held until somebody does."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._refuses = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stall(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._flows.clear()

    def mend(self) -> None:
        """What was held up arrives; new connections are taken again."""
        self._refuses = False
        self._flows.set()

    def reset(self) -> None:
        """All connections end with a reset, new ones too, as where a node has lost its address."""
        self._refuses = True
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.shutdown(socket.SHUT_RDWR)
                    end.close()

    def end(self) -> None:
        self._is_closed = True
        self._flows.set()
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            pump = threading.Thread(target=self._carry, args=(near,), daemon=True)
            self._threads.append(pump)
            pump.start()

    def _dial(self) -> socket.socket | None:
        end_s = time.monotonic() + DEADLINE_S
        while not self._is_closed and time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", self._target))
            time.sleep(0.02)
        return None

    def _carry(self, near: socket.socket) -> None:
        near.setblocking(True)
        self._flows.wait()
        far = None if self._refuses else self._dial()
        if far is None:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._pairs.append((near, far))
        with contextlib.closing(near), contextlib.closing(far):
            self._pump(near, far)

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self._is_closed:
                for key, _ in selector.select(0.05):
                    self._flows.wait()
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    self._flows.wait()  # what was read as the wire went down is carried when it is up
                    if not data:
                        return
                    key.data.sendall(data)
