"""Buffers that a module resizes when it loads are loaded, and what the module refuses is refused before anything else.

`prepare_qat` of torch makes such modules: their buffers are empty until the first batch has passed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from migrator.errors import CkptMismatch
from migrator.session import restore
from migrator.state.capture import Capturer
from tests.unit.state.test_adapters import Volume, assert_same_state, registered, seeded


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def quantized() -> nn.Module:
    """A network whose observers have seen nothing yet."""
    from torch.ao import quantization

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(seeded(number, lambda: torch.randn(4, 3, 6, 6))).pow(2).sum().backward()
        optimizer.step()


def test_a_network_in_quantization_aware_training_goes_on(volume: Volume) -> None:
    """The observers of a new process are empty; they get size and values of those that have seen batches."""
    model, other = seeded(1, quantized), seeded(2, quantized)
    optimizer, fresh = (torch.optim.SGD(m.parameters(), lr=0.001, momentum=0.9) for m in (model, other))
    train(model, optimizer, range(3))
    sizes = [[t.shape for t in m.buffers()] for m in (model, other)]
    assert sizes[0] != sizes[1]
    volume.load(volume.save(model=model, optimizer=optimizer), model=other, optimizer=fresh)

    assert_same_state(model, other)
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert_same_state(model, other)
    volume.save(model=other)


class Table(nn.Module):
    """Takes a table of any length, but no other width; and a note that it may not have yet."""

    _version = 3
    rows: Tensor
    note: Tensor | None

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("rows", torch.zeros(length, 3))
        self.register_buffer("note", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, about: Any, *rest: Any) -> None:
        assert about["version"] == self._version, "it would be converted"
        rows, note = state_dict[f"{prefix}rows"], state_dict.get(f"{prefix}note")
        if rows.shape[1:] == self.rows.shape[1:]:
            self.rows.resize_(rows.shape)
        if note is not None:
            self.note = torch.empty(note.shape, dtype=note.dtype)
        super()._load_from_state_dict(state_dict, prefix, about, *rest)


class Hooked(nn.Module):
    """As a hook of the module's own does it."""

    rows: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(length, 3))
        self.register_load_state_dict_pre_hook(Hooked._make_room)

    @staticmethod
    def _make_room(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        assert isinstance(module, Hooked)
        if module.rows.shape[1:] == state_dict[f"{prefix}rows"].shape[1:]:
            module.rows = torch.zeros_like(state_dict[f"{prefix}rows"])


@pytest.mark.parametrize("kind", [Table, Hooked])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_what_a_module_makes_room_for_is_loaded(volume: Volume, kind: Any, length: int) -> None:
    """Whether it resizes its buffer or takes a new one, inside another module."""
    model, other = (nn.Sequential(nn.BatchNorm1d(3), kind(n)) for n in (7, length))
    model[1].rows += torch.arange(21.0).reshape(7, 3)
    model[0].num_batches_tracked += 5
    if kind is Table:
        model[1].scale.data += 1
        model[1].note = torch.ones(4)
    registry = registered(model=other)
    restore.load(volume.storage, volume.save(model=model), registry)

    assert_same_state(model, other)
    capture = Capturer(registry).take(1, None, full=True)
    frozen = registry["model"].frozen(capture.values["model"])
    assert set(model.state_dict()) <= frozen.keys(), "the next safe point has all of it"
    other[1].rows += 1
    volume.load(volume.save(model=other), model=model)
    assert_same_state(model, other)


@pytest.mark.parametrize("kind", [Table, Hooked])
def test_what_a_module_makes_no_room_for_is_refused(volume: Volume, kind: Any) -> None:
    """One that can say so beforehand does, before anything was touched."""
    model, other = nn.Sequential(kind(7), nn.Linear(1, 1)), nn.Sequential(kind(7), nn.Linear(1, 1))
    model[0].rows = torch.zeros(7, 4)
    bias = other[1].bias.clone()
    with pytest.raises(CkptMismatch, match=r"0\.rows") as caught:
        volume.load(volume.save(model=model), model=other)

    if kind is Table:
        assert "model/0.rows: shape is (7, 3) here, (7, 4) there" in str(caught.value)
        assert torch.equal(other[1].bias, bias)


def test_a_module_that_says_nothing_of_what_it_did_not_load_is_found_out(volume: Volume) -> None:
    """It goes on with its own values: what is registered would not be what was saved."""

    class Silent(Table):
        def _load_from_state_dict(self, *rest: Any) -> None:
            pass

    with pytest.raises(CkptMismatch, match="still has another shape"):
        volume.load(volume.save(model=Silent(7)), model=Silent(3))


def test_other_differences_stay_differences(volume: Volume) -> None:
    """Of a module that loads like any other, and a type is never converted."""
    with pytest.raises(CkptMismatch, match=r"weight: shape is"):
        volume.load(volume.save(model=nn.Linear(2, 2)), model=nn.Linear(3, 2))
    with pytest.raises(CkptMismatch, match=r"rows: dtype is"):
        volume.load(volume.save(model=Table(3)), model=Table(3).double())
