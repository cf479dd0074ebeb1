"""Which process answers the hook: one at a time, the owner of the signal file.

A second process in the trainer's container (an evaluation by `kubectl exec`) runs
the same lines and finds the same signal file. It must neither answer the hook in
the trainer's place nor take the file away when it ends. Process ids in a file do
not tell whether their process lives: after a restart of the container the same
number is another process. So the owner holds a lock of the kernel, which ends with
the process, however it ends, and which a forked child does not inherit.

Where the lock cannot be had (a file system without locks) nothing is checked, and
the log says so.

The price: one more file beside the signal file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

from migrator.errors import SettingsError
from migrator.events import log

_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_LOOKS, _PAUSE_S = 10, 0.02
"""A process that only looks who the owner is holds the lock for a moment."""
_READ_AT_MOST = 300
_UNKNOWN = "of an unknown number"


class SignalOwner:
    """This process' claim to a signal file."""

    def __init__(self, signal: Path) -> None:
        self._signal = signal
        self._path = signal.with_name(f".{signal.name}.owner")
        self._fd = -1

    def take(self) -> None:
        """Become the owner; `SettingsError` if another process is, and nothing was touched then."""
        other: str | None = None
        for _ in range(_LOOKS):
            other = self._try(fcntl.LOCK_EX)
            if other is None:
                return
            time.sleep(_PAUSE_S)
        raise SettingsError(self.refusal(other or ""))

    def other(self) -> str | None:
        """Which process is the owner; None if there is none. Only before `take()`."""
        found = self._try(fcntl.LOCK_SH)
        self._close()
        return found

    def refusal(self, other: str) -> str:
        """What to tell the second process."""
        return (
            f"listening(): process {other} listens already, with the signal file {self._signal}. It answers the pod's "
            "hook and was not disturbed. If this is a job of its own, give it a signal file and a name of its own "
            "(MIGRATOR_SIGNAL, MIGRATOR_JOB). If it only reads what the other one saves, it needs no listening(): the "
            "parts of a ckpt are safetensors files."
        )

    def release(self) -> None:
        """Give it up. May be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before the lock goes: it may be another owner's file a moment later
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _try(self, how: int) -> str | None:
        """Lock it, or say who has."""
        try:
            self._open(may_make=how == fcntl.LOCK_EX)
            fcntl.lockf(self._fd, how | fcntl.LOCK_NB)
            if how == fcntl.LOCK_EX:
                if not os.path.samestat(os.fstat(self._fd), self._path.stat()):
                    raise FileNotFoundError(errno.ENOENT, "its owner took it away just now", str(self._path))
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()} ({sys.argv[0] if sys.argv else ''})".encode()[:_READ_AT_MOST], 0)
        except FileNotFoundError:
            self._close()
            return _UNKNOWN if how == fcntl.LOCK_EX else None  # to be tried again
        except OSError as error:
            if self._fd >= 0 and error.errno in _TAKEN:
                found = os.pread(self._fd, _READ_AT_MOST, 0).decode(errors="replace")
                self._close()
                return " ".join(found.split()) or _UNKNOWN
            log("watch_weak", level=logging.WARNING, way="the signal file's owner", error=error)
        return None

    def _open(self, *, may_make: bool) -> None:
        if self._fd >= 0:
            return
        try:
            # In a directory like /tmp nobody may open another user's file in a way that might make it.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not may_make:
                raise
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            os.fchmod(self._fd, 0o666)  # the next container may run as another user
