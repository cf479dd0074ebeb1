"""DDP's communication hooks in real jobs: what they keep is saved if it is registered, and named if it is not."""

from __future__ import annotations

import re

from tests.support.harness import Job
from tests.support.rank_processes import Gang

# The error of the first layer, with its 25,600 numbers, is far above what is copied.
SCRIPT = """
import hashlib, os
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from migrator import migrator

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 40))
optimizer = torch.optim.AdamW(model.parameters())
hook = powersgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, random_seed=5)
def wrapped():
    ddp = DistributedDataParallel(model)
    if os.environ.get("HOOK") == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        ddp.register_comm_hook(hook, powersgd.powerSGD_hook)
    return ddp

ddp = None if "LATE" in os.environ else wrapped()
state = {"step": 0}
data = torch.Generator().manual_seed(100 + rank)
for name, value in {"model": model, "optimizer": optimizer, "state": state, "data": data}.items():
    migrator.register(name, value)
if "REGISTERS" in os.environ:
    migrator.register("hook", hook)

def digest(*memories):
    tensors = [memory[key] for memory in memories for key in sorted(memory)]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]

migrator.listening(every="off")
if migrator.resume:
    migrator.load_ckpt()
ddp = ddp or wrapped()
while state["step"] < 12:
    torch.manual_seed(state["step"])
    x = torch.randn(8, 160, generator=data)
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    state["step"] += 1
    trained = digest(model.state_dict(), hook.p_memory_dict, hook.q_memory_dict)
    print("step", state["step"], trained, hook.iter, digest(hook.error_dict))
    migrator.safe_point()
    if os.environ.get("STOP") == str(state["step"]) and rank == 0:
        os.kill(os.getpid(), 15)
distributed.barrier()
"""


def steps(text: str) -> dict[str, str]:
    return dict(re.findall(r"^step (\d+) (.*)$", text, re.MULTILINE))


def test_powersgd_goes_on_bit_for_bit(job: Job) -> None:
    """Stopped while it compresses, each rank gets its own error back, and ends as if nothing had happened.

    DDP begins with the gradients in another order than it has later. More than one bucket cannot be tried by gloo:
    there the hook's own collectives overtake one another, and the job hangs without us.
    """
    job.write(SCRIPT)
    unstopped: Gang = job.gang(2, REGISTERS="1", MIGRATOR_JOB="unstopped")
    assert unstopped.wait() == [0, 0], unstopped.text
    stopped: Gang = job.gang(2, REGISTERS="1", STOP="7")
    assert stopped.wait() == [143, 143], stopped.text

    resumed: Gang = job.gang(2, REGISTERS="1")

    assert resumed.wait() == [0, 0], resumed.text
    for rank in (0, 1):
        expected, found = steps(unstopped[rank].text), steps(resumed[rank].text)
        assert len(found) <= 5, resumed.text
        assert found == {step: expected[step] for step in found}, resumed.text
    assert steps(resumed[0].text)["12"] != steps(resumed[1].text)["12"], "each rank has an error of its own"
    assert not resumed.events("changed_outside_step")
    assert "comm_hook" not in stopped.text.replace("comm_hooks", "") + resumed.text, resumed.text


def test_no_error_is_added_to_another_parameters_gradient(job: Job) -> None:
    """DDP is made behind the load, so nobody knew its buckets: two steps are averaged as they are, and that is said."""
    job.write(SCRIPT)
    stopped: Gang = job.gang(2, REGISTERS="1", STOP="7")
    assert stopped.wait() == [143, 143], stopped.text
    before = [steps(text) for text in stopped.texts]

    resumed: Gang = job.gang(2, REGISTERS="1", LATE="1")

    assert resumed.wait() == [0, 0], resumed.text
    assert [fields["steps"] for _, fields in resumed.events("comm_hook_waits")] == ["2", "2"]
    for rank in (0, 1):
        errors = [line.split()[2] for line in steps(resumed[rank].text).values()]
        last = list(before[rank].values())[-1].split()[2]
        assert errors[:2] == [last] * 2, "kept as it was, for the buckets it is of"
        assert last not in errors[2:]


def test_a_state_that_is_not_registered_is_named(job: Job) -> None:
    """At the first step, by each rank that has it."""
    gang: Gang = job.write(SCRIPT).gang(2)

    assert gang.wait() == [0, 0], gang.text
    named = gang.events("comm_hook_not_saved")
    assert [(rank, fields["hook"], fields["state"]) for rank, fields in named] == [
        (rank, "powerSGD_hook", "PowerSGDState") for rank in (0, 1)
    ], gang.text
    assert "migrator.register" in named[0][1]["means"]


def test_a_hook_without_a_state_is_not_spoken_of(job: Job) -> None:
    """It keeps nothing."""
    gang: Gang = job.write(SCRIPT).gang(2, HOOK="fp16")

    assert gang.wait() == [0, 0], gang.text
    assert not gang.events("comm_hook_not_saved")
