"""What is taken from a ckpt, where it goes, and what is said when it cannot be.

Whole jobs that resume are in other tests; here each line of the way back is held to its place.
"""

from __future__ import annotations

import errno
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from migrator.ckpt import codec
from migrator.ckpt.manifest import Manifest
from migrator.errors import CkptCorrupt, CkptMismatch, NoUsableCkpt, StorageTransientError
from migrator.session import restore, restore_plan
from migrator.session.restore import load, newest_usable
from migrator.session.restore_plan import Loaded, RestorePlan
from migrator.state.registry import Registry
from migrator.storage.posix import PosixStorage, kind_of
from tests.support.harness import ROOT
from tests.unit.state.test_adapters import Volume, registered

CKPT = "000001-000000000010"
LOOPS = {"loops": {"loader": {"handed": 3}}}


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def kept(value: Any) -> Any:
    """As a manifest holds it, with all its tensors."""
    return codec.encode(value, put=lambda tensor, path: None, path="value")


def manifest_of(ranks: int = 1, **extra: Any) -> Manifest:
    """Of a ckpt of nothing but these."""
    return Manifest(1, 10, "job", ranks, (), {}, {key: kept(value) for key, value in extra.items()})


def randoms(seed: int) -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
        "numpy": dict(np.random.RandomState(seed).get_state(legacy=False)),
    }


def draws(state: dict[str, Any]) -> tuple[float, float, float]:
    """What comes next."""
    of_torch, of_python, of_numpy = torch.Generator(), random.Random(), np.random.RandomState()
    of_torch.set_state(state["torch"])
    of_python.setstate(state["python"])
    of_numpy.set_state(state["numpy"])
    return torch.rand((), generator=of_torch).item(), of_python.random(), of_numpy.random_sample()


def restored(manifest: Manifest, *, rank: int = 0, size: int = 1) -> Loaded:
    return RestorePlan(manifest, Registry(), rank=rank, size=size).restore({})


# Random states.


def test_each_rank_takes_its_own_random_states() -> None:
    """As they were saved."""
    manifest = manifest_of(2, random={str(rank): randoms(rank) for rank in range(2)})
    for rank in range(2):
        assert draws(restored(manifest, rank=rank, size=2).random) == draws(randoms(rank))


@pytest.mark.parametrize(("rank", "other"), [(2, 0), (3, 10), (5, 10)])
def test_a_rank_that_has_none_derives_them_from_another_one(
    caplog: pytest.LogCaptureFixture, rank: int, other: int
) -> None:
    """From whose is told; they are neither that rank's nor those of another one that derives from it."""
    manifest = manifest_of(2, random={"10": randoms(10), "0": randoms(0)})
    with caplog.at_level(logging.WARNING, "migrator"):
        found = draws(restored(manifest, rank=rank, size=6).random)
    assert f"random_derived ckpt={CKPT} other={other}" in caplog.text
    assert found == draws(restored(manifest, rank=rank, size=6).random)
    assert found not in (draws(randoms(0)), draws(randoms(10)), draws(restored(manifest, rank=rank + 2, size=6).random))


def test_whose_states_are_there_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is the usual case."""
    with caplog.at_level(logging.WARNING, "migrator"):
        restored(manifest_of(random={"0": randoms(0)}))
    assert caplog.text == ""


@pytest.mark.parametrize("states", [None, {}, {"0": None, "1": randoms(1)}, {"0": {}, "1": randoms(1)}])
def test_a_ckpt_without_random_states_leaves_those_that_are(states: Any) -> None:
    """Of the predecessor, or of a rank that was lost before it had any."""
    manifest = manifest_of(2, random=states)
    assert restored(manifest, rank=0, size=2).random == {}


@pytest.mark.parametrize("states", [[], 7, {"x": randoms(0)}, {0: randoms(0)}, {"-1": randoms(0)}])
def test_random_states_that_are_not_kept_by_rank_are_corrupt(states: Any) -> None:
    """Before anything is put back."""
    with pytest.raises(CkptCorrupt, match=f"{CKPT}: its random states are not kept by rank"):
        restored(manifest_of(random=states))


@pytest.mark.parametrize("lost", ["torch", "python", "numpy", "cuda"])
def test_random_states_that_no_generator_has_are_corrupt(lost: str) -> None:
    """Each is tried; also those that would only serve to derive others."""
    state = randoms(0) | {lost: [1, 2, 3]}
    for rank in (0, 1):
        with pytest.raises(CkptCorrupt, match=f"{CKPT}: its random states are not such as a generator has"):
            restored(manifest_of(2, random={"0": state}), rank=rank, size=2)


@pytest.mark.parametrize("lost", ["torch", "python"])
def test_a_state_that_is_missing_is_corrupt(lost: str) -> None:
    """Only numpy's need not be there."""
    state = randoms(0)
    del state[lost]
    with pytest.raises(CkptCorrupt, match="not such as a generator has"):
        restored(manifest_of(random={"0": state}))
    del (without := randoms(0))["numpy"]
    assert set(restored(manifest_of(random={"0": without})).random) == {"torch", "python"}


def test_a_position_outside_of_a_generators_memory_is_corrupt() -> None:
    """Numpy checks everything but this, and ends the process at the next draw; wherever in the state it stands."""
    state = randoms(0)["numpy"]
    state["state"]["pos"] = 10**6
    for extra in ({"random": {"0": randoms(0) | {"numpy": state}}}, {"loop": LOOPS | {"more": [state]}}):
        with pytest.raises(CkptCorrupt, match="the position in a state of MT19937 is not one of 0 to 624"):
            restored(manifest_of(**extra))


# The place in the loops.


def test_the_place_in_the_loops_comes_back() -> None:
    """A ckpt that was made outside of all loops has none."""
    assert restored(manifest_of(loop=LOOPS)).loop == LOOPS
    assert restored(manifest_of()).loop is None


def test_ranks_have_places_of_their_own() -> None:
    """On as many ranks; on another number what all have alike counts."""
    own = {str(rank): {"loop": kept({"loops": {"loader": {"handed": rank}}})} for rank in range(2)}
    manifest = Manifest(1, 10, "job", 2, (), {}, {"loop": kept(LOOPS), "own": own})
    assert [restored(manifest, rank=rank, size=2).loop for rank in range(2)] == [
        {"loops": {"loader": {"handed": rank}}} for rank in range(2)
    ]
    assert [restored(manifest, rank=rank, size=3).loop for rank in range(3)] == [LOOPS] * 3


@pytest.mark.parametrize("own", [7, [], {"objects": 7}, {"objects": {"a": 7}}], ids=str)
def test_what_is_a_ranks_own_and_of_another_form_is_corrupt(own: Any) -> None:
    """Of the rank that asks; another one's is not looked at."""
    manifest = Manifest(1, 10, "job", 2, (), {}, {"own": {"1": own}})
    with pytest.raises(CkptCorrupt, match=f"{CKPT}: what is rank 1's own is not of the form that a save writes"):
        RestorePlan(manifest, Registry(), rank=1, size=2)
    assert restored(manifest, rank=0, size=2).step == 10


@pytest.mark.parametrize(
    "loop",
    [
        [],
        {},
        {"loops": []},
        {"loops": {7: {}}},
        {"loops": {"loader": []}},
        {"loops": {"loader": {"handed": "3"}}},
        {"loops": {"loader": {"handed": True}}},
        {"loops": {"loader": {"handed": 3, "is_over": 1}}},
        {"loops": {"loader": {"batch_size": 4.0}}},
        {"loops": {"loader": {"origin": []}}},
        {"loops": {"loader": {"origin": {}}}},
        {"loops": {"loader": {"origin": {"random": {}}}}},
    ],
    ids=str,
)
def test_a_place_that_is_none_is_corrupt(loop: Any) -> None:
    """Now, and not when the loop begins: then there is no way back to another ckpt."""
    with pytest.raises(CkptCorrupt, match=CKPT):
        restored(manifest_of(loop=loop))


def test_a_place_with_the_random_states_that_its_epoch_began_with_comes_back() -> None:
    """All fields of one that a save writes."""
    state = {"handed": 3, "is_over": False, "batch_size": 4, "origin": {"random": randoms(0)}}
    loop = restored(manifest_of(loop={"loops": {"loader": state}})).loop
    assert loop is not None
    assert draws(loop["loops"]["loader"]["origin"]["random"]) == draws(randoms(0))


# What is registered.


def test_tensors_are_read_straight_into_what_is_registered(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of the model."""
    name = volume.save(model=nn.Linear(300, 300))
    model, homes = nn.Linear(300, 300), {}
    real = restore.read_part

    def read_part(*arguments: Any, **more: Any) -> dict[str, torch.Tensor]:
        homes.update(arguments[3])
        return real(*arguments, **more)

    monkeypatch.setattr(restore, "read_part", read_part)
    volume.load(name, model=model)
    assert {home.data_ptr() for home in homes.values()} >= {model.weight.data_ptr()}


class Moody:
    """An object of the script's own that takes back nothing."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise LookupError("not today")


def test_what_the_script_refuses_is_told_with_its_name(volume: Volume) -> None:
    """Its own error is in the message, and what to do."""
    name = volume.save(moody=Moody())
    with pytest.raises(CkptMismatch, match="could not be put back into 'moody': LookupError: not today\nStart without"):
        volume.load(name, moody=Moody())


def test_all_that_does_not_fit_is_told_at_once(volume: Volume) -> None:
    """With the place of the ckpt, or its name where it has none here; nothing was touched."""
    name = volume.save(a=nn.Linear(2, 2), b={"x": 1}, c=[1.0])
    model, metrics = nn.Linear(3, 2), {"x": 7}
    before = model.weight.clone()
    with pytest.raises(CkptMismatch) as refusal:
        volume.load(name, a=model, b=nn.Linear(1, 1), d=metrics)
    assert str(refusal.value).split("\n")[:-2] == [
        f"the ckpt {volume.storage.directory / name} does not fit what is registered:",
        "  in the ckpt, not registered: c",
        "  registered, not in the ckpt: d",
        "  a/weight: shape is (2, 3) here, (2, 2) there",
        "  b: is a module here, a container there",
    ]
    assert torch.equal(model.weight, before)
    assert metrics == {"x": 7}

    with pytest.raises(CkptMismatch, match=f"the ckpt {CKPT} does not fit"):
        RestorePlan(manifest_of(), registered(a=[1.0]))


@pytest.mark.parametrize("state", [{}, {"state": 7, "param_groups": 7}, {"param_groups": [7]}], ids=str)
def test_a_state_of_another_form_is_corrupt(state: dict[str, Any]) -> None:
    """No optimizer of this class has one like that: it is damage, from which another ckpt leads back."""
    objects = {"a": {"kind": "optimizer", "tree": kept({"class": "SGD", **state})}}
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(CkptCorrupt, match=f"{CKPT}: the state of 'a' is not of the form that a save writes"):
        RestorePlan(Manifest(1, 10, "job", 1, (), objects), registered(a=optimizer))


# A volume on which something happens meanwhile.


def test_what_was_loaded_is_durable_from_then_on(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been there only because the node did not crash."""
    durable: list[str] = []
    monkeypatch.setattr(restore, "make_durable", lambda storage, name: durable.append(name))
    name = volume.save(a=[1.0])
    volume.load(name, a=[0.0])
    assert durable == [name]


@pytest.mark.parametrize("place", ["make_durable", "read_part"])
@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOENT, CkptCorrupt), (errno.ELOOP, CkptCorrupt), (errno.EIO, StorageTransientError)]
)
def test_a_ckpt_that_goes_while_it_is_read_is_corrupt_and_a_failing_volume_is_not(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, place: str, code: int, error: type[Exception]
) -> None:
    """From the one another ckpt leads back; from the other nothing does but another try."""
    name = volume.save(model=nn.Linear(300, 300))

    def fail(*_: Any, **__: Any) -> None:
        raise kind_of(code)("so it is", errno=code)

    monkeypatch.setattr(restore, place, fail)
    with pytest.raises(error, match="so it is") as failure:
        load(volume.storage, name, registered(model=nn.Linear(300, 300)))
    assert type(failure.value) is error
    if error is CkptCorrupt:
        assert name in str(failure.value)


def test_the_first_that_is_whole_is_taken_and_those_before_it_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """In their order, and none behind it is looked at."""
    bad: list[str] = []
    seen: list[str] = []

    def look(name: str) -> Loaded:
        seen.append(name)
        if name != "c":
            raise CkptCorrupt(f"{name} is torn")
        return Loaded(name, 1, {}, None, 0, 1)

    assert newest_usable("abcd", look, where="here", on_bad=bad.append).ckpt == "c"
    assert (bad, seen) == (["a", "b"], ["a", "b", "c"])
    assert 'ckpt_bad ckpt=a why="a is torn"' in caplog.text

    with pytest.raises(NoUsableCkpt) as refusal:
        newest_usable("ab", look, where="here", on_bad=bad.append)
    assert str(refusal.value).startswith("none of the 2 ckpts under here can be used:\n  a is torn\n  b is torn\n")


def test_a_tensor_that_the_parts_do_not_hold_is_corrupt() -> None:
    """By name, with its type and shape."""
    tensor = torch.zeros(3)
    stored = codec.encode({"t": tensor}, put=lambda tensor, path: "t", path="value")
    manifest = Manifest(1, 10, "job", 1, (), {"a": {"kind": "container", "tree": stored}})
    fits: dict[str, Any] = {"t": torch.ones(3)}
    for tensors in ({}, {"t": torch.ones(4)}, {"t": torch.ones(3, dtype=torch.float64)}, {"u": torch.ones(3)}):
        with pytest.raises(CkptCorrupt, match="names a tensor 't' that its parts do not hold like that"):
            RestorePlan(manifest, registered(a={"t": tensor})).restore(tensors)
    RestorePlan(manifest, registered(a=(there := {"t": tensor}))).restore(fits)
    assert torch.equal(there["t"], torch.ones(3))


def test_storage_is_asked_for_nothing_but_the_ckpt(volume: Volume) -> None:
    """A load of one rank reads its manifest and its parts."""
    name = volume.save(a=[1.0], model=nn.Linear(2, 2))
    other = PosixStorage(volume.storage.root, "job")
    model = nn.Linear(2, 2)
    loaded = load(other, name, registered(a=[0.0], model=model))
    assert (loaded.ckpt, loaded.step, loaded.ranks) == (name, 1, 1)


def test_the_error_says_how_to_take_a_part(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    """More or fewer objects are refused as before; the page that is named has lines that work."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    name = volume.save(model=model, metrics={"x": 1})
    with pytest.raises(CkptMismatch) as caught:
        volume.load(name, model=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert "in the ckpt, not registered: metrics" in str(caught.value)
    assert f"{volume.storage.directory / name}/*.safetensors" in str(caught.value)
    assert "see CkptMismatch in docs/troubleshooting.md" in str(caught.value)

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = page.split("**A part of a ckpt.**")[1].split("```python\n")[1].split("```")[0]
    assert "ckpts/default/000003-000000000412" in lines
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    directory = volume.storage.directory / name
    exec(lines.replace("ckpts/default/000003-000000000412", str(directory)), {"model": fresh})
    assert "All keys matched successfully" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    "epochs",
    [
        [],
        {"a": 1},
        {"a": []},
        {"a": {}},
        {"a": {"epoch": 1}},
        {"a": {"is_over": True}},
        {"a": {"epoch": -1, "is_over": False}},
        {"a": {"epoch": 1.0, "is_over": False}},
        {"a": {"epoch": True, "is_over": False}},
        {"a": {"epoch": 1, "is_over": 0}},
        {"a": {"epoch": 0, "is_over": True}, "b": None},
    ],
)
def test_numbers_of_epochs_that_no_save_writes_are_corrupt(epochs: Any) -> None:
    """They are used when a loop begins: too late to take another ckpt."""
    with pytest.raises(CkptCorrupt, match=r"^name: the numbers of its epochs are not of the form"):
        restore_plan._check_loop("name", {"loops": {}, "epochs": epochs})


@pytest.mark.parametrize(
    "epochs", [{}, {"a": {"epoch": 0, "is_over": True}, "b": {"epoch": 7, "is_over": False, "c": 1}}]
)
def test_numbers_of_epochs_that_a_save_writes_are_taken(epochs: Any) -> None:
    """Also with more than this version knows."""
    restore_plan._check_loop("name", {"loops": {}, "epochs": epochs})


# What is each rank's own, and what is kept for later saves.


@pytest.mark.parametrize(
    ("missing", "size", "own", "is_named"),
    [
        (None, 2, True, False),
        ([0], 2, True, False),
        ([1], 2, True, True),
        (None, 3, True, True),
        ([0], 3, True, True),
        ([1], 2, False, False),
        (None, 3, False, False),
    ],
)
def test_a_rank_that_gets_the_own_state_of_another_one_is_told(
    caplog: pytest.LogCaptureFixture, missing: list[int] | None, size: int, own: bool, is_named: bool
) -> None:
    """Saved on two ranks. On as many each has its own, unless it was lost; without such objects nothing is said."""
    registry = Registry()
    registry.add("memory", {"seen": 0}, own=own)
    entry = {"kind": registry["memory"].kind, "tree": kept({"seen": 7})}
    extra = {"random": kept(None), "loop": kept(None), **({} if missing is None else {"missing": missing})}
    manifest = Manifest(1, 10, "job", 2, (), {"memory": entry}, extra)
    with caplog.at_level(logging.WARNING, "migrator"):
        RestorePlan(manifest, registry, rank=1, size=size).restore({})
    assert (f"own_of_another_rank ckpt={CKPT} objects=memory" in caplog.text) == is_named, caplog.text


def test_what_was_loaded_is_kept_for_what_can_no_longer_be_stored(
    volume: Volume, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in the life after: a path put into a registered dict has the value it was loaded with."""
    name = volume.save(metrics={"best": 5, "path": "a"})
    metrics: dict[str, Any] = {"best": 0, "path": ""}
    registry = registered(metrics=metrics)
    restore.load(volume.storage, name, registry)
    metrics["best"], metrics["path"] = 6, Path("b")

    again: dict[str, Any] = {"best": 0, "path": ""}
    volume.load(volume.save_registry(registry), metrics=again)
    assert again == {"best": 6, "path": "a"}
