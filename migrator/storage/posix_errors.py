"""What the kernel says when a call fails, as a `StorageError` of the right class that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from migrator.errors import (
    StorageAccessError,
    StorageError,
    StorageForeignError,
    StorageFullError,
    StorageNotFoundError,
    StorageReadOnlyError,
    StorageTransientError,
)

_KINDS: dict[int, type[StorageError]] = {
    errno.ENOENT: StorageNotFoundError,
    errno.EISDIR: StorageForeignError,
    errno.ENOTDIR: StorageForeignError,
    errno.ELOOP: StorageForeignError,
    errno.ENXIO: StorageForeignError,
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EFBIG: StorageFullError,
    errno.EACCES: StorageAccessError,
    errno.EPERM: StorageAccessError,
    errno.EROFS: StorageReadOnlyError,
    # Not StorageExistsError: that says that an exclusive name is taken. This is about a file that should be new.
    errno.EEXIST: StorageError,
    errno.ENAMETOOLONG: StorageError,
}
"""All others may go away by themselves."""

_WHAT_TO_DO = {
    errno.ENOSPC: "Make room on the volume, or keep fewer ckpts (MIGRATOR_KEEP)",
    errno.EDQUOT: "Raise the quota, or keep fewer ckpts (MIGRATOR_KEEP)",
    errno.EACCES: "Give the job's user the right to write there, or name another root (MIGRATOR_CKPT)",
    errno.EPERM: "Give the job's user the right to write there, or name another root (MIGRATOR_CKPT)",
    errno.EROFS: "Mount the volume writable, or name another root (MIGRATOR_CKPT)",
    errno.ENOTDIR: "A part of the path is a file; name a directory (MIGRATOR_CKPT)",
    errno.EISDIR: "Something else lies where a file of a ckpt belongs; move it away",
    errno.ENAMETOOLONG: "Choose a shorter root (MIGRATOR_CKPT) or job name (MIGRATOR_JOB)",
    errno.ENOENT: "It should be there; see whether somebody cleans up the volume, or name another root (MIGRATOR_CKPT)",
    errno.EEXIST: "Something lies where a new file belongs; move it away",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or name another root (MIGRATOR_CKPT)",
    errno.EIO: "See the node's kernel log; the volume or the way to it is failing",
    errno.ESTALE: "The server forgot the file; see whether the volume was mounted anew",
}


def kind_of(code: int | None) -> type[StorageError]:
    """The class for an error of this number."""
    return StorageError if code is None else _KINDS.get(code, StorageTransientError)


@contextmanager
def as_storage_error(
    doing: str,
    path: Path,
    *,
    needed: int | None = None,
    passing: type[OSError] | tuple[type[OSError], ...] = (),
) -> Iterator[None]:
    """Raise an `OSError` as a `StorageError`: what was tried, where, why it failed, what to do.

    `needed`: the bytes that were to be written. `passing`: what is raised as it is.
    """
    try:
        yield
    except passing:
        raise
    except OSError as error:
        code = error.errno
        reason = (error.strerror or os.strerror(code)) if code is not None else str(error)
        room = _room(path, needed) if code in (errno.ENOSPC, errno.EDQUOT) else ""
        todo = _WHAT_TO_DO.get(code or 0, "See whether the volume works")
        raise kind_of(code)(f"cannot {doing} {path}: {reason}{room}. {todo}.", errno=code) from error


def _room(path: Path, needed: int | None) -> str:
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return ""
    free = found.f_bavail * found.f_frsize
    return f" (needed {needed if needed is not None else 'some'} bytes, {free} are free)"
