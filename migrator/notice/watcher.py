"""The thread that waits for a notice: SIGTERM or a request in the signal file.

SIGTERM arrives through a pipe. The signal file is watched by inotify, and also by
listing its directory several times a second, because inotify does not report changes
that another client of a network volume makes. It is a listing, because `exists()` may
return False there for 30 s after the file has appeared.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from migrator.errors import MigratorError
from migrator.events import log
from migrator.notice import signal_file
from migrator.notice.signal_file import SignalFile
from migrator.notice.sigterm import Sigterm
from migrator.platform import launcher

LISTING_S = 0.2
"""Time, in seconds, between two listings of the directory."""
EXIT_MARGIN_S = 0.5
"""Time, in seconds, before the deadline at which the process has to begin its exit."""


@dataclass(frozen=True)
class Notice:
    """A notice that this pod must leave."""

    source: str
    deadline_s: float
    """When SIGKILL comes, on the monotonic clock."""
    grace_s: float
    """Seconds from the notice to the deadline."""
    is_local: bool = True
    """The notice is for this pod. False: another pod of the job must leave, and this rank leaves with it."""
    is_again: bool = False
    """It was answered before this process started, and the pod still exists: see `signal_file.answered_deadline`."""


class Watcher(threading.Thread):
    """One thread, one pipe to wake it, one `close()`."""

    def __init__(
        self, *, sigterm: Sigterm, file: SignalFile, grace_s: float, on_notice: Callable[[Notice], None]
    ) -> None:
        super().__init__(name="migrator-watcher", daemon=True)
        self._sigterm = sigterm
        self._file = file
        self._grace_s = grace_s
        self._sigterm_grace_s = launcher.sigterm_grace_s(grace_s, launcher.agent())
        self._on_notice = on_notice
        self._nudge_fd, self._nudged_by = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closed = False
        self._seen: Any = ()
        self._observer: Any = None

    def start(self) -> None:
        """Start the thread. A request that the signal file contains now is noticed when this returns."""
        self._observe()
        self._try_to_look()
        super().start()

    def _observe(self) -> None:
        from watchdog import events
        from watchdog.observers import Observer

        # watchdog logs each file event in the directory at DEBUG.
        theirs = logging.getLogger("watchdog")
        if theirs.level == logging.NOTSET:
            theirs.setLevel(logging.INFO)
        nudge, path = self._nudge, os.fspath(self._file.path)

        class Touched(events.FileSystemEventHandler):
            def on_any_event(self, event: events.FileSystemEvent) -> None:
                if path in (event.src_path, event.dest_path):
                    nudge()

        logging.getLogger(
            "watchdog.observers.inotify"
        ).disabled = False  # an earlier `close()` in this process disabled it
        observer = Observer()
        try:
            # Another rank of this pod writes the file, and may not have made its directory yet.
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            # Only these: an event for opening would be reported for each listing of this thread.
            kinds: list[type[events.FileSystemEvent]] = [
                events.FileCreatedEvent,
                events.FileModifiedEvent,
                events.FileMovedEvent,
                events.FileClosedEvent,
            ]
            observer.schedule(Touched(), str(self._file.path.parent), recursive=False, event_filter=kinds)
            observer.daemon = True
            observer.start()
        except OSError as error:  # no inotify instances or watches left
            log(
                "watch_weak",
                level=logging.WARNING,
                way="inotify",
                error=error,
                instead=f"listing every {LISTING_S} s",
            )
            return
        self._observer = observer

    def _nudge(self) -> None:
        try:
            os.write(self._nudged_by, b".")
        except OSError:
            pass  # the pipe is full, so the thread is awake already

    def run(self) -> None:
        poll = select.poll()
        for fd in (self._sigterm.read_fd, self._nudge_fd):
            poll.register(fd, select.POLLIN)
        while not self._is_closed:
            self._try_to_look()
            self._sigterm.reinstall_in_kernel()
            ready = {fd for fd, _ in poll.poll(LISTING_S * 1000)}
            if self._sigterm.read_fd in ready and self._sigterm.drain():
                left_s = self._sigterm_grace_s
                self._on_notice(Notice("SIGTERM", time.monotonic() + left_s, left_s))
            if self._nudge_fd in ready:
                os.read(self._nudge_fd, 4096)

    def _try_to_look(self) -> None:
        try:
            self._look()
        except MigratorError as error:
            log("watch_weak", level=logging.WARNING, way="signal file", error=error)

    def _look(self) -> None:
        fingerprint = self._file.fingerprint()
        if fingerprint == self._seen:
            return
        is_first = self._seen == ()
        self._seen = fingerprint
        found = self._file.read()
        now = time.time()
        if is_first and (deadline := self._file.answered_deadline()) is not None:
            # Only on the first look: a later answer is that of this process itself.
            self._on_notice(Notice("signal file", time.monotonic() + deadline - now, deadline - now, is_again=True))
            return
        if fingerprint is None or (found is not None and found.word != signal_file.SAVE):
            return
        deadline = signal_file.open_deadline(
            found, now=now, mtime=fingerprint[1] / 1e9, grace_s=self._grace_s, container=self._file.container
        )
        if found is None or deadline is None:
            why = "no request" if found is None else "a request whose deadline is over, or for an earlier container"
            log("signal_ignored", level=logging.WARNING, file=self._file.path, holds=why)
            return
        self._on_notice(Notice("signal file", time.monotonic() + deadline - now, deadline - now))

    def close(self) -> None:
        """Stop and join. May be called twice."""
        self._is_closed = True
        self._nudge()
        if self._observer is not None:
            # watchdog logs an event that arrives while it stops as an error, which it is not.
            logging.getLogger("watchdog.observers.inotify").disabled = True
            self._observer.stop()
            self._observer.join(1.0)
        if self.is_alive() and threading.current_thread() is not self:
            self.join(1.0)
        if not self.is_alive() and self._nudge_fd >= 0:
            fds, self._nudge_fd, self._nudged_by = (self._nudge_fd, self._nudged_by), -1, -1
            for fd in fds:
                os.close(fd)
