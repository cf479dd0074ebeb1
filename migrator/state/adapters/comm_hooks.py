"""What DDP's communication hooks keep from step to step, beside modules and optimizers.

PowerSGD remembers the error of each compression and adds it to the next gradient.
That memory is no part of any `state_dict()`: it is registered like everything else,
`migrator.register("powersgd", state)`. Each rank has an error of its own, so its state
is always that of one rank (`own=True`).

All of that lies in the order in which DDP packs gradients into buckets, and DDP packs
them anew behind the first step of each life (`buckets`). So the memory is put in order
twice: at the load, for the buckets that DDP begins with, and behind the first step, for
those it had. Where that cannot be done, the first two steps after a resume average the
gradients as they are. Else errors would be added to the gradients of other parameters.

The error is kept by reference, not copied at each safe point: the hook makes a new
tensor for it each time. The small factors it changes in place are copied.
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

from migrator.state.adapters import ddp_buckets as buckets
from migrator.events import log
from migrator.state.adapters.base import Kind, check_positions, copied, set_state
from migrator.ckpt.codec import Stored

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
"""What counts up, of each state that is known."""
_PACKED_AFTER = 2
"""Steps after which DDP has packed its buckets for good."""
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


def _class_of(value: Any) -> str | None:
    """The class of torch's that this is, or is derived from; None: it is no state of a hook that is known."""
    for cls in type(value).__mro__:
        if cls.__module__.startswith(_MODULE) and cls.__name__ in _NUMBERS:
            return cls.__name__
    return None


def is_hook_state(value: Any) -> bool:
    return _class_of(value) is not None


class HookState(Kind):
    """The state of a communication hook of torch's: PowerSGD, post-local SGD."""

    kind = "comm_hook"

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self._class = _class_of(target) or ""
        self._module: weakref.ref[Any] | None = None
        """The DDP module whose hook this is, as soon as it is known."""
        self._packed: buckets.Packing | None = None
        """How the buckets are packed that the memories are of; None: nobody knows."""
        self._is_packed = False
        """They are packed for good."""
        self._packed_next: buckets.Packing | None = None
        """How they will be behind the first step, as far as can be told."""

    def met(self, module: Any) -> None:
        """The hook of this module has this state."""
        self._module = weakref.ref(module)

    def _note_packing(self) -> None:
        module = self._found()
        if self._is_packed or module is None or not buckets.has_packed_anew(module):
            return
        self._is_packed, before, self._packed = True, self._packed, buckets.packing(module)
        if before not in (None, self._packed) and self._memories()["error_dict"]:
            self._begin_anew("DDP packed its buckets in another way than in the life before")

    def _found(self) -> Any:
        return None if self._module is None else self._module()

    def _memories(self) -> buckets.Memories:
        return {name: dict(getattr(self.target, name)) for name in _MEMORIES}

    def _remember(self, memories: buckets.Memories) -> None:
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
            raise TypeError("numbers of a communication hook that are none")
        if self._class != "PowerSGDState":
            return []
        if not (all(_is_memory(value.get(name)) for name in _MEMORIES) and _is_packing(value.get("buckets"))):
            raise TypeError("memories of a communication hook that are none")
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

    def _fit_to_first_step(self, memories: buckets.Memories) -> None:
        for hooked in in_use():
            if hooked.state is self.target:
                self.met(hooked.module)
        module, before = self._found(), self._packed
        if module is not None and before is not None:
            now = buckets.packing(module)
            found = buckets.moved(self.target, module, memories, before, now)
            if found is not None:
                self._remember(found)
                self._packed, self._packed_next = now, before if buckets.packs_anew(module) else None
                return
        state = self.target
        state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + _PACKED_AFTER)
        log(
            "comm_hook_waits",
            steps=_PACKED_AFTER,
            means="DDP packs its gradients into buckets anew behind the first step, and PowerSGD's memory is of those: "
            "until then gradients are averaged without compression. Make the DDP module and register its hook before "
            "load_ckpt()",
        )

    def first_step(self, name: str) -> None:
        module, now, after = self._found(), self._packed, self._packed_next
        self._packed_next = None
        if module is None or now is None or after is None or now == after:
            return
        found = buckets.moved(self.target, module, self._memories(), now, after)
        if found is None or buckets.has_packed_anew(module):
            self._begin_anew("the first step behind a load had several backward passes without no_sync()")
        else:
            self._remember(found)
            self._packed = after

    def _begin_anew(self, why: str) -> None:
        """What the hook remembers may be of other parameters."""
        self._remember({name: {} for name in _MEMORIES})
        log(
            "comm_hook_not_saved",
            level=logging.WARNING,
            hook=self._class,
            state=self._class,
            means=f"{why}: its memory would be of other parameters, and begins anew",
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
    # Of several devices each rank has its own, the current one.
    return tensor if device == "cpu" else tensor.to(torch.device(device))


@dataclass(frozen=True)
class Hooked:
    """A communication hook of a DDP module that keeps something from step to step."""

    hook: str
    state: Any
    module: Any


def in_use() -> Iterator[Hooked]:
    """Those of all DDP modules of this process. Looks through the whole heap: not for each step."""
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
