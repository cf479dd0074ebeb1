"""What kubelet shows as the container's last message.

Kubelet reads one small file when the container has ended. So that a SIGKILL leaves more
than nothing, a first message is written when the notice comes, and what became of it
takes its place. A start that fails by one of our own errors says so there, too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path

from migrator import settings
from migrator.platform.container import tell_kubelet
from migrator.errors import MigratorError
from migrator.notice.signal_file_owner import SignalOwner


class LastWord:
    """The message of a process that was told to leave."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._is_said = False

    def begin(self, message: str) -> None:
        """What is to stand there if the process is killed before it can say more."""
        with self._lock:
            # The watcher's thread writes this one. It may be late, behind a save that took milliseconds.
            if not self._is_said:
                tell_kubelet(f"migrator: {message}", self._place)

    def say(self, message: str) -> None:
        """What became of it."""
        with self._lock:
            self._is_said = True
            tell_kubelet(f"migrator: {message}", self._place)


_signals: list[str] = []
_explains = False


def explain_errors(*, signal: str | None = None) -> None:
    """From now on an error of ours that ends the script is the container's last message.

    `signal`: the signal file, if the script names one.
    """
    global _explains
    _signals.extend([signal] if signal else [])
    if not _explains:
        _explains = True
        atexit.register(_explain, os.getpid())


def _explain(pid: int) -> None:
    error = getattr(sys, "last_value", None)
    if not isinstance(error, MigratorError) or os.getpid() != pid:
        return
    place = settings.places(os.environ)
    # A second process (`kubectl exec`) does not speak for the container.
    if SignalOwner(Path(_signals[-1]) if _signals else place.signal).other() is None:
        tell_kubelet(f"migrator: {type(error).__name__}: {error}", place.termination_log)
