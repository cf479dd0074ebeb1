"""The state of DDP's communication hooks, which they keep from step to step.

PowerSGD keeps the error of each compression and adds it to the next gradient. This
memory is not part of any `state_dict()`, so it is registered like other objects:
`migrator.register("powersgd", state)`. Each rank has its own errors, so the state is
always that of one rank (`own=True`).

The memory has the order of DDP's gradient buckets, and DDP rebuilds the buckets after
the first step of each life (`ddp_buckets`). So the memory is rearranged twice: at the
load, for the first buckets of this life, and after the first step, for the rebuilt
buckets. If this is not possible, the first two steps after a resume average the
gradients without compression. Otherwise errors would be added to the gradients of
other parameters.

The error is referenced and not copied at each safe point, because the hook makes a new
tensor each time. The small factors, which the hook changes in place, are copied.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from migrator.ckpt.codec import Stored
from migrator.events import log
from migrator.state.adapters import ddp_buckets
from migrator.state.adapters.base import Adapter
from migrator.state.adapters.containers import copied
from migrator.state.adapters.random_generators import check_positions, set_state

_MODULE = "torch.distributed.algorithms.ddp_comm_hooks"
_NUMBERS = {
    "PowerSGDState": (
        "iter",
        "total_numel_before_compression",
        "total_numel_after_compression",
        "next_stats_report",
    ),
    "PostLocalSGDState": ("iter",),
}
"""The counters in each known class of state."""
_PACKED_AFTER = 2
"""Number of steps after which DDP does not rebuild its buckets any more."""
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


def _class_of(value: Any) -> str | None:
    """The name of the torch class that `value` is an instance of; None if it is not a known hook state."""
    for cls in type(value).__mro__:
        if cls.__module__.startswith(_MODULE) and cls.__name__ in _NUMBERS:
            return cls.__name__
    return None


def is_hook_state(value: Any) -> bool:
    return _class_of(value) is not None


class HookState(Adapter):
    """The state of a communication hook of torch: PowerSGD, post-local SGD."""

    kind = "comm_hook"

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self._class = _class_of(target) or ""
        self._module: weakref.ref[Any] | None = None
        """The DDP module that uses this hook, as soon as it is known."""
        self._packed: ddp_buckets.Packing | None = None
        """The buckets to which the memories belong; None if not known."""
        self._is_packed = False
        """DDP does not rebuild the buckets any more."""
        self._packed_next: ddp_buckets.Packing | None = None
        """The buckets expected after the first step, if known."""

    def met(self, module: Any) -> None:
        """Note that a hook of this module uses this state."""
        self._module = weakref.ref(module)

    def _note_packing(self) -> None:
        module = self._found()
        if self._is_packed or module is None or not ddp_buckets.has_packed_anew(module):
            return
        self._is_packed, before, self._packed = True, self._packed, ddp_buckets.packing(module)
        if before not in (None, self._packed) and self._memories()["error_dict"]:
            self._begin_anew("DDP packed its buckets in another way than in the life before")

    def _found(self) -> Any:
        return None if self._module is None else self._module()

    def _memories(self) -> ddp_buckets.Memories:
        return {name: dict(getattr(self.target, name)) for name in _MEMORIES}

    def _remember(self, memories: ddp_buckets.Memories) -> None:
        for name, memory in memories.items():
            held = getattr(self.target, name)
            held.clear()
            held.update(memory)

    def capture(self) -> Any:
        state = self.target
        found: dict[str, Any] = {"class": self._class}
        found |= {name: getattr(state, name) for name in _NUMBERS[self._class]}
        if self._class == "PowerSGDState":
            self._note_packing()
            found["buckets"] = self._packed
            found["rank"] = state.matrix_approximation_rank
            found["rng"] = copied(state.rng.get_state(legacy=False))
            found["error_dict"] = copied(dict(state.error_dict))
            for name in _MEMORIES[1:]:
                found[name] = {key: tensor.detach().clone() for key, tensor in getattr(state, name).items()}
            devices = {tensor.device.type for name in _MEMORIES for tensor in found[name].values()}
            found["device"] = next(iter(devices), "cpu")
        return found

    def live(self) -> Any:
        return None

    def found(self) -> Any:
        return self.capture()

    def differences(self, value: Any) -> list[str]:
        if not isinstance(value, dict) or value.get("class") != self._class:
            there = value.get("class") if isinstance(value, dict) else None
            return [f": is a {self._class} here, {there or 'something else'} there"]
        if any(type(value.get(name)) is not int for name in _NUMBERS[self._class]):
            raise TypeError("the counters of a communication hook are not integers")
        if self._class != "PowerSGDState":
            return []
        if not (all(_is_memory(value.get(name)) for name in _MEMORIES) and _is_packing(value.get("buckets"))):
            raise TypeError("the memories of a communication hook are not tensors by bucket")
        check_positions(value.get("rng"))
        here, there = self.target.matrix_approximation_rank, value.get("rank")
        return [f": matrix_approximation_rank is {here} here, {there} there"] if here != there else []

    def restore(self, value: Any) -> None:
        for name in _NUMBERS[self._class]:
            setattr(self.target, name, value[name])
        if self._class != "PowerSGDState":
            return
        set_state(self.target.rng, value["rng"])
        memories = {
            name: {key: _to(tensor, value["device"]) for key, tensor in value[name].items()} for name in _MEMORIES
        }
        self._remember(memories)
        self._packed, self._packed_next, self._is_packed = value.get("buckets"), None, False
        if any(memories.values()):
            self._fit_to_first_step(memories)

    def _fit_to_first_step(self, memories: ddp_buckets.Memories) -> None:
        for hooked in in_use():
            if hooked.state is self.target:
                self.met(hooked.module)
        module, before = self._found(), self._packed
        if module is not None and before is not None:
            now = ddp_buckets.packing(module)
            found = ddp_buckets.moved(self.target, module, memories, before, now)
            if found is not None:
                self._remember(found)
                self._packed, self._packed_next = now, before if ddp_buckets.packs_anew(module) else None
                return
        state = self.target
        state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + _PACKED_AFTER)
        log(
            "comm_hook_waits",
            steps=_PACKED_AFTER,
            means="DDP rebuilds its gradient buckets after the first step, and PowerSGD's memory belongs to the "
            "rebuilt ones: until then gradients are averaged without compression. Make the DDP module and register its "
            "hook before load_ckpt()",
        )

    def first_step(self, name: str) -> None:
        module, now, after = self._found(), self._packed, self._packed_next
        self._packed_next = None
        if module is None or now is None or after is None or now == after:
            return
        found = ddp_buckets.moved(self.target, module, self._memories(), now, after)
        if found is None or ddp_buckets.has_packed_anew(module):
            self._begin_anew("the first step after a load had several backward passes without no_sync()")
        else:
            self._remember(found)
            self._packed = after

    def _begin_anew(self, why: str) -> None:
        """Clear the memories, which may belong to other parameters."""
        self._remember({name: {} for name in _MEMORIES})
        log(
            "comm_hook_not_saved",
            level=logging.WARNING,
            hook=self._class,
            state=self._class,
            means=f"{why}: the memory would belong to other parameters, so it begins anew",
        )


def _is_memory(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(key) is int and isinstance(tensor, (Tensor, Stored)) for key, tensor in value.items()
    )


def _is_packing(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(isinstance(numbers, list) and all(type(number) is int for number in numbers) for numbers in value)
    )


def _to(tensor: Tensor, device: str) -> Tensor:
    # With several devices each rank uses its current one.
    return tensor if device == "cpu" else tensor.to(torch.device(device))


@dataclass(frozen=True)
class Hooked:
    """A communication hook of a DDP module that keeps state from step to step."""

    hook: str
    state: Any
    module: Any


def in_use() -> Iterator[Hooked]:
    """The hooks with state of all DDP modules of this process. Slow, because it searches the whole heap."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    classes = [DistributedDataParallel]
    for cls in classes:
        classes += cls.__subclasses__()
    for module in gc.get_referrers(*classes):
        if not isinstance(module, DistributedDataParallel):
            continue
        for hook, state in getattr(module, "_comm_hooks", ()):
            if state is not None and not isinstance(state, distributed.ProcessGroup):
                yield Hooked(getattr(hook, "__name__", repr(hook)), state, module)
