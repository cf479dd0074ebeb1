"""Tensors lie in memory after a load as they did before: fused optimizers walk through memory, not through elements.

What can go wrong here is not an error but the momentum of one weight at another one.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from migrator.ckpt import codec
from migrator.ckpt.manifest import Manifest
from migrator.errors import CkptCorrupt
from tests.unit.state.test_adapters import Volume, assert_same_state, registered, seeded


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


class Net(nn.Module):
    """With weights of each order in memory: channels_last, transposed, permuted, and row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.one = nn.Conv2d(4, 5, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5 * 16, 7).t())
        self.mixed = nn.Parameter(torch.randn(2, 3, 7).permute(1, 2, 0))
        self.plain = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.one(self.conv(x)).flatten(1)
        turned = flat @ self.turned.t()
        return self.plain(turned + torch.einsum("nk,jki->nk", turned, self.mixed))


FUSED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    "adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-5, momentum=0.9, fused=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, fused=True),
    "adamw, not fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        x = seeded(number, lambda: torch.randn(4, 3, 6, 6))
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def strides_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    return [t.stride() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def without_strides(volume: Volume, name: str) -> str:
    """The same ckpt as a version wrote it that did not keep strides."""
    path = volume.storage.directory / name / "manifest.json"
    found = Manifest.from_bytes(path.read_bytes())
    objects = json.loads(json.dumps(found.objects), object_hook=_forgotten)
    path.write_bytes(Manifest(**{**vars(found), "objects": objects}).to_bytes())
    return name


def _forgotten(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "strides"}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_goes_on_to_the_bit(volume: Volume, name: str, old: bool) -> None:
    """Stopped after three steps it makes the next three like the run that was never stopped, by an old ckpt as well."""
    model, other = seeded(1, Net), seeded(2, Net)
    optimizer, fresh = FUSED[name](model), FUSED[name](other)
    train(model, optimizer, range(3))
    ckpt = volume.save(model=model, optimizer=optimizer)
    volume.load(without_strides(volume, ckpt) if old else ckpt, model=other, optimizer=fresh)

    assert strides_of(fresh) == strides_of(optimizer)
    assert any(len(stride) == 4 and stride[1] == 1 != stride[3] for stride in strides_of(fresh))
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert_same_state(model, other)


@pytest.mark.parametrize("when", ["before the load", "after the load"])
@pytest.mark.parametrize("old", [False, True])
def test_state_follows_a_module_that_gets_another_memory_format(
    volume: Volume, when: str, old: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The ckpt is that of a plain module: its momentum stays with its weights, and the other order is named."""
    model, other = (seeded(seed, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())) for seed in (1, 2))
    optimizer, fresh = FUSED["adamw"](model), FUSED["adamw"](other)
    train(model, optimizer, range(3))
    ckpt = volume.save(model=model, optimizer=optimizer)
    ckpt = without_strides(volume, ckpt) if old else ckpt
    registry = registered(model=other, optimizer=fresh)
    if when == "before the load":
        other.to(memory_format=torch.channels_last)
    load_into(volume, ckpt, registry)
    other.to(memory_format=torch.channels_last)
    with caplog.at_level(logging.WARNING):
        registry.first_step()
    registry.first_step()

    assert ("other_strides" in caplog.text) == (not old)
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_state_that_lay_in_another_order_than_its_parameter_does_so_again(volume: Volume) -> None:
    """A module that was brought into another format in mid-training: whatever that gave, it goes on to give."""

    def make(seed: int) -> nn.Module:
        return seeded(seed, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()))

    model, other = make(1), make(2).to(memory_format=torch.channels_last)
    optimizer, fresh = FUSED["adamw, not fused"](model), FUSED["adamw, not fused"](other)
    train(model, optimizer, range(3))
    model.to(memory_format=torch.channels_last)
    volume.load(volume.save(model=model, optimizer=optimizer), model=other, optimizer=fresh)

    assert strides_of(fresh) == strides_of(optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()


def test_tensors_in_a_dict_come_back_with_their_strides(volume: Volume) -> None:
    """Small ones lie in the manifest and large ones in a part; those that this process has already stay as they are."""
    saved = {
        "small": torch.arange(6.0).reshape(2, 3).t(),
        "large": torch.randn(100, 50).t(),
        "here": torch.randn(100, 50).t(),
        "slice": torch.randn(100, 50)[:, ::2],
        "wide": torch.randn(100, 1).expand(100, 50),
        "none": torch.empty(0, 5).t(),
        "deep": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
    }
    live: dict[str, Any] = {"here": torch.zeros(50, 100), "deep": torch.zeros(1)}
    here = live["here"]
    volume.load(volume.save(things=copy.copy(saved)), things=live)

    assert all(torch.equal(live[key], saved[key]) for key in saved)
    kept = ("small", "large", "none", "deep")
    assert [live[key].stride() for key in kept] == [saved[key].stride() for key in kept[:2]] + [
        torch.empty(5, 0).stride(),
        saved["deep"].stride(),
    ]
    assert live["here"] is here
    assert live["here"].is_contiguous()
    assert live["slice"].is_contiguous()
    assert live["wide"].is_contiguous()


@pytest.mark.parametrize(
    "strides",
    [[1], [1, 2, 3], [1, 1], [3, 2], [0, 1], [-1, 1], [1, 1 << 62], ["1", 2], [True, 2], 3, None, {"a": 1}],
)
@pytest.mark.parametrize("inline", [True, False])
def test_strides_that_no_save_writes_are_corrupt(strides: Any, inline: bool) -> None:
    """They would let a tensor reach outside of its memory, or be larger than its values."""
    data = {"v": codec.encode(bytes(24), put=lambda t, p: None, path="x")["v"]} if inline else {"stored": "x"}
    node = {"!": "tensor", "dtype": "float32", "shape": [2, 3], "device": "cpu", "strides": strides, **data}
    with pytest.raises(CkptCorrupt):
        codec.decode(node, get=lambda stored: stored)


def test_strides_of_an_optimizer_that_are_not_its_parameters_are_corrupt(volume: Volume) -> None:
    """The manifest is of the right form otherwise, and nothing was touched."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = volume.save(model=model, optimizer=optimizer)
    path = volume.storage.directory / name / "manifest.json"
    found = Manifest.from_bytes(path.read_bytes())
    found.objects["optimizer"]["tree"]["strides"] = [[[1]]]
    path.write_bytes(found.to_bytes())
    with pytest.raises(CkptCorrupt):
        volume.load(name, model=model, optimizer=optimizer)


def load_into(volume: Volume, name: str, registry: Any) -> None:
    from migrator.session import restore

    restore.load(volume.storage, name, registry)
