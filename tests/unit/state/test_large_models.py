"""What is done for a model grows with the model, and not with its square.

Counted are calls, not seconds: a quadratic walk shows with a hundred modules as it does with ten thousand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from migrator.state.capture import Capturer
from migrator.state.registry import Registry
from tests.unit.state.test_adapters import Volume, registered

SMALL, LARGE = 6, 36


def calls(act: Callable[[], Any]) -> int:
    """How many functions are called, those of Python and those of C."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def made(blocks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With buffers that are saved, and some that are not."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(blocks)))
    for block in model:
        block.register_buffer("mask", torch.zeros(1), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("what", ["register", "safe point", "look", "save", "load", "name the owner"])
def test_six_times_the_model_is_six_times_the_work(what: str, tmp_path: Path) -> None:
    """Whatever is done with it: also what is done only once, or only when the pod is about to go."""
    found = {}
    for blocks in (SMALL, LARGE):
        model, optimizer = made(blocks)
        volume = Volume(tmp_path / str(blocks))
        registry = registered(model=model, optimizer=optimizer)
        capture = Capturer(registry).take(1, None, full=True)
        ckpt = volume.save(model=model, optimizer=optimizer)
        acts: dict[str, Callable[[], Any]] = {
            "register": lambda m=model, o=optimizer: registered(model=m, optimizer=o),
            "safe point": lambda r=registry: Capturer(r).take(2, None, full=True),
            "look": lambda r=registry, c=capture: [kind.frozen(c.values[name]) for name, kind in r],
            "save": lambda v=volume, m=model, o=optimizer: v.save(model=m, optimizer=o),
            "load": lambda v=volume, c=ckpt, m=model, o=optimizer: v.load(c, model=m, optimizer=o),
            "name the owner": lambda r=registry, n=4 * blocks: Registry.owner_of(r, [torch.zeros(1)] * n),
        }
        acts[what]()  # what is made once for all
        found[blocks] = calls(acts[what])

    assert found[LARGE] <= 1.15 * LARGE / SMALL * found[SMALL], found
