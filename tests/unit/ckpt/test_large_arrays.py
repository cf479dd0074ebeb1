"""Large numpy arrays lie in parts, as tensors do: the manifest, which is read as a whole, has a limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from migrator.ckpt import codec, manifest
from migrator.ckpt.codec import LARGE_ARRAY, StoredArray
from migrator.errors import CkptCorrupt
from tests.unit.state.test_adapters import Volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


DTYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
ODD = [">f4", ">i8", "U3", "S5", "M8[s]", "m8[ms]"]


def large(dtype: str) -> Any:
    return (np.arange(5000) % 97).astype(dtype).reshape(50, 100).repeat(9, axis=0)


@pytest.mark.parametrize("dtype", DTYPES + ODD)
def test_a_large_array_comes_back_in_its_own_memory(volume: Volume, dtype: str) -> None:
    """Registered by itself, and as a value in a dict that has one already or has none yet."""
    saved, live, held = large(dtype), np.zeros((450, 100), dtype=dtype), np.zeros((450, 100), dtype=dtype)
    things: dict[str, Any] = {"held": held}
    name = volume.save(array=saved, things={"held": saved + saved if dtype == "f4" else saved, "new": saved[::2]})
    volume.load(name, array=live, things=things)

    assert live.tobytes() == saved.tobytes()
    assert things["held"] is held
    assert (things["new"].dtype, things["new"].shape) == (saved.dtype, (225, 100))
    assert things["new"].tobytes() == saved[::2].tobytes()
    things["new"][0] = things["new"][1]  # it can be written
    assert set(volume.stored(name)) >= {"array/", "things/held", "things/new"}
    assert (volume.storage.directory / name / "manifest.json").stat().st_size < 20_000


def test_numbers_are_tensors_to_other_programs(volume: Volume) -> None:
    """With their type and shape; what torch has no type for is bytes."""
    from safetensors.numpy import load_file

    name = volume.save(numbers=large("f8"), times=large("M8[s]"))
    found = load_file(volume.storage.directory / name / "part-00000-of-00001.safetensors")
    assert found["numbers/"].tolist() == large("f8").tolist()
    assert found["times/"].tobytes() == large("M8[s]").tobytes()


def test_an_array_larger_than_any_manifest_is_saved(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused by every save."""
    monkeypatch.setattr(manifest, "MANIFEST_LIMIT", 100_000)
    saved, live = np.random.default_rng(1).random(20_000), np.zeros(20_000)
    volume.load(volume.save(array=saved), array=live)
    assert live.tobytes() == saved.tobytes()


@pytest.mark.parametrize("size", [4, 300])
def test_the_order_in_memory_stays(volume: Volume, size: int) -> None:
    """Column by column, as some libraries want it: in a part and in the manifest."""
    saved = np.asfortranarray(np.random.default_rng(1).random((size, 20)))
    live: dict[str, Any] = {"backwards": np.zeros(3)}
    volume.load(volume.save(things={"saved": saved, "backwards": saved[::-1, ::-1]}), things=live)

    assert np.array_equal(live["saved"], saved)
    assert live["saved"].flags.f_contiguous
    assert not live["saved"].flags.c_contiguous
    assert np.array_equal(live["backwards"], saved[::-1, ::-1])


def test_what_changes_after_the_safe_point_is_a_copy(volume: Volume) -> None:
    """Arrays change anywhere in the loop; the tensor in the part is the copy."""
    saved = np.ones(5000)
    node = codec.encode(saved, put=lambda tensor, path: None, path="x")
    assert "v" in node

    kept: list[Any] = []
    node = codec.encode(saved, put=lambda tensor, path: kept.append(tensor) or "here", path="x")
    assert node == {"!": "array", "dtype": "<f8", "shape": [5000], "stored": "here"}
    saved[0] = 7
    assert kept[0][0] == 7, "nothing is copied a second time"


def test_only_large_ones_leave_the_manifest() -> None:
    """States of generators stay readable."""
    for size, is_stored in ((LARGE_ARRAY, False), (LARGE_ARRAY + 1, True)):
        node = codec.encode(np.zeros(size, dtype="u1"), put=lambda tensor, path: "x", path="x")
        assert ("stored" in node) == is_stored


GOOD = {"!": "array", "dtype": "<f8", "shape": [2, 3], "stored": "x"}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "O"},
        {"dtype": 3},
        {"dtype": "<f9"},
        {"shape": [-1]},
        {"shape": [1 << 61]},
        {"shape": 3},
        {"stored": 3},
        {"stored": None},
        {"order": "C"},
        {"order": None},
        {"v": "AAAA"},
        {"more": 1},
    ],
)
def test_arrays_that_no_save_writes_are_corrupt(change: dict[str, Any]) -> None:
    """Nothing but what this package writes is read."""
    assert isinstance(codec.decode(GOOD, get=lambda stored: stored), StoredArray)
    with pytest.raises(CkptCorrupt):
        codec.decode({**GOOD, **change}, get=lambda stored: stored)


def test_text_that_is_none_is_corrupt() -> None:
    """numpy takes any four bytes for a character."""
    node = {"!": "array", "dtype": "<U1", "shape": [1], "stored": "x"}
    stored = codec.decode(json.loads(json.dumps(node)), get=lambda stored: stored)
    with pytest.raises(CkptCorrupt):
        stored.array(torch.full((4,), 255, dtype=torch.uint8))
