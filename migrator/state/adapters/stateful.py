"""Objects with `state_dict()` and `load_state_dict()`: schedulers, scalers, samplers, metrics, classes of the
script."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from migrator.state.adapters.base import Adapter
from migrator.state.adapters.containers import copied, in_types_of


class Stateful(Adapter):
    """Any object with `state_dict()` and `load_state_dict()`, such as a metric or a class of the script."""

    kind = "stateful"
    may_lack = True

    def capture(self) -> Any:
        return copied(self.target.state_dict())

    def live(self) -> Any:
        return None

    def found(self) -> Any:
        return self.target.state_dict()

    def restore(self, value: Any) -> None:
        self.target.load_state_dict(in_types_of(self.target.state_dict(), value))


class Sampler(Stateful):
    """An `ElasticSampler`, which can check a state before anything is changed."""

    kind = "sampler"
    may_lack = False

    def differences(self, value: Any) -> list[str]:
        if not isinstance(value, dict):
            return [": the ckpt holds something else under this name"]
        return [f": {problem}" for problem in self.target.problems(value)]


class Scheduler(Stateful):
    """A learning rate scheduler. Its class must be that of the ckpt: in another class the fields mean something
    else."""

    kind = "scheduler"
    may_lack = False

    def capture(self) -> Any:
        return {"class": type(self.target).__name__, "state": copied(self.target.state_dict())}

    def differences(self, value: Any) -> list[str]:
        return class_difference(self.target, value)

    def restore(self, value: Any) -> None:
        super().restore(value["state"])


class Scaler(Stateful):
    """A GradScaler. Its two tensors are cloned on their device, because `state_dict()` would synchronise."""

    kind = "scaler"
    may_lack = False

    def capture(self) -> Any:
        scale = getattr(self.target, "_scale", None)
        if not isinstance(scale, Tensor) or scale.device.type == "cpu" or not self.target.is_enabled():
            return copied(self.target.state_dict())
        return {
            "scale": scale.detach().clone(),
            "growth_factor": self.target.get_growth_factor(),
            "backoff_factor": self.target.get_backoff_factor(),
            "growth_interval": self.target.get_growth_interval(),
            "_growth_tracker": self.target._growth_tracker.detach().clone(),
        }

    def frozen(self, captured: Any) -> Any:
        # The only place that waits for the device: in the saving thread and not in the loop.
        return {key: v.item() if isinstance(v, Tensor) else v for key, v in captured.items()}


def class_difference(target: Any, value: Any) -> list[str]:
    if not isinstance(value, dict) or "class" not in value:
        return [": the ckpt holds something else under this name"]
    if value["class"] != type(target).__name__:
        return [f": is a {type(target).__name__} here, a {value['class']} there"]
    return []
