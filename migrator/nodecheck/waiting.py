"""Waits that end: each call that may block for ever runs in a thread of its own, and is abandoned at its deadline.

A call to a store whose host is frozen never returns, and neither does a kernel of a GPU
that hangs. Python cannot end such a call, but it can stop waiting for it. The process
has to end hard then (`os._exit`), because the interpreter's end would wait for the call.

For a call to the store, time counts only while this process runs. A process that was
frozen for a minute must not conclude that the store was silent for a minute.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

_LOOK_S = 0.1
"""Maximum time, in seconds, of one look. If it took longer, the process stood still."""


class StillRunning(Exception):  # noqa: N818 - the name says what was found
    """A call did not end in time; it was abandoned."""


class Waiter:
    """Makes the calls of one check, and remembers what it saw."""

    def __init__(self) -> None:
        self.has_abandoned = False
        """A call was abandoned: this process has to end hard."""
        self.stood_still_s = 0.0
        """The longest time, in seconds, for which this process did not run, since `begin_round()`."""
        self.longest_s = 0.0
        """The same since the beginning."""

    def begin_round(self) -> None:
        """From now on it counts anew how long this process stands still."""
        self.stood_still_s = 0.0

    def within(self, timeout_s: float, what: str, call: Callable[[], Value], *, is_by_clock: bool = False) -> Value:
        """The result of the call, or its exception; `StillRunning` if it does not end in time.

        `is_by_clock`: time counts also while this process stands still.
        """
        running = _Call(call)
        threading.Thread(target=running.run, name=f"migrator-nodecheck {what}", daemon=True).start()
        counted_s = 0.0
        while True:
            look_s = min(_LOOK_S, max(0.0, timeout_s - counted_s))
            begin_s = time.monotonic()
            try:
                return running.result(look_s)
            except queue.Empty:
                counted_s += time.monotonic() - begin_s if is_by_clock else look_s
            finally:
                self._note(time.monotonic() - begin_s - look_s)
            if counted_s >= timeout_s:
                self.has_abandoned = True
                raise StillRunning(f"{what}: no end within {timeout_s:.1f} s")

    def sleep(self, seconds: float) -> None:
        """Sleep, and notice if it took far longer."""
        begin_s = time.monotonic()
        time.sleep(seconds)
        self._note(time.monotonic() - begin_s - seconds)

    def _note(self, stood_still_s: float) -> None:
        self.stood_still_s = max(self.stood_still_s, stood_still_s)
        self.longest_s = max(self.longest_s, stood_still_s)


class _Call(Generic[Value]):
    """One call, and its result or its exception."""

    def __init__(self, call: Callable[[], Value]) -> None:
        self._call: Callable[[], Value] | None = call
        self._ended: queue.SimpleQueue[tuple[list[Value], BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        assert self._call is not None
        try:
            self._ended.put(([self._call()], None))
        except BaseException as error:
            self._ended.put(([], error))
        finally:
            self._call = None

    def result(self, timeout_s: float) -> Value:
        values, error = self._ended.get(timeout=timeout_s)
        if error is not None:
            raise error
        return values[0]
