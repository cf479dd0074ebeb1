"""What started this process, and what that means for the way it is stopped. Reads, decides nothing.

An agent (torchrun) stands between kubelet and the ranks. It passes SIGTERM on to
them and ends them by SIGKILL after a time of its own, which may be shorter than the
grace. A rank that leaves by itself it starts again, also inside a pod that is going.
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

from migrator.platform import container as environment

SHUTDOWN_S = 30.0
"""What torchrun waits between SIGTERM and SIGKILL if nothing else is said."""
_MARGIN_S = 1.0
"""What is left of that time for the end of the process, once all is saved."""
_OPTION = "--shutdown-timeout"
_SIZES = {
    # Of the step that srun makes; a batch script has SLURM_NTASKS too, and may start one python.
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "HOROVOD_SIZE": "horovodrun",
}
"""How many processes were started together, in a variable that only those have, and by what."""
_SHELLS = {"sh", "ash", "bash", "busybox", "dash", "ksh", "zsh"}


@dataclass(frozen=True)
class Agent:
    """The process that starts ranks again that leave."""

    pid: int
    life: str
    """Another one for each agent of a container; empty where `/proc` does not say."""
    shutdown_s: float = SHUTDOWN_S
    """From its SIGTERM to the ranks to its SIGKILL."""

    def end(self) -> bool:
        """SIGTERM, as kubelet sends it: it ends its ranks, and starts none of them again. False: it is not there."""
        if not self.life or _life(self.pid, Path("/proc")) != self.life:
            return False
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)
            return True
        return False


def agent(environ: Mapping[str, str] | None = None, *, proc: Path = Path("/proc")) -> Agent | None:
    """The agent that has started this process, if one has."""
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    pid = _starter(proc)
    return Agent(pid, _life(pid, proc), shutdown_timeout_s(environ, _command(proc / f"{pid}/cmdline"), sys.argv[0]))


def sigterm_grace_s(grace_s: float, found: Agent | None) -> float:
    """How long this process has from a SIGTERM on: to the end of the grace, or to the agent's SIGKILL."""
    if found is None:
        return grace_s
    return min(grace_s, found.shutdown_s - min(_MARGIN_S, 0.1 * found.shutdown_s))


def shutdown_timeout_s(environ: Mapping[str, str], command: list[str], script: str) -> float:
    """`torchrun --shutdown-timeout`, given in its command line or by the variables that it reads."""
    variables = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    given = [_of_command(command, script), *map(environ.get, variables)]
    return next((float(text) for text in given if text is not None and text.strip().isdecimal()), SHUTDOWN_S)


def _of_command(command: list[str], script: str) -> str | None:
    """The last one counts; behind the script come its own options."""
    found = None
    for word, following in zip(command, [*command[1:], ""], strict=False):
        if _is_script(word, script):
            break
        name, equals, value = word.partition("=")
        # As torchrun reads it: either spelling, and any beginning that means no other option.
        if len(name) > len("--sh") and _OPTION.startswith(name.replace("_", "-")):
            found = value if equals else following
    return found


def _is_script(word: str, script: str) -> bool:
    """As a file, or by the name of a module."""
    as_file = word.replace(".", "/") + ".py"
    return bool(script) and (Path(word).name == Path(script).name or f"/{script}".endswith(f"/{as_file}"))


@dataclass(frozen=True)
class Several:
    """What a launcher says of the processes that it has started together."""

    by: str
    variable: str
    size: int

    @property
    def refusal(self) -> str:
        """What to tell one of them that trains as if it were alone."""
        return (
            f"listening(): this process is one of {self.size} that {self.by} has started "
            f"({self.variable}={self.size}), but there is no process group: each of them would be a job by itself, and "
            "save and load beside the others. Call torch.distributed.init_process_group() before listening(), with "
            "rank and number as the launcher tells them. If each is a job by itself, give each its own MIGRATOR_JOB "
            "and MIGRATOR_SIGNAL, and say so: MIGRATOR_RANKS=1."
        )


def one_of_several(environ: Mapping[str, str]) -> Several | None:
    """This process was started together with others. What says how it was started to torch is asked elsewhere."""
    if "WORLD_SIZE" in environ:
        return None
    for variable, by in _SIZES.items():
        if (size := _number(environ.get(variable))) > 1:
            return Several(by, variable, size)
    return None


def warnings(environ: Mapping[str, str], *, grace_s: float, pid_1: Path = Path("/proc/1/cmdline")) -> list[str]:
    """How the way this job was started can lose it when its pod goes, and what to do about it."""
    found = []
    nodes, restarts, most = (
        _number(environ.get(name))
        for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    )
    if nodes > 1 and "TORCHELASTIC_MAX_RESTARTS" in environ and restarts >= most:
        found.append(
            f"torchrun has no restart left ({restarts} of {most}): when the pod of one of the {nodes} nodes goes, the "
            "agents of the others end with exit code 1; have their pods start them again (restartPolicy: OnFailure) or "
            "raise --max-restarts, which does not help when the node goes that holds torchrun's store"
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
            "this rank was started by multiprocessing (mp.spawn), whose parent passes no SIGTERM on, and ends with "
            "exit code 1 when its ranks leave; use the preStop hook, or start the ranks by torchrun"
        )
    if environment.in_kubernetes(environ) and os.getpid() != 1 and _is_shell(pid_1):
        found.append(
            "process 1 of this container is a shell, which passes no SIGTERM on; begin the trainer's line with `exec` "
            '(sh -c "exec python train.py"), or rely on the preStop hook alone'
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
    """The process that has started this rank. A script may stand between the two, but not another session."""
    if multiprocessing.parent_process() is None:
        leader = os.getsid(0)
        if leader not in (0, os.getpid()) and (stat := _stat(leader, proc)):
            return int(stat[1])
    return os.getppid()


def _life(pid: int, proc: Path) -> str:
    stat = _stat(pid, proc)
    return f"{pid}/{stat[19]}" if stat else ""


def _stat(pid: int, proc: Path) -> list[str]:
    """The fields behind the name of the program, which may hold anything; empty if there is no such process."""
    try:
        found = (proc / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return found if len(found) > 19 else []
