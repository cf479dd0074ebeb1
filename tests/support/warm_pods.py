"""Pods and torchrun's ranks out of a warm interpreter.

Where a container or torchrun would start a fresh interpreter, which imports torch for two seconds, these processes
are forked from one that has done so, and run the script as `script.py` says. Everything else is what it is elsewhere:
the shim and its PID namespace, the agent with its signals, groups and waits, and the real parent of each process.

What this leaves out: all processes of a run have the same hash seed and the same state of numpy's random numbers. That
fresh interpreters do the same is shown by the demo, by `examples/elastic.py`, by the tests of `docs/testing.md`, and by
the long variants of `pods/test_apply_and_delete.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from tests.support.forked_script import run_script
from tests.support.guardian import VARIABLE

if TYPE_CHECKING:
    from tests.support.harness import ForkServer

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHIM, AGENT = (Path(__file__).with_name("scripts") / name for name in ("shim.py", "agent.py"))
PYTHONS = {"python", "python3", sys.executable}
_execvpe = os.execvpe
_libc = ctypes.CDLL(None)


def script_of(argv: Sequence[str]) -> list[str] | None:
    """The arguments of `python [-u] SCRIPT ...`, from the script on; None: it is something else."""
    if argv[0] not in PYTHONS:
        return None
    rest = [*argv[1:]]
    if rest[:1] == ["-u"]:
        del rest[0]
    return rest if rest and rest[0].endswith(".py") else None


def agent_of(argv: Sequence[str]) -> list[str] | None:
    """The arguments of `torchrun ...`, by either of its names; None: it is something else."""
    if Path(argv[0]).name == "torchrun":
        return [str(AGENT), *argv[1:]]
    if argv[0] in PYTHONS and [*argv[1:3]] == ["-m", "torch.distributed.run"]:
        return [str(AGENT), *argv[3:]]
    return None


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """`os.execvpe` without an exec, in a process that was just forked and has one thread."""
    script = script_of(argv) or agent_of(argv)
    # The guardian has to find what this process leaves behind, processes and temporary files.
    env = {"TMPDIR": os.environ["TMPDIR"], **env, VARIABLE: os.environ[VARIABLE]}
    if script is None:
        # Where the shim is killed with the tests, what it started has to go too.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _execvpe(argv[0], [*argv], env)
    # What an exec and a new interpreter do by themselves.
    os.execvpe = _execvpe
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(env)
    # A line is one write, as in the fork server's own children.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.argv = script
    sys.path[0] = str(Path(script[0]).resolve().parent)
    for place in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)
    run_script(whole_end=False)


class WarmShim:
    """A container's shim, out of the fork server; to the container it is a `subprocess.Popen`."""

    def __init__(self, server: ForkServer) -> None:
        here, stdin = os.pipe()
        stdout, there = os.pipe()
        try:
            self._process = server.start(
                [str(SHIM)],
                env={**os.environ, "TMPDIR": str(server.scratch)},
                cwd=server.directory,
                out=server.directory / "shims.txt",
                fds=(here, there),
            )
        finally:
            os.close(here)
            os.close(there)
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb")
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            try:
                return self._process.wait(60.0 if timeout is None else timeout)
            except AssertionError as error:
                raise subprocess.TimeoutExpired("shim", timeout or 60.0) from error

    def kill(self) -> None:
        self._process.kill_if_running()


# torchrun.


class RankForker:
    """Forks ranks for an agent, and the agent is their parent.

    An agent has threads, and a fork of it would inherit their locks. So a helper process is forked before the agent
    starts threads. It forks each rank twice: the process between ends, and the kernel gives the rank to the agent,
    which has asked for orphans.
    """

    def __init__(self) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent = os.getpid()
        if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("prctl")
        if os.fork() == 0:
            self._socket.close()
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._serve(there, agent)
        there.close()

    def fork(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        self._socket.send(json.dumps({"argv": [*argv], "env": {**env}}).encode())
        return int(self._socket.recv(64))

    def _serve(self, there: socket.socket, agent: int) -> NoReturn:
        while True:
            request = there.recv(1 << 20)
            if not request:
                os._exit(0)
            between = os.fork()
            if between != 0:
                os.waitpid(between, 0)
                continue
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() != agent:
                if not Path(f"/proc/{agent}").exists():
                    os._exit(1)
                os.sched_yield()
            os.setsid()  # as the agent asks `Popen` for
            there.send(str(os.getpid()).encode())
            words = json.loads(request)
            become(words["argv"], words["env"])


class _Forked(subprocess.Popen[bytes]):
    """A child of this process that somebody else has forked."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        # What `Popen` sets before it starts a process.
        self._waitpid_lock = threading.Lock()
        self._input = self.stdin = self.stdout = self.stderr = None
        self._communication_started = False
        self._sigint_wait_secs = 0.25
        self._closed_child_pipe_fds = True
        self._child_created = True
        self.returncode: Any = None
        self.args, self.pid = args, pid
        self.text_mode = self.encoding = self.errors = self.pipesize = None

    def __del__(self, *_: object) -> None:
        pass


def agent() -> Any:
    """`torchrun` with `sys.argv`, whose ranks are forked from here."""
    forker = RankForker()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    popen = subprocess_handler.SubprocessHandler._popen

    def forked(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if script_of(args) is None or self._stdout is not None or self._stderr is not None:
            return popen(self, args, env)
        return _Forked(forker.fork(args, env), args)

    subprocess_handler.SubprocessHandler._popen = forked  # type: ignore[method-assign]
    return main()
