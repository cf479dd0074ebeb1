"""Stops a thread of a running process at each of its calls to the kernel: to list them, and to spoil one.

What strace does for the tests, where there is no strace; a test compares the two. By ptrace, and so a process of its
own: the one that takes hold of a thread is the only one that the kernel tells of it.

Run as `python -I -S tests/support/tracer.py THREAD LOG [--inject NAME:FAULT:when=N[+]] [--path PATH]`. It says
`attached` when no call can be made unseen any more, and ends with what it traces. Without a fault it follows all
threads of the process. A line of the log is one call, as
JSON. A fault is `error=NAME`, `retval=N` or `signal=KILL`; of the calls of that name (on that path) the N-th is
spoiled, and with `+` all from there on.

The price: Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import struct
import sys

SEIZE, INTERRUPT, SYSCALL, POKEUSER, GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 6, 0x420E
TRACESYSGOOD, TRACECLONE, EXITKILL = 1, 8, 1 << 20
WALL = 0x40000000
ORIG_RAX, RAX = 15 * 8, 10 * 8
ENTRY, EXIT = 1, 2
AT_FDCWD = -100

# Of each call its name, and what its arguments are: "f" a descriptor, "p" a path, "d" the directory of the path behind
# it, "o" the flags of an open, "." anything else.
CALLS: dict[int, tuple[str, str]] = {
    0: ("read", "f"),
    1: ("write", "f"),
    2: ("open", "po"),
    3: ("close", "f"),
    4: ("stat", "p"),
    5: ("fstat", "f"),
    6: ("lstat", "p"),
    8: ("lseek", "f"),
    16: ("ioctl", "f"),
    17: ("pread64", "f"),
    18: ("pwrite64", "f"),
    19: ("readv", "f"),
    20: ("writev", "f"),
    21: ("access", "p"),
    40: ("sendfile", "f"),
    72: ("fcntl", "f"),
    73: ("flock", "f"),
    74: ("fsync", "f"),
    75: ("fdatasync", "f"),
    76: ("truncate", "p"),
    77: ("ftruncate", "f"),
    78: ("getdents", "f"),
    80: ("chdir", "p"),
    82: ("rename", "pp"),
    83: ("mkdir", "p"),
    84: ("rmdir", "p"),
    85: ("creat", "p"),
    86: ("link", "pp"),
    87: ("unlink", "p"),
    88: ("symlink", "pp"),
    89: ("readlink", "p"),
    90: ("chmod", "p"),
    91: ("fchmod", "f"),
    133: ("mknod", "p"),
    137: ("statfs", "p"),
    138: ("fstatfs", "f"),
    188: ("setxattr", "p"),
    190: ("fsetxattr", "f"),
    217: ("getdents64", "f"),
    221: ("fadvise64", "f"),
    257: ("openat", "dpo"),
    258: ("mkdirat", "dp"),
    259: ("mknodat", "dp"),
    260: ("fchownat", "dp"),
    262: ("newfstatat", "dp"),
    263: ("unlinkat", "dp"),
    264: ("renameat", "dpdp"),
    265: ("linkat", "dpdp"),
    266: ("symlinkat", "pdp"),
    267: ("readlinkat", "dp"),
    268: ("fchmodat", "dp"),
    269: ("faccessat", "dp"),
    277: ("sync_file_range", "f"),
    280: ("utimensat", "dp"),
    285: ("fallocate", "f"),
    295: ("preadv", "f"),
    296: ("pwritev", "f"),
    306: ("syncfs", "f"),
    316: ("renameat2", "dpdp"),
    326: ("copy_file_range", "f"),
    327: ("preadv2", "f"),
    328: ("pwritev2", "f"),
    332: ("statx", "dp"),
    437: ("openat2", "dp"),
    439: ("faccessat2", "dp"),
    452: ("fchmodat2", "dp"),
}

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def missing() -> str | None:
    """Why nothing can be traced here; None if it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"it is for Linux on x86-64, not for {platform.system()} on {platform.machine()}"
    return None


def ptrace(request: int, thread: int, address: int = 0, data: int = 0, *, may_fail: bool = False) -> int:
    result: int = libc.ptrace(request, thread, address, data)
    if result < 0 and not may_fail:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x}): {os.strerror(ctypes.get_errno())}")
    return result


class Fault:
    """Which call is spoiled, and how."""

    def __init__(self, text: str, path: str | None) -> None:
        self.name, self.what, when = text.split(":")
        number = when.removeprefix("when=")
        self.number, self.goes_on = int(number.removesuffix("+")), number.endswith("+")
        self.path = path
        self._seen = 0

    def strikes(self, name: str, paths: list[str]) -> bool:
        """Count this call, if it is one of those."""
        if name != self.name or (self.path is not None and self.path not in paths):
            return False
        self._seen += 1
        return self._seen == self.number or (self.goes_on and self._seen > self.number)

    @property
    def result(self) -> int:
        """What the call is to have returned, as the kernel says it."""
        kind, _, value = self.what.partition("=")
        return -int(getattr(errno, value)) if kind == "error" else int(value)


class Tracer:
    def __init__(self, thread: int, log: str, fault: Fault | None, *, follows: bool) -> None:
        self._thread = thread
        self._log = open(log, "w")  # noqa: SIM115, PTH123
        self._fault = fault
        self._follows = follows
        self._open: dict[int, tuple[str, list[str], str, bool]] = {}
        """Of each thread the call that it is in, and whether that one is spoiled."""
        self._threads: set[int] = set()

    def attach(self) -> None:
        """Of a process that is followed, every thread, and those that they start."""
        options = TRACESYSGOOD | EXITKILL | (TRACECLONE if self._follows else 0)
        tasks = os.listdir(f"/proc/{self._thread}/task") if self._follows else [str(self._thread)]  # noqa: PTH208
        for task in map(int, tasks):
            ptrace(SEIZE, task, 0, options)
            self._threads.add(task)
        for task in self._threads:
            ptrace(INTERRUPT, task)
        waiting = set(self._threads)
        while waiting:
            thread, status = os.waitpid(-1, WALL)
            waiting.discard(thread)
            self._handle(thread, status)

    def run(self) -> None:
        while self._threads:
            thread, status = os.waitpid(-1, WALL)
            self._handle(thread, status)
        self._log.close()

    def _handle(self, thread: int, status: int) -> None:
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            self._threads.discard(thread)
            if thread in self._open:
                self._tell(thread, *self._open.pop(thread)[:3], "?")
            return
        self._threads.add(thread)
        number, deliver = os.WSTOPSIG(status), 0
        if number == signal.SIGTRAP | 0x80:
            self._at_call(thread)
        elif status >> 16 == 0 and number != signal.SIGTRAP:
            deliver = number
        ptrace(SYSCALL, thread, 0, deliver, may_fail=True)  # it may have been killed meanwhile

    def _at_call(self, thread: int) -> None:
        info = ctypes.create_string_buffer(88)
        if ptrace(GET_SYSCALL_INFO, thread, 88, ctypes.addressof(info), may_fail=True) < 0:
            return
        if info.raw[0] == EXIT:
            self._leave(thread, *struct.unpack_from("<q", info.raw, 24))
        elif info.raw[0] == ENTRY:
            number, *arguments = struct.unpack_from("<7Q", info.raw, 24)
            self._enter(thread, number, arguments)

    def _enter(self, thread: int, number: int, arguments: list[int]) -> None:
        if number not in CALLS:
            return
        name, kinds = CALLS[number]
        of = list(zip(kinds, arguments[: len(kinds)], strict=True))
        paths = _paths(thread, of)
        flags = [value for kind, value in of if kind == "o"]
        words = "O_CREAT" if flags and flags[0] & os.O_CREAT else ""
        is_spoiled = self._fault is not None and self._fault.strikes(name, paths)
        self._open[thread] = (name, paths, words, is_spoiled)
        if not is_spoiled:
            return
        assert self._fault is not None
        if self._fault.what == "signal=KILL":
            os.kill(self._thread, signal.SIGKILL)
            return
        ptrace(POKEUSER, thread, ORIG_RAX, 2**64 - 1, may_fail=True)  # there is no such call

    def _leave(self, thread: int, result: int) -> None:
        if thread not in self._open:
            return
        name, paths, words, is_spoiled = self._open.pop(thread)
        mark = ""
        if is_spoiled and self._fault is not None:
            result, mark = self._fault.result, " (INJECTED)"
            ptrace(POKEUSER, thread, RAX, result & (2**64 - 1), may_fail=True)
        if -4096 < result < 0:
            self._tell(thread, name, paths, words, f"-1 {errno.errorcode.get(-result, -result)}{mark}")
        else:
            self._tell(thread, name, paths, words, f"{result}{mark}")

    def _tell(self, thread: int, name: str, paths: list[str], words: str, result: str) -> None:
        call = {"thread": thread, "name": name, "paths": paths, "arguments": words, "result": result}
        self._log.write(json.dumps(call) + "\n")
        self._log.flush()


def _paths(thread: int, arguments: list[tuple[str, int]]) -> list[str]:
    """Of a descriptor the file's, also of a directory that a path is relative to; else what the process said."""
    kind, value = arguments[0]
    if kind == "f" or (kind == "d" and ctypes.c_int(value).value != AT_FDCWD):
        return [found] if (found := _of_fd(thread, value)) else []
    return [_text(thread, value) for kind, value in arguments if kind == "p"]


def _of_fd(thread: int, fd: int) -> str:
    try:
        return os.readlink(f"/proc/{thread}/fd/{ctypes.c_int(fd).value}").removesuffix(" (deleted)")  # noqa: PTH115
    except OSError:
        return ""


def _text(thread: int, address: int) -> str:
    try:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            found = b""
            while b"\0" not in found and len(found) < 4096:
                memory.seek(address + len(found))
                # Up to the end of the page: the next one may not be there.
                found += memory.read(4096 - (address + len(found)) % 4096)
    except (OSError, ValueError):
        return ""
    return os.fsdecode(found.split(b"\0")[0])


def main() -> None:
    thread, log, *options = sys.argv[1:]
    given = dict(zip(options[::2], options[1::2], strict=True))
    fault = Fault(given["--inject"], given.get("--path")) if "--inject" in given else None
    tracer = Tracer(int(thread), log, fault, follows=fault is None)
    tracer.attach()
    print("attached", flush=True)
    tracer.run()


if __name__ == "__main__":
    main()
