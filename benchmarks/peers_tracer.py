"""Stops a forked process before each of its calls that change a file: to list them, to kill it, to fill its disk.

By ptrace, since a count has to go over all threads of the process: one saves in a thread of a pool, another in a
thread of its own. A process that is killed at a stop has not made the call it was stopped before.

The price: Linux on x86-64 only, and each call of the process costs two turns through the tracer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TRACEME, _POKEUSER, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 6, 24, 0x4200, 0x420E
_TRACESYSGOOD, _TRACECLONE, _EXITKILL = 1, 8, 1 << 20
_WALL = 0x40000000
_ORIG_RAX, _RAX = 15 * 8, 10 * 8
_SET_PDEATHSIG = 1
_ENTRY, _EXIT = 1, 2
_AT_FDCWD = -100
_SHARED_WRITABLE = (0x2, 0x1)  # PROT_WRITE, MAP_SHARED
_SAVED = 424242
_GETPRIORITY = 140

# Of each call its name and where its files stand: "f" a descriptor, "p" a path, "d" a directory and the path in it.
_CALLS: dict[int, tuple[str, str]] = {
    1: ("write", "f"),
    2: ("open", "p"),
    9: ("mmap", "m"),
    18: ("pwrite64", "f"),
    20: ("writev", "f"),
    26: ("msync", ""),
    40: ("sendfile", "f"),
    74: ("fsync", "f"),
    75: ("fdatasync", "f"),
    76: ("truncate", "p"),
    77: ("ftruncate", "f"),
    82: ("rename", "pp"),
    83: ("mkdir", "p"),
    84: ("rmdir", "p"),
    85: ("creat", "p"),
    86: ("link", "pp"),
    87: ("unlink", "p"),
    88: ("symlink", ".p"),
    257: ("openat", "d"),
    258: ("mkdirat", "d"),
    263: ("unlinkat", "d"),
    264: ("renameat", "dd"),
    265: ("linkat", "dd"),
    266: ("symlinkat", ".d"),
    275: ("splice", "..f"),
    277: ("sync_file_range", "f"),
    285: ("fallocate", "f"),
    296: ("pwritev", "f"),
    316: ("renameat2", "dd"),
    326: ("copy_file_range", "..f"),
    328: ("pwritev2", "f"),
}
WRITES = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "splice", "copy_file_range"})
_TAKES_ROOM = WRITES | {"mkdir", "mkdirat", "open", "openat", "creat", "fallocate"}


@dataclass(frozen=True)
class Event:
    """One call that changes a file, or makes a change durable."""

    call: str
    path: str
    other: str = ""
    """The new name, if the call gives one."""


@dataclass
class Trace:
    """What a process did until it reported success, was killed, or ended."""

    events: list[Event] = field(default_factory=list)
    has_saved: bool = False
    """It has come to `saved()`."""
    was_stopped: bool = False
    """The kill or the full disk it was to have did come."""
    status: int = 0


def saved() -> None:
    """Tell the tracer that the library has reported success: what comes later does not count."""
    with suppress(OSError):
        os.getpriority(os.PRIO_USER, _SAVED)


def can_trace() -> str:
    """Why processes cannot be traced here; empty if they can."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return f"calls are counted on Linux on x86-64 only, not on {platform.system()} on {platform.machine()}"
    trace = run(saved, Path("/nowhere"))
    return "" if trace.has_saved else "processes cannot be traced here (ptrace)"


def run(action: Callable[[], None], below: Path, *, kill_at: int | None = None, full_from: int | None = None) -> Trace:
    """Run `action` in a forked process and list its events on files below a directory.

    `kill_at`: SIGKILL before the event of this number, from 0. `full_from`: from that event on whatever needs room
    fails with ENOSPC.
    """
    pid = _forked(action, is_quiet=full_from is not None)
    trace = Trace()
    stop = _Stop(pid, str(below), kill_at, full_from)
    try:
        _, status = os.waitpid(pid, _WALL)
        if not os.WIFSTOPPED(status):
            trace.status = status
            return trace
        _ptrace(_SETOPTIONS, pid, 0, _TRACESYSGOOD | _TRACECLONE | _EXITKILL)
        known = {pid}
        _resume(pid, 0)
        while True:
            thread, status = os.waitpid(-1, _WALL)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                if thread == pid:
                    trace.status = status
                    return trace
                continue
            number = os.WSTOPSIG(status)
            deliver = 0
            if number == signal.SIGTRAP | 0x80:
                _at_call(trace, thread, stop)
            elif thread not in known:
                known.add(thread)  # the first stop of a new thread
            elif number != signal.SIGTRAP:
                deliver = number
            _resume(thread, deliver)
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


def _forked(action: Callable[[], None], *, is_quiet: bool) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        _libc().prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)
        signal.alarm(60)
        _ptrace(_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        action()
        saved()
        status = 0
    except BaseException:
        if not is_quiet:
            traceback.print_exc()
    finally:
        os._exit(status)


@dataclass
class _Stop:
    """What is to happen, and where."""

    pid: int
    below: str
    kill_at: int | None
    full_from: int | None
    failing: set[int] = field(default_factory=set)
    """Threads in a call that is to fail."""


def _at_call(trace: Trace, thread: int, stop: _Stop) -> None:
    info = ctypes.create_string_buffer(88)
    if _ptrace(_GET_SYSCALL_INFO, thread, 88, ctypes.addressof(info), may_fail=True) < 0:
        return
    kind = info.raw[0]
    if kind == _EXIT and thread in stop.failing:
        stop.failing.discard(thread)
        _ptrace(_POKEUSER, thread, _RAX, -errno.ENOSPC, may_fail=True)
    if kind != _ENTRY or trace.has_saved:
        return
    call, *arguments = struct.unpack_from("<7Q", info.raw, 24)
    if call == _GETPRIORITY and arguments[1] & 0xFFFFFFFF == _SAVED:
        trace.has_saved = True
        return
    event = _event(thread, call, arguments)
    if event is None or not (event.path.startswith(stop.below) or event.other.startswith(stop.below)):
        return
    number = len(trace.events)
    trace.events.append(event)
    if number == stop.kill_at:
        trace.was_stopped = True
        os.kill(stop.pid, signal.SIGKILL)
    if stop.full_from is not None and number >= stop.full_from and event.call in _TAKES_ROOM:
        trace.was_stopped = True
        _ptrace(_POKEUSER, thread, _ORIG_RAX, -1, may_fail=True)
        stop.failing.add(thread)


def _event(thread: int, call: int, arguments: list[int]) -> Event | None:
    if call not in _CALLS:
        return None
    name, places = _CALLS[call]
    if name in ("open", "openat") and not arguments[1 if name == "open" else 2] & (os.O_CREAT | os.O_TRUNC):
        return None
    paths: list[str] = []
    at = 0
    for place in places:
        if place == "f":
            paths.append(_of_fd(thread, arguments[at]))
        elif place == "p":
            paths.append(_of_name(thread, _AT_FDCWD, arguments[at]))
        elif place == "d":
            paths.append(_of_name(thread, arguments[at], arguments[at + 1]))
            at += 1
        elif place == "m":
            writable, shared = _SHARED_WRITABLE
            if not (arguments[2] & writable and arguments[3] & shared):
                return None
            paths.append(_of_fd(thread, arguments[4]))
        at += 1
    return Event(name, *paths)


def _of_fd(thread: int, fd: int) -> str:
    try:
        return str(Path(f"/proc/{thread}/fd/{ctypes.c_int(fd).value}").readlink()).removesuffix(" (deleted)")
    except OSError:
        return ""


def _of_name(thread: int, directory: int, address: int) -> str:
    try:
        with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
            name = b""
            while b"\0" not in name and len(name) < 4096:
                memory.seek(address + len(name))
                # Up to the end of the page: the next one may not be there.
                name += memory.read(4096 - (address + len(name)) % 4096)
        text = os.fsdecode(name.split(b"\0")[0])
        number = ctypes.c_int(directory).value
        base = Path(f"/proc/{thread}/cwd").readlink() if number == _AT_FDCWD else Path(_of_fd(thread, number))
    except OSError:
        return ""
    return os.path.normpath(base / text)


def _resume(thread: int, number: int) -> None:
    _ptrace(_SYSCALL, thread, 0, number, may_fail=True)  # it may have been killed meanwhile


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _ptrace(request: int, thread: int, address: int, data: int, *, may_fail: bool = False) -> int:
    libc = _libc()
    libc.ptrace.restype = ctypes.c_long
    result: int = libc.ptrace(
        ctypes.c_long(request), ctypes.c_long(thread), ctypes.c_void_p(address), ctypes.c_void_p(data)
    )
    if result < 0 and not may_fail:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x}): {os.strerror(ctypes.get_errno())}")
    return result
