"""What the kernel is asked: names written aside, synced, linked, renamed, removed; and large reads and writes.

A call that reports success without acting is detected: after it the name is looked for.
Everything here raises `OSError`, as the kernel does; `posix` makes it an error of ours.

Each change of the GIL's owner beside a busy training loop costs up to a second, so one
read or write moves as much as it can. `page_cache` writes large files.

The kernel is asked by way of `os` alone, here and in `posix`. So a test can put another
one in its place, one that forgets what was not synced. (`page_cache` and
`direct_io` have calls of their own, which make nothing durable.)
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

HIDDEN = "."
LEFTOVER = re.compile(r"\..+\.(?:[0-9a-f]{12}\.tmp|claim)", re.ASCII)
"""The hidden names that `aside` and `link` make."""

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})

_IOV_MAX = 1024
"""Buffers that one call takes at most."""
_CALL_MAX = 1 << 30
"""Bytes that one call moves at most. Linux moves 2 GiB less a page."""
UNKNOWN = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})
"""Errors of a call that is not there. EPERM comes from a container runtime that knows no newer calls."""
_RWF_DONTCACHE = 0x80
"""The flag of Linux >= 6.14 that bypasses the page cache."""


def aside(target: Path) -> Path:
    """A hidden name beside this one, that no other writer makes."""
    return target.with_name(f"{HIDDEN}{target.name.lstrip('.')}.{uuid.uuid4().hex[:12]}.tmp")


def create(path: Path) -> int:
    """A descriptor to write a new file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_synced(path: Path, data: bytes) -> None:
    """A new small file with durable bytes. Its name is not durable yet."""
    fd = create(path)
    try:
        write_all(fd, [memoryview(data)], 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make durable what was made, renamed or removed in a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems (FUSE, SMB) have no sync for directories and no need of one.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Make one directory, unless it is there; its name is not durable yet."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        if not is_directory(directory):
            raise NotADirectoryError(errno.ENOTDIR, "is a file", str(directory)) from None
    if not is_there(directory):
        raise OSError(errno.EIO, "it was reported as made and is not there")


def unlink(path: Path) -> None:
    """Remove a file; none there is fine."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def rename(source: Path, target: Path) -> None:
    """Move a name, over what has it."""
    os.rename(source, target)
    if is_there(source) or not is_there(target):
        raise OSError(errno.EIO, "it was reported as renamed and is not")


def link(source: Path, target: Path) -> None:
    """Give a file a second name; `FileExistsError` if that name is taken.

    Unlike rename(), link() never takes a name that is in use.
    """
    try:
        os.link(source, target)
        if not is_there(target):
            raise OSError(errno.EIO, "it was reported as linked and is not")
    except OSError as error:
        # Over a network the answer to a link that was made can get lost; the call repeated finds it taken.
        if _is_same_file(source, target):
            return
        if error.errno not in _NO_LINKS:
            raise
        _claim_and_rename(source, target)


def _claim_and_rename(source: Path, target: Path) -> None:
    """Where there are no links: an empty file that only one can make stands for the right to rename.

    Not the target itself: a crash in between would leave it there, empty, for ever.
    """
    claim = target.with_name(f"{HIDDEN}{target.name}.claim")
    os.close(create(claim))
    try:
        # By listing: a caller that asks for the name alone may get an older answer (NFS).
        if target.name in os.listdir(target.parent):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        rename(source, target)
    finally:
        unlink(claim)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except OSError:
        return False


def is_directory(path: Path) -> bool:
    """Whether there is a directory of this name, or a link to one."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_link(path: str) -> bool:
    """Whether the name is that of a symbolic link."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def is_there(path: Path) -> bool:
    """Whether anything has this name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_past_cache(fd: int, buffer: memoryview, offset: int) -> bool:
    """Write a little and bypass the page cache; `OSError` if the kernel or the file system cannot."""
    return os.pwritev(fd, [buffer], offset, _RWF_DONTCACHE) == len(buffer)


def write_all(fd: int, buffers: Iterable[memoryview], offset: int, *, past_cache: bool = False) -> int:
    """Write all buffers one after another from `offset` on; returns the offset behind them."""
    flags = _RWF_DONTCACHE if past_cache else 0

    def write(batch: Sequence[memoryview], at: int) -> int:
        nonlocal flags
        try:
            return os.pwritev(fd, batch, at, flags) if flags else os.pwritev(fd, batch, at)
        except (OSError, NotImplementedError) as error:
            # The kernel, the file system or the C library cannot bypass the cache.
            if not flags or getattr(error, "errno", None) not in {*UNKNOWN, None}:
                raise
            flags = 0
            return os.pwritev(fd, batch, at)

    return _move(write, buffers, offset, lambda at: OSError(errno.EIO, f"nothing was written at byte {at}"))


def opened_again(fd: int, flags: int) -> int:
    """Another descriptor of the same file, with a position and flags of its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def read_all(fd: int, buffers: Iterable[memoryview], offset: int) -> int:
    """Fill all buffers one after another from `offset` on; `EOFError` if the file ends before."""

    def read(batch: Sequence[memoryview], at: int) -> int:
        return os.preadv(fd, batch, at)

    return _move(read, buffers, offset, lambda at: EOFError(f"the file ends already at byte {at}"))


def _move(
    call: Callable[[Sequence[memoryview], int], int],
    buffers: Iterable[memoryview],
    offset: int,
    stuck: Callable[[int], Exception],
) -> int:
    """Repeat `call` until it has moved everything: it may move less than it was given."""
    left = [piece for buffer in buffers for piece in _cut(buffer, _CALL_MAX)]
    left.reverse()
    while left:
        batch: list[memoryview] = []
        size = 0
        while left and len(batch) < _IOV_MAX and size + len(left[-1]) <= _CALL_MAX:
            size += len(left[-1])
            batch.append(left.pop())
        moved = call(batch, offset)
        if moved <= 0:
            raise stuck(offset)
        offset += moved
        left.extend(reversed(_behind(batch, moved)))
    return offset


def _behind(batch: list[memoryview], moved: int) -> list[memoryview]:
    for i, piece in enumerate(batch):
        if moved < len(piece):
            return [piece[moved:], *batch[i + 1 :]]
        moved -= len(piece)
    return []


def _cut(buffer: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(buffer), size):
        yield buffer[start : start + size]
