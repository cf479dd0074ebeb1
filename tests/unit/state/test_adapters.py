"""Every kind of thing that can be registered comes back as it was, and everything else is refused in time.

A save here is a real one (safe point, part, manifest on a volume) and so is the load, into objects
that were made anew, as after a restart.
"""

from __future__ import annotations

import copy
import enum
import logging
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import lr_scheduler

from migrator import ElasticSampler
from migrator.api import Migrator
from migrator.ckpt import generations
from migrator.errors import CkptMismatch, RegistrationError, UsageError
from migrator.loop.gate import Gate
from migrator.save.attempt import Attempt
from migrator.save.context import SaveContext
from migrator.save.staging import StagingBuffer
from migrator.session import restore
from migrator.state.capture import STRIKES, Capturer
from migrator.state.registry import Registry
from migrator.storage.posix import PosixStorage


class Volume:
    """A place for ckpts, with the save and the load that a life makes of its parts."""

    def __init__(self, root: Path) -> None:
        self.storage = PosixStorage(root, "job")
        self._generation = generations.claim(self.storage, fresh=False, about={})
        self._step = 0

    def save(self, **objects: Any) -> str:
        """The name of a ckpt of these objects."""
        return self.save_registry(registered(**objects))

    def save_registry(self, registry: Registry) -> str:
        """The same of what was registered before."""
        capturer = Capturer(registry)
        gate = Gate(capturer)
        self._step += 1
        gate.publish(capturer.take(self._step, None, full=True))
        gate.announce()
        capture = gate.take(1.0)
        assert capture is not None
        context = SaveContext(self.storage, self._generation, "job", registry, capturer, gate)
        attempt = Attempt(context, capture, staging=StagingBuffer(), may_open=False, on_block=lambda done, total: None)
        return attempt.run().ckpt

    def load(self, name: str, **objects: Any) -> None:
        restore.load(self.storage, name, registered(**objects))

    def stored(self, name: str) -> list[str]:
        """Names of the tensors in the part, as another program reads them."""
        path = self.storage.directory / name / "part-00000-of-00001.safetensors"
        with safe_open(path, framework="pt") as part:
            return sorted(part.keys())


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def registered(**objects: Any) -> Registry:
    registry = Registry()
    for name, value in objects.items():
        registry.add(name, value)
    return registry


def refusal(value: Any, name: str = "thing") -> str:
    """Why this cannot be registered."""
    with pytest.raises(RegistrationError) as caught:
        registered(**{name: value})
    return str(caught.value)


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    assert all(same_bits(ours[key], theirs[key]) for key in ours if isinstance(ours[key], Tensor))


# Modules.


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4))


def test_a_module_comes_back_in_its_own_memory(volume: Volume) -> None:
    """Parameters and buffers are bit for bit those saved, and stay the very tensors the optimizer holds."""
    model, other = seeded(1, net), seeded(2, net)
    model(torch.randn(5, 3, 8, 8))
    before = [(p, p.data_ptr()) for p in (*other.parameters(), *other.buffers())]
    volume.load(volume.save(model=model), model=other)

    assert_same_state(model, other)
    after = [(p, p.data_ptr()) for p in (*other.parameters(), *other.buffers())]
    assert all(a is b and at == to for (a, at), (b, to) in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.int8]
)
def test_every_element_type_of_a_module_comes_back(volume: Volume, dtype: torch.dtype) -> None:
    """Also those that safetensors or numpy do not know."""

    def make(fill: int) -> nn.Module:
        module = nn.Module()
        module.register_buffer("held", (torch.arange(4000).reshape(40, 100) % fill).to(dtype))
        return module

    model, other = make(101), make(7)
    volume.load(volume.save(model=model), model=other)

    held, got = model.held, other.held
    assert isinstance(held, Tensor)
    assert isinstance(got, Tensor)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), held.view(torch.uint8))


def test_empty_and_scalar_parameters_come_back(volume: Volume) -> None:
    """A tensor without elements and one without dimensions are parameters like others."""

    def make(value: float) -> nn.Module:
        module = nn.Module()
        module.empty = nn.Parameter(torch.zeros(0, 5))
        module.scale = nn.Parameter(torch.tensor(value))
        return module

    other = make(0.0)
    volume.load(volume.save(model=make(2.5)), model=other)

    assert isinstance(other.scale, Tensor)
    assert other.scale.item() == 2.5


def test_channels_last_stays_channels_last(volume: Volume) -> None:
    """The values are those of the module, the order in memory that of the module they are loaded into."""
    model, other = seeded(1, net), seeded(2, net)
    model.to(memory_format=torch.channels_last)
    volume.load(volume.save(model=model), model=other)
    assert_same_state(model, other)
    assert other[0].weight.is_contiguous()

    last = seeded(3, net).to(memory_format=torch.channels_last)
    volume.load(volume.save(model=other), model=last)
    assert_same_state(model, last)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not last[0].weight.is_contiguous()


def test_non_persistent_buffers_stay_out(volume: Volume) -> None:
    """They are not part of the module's state, as in a state dict: neither stored nor touched."""

    def make(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", torch.full((4,), value), persistent=False)
        return module

    model, other = make(1.0), make(2.0)
    name = volume.save(model=model)
    volume.load(name, model=other)

    assert volume.stored(name) == ["model/bias", "model/weight", *_random_parts(volume, name)]
    assert other.mask.tolist() == [2.0] * 4
    assert_same_state(model, other)


def _random_parts(volume: Volume, name: str) -> list[str]:
    return [key for key in volume.stored(name) if key.startswith("random/")]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_stay_tied(volume: Volume) -> None:
    """Two names, one tensor: in the part as in memory."""
    model, other = seeded(1, Tied), seeded(2, Tied)
    name = volume.save(model=model)
    volume.load(name, model=other)

    assert [key for key in volume.stored(name) if key.endswith("weight")] == [
        "model/embedding.weight",
        "model/inner.weight",
    ]
    assert other.head.weight is other.embedding.weight
    assert_same_state(model, other)


def test_tied_weights_load_into_a_module_that_does_not_tie_them(volume: Volume) -> None:
    """Both copies get the values: the ckpt says what the values are, the script what is tied."""
    model, other = seeded(1, Tied), seeded(2, Tied)
    other.head.weight = nn.Parameter(torch.zeros(50, 16))
    volume.load(volume.save(model=model), model=other)

    assert_same_state(model, other)
    assert other.head.weight is not other.embedding.weight


def test_two_modules_may_share_weights(volume: Volume) -> None:
    """A part of the model registered by itself as well is stored once and comes back once."""
    model, other = seeded(1, Tied), seeded(2, Tied)
    name = volume.save(model=model, embedding=model.embedding)
    volume.load(name, model=other, embedding=other.embedding)

    assert not [key for key in volume.stored(name) if key.startswith("embedding/")]
    assert_same_state(model, other)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("wrap", ["compile", "data parallel", "both", "compiled inside", "twice"])
def test_wrappers_are_taken_off(volume: Volume, wrap: str) -> None:
    """What was saved wrapped loads plain, and the other way round; no key carries `module.` or `_orig_mod.`."""

    def wrapped(model: nn.Sequential) -> Any:
        if wrap == "compiled inside":
            return nn.Sequential(torch.compile(model[0]), *model[1:])
        made: Any = model
        for _ in range(2 if wrap == "twice" else 1):
            made = torch.compile(made) if wrap in ("compile", "both") else nn.DataParallel(made)
        return nn.DataParallel(made) if wrap == "both" else made

    model, plain, again = (seeded(seed, net) for seed in (1, 2, 3))
    name = volume.save(model=wrapped(model))
    volume.load(name, model=plain)
    volume.load(volume.save(model=plain), model=wrapped(again))

    assert {key.removeprefix("model/") for key in volume.stored(name) if key.startswith("model/")} == set(
        model.state_dict()
    )
    assert_same_state(model, plain)
    assert_same_state(model, again)


class Extra(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.note = note

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_extra_state_comes_back(volume: Volume) -> None:
    """What `get_extra_state` gives is captured at the safe point and handed to `set_extra_state`."""
    one = nn.Sequential(Extra({"scale": (1, 2.5)}), nn.Sequential(Extra([1, 2])), Extra(None))
    other = nn.Sequential(Extra(0), nn.Sequential(Extra(0)), Extra(0))
    volume.load(volume.save(model=one), model=other)

    assert [m.note for m in other.modules() if isinstance(m, Extra)] == [{"scale": (1, 2.5)}, [1, 2], None]
    assert_same_state(one[0].linear, other[0].linear)


def test_extra_state_of_a_module_used_twice_comes_back(volume: Volume) -> None:
    """One module under two names has one extra state; the next module's is not taken for it."""

    def make(first: Any, second: Any) -> nn.Sequential:
        shared = Extra(first)
        return nn.Sequential(shared, shared, Extra(second))

    other = make(0, 0)
    volume.load(volume.save(model=make("one", "two")), model=other)

    assert [other[i].note for i in range(3)] == ["one", "one", "two"]


def test_a_parameter_may_be_called_extra_state(volume: Volume) -> None:
    """Only torch's own key is extra state, whatever a parameter's name ends with."""

    def make(value: float) -> nn.Module:
        module = Extra(value)
        module.my_extra_state = nn.Parameter(torch.full((3,), value))
        return module

    other = make(0.0)
    volume.load(volume.save(model=make(2.0)), model=other)

    assert other.my_extra_state.tolist() == [2.0] * 3
    assert other.note == 2.0


# Optimizers.


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    weight, bias = model.parameters()
    return [{"params": [weight]}, {"params": [bias], "lr": 0.5}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd momentum": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
    "adam tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), foreach=False),
    "adamw amsgrad": lambda m: torch.optim.AdamW(two_groups(m), lr=0.1, amsgrad=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.1),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), t0=2),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, momentum=0.9, centered=True),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, history_size=4),
    "lbfgs wolfe": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs = seeded(number, lambda: torch.randn(4, 6))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(inputs).pow(2).sum()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_goes_on_as_if_nothing_had_happened(volume: Volume, name: str, steps: int) -> None:
    """Saved after some steps, or before the first, and loaded into a new one, it makes the very same next steps."""
    make = OPTIMIZERS[name]
    model, other = (seeded(seed, lambda: nn.Linear(6, 3)) for seed in (1, 2))
    optimizer, fresh = make(model), make(other)
    for number in range(steps):
        step(model, optimizer, number)
    # A scheduler changes the groups after the step.
    optimizer.param_groups[-1]["lr"] = 0.05
    if steps:
        step(other, fresh, 17)
    volume.load(volume.save(model=model, optimizer=optimizer), model=other, optimizer=fresh)

    assert_same_state(model, other)
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert [type(g["lr"]) for g in fresh.param_groups] == [type(g["lr"]) for g in optimizer.param_groups]
    for number in range(10, 13):
        step(model, optimizer, number)
        step(other, fresh, number)
    assert_same_state(model, other)


def test_sparse_adam_goes_on(volume: Volume) -> None:
    """Its gradients are sparse, its state is not."""

    def make(seed: int) -> tuple[nn.Embedding, torch.optim.SparseAdam]:
        model = seeded(seed, lambda: nn.Embedding(30, 4, sparse=True))
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def sparse_step(model: nn.Embedding, optimizer: torch.optim.Optimizer, row: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([row, row + 1])).pow(2).sum().backward()
        optimizer.step()

    (model, optimizer), (other, fresh) = make(1), make(2)
    sparse_step(model, optimizer, 3)
    volume.load(volume.save(model=model, optimizer=optimizer), model=other, optimizer=fresh)
    for row in (3, 9):
        sparse_step(model, optimizer, row)
        sparse_step(other, fresh, row)

    assert_same_state(model, other)


class Precise(torch.optim.Optimizer):
    """Keeps float32 momentum for bfloat16 parameters, as mixed precision optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros(param.shape, dtype=torch.float32))
                state["steps"] = state.get("steps", 0) + 1
                momentum.mul_(0.9).add_(param.grad.float())
                param.copy_(param.float() - group["lr"] * momentum)
        self.state["all"] = {"total": float(sum(s["steps"] for k, s in self.state.items() if k != "all"))}


def test_float32_state_of_bfloat16_parameters_stays_float32(volume: Volume) -> None:
    """`load_state_dict` would cast it to the parameters' type and lose what it is kept for."""
    model, other = (seeded(seed, lambda: nn.Linear(6, 3).bfloat16()) for seed in (1, 2))
    optimizer, fresh = Precise(model.parameters()), Precise(other.parameters())
    for m, _o in ((model, optimizer), (other, fresh)):
        m(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    for _ in range(3):
        optimizer.step()
    volume.load(volume.save(model=model, optimizer=optimizer), model=other, optimizer=fresh)

    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert fresh.state[two]["momentum"].dtype == torch.float32
        assert same_bits(optimizer.state[one]["momentum"], fresh.state[two]["momentum"])
        assert fresh.state[two]["steps"] == 3
    assert fresh.state["all"] == {"total": 6.0}


class Overriding(torch.optim.SGD):
    """Knows something about its state that only its own methods know."""

    note = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.note = state_dict["note"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "note"})


def test_an_optimizer_with_its_own_state_dict_is_asked_for_it(volume: Volume) -> None:
    """Its own methods are used, both ways."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, fresh = Overriding(model.parameters(), lr=0.3), Overriding(other.parameters(), lr=0.1)
    optimizer.note = 42
    volume.load(volume.save(optimizer=optimizer), optimizer=fresh)

    assert (fresh.note, fresh.param_groups[0]["lr"]) == (42, 0.3)


def test_another_optimizer_is_refused(volume: Volume) -> None:
    """SGD's momentum is not Adam's, and groups of other parameters are other groups; all differences at once."""
    model = nn.Linear(2, 3)
    name = volume.save(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), other=torch.optim.SGD([model.weight]))

    with pytest.raises(CkptMismatch) as caught:
        volume.load(name, optimizer=torch.optim.Adam(model.parameters()), other=torch.optim.SGD([model.bias]))
    assert "optimizer: is a Adam here, a SGD there" in str(caught.value)
    assert "other/group 0, parameter 0: shape is (3,) here, (3, 2) there" in str(caught.value)


# Schedulers and scalers.


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    first = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=4)
    second = lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3, 3], gamma=0.5)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])


class Warmup:
    """A schedule that is an object and has fields of its own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.length)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 4, 4, 6], gamma=0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=7),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=1.0, step_size_up=3),
    "sequential": sequence,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lr_lambda=lambda epoch: 0.9**epoch),
    "lambda object": lambda o: lr_scheduler.LambdaLR(o, lr_lambda=Warmup(5)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def next_lr(scheduler: Any, optimizer: torch.optim.Optimizer) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer made no step; and SequentialLR's own use of an old way
        scheduler.step(*[1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_nothing_had_happened(volume: Volume, name: str) -> None:
    """Loaded into a new one it makes the same learning rates as the one that was saved."""

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    (optimizer, scheduler), (fresh, other) = make(), make()
    for _ in range(3):
        next_lr(scheduler, optimizer)
    volume.load(volume.save(optimizer=optimizer, scheduler=scheduler), optimizer=fresh, scheduler=other)

    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [next_lr(other, fresh) for _ in range(6)] == [next_lr(scheduler, optimizer) for _ in range(6)]


def test_another_scheduler_is_refused(volume: Volume) -> None:
    """The fields of one mean other things in another."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    name = volume.save(scheduler=SCHEDULERS["step"](optimizer))

    with pytest.raises(CkptMismatch, match="scheduler: is a ExponentialLR here, a StepLR there"):
        volume.load(name, scheduler=SCHEDULERS["exponential"](optimizer))


def test_a_schedule_that_cannot_be_stored_is_refused_with_its_path() -> None:
    """A plain lambda has no state and is fine; an object that holds one is named down to the very place."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    bad = Warmup(3)
    bad.inner = lambda epoch: epoch  # type: ignore[attr-defined]
    said = refusal(lr_scheduler.LambdaLR(optimizer, lr_lambda=bad), "scheduler")

    assert said.startswith("scheduler.lr_lambdas[0].inner is of type function, which a ckpt cannot hold. ")
    assert "state_dict()" in said


def test_a_grad_scaler_comes_back(volume: Volume) -> None:
    """Scale and the count since it last grew."""

    def make() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def use(scaler: torch.amp.GradScaler, good: bool) -> float:
        param = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler.scale(param.sum() * (1.0 if good else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(scaler.get_scale())

    scaler, other = make(), make()
    for good in (True, True, True, False, True, True):
        use(scaler, good)
    volume.load(volume.save(scaler=scaler), scaler=other)

    assert other.state_dict() == scaler.state_dict()
    assert use(other, True) == use(scaler, True) == 16.0


def test_a_disabled_grad_scaler_is_no_obstacle(volume: Volume) -> None:
    """Scripts register their scaler whether or not it does anything today."""
    scaler, other = (torch.amp.GradScaler("cpu", enabled=False) for _ in range(2))
    volume.load(volume.save(scaler=scaler), scaler=other)

    assert other.state_dict() == scaler.state_dict() == {}


def test_a_sampler_comes_back(volume: Volume) -> None:
    """Seed, epoch and cursor: the samples that are left are those that were left."""
    sampler, other = ElasticSampler(100, seed=3), ElasticSampler(100, seed=9)
    sampler.set_epoch(4)
    sampler.advance(37)
    volume.load(volume.save(sampler=sampler), sampler=other)

    assert (other.epoch, other.cursor, list(other)) == (4, 37, list(sampler)[37:])


# Containers.


def test_containers_come_back_in_place_with_aliases_true(volume: Volume) -> None:
    """Whoever holds the list inside the dict sees what was loaded; types and order are kept."""

    def make(n: int) -> dict[str, Any]:
        return {
            "history": {"loss": [0.5 / n] * n, "best": (n, float("inf"))},
            "seen": set(range(n)),
            "window": deque(range(n), maxlen=5),
            "order": OrderedDict((str(i), i) for i in reversed(range(n))),
            "by epoch": {i: [i, None, b"\0", True] for i in range(n)},
            "array": np.arange(3.0) * n,
            "tensor": torch.arange(3) * n,
            "none": None,
        }

    saved, live = make(4), make(2)
    live["only here"] = 1
    loss, seen, window, array, tensor = (
        live["history"]["loss"],
        live["seen"],
        live["window"],
        live["array"],
        live["tensor"],
    )
    volume.load(volume.save(metrics=saved), metrics=live)

    assert list(live) == list(saved)
    assert str(live) == str(saved)
    assert type(live["order"]) is OrderedDict
    assert live["history"]["loss"] is loss
    assert loss == [0.125] * 4
    assert live["seen"] is seen
    assert live["window"] is window
    assert window.maxlen == 5
    assert live["array"] is array
    assert array.tolist() == [0.0, 4.0, 8.0]
    assert live["tensor"] is tensor
    assert tensor.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"a": 1}, {"b": 2}),
        ([1, [2.5, "x"]], []),
        ([], [1, 2, 3]),
        ({1, "a", (2, 3)}, {9}),
        (deque([1, 2, 3], maxlen=3), deque(maxlen=3)),
        (OrderedDict(b=1, a=2), OrderedDict(a=0)),
        ({1: "int", "1": "str", (1, 2): "tuple", None: "none", True and 2: "two"}, {}),
    ],
)
def test_a_registered_container_is_filled_not_replaced(volume: Volume, saved: Any, live: Any) -> None:
    """The script's own reference is the one that is restored."""
    volume.load(volume.save(thing=saved), thing=live)

    assert live == saved
    assert type(live) is type(saved)


def test_subclasses_of_dict_stay_what_the_script_made_them(volume: Volume) -> None:
    """A Counter goes on counting and a defaultdict goes on making defaults after a load."""
    counter: Counter[str] = Counter()
    lists: defaultdict[str, list[int]] = defaultdict(list)
    volume.load(
        volume.save(counter=Counter("aab"), lists=defaultdict(list, {"x": [1]})),
        counter=counter,
        lists=lists,
    )
    counter.update("ac")
    lists["y"].append(2)

    assert counter == Counter("aaabc")
    assert lists == {"x": [1], "y": [2]}


class Seen(set[int]):
    """A set with something added by the script."""


class Window(deque[int]):
    """A deque likewise."""


def test_subclasses_of_set_and_deque_are_filled_too(volume: Volume) -> None:
    """The script's own class does not keep a container from being restored, at the top or inside."""
    live = {"seen": Seen(), "window": Window()}
    seen, window, inside = Seen(), Window(), live["seen"]
    saved = {"seen": Seen({5}), "window": Window([6, 7])}
    volume.load(volume.save(seen=Seen({1, 2}), window=Window([3, 4]), both=saved), seen=seen, window=window, both=live)

    assert (seen, list(window)) == ({1, 2}, [3, 4])
    assert live == saved
    assert live["seen"] is inside


def test_what_becomes_unstorable_later_does_not_end_the_training() -> None:
    """A safe point goes on; it is the save that will tell, with the path."""
    metrics: dict[str, Any] = {}
    capturer = Capturer(registered(metrics=metrics))
    metrics["mask"] = torch.eye(3).to_sparse()
    metrics["fn"] = len

    capture = capturer.take(1, None, full=True)
    assert capture.values["metrics"]["fn"] is len


def test_floats_come_back_to_the_last_bit(volume: Volume) -> None:
    """Not a number, the infinities, minus zero and the smallest number too."""
    saved = [0.1, 1 / 3, float("inf"), float("-inf"), -0.0, 5e-324, float("nan"), 2**70, -(2**70)]
    live: list[Any] = []
    volume.load(volume.save(floats=saved), floats=live)

    assert [repr(x) for x in live] == [repr(x) for x in saved]


def test_the_ckpt_is_that_of_the_safe_point_not_of_the_save(tmp_path: Path) -> None:
    """What the loop appends and counts behind the safe point is not in a save that begins later."""
    registry = registered(metrics=(metrics := {"losses": [1.0], "array": np.ones(3)}))
    capturer = Capturer(registry)
    capture = capturer.take(1, None, full=True)
    metrics["losses"].append(2.0)  # type: ignore[attr-defined]
    metrics["array"][:] = 7

    frozen = registry["metrics"].frozen(capture.values["metrics"])
    assert frozen["losses"] == [1.0]
    assert frozen["array"].tolist() == [1.0] * 3


@pytest.mark.parametrize("size", [0, 3, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_comes_back_in_its_own_memory(volume: Volume, size: int, dtype: torch.dtype) -> None:
    """Inline or in the part, whatever its size: a view of it sees the values."""
    saved = (torch.arange(size) % 3).to(dtype)
    live = torch.zeros(size, dtype=dtype)
    view = live[1:]
    volume.load(volume.save(table=saved), table=live)

    assert torch.equal(live, saved)
    assert torch.equal(view, saved[1:])


def test_a_tensor_of_another_shape_or_type_is_refused(volume: Volume) -> None:
    """All differences are told at once, and nothing is half loaded."""
    name = volume.save(a=torch.zeros(3), b=torch.zeros(5000), c=np.zeros(3), d={"x": 1})
    live = {"a": torch.ones(4), "b": torch.ones(5000, dtype=torch.float64), "c": torch.ones(3), "d": {"x": 2}}

    with pytest.raises(CkptMismatch) as caught:
        volume.load(name, **live)
    assert "a: shape is (4,) here, (3,) there" in str(caught.value)
    assert "b: dtype is torch.float64 here, torch.float32 there" in str(caught.value)
    assert "c: a Tensor here, a ndarray there" in str(caught.value)
    assert live["d"] == {"x": 2}
    assert live["a"].tolist() == [1.0] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["f8", "i4", "?", "c16", "U5", "M8[s]", ">f4"])
def test_an_array_comes_back_in_its_own_memory(volume: Volume, dtype: str) -> None:
    """Numbers, texts and times, in either byte order."""
    saved = np.arange(6).astype(dtype).reshape(2, 3)
    live = np.zeros((2, 3), dtype=dtype)
    view = live[1]
    volume.load(volume.save(array=saved), array=live)

    assert live.dtype == saved.dtype
    assert live.tolist() == saved.tolist()
    assert view.tolist() == saved[1].tolist()


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand(3, generator=g).tolist()),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (np.random.default_rng, lambda g: g.normal(size=3).tolist()),
    "numpy mt19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.normal(size=3).tolist()),
    "numpy philox": (
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda g: g.integers(9, size=9).tolist(),
    ),
    "numpy sfc64": (lambda seed: np.random.Generator(np.random.SFC64(seed)), lambda g: g.normal(size=3).tolist()),
    "numpy legacy": (np.random.RandomState, lambda g: g.normal(size=3).tolist()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_random_generator_goes_on(volume: Volume, name: str) -> None:
    """The next draws after a load are those that came next when it was saved."""
    make, draw = GENERATORS[name]
    generator, other = make(1), make(2)
    draw(generator)
    ckpt = volume.save(generator=generator)
    draw(other)
    volume.load(ckpt, generator=other)

    assert [draw(other) for _ in range(3)] == [draw(generator) for _ in range(3)]


class Average:
    """Something of the user's own."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.by_name: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "by_name": self.by_name, "big": torch.full((5000,), float(len(self.values)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.by_name = state["values"], state["by_name"]
        assert same_bits(state["big"], torch.full((5000,), float(len(self.values))))


def test_a_stateful_object_of_the_users_own_comes_back(volume: Volume) -> None:
    """Whatever has `state_dict` and `load_state_dict` gets back what it gave."""
    one, other = Average(1.0, 2.0), Average()
    one.by_name = {("a", 1): {"nested": (None, 2)}}
    volume.load(volume.save(average=one), average=other)

    assert (other.values, other.by_name) == ([1.0, 2.0], {("a", 1): {"nested": (None, 2)}})


def test_a_stateful_object_gets_its_counters_back_as_counters(volume: Volume) -> None:
    """It goes on counting after a load: a plain dict in the place of a Counter would fail at the next key."""

    def make(words: str) -> Average:
        made = Average()
        made.by_name = {"words": Counter(words), "lists": defaultdict(list), "plain": {"n": 1}}
        return made

    one, other = make("aab"), make("")
    one.by_name["lists"]["x"].append(1)
    volume.load(volume.save(average=one), average=other)
    other.by_name["words"]["c"] += 1
    other.by_name["lists"]["y"].append(2)

    assert other.by_name == {"words": Counter("aabc"), "lists": {"x": [1], "y": [2]}, "plain": {"n": 1}}


def test_a_module_list_inside_a_dict_is_refused_with_advice() -> None:
    """Objects are registered by themselves, not hidden in containers."""
    assert refusal({"nets": [nn.Linear(1, 1)]}, "all").startswith(
        "all.nets[0] is of type torch.nn.modules.linear.Linear, which a ckpt cannot hold."
    )


# What is refused.


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    one: int
    two: int


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append({"again": found})
    return found


def nested(depth: int) -> list[Any]:
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("value", "path", "advice"),
    [
        ({"step": {"fn": len}}, "thing.step.fn is of type builtin_function_or_method", "state_dict()"),
        ([1, lambda: 0], "thing[1] is of type function", "state_dict()"),
        ({"colour": Colour.RED}, "thing.colour is of type", "Store its .value instead."),
        ({(1, Colour.RED): 0}, "which a ckpt cannot hold", "as keys"),
        ({frozenset([1]): 0}, "which a ckpt cannot hold", "as keys"),
        ({"pair": Pair(1, 2)}, "thing.pair is of type", "plain tuple or dict"),
        ({"a b": object()}, "thing['a b'] is of type object", "state_dict()"),
        ({"array": np.array([None])}, "thing.array is of type numpy.ndarray", "object"),
        ({"text": np.bytes_(b"ab\0")}, "thing.text is of type numpy.bytes_", "ends with a NUL"),
        ({"text": np.str_("ab\0")}, "thing.text is of type numpy.str_", "ends with a NUL"),
        ({"masked": np.ma.masked_array([1], [True])}, "thing.masked", "plain array"),
        ({"t": torch.eye(3).to_sparse()}, "thing.t: this tensor is sparse", "to_dense()"),
        ({"t": torch.empty(2, device="meta")}, "thing.t: this tensor is on the meta device", "Give it values"),
        (cycle(), "thing[0].again contains itself", "Break it."),
        (nested(200), "is nested more than 100 deep", "flatter"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value: Any, path: str, advice: str) -> None:
    """At registration, down to the very place, and with what to do instead."""
    said = refusal(value)

    assert path in said
    assert advice in said


@pytest.mark.parametrize("value", [1, 2.5, "text", b"", True, None, (1, 2), frozenset([1]), np.float64(1.0)])
def test_what_cannot_be_restored_in_place_is_refused(value: Any) -> None:
    """A number that was loaded could not reach the script's variable."""
    said = refusal(value, "epoch")

    assert f"register('epoch', ...): a {type(value).__name__} cannot be restored in place." in said
    assert "dict" in said


@pytest.mark.parametrize("value", [len, lambda: 0, object(), torch.optim.SGD, nn.Linear, iter([])])
def test_things_without_state_are_refused(value: Any) -> None:
    """Functions, classes (not their instances) and iterators; the advice names the two methods."""
    assert "Give it state_dict() and load_state_dict(), or keep what matters of it in a dict." in refusal(value)


def test_an_object_whose_state_cannot_be_read_is_refused() -> None:
    """Better now than in the last thirty seconds; the cause is kept."""

    class Broken(Average):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not yet initialised")

    assert "reading its state failed: RuntimeError: not yet initialised" in refusal(Broken())


def _sharded(name: str, parent: type) -> Any:
    return type(name, (parent,), {})


@pytest.mark.parametrize(
    ("name", "parent"),
    [
        ("FullyShardedDataParallel", nn.Module),
        ("FSDPModule", nn.Module),
        ("DeepSpeedEngine", nn.Module),
        ("ZeroRedundancyOptimizer", Average),
        ("DeepSpeedZeroOptimizer", Average),
    ],
)
def test_sharded_things_are_refused_by_name(name: str, parent: type) -> None:
    """A piece of the state would load as if it were the whole. Subclasses of theirs too."""
    for kind in (_sharded(name, parent), type("Mine", (_sharded(name, parent),), {})):
        said = refusal(kind(), "model")

        assert f"{kind.__name__} is not supported yet: " in said
        assert "Use DDP, or save it by other means." in said


def test_a_sharded_thing_inside_is_refused() -> None:
    """A wrapper, or a model that shards only its layers, does not hide it."""
    layer = _sharded("FullyShardedDataParallel", nn.Module)()

    assert "FullyShardedDataParallel is not supported yet" in refusal(nn.DataParallel(layer))
    assert "FullyShardedDataParallel (1) is not supported yet" in refusal(nn.Sequential(nn.Linear(1, 1), layer))


class DTensor(Tensor):
    """Stands in for torch's, which needs a process group."""


def test_a_dtensor_is_refused_by_its_path() -> None:
    """Also one deep inside a module, or in a container."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.zeros(2, 2).as_subclass(DTensor))  # type: ignore[arg-type]

    assert refusal(model, "model") == "model/0.weight is a DTensor: sharded state is not supported yet."
    assert "thing.t: this tensor is a DTensor" in refusal({"t": torch.zeros(2).as_subclass(DTensor)})  # type: ignore[arg-type]


def test_modules_without_values_are_refused() -> None:
    """Lazy and meta modules have nothing to save yet; the advice says what to do first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lazy modules are new
        lazy = nn.LazyLinear(3)
    assert "Run one forward pass before register()." in refusal(nn.Sequential(lazy))
    assert "Materialise it before register()." in refusal(nn.Linear(2, 2, device="meta"))


# Names and order.


@pytest.mark.parametrize("name", ["", "!x", "a/b", "a\tb", "a\nb", "a\0", 7, None])
def test_a_name_must_be_a_plain_text(name: Any) -> None:
    """It becomes a key in the manifest and a prefix in the part."""
    with pytest.raises(RegistrationError, match="the name must be a text without '/'"):
        Registry().add(name, {})


def test_a_name_is_given_once() -> None:
    """The second object of a name would silently take the place of the first."""
    registry = registered(model=nn.Linear(1, 1))

    with pytest.raises(RegistrationError, match=r"register\('model', ...\): there is a Linear of this name already"):
        registry.add("model", {})
    assert len(registry) == 1


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_an_object_is_registered_once() -> None:
    """Under a second name, or wrapped, it is still the same object."""
    model = nn.Linear(1, 1)
    registry = registered(model=model)

    for again in (model, nn.DataParallel(model), torch.compile(model)):
        with pytest.raises(RegistrationError, match="the same object is registered as 'model' already"):
            registry.add("net", again)


def test_equal_objects_are_two_objects() -> None:
    """Two empty lists are not the same list."""
    assert len(registered(one=[], two=[])) == 2


def test_a_refused_object_leaves_nothing_behind() -> None:
    """The script may register something better under the same name."""
    migrator = Migrator()
    with pytest.raises(RegistrationError):
        migrator.register("metrics", {"fn": len})
    migrator.register("metrics", {"n": 1})


def test_listening_needs_something_registered() -> None:
    """There would be nothing to save; the message shows the call that is missing."""
    with pytest.raises(UsageError, match=r'migrator.register\("model", model\)'):
        Migrator().listening()


@pytest.mark.parametrize("call", ["load_ckpt", "safe_point", "save_ckpt"])
def test_nothing_works_before_listening(call: str) -> None:
    """The order of the calls is told."""
    with pytest.raises(UsageError, match=r"before listening\(\): call register\(\) for each object"):
        getattr(Migrator(), call)()


# What captures cost.


class Clock:
    """Stands in for the capturer's clock: captures take what the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("migrator.state.capture.perf_counter", made)
    return made


class Counted(list[float]):
    """A list that counts how often it is copied, and takes as long for it as a real one of its length."""

    clock: Clock
    copies = 0

    def __iter__(self) -> Iterator[float]:
        self.copies += 1
        self.clock.now_s += 30e-9 * len(self)
        return super().__iter__()


def safe_points(capturer: Capturer, clock: Clock, count: int) -> list[Any]:
    found = []
    for number in range(count):
        clock.now_s += 0.001
        found.append(capturer.take(number, None, full=False))
    return found


def test_a_loss_list_that_grows_is_named_once_and_left_out(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Short it is part of every safe point; at 10^5 floats it is captured no more, and one line says so."""
    losses = Counted([0.5] * 10)
    losses.clock = clock
    metrics = {"n": 1}
    capturer = Capturer(registered(losses=losses, metrics=metrics))
    short = safe_points(capturer, clock, 50)
    assert not any(capture.missing for capture in short)
    assert all(capture.values["losses"] == losses for capture in short)

    losses.extend([0.5] * 100_000)
    with caplog.at_level(logging.WARNING, "migrator"):
        long = safe_points(capturer, clock, 50)
    copies = losses.copies
    later = safe_points(capturer, clock, 1000)
    assert losses.copies == copies
    with caplog.at_level(logging.WARNING, "migrator"):
        for number in range(3):  # a save is due now and then
            assert not capturer.take(number, None, full=True).missing

    assert [capture.missing == {"losses"} for capture in long].index(True) in (STRIKES - 1, STRIKES)
    assert all(capture.missing == {"losses"} and "losses" not in capture.values for capture in later)
    assert all(capture.values["metrics"] == metrics for capture in later)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("capture_costly object=losses cost_us=")


def test_what_is_left_out_is_captured_when_a_save_is_due(clock: Clock) -> None:
    """It is never skipped: a save waits for a safe point at which everything is taken."""
    losses = Counted([0.5] * 100_000)
    losses.clock = clock
    capturer = Capturer(registered(losses=losses))
    gate = Gate(capturer)
    for capture in safe_points(capturer, clock, 20):
        gate.publish(capture)
    assert gate.take(0.0) is None

    gate.announce()
    gate.publish(capturer.take(21, None, full=True))
    taken = gate.take(0.0)
    assert taken is not None
    assert not taken.missing
    assert taken.values["losses"] == losses


def test_one_slow_capture_says_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The machine was busy; only what is costly time after time is left out."""
    losses = Counted([0.5] * 100_000)
    losses.clock = clock
    capturer = Capturer(registered(losses=losses))
    for _ in range(5):
        safe_points(capturer, clock, STRIKES - 1)
        clock.now_s += 10.0  # a long step: beside it the list costs nothing
        (capture,) = safe_points(capturer, clock, 1)
        assert not capture.missing

    assert not caplog.records


# All together, through the front door.


def test_a_synced_batchnorm_has_the_state_of_an_ordinary_one() -> None:
    plain = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    plain(torch.rand(16, 8))
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(synced[1], nn.SyncBatchNorm)
    for model in (plain, synced):
        Registry().add("model", model)  # is not refused
    state, expected = synced.state_dict(), plain.state_dict()

    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
