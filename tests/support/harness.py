"""What tests use to run training scripts as real processes, watch them, and stop them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from tests.support.rank_processes import Gang
    from tests.support.torchruns import Torchrun

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0
"""No wait in a test is longer. It is a failure, not a duration anybody waits for."""


Tally = Callable[[str, int], None]
"""Adds to a count by its name."""


class ForkServer:
    """The warm interpreter of one test session."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        self.directory = directory
        self.scratch = scratch
        """For temporary files of its children."""
        self._path = directory / "forkserver.sock"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
        self._log = (directory / "forkserver.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forkserver", str(self._path)],
            cwd=ROOT,
            env=env,
            stdout=self._log,
            stderr=self._log,
        )
        self._owner = self._connect()

    def _connect(self) -> socket.socket:
        end_s = time.monotonic() + DEADLINE_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._path))
                return connection
            except OSError:
                connection.close()
                if time.monotonic() > end_s or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def start(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        out: Path,
        delay_s: float = 0.0,
        whole_end: bool = False,
        fds: Sequence[int] = (),
    ) -> Process:
        """`fds` become the first descriptors of the process: standard input and output."""
        connection = self._connect()
        place = {"env": dict(env), "cwd": str(cwd), "out": str(out)}
        request = {"argv": argv, **place, "delay_s": delay_s, "whole_end": whole_end}
        data = json.dumps(request).encode() + b"\n"
        connection.sendall(data[socket.send_fds(connection, [data], [*fds]) :])
        return Process(connection, out)

    def close(self) -> None:
        self._owner.close()
        self._process.wait(DEADLINE_S)
        self._log.close()


class Process:
    """One running script."""

    def __init__(self, connection: socket.socket, out: Path) -> None:
        self._connection = connection
        self._read = b""
        self.pid = int(self._line(DEADLINE_S))
        self.out = out
        self.returncode: int | None = None

    def _line(self, timeout_s: float) -> bytes:
        """The fork server's next line. After a time-out it can be asked for again."""
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._read:
            more = self._connection.recv(64)
            if not more:
                self._connection.close()
                raise AssertionError("the fork server is gone")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    @property
    def text(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code; negative: the signal that ended it."""
        if self.returncode is None:
            try:
                self.returncode = int(self._line(timeout_s))
            except TimeoutError:
                raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from None
            self._connection.close()
        return self.returncode

    def wait_for(self, pattern: str, timeout_s: float = DEADLINE_S) -> re.Match[str]:
        """Until a line of the output matches."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.text, re.MULTILINE)

        return until(found, f"{pattern!r} in the output", timeout_s, lambda: self.text)

    def kill(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def kill_group(self, number: int = signal.SIGTERM) -> None:
        """As torchrun and a terminal do."""
        os.killpg(self.pid, number)

    def events(self, name: str) -> list[dict[str, str]]:
        """The fields of all log lines with this event, in order."""
        return events_in(self.text, name)

    def end(self) -> None:
        """Whatever is left of it, by pid. Safe to call on one that ended."""
        self.kill_if_running()
        self.wait()

    def kill_if_running(self) -> None:
        """SIGKILL to its process group. Safe to call on one that ended."""
        if self.returncode is None:
            kill_group(self.pid)


def events_in(text: str, name: str) -> list[dict[str, str]]:
    """The fields of all log lines with this event, in order."""
    found = re.findall(rf"migrator rank \d+: {name}(?: (.*))?$", text, re.MULTILINE)
    return [dict(re.findall(r'(\w+)=("[^"]*"|\S+)', fields)) for fields in found]


def kill_group(pid: int) -> None:
    """SIGKILL to the process, stopped or not, and to the process group it leads. That it ended is fine."""
    for kill in (os.killpg, os.kill):  # a group it leads once it has come that far
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def processes_with(directory: Path) -> list[str]:
    """The command lines of all processes that name a directory in them, or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if os.fsencode(directory) in command + (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
    return found


class Ends(Protocol):
    """What a job started and has to end."""

    def end(self) -> None: ...


Started = TypeVar("Started", bound=Ends)


class Job:
    """A training script on a volume of its own, to be run, stopped and run again."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self._server = server
        self.directory = directory
        self.root = directory / "ckpts"
        self.url = ""
        """The root, if it is in an object store."""
        self.signal = directory / "pod" / "signal"
        self.script = directory / "train.py"
        self.env: dict[str, str] = {}
        self.whole_end = False
        """Its processes go through the interpreter's own end, to its last line (`script.py`)."""
        self._runs: list[Ends] = []

    def write(self, body: str) -> Job:
        """The training script: Python text."""
        self.script = self.directory / "train.py"  # never over one of the repository
        self.script.write_text(textwrap.dedent(body))
        return self

    def use(self, path: Path) -> Job:
        """A script from the repository."""
        self.script = path
        return self

    def run(self, *argv: str, env: Mapping[str, str] | None = None, **more: str) -> Process:
        """Start a life of the job. Further keyword arguments are environment variables."""
        out = self.directory / f"out-{len(self._runs)}.txt"
        return self.ends(self.start([str(self.script), *argv], out=out, env={**(env or {}), **more}))

    def gang(self, size: int, *argv: str, **more: Any) -> Gang:
        """Start a life of several ranks, as plain `env://`. What may be given is said in `Gang`."""
        from tests.support.rank_processes import Gang

        return self.ends(Gang(self, size, *argv, name=f"out-{len(self._runs)}", **more))

    def torchrun(self, *argv: str, **more: Any) -> Torchrun:
        """Start a torchrun agent with its ranks. What may be given is said in `Torchrun`."""
        from tests.support.torchruns import Torchrun

        return self.ends(Torchrun(self, *argv, name=f"out-{len(self._runs)}", **more))

    def ends(self, thing: Started) -> Started:
        """From now on the job ends this too."""
        self._runs.append(thing)
        return thing

    def start(self, argv: Sequence[str], *, out: Path, env: Mapping[str, str], delay_s: float = 0.0) -> Process:
        """One process with this job's settings. Whoever calls this ends it."""
        base = {k: v for k, v in os.environ.items() if not k.startswith(("MIGRAT", "KUBERNETES"))}
        settings = {
            "MIGRATOR_CKPT": self.url or str(self.root),
            "MIGRATOR_SIGNAL": str(self.signal),
            "MIGRATOR_GRACE_S": "20",
        }
        return self._server.start(
            list(argv),
            env={**base, **settings, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._server.scratch), **self.env, **env},
            cwd=self.directory,
            out=out,
            delay_s=delay_s,
            whole_end=self.whole_end,
        )

    def ckpts(self) -> list[str]:
        """Names of committed ckpts, oldest first."""
        return sorted(path.parent.name for path in self.root.glob("*/*/manifest.json"))

    def end(self) -> None:
        for thing in self._runs:
            thing.end()


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, context: Callable[[], str] = lambda: ""
) -> Any:
    """Poll until the condition holds; its value. A deadline, and what was waited for."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"waited {timeout_s} s for {what}\n{context()}")
        time.sleep(0.003)
