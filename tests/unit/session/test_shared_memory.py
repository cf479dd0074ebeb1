"""Objects that share memory when a ckpt is put back, and had each their own when it was saved; and the reverse.

`best = model.state_dict()` is the model's own memory. A script that begins like that, and puts a copy there later, has
two tensors in its ckpt and one in the next life.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from migrator.ckpt import generations
from migrator.ckpt.manifest import Manifest
from migrator.errors import CkptMismatch
from migrator.loop.gate import Gate
from migrator.save.context import SaveContext
from migrator.save.frozen_state import FrozenState
from migrator.session.restore_plan import RestorePlan
from migrator.state.capture import Capturer
from migrator.state.places import is_same
from migrator.state.registry import Registry
from tests.unit.state.test_adapters import Volume

SIZES = pytest.mark.parametrize("width", [2, 12, 100], ids=["in the tree", "copied", "read live"])
"""A dict's tensor of at most 256 bytes is kept in the manifest, and one of at most 16 KiB is copied at a safe point."""


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def net(width: int, value: float) -> nn.Linear:
    model = nn.Linear(width, width)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def values(found: Any) -> Any:
    """What tensors are filled with."""
    if isinstance(found, nn.Module):
        return values(dict(found.state_dict()))
    if isinstance(found, dict):
        return {key: values(item) for key, item in found.items()}
    if isinstance(found, (Tensor, np.ndarray)):
        (value,) = set(found.reshape(-1).tolist())
        return value
    return found


@SIZES
@pytest.mark.parametrize("model_first", [False, True])
@pytest.mark.parametrize(
    "began",
    [
        lambda model: dict(model.state_dict()),
        lambda model: {name: param.detach() for name, param in model.named_parameters()},
        lambda model: {name: param.data for name, param in model.named_parameters()},
    ],
)
def test_an_average_that_began_as_the_model_itself(
    volume: Volume, width: int, model_first: bool, began: Callable[[nn.Module], dict[str, Tensor]]
) -> None:
    """`ema = model.state_dict()`, of which each step makes new tensors. The model must not get the average's values."""

    def life(of_model: float, of_ema: float | None) -> dict[str, Any]:
        model = net(width, of_model)
        ema = began(model)
        if of_ema is not None:
            for name in ema:
                ema[name] = torch.full_like(ema[name], of_ema)
        both = {"model": model, "ema": ema}
        return both if model_first else dict(reversed(both.items()))

    name = volume.save(**life(1.0, 2.0))
    here = life(3.0, None)
    weight = here["model"].weight
    volume.load(name, **here)

    assert values(here["model"]) == {"weight": 1.0, "bias": 1.0}
    assert values(here["ema"]) == {"weight": 2.0, "bias": 2.0}
    assert here["model"].weight is weight
    with torch.no_grad():
        weight.fill_(9.0)
    assert values(here["ema"]) == {"weight": 2.0, "bias": 2.0}, "the next step must not change the average"


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_best_model_is_its_own_even_if_it_was_just_saved(volume: Volume, is_equal: bool) -> None:
    """`best` got a deep copy of the model a moment ago: there are two, though they hold the same."""
    model = net(100, 1.0)
    best = {"loss": 0.5, "weights": copy.deepcopy(model.state_dict())}
    if not is_equal:
        model = net(100, 2.0)
    name = volume.save(model=model, best=best)
    model = net(100, 3.0)
    best = {"loss": 9.0, "weights": model.state_dict()}
    volume.load(name, model=model, best=best)

    assert values(model) == {"weight": 1.0 if is_equal else 2.0, "bias": 1.0 if is_equal else 2.0}
    assert values(best) == {"loss": 0.5, "weights": {"weight": 1.0, "bias": 1.0}}
    with torch.no_grad():
        model.weight.fill_(9.0)
    assert values(best["weights"]["weight"]) == 1.0


def test_a_dict_with_tensors_that_were_two_was_two(volume: Volume) -> None:
    """Even if all in it is equal."""
    name = volume.save(
        state={"now": {"loss": 0.5, "weight": torch.ones(9000)}, "best": {"loss": 0.5, "weight": torch.ones(9000)}}
    )
    began = {"loss": 9.0, "weight": torch.zeros(9000)}
    here = {"now": began, "best": began}
    volume.load(name, state=here)
    assert values(here) == {"now": {"loss": 0.5, "weight": 1.0}, "best": {"loss": 0.5, "weight": 1.0}}
    here["now"]["loss"] = 0.1
    here["now"]["weight"].fill_(9.0)
    assert values(here["best"]) == {"loss": 0.5, "weight": 1.0}


@SIZES
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t(), lambda t: t.view(-1), lambda t: t[1:]])
@pytest.mark.parametrize("model_first", [False, True])
def test_what_was_one_and_is_one_stays_one(
    volume: Volume, width: int, view: Callable[[Tensor], Tensor], model_first: bool
) -> None:
    """A dict that shows the model's own memory, whole or in part."""

    def life(value: float) -> dict[str, Any]:
        model = net(width, value)
        both = {"model": model, "shown": {"weight": view(model.weight.detach())}}
        return both if model_first else dict(reversed(both.items()))

    name = volume.save(**life(1.0))
    here = life(3.0)
    volume.load(name, **here)
    assert values(here["shown"]) == {"weight": 1.0}
    with torch.no_grad():
        here["model"].weight.fill_(9.0)
    assert values(here["shown"]) == {"weight": 9.0}


def test_a_part_of_a_registered_array_stays_one(volume: Volume) -> None:
    """Although the dict that shows it was registered before."""
    array = np.ones(10)
    name = volume.save(shown={"part": array[1:]}, array=array)
    array = np.zeros(10)
    shown = {"part": array[1:]}
    volume.load(name, shown=shown, array=array)
    assert (values(shown), values(array)) == ({"part": 1.0}, 1.0)
    array.fill(9.0)
    assert values(shown) == {"part": 9.0}


@pytest.mark.parametrize("features", [10, 10_000])
def test_shown_buffers_stay_shown(volume: Volume, features: int) -> None:
    """A safe point has a copy of a buffer, so the ckpt holds the dict's tensor as a second one."""

    def life(value: float) -> dict[str, Any]:
        model = nn.BatchNorm1d(features)
        assert model.running_mean is not None
        model.running_mean.fill_(value)
        return {"model": model, "shown": {"mean": model.running_mean}}

    name = volume.save(**life(1.0))
    here = life(3.0)
    volume.load(name, **here)
    here["model"].running_mean.fill_(9.0)
    assert values(here["shown"]) == {"mean": 9.0}


def test_modules_that_are_tied_only_here_are_refused(volume: Volume) -> None:
    """Nothing can be put in the place of a module's parameter. What they held stays as it is."""
    name = volume.save(one=net(100, 1.0), other=net(100, 2.0))
    one, other = net(100, 3.0), net(100, 4.0)
    other.weight = one.weight
    with pytest.raises(CkptMismatch, match=r"holds one/weight and other/weight as two tensors, and here they are one"):
        volume.load(name, one=one, other=other)
    assert (values(one), values(other)) == ({"weight": 3.0, "bias": 3.0}, {"weight": 3.0, "bias": 4.0})


def test_a_buffer_may_be_a_view_of_a_parameter(volume: Volume) -> None:
    """Of all of it or a part."""

    def life(value: float) -> nn.Module:
        model = net(100, value)
        model.register_buffer("turned", model.weight.detach().t())
        model.register_buffer("part", model.weight.detach()[3:5])
        return model

    name = volume.save(model=life(1.0))
    model = life(2.0)
    volume.load(name, model=model)
    assert values(model) == {"weight": 1.0, "bias": 1.0, "turned": 1.0, "part": 1.0}
    with torch.no_grad():
        model.weight.fill_(9.0)
    assert values(model) == {"weight": 9.0, "bias": 1.0, "turned": 9.0, "part": 9.0}


@pytest.mark.parametrize("how", ["registered", "in a dict", "a tensor of the array"])
def test_an_array_may_show_a_tensor(volume: Volume, how: str) -> None:
    """A save has a copy of each array, so the ckpt holds two of one."""

    def life(value: float) -> tuple[dict[str, Any], Any]:
        model = net(100, value)
        array = model.weight.detach().numpy()
        if how == "a tensor of the array":
            array = np.full(9000, value)
            return {"one": {"tensor": torch.from_numpy(array)}, "other": {"array": array}}, array
        return {"model": model, "array": array if how == "registered" else {"it": array}}, array

    name = volume.save(**life(1.0)[0])
    here, array = life(2.0)
    volume.load(name, **here)
    array.fill(9.0)
    found = [value for value in here.values() if not isinstance(value, nn.Module)]
    if "model" in here:
        found.append(here["model"].weight.detach())
    for value in found:
        assert values(value) in (9.0, {"it": 9.0}, {"array": 9.0}, {"tensor": 9.0})


@pytest.mark.parametrize("features", [10, 10_000])
@pytest.mark.parametrize("is_tied", [False, True])
def test_modules_may_share_a_buffer(volume: Volume, features: int, is_tied: bool) -> None:
    """Each has a copy of it in the ckpt. If these differ, it was not shared when they were made."""

    def life(value: float, other: float | None = None) -> dict[str, nn.Module]:
        made = {"one": nn.BatchNorm1d(features, affine=False), "other": nn.BatchNorm1d(features, affine=False)}
        mean = made["one"].running_mean = torch.full((features,), value)
        made["other"].running_mean = mean if other is None else torch.full((features,), other)
        return made

    name = volume.save(**life(1.0, None if is_tied else 2.0))
    here = life(3.0)
    if is_tied:
        volume.load(name, **here)
        assert [values(module.running_mean) for module in here.values()] == [1.0, 1.0]
    else:
        with pytest.raises(CkptMismatch, match="holds other values in one/running_mean than in other/running_mean"):
            volume.load(name, **here)


@pytest.mark.parametrize(
    ("began", "now", "best"),
    [
        ([], [0, 1, 2], [0]),
        ({}, {"a": 1}, {"a": 2}),
        (deque(), deque([1]), deque([2, 3])),
        (set(), {1}, {2}),
        (Counter(), Counter("aab"), Counter("c")),
        ([[]], [[1]], [[2]]),
        (torch.zeros(3), torch.ones(3), torch.full((3,), 2.0)),
        (np.zeros(3), np.ones(3), np.full(3, 2.0)),
        (np.zeros(5000), np.ones(5000), np.full(5000, 2.0)),
        (np.zeros(10)[::-1], np.ones(10), np.full(10, 2.0)),
    ],
)
@pytest.mark.parametrize("depth", ["in one", "in two", "registered itself"])
def test_two_places_that_began_as_one(volume: Volume, began: Any, now: Any, best: Any, depth: str) -> None:
    """`history = []; state = {"now": history, "best": history}`: each gets what it held."""

    def life(now: Any, best: Any) -> dict[str, Any]:
        if depth == "in one":
            return {"state": {"now": now, "best": best}}
        if depth == "in two":
            return {"one": {"now": now}, "other": [{"best": best}]}
        return {"one": {"now": now}, "best": best}

    name = volume.save(**life(now, best))
    began = copy.deepcopy(began)
    here = life(began, began)
    if depth == "registered itself":
        volume.load(name, **here)
        found_now, found_best = here["one"]["now"], here["best"]
        assert found_best is began
    else:
        volume.load(name, **here)
        found_now, found_best = (
            (here["state"]["now"], here["state"]["best"])
            if depth == "in one"
            else (here["one"]["now"], here["other"][0]["best"])
        )
    assert is_same(found_now, now)
    assert is_same(found_best, best)
    assert type(found_now) is type(now)


@pytest.mark.parametrize("kept", [[1, [2]], {"a": [1]}, deque([1]), {1, 2}, torch.ones(3), np.ones(5000)])
def test_two_places_of_one_object_stay_one(volume: Volume, kept: Any) -> None:
    """If both hold the same, the ckpt does not tell whether they were one: what the script made stays."""
    name = volume.save(one={"it": kept}, other={"it": kept})
    began = copy.deepcopy(kept)
    here = {"one": {"it": began}, "other": {"it": began}}
    volume.load(name, **here)
    assert here["one"]["it"] is here["other"]["it"] is began


@pytest.mark.parametrize("rows", [5, 9000])
@pytest.mark.parametrize(
    "parts",
    [
        lambda t: {"mean": t[:, 0], "var": t[:, 1]},
        lambda t: {"left": t[:, :1], "right": t[:, 1:]},
        lambda t: {"now": t[:-1], "next": t[1:]},
        lambda t: {"first": t[0], "all": t},
        lambda t: {"wide": t.unsqueeze(0).expand(3, *t.shape), "all": t},
    ],
)
def test_views_of_one_memory_stay_views(volume: Volume, rows: int, parts: Callable[[Tensor], Any]) -> None:
    """Of each other's columns, of half of each other, of a part."""
    name = volume.save(state=parts(torch.arange(2.0 * rows).reshape(rows, 2)))
    memory = torch.zeros(rows, 2)
    state = parts(memory)
    volume.load(name, state=state)
    assert torch.equal(memory, torch.arange(2.0 * rows).reshape(rows, 2))
    memory.fill_(9.0)
    assert all(values(tensor) == 9.0 for key, tensor in state.items() if key != "wide")


def test_what_fits_in_the_second_place_is_put_there(volume: Volume) -> None:
    """The first one was replaced, so the memory is free."""
    name = volume.save(state={"now": torch.ones(3), "best": torch.ones(2)})
    began = torch.zeros(2)
    here = {"now": began, "best": began}
    volume.load(name, state=here)
    assert values(here) == {"now": 1.0, "best": 1.0}
    assert here["best"] is began


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("is_one", [False, True])
def test_a_registered_dict_within_another(volume: Volume, inner_first: bool, is_one: bool) -> None:
    """What is registered stays what it is; the other one gets a dict of its own, if it had one."""

    def life(inner: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
        both = {"inner": inner, "outer": {"shown": shown}}
        return both if inner_first else dict(reversed(both.items()))

    inner = {"loss": [1.0, float("nan")], "weight": torch.ones(9000)}
    shown = inner if is_one else {"loss": [2.0], "weight": torch.full((9000,), 2.0)}
    name = volume.save(**life(inner, shown))
    began: dict[str, Any] = {"loss": [], "weight": torch.zeros(9000)}
    losses, weight = began["loss"], began["weight"]
    here = life(began, began)
    volume.load(name, **here)
    assert is_same(here["inner"], inner)
    assert is_same(here["outer"]["shown"], shown)
    assert here["inner"] is began
    if is_one:
        assert began["loss"] is losses
        assert began["weight"] is weight
    assert (here["outer"]["shown"] is here["inner"]) is is_one


@pytest.mark.parametrize("tensor_first", [False, True])
def test_an_array_and_a_tensor_that_began_as_one(volume: Volume, tensor_first: bool) -> None:
    """Each gets what it held."""

    def life(tensor: Any, array: Any) -> dict[str, Any]:
        both = {"tensor": tensor, "array": array}
        return {"state": both if tensor_first else dict(reversed(both.items()))}

    for size in (3, 9000):
        name = volume.save(**life(torch.full((size,), 1.0), np.full(size, 2.0, np.float32)))
        array = np.zeros(size, np.float32)
        here = life(torch.from_numpy(array), array)
        volume.load(name, **here)
        assert values(here["state"]) == {"tensor": 1.0, "array": 2.0}


def test_an_array_that_cannot_be_written(volume: Volume) -> None:
    """It is replaced, without a warning of torch."""
    name = volume.save(state={"a": np.ones(3), "b": np.ones(3)})
    array = np.zeros(3)
    array.flags.writeable = False
    here = {"a": array, "b": array}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        volume.load(name, state=here)
    assert values(here) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("size", [3, 9000])
def test_a_tensor_and_its_conjugate(volume: Volume, size: int) -> None:
    """They share their memory, and are two in a ckpt."""
    number = torch.full((size,), 1 + 2j)
    name = volume.save(number=number, other=number.conj())
    here = torch.zeros(size, dtype=torch.complex64)
    volume.load(name, number=here, other=here.conj())
    assert torch.equal(here, number)


def test_what_does_not_fit_is_replaced_in_both_places(volume: Volume) -> None:
    """Nothing was put into the one that they share."""
    began: Any
    for saved, began in (
        (torch.ones(3), torch.zeros(1)),
        (0.25, torch.tensor(9.0)),
        (None, torch.zeros(2)),
        (None, []),
        ({"a": 1}, []),
        (np.ones(3), np.zeros(2)),
    ):
        name = volume.save(state={"now": copy.deepcopy(saved), "best": copy.deepcopy(saved)})
        here = {"now": began, "best": began}
        volume.load(name, state=here)
        assert [values(value) for value in here.values()] == [values(saved)] * 2


@pytest.mark.parametrize("size", [3, 100, 9000])
@pytest.mark.parametrize("dict_first", [False, True])
def test_a_registered_tensor_keeps_its_place(volume: Volume, size: int, dict_first: bool) -> None:
    """The dict that began with it gets another one."""

    def life(tensor: Tensor, shown: Tensor) -> dict[str, Any]:
        both = {"tensor": tensor, "state": {"best": shown}}
        return dict(reversed(both.items())) if dict_first else both

    name = volume.save(**life(torch.full((size,), 1.0), torch.full((size,), 2.0)))
    tensor = torch.zeros(size)
    here = life(tensor, tensor)
    volume.load(name, **here)
    assert values(here) == {"tensor": 1.0, "state": {"best": 2.0}}
    assert here["tensor"] is tensor


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("dict_first", [False, True])
def test_what_a_rank_has_for_itself_keeps_its_place(volume: Volume, is_own: bool, dict_first: bool) -> None:
    """Of several ranks each has its small tensors in the manifest: buffers, and all of a module that is its own."""

    def life(of_model: float, of_best: float | None) -> tuple[Registry, nn.Module, dict[str, Tensor]]:
        model = nn.BatchNorm1d(10)
        with torch.no_grad():
            for tensor in (model.weight, model.bias, model.running_mean, model.running_var):
                assert tensor is not None
                tensor.fill_(of_model)
        best = dict(model.state_dict())
        if of_best is not None:
            best = {name: torch.full_like(tensor, of_best) for name, tensor in best.items()}
        registry = Registry()
        for name in ("best", "model") if dict_first else ("model", "best"):
            registry.add(name, {"best": best, "model": model}[name], own=is_own and name == "model")
        return registry, model, best

    registry, _, _ = life(7.0, 3.0)
    capturer = Capturer(registry)
    generation = generations.claim(volume.storage, fresh=True, about={})
    context = SaveContext(volume.storage, generation, "job", registry, capturer, Gate(capturer), size=2)
    state = FrozenState(context, capturer.take(1, None, full=True))
    assert state.own == []
    manifest = Manifest(1, 1, "job", 2, (), state.objects, {})

    registry, model, best = life(0.0, None)
    plan = RestorePlan(manifest, registry, size=2)
    plan.restore({name: tensor.detach().clone() for name, tensor in state.tensors.items()})
    del best["num_batches_tracked"]
    assert values(best) == dict.fromkeys(("weight", "bias", "running_mean", "running_var"), 3.0)
    assert {name: value for name, value in values(model).items() if name in best} == dict.fromkeys(best, 7.0)


def test_places_that_lie_among_each_other(volume: Volume) -> None:
    """Every other element of one memory: each gets its own, wherever that is."""
    name = volume.save(state={"even": torch.full((9000,), 1.0), "odd": torch.full((9000,), 2.0)})
    memory = torch.zeros(18_000)
    here = {"even": memory[::2], "odd": memory[1::2]}
    volume.load(name, state=here)
    assert values(here) == {"even": 1.0, "odd": 2.0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    saved=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    here=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    width=st.sampled_from([2, 12, 100]),
    order=st.permutations(["model", "a", "b"]),
)
def test_every_place_gets_what_it_held(
    tmp_path_factory: pytest.TempPathFactory, saved: list[int], here: list[int], width: int, order: list[str]
) -> None:
    """Whichever of them were one when they were saved, and whichever are here: one of a module, four of dicts."""

    def life(places: list[int], begin: float) -> dict[str, Any]:
        pool = [nn.Parameter(torch.full((width, width), begin + number)) for number in range(4)]
        model = nn.Module()
        model.weight = pool[places[0]]
        found = [pool[number].data for number in places[1:]]
        made = {"model": model, "a": dict(zip("xy", found, strict=False)), "b": {"c": found[2:]}}
        return {name: made[name] for name in order}

    volume = Volume(tmp_path_factory.mktemp("volume"))
    name = volume.save(**life(saved, 1.0))
    found = life(here, 10.0)
    volume.load(name, **found)
    got = [found["model"].weight, *found["a"].values(), *found["b"]["c"]]
    assert [values(tensor.detach()) for tensor in got] == [1.0 + number for number in saved]
