"""DDP's communication hooks: what they keep is saved if it is registered, and named if it is not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from migrator.state.adapters import base, ddp_buckets
from migrator.state.adapters.comm_hooks import HookState
from migrator.state.registry import Registry


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
    state.error_dict[0], state.p_memory_dict[0] = torch.zeros(base.LARGE_BYTES), torch.zeros(base.LARGE_BYTES)
    found = HookState(state).capture()
    assert found["error_dict"][0].data_ptr() == state.error_dict[0].data_ptr()
    assert found["p_memory_dict"][0].data_ptr() != state.p_memory_dict[0].data_ptr()


def memories_of(
    state: PowerSGDState, shapes: list[tuple[int, ...]], packing: ddp_buckets.Packing
) -> ddp_buckets.Memories:
    """As the hook lays them out, each number telling whose it is: the parameter's number."""
    found: ddp_buckets.Memories = {"error_dict": {}, "p_memory_dict": {}, "q_memory_dict": {}}
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

    found = ddp_buckets.moved(state, module, memories, before, after)

    assert found is not None
    expected = memories_of(state, shapes, after)
    assert [[t.tolist() for t in found[name].values()] for name in found] == [
        [t.tolist() for t in expected[name].values()] for name in expected
    ]
    back = ddp_buckets.moved(state, module, found, after, before)
    assert back is not None
    assert all(torch.equal(back[name][0], memories[name][0]) for name in memories)


def test_memories_of_another_kind_are_not_moved() -> None:
    """Those of the batched variant, of another model, or of another packing."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(40, 30))])
    state = PowerSGDState(None)
    memories = memories_of(state, [(40, 30)], [[0]])
    assert ddp_buckets.moved(state, module, {**memories, "p_memory_dict": {0: torch.zeros(35)}}, [[0]], [[0]]) is None
    assert ddp_buckets.moved(state, module, memories, [[0, 1]], [[0]]) is None
    assert ddp_buckets.moved(state, module, memories, [[0]], [[]]) is None
    assert ddp_buckets.moved(state, module, {**memories, "error_dict": {1: torch.zeros(1200)}}, [[0]], [[0]]) is None
