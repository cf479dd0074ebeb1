"""What a launcher says of the processes that it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from migrator.platform import launcher

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
"""What a batch script sees: its tasks are for the `srun` that it may call."""


@pytest.mark.parametrize(
    ("environ", "by"),
    [
        (SRUN, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpiexec"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun"),
        ({"HOROVOD_SIZE": "2"}, "horovodrun"),
        ({}, None),
        (BATCH, None),
        ({**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_SIZE": "many"}, None),
        ({**SRUN, "WORLD_SIZE": "1"}, None),
    ],
)
def test_what_a_launcher_says_of_its_processes(environ: dict[str, str], by: str | None) -> None:
    """One of several only if the variable is that of a started task, and nobody has told torch something else."""
    found = launcher.one_of_several(environ)
    assert (found.by if found else None) == by


def warnings(environ: dict[str, str], tmp_path: Path, pid_1: str = "python\0train.py\0") -> list[str]:
    cmdline = tmp_path / "cmdline"
    cmdline.write_bytes(pid_1.encode())
    return launcher.warnings(environ, grace_s=30, pid_1=cmdline)


@pytest.mark.parametrize(
    ("nodes", "restarts", "most", "warns"),
    [("2", "0", "0", True), ("2", "3", "3", True), ("2", "0", "3", False), ("1", "0", "0", False)],
)
def test_torchrun_without_a_restart_left_is_warned_of(
    tmp_path: Path, nodes: str, restarts: str, most: str, warns: bool
) -> None:
    """Only where there is another node whose pod may go."""
    environ = {
        "GROUP_WORLD_SIZE": nodes,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": most,
        "TORCHELASTIC_RUN_ID": "x",
    }
    found = warnings(environ, tmp_path)
    assert [f"({restarts} of {most})" in line and "--max-restarts" in line for line in found] == [True] * warns


@pytest.mark.parametrize(
    ("pid_1", "is_pod", "warns"),
    [
        ("/bin/sh\0-c\0python train.py\0", True, True),
        ("bash\0-c\0python train.py; echo\0", True, True),
        ("/bin/sh\0-c\0python train.py\0", False, False),
        ("python\0train.py\0", True, False),
        ("/usr/bin/tini\0--\0sh\0run.sh\0", True, False),
        ("", True, False),
    ],
)
def test_a_shell_in_the_way_is_warned_of(tmp_path: Path, pid_1: str, is_pod: bool, warns: bool) -> None:
    """In Kubernetes process 1 is what gets the SIGTERM."""
    found = warnings({"KUBERNETES_SERVICE_HOST": "10.0.0.1"} if is_pod else {}, tmp_path, pid_1)
    assert ["exec python" in line for line in found] == [True] * warns


def test_ordinary_starts_are_warned_of_nothing(tmp_path: Path) -> None:
    """A process of its own, with or without an operator's variables; an unreadable /proc."""
    assert warnings({}, tmp_path) == []
    assert warnings({"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "many"}, tmp_path) == []
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert launcher.warnings(environ, grace_s=30, pid_1=tmp_path / "none") == []


@pytest.mark.parametrize(
    ("command", "environ", "expected"),
    [
        ([], {}, 30),
        (["torchrun", "--shutdown-timeout", "120", "train.py"], {}, 120),
        (["python", "-m", "torch.distributed.run", "--shutdown-timeout=90", "train.py"], {}, 90),
        (["torchrun", "--shutdown_timeout=90", "train.py", "--shutdown-timeout=7"], {}, 90),
        (["torchrun", "--nproc-per-node=2", "./train.py", "--shutdown-timeout", "5"], {}, 30),
        (["torchrun", "-m", "train", "--shutdown-timeout", "5"], {}, 30),
        (["torchrun", "--shutdown-timeout=5", "--shutdown-timeout=60", "train.py"], {}, 60),
        (["torchrun", "--shutdown-t=90", "train.py"], {"PET_SHUTDOWN_TIMEOUT": "60"}, 90),
        (["torchrun", "train.py"], {"PET_SHUTDOWN_TIMEOUT": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 60),
        (["torchrun", "train.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 50),
        (["torchrun", "train.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, 30),
        (["torchrun", "--shutdown-timeout"], {}, 30),
        (["torchrun", "--standalone", "--signals-to-handle=SIGTERM", "train.py"], {}, 30),
    ],
)
def test_the_agents_time_is_found_where_torchrun_takes_it_from(
    command: list[str], environ: dict[str, str], expected: float
) -> None:
    """Its command line, then its variables, then its default."""
    assert launcher.shutdown_timeout_s(environ, command, "train.py") == expected


def test_an_agent_of_which_proc_says_nothing_has_the_default(tmp_path: Path) -> None:
    """As with hidepid, or in another PID namespace; it is never sent a signal then."""
    found = launcher.agent({"TORCHELASTIC_RUN_ID": "x"}, proc=tmp_path)

    assert found is not None
    assert (found.pid, found.life, found.shutdown_s) == (os.getppid(), "", 30)
    assert not found.end()
    assert launcher.agent({}, proc=tmp_path) is None


@pytest.mark.parametrize(
    ("grace_s", "shutdown_s", "expected"), [(120, 30, 29), (20, 30, 20), (20, 3, 2.7), (30, 30, 29), (30, 600, 30)]
)
def test_the_deadline_of_sigterm_is_the_earlier_of_grace_and_agent(
    grace_s: float, shutdown_s: float, expected: float
) -> None:
    """Less a margin for the end of the process, which the grace has of its own."""
    agent = launcher.Agent(1, "", shutdown_s)
    assert launcher.sigterm_grace_s(grace_s, agent) == pytest.approx(expected)
    assert launcher.sigterm_grace_s(grace_s, None) == grace_s
