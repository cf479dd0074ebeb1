"""Processes that a launcher has started as the ranks of one job, and that do not say so to torch."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.rank_processes import Gang
from tests.unit.platform.test_launcher import BATCH, SRUN

# A process that trains by itself; with GROUP it makes its process group behind `listening()`.
ALONE = """
import os
import torch
from migrator import migrator

rank, size = int(os.environ.pop("RANK", "0")), int(os.environ.pop("WORLD_SIZE", "1"))
model, state = torch.nn.Linear(4, 4), {"step": 0}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for name, value in {"model": model, "state": state, "optimizer": optimizer}.items():
    migrator.register(name, value)
migrator.listening(every="off")
print("listens")
if "GROUP" in os.environ:
    from torch import distributed
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
while state["step"] < 3:
    state["step"] += 1
    if os.environ.get("BY") == "hand":
        with torch.no_grad():
            model.weight += 1
        migrator.safe_point()
    else:
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        migrator.safe_point()
    print("trained", state["step"])
"""


def test_one_of_several_without_a_process_group_is_refused(job: Job) -> None:
    """Each of them would be rank 0 of 1, with a generation of its own, on one volume."""
    life = job.write(ALONE).run(env=SRUN)

    assert life.wait() == 1
    assert "UsageError: listening(): this process is one of 4 that srun has started" in life.text
    assert "SLURM_STEP_NUM_TASKS=4" in life.text
    assert "init_process_group()" in life.text
    assert "MIGRATOR_RANKS=1" in life.text
    assert not list(job.root.glob("*/generations/*"))
    assert not job.signal.exists()


@pytest.mark.parametrize("environ", [BATCH, {**SRUN, "MIGRATOR_RANKS": "1"}], ids=["batch script", "said so"])
def test_one_that_is_alone_is_not_refused(job: Job, environ: dict[str, str]) -> None:
    """One python in an sbatch script; and jobs that have nothing to do with one another."""
    life = job.write(ALONE).run(env=environ)

    assert life.wait() == 0, life.text
    assert "trained 3" in life.text


@pytest.mark.parametrize("by", ["optimizer", "hand"])
def test_a_process_group_behind_listening_is_refused_at_the_first_step(job: Job, by: str) -> None:
    """Nothing was trained yet, so nothing is lost."""
    gang: Gang = job.write(ALONE).gang(2, pods=2, GROUP="1", BY=by)

    assert gang.wait() == [1, 1], gang.text
    for text in gang.texts:
        assert "UsageError: a process group of 2 ranks was made after listening()" in text, gang.text
        assert "trained" not in text
    assert job.ckpts() == []


def test_a_process_group_of_others_is_none_of_ours_if_said_so(job: Job) -> None:
    """Each is a job by itself, whatever it shares with the other one."""
    each = {rank: {"MIGRATOR_JOB": f"job-{rank}"} for rank in (0, 1)}
    gang: Gang = job.write(ALONE).gang(2, pods=2, GROUP="1", each=each, MIGRATOR_RANKS="1")

    assert gang.wait() == [0, 0], gang.text


@pytest.mark.parametrize("has_group", [False, True], ids=["no group", "group of others"])
def test_what_is_a_job_by_itself_is_one_whatever_torch_knows_of_others(job: Job, has_group: bool) -> None:
    """Said so by `MIGRATOR_RANKS=1`: neither torch's variables nor a group made before `listening()` count."""
    script = ALONE.replace("os.environ.pop(", "os.environ.get(")
    if has_group:
        group = script[script.index('if "GROUP"') : script.index("while state")]
        script = script.replace(group, "").replace("migrator.listening(", group + "migrator.listening(")
    each = {rank: {"MIGRATOR_JOB": f"job-{rank}"} for rank in (0, 1)}
    gang: Gang = job.write(script).gang(
        2, pods=2, each=each, MIGRATOR_RANKS="1", **({"GROUP": "1"} if has_group else {})
    )

    assert gang.wait() == [0, 0], gang.text
    assert sorted(path.name for path in job.root.iterdir()) == ["job-0", "job-1"]
    for text in gang.texts:
        assert "trained 3" in text
        assert "ranks size=2" not in text
