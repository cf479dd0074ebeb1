"""The registered objects by name, and the checks at registration.

An object that cannot be saved is refused in `register()`, when nothing is lost yet.
Otherwise a lambda in a scheduler would make the save fail in the last thirty seconds
of the pod.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from migrator.ckpt import codec, manifest
from migrator.data.sampler import ElasticSampler
from migrator.errors import RegistrationError
from migrator.state import random_state
from migrator.state.adapters import base, comm_hooks, containers, module, optimizer, random_generators, stateful
from migrator.state.last_storable import Storable

_SHARDED = {
    "FullyShardedDataParallel": "FSDP shards the parameters over the ranks",
    "FSDPModule": "FSDP2 shards the parameters over the ranks",
    "ZeroRedundancyOptimizer": "it shards its state over the ranks",
    "DeepSpeedEngine": "DeepSpeed shards its state over the ranks",
    "DeepSpeedOptimizer": "DeepSpeed shards its state over the ranks",
    "DeepSpeedZeroOptimizer": "DeepSpeed shards its state over the ranks",
}


class Registry:
    """Names and their adapters, in the order of registration."""

    def __init__(self) -> None:
        self._kinds: dict[str, base.Adapter] = {}
        self._targets: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self.storable = Storable()
        """The last storable values of objects that may become unstorable while the script runs."""

    def add(self, name: str, value: Any, *, own: bool = False) -> None:
        """Register `value` under `name`, or raise an error with the reason and what to do instead."""
        if not isinstance(name, str) or not name or name.startswith("!") or set(name) & set("/\0\n\t"):
            raise RegistrationError(
                f"register({name!r}, ...): the name must be a text without '/', tabs and line ends, "
                "and must not begin with '!'"
            )
        if name in self._kinds:
            raise RegistrationError(
                f"register({name!r}, ...): there is a {type(self._targets[name]).__name__} of this name already. "
                "Give each object its own name, and register each once."
            )
        target = unwrapped(value)
        for other, held in self._targets.items():
            if held is target:
                raise RegistrationError(
                    f"register({name!r}, ...): the same object is registered as {other!r} already. Once is enough."
                )
        adapter = _adapter(name, target)
        value = _checked(name, adapter)
        self._check_size(name, codec.scan(value, name))
        if adapter.may_lack:
            self.storable.begin(name, value)
        adapter.is_own = own or isinstance(adapter, comm_hooks.HookState)
        self._kinds[name], self._targets[name] = adapter, target

    def _check_size(self, name: str, size: int) -> None:
        """Refuse objects that would make the manifest larger than a load accepts."""
        self._sizes[name] = size
        total = sum(self._sizes.values())
        if total > manifest.MANIFEST_LIMIT:
            del self._sizes[name]
            raise RegistrationError(
                f"register({name!r}, ...): its values that are not tensors or large arrays take {size} bytes, those of "
                f"all registered objects {total} or more; a manifest holds at most {manifest.MANIFEST_LIMIT}. "
                "Keep large numbers of values in a tensor or in a numpy array."
            )

    def __iter__(self) -> Iterator[tuple[str, base.Adapter]]:
        return iter(self._kinds.items())

    @property
    def own(self) -> set[str]:
        """What each rank has for itself, its large tensors included."""
        return {name for name, adapter in self if adapter.is_own}

    @property
    def own_by_script(self) -> set[str]:
        """Those of them that the script registered so. A ckpt without them would not be whole."""
        return {name for name in self.own if not isinstance(self[name], comm_hooks.HookState)}

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def __getitem__(self, name: str) -> base.Adapter:
        return self._kinds[name]

    def named(self, target: Any) -> str | None:
        """The name under which this very object is registered."""
        return next((name for name, held in self._targets.items() if held is target), None)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [t for t in self._targets.values() if isinstance(t, torch.optim.Optimizer)]

    def scalers(self) -> list[torch.amp.GradScaler]:
        return [t for t in self._targets.values() if isinstance(t, torch.amp.GradScaler)]

    def modules(self) -> list[nn.Module]:
        return [t for t in self._targets.values() if isinstance(t, nn.Module)]

    def saves_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a registered object holds this optimizer and saves all tensors of its state."""
        tensors = _tensor_ids(list(optimizer.state.values()))
        for target in self._targets.values():
            if _is_stateful(target) and _holds(target, optimizer):
                tensors -= _tensor_ids(target.state_dict())
                if not tensors:
                    return True
        return False

    def first_step(self) -> None:
        """Called before the first optimizer step after a load."""
        for name, adapter in self:
            adapter.first_step(name)

    def owner_of(self, tensors: Iterable[Tensor]) -> str | None:
        """The registered module that one of these parameters belongs to: of the first parameter that belongs to any."""
        modules = [(name, target) for name, target in self._targets.items() if isinstance(target, nn.Module)]
        owners = {id(p): name for name, target in reversed(modules) for p in target.parameters()}
        return next((owners[id(tensor)] for tensor in tensors if id(tensor) in owners), None)


def unwrapped(value: Any) -> Any:
    """`value` without DDP, DataParallel, compile and optimizer wrappers, which are not part of the state."""
    while True:
        inner = _handed_on(value)
        if inner is not None:
            value = inner
            continue
        if isinstance(value, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            value = value.module
        elif isinstance(value, nn.Module) and type(value).__name__ == "OptimizedModule":
            value = value._orig_mod
        else:
            return value


def _handed_on(value: Any) -> torch.optim.Optimizer | None:
    """The inner optimizer of a wrapper that returns the inner state as its own, as Accelerate and Fabric do.

    The inner optimizer makes the steps and has to be restored: `load_state_dict()` of the wrapper may only change the
    wrapper. None: `value` is not such a wrapper, or it has other state as well.
    """
    inner = getattr(value, "optimizer", None)
    if not isinstance(value, torch.optim.Optimizer) or not isinstance(inner, torch.optim.Optimizer) or inner is value:
        return None
    try:
        handed_on, its_own = value.state_dict(), inner.state_dict()
    except Exception:  # a wrapper of the script may raise anything; it is registered as it is
        return None
    if set(handed_on) != set(its_own) or handed_on["param_groups"] != its_own["param_groups"]:
        return None
    tensors = _tensor_ids(its_own)
    is_same = _tensor_ids(handed_on) == tensors
    # Before the first step there are no tensors to compare, so the state must be the same object.
    return inner if is_same and (tensors or getattr(value, "state", None) is inner.state) else None


def _tensor_ids(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {id(value)}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {found for item in items for found in _tensor_ids(item)}


def _holds(value: Any, optimizer: torch.optim.Optimizer, depth: int = 3) -> bool:
    """Whether `optimizer` is `value`, an attribute of it, or an attribute of one of its optimizers."""
    inside = [v for v in getattr(value, "__dict__", {}).values() if isinstance(v, torch.optim.Optimizer)]
    return value is optimizer or (depth > 0 and any(_holds(v, optimizer, depth - 1) for v in inside))


def _adapter(name: str, value: Any) -> base.Adapter:
    _refuse_sharded(name, value)
    for fits, kind in _KINDS:
        if fits(value):
            return kind(value)
    raise RegistrationError(
        f"register({name!r}, ...): a {type(value).__name__} cannot be restored in place. "
        + (
            f"Put it into a dict that your script reads: register({name!r}, {{'value': ...}})."
            if isinstance(value, (int, float, str, bytes, bool, tuple, frozenset, type(None)))
            else "Give it state_dict() and load_state_dict(), or keep what matters of it in a dict."
        )
    )


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, torch.optim.Optimizer):
        return False
    # With hooks or an overridden method, only `state_dict()` knows the whole state.
    plain = type(value).state_dict is torch.optim.Optimizer.state_dict
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return plain and not any(getattr(value, hook, None) for hook in hooks)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))


def _is_stateful(value: Any) -> bool:
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(callable(method) for method in methods)


# The first match counts: an optimizer has `state_dict()` as well.
_KINDS: list[tuple[Callable[[Any], bool], Callable[[Any], base.Adapter]]] = [
    (lambda value: isinstance(value, nn.Module), module.Module),
    (_is_optimizer, optimizer.Optimizer),
    (_is_scheduler, stateful.Scheduler),
    (lambda value: isinstance(value, torch.amp.GradScaler), stateful.Scaler),
    (lambda value: isinstance(value, ElasticSampler), stateful.Sampler),
    (random_state.is_generator, random_generators.Generator),
    (comm_hooks.is_hook_state, comm_hooks.HookState),
    (_is_stateful, stateful.Stateful),
    (lambda value: isinstance(value, (dict, list, set, deque)), containers.Container),
    (lambda value: isinstance(value, (Tensor, np.ndarray)), containers.TensorOrArray),
]


def _refuse_sharded(name: str, value: Any) -> None:
    # Often only the layers are sharded, in an ordinary module.
    inner = value.named_modules() if isinstance(value, nn.Module) else [("", value)]
    for path, part in inner:
        reason = next((_SHARDED[cls.__name__] for cls in type(part).__mro__ if cls.__name__ in _SHARDED), None)
        if reason is not None:
            raise RegistrationError(
                f"register({name!r}, ...): {type(part).__name__}{f' ({path})' if path else ''} is not supported yet: "
                f"{reason}, and a ckpt of one rank's piece would load as if it were the whole. "
                "Use DDP, or save it by other means."
            )
    if isinstance(value, nn.Module):
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            _refuse_tensor(f"{name}/{key}", tensor)
    if isinstance(value, torch.optim.Optimizer):
        # Its state does not exist before the first step, and is sharded like its parameters.
        for number, param in enumerate(param for group in value.param_groups for param in group["params"]):
            _refuse_dtensor(f"{name}: parameter {number}", param)


def _refuse_tensor(path: str, tensor: Tensor) -> None:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise RegistrationError(f"{path} has no shape yet (a lazy module). Run one forward pass before register().")
    _refuse_dtensor(path, tensor)
    if tensor.is_meta:
        raise RegistrationError(f"{path} is on the meta device and has no values. Materialise it before register().")


def _refuse_dtensor(path: str, tensor: Tensor) -> None:
    if type(tensor).__name__ == "DTensor":
        raise RegistrationError(f"{path} is a DTensor: sharded state is not supported yet.")


def _refuse_unwritable(name: str, adapter: base.Adapter) -> None:
    """Refuse tensors and arrays that could be saved but not loaded."""
    if isinstance(adapter, containers.TensorOrArray):
        found = {name: adapter.target}
    elif isinstance(adapter, module.Module):
        found = {f"{name}/{key}": value for key, value in adapter.found().items()}
    else:
        return  # other adapters replace the tensor when they load
    for path, value in found.items():
        if isinstance(value, Tensor) and not containers.is_writable(value):
            raise RegistrationError(
                f"{path} cannot be written: its elements share memory (expand()), or it was made under "
                "inference_mode(). No ckpt could be loaded into it. Register a copy: .clone()."
            )
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise RegistrationError(
                f"{path} is an array that cannot be written, so no ckpt could be loaded into it. "
                "Register a copy: .copy()."
            )


def _checked(name: str, adapter: base.Adapter) -> Any:
    """The value that a save would store, after checking that all of it can be stored."""
    try:
        # The original first: in a copy a named tuple is a plain tuple.
        codec.scan(adapter.found(), name)
        _refuse_unwritable(name, adapter)
        return adapter.frozen(adapter.capture())
    except RegistrationError:
        raise
    except Exception as error:
        raise RegistrationError(
            f"register({name!r}, ...): reading its state failed: {type(error).__name__}: {error}"
        ) from error
