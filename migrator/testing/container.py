"""One container: its process, hooks that run beside it, and their output.

It is started through its own shim (`_shim.py`), so that nothing outlives the tests,
even if the tests are killed. If the machine allows it, the process is process 1 of a
PID namespace, as in a pod: the kernel then drops signals for which it has no handler.
Otherwise this module drops SIGTERM by the same rule.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from migrator.testing.errors import StandInError

_SHIM = Path(__file__).with_name("_shim.py")
_START_S = 30.0
"""Maximum time, in seconds, to wait for the start or the end of a shim, on a busy machine."""


@dataclass(frozen=True)
class Command:
    """A command line with its environment and directory."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path


@dataclass
class Exec:
    """A further process in the container: a hook."""

    began_s: float
    """On the monotonic clock, as all times in this module."""
    out: Path
    ended_s: float | None = None
    code: int | None = None
    """The exit code; 128 plus the number if a signal ended it."""
    failed: str | None = None
    """Why it could not be started."""
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        """The output."""
        return _read(self.out)


class Container:
    """One container, from its start to its end. It can be started once."""

    def __init__(self, command: Command, out: Path) -> None:
        self._command = command
        self.out = out
        self.pid: int | None = None
        """The pid outside of the container's PID namespace; inside it is 1."""
        self.is_pid_1 = False
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self.status: int | None = None
        """The exit code; negative: minus the number of the signal that ended it."""
        self.is_over = threading.Event()
        self._execs: list[Exec] = []
        self._answer: dict[str, Any] = {}
        self._has_answer = threading.Event()
        self._lock = threading.Lock()
        self._shim: subprocess.Popen[bytes] | None = None

    def start(self, *, wants_pid_1: bool | None = None) -> None:
        """Start the process. `StandInError` if this fails, for example because there is no such program."""
        if wants_pid_1 is None:
            wants_pid_1 = isolation() is None
        self._shim = start_shim()
        threading.Thread(target=self._listen, args=(self._shim,), daemon=True, name="container").start()
        self.began_s = time.monotonic()
        self._send(start=self._as_json(self._command, self.out), wants_pid_1=wants_pid_1)
        self._has_answer.wait(_START_S)
        if "started" not in self._answer:
            why = self._answer.get("failed", "its shim ended, or did not answer in time")
            self.close()
            raise StandInError(f"the container's process cannot be started: {why}")
        self.pid, self.is_pid_1 = self._answer["started"], self._answer["is_pid_1"]

    def exec(self, command: Command, out: Path, *, note: Callable[[Exec], None] = lambda one: None) -> Exec:
        """Start a further process in the container, as kubelet starts a hook. `note` is called before it starts."""
        out.touch()
        found = Exec(time.monotonic(), out)
        note(found)
        with self._lock:
            self._execs.append(found)
            number = len(self._execs) - 1
        if self.is_over.is_set():
            self._end_exec(found, failed="the container has ended")
        else:
            self._send(exec=self._as_json(command, out), id=number)
        return found

    def hears_sigterm(self) -> bool:
        """Whether process 1 has a handler for SIGTERM."""
        return self._handles(signal.SIGTERM)

    def terminate(self) -> None:
        """Send SIGTERM to process 1. Without a handler it is dropped."""
        # In a PID namespace the kernel drops it if there is no handler. Otherwise the process would die.
        if self.is_pid_1 or self.hears_sigterm():
            self._send(signal=int(signal.SIGTERM))

    def kill(self) -> None:
        """Send SIGKILL to all processes of the container."""
        self._send(kill=True)

    def kill_pid_1(self) -> None:
        """Send SIGKILL to process 1; the other processes end with it."""
        self._send(signal=int(signal.SIGKILL))

    @property
    def text(self) -> str:
        """The output of its processes (stdout and stderr), without the hooks."""
        return _read(self.out)

    def close(self) -> None:
        """End all processes of the container, and wait for it. May be called twice."""
        shim = self._shim
        if shim is None or shim.stdin is None:
            return
        with self._lock:
            if not shim.stdin.closed:
                shim.stdin.close()
        try:
            shim.wait(_START_S)
        except subprocess.TimeoutExpired:  # the kernel cannot kill a process while its storage hangs
            shim.kill()
            shim.wait()
        self.is_over.wait(1.0)

    def _handles(self, number: int) -> bool:
        """Whether process 1 has a handler for this signal, read from the kernel."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:  # it is ending at this moment
            return False
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (number - 1) & 1)

    def _as_json(self, command: Command, out: Path) -> dict[str, Any]:
        return {
            "argv": list(command.argv),
            "env": dict(command.env),
            "cwd": str(command.cwd),
            "out": str(out),
        }

    def _send(self, **words: Any) -> None:
        shim = self._shim
        assert shim is not None
        assert shim.stdin is not None
        with self._lock:
            if shim.stdin.closed:
                return
            try:
                shim.stdin.write(json.dumps(words).encode() + b"\n")
                shim.stdin.flush()
            except BrokenPipeError:
                return  # it has ended, and the listener thread notes that

    def _listen(self, shim: subprocess.Popen[bytes]) -> None:
        assert shim.stdout is not None
        with shim.stdout:
            for line in shim.stdout:
                words = json.loads(line)
                if "started" in words or "failed" in words:
                    self._answer = words
                    self._has_answer.set()
                elif "ended" in words:
                    self._end(os.waitstatus_to_exitcode(words["ended"]))
                elif "exec_ended" in words:
                    code = os.waitstatus_to_exitcode(words["status"])
                    self._end_exec(self._execs[words["exec_ended"]], code=code if code >= 0 else 128 - code)
                elif "exec_failed" in words:
                    self._end_exec(self._execs[words["exec_failed"]], failed=words["why"])
        # The shim has ended without a message, and with it all that it ran.
        self._has_answer.set()
        if self.status is None:
            self._end(-int(signal.SIGKILL))
        for one in self._execs:
            if not one.is_over.is_set():
                self._end_exec(one, code=128 + signal.SIGKILL)

    def _end(self, status: int) -> None:
        self.status, self.ended_s = status, time.monotonic()
        self.is_over.set()

    def _end_exec(self, one: Exec, *, code: int | None = None, failed: str | None = None) -> None:
        one.code, one.failed, one.ended_s = code, failed, time.monotonic()
        one.is_over.set()


def start_shim() -> subprocess.Popen[bytes]:
    """Start a shim whose input and output are pipes."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SHIM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        # Ctrl-C in a terminal then reaches only the tests.
        start_new_session=True,
    )


@functools.cache
def isolation() -> str | None:
    """None if the process of a container is process 1 of a PID namespace; else why this machine does not support it."""
    out = Path(os.devnull)
    probe = Container(Command(["true"], dict(os.environ), Path("/")), out)
    try:
        probe.start(wants_pid_1=True)
    except StandInError as error:
        return str(error)
    else:
        # A machine may allow the namespace but not mounting its /proc, which hooks read.
        probe.is_over.wait(_START_S)
        return None if probe.status == 0 else f"the probe ended with {probe.status}"
    finally:
        probe.close()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
