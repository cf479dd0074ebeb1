"""Writes and reads a large file around the page cache (O_DIRECT), in constant memory.

The disk then takes the bytes from our memory, or puts them there, without a copy by the kernel. But such memory has to
begin and to end at a page, and tensors do not. So the bytes are copied by way of a few buffers. That costs less than
the kernel's copy: the same few buffers are used again and again, where the page cache takes fresh memory for each page,
which a virtual machine may have to get from its host first.

A writer's threads give buffers to the disk while the next ones are filled. Space is reserved ahead of them: a file that
grows with each write takes longer. The last page is written whole, and the file cut behind its last byte. A reader has
no threads of its own: it is called by several.

The price: the memory of the buffers, which is kept for the next file, and threads while one is written.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from migrator.storage import posix_calls as calls

if TYPE_CHECKING:  # ckpts are listed without it
    import numpy as np

BUFFER = 4 << 20
"""Bytes of one buffer, which are those of one write: a multiple of `PAGE`."""
BUFFERS = 6
THREADS = 3
"""Writes that are under way at a time."""
RESERVED = 1 << 30
"""Bytes for which space is reserved at a time: a process that is killed leaves them behind, until they are swept."""
PAGE = 4096
"""What memory, offsets and sizes have to be multiples of: disks have blocks of 512 or 4096 bytes."""
HUGE_PAGE = 2 << 20
"""A write from huge pages is a few requests to the disk; one from single pages is many, and takes longer."""
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, for which Python has no name. Linux >= 4.14."""
_SAMPLES = 64
"""Pages of a file that are looked for in the page cache."""
_TICK_S = 0.5
"""Seconds after which a wait looks again, should it not have been told."""


def set_direct(fd: int, *, is_direct: bool) -> None:
    """Whether writes go around the page cache from now on; `OSError` where the file system cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)


def is_possible(fd: int) -> bool:
    """Tried with this new file. Its first page is written. An error of the disk is raised.

    A file system in memory takes the flag, and then there is a cache all the same, and one copy more. So the page must
    not be in the cache behind the write.
    """
    try:
        page = _memory(PAGE)
        set_direct(fd, is_direct=True)
    except (OSError, AttributeError, MemoryError):  # or a system without O_DIRECT
        return False
    try:
        if os.pwritev(fd, [page], 0) != PAGE:
            return False
    except OSError as error:
        if error.errno not in calls.UNKNOWN:
            raise
        return False
    finally:
        set_direct(fd, is_direct=False)
    try:
        again = calls.opened_again(fd, os.O_RDONLY)
    except OSError:  # no /proc, or nobody may read a file that is being written
        return False
    try:
        return cached_share(again, PAGE) == 0
    finally:
        os.close(again)


def cached_share(fd: int, size: int) -> float:
    """How much of a file lies in the page cache, from 0 to 1, by a few pages; 1 if the system does not tell.

    It does not tell a user who neither owns nor may write the file. A read with RWF_NOWAIT would tell, but it also
    begins to read ahead.
    """
    if _mincore is None or not size:
        return 1.0
    found, told = 0, ctypes.c_ubyte()
    try:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            begin = _array(mapping).ctypes.data
            for part in range(_SAMPLES):
                page = begin + size * part // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE
                if _mincore(page, mmap.PAGESIZE, ctypes.byref(told)) != 0:
                    return 1.0
                found += told.value & 1
    except (OSError, ValueError):  # it cannot be mapped (FUSE), or is shorter now
        return 1.0
    return found / _SAMPLES


def _mincore_of_libc() -> Any:
    """Python has no function for it; None where the C library has none either."""
    try:
        call = ctypes.CDLL(None).mincore
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return call


_mincore = _mincore_of_libc()


def _memory(size: int) -> memoryview:
    """Memory that begins at a huge page, and consists of such pages if there are any."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages, or a system
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # Else a fork (a loader's workers) would share the pages with the child, and what is written next would go to single
    # pages; and O_DIRECT from shared pages needs care that nothing else here needs.
    with suppress(OSError, AttributeError):
        mapping.madvise(_WIPE_ON_FORK)
    begin = -int(_array(mapping).ctypes.data) % HUGE_PAGE
    return memoryview(mapping)[begin : begin + size]


def _array(buffer: memoryview | mmap.mmap) -> np.ndarray[Any, Any]:
    """The bytes of a buffer, not copied."""
    import numpy as np

    return np.frombuffer(buffer, np.uint8)


def _copy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Without the interpreter's lock, which an assignment to a part of a memoryview would hold."""
    import numpy as np

    np.copyto(target, source)


_idle: list[memoryview] = []
"""Memory that no file uses. To touch fresh memory takes as long as to write some of it."""


def _borrowed() -> memoryview:
    """The memory of all buffers of a file."""
    try:
        memory = _idle.pop()
    except IndexError:
        memory = memoryview(b"")
    return memory if len(memory) == BUFFERS * BUFFER else _memory(BUFFERS * BUFFER)


def _returned(memory: memoryview) -> None:
    if not _idle:
        _idle.append(memory)


def _fallocate_of_libc() -> Any:
    """Python only has `posix_fallocate`, which writes to every page where the file system has no such call."""
    try:
        call = ctypes.CDLL(None).fallocate
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call


_fallocate = _fallocate_of_libc() if ctypes.sizeof(ctypes.c_long) == 8 else None
"""Not where an offset may have 32 bits."""


def touch_memory() -> None:
    """Have the memory of one file's buffers ready. A virtual machine may have to get it from its host first."""
    if _idle:
        return
    with suppress(OSError, MemoryError):
        memory = _borrowed()
        _array(memory)[:] = 0
        _returned(memory)


class DirectFile:
    """A file that is written from front to back. `close()` has to be called before its descriptor is closed."""

    def __init__(self, fd: int, expected: int = 0) -> None:
        """`expected`: about how many bytes will be written."""
        self._fd = fd
        self._expected = expected
        self._reserved = 0
        """Bytes for which space was reserved."""
        self.size = 0
        self._buffer: memoryview | None = None
        """The buffer that is being filled: with the bytes from the last multiple of `BUFFER` to `size`."""
        self._memory: memoryview | None = _borrowed()
        self._free = [self._memory[at : at + BUFFER] for at in range(0, len(self._memory), BUFFER)]
        self._full: deque[tuple[int, memoryview]] = deque()
        """What is to be written, and where."""
        self._under_way = 0
        self._cond = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._is_direct = False
        self._is_over = False

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append all of them. A failure may be one of an earlier call's bytes; nothing can be appended behind it."""
        self._check()
        for buffer in buffers:
            source, at = _array(buffer), 0
            while at < len(source):
                if self._buffer is None:
                    self._buffer = self._taken()
                begin = self.size % BUFFER
                count = min(len(source) - at, BUFFER - begin)
                _copy(source[at : at + count], _array(self._buffer)[begin : begin + count])
                self.size += count
                at += count
                if self.size % BUFFER == 0:
                    full, self._buffer = self._buffer, None
                    self._hand_over(self.size - BUFFER, full)

    def finish(self) -> None:
        """Wait until all of it is written, the rest behind the last whole buffer too. Then the file can be synced."""
        if self._buffer is not None:
            begin = self.size - self.size % BUFFER
            last, self._buffer = self._buffer, None
            used = self.size - begin
            whole = -(-used // PAGE) * PAGE
            _array(last)[used:whole] = 0
            self._hand_over(begin, last[:whole])
        with self._cond:
            while (self._full or self._under_way) and not self._error:
                self._cond.wait(_TICK_S)
        self._check()
        # Behind the last byte there may be the rest of its page, and of the space that was reserved.
        os.ftruncate(self._fd, self.size)
        self.close()

    def close(self) -> None:
        """Wait for what is under way: the descriptor's number may be another file's next."""
        with self._cond:
            self._is_over = True
            self._full.clear()
            self._cond.notify_all()
        for thread in self._threads:
            thread.join()
        memory, self._memory = self._memory, None
        if memory is not None:
            _returned(memory)
        # An error keeps its frames alive, and these this file and what was to be written.
        self._error = None

    def _taken(self) -> memoryview:
        """An empty buffer."""
        with self._cond:
            while True:
                self._check()
                if self._free:
                    return self._free.pop()
                self._cond.wait(_TICK_S)

    def _hand_over(self, offset: int, buffer: memoryview) -> None:
        if not self._is_direct:
            self._is_direct = True
            with suppress(OSError):  # then through the cache
                set_direct(self._fd, is_direct=True)
            self._reserve()
            self._start()
        elif offset >= self._reserved:
            self._reserve()
        if not self._threads:
            try:
                self._write_out(offset, buffer)
            except BaseException as error:
                self._error = error
                raise
            self._free.append(buffer)
            return
        with self._cond:
            self._check()
            self._full.append((offset, buffer))
            self._cond.notify_all()

    def _reserve(self) -> None:
        """Have the file system reserve space for what comes next."""
        size = min(RESERVED, self._expected - self._reserved)
        if _fallocate is not None and size > 0:
            # If there is not enough, or no such call, the writes tell.
            _fallocate(self._fd, 0, self._reserved, size)
            self._reserved += size

    def _start(self) -> None:
        for _ in range(THREADS):
            thread = threading.Thread(target=self._run, name="migrator-writes", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are as many threads as are allowed
                return
            self._threads.append(thread)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_over:
            raise ValueError("the file is closed")

    # The threads.

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._full and not self._is_over:
                    self._cond.wait(_TICK_S)
                if not self._full:
                    return
                offset, buffer = self._full.popleft()
                self._under_way += 1
            try:
                self._write_out(offset, buffer)
            except BaseException as error:  # raised by the thread that fills the buffers
                with self._cond:
                    self._error = self._error or error
                    self._full.clear()
            with self._cond:
                self._under_way -= 1
                self._free.append(buffer)
                self._cond.notify_all()

    def _write_out(self, offset: int, buffer: memoryview) -> None:
        may_be_refused = True
        while buffer:
            try:
                count = os.pwritev(self._fd, [buffer], offset)
            except OSError as error:
                # Not so many bytes, or not from this memory: the rest of a short write, or disks with larger blocks.
                if error.errno not in calls.UNKNOWN or not may_be_refused:
                    raise
                may_be_refused = False
                set_direct(self._fd, is_direct=False)
                continue
            if count <= 0:
                raise OSError(errno.EIO, f"nothing was written at byte {offset}")
            offset += count
            buffer = buffer[count:]


class DirectReader:
    """A file of which ranges are read, by at most `BUFFERS` threads at a time without a wait of one for another.

    `OSError` with EINVAL where the file system refuses it. Nothing may be read any more when `close()` is called.
    """

    def __init__(self, fd: int) -> None:
        """`fd`: opened for this alone, and closed by this."""
        self._fd = fd
        try:
            self._memory = _borrowed()
        except BaseException:
            os.close(fd)
            raise
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for at in range(0, len(self._memory), BUFFER):
            self._free.put(self._memory[at : at + BUFFER])

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all buffers with what lies from `offset` on; `EOFError` if the file ends before."""
        rest = deque(_array(buffer) for buffer in buffers if len(buffer))
        end = offset + sum(map(len, rest))
        own = self._free.get()
        try:
            while offset < end:
                # Whole pages, although the range and the file may begin and end in the midst of one.
                begin = offset // PAGE * PAGE
                size = min(BUFFER, -(-(end - begin) // PAGE) * PAGE)
                found = min(begin + os.preadv(self._fd, [own[:size]], begin), end) - offset
                if found <= 0:
                    raise EOFError(f"the file ends already at byte {offset}")
                _scattered(_array(own)[offset - begin : offset - begin + found], rest)
                offset += found
        finally:
            self._free.put(own)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        # Not if a read that nobody waited for may still put bytes there: a save would write them.
        if self._free.qsize() == BUFFERS:
            _returned(self._memory)


def _scattered(source: np.ndarray[Any, Any], rest: deque[np.ndarray[Any, Any]]) -> None:
    """Copy this to the front of what is still to be filled."""
    at = 0
    while at < len(source):
        target = rest.popleft()
        count = min(len(target), len(source) - at)
        _copy(source[at : at + count], target[:count])
        at += count
        if count < len(target):
            rest.appendleft(target[count:])
