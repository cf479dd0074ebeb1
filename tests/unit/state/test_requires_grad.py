"""Which layers are trained is part of the state: a script that thaws some in mid-training may not do so again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from migrator.ckpt.manifest import Manifest
from migrator.errors import CkptCorrupt
from migrator.session import restore
from migrator.state.adapters import module
from migrator.state.capture import Capturer
from tests.unit.state.test_adapters import Tied, Volume, registered


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def layers(*, frozen: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[frozen].requires_grad_(False)
    return model


def flags(model: nn.Module) -> list[bool]:
    return [param.requires_grad for param in model.parameters()]


def test_layers_are_frozen_and_thawed_as_they_were(volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    """The next step trains what the last one did."""
    model, other = layers(frozen=0), layers(frozen=2)
    registry = registered(model=other)
    restore.load(volume.storage, volume.save(model=model), registry)
    registry.first_step()

    assert flags(other) == flags(model) == [False] * 2 + [True] * 4
    assert not caplog.records


def test_the_flags_are_those_of_the_safe_point(volume: Volume) -> None:
    """Behind it the script may be at the next epoch already."""
    model = layers(frozen=0)
    kind = registered(model=model)["model"]
    captured = kind.capture()
    model.requires_grad_(True)
    assert kind.frozen(captured)[module.WITHOUT_GRAD] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("several", [False, True])
def test_flags_that_differ_at_the_first_step_are_named(
    volume: Volume, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """What the script sets behind the load stays; of several ranks nothing is set behind the back of DDP."""
    monkeypatch.setattr(module, "_has_several_ranks", lambda: several)
    model, other = layers(frozen=0), layers(frozen=2)
    registry = registered(model=other)
    restore.load(volume.storage, volume.save(model=model), registry)
    if not several:
        other[0].requires_grad_(True)
        other[2].requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        registry.first_step()
        registry.first_step()

    assert flags(other) == flags(layers(frozen=2))
    (record,) = caplog.records
    assert "other_requires_grad object=model parameters=4 trained_before=2" in record.getMessage()


def test_tied_weights_have_one_flag(volume: Volume) -> None:
    """They stand under two names."""
    model, other = Tied(), Tied()
    model.requires_grad_(False)
    volume.load(volume.save(model=model), model=other)
    assert not any(flags(other))
    model.requires_grad_(True)
    volume.load(volume.save(model=model), model=other)
    assert all(flags(other))


def test_a_ckpt_that_does_not_tell_changes_no_flag(volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    """One of an earlier version."""
    name, other = volume.save(model=layers(frozen=0)), layers(frozen=2)
    changed(volume, name, None)
    registry = registered(model=other)
    restore.load(volume.storage, name, registry)
    registry.first_step()
    assert flags(other) == flags(layers(frozen=2))
    assert not caplog.records


@pytest.mark.parametrize("names", [3, "0.weight", [3], {"a": 1}])
def test_names_that_are_none_are_corrupt(volume: Volume, names: Any) -> None:
    """Before anything was touched."""
    name = volume.save(model=layers(frozen=0))
    changed(volume, name, names)
    with pytest.raises(CkptCorrupt):
        volume.load(name, model=layers(frozen=0))


def changed(volume: Volume, name: str, names: Any) -> None:
    path = volume.storage.directory / name / "manifest.json"
    found = Manifest.from_bytes(path.read_bytes())
    del found.objects["model"]["tree"][module.WITHOUT_GRAD]
    if names is not None:
        found.objects["model"]["tree"][module.WITHOUT_GRAD] = names
    path.write_bytes(found.to_bytes())


def test_a_safe_point_holds_what_the_module_has_by_then(volume: Volume) -> None:
    """A layer that was taken away since the registration is no obstacle."""
    model = layers(frozen=0)
    capturer = Capturer(registered(model=model))
    model[0].weight = None  # type: ignore[assignment]
    capture = capturer.take(1, None, full=True)
    assert all(torch.equal(a, b) for a, b in zip(capture.values["model"][3], [model[0].bias], strict=True))
