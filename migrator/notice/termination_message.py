"""The termination message: the text that kubelet shows as the last state of the container.

Kubelet reads one small file when the container has ended. A first message is written
when the notice arrives, so that there is one even after SIGKILL; the outcome replaces
it. An error of this package that ends the script is written there, too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path

from migrator import settings
from migrator.errors import MigratorError
from migrator.notice.signal_file_owner import SignalFileOwner

_BYTES = 4096
"""Maximum size of the message, in bytes. Of a longer one kubelet shows only the end."""


def write(message: str, place: Path) -> None:
    """Write the message if kubelet has made the file for it. Errors are ignored: log and signal file say the same."""
    line = " ".join(message.split()).encode(errors="backslashreplace")
    # Decoded and encoded, because a character that is cut in two would not be shown.
    data = line[: _BYTES - 1].decode(errors="ignore").encode() + b"\n"
    try:
        # O_NONBLOCK: opening a pipe would block for ever.
        fd = os.open(place, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except OSError:
        return


class TerminationMessage:
    """The message of a process that has a notice."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._is_said = False

    def begin(self, message: str) -> None:
        """Write the message for the case that the process is killed before it can write another one."""
        with self._lock:
            # The watcher's thread writes this. It may be late, after a save that took only milliseconds.
            if not self._is_said:
                write(f"migrator: {message}", self._place)

    def say(self, message: str) -> None:
        """Write the outcome."""
        with self._lock:
            self._is_said = True
            write(f"migrator: {message}", self._place)


_signals: list[str] = []
_explains = False


def explain_errors(*, signal: str | None = None) -> None:
    """From now on write an error of this package that ends the script as the termination message.

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
    # A second process (`kubectl exec`) must not write the message of the container.
    if SignalFileOwner(Path(_signals[-1]) if _signals else place.signal).other() is None:
        write(f"migrator: {type(error).__name__}: {error}", place.termination_log)
