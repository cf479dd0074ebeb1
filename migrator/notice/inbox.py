"""Notices that this pod must leave before there is anybody to act on it.

Imports, data sets, the other ranks, the save of a life before: minutes may pass
before a script is through with `listening()`. SIGTERM comes once, process 1
without a handler does not even hear it, and a pod that forgot it would train
beside its replacement until it is killed. So handler and watcher are there
before anything that waits, keep what they noticed, and pass it on to the first
who can act on it. `watch()` makes them from the first line of a script on.

The price: from then on SIGTERM does not end the process any more before it comes
to `listening()`. There it leaves, before a step is trained.
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
from migrator.notice.signal_file import AGENT_MARGIN_S, SignalFile
from migrator.notice.sigterm import Sigterm
from migrator.notice.watcher import News, Watcher

BEHIND_S = 1.0
"""Maximum time the watcher takes to read of a SIGTERM that the main thread has seen."""
_MARGIN_S = 0.5
"""An exit is this long before the deadline, when SIGKILL comes."""

_newest: Lookout | None = None


def watch() -> None:
    """Notice SIGTERM and the hook's request from now on. `listening()` then leaves before a step is trained.

    One line for the top of a script that takes long to come to `listening()`. It needs no torch. Main thread.
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
    signal, grace_s = settings.of_the_signal(os.environ)
    _newest = Lookout()
    _newest.look_at(SignalFile.here(signal), grace_s)


def take() -> Lookout:
    """The one that `watch()` has made, or a new one."""
    global _newest
    found, _newest = _newest, None
    if found is None or not found.is_of_this_process:
        found = Lookout()
    return found


class Lookout:
    """The SIGTERM handler, the watcher, and what they noticed so far."""

    def __init__(self) -> None:
        self.sigterm = Sigterm()
        self._pid = os.getpid()
        self._watcher: Watcher | None = None
        self._at: tuple[Path, float] | None = None
        self._lock = threading.Lock()
        self._noticed: list[News] = []
        self._is_noticed = threading.Event()
        self._on_news: Callable[[News], None] | None = None
        self._is_in_hands = threading.Event()
        self._end: Callable[[str], None] | None = None
        self.sigterm.install()
        atexit.register(self.close)

    @property
    def is_of_this_process(self) -> bool:
        """False in a child that was forked: neither handler nor thread has come along."""
        return self._pid == os.getpid()

    @property
    def is_told(self) -> bool:
        """This pod must leave."""
        return self.sigterm.is_heard or bool(self._noticed)

    def look_at(self, file: SignalFile, grace_s: float) -> None:
        """Watch this signal file; what is in it now is known when this returns."""
        at = (file.path, grace_s)
        if self._watcher is not None and self._at == at:
            return
        if self._watcher is not None:
            self._watcher.close()
        self._at = at
        self._watcher = Watcher(sigterm=self.sigterm, file=file, grace_s=grace_s, on_news=self._notice)
        self._watcher.start()

    def _notice(self, news: News) -> None:
        """The watcher's thread, or the one that starts it."""
        with self._lock:
            self._noticed.append(news)
            on_news = self._on_news
        if on_news is not None:
            on_news(news)
        else:
            log(
                "signal_early",
                source=news.source,
                grace_left_s=news.deadline_s - time.monotonic(),
                means="listening() leaves before a step is trained",
            )
        self._is_noticed.set()
        self._guard(news)

    def pass_on(self, on_news: Callable[[News], None]) -> None:
        """To somebody who can act on it, what was noticed so far as well."""
        with self._lock:
            self._on_news = on_news
            noticed = list(self._noticed)
        for news in noticed:
            on_news(news)

    def wait(self, timeout_s: float) -> bool:
        """Until something is noticed, but not for longer; whether it was."""
        return self._is_noticed.wait(timeout_s) or self.is_told

    def catch_up(self) -> None:
        """A SIGTERM that the main thread has heard is passed on when this returns."""
        if self.sigterm.is_heard:
            self._is_noticed.wait(BEHIND_S)

    def end_at_deadline(self, end: Callable[[str], None]) -> None:
        """`listening()` has begun: if it hangs, this is called just before the deadline of what was noticed."""
        with self._lock:
            self._end = end
            noticed = list(self._noticed)
        for news in noticed:
            self._guard(news)

    def _guard(self, news: News) -> None:
        if self._end is not None and not self._is_in_hands.is_set():
            wait = threading.Thread(target=self._wait_for_hands, args=(news,), daemon=True, name="migrator-deadline")
            wait.start()

    def _wait_for_hands(self, news: News) -> None:
        left_s = news.deadline_s - _MARGIN_S - time.monotonic()
        if not self._is_in_hands.wait(max(0.0, left_s)) and self._end is not None:
            self._end("listening() was not through at the end of the grace")

    def hand_over(self) -> None:
        """Somebody else sees to it that the process ends in time."""
        self._is_in_hands.set()

    def stay(self) -> None:
        """Main thread: until SIGTERM, or shortly before the deadline of what was noticed."""
        with self._lock:
            end_s = min((news.deadline_s for news in self._noticed), default=0.0) - AGENT_MARGIN_S
        while not self.sigterm.is_heard and time.monotonic() < end_s:
            time.sleep(0.02)

    def give_up(self) -> None:
        """`listening()` has failed, or `close()` was called: the process goes on as if it had not begun."""
        atexit.unregister(self.close)
        self._stop()
        self.sigterm.put_back()

    def close(self) -> None:
        """Main thread, at exit. May be called twice."""
        if self.is_of_this_process:
            self._stop()
            self.sigterm.close()

    def _stop(self) -> None:
        self._is_in_hands.set()
        self._is_noticed.set()
        if self._watcher is not None:
            self._watcher.close()
