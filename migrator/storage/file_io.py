"""Large calls between buffers and a file descriptor, bypassing the page cache where the kernel can.

Each change of the GIL's owner beside a busy training loop costs up to a second,
so one call moves as much as it can. Filling the page cache is what makes an
ordinary large write slow, so the kernel is asked to bypass it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

_IOV_MAX = 1024
"""Buffers that one call takes at most."""
_CALL_MAX = 1 << 30
"""Bytes that one call moves at most. Linux moves 2 GiB less a page."""
_RWF_DONTCACHE = 0x80
"""The flag of Linux >= 6.14 that bypasses the page cache."""


def write_all(fd: int, buffers: Iterable[memoryview], offset: int) -> int:
    """Write all buffers one after another from `offset` on; returns the offset behind them."""
    flags = _RWF_DONTCACHE

    def write(batch: Sequence[memoryview], at: int) -> int:
        nonlocal flags
        try:
            return os.pwritev(fd, batch, at, flags)
        except OSError as error:
            # The kernel or the file system cannot bypass the cache.
            if not flags or error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            flags = 0
            return os.pwritev(fd, batch, at)

    return _move(write, buffers, offset, lambda at: OSError(errno.EIO, f"nothing was written at byte {at}"))


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
