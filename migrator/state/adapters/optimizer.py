"""Optimizers: the state is read live, the param_groups are captured."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from migrator.ckpt.codec import laid_out
from migrator.events import log
from migrator.state.adapters.base import Adapter, LayoutChanged, large_tensors
from migrator.state.adapters.containers import copied, put_back
from migrator.state.adapters.stateful import class_difference


class Optimizer(Adapter):
    """An optimizer. Its state only changes in `step()` and is read live; its groups are captured.

    The groups contain the learning rate, which a scheduler may change between a safe
    point and the next step.
    """

    kind = "optimizer"

    def __init__(self, target: torch.optim.Optimizer) -> None:
        super().__init__(target)
        self._laid: list[tuple[Tensor, tuple[int, ...] | None, tuple[int, ...]]] = []
        """Set by a load: each parameter, its strides when it was saved, and the strides that its state has now."""
        self._stale = 0
        """Number of parameters with stale state at the last save."""

    def capture(self) -> Any:
        groups = self.target.param_groups
        return [
            (tuple(group["params"]), {key: copied(v) for key, v in group.items() if key != "params"})
            for group in groups
        ]

    def watched(self, captured: Any) -> list[Tensor]:
        values = [value for state in self.target.state.values() for value in state.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) != len(values):
            # LBFGS keeps its history in lists.
            nested = [v for v in values if isinstance(v, (list, tuple, dict))]
            tensors += [t for value in nested for t in _tensors(value)]
        return tensors + [t for _, rest in captured for t in large_tensors(rest)]

    def standing(self, frozen: Any) -> list[Tensor]:
        return _tensors(frozen["state"])

    def frozen(self, captured: Any) -> Any:
        index = {id(p): i for i, p in enumerate(p for params, _ in captured for p in params)}
        now = {id(p) for group in self.target.param_groups for p in group["params"]}
        state: dict[Any, Any] = {}
        stale = []
        for key, value in self.target.state.items():
            if isinstance(key, Tensor) and id(key) not in index:
                if id(key) in now:
                    raise LayoutChanged(f"its optimizer got a parameter of shape {tuple(key.shape)}")
                stale.append(key)
                continue
            state[index[id(key)] if isinstance(key, Tensor) else key] = _kept(value)
        self._name_stale(stale)
        return {
            "class": type(self.target).__name__,
            "shapes": [[list(p.shape) for p in params] for params, _ in captured],
            "strides": [[list(p.stride()) for p in params] for params, _ in captured],
            "groups": [dict(rest) for _, rest in captured],
            "state": state,
        }

    def _name_stale(self, stale: list[Tensor]) -> None:
        """Log state of parameters that are not in the groups any more, because a layer was replaced.

        `step()` does not use this state, so it is not saved.
        """
        if len(stale) > self._stale:
            log(
                "stale_state",
                level=logging.WARNING,
                optimizer=type(self.target).__name__,
                parameters=len(stale),
                shapes=", ".join(str(tuple(p.shape)) for p in stale[:5]),
                means="the optimizer holds state of parameters that are not in its param_groups any more. It is not "
                "saved: delete it with `del optimizer.state[parameter]` when you replace a layer. If such a parameter "
                "is added to a group again after a resume, it starts without state",
            )
        self._stale = len(stale)

    def live(self) -> Any:
        return None

    def homes(self, value: Any) -> dict[str, Tensor]:
        return {}

    def differences(self, value: Any) -> list[str]:
        wrong = class_difference(self.target, value)
        if wrong:
            return wrong
        here = [[tuple(p.shape) for p in group["params"]] for group in self.target.param_groups]
        there = [[tuple(shape) for shape in group] for group in value["shapes"]]
        if "strides" in value and [list(map(len, group)) for group in value["strides"]] != [
            list(map(len, group)) for group in value["shapes"]
        ]:
            raise ValueError("the strides do not fit the shapes of the parameters")
        if len(here) != len(there):
            return [f": {len(here)} param_groups here, {len(there)} there"]
        found = []
        for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
            if len(ours) != len(theirs):
                found.append(f"/group {number}: {len(ours)} parameters here, {len(theirs)} there")
                continue
            found += [
                f"/group {number}, parameter {i}: shape is {one} here, {other} there"
                for i, (one, other) in enumerate(zip(ours, theirs, strict=True))
                if one != other
            ]
        return found

    def restore(self, value: Any) -> None:
        groups = self.target.param_groups
        params = [(p, not g.get("capturable") and not g.get("fused")) for g in groups for p in g["params"]]
        before: list[tuple[int, ...] | None] = [None] * len(params)
        if "strides" in value:
            before = [tuple(strides) for group in value["strides"] for strides in group]
        # Not load_state_dict(): it casts float32 momentum to a bfloat16 parameter's type.
        options: list[dict[str, Any]] = []
        for group, saved in zip(groups, value["groups"], strict=True):
            # A newer version of torch or of the optimizer may have options that are not in the ckpt.
            unknown = {key: option for key, option in group.items() if key not in saved and key != "params"}
            put_back({"params": group["params"], **saved}, group)
            options.append(unknown)
        self.target.state.clear()
        for key, state in value["state"].items():
            if not isinstance(key, int):
                self.target.state[key] = state
                continue
            owner, counts_on_cpu = params[key]
            self.target.state[owner] = _laid_as(owner, _at_home(state, owner, counts_on_cpu), before[key])
        # As at the end of load_state_dict(): the optimizer adds options that an older version did not have, with
        # values for the behaviour of that version.
        self.target.__setstate__({"state": self.target.state, "param_groups": groups})
        for group, unknown in zip(groups, options, strict=True):
            for key, option in unknown.items():
                group.setdefault(key, option)
        self._laid = [(p, was, tuple(p.stride())) for (p, _), was in zip(params, before, strict=True)]

    def first_step(self, name: str) -> None:
        """Adapt the state to parameters whose memory format the script has changed after the load."""
        laid, self._laid = self._laid, []
        other = 0
        for owner, before, now in laid:
            if tuple(owner.stride()) != now and owner in self.target.state:
                self.target.state[owner] = _laid_as(owner, self.target.state[owner], now)
            other += before is not None and tuple(owner.stride()) != before
        if other:
            log(
                "other_strides",
                level=logging.WARNING,
                object=name,
                parameters=other,
                means="the memory layout of these parameters differs from when they were saved; the values are the "
                "same, but sums may differ in the last bits. Make the model with the same memory format as before",
            )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _kept(value: Any) -> Any:
    """A copy of the structure; its tensors share the memory of the live ones."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_kept(item) for item in value)
    return value


def _laid_as(owner: Tensor, state: Any, before: tuple[int, ...] | None) -> Any:
    """The state of one parameter, whose strides were `before`, with the memory layout that the optimizer expects.

    Fused optimizers walk through the memory of parameter, gradient and state in parallel. With different layouts the
    momentum of one element would be used for another one, without an error. If the parameter has another layout here,
    or the ckpt is old and does not contain the strides, the state gets the layout that a new state would have.
    """
    if not isinstance(state, dict) or tuple(owner.stride()) == before:
        return state
    strides = tuple(torch.empty_like(owner, device="meta").stride())
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == owner.shape:
            state[key] = laid_out(value, strides)
    return state


def _at_home(value: Any, owner: Any, on_cpu: bool) -> Any:
    """State tensors, moved to the device of their parameter; except counters, which torch keeps on the CPU."""
    if isinstance(value, Tensor):
        return value if on_cpu else value.to(owner.device)
    if isinstance(value, dict):
        return {key: _at_home(item, owner, on_cpu and key == "step") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_at_home(item, owner, on_cpu) for item in value)
    return value
