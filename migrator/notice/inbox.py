"""Keeps notices that arrive before `listening()` can act on them.

It may take minutes until a script has passed `listening()`: imports, data sets, other
ranks, the save of an earlier life. SIGTERM is sent once, and process 1 without a
handler does not even receive it. A pod that misses it would train beside its
replacement until it is killed. So the SIGTERM handler and the watcher are installed
before anything that waits. They keep what they noticed and deliver it to the first
callback that can act on it. `watch()` installs them at the first line of a script.

The price: from then on SIGTERM does not end the process before `listening()`. The
process leaves in `listening()`, before a step is trained.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from migrator import events, settings
from migrator.errors import UsageError
from migrator.events import log
from migrator.notice.signal_file import SignalFile
from migrator.notice.sigterm import Sigterm
from migrator.notice.watcher import EXIT_MARGIN_S, Notice, Watcher

BEHIND_S = 1.0
"""Maximum time, in seconds, that the watcher takes to read a SIGTERM which the main thread has already seen."""

_newest: NoticeInbox | None = None


def watch() -> None:
    """Receive SIGTERM and the hook's request from now on. `listening()` then leaves before a step is trained.

    One line for the top of a script that needs long to reach `listening()`. It does not need torch. Main thread.
    """
    global _newest
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "watch() was called in a side thread, where Python delivers no signals. Call it in the main thread."
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return  # a child of multiprocessing imports the script again, and must end when it is terminated
    if _newest is not None and _newest.is_of_this_process:
        return
    events.ensure_visible()
    signal, grace_s = settings.signal_and_grace(os.environ)
    _newest = NoticeInbox()
    _newest.look_at(SignalFile.here(signal), grace_s)


def take() -> NoticeInbox:
    """The inbox that `watch()` has made, or a new one."""
    global _newest
    found, _newest = _newest, None
    if found is None or not found.is_of_this_process:
        found = NoticeInbox()
    return found


class NoticeInbox:
    """The SIGTERM handler, the watcher, and the notices so far."""

    def __init__(self) -> None:
        self.sigterm = Sigterm()
        self._pid = os.getpid()
        self._watcher: Watcher | None = None
        self._at: tuple[Path, float] | None = None
        self._lock = threading.Lock()
        self._noticed: list[Notice] = []
        self._is_noticed = threading.Event()
        self._on_notice: Callable[[Notice], None] | None = None
        self._is_guard_over = threading.Event()
        self._end: Callable[[str], None] | None = None
        self.sigterm.install()
        atexit.register(self.close)

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which has neither the handler nor the thread."""
        return self._pid == os.getpid()

    @property
    def has_notice(self) -> bool:
        """This pod must leave."""
        return self.sigterm.is_heard or bool(self._noticed)

    @property
    def deadline_s(self) -> float:
        """The earliest deadline of the notices so far, on the monotonic clock; 0 without a notice."""
        with self._lock:
            return min((notice.deadline_s for notice in self._noticed), default=0.0)

    def look_at(self, file: SignalFile, grace_s: float) -> None:
        """Watch this signal file. A request that it contains now is noticed when this returns."""
        at = (file.path, grace_s)
        if self._watcher is not None and self._at == at:
            return
        if self._watcher is not None:
            self._watcher.close()
        self._at = at
        self._watcher = Watcher(sigterm=self.sigterm, file=file, grace_s=grace_s, on_notice=self._notice)
        self._watcher.start()

    def _notice(self, notice: Notice) -> None:
        """Called in the watcher's thread, or in the thread that starts the watcher."""
        with self._lock:
            self._noticed.append(notice)
            on_notice = self._on_notice
        if on_notice is not None:
            on_notice(notice)
        else:
            log(
                "signal_early",
                source=notice.source,
                grace_left_s=notice.deadline_s - time.monotonic(),
                means="listening() leaves before a step is trained",
            )
        self._is_noticed.set()
        self._guard(notice)

    def pass_on(self, on_notice: Callable[[Notice], None]) -> None:
        """From now on call `on_notice` for each notice, and at once for the notices so far."""
        with self._lock:
            self._on_notice = on_notice
            noticed = list(self._noticed)
        for notice in noticed:
            on_notice(notice)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notice, at most `timeout_s` seconds. Whether there is one."""
        return self._is_noticed.wait(timeout_s) or self.has_notice

    def catch_up(self) -> None:
        """Wait until a SIGTERM that the main thread has received is delivered as a notice."""
        if self.sigterm.is_heard:
            self._is_noticed.wait(BEHIND_S)

    def end_at_deadline(self, end: Callable[[str], None]) -> None:
        """From now on, if `listening()` hangs, call `end` just before the earliest deadline of the notices."""
        with self._lock:
            self._end = end
            noticed = list(self._noticed)
        for notice in noticed:
            self._guard(notice)

    def _guard(self, notice: Notice) -> None:
        if self._end is not None and not self._is_guard_over.is_set():
            wait = threading.Thread(target=self._end_unless_over, args=(notice,), daemon=True, name="migrator-deadline")
            wait.start()

    def _end_unless_over(self, notice: Notice) -> None:
        left_s = notice.deadline_s - EXIT_MARGIN_S - time.monotonic()
        if not self._is_guard_over.wait(max(0.0, left_s)) and self._end is not None:
            self._end("listening() was not over at the end of the grace")

    def stop_guard(self) -> None:
        """`listening()` is over: from now on other code ensures that the process ends before the deadline."""
        self._is_guard_over.set()

    def give_up(self) -> None:
        """After `listening()` failed, or `close()` was called: remove the handler and the watcher. The process goes
        on."""
        atexit.unregister(self.close)
        self._stop()
        self.sigterm.uninstall()

    def close(self) -> None:
        """Main thread, at exit. May be called twice."""
        if self.is_of_this_process:
            self._stop()
            self.sigterm.close()

    def _stop(self) -> None:
        self._is_guard_over.set()
        self._is_noticed.set()
        if self._watcher is not None:
            self._watcher.close()
