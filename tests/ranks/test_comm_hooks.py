"""DDP's communication hooks: what they keep is saved if it is registered, and named if it is not."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from migrator.state.adapters import ddp_buckets as buckets
from migrator.state.adapters import base as kinds
from migrator.state.adapters.comm_hooks import HookState
from migrator.state.registry import Registry
from tests.support.rank_processes import Gang
from tests.support.harness import Job

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


def test_it_is_each_ranks_own_without_a_word() -> None:
    """Errors differ from rank to rank by nature."""
    registry = Registry()
    registry.add("hook", PowerSGDState(None))
    assert registry.own == {"hook"}
    assert isinstance(registry["hook"], HookState)


def test_another_rank_of_the_approximation_is_refused() -> None:
    """The factors would have other shapes."""
    there = HookState(PowerSGDState(None, matrix_approximation_rank=4)).capture()
    here = HookState(PowerSGDState(None, matrix_approximation_rank=2))
    assert here.differences(there) == [": matrix_approximation_rank is 2 here, 4 there"]
    assert here.differences({"class": "PostLocalSGDState", "iter": 1}) != []
    for wrong in ({"iter": "many"}, {"buckets": [0]}, {"error_dict": {"0": torch.zeros(1)}}, {"q_memory_dict": {0: 1}}):
        with pytest.raises(TypeError):
            here.differences({**there, "rank": 2, **wrong})


def test_post_local_sgd_counts_on() -> None:
    """It begins to average locally after a number of steps."""
    before, after = (PostLocalSGDState(None, None, 100) for _ in range(2))
    before.iter = 70
    HookState(after).restore(HookState(before).capture())
    assert after.iter == 70


def test_the_error_is_kept_and_the_factors_are_copied() -> None:
    """The hook makes a new error each time, and writes into the factors."""
    state = PowerSGDState(None)
    state.error_dict[0], state.p_memory_dict[0] = torch.zeros(kinds.LARGE_BYTES), torch.zeros(kinds.LARGE_BYTES)
    found = HookState(state).capture()
    assert found["error_dict"][0].data_ptr() == state.error_dict[0].data_ptr()
    assert found["p_memory_dict"][0].data_ptr() != state.p_memory_dict[0].data_ptr()


def memories_of(state: PowerSGDState, shapes: list[tuple[int, ...]], packing: buckets.Packing) -> buckets.Memories:
    """As the hook lays them out, each number telling whose it is: the parameter's number."""
    found: buckets.Memories = {"error_dict": {}, "p_memory_dict": {}, "q_memory_dict": {}}
    for index, numbers in enumerate(packing):
        found["error_dict"][index] = torch.cat(
            [torch.full((torch.Size(shapes[n]).numel(),), float(n)) for n in numbers]
        )
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for n in numbers:
            if len(shapes[n]) > 1:
                by_shape.setdefault(shapes[n], []).append(n)
        compressed = [n for group in by_shape.values() for n in group]
        for name, side in (("p_memory_dict", 0), ("q_memory_dict", 1)):
            flat = [torch.full((shapes[n][side] * state.matrix_approximation_rank,), float(n)) for n in compressed]
            found[name][index] = torch.cat(flat) if flat else torch.empty(0)
    return found


def test_memories_follow_the_parameters_into_other_buckets() -> None:
    """Each parameter finds its own, whatever bucket it is in, and matrices of one shape lie together."""
    shapes: list[tuple[int, ...]] = [(40, 30), (40,), (20, 60), (40, 30), (20,)]
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)
    state = PowerSGDState(None, matrix_approximation_rank=2)
    before, after = [[0, 1, 2, 3, 4]], [[4, 3, 2], [0, 1]]
    memories = memories_of(state, shapes, before)

    found = buckets.moved(state, module, memories, before, after)

    assert found is not None
    expected = memories_of(state, shapes, after)
    assert [[t.tolist() for t in found[name].values()] for name in found] == [
        [t.tolist() for t in expected[name].values()] for name in expected
    ]
    back = buckets.moved(state, module, found, after, before)
    assert back is not None
    assert all(torch.equal(back[name][0], memories[name][0]) for name in memories)


def test_memories_of_another_kind_are_not_moved() -> None:
    """Those of the batched variant, of another model, or of another packing."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(40, 30))])
    state = PowerSGDState(None)
    memories = memories_of(state, [(40, 30)], [[0]])
    assert buckets.moved(state, module, {**memories, "p_memory_dict": {0: torch.zeros(35)}}, [[0]], [[0]]) is None
    assert buckets.moved(state, module, memories, [[0, 1]], [[0]]) is None
    assert buckets.moved(state, module, memories, [[0]], [[]]) is None
    assert buckets.moved(state, module, {**memories, "error_dict": {1: torch.zeros(1200)}}, [[0]], [[0]]) is None
