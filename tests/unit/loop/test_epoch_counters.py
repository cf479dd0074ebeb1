"""What scripts need besides the loop itself: a loader's attributes, counters, wrapped optimizers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from migrator.api import Migrator
from migrator.errors import CkptCorrupt, UsageError
from migrator.loop.epoch_counters import EpochCounters
from migrator.session.restore_plan import _check_loop


@pytest.fixture
def migrator(here: Path) -> Iterator[Migrator]:
    """One that listens, in this process."""
    made = Migrator()
    made.register("state", {})
    made.listening()
    yield made
    made.close()


# A wrapped loader.


def test_a_wrapped_loader_has_the_attributes_of_the_loader(migrator: Migrator) -> None:
    """Scripts read its length, its data and its batch size, and set the epoch of its sampler."""
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data), drop_last=True)
    wrapped = migrator.batches(loader)

    assert wrapped.dataset is data
    assert wrapped.sampler is loader.sampler
    assert wrapped.batch_sampler is loader.batch_sampler
    assert (wrapped.batch_size, wrapped.num_workers, wrapped.drop_last, len(wrapped)) == (4, 0, True, 2)
    assert not hasattr(wrapped, "no_such_thing")
    assert not hasattr(wrapped, "_iterator")
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'datset'"):
        _ = wrapped.datset


# Optimizers in the wrappers of other libraries. As theirs are, as far as an optimizer's state goes.


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Accelerate's: an optimizer without a state of its own, whose attributes are properties."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class FabricOptimizer:
    """Lightning Fabric's: it becomes an instance of the optimizer's class, and shares the content of its dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step", "__del__")}
        self.__class__ = type("Fabric" + type(optimizer).__name__, (self.__class__, type(optimizer)), {})
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """As timm's: slow weights beside those of the inner optimizer, in whose state they are kept."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self._base_optimizer.step()
        for param in self.param_groups[0]["params"]:
            slow = self._base_optimizer.state[param].setdefault("slow", param.detach().clone())
            slow.lerp_(param.detach(), 0.5)

    def state_dict(self) -> Any:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Sam(torch.optim.Optimizer):
    """As the usual SAM: its `state_dict()` leaves out the state of the inner optimizer."""

    def __init__(self, params: Any, make: Any) -> None:
        super().__init__(params, {})
        self.optimizer = make(self.param_groups)
        self.param_groups = self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "Accelerate": lambda params: AcceleratedOptimizer(sgd(params)),
    "Fabric": lambda params: FabricOptimizer(sgd(params)),
    "one in the other": lambda params: AcceleratedOptimizer(FabricOptimizer(sgd(params))),  # type: ignore[arg-type]
    "Lookahead": lambda params: Lookahead(sgd(params)),
    "Lookahead in Accelerate": lambda params: AcceleratedOptimizer(Lookahead(sgd(params))),
}


def wrapped_life(make: Callable[[Any], Any], steps: int) -> list[float]:
    """A life with this optimizer: the weights after each of so many steps."""
    migrator, model = Migrator(), torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = make(model.parameters())
    migrator.register("model", model)
    migrator.register("optimizer", optimizer)
    migrator.listening(resume="auto")
    if migrator.resume:
        migrator.load_ckpt()
    weights = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        migrator.safe_point()
        weights.append(model.weight[0, 0].item())
    migrator.save_ckpt()
    migrator.close()
    return weights


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_optimizer_is_the_optimizer(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is registered is what steps: nobody is told to register it, and its momentum goes on."""
    caplog.set_level("WARNING", "migrator")
    monkeypatch.setenv("MIGRATOR_JOB", "unstopped")
    unstopped = wrapped_life(WRAPPERS[name], 6)
    monkeypatch.setenv("MIGRATOR_JOB", "stopped")
    stopped = wrapped_life(WRAPPERS[name], 3) + wrapped_life(WRAPPERS[name], 3)

    assert stopped == unstopped
    assert not [record for record in caplog.records if "unregistered_optimizer" in record.getMessage()]


def test_a_wrapper_that_does_not_save_the_state_inside_is_named(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own `state_dict()` says nothing of the momentum."""
    caplog.set_level("WARNING", "migrator")
    wrapped_life(lambda params: Sam(params, sgd), 2)

    (said,) = [r.getMessage() for r in caplog.records if "unregistered_optimizer" in r.getMessage()]
    assert "optimizer=SGD" in said


def test_a_wrapper_with_state_of_its_own_is_registered_as_it_is(here: Path) -> None:
    """What it saves besides is not lost."""

    class Averaging(AcceleratedOptimizer):
        average = 1.5

        def state_dict(self) -> Any:
            return {**super().state_dict(), "average": self.average}

        def load_state_dict(self, state_dict: Any) -> None:
            self.average = state_dict["average"]
            super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})

    made = []

    def make(params: Any) -> Averaging:
        made.append(Averaging(sgd(params)))
        return made[-1]

    wrapped_life(lambda params: setattr(one := make(params), "average", 2.5) or one, 1)
    wrapped_life(make, 0)

    assert [one.average for one in made] == [2.5, 2.5]


def test_misuse_of_counters(migrator: Migrator) -> None:
    """A name twice, a number that is none, a meter that comes too late."""
    assert list(migrator.epochs(2)) == [0, 1]
    with pytest.raises(UsageError, match=r"there was a loop of this name"):
        migrator.epochs(2)
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError, match="expected a whole number from 0"):
            migrator.epochs(wrong, name="other")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"register\('loss', \.\.\.\) after listening\(\)"):
        migrator.meter("loss")


def test_a_meter_counts() -> None:
    """Means of batches, weighted by their samples; tensors as well."""
    meter = Migrator().meter("loss")
    assert meter.mean != meter.mean  # nothing yet: nan
    meter.add(2.0, 3)
    meter.add(torch.tensor(6.0, requires_grad=True))

    assert (meter.sum, meter.count, meter.mean) == (12.0, 4, 3.0)
    assert meter.take() == 3.0
    assert (meter.sum, meter.count) == (0.0, 0)


@pytest.mark.parametrize(
    "epochs",
    [
        [],
        {"epochs": 1},
        {"epochs": {"epoch": -1, "is_over": False}},
        {"epochs": {"epoch": True, "is_over": False}},
        {"epochs": {"epoch": 1, "is_over": 0}},
        {"epochs": {"epoch": 1}},
    ],
)
def test_epochs_of_a_ckpt_that_lies(epochs: Any) -> None:
    """They are used only when the loop begins: too late to go back to another ckpt."""
    with pytest.raises(CkptCorrupt, match="the numbers of its epochs"):
        _check_loop("000001-000000000001", {"loops": {}, "epochs": epochs})


def test_a_stage_that_is_left_because_of_a_notice_is_not_over() -> None:
    """The script leaves one loop after the other, and wants all of them back in its next life."""
    counters = EpochCounters()
    first = counters.begin("first", None, is_stopped=False)
    counters.begin("second", None, is_stopped=True)
    assert not first.is_over
    counters.begin("third", None, is_stopped=False)

    assert counters.state()["first"] == {"epoch": 0, "is_over": True}
