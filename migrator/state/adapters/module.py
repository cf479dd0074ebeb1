"""Modules: parameters are read live, buffers are copied at each safe point."""

from __future__ import annotations

import copy
import logging
import operator
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from migrator.ckpt.codec import Stored
from migrator.events import log
from migrator.state.adapters.base import Adapter, LayoutChanged, Placement, large_tensors, shape_of
from migrator.state.adapters.containers import copied, put_back

WITHOUT_GRAD = ".without_grad"
"""Key for the names of parameters without `requires_grad`, beside the module's tensors. No tensor can have this
name."""

OWN_BUFFER_BYTES = 1 << 20
"""A buffer of more bytes is taken to be the same on all ranks, as parameters are."""


class Module(Adapter):
    """A module without its DDP, DataParallel or compile wrapper.

    Parameters are read live. Buffers are copied at each safe point: BatchNorm
    changes its running statistics in forward, and no version counter shows it.
    """

    kind = "module"
    may_inline = False

    def __init__(self, target: nn.Module) -> None:
        super().__init__(target)
        self._spare: list[tuple[list[Tensor], list[Tensor]]] = []
        """Buffers with copies that are free to be reused."""
        self._without_grad: list[str] | None = None
        """From a load to the first step: the parameters that were saved without `requires_grad`."""
        self._scan()

    def _scan(self) -> None:
        # References to the modules' dicts and not to tensors, so that a reassigned buffer is found.
        self._params: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        names = (name for name, _ in self.target.named_parameters(remove_duplicate=False))
        self._names = {name.replace("_orig_mod.", "") for name in names}
        for module in self.target.modules():
            self._params += [(module._parameters, k) for k, v in module._parameters.items() if v is not None]
            self._buffers += [
                (module._buffers, k)
                for k, v in module._buffers.items()
                if v is not None and k not in module._non_persistent_buffers_set
            ]
        # Those that `state_dict()` has: a module may leave some out, of a frozen backbone for example.
        stored = {id(value) for value in self._state().values()}
        self._stored = [(slots, k) for slots, k in (*self._params, *self._buffers) if id(slots.get(k)) in stored]
        self._is_stale = False
        # By key, because a module that is used twice has two keys.
        self._extra = {
            f"{path}._extra_state".removeprefix(".").replace("_orig_mod.", ""): module
            for path, module in self.target.named_modules(remove_duplicate=False)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def capture(self) -> Any:
        if self._is_stale:
            self._scan()
        live = [buffer for slots, key in self._buffers if (buffer := slots.get(key)) is not None]
        extra = {key: copied(module.get_extra_state()) for key, module in self._extra.items()}
        params = [slots.get(key) for slots, key in self._params]
        return live, self._copy(live), extra, [p for p in params if p is not None and not p.requires_grad]

    def _copy(self, live: list[Tensor]) -> list[Tensor]:
        if not live:
            return []
        with torch.no_grad():
            while self._spare:
                before, copies = self._spare.pop()
                if len(before) == len(live) and all(map(operator.is_, before, live)):
                    torch._foreach_copy_(copies, live)
                    return copies
            return [tensor.detach().clone() for tensor in live]

    def release(self, captured: Any) -> None:
        if len(self._spare) < 2:
            self._spare.append((captured[0], captured[1]))

    def watched(self, captured: Any) -> list[Tensor]:
        # A parameter may have been removed since: pruned, merged, replaced by None.
        params = [param for slots, key in self._params if (param := slots.get(key)) is not None]
        return params + large_tensors(captured[2])

    def standing(self, frozen: Any) -> list[Tensor]:
        return [value for key, value in frozen.items() if key in self._names and isinstance(value, Tensor)]

    def placement(self, tensor: Tensor, *, is_live: bool) -> Placement:
        """Small buffers, such as BatchNorm's running statistics, differ from rank to rank."""
        is_alike = (is_live or tensor.nbytes > OWN_BUFFER_BYTES) and not self.is_own
        return Placement.REPLICATED if is_alike else Placement.PER_RANK

    def frozen(self, captured: Any) -> Any:
        live, copies, extra, without_grad = captured
        fixed = set(map(id, without_grad))
        copy_of = {id(tensor): copy for tensor, copy in zip(live, copies, strict=True)}
        params = {id(slots.get(key)) for slots, key in self._params}
        # Computed once: it is looked up for each tensor, while the gate is shut.
        buffers = {id(buffer) for buffer in self.target.buffers()}
        found: dict[str, Any] = {}
        state = self._state()
        self._check_nothing_was_taken_out(state)
        for key, value in state.items():
            if isinstance(value, Tensor) and id(value) in copy_of:
                found[key] = copy_of[id(value)]
                if value.shape != found[key].shape:  # its `.data` was replaced by a tensor of another shape
                    self._spare.clear()
                    raise LayoutChanged(key)
            elif key in extra:
                found[key] = extra[key]
            elif (isinstance(value, nn.Parameter) and id(value) not in params) or (
                isinstance(value, Tensor) and id(value) in buffers
            ):
                self._scan()
                raise LayoutChanged(key)
            else:
                # Detached, because the script may replace a parameter's `.data` from now on.
                found[key] = value.detach() if isinstance(value, Tensor) else value
        found[WITHOUT_GRAD] = [key for key, value in state.items() if id(value) in fixed]
        return found

    def _check_nothing_was_taken_out(self, state: dict[str, Any]) -> None:
        """A submodule may have been taken out since the safe point, for an evaluation by its features for example."""
        there = set(map(id, state.values()))
        for slots, key in self._stored:
            tensor = slots.get(key)
            if tensor is not None and id(tensor) not in there:
                # The next safe point has what is there then, also if it was put back.
                self._is_stale = True
                raise LayoutChanged(f"a tensor {key!r} of shape {tuple(tensor.shape)} is no longer in the module")

    def _state(self) -> dict[str, Any]:
        # A compiled submodule adds `_orig_mod.` to the path.
        state = self.target.state_dict(keep_vars=True)
        return {key.replace("_orig_mod.", ""): value for key, value in state.items()}

    def live(self) -> Any:
        return self._state()

    def differences(self, value: Any) -> list[str]:
        here = {k: v for k, v in self._state().items() if isinstance(v, Tensor)}
        if not isinstance(value, dict):
            return [": the ckpt holds something else under this name"]
        names = value.get(WITHOUT_GRAD, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("the names of parameters without requires_grad are not a list of names")
        there = {k: v for k, v in value.items() if isinstance(v, (Tensor, Stored))}
        found = [(key, "in the ckpt, not in the module") for key in there if key not in here]
        found += [(key, "in the module, not in the ckpt") for key in here if key not in there]
        for key in (k for k in here if k in there):
            if shape_of(here[key]) != shape_of(there[key]):
                found.append((key, f"shape is {shape_of(here[key])} here, {shape_of(there[key])} there"))
        taken = self._taken_by_modules({key for key, _ in found}, there)
        found = [(key, problem) for key, problem in found if _owner(key) not in taken]
        for key in (k for k in here if k in there):
            if shape_of(here[key]) == shape_of(there[key]) and here[key].dtype != there[key].dtype:
                found.append((key, f"dtype is {here[key].dtype} here, {there[key].dtype} there"))
        return [f"/{key}: {problem}" for key, problem in found]

    def _taken_by_modules(self, keys: set[str], there: dict[str, Any]) -> set[str]:
        """The paths of modules that own one of `keys` and accept the tensors of the ckpt by their own load method.

        For example observers and fake quantization, which resize their buffers when they load.
        """
        if not keys:
            return set()
        wanted = {_owner(key) for key in keys}
        modules = {
            path.replace("_orig_mod.", ""): module for path, module in self.target.named_modules(remove_duplicate=False)
        }
        saved: dict[str, dict[str, Any]] = {path: {} for path in wanted}
        for key, tensor in there.items():
            if _owner(key) in wanted:
                saved[_owner(key)][key.rpartition(".")[2]] = tensor
        return {path for path in wanted if path in modules and _would_take(modules[path], saved[path])}

    def restore(self, value: Any) -> None:
        state = self.target.state_dict(keep_vars=True)
        here = {key.replace("_orig_mod.", ""): tensor for key, tensor in state.items()}
        names = {key.replace("_orig_mod.", ""): key for key in state}
        tensors = {key: saved for key, saved in value.items() if isinstance(saved, Tensor)}
        unlike = {key for key, live in here.items() if isinstance(live, Tensor) and not _fits(tensors.get(key), live)}
        unlike |= {key for key in tensors if key not in here}
        by_module = {_owner(key) for key in unlike}
        rest: OrderedDict[str, Any] = OrderedDict()
        # It contains the versions of the modules; without it they would treat this state dict as very old.
        rest._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
        value = dict(value)
        self._without_grad = value.pop(WITHOUT_GRAD, None)
        for key, saved in value.items():
            live = here.get(key)
            is_plain = isinstance(saved, Tensor) and isinstance(live, Tensor) and self._owns(live)
            if is_plain and _owner(key) not in by_module:
                put_back(saved, live)
            else:
                rest[names.get(key, key)] = saved
        if rest:
            self.target.load_state_dict(rest, strict=False)
        if unlike:
            self._check_taken(tensors)
            self._scan()
        if not _has_several_ranks():
            for param, requires_grad in self._other_flags():
                param.requires_grad_(requires_grad)

    def _other_flags(self) -> list[tuple[Tensor, bool]]:
        """Parameters whose `requires_grad` differs from when they were saved, with the saved value."""
        if self._without_grad is None:
            return []  # an old ckpt does not contain it
        fixed = set(self._without_grad)
        state = {key: value for key, value in self._state().items() if isinstance(value, nn.Parameter)}
        # Tied weights have several names; one of them is enough.
        ids = {id(value) for key, value in state.items() if key in fixed}
        return [(param, id(param) not in ids) for param in state.values() if param.requires_grad == (id(param) in ids)]

    def first_step(self, name: str) -> None:
        others = self._other_flags()
        self._without_grad = None
        if others:
            log(
                "other_requires_grad",
                level=logging.WARNING,
                object=name,
                parameters=len(others),
                trained_before=sum(flag for _, flag in others),
                means="requires_grad of these parameters differs from when they were saved: a script that freezes or "
                "unfreezes layers during training has to do it again; with several ranks, before DDP wraps the module",
            )

    def _check_taken(self, tensors: dict[str, Tensor]) -> None:
        here = self._state()
        wrong = [key for key, live in here.items() if key in tensors and shape_of(live) != shape_of(tensors[key])]
        if wrong:
            raise ValueError(f"after loading, {', '.join(wrong)} still has another shape than in the ckpt")

    def _owns(self, tensor: Tensor) -> bool:
        if not hasattr(self, "_own"):
            self._own = {id(t) for t in (*self.target.parameters(), *self.target.buffers())}
        return id(tensor) in self._own


def _has_several_ranks() -> bool:
    """DDP reads the flags when it wraps the module: if they change later, the ranks train different weights."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _owner(key: str) -> str:
    """The path of the module that a key of a state dict belongs to."""
    return key.rpartition(".")[0]


def _fits(saved: Tensor | None, live: Tensor) -> bool:
    return saved is not None and shape_of(saved) == shape_of(live)


def _would_take(module: nn.Module, saved: dict[str, Any]) -> bool:
    """Whether a module with its own load method would load these tensors, tried on a copy on the meta device."""
    if module._load_state_dict_pre_hooks:
        return True  # they may refer to the module itself, so only the load can show it
    if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
        return False
    trial = copy.copy(module)
    for slots in ("_parameters", "_buffers"):
        tensors = module.__dict__[slots].items()
        trial.__dict__[slots] = {key: t if t is None else torch.empty_like(t, device="meta") for key, t in tensors}
    given = {key: torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta") for key, tensor in saved.items()}
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    about = {"version": module._version}
    try:
        with torch.device("meta"):  # also for tensors that it creates
            trial._load_from_state_dict(given, "", about, True, missing, unexpected, errors)
    except Exception:  # it reads values, so only the load can show it
        return True
    return not (missing or unexpected or errors)
