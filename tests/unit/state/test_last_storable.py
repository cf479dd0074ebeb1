"""What can never be saved or loaded is refused at once; what becomes so later costs no save."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from migrator.ckpt import codec, manifest
from migrator.errors import RegistrationError
from migrator.session import restore
from migrator.state.registry import Registry
from tests.unit.state.test_adapters import Volume, refusal, registered


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


# Refused at once.


class Expanded(nn.Module):
    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(1, 4).expand(3, 4), persistent=persistent)
        self.register_buffer("positions", torch.arange(4).expand(1, -1))


def test_a_buffer_whose_elements_share_memory_is_refused() -> None:
    """Every load into it would fail. One that is not saved is no obstacle, nor is one with a length of 1."""
    found = refusal(nn.Sequential(Expanded(persistent=True)))
    assert "thing/0.mask cannot be written" in found
    assert ".clone()" in found
    registered(thing=Expanded(persistent=False))


def test_a_tensor_or_array_that_cannot_be_written_is_refused() -> None:
    """What was saved of it could not be put back."""
    assert "thing cannot be written" in refusal(torch.zeros(1).expand(5))
    with torch.inference_mode():
        made = torch.zeros(5)
    assert "inference_mode()" in refusal(made)
    array = np.zeros(5)
    array.flags.writeable = False
    assert ".copy()" in refusal(array)


def test_in_a_dict_another_one_takes_its_place(volume: Volume) -> None:
    """There the script finds what is loaded by its name."""
    live: dict[str, Any] = {"tensor": torch.zeros(1).expand(5), "array": np.broadcast_to(np.zeros(1), 5)}
    volume.load(volume.save(things={"tensor": torch.arange(5.0), "array": np.arange(5.0)}), things=live)
    assert live["tensor"].tolist() == live["array"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "value",
    [{"losses": [0.123456789] * 400_000}, ["x" * 300] * 20_000, {"bytes": bytes(5_000_000)}, {"text": "x" * 5_000_000}],
    ids=lambda value: type(value).__name__,
)
def test_more_than_a_manifest_holds_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused by every save."""
    monkeypatch.setattr(manifest, "MANIFEST_LIMIT", 4_500_000)
    monkeypatch.setattr(codec, "_WORTH_COUNTING", 300_000)
    found = refusal(value)
    assert "a manifest holds at most 4500000" in found
    assert "in a tensor or in a numpy array" in found


def test_what_is_registered_counts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and large arrays do not count: they lie in parts. What was refused does not count either."""
    monkeypatch.setattr(manifest, "MANIFEST_LIMIT", 4_500_000)
    registry = Registry()
    registry.add("tensor", torch.zeros(2_000_000))
    registry.add("arrays", {"a": np.zeros(1_000_000)})
    registry.add("first", {"bytes": bytes(2_000_000)})
    with pytest.raises(RegistrationError, match="'second'"):
        registry.add("second", {"bytes": bytes(2_000_000)})
    registry.add("third", {"bytes": bytes(500_000)})


# Unstorable later.


def test_the_rest_is_saved_and_the_last_value_stands(volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    """What was there at the registration, at the last save, or never: each path is named once."""
    metrics: dict[str, Any] = {"loss": 1.0, "best": {"acc": 0.5, "at": 3}, "history": [1, 2], 7: "seven", "t": (1, 2)}
    registry = registered(metrics=metrics)
    metrics["loss"] = Path("x")
    with caplog.at_level(logging.WARNING):
        first = volume.save_registry(registry)
    metrics |= {"loss": 2.0, "history": [1, 2, 3]}
    volume.save_registry(registry)
    metrics |= {"loss": Path("y"), "new": len, Path("key"): 1, 7: object()}
    metrics["history"].append(Path("z"))
    metrics["best"] |= {"at": Path("w"), "acc": 0.9}
    metrics["t"] = (3, [{"deep": Path("v")}])
    with caplog.at_level(logging.WARNING):
        second, third = volume.save_registry(registry), volume.save_registry(registry)

    live: dict[str, Any] = {}
    volume.load(first, metrics=live)
    assert live["loss"] == 1.0
    for name in (second, third):
        live = {"new": 3}
        volume.load(name, metrics=live)
        assert live == {
            "loss": 2.0,
            "best": {"acc": 0.9, "at": 3},
            "history": [1, 2, 3],
            7: "seven",
            "t": (1, 2),
        }
    fields = [record.migrator_fields for record in caplog.records]  # type: ignore[attr-defined]
    named = {record["path"]: record["instead"] for record in fields}
    assert len(named) == len(fields), "each once"
    assert {path for path, instead in named.items() if "left out" in instead} == {
        "metrics.new",
        f"metrics[{Path('key')!r}]",
    }
    assert named.keys() >= {"metrics.loss", "metrics.history", "metrics.best.at", "metrics[7]", "metrics.t"}
    assert "PosixPath" in str(fields[0]["why"])


@pytest.mark.parametrize("make", [list, deque, OrderedDict], ids=lambda make: make.__name__)
def test_a_whole_object_falls_back_to_its_last_value(volume: Volume, make: Any) -> None:
    """A list has no entries that could be left out: the others would move."""
    value = make([("a", 1), ("b", 2)])
    registry = registered(things=value)
    if isinstance(value, OrderedDict):
        value["c"] = len
    else:
        value.append(len)
    live = make()
    volume.load(volume.save_registry(registry), things=live)
    assert list(live) == list(make([("a", 1), ("b", 2)]))


def test_what_was_loaded_is_newer_than_what_was_registered(volume: Volume) -> None:
    """The life that goes on has not saved yet."""
    name = volume.save(metrics={"loss": 5.0})
    metrics: dict[str, Any] = {"loss": 0.0}
    registry = registered(metrics=metrics)
    restore.load(volume.storage, name, registry)
    metrics["loss"] = Path("x")
    live: dict[str, Any] = {}
    volume.load(volume.save_registry(registry), metrics=live)
    assert live["loss"] == 5.0


def test_a_large_tensor_that_was_there_is_left_out(volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are in another ckpt."""
    things: dict[str, Any] = {"table": torch.zeros(9000), "array": np.zeros(9000), "kept": 1}
    registry = registered(things=things)
    volume.save_registry(registry)
    things |= {"table": torch.eye(3).to_sparse(), "array": Path("x")}
    live: dict[str, Any] = {}
    with caplog.at_level(logging.WARNING):
        volume.load(volume.save_registry(registry), things=live)
    assert live == {"kept": 1}
    assert caplog.text.count("it is left out of the ckpt") == 2


def test_what_contains_itself_from_now_on_ends_neither_training_nor_save(volume: Volume) -> None:
    """The copy at each safe point has an end, and so has the save."""
    things: dict[str, Any] = {"x": 1, "y": [0]}
    registry = registered(things=things)
    things["me"] = things
    things["y"].append(things["y"])
    things["x"] = 2
    live: dict[str, Any] = {}
    volume.load(volume.save_registry(registry), things=live)
    assert live == {"x": 2, "y": [0]}


class Meter:
    """A metric of the script's own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"sum": 0.0, "at": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def test_a_stateful_object_is_saved_but_for_it(volume: Volume) -> None:
    """As a dict is."""
    meter, other = Meter(), Meter()
    registry = registered(meter=meter)
    meter.state |= {"sum": 3.0, "at": Path("x")}
    volume.load(volume.save_registry(registry), meter=other)
    assert other.state == {"sum": 3.0, "at": 0}


def test_a_scheduler_is_saved_as_a_whole_or_not_at_all(volume: Volume) -> None:
    """One of its numbers of another time would be another schedule."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    registry = registered(scheduler=scheduler)
    scheduler.step_size = Path("x")  # type: ignore[assignment]
    with pytest.raises(RegistrationError, match=r"scheduler\.state\.step_size"):
        volume.save_registry(registry)
