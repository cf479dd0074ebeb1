"""Which process answers the hook: the owner of the signal file. There is one at a time.

A second process in the trainer's container (an evaluation by `kubectl exec`) may run
the same script and use the same signal file. It must not answer the hook instead of
the trainer, and must not remove the file when it ends. A process id in a file does
not show whether its process lives: after a restart of the container another process
has the same id. So the owner holds a kernel lock, which ends with the process in any
case, and which a forked child does not inherit.

On a file system without locks nothing is checked, and a warning is logged.

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
_TRIES, _PAUSE_S = 10, 0.02
"""Number of attempts to lock, and the seconds between them: a process that only asks for the owner holds the lock for a
moment."""
_READ_AT_MOST = 300
"""Maximum size of what the owner writes about itself, in bytes."""
_UNKNOWN = "of an unknown number"


class SignalFileOwner:
    """The lock beside one signal file, as this process sees it."""

    def __init__(self, signal: Path) -> None:
        self._signal = signal
        self._path = signal.with_name(f".{signal.name}.owner")
        self._fd = -1

    def take(self) -> None:
        """Become the owner. `SettingsError` if another process is the owner; nothing was changed then."""
        other: str | None = None
        for _ in range(_TRIES):
            other = self._try(fcntl.LOCK_EX)
            if other is None:
                return
            time.sleep(_PAUSE_S)
        raise SettingsError(self.refusal(other or ""))

    def other(self) -> str | None:
        """The process that is the owner, as text; None if there is none. Only before `take()`."""
        found = self._try(fcntl.LOCK_SH)
        self._close()
        return found

    def refusal(self, other: str) -> str:
        """The error for a second process; `other`: the owner."""
        return (
            f"listening(): process {other} listens already, with the signal file {self._signal}. It answers the pod's "
            "hook and was not disturbed. If this process is another job, give it a signal file and a name of its own "
            "(MIGRATOR_SIGNAL, MIGRATOR_JOB). If it only reads what the other one saves, it needs no listening(): the "
            "parts of a ckpt are safetensors files."
        )

    def release(self) -> None:
        """Stop being the owner. May be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before the unlock, after which the file may belong to another owner
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _try(self, how: int) -> str | None:
        """Lock the file and return None, or return which process holds the lock."""
        try:
            self._open(may_make=how == fcntl.LOCK_EX)
            fcntl.lockf(self._fd, how | fcntl.LOCK_NB)
            if how == fcntl.LOCK_EX:
                if not os.path.samestat(os.fstat(self._fd), self._path.stat()):
                    raise FileNotFoundError(errno.ENOENT, "its owner has just removed it", str(self._path))
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()} ({sys.argv[0] if sys.argv else ''})".encode()[:_READ_AT_MOST], 0)
        except FileNotFoundError:
            self._close()
            return _UNKNOWN if how == fcntl.LOCK_EX else None  # the caller tries again
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
            # In a sticky directory like /tmp the kernel refuses O_CREAT on another user's file, even if it exists.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not may_make:
                raise
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            os.fchmod(self._fd, 0o666)  # the next container may run as another user
