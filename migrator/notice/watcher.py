"""Notices the signal, by whichever way it comes first.

SIGTERM arrives through a pipe. The signal file is watched by inotify and, because
inotify never fires for another client of a network volume, by a listing every
fifth of a second; a listing, because there a plain `exists()` may say no for half
a minute about a file that is there.
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

from migrator.platform import launcher
from migrator.notice import signal_file
from migrator.errors import MigratorError
from migrator.events import log
from migrator.notice.signal_file import SignalFile
from migrator.notice.sigterm import Sigterm

LISTING_S = 0.2


@dataclass(frozen=True)
class News:
    """This pod must leave."""

    source: str
    deadline_s: float
    """On the monotonic clock: SIGKILL comes then."""
    grace_s: float
    """From the news to the deadline."""
    is_local: bool = True
    """It came to this pod; else a peer is leaving, and this rank only with it."""
    is_again: bool = False
    """It was answered before this process began, and the pod is still there: see `signal_file.in_force`."""


class Watcher(threading.Thread):
    """One thread, one pipe to wake it, one `close()`."""

    def __init__(self, *, sigterm: Sigterm, file: SignalFile, grace_s: float, on_news: Callable[[News], None]) -> None:
        super().__init__(name="migrator-watcher", daemon=True)
        self._sigterm = sigterm
        self._file = file
        self._grace_s = grace_s
        self._sigterm_grace_s = launcher.sigterm_grace_s(grace_s, launcher.agent())
        self._on_news = on_news
        self._nudge_fd, self._nudged_by = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closed = False
        self._seen: Any = ()
        self._observer: Any = None

    def start(self) -> None:
        """What is in the signal file now is news when this returns."""
        self._observe()
        self._try_to_look()
        super().start()

    def _observe(self) -> None:
        from watchdog import events
        from watchdog.observers import Observer

        # A root logger at DEBUG would get a line for each file event in the directory.
        theirs = logging.getLogger("watchdog")
        if theirs.level == logging.NOTSET:
            theirs.setLevel(logging.INFO)
        nudge, path = self._nudge, os.fspath(self._file.path)

        class Touched(events.FileSystemEventHandler):
            def on_any_event(self, event: events.FileSystemEvent) -> None:
                if path in (event.src_path, event.dest_path):
                    nudge()

        logging.getLogger("watchdog.observers.inotify").disabled = False  # see `close()`, of a life before this one
        observer = Observer()
        try:
            # The rank of this pod that writes the file may not have come as far yet.
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            # Only these: our own listing opens the directory, and would be told to us as an event.
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
            pass  # full: it is awake already

    def run(self) -> None:
        poll = select.poll()
        for fd in (self._sigterm.read_fd, self._nudge_fd):
            poll.register(fd, select.POLLIN)
        while not self._is_closed:
            self._try_to_look()
            self._sigterm.keep_heard()
            ready = {fd for fd, _ in poll.poll(LISTING_S * 1000)}
            if self._sigterm.read_fd in ready and self._sigterm.drain():
                left_s = self._sigterm_grace_s
                self._on_news(News("SIGTERM", time.monotonic() + left_s, left_s))
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
        if is_first and (deadline := self._file.in_force()) is not None:
            # An answer that comes later is this life's own.
            self._on_news(News("signal file", time.monotonic() + deadline - now, deadline - now, is_again=True))
            return
        if fingerprint is None or (found is not None and found.word != signal_file.SAVE):
            return
        deadline = signal_file.is_open(
            found, now=now, mtime=fingerprint[1] / 1e9, grace_s=self._grace_s, container=self._file.container
        )
        if found is None or deadline is None:
            why = "no request" if found is None else "a request whose deadline is over, or to an earlier container"
            log("signal_ignored", level=logging.WARNING, file=self._file.path, holds=why)
            return
        self._on_news(News("signal file", time.monotonic() + deadline - now, deadline - now))

    def look_again(self) -> None:
        """After our own answer was written: a request may have come in between."""
        self._nudge()

    def close(self) -> None:
        """Stop and join. May be called twice."""
        self._is_closed = True
        self._nudge()
        if self._observer is not None:
            # An event that comes while it stops is no error of the run, though watchdog logs it as one.
            logging.getLogger("watchdog.observers.inotify").disabled = True
            self._observer.stop()
            self._observer.join(1.0)
        if self.is_alive() and threading.current_thread() is not self:
            self.join(1.0)
        if not self.is_alive() and self._nudge_fd >= 0:
            fds, self._nudge_fd, self._nudged_by = (self._nudge_fd, self._nudged_by), -1, -1
            for fd in fds:
                os.close(fd)
