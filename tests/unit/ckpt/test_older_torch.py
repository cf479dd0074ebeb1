"""Ckpts that older versions of torch, and of this package, wrote are loaded and gone on with.

`tests/golden` holds what they wrote; `tests/golden/make.py` says how.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.golden.make import OPTIMIZERS, STEPS, make, train, weights
from tests.support.harness import ROOT
from tests.unit.state.test_adapters import Volume

GOLDEN = sorted((ROOT / "tests" / "golden").glob("torch-*"))


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_ckpt_of_an_older_torch_is_gone_on_with(volume: Volume, golden: Path) -> None:
    """Every optimizer makes its next steps, and comes to where the older torch came."""
    (path,) = golden.glob("0*")
    shutil.copytree(path, volume.storage.directory / path.name)
    assert_gone_on_with(volume, golden)


def assert_gone_on_with(volume: Volume, golden: Path) -> None:
    """The volume has this ckpt."""
    (path,) = golden.glob("0*")
    made = {name: make(name) for name in OPTIMIZERS}
    for parts in made.values():
        # Not those of the ckpt: what is not loaded would show.
        nn.init.constant_(parts[0].weight, 7.0)  # type: ignore[arg-type]
    objects: dict[str, Any] = {}
    for name, (model, optimizer, scheduler) in made.items():
        objects |= {f"{name}_model": model, name: optimizer, f"{name}_schedule": scheduler}
    volume.load(path.name, **objects)
    for parts in made.values():
        train(*parts, range(STEPS, 2 * STEPS))

    expected = json.loads((golden / "after.json").read_text())["weights"]
    assert expected.keys() == made.keys()
    for name, (model, _, _) in made.items():
        assert weights(model) == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_there_are_golden_ckpts() -> None:
    """A test over none would be green."""
    assert GOLDEN


class WithOptions(torch.optim.SGD):
    """A newer version of a script's own optimizer, which knows more than the one that was saved."""

    def __init__(self, params: Any, *, scale: float) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["scale"], group["clip"] = scale, 5.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("scale", 1.0)


def test_options_that_the_ckpt_does_not_know_are_filled_in(volume: Volume) -> None:
    """By the optimizer, which knows what they were before there were any; else with those of this process."""
    model = nn.Linear(3, 2)
    optimizer = WithOptions(model.parameters(), scale=3.0)
    for option in ("scale", "clip", "maximize"):
        del optimizer.param_groups[0][option]
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.param_groups[0]["of_old"] = 1
    fresh = WithOptions(model.parameters(), scale=3.0)
    group = fresh.param_groups[0]
    volume.load(volume.save(model=model, optimizer=optimizer), model=model, optimizer=fresh)

    assert fresh.param_groups[0] is group
    assert {key: group[key] for key in ("scale", "clip", "maximize", "lr", "of_old")} == {
        "scale": 1.0,
        "clip": 5.0,
        "maximize": False,
        "lr": 0.3,
        "of_old": 1,
    }
    model(torch.ones(1, 3)).sum().backward()
    fresh.step()
