"""The process between the stand-in kubelet and one container, like the shim of a container runtime.

It is a separate script that imports only the standard library, so it starts in a few
milliseconds. It makes the PID namespace if this is possible, starts the container's
process in it as process 1, starts hooks in it, and reaps all processes. When its
standard input ends, its parent has ended in some way, and it kills all that it started.

Lines of JSON come in, lines of JSON go out:

    {"start": process}                      -> {"started": pid, "is_pid_1": bool} or {"failed": text}
    {"exec": process, "id": n}              -> {"exec_ended": n, "status": s} or {"exec_failed": n, "why": text}
    {"signal": n}
    {"kill": true}                             SIGKILL to all processes of the container
                                            -> {"ended": s} once, when process 1 has ended

A process is {"argv", "env", "cwd", "out"}; a status is that of `os.waitpid`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x4000, 0x40000, 2, 4, 8
PR_SET_CHILD_SUBREAPER = 36

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def unshare() -> None:
    """From now on the children of this process are in a new PID namespace."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
        return
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - importing pathlib would be slow
            file.write(text)


def mount_proc() -> None:
    """Mount a `/proc` that shows the processes of the new namespace."""
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount /")
    check(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None), "mount /proc")


def spawn(process: dict[str, Any], *, mounts: bool = False) -> int:
    """Start a process and return its pid. `OSError` if it cannot be started."""
    read, write = os.pipe()  # exec closes it; on an error before, the child writes the reason
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setsid()
            if mounts:
                mount_proc()
            out = os.open(process["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)  # the interpreter has changed these
            os.chdir(process["cwd"])
            os.execvpe(process["argv"][0], process["argv"], process["env"])
        except OSError as error:
            # If the program is not in PATH, the file name in the error is the last path that was tried, as bytes.
            named = error.filename if isinstance(error.filename, str) else process["argv"][0]
            os.write(write, f"{named}: {error.strerror}".encode())
        finally:
            os._exit(127)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        failed = pipe.read()
    if failed:
        os.waitpid(pid, 0)
        raise OSError(failed.decode())
    return pid


def descendants() -> list[int]:
    """All descendants of this process, in any session."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Shim:
    """One container."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._is_pid_1 = False
        self._execs: dict[int, int] = {}

    def send(self, **words: Any) -> None:
        with contextlib.suppress(OSError):  # the reader has ended, as the end of the input will show
            os.write(1, json.dumps(words).encode() + b"\n")

    def run_command(self, words: dict[str, Any]) -> None:
        if "start" in words:
            self._start(words["start"], wants_pid_1=words["wants_pid_1"])
        elif "exec" in words:
            try:
                self._execs[spawn(words["exec"])] = words["id"]
            except OSError as error:
                self.send(exec_failed=words["id"], why=str(error))
        elif "signal" in words:
            self._signal(words["signal"])
        elif "kill" in words:
            self.kill()

    def _start(self, process: dict[str, Any], *, wants_pid_1: bool) -> None:
        try:
            if wants_pid_1:
                unshare()
            self._pid = spawn(process, mounts=wants_pid_1)
        except OSError as error:
            self.send(failed=str(error))
            return
        self._is_pid_1 = wants_pid_1
        self.send(started=self._pid, is_pid_1=wants_pid_1)

    def _signal(self, number: int) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill process 1, which ends its namespace. Without a namespace, kill all descendants of this process."""
        self._signal(signal.SIGKILL)
        if not self._is_pid_1:
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._pid = None
                self.kill()  # a container ends with its process 1
                self.send(ended=status)
            elif pid in self._execs:
                self.send(exec_ended=self._execs.pop(pid), status=status)

    def finish(self) -> None:
        while True:
            self.kill()
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def main() -> None:
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write)
    shim, text = Shim(), b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            shim.reap()
        if 0 in ready:
            more = os.read(0, 65536)
            if not more:
                shim.finish()
                return
            text += more
            while b"\n" in text:
                line, _, text = text.partition(b"\n")
                shim.run_command(json.loads(line))


if __name__ == "__main__":
    main()
