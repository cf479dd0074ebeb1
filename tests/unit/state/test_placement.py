"""Who holds which tensor, as the adapters answer it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from migrator.state.adapters.base import Adapter, Placement
from migrator.state.adapters.module import OWN_BUFFER_BYTES
from migrator.state.registry import Registry


def adapter_of(target: Any, *, own: bool = False) -> Adapter:
    registry = Registry()
    registry.add("it", target, own=own)
    return registry["it"]


LARGE, SMALL = torch.zeros(OWN_BUFFER_BYTES + 1, dtype=torch.uint8), torch.zeros(OWN_BUFFER_BYTES, dtype=torch.uint8)


@pytest.mark.parametrize("target", [nn.Linear(2, 2), {"a": 1}, torch.optim.SGD([torch.zeros(2, requires_grad=True)])])
def test_what_only_steps_change_is_replicated(target: Any) -> None:
    """All ranks make the same steps. A copy made at the safe point is of something that changes between them."""
    adapter = adapter_of(target)

    assert adapter.placement(SMALL, is_live=True) is Placement.REPLICATED
    assert adapter.placement(SMALL, is_live=False) is Placement.PER_RANK


def test_a_large_buffer_of_a_module_is_replicated() -> None:
    """A table that was computed once is the same everywhere; running statistics are small."""
    adapter = adapter_of(nn.Linear(2, 2))

    assert adapter.placement(LARGE, is_live=False) is Placement.REPLICATED
    assert adapter_of({"a": 1}).placement(LARGE, is_live=False) is Placement.PER_RANK


@pytest.mark.parametrize("target", [nn.Linear(2, 2), {"a": 1}])
def test_own_is_per_rank_whatever_it_is(target: Any) -> None:
    """What is registered with own=True each rank has for itself, its large tensors included."""
    adapter = adapter_of(target, own=True)

    assert {adapter.placement(LARGE, is_live=is_live) for is_live in (True, False)} == {Placement.PER_RANK}
