"""What started this process, and what follows for the way it is stopped.

An agent (torchrun) runs between kubelet and the ranks. It forwards SIGTERM to them
and ends them with SIGKILL after its own timeout, which may be shorter than the grace.
It starts a rank that leaves by itself again, even inside a pod that is about to end.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from migrator.platform import container

SHUTDOWN_S = 30.0
"""The default time, in seconds, from torchrun's SIGTERM to its SIGKILL."""
_MARGIN_S = 1.0
"""Part of this time, in seconds, that is reserved for the end of the process after the save."""
_OPTION = "--shutdown-timeout"
_SIZES = {
    # Only set in a step of srun. SLURM_NTASKS is also set in a batch script, which may start a single process.
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "HOROVOD_SIZE": "horovodrun",
}
"""Variables with the number of processes that were started together, and the launcher that sets them."""
_SHELLS = {"sh", "ash", "bash", "busybox", "dash", "ksh", "zsh"}


@dataclass(frozen=True)
class Agent:
    """The process that starts the ranks, and starts them again when they leave: torchrun."""

    pid: int
    life: str
    """An id of the agent, which differs between agents of one container; empty if `/proc` cannot be read."""
    shutdown_s: float = SHUTDOWN_S
    """Time, in seconds, from its SIGTERM to its SIGKILL."""

    def end(self) -> bool:
        """Send SIGTERM, as kubelet does: the agent ends its ranks and starts none again. False: it does not exist."""
        if not self.life or _life(self.pid, Path("/proc")) != self.life:
            return False
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)
            return True
        return False


def agent(environ: Mapping[str, str] | None = None, *, proc: Path = Path("/proc")) -> Agent | None:
    """The agent that has started this process, if there is one."""
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    pid = _starter(proc)
    return Agent(pid, _life(pid, proc), shutdown_timeout_s(environ, _command(proc / f"{pid}/cmdline"), sys.argv[0]))


def sigterm_grace_s(grace_s: float, found: Agent | None) -> float:
    """Seconds from SIGTERM until this process must have ended: by the end of the grace, or by the agent's SIGKILL."""
    if found is None:
        return grace_s
    return min(grace_s, found.shutdown_s - min(_MARGIN_S, 0.1 * found.shutdown_s))


def shutdown_timeout_s(environ: Mapping[str, str], command: list[str], script: str) -> float:
    """The value of `torchrun --shutdown-timeout`, from its command line or from the variables that it reads."""
    variables = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    given = [_of_command(command, script), *map(environ.get, variables)]
    return next((float(text) for text in given if text is not None and text.strip().isdecimal()), SHUTDOWN_S)


def _of_command(command: list[str], script: str) -> str | None:
    """The last option counts. Options after the script belong to the script."""
    found = None
    for word, following in zip(command, [*command[1:], ""], strict=False):
        if _is_script(word, script):
            break
        name, equals, value = word.partition("=")
        # As torchrun parses it: with dashes or underscores, and abbreviated as long as it is unambiguous.
        if len(name) > len("--sh") and _OPTION.startswith(name.replace("_", "-")):
            found = value if equals else following
    return found


def _is_script(word: str, script: str) -> bool:
    """This word of the command line is the script, as a file or as a module."""
    as_file = word.replace(".", "/") + ".py"
    return bool(script) and (Path(word).name == Path(script).name or f"/{script}".endswith(f"/{as_file}"))


@dataclass(frozen=True)
class Several:
    """Processes that a launcher has started together."""

    by: str
    variable: str
    size: int

    @property
    def refusal(self) -> str:
        """The error for a process that would train as a job of one rank."""
        return (
            f"listening(): this process is one of {self.size} that {self.by} has started "
            f"({self.variable}={self.size}), but there is no process group: each of them would be a job by itself, and "
            "save and load beside the others. Call torch.distributed.init_process_group() before listening(), with "
            "the rank and the number of ranks from the launcher. If each is a job by itself, give each its own "
            "MIGRATOR_JOB and MIGRATOR_SIGNAL, and set MIGRATOR_RANKS=1."
        )


def one_of_several(environ: Mapping[str, str]) -> Several | None:
    """The launcher that started this process with others; None also if WORLD_SIZE is set, as `ranks.place` handles
    it."""
    if "WORLD_SIZE" in environ:
        return None
    for variable, by in _SIZES.items():
        if (size := _number(environ.get(variable))) > 1:
            return Several(by, variable, size)
    return None


def warnings(environ: Mapping[str, str], *, grace_s: float, pid_1: Path = Path("/proc/1/cmdline")) -> list[str]:
    """Ways in which this kind of start can lose the job when its pod ends, and what to do about them."""
    found = []
    nodes, restarts, most = (
        _number(environ.get(name))
        for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    )
    if nodes > 1 and "TORCHELASTIC_MAX_RESTARTS" in environ and restarts >= most:
        found.append(
            f"torchrun has no restart left ({restarts} of {most}): when the pod of one of the {nodes} nodes ends, the "
            "agents of the others end with exit code 1; let their pods start them again (restartPolicy: OnFailure) or "
            "raise --max-restarts, which does not help when the node with torchrun's store ends"
        )
    ours = agent(environ)
    if ours is not None and ours.shutdown_s < grace_s:
        most_s = math.ceil(grace_s)
        found.append(
            f"torchrun ends the ranks by SIGKILL {ours.shutdown_s:g} s after SIGTERM, although the grace is "
            f"{grace_s:g} s: a save that takes longer is lost; start torchrun with --shutdown-timeout={most_s}, or set "
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={most_s} in the pod"
        )
    if multiprocessing.parent_process() is not None and "TORCHELASTIC_RUN_ID" not in environ:
        found.append(
            "this rank was started by multiprocessing (mp.spawn), whose parent does not forward SIGTERM and ends with "
            "exit code 1 when its ranks leave; use the preStop hook, or start the ranks with torchrun"
        )
    if container.in_kubernetes(environ) and os.getpid() != 1 and _is_shell(pid_1):
        found.append(
            "process 1 of this container is a shell, which does not forward SIGTERM; begin the trainer's line with "
            '`exec` (sh -c "exec python train.py"), or rely on the preStop hook alone'
        )
    return found


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _is_shell(cmdline: Path) -> bool:
    program = [*_command(cmdline), ""][0]
    return program.rpartition("/")[2].lstrip("-") in _SHELLS


def _command(cmdline: Path) -> list[str]:
    try:
        return cmdline.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _starter(proc: Path) -> int:
    """The process that started this rank. A wrapper script may run between them, but in the same session."""
    if multiprocessing.parent_process() is None:
        leader = os.getsid(0)
        if leader not in (0, os.getpid()) and (stat := _stat(leader, proc)):
            return int(stat[1])
    return os.getppid()


def _life(pid: int, proc: Path) -> str:
    stat = _stat(pid, proc)
    return f"{pid}/{stat[19]}" if stat else ""


def _stat(pid: int, proc: Path) -> list[str]:
    """The fields of `stat` after the program's name, which may contain any character; empty if there is no such
    process."""
    try:
        found = (proc / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return found if len(found) > 19 else []
