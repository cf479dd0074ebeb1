"""How a large file gets past the page cache, in constant memory: what works on a volume, and ways through the cache.

`direct_io` goes around the cache; it is taken for large files where it works. This here is for all others. Filling the
page cache is what makes an ordinary large write slow, and it takes the memory of the pod. So each piece is given to
the disk as soon as it is written, and its pages are let go when the disk has it. A few pieces are under way at a time:
fewer leave the disk idle, more fill the cache.

A piece is small, so that the disk starts early. But each call gives the interpreter's lock away, and beside a busy
training loop it may take long to come back. So pieces grow where a call takes long.

The price: where the kernel offers none of the ways, it is an ordinary write.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from migrator.storage import direct_io
from migrator.storage import posix_calls as calls
from migrator.storage.direct_io import DirectFile

PIECE = 8 << 20
"""Bytes of one write, at first."""
PIECE_MAX = 32 << 20
"""Bytes of one write at most."""
WINDOW = 48 << 20
"""Bytes that may be under way to the disk when the next piece is written."""
PAGE = 4096
DIRECT_FROM = 8 << 20
"""Files of fewer bytes do not go around the cache: threads and a flag would cost more than they gain."""
_SLOW_S = 0.02
"""A write that takes longer, in seconds, makes the next ones larger."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""The flags of `sync_file_range`."""


class Way(enum.Enum):
    """How the page cache is bypassed."""

    DONTCACHE = "RWF_DONTCACHE"
    """The kernel starts to write at once and drops the pages itself. Linux >= 6.14, and not on all file systems."""
    DROP_BEHIND = "sync_file_range"
    """We ask for each of the two."""
    NONE = "page cache"


SyncFileRange = Callable[[int, int, int, int], None]


def _sync_file_range() -> SyncFileRange | None:
    """Python has no function for it; None where the C library has none either."""
    try:
        library = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    library.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def call(fd: int, offset: int, size: int, flags: int) -> None:
        while library(fd, offset, size, flags) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    return call


sync_file_range = _sync_file_range()


@dataclass(frozen=True)
class Bypass:
    """What works on a volume."""

    way: Way
    waits: bool = False
    """The kernel can be asked to wait for a range of a file."""
    is_direct: bool = False
    """Large files can be written around the page cache: `direct_io`."""

    def __str__(self) -> str:
        return "O_DIRECT" if self.is_direct else self.way.value


def find_bypass(fd: int) -> Bypass:
    """Tried with this new file. Its first bytes are written."""
    # Here any error means that the call cannot be used. Later it means that the disk failed, and is told only once.
    waits, is_direct = False, direct_io.is_possible(fd)
    if sync_file_range is not None and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            sync_file_range(fd, 0, 0, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            waits = True
    try:
        if calls.write_past_cache(fd, memoryview(b"probe"), 0):
            return Bypass(Way.DONTCACHE, waits, is_direct)
    except NotImplementedError:  # the C library that Python was built with has no call for it
        pass
    except OSError as error:
        if error.errno not in calls.UNKNOWN:
            raise
    return Bypass(Way.DROP_BEHIND if waits else Way.NONE, waits, is_direct)


def goes_direct(bypass: Bypass, size: int) -> bool:
    """Whether a file of so many bytes goes around the page cache."""
    return bypass.is_direct and size >= DIRECT_FROM


def large_file(fd: int, bypass: Bypass, size: int) -> LargeFile | DirectFile:
    """A new file that will have about `size` bytes."""
    if goes_direct(bypass, size):
        with contextlib.suppress(OSError, MemoryError):  # no memory for the buffers
            return DirectFile(fd, size)
    return LargeFile(fd, bypass)


class LargeFile:
    """A file that is written from front to back, through the page cache."""

    def __init__(self, fd: int, bypass: Bypass) -> None:
        self._fd = fd
        self._way = bypass.way
        self._waits = bypass.waits and bypass.way is not Way.NONE
        self._piece = PIECE
        self._under_way: deque[tuple[int, int]] = deque()
        self.size = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append all of them. A failure of the disk may be one of an earlier call's bytes."""
        rest = deque(buffer for buffer in buffers if len(buffer))
        while rest:
            start_s = time.perf_counter()
            begin = self.size
            # Up to the end of a page: one that is written twice has to be waited for.
            piece = _taken(rest, self._piece - (begin + self._piece) % PAGE)
            self.size = calls.write_all(self._fd, piece, begin, past_cache=self._way is Way.DONTCACHE)
            if time.perf_counter() - start_s > _SLOW_S:
                self._piece = min(2 * self._piece, PIECE_MAX)
            if self._waits:
                self._hand_over(begin, self.size - begin)

    def finish(self) -> None:
        """All of it is written."""

    def close(self) -> None:
        """Nothing is under way that uses the descriptor."""

    def _hand_over(self, begin: int, size: int) -> None:
        """Have these bytes written, and wait until not too much is under way."""
        assert sync_file_range is not None
        if self._way is Way.DROP_BEHIND:
            sync_file_range(self._fd, begin, size, _WRITE)
        self._under_way.append((begin, size))
        if sum(size for _, size in self._under_way) <= WINDOW:
            return
        # A third of it at once: each call may have to wait for the interpreter's lock.
        first, last = self._under_way[0][0], 0
        while self._under_way and last - first < WINDOW // 3:
            begin, size = self._under_way.popleft()
            last = begin + size
        # An error of the disk is told here and not by the sync at the end.
        sync_file_range(self._fd, first, last - first, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        if self._way is Way.DROP_BEHIND:
            os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)


def _taken(rest: deque[memoryview], size: int) -> Iterator[memoryview]:
    """The next `size` bytes, or what is left."""
    while rest and size > 0:
        buffer = rest.popleft()
        yield buffer[:size]
        if len(buffer) > size:
            rest.appendleft(buffer[size:])
        size -= len(buffer)
