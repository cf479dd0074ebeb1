"""One adapter for each kind of thing that can be registered.

An adapter knows three moments. At a safe point the main thread *captures* what
can move on before the next optimizer step; that must be cheap. While a save
reads, `frozen` makes of it one value for the typed tree, whose large tensors are
still the live ones. After a load, `restore` puts such a value back in place, so
that every reference the script holds stays valid.

Large tensors that only `optimizer.step()` changes are never copied at a safe
point: they are `watched`, and the canary tells if the assumption was wrong.
"""

from __future__ import annotations

import copy
import logging
import operator
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from migrator.events import log
from migrator.ckpt.codec import MAX_DEPTH, Stored, StoredArray, laid_out

LARGE_BYTES = 16 * 1024
"""A tensor above this size is read live from registered containers, below it is copied at each safe point."""

_SCALARS = {type(None), bool, int, float, str, bytes}


class LayoutChanged(Exception):  # noqa: N818 - internal, never seen by a user
    """What is registered has other tensors than at the safe point: take a new capture first."""


class Kind(ABC):
    """What the rest of the package knows about a registered object."""

    kind: ClassVar[str]
    may_lack: ClassVar[bool] = False
    """An entry that becomes unstorable is left out, and the rest saved."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @abstractmethod
    def capture(self) -> Any:
        """Main thread, at a safe point: a copy of all that may change before the next step."""

    def watched(self, captured: Any) -> list[Tensor]:
        """The tensors that must stay as they are until the next step, as they are found now."""
        return large_tensors(captured)

    def frozen(self, captured: Any) -> Any:
        """The value for the ckpt: what was captured, and the live large tensors."""
        return captured

    def standing(self, frozen: Any) -> list[Tensor]:
        """The tensors of `frozen` that were looked up only now and must be those of the safe point."""
        return []

    def release(self, captured: Any) -> None:  # noqa: B027 - most kinds keep nothing to reuse
        """The capture is no longer needed; its memory may be used for another one."""

    def homes(self, value: Any) -> dict[str, Tensor]:
        """Where the stored tensors of a ckpt's value live in this process; others go to fresh memory."""
        return dict(_pairs(value, self.live()))

    def live(self) -> Any:
        """The present value with the present tensors, in the shape `frozen` gives."""
        return self.target

    def found(self) -> Any:
        """The state as it is, nothing copied yet: what the check at registration walks through."""
        return self.live()

    def differences(self, value: Any) -> list[str]:
        """Why a ckpt's value does not fit, a line each, with paths below the registered name."""
        return []

    @abstractmethod
    def restore(self, value: Any) -> None:
        """Put the value back, in place."""

    def first_step(self, name: str) -> None:  # noqa: B027 - most kinds have nothing to look at
        """Before the first optimizer step behind a load: what the script did in between is known now."""


def large_tensors(value: Any) -> list[Tensor]:
    """All tensors above `LARGE_BYTES` in a captured value."""
    if isinstance(value, Tensor):
        return [value] if _is_large(value) else []
    if isinstance(value, dict):
        return [t for v in value.values() if type(v) not in _SCALARS for t in large_tensors(v)]
    if isinstance(value, (list, tuple, deque)):
        return [t for v in value if type(v) not in _SCALARS for t in large_tensors(v)]
    return []


def _is_large(tensor: Tensor) -> bool:
    # A sparse tensor does not know its size. A save refuses it with its path; here it must not end the training.
    return tensor.layout is torch.strided and tensor.nbytes > LARGE_BYTES


class Endless:
    """Stands in a copy for a container that contains itself, or is nested beyond all measure; no ckpt holds it."""


def copied(value: Any, within: frozenset[int] = frozenset()) -> Any:
    """A copy that stays as it is: containers and small tensors copied, large tensors kept by reference.

    `within`: the containers around it.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, (dict, list, tuple, deque)) and (id(value) in within or len(within) > MAX_DEPTH):
        return Endless()
    if isinstance(value, dict):
        # In one go: another thread of the script may add to it. Then no Python code runs in between.
        items = dict(value)
        # The types of 10^5 values are looked at far quicker than the values.
        if not set(map(type, items.values())) <= _SCALARS:
            within |= {id(value)}
            items = {key: copied(item, within) for key, item in items.items()}
        return _same_kind(value, items)
    if isinstance(value, (list, deque)):
        elements = list(value)
        if not set(map(type, elements)) <= _SCALARS:
            within |= {id(value)}
            elements = [copied(item, within) for item in elements]
        return deque(elements, value.maxlen) if isinstance(value, deque) else elements
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        within |= {id(value)}
        return tuple(copied(item, within) for item in value)
    if isinstance(value, (set, frozenset)):
        return set(value) if isinstance(value, set) else frozenset(value)
    if isinstance(value, Tensor):
        return value.detach() if _is_large(value) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    return value  # numpy scalars, dtypes, devices: immutable; anything else is refused by the typed tree


def _same_kind(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    return OrderedDict(items) if isinstance(like, OrderedDict) else items


def _pairs(saved: Any, live: Any) -> Iterable[tuple[str, Tensor]]:
    """Stored tensors of a ckpt's value beside the live tensors at the same place."""
    if isinstance(saved, Stored):
        if isinstance(live, Tensor):
            yield saved.name, live
    elif isinstance(saved, StoredArray):
        home = saved.home(live)
        if home is not None:
            yield saved.part.name, home
    elif isinstance(saved, dict) and isinstance(live, dict):
        for key in saved.keys() & live.keys():
            yield from _pairs(saved[key], live[key])
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for one, other in zip(saved, live, strict=False):
            yield from _pairs(one, other)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


def put_back(saved: Any, live: Any) -> Any:
    """`saved`, in the objects of `live` where they are of the same kind, so that aliases stay true."""
    if isinstance(live, dict) and isinstance(saved, dict):
        merged = {key: put_back(item, live.get(key)) for key, item in saved.items()}
        live.clear()
        live.update(merged)
        return live
    if isinstance(live, list) and isinstance(saved, list):
        room = [*live, *[None] * max(0, len(saved) - len(live))]
        live[:] = [put_back(item, old) for item, old in zip(saved, room, strict=False)]
        return live
    if (isinstance(live, set) and isinstance(saved, set)) or (isinstance(live, deque) and isinstance(saved, deque)):
        live.clear()
        cast(Any, live.update if isinstance(live, set) else live.extend)(saved)
        return live
    if _fits_in_place(saved, live):
        if saved.data_ptr() != live.data_ptr():
            with torch.no_grad():
                live.copy_(saved)
        return live
    if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray):
        if live.shape == saved.shape and live.dtype == saved.dtype and live.flags.writeable:
            if live.ctypes.data != saved.ctypes.data:
                live[...] = saved
            return live
        return saved
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        return saved.to(live.device)
    return saved


def in_types_of(live: Any, saved: Any) -> Any:
    """`saved`, with a Counter or defaultdict where `live` has one: the typed tree gives them back as plain dicts."""
    if isinstance(live, dict) and isinstance(saved, dict):
        items = {key: in_types_of(live.get(key), item) for key, item in saved.items()}
        if isinstance(live, Counter):
            return Counter(items)
        return defaultdict(live.default_factory, items) if isinstance(live, defaultdict) else _same_kind(saved, items)
    if type(live) is list and type(saved) is list:
        return [in_types_of(live[i] if i < len(live) else None, item) for i, item in enumerate(saved)]
    return saved


def _fits_in_place(saved: Any, live: Any) -> bool:
    return (
        isinstance(saved, Tensor)
        and isinstance(live, Tensor)
        and saved.shape == live.shape
        and saved.dtype == live.dtype
        and is_writable(live)
    )


def is_writable(tensor: Tensor) -> bool:
    """Each element has memory of its own, and it may be written."""
    if tensor.layout is not torch.strided:
        return False
    is_expanded = any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return not is_expanded and not tensor.is_inference()


class Container(Kind):
    """dict, list, set or deque: restored in place, so that the script's own reference sees it."""

    kind = "container"
    may_lack = True

    def capture(self) -> Any:
        return copied(self.target)

    def differences(self, value: Any) -> list[str]:
        for family in (dict, list, set, deque):
            if isinstance(self.target, family) != isinstance(value, family):
                return [f": a {type(self.target).__name__} here, a {type(value).__name__} there"]
        return []

    def restore(self, value: Any) -> None:
        put_back(value, self.target)


class TensorOrArray(Kind):
    """One torch tensor or numpy array, restored in its own memory."""

    kind = "tensor"

    def capture(self) -> Any:
        return copied(self.target)

    def differences(self, value: Any) -> list[str]:
        if isinstance(self.target, Tensor) != isinstance(value, (Tensor, Stored)):
            there = "ndarray" if isinstance(value, StoredArray) else type(value).__name__
            return [f": a {type(self.target).__name__} here, a {there} there"]
        if _shape(value) != _shape(self.target):
            return [f": shape is {_shape(self.target)} here, {_shape(value)} there"]
        if value.dtype != self.target.dtype:
            return [f": dtype is {self.target.dtype} here, {value.dtype} there"]
        return []

    def restore(self, value: Any) -> None:
        put_back(value, self.target)


_POSITIONS = {"MT19937": 624, "Philox": 4}
"""Of numpy's generators that hand out what they have made before: how much that is."""


def check_positions(state: Any) -> None:
    """`ValueError` if this is the state of a numpy generator that would read outside of its memory at the next draw.

    numpy checks everything in a state but this.
    """
    if isinstance(state, dict):
        name, inside = state.get("bit_generator"), state.get("state")
        position = inside.get("pos", state.get("buffer_pos")) if isinstance(inside, dict) else None
    elif isinstance(state, (tuple, list)) and len(state) >= 3:
        name, position = state[0], state[2]
    else:
        return
    most = _POSITIONS.get(name) if isinstance(name, str) else None
    if most is not None and not (type(position) is int and 0 <= position <= most):
        raise ValueError(f"the position in a state of {name} is not one of 0 to {most}")


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator of torch, numpy or Python; one that it cannot have is an error here, not later."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
        if type(state[2]) not in (float, type(None)):
            # It would lie there until a normal number is drawn.
            raise TypeError(f"the second of a pair of normal numbers is a {type(state[2]).__name__}")
    else:
        check_positions(state)
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


class Generator(Kind):
    """A random generator of the script's own: torch, numpy or Python."""

    kind = "generator"

    def capture(self) -> Any:
        if isinstance(self.target, torch.Generator):
            return self.target.get_state()
        if isinstance(self.target, random.Random):
            return self.target.getstate()
        if isinstance(self.target, np.random.Generator):
            return copied(self.target.bit_generator.state)
        return self.target.get_state(legacy=False)

    def live(self) -> Any:
        return None

    def restore(self, value: Any) -> None:
        set_state(self.target, value)


class Stateful(Kind):
    """Anything with `state_dict()` and `load_state_dict()`: schedulers, samplers, metrics, the script's own."""

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
    """An `ElasticSampler`, which can say whether a state fits before anything is touched."""

    kind = "sampler"
    may_lack = False

    def differences(self, value: Any) -> list[str]:
        if not isinstance(value, dict):
            return [": the ckpt holds something else under this name"]
        return [f": {problem}" for problem in self.target.problems(value)]


class Scheduler(Stateful):
    """A learning rate scheduler. Its class must be the ckpt's: the fields of another mean other things."""

    kind = "scheduler"
    may_lack = False

    def capture(self) -> Any:
        return {"class": type(self.target).__name__, "state": copied(self.target.state_dict())}

    def differences(self, value: Any) -> list[str]:
        return _class_difference(self.target, value)

    def restore(self, value: Any) -> None:
        super().restore(value["state"])


class Scaler(Stateful):
    """A GradScaler. On a device its two tensors are cloned there: `state_dict()` would synchronise."""

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
        # The one place where the device is waited for: on the saving side, not in the loop.
        return {key: v.item() if isinstance(v, Tensor) else v for key, v in captured.items()}


def _class_difference(target: Any, value: Any) -> list[str]:
    if not isinstance(value, dict) or "class" not in value:
        return [": the ckpt holds something else under this name"]
    if value["class"] != type(target).__name__:
        return [f": is a {type(target).__name__} here, a {value['class']} there"]
    return []


WITHOUT_GRAD = ".without_grad"
"""Beside the tensors of a module: the names of its parameters that do not require gradients. No tensor is called so."""


class Module(Kind):
    """A module without its DDP, DataParallel or compile wrapper.

    Parameters are read live. Buffers are copied at each safe point: BatchNorm
    changes its running statistics in forward, and no version counter shows it.
    """

    kind = "module"

    def __init__(self, target: nn.Module) -> None:
        super().__init__(target)
        self._spare: list[tuple[list[Tensor], list[Tensor]]] = []
        """Buffers and copies of them that nobody needs any more."""
        self._without_grad: list[str] | None = None
        """Since the last load, until the first step: the parameters that were saved without `requires_grad`."""
        self._scan()

    def _scan(self) -> None:
        # The dicts of the modules, not the tensors: a reassigned buffer is found under its name.
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
        # By key: a module that is used twice has two.
        self._extra = {
            f"{path}._extra_state".removeprefix(".").replace("_orig_mod.", ""): module
            for path, module in self.target.named_modules(remove_duplicate=False)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def capture(self) -> Any:
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
        # One may be taken away since: pruned, merged, replaced by None.
        params = [param for slots, key in self._params if (param := slots.get(key)) is not None]
        return params + large_tensors(captured[2])

    def standing(self, frozen: Any) -> list[Tensor]:
        return [value for key, value in frozen.items() if key in self._names and isinstance(value, Tensor)]

    def frozen(self, captured: Any) -> Any:
        live, copies, extra, without_grad = captured
        fixed = set(map(id, without_grad))
        copy_of = {id(tensor): copy for tensor, copy in zip(live, copies, strict=True)}
        params = {id(slots.get(key)) for slots, key in self._params}
        # Once for all: this is asked for each tensor, with the gate shut.
        buffers = {id(buffer) for buffer in self.target.buffers()}
        found: dict[str, Any] = {}
        state = self._state()
        for key, value in state.items():
            if isinstance(value, Tensor) and id(value) in copy_of:
                found[key] = copy_of[id(value)]
                if value.shape != found[key].shape:  # its `.data` was exchanged for one of another shape
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
                # A second handle: the script may exchange a parameter's `.data` from here on.
                found[key] = value.detach() if isinstance(value, Tensor) else value
        found[WITHOUT_GRAD] = [key for key, value in state.items() if id(value) in fixed]
        return found

    def _state(self) -> dict[str, Any]:
        # A compiled submodule adds a name to the path that a plain one does not have.
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
            raise TypeError("names of parameters that are none")
        there = {k: v for k, v in value.items() if isinstance(v, (Tensor, Stored))}
        found = [(key, "in the ckpt, not in the module") for key in there if key not in here]
        found += [(key, "in the module, not in the ckpt") for key in here if key not in there]
        for key in (k for k in here if k in there):
            if _shape(here[key]) != _shape(there[key]):
                found.append((key, f"shape is {_shape(here[key])} here, {_shape(there[key])} there"))
        taken = self._taken_by_modules({key for key, _ in found}, there)
        found = [(key, problem) for key, problem in found if _owner(key) not in taken]
        for key in (k for k in here if k in there):
            if _shape(here[key]) == _shape(there[key]) and here[key].dtype != there[key].dtype:
                found.append((key, f"dtype is {here[key].dtype} here, {there[key].dtype} there"))
        return [f"/{key}: {problem}" for key, problem in found]

    def _taken_by_modules(self, keys: set[str], there: dict[str, Any]) -> set[str]:
        """The paths of those modules that own one of `keys` and say by themselves that what the ckpt has fits them.

        Observers and fake quantization resize their buffers when they load.
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
        # Modules look at it to tell how old a state dict is; without it they take this one for ancient.
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
        """Parameters whose `requires_grad` is not what it was when they were saved, and what it was."""
        if self._without_grad is None:
            return []  # an old ckpt does not tell
        fixed = set(self._without_grad)
        state = {key: value for key, value in self._state().items() if isinstance(value, nn.Parameter)}
        # Of tied weights one name is enough.
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
                means="requires_grad of these parameters is not what it was when they were saved: a script that "
                "freezes or thaws layers on its way has to do it again, with several ranks before DDP wraps the module",
            )

    def _check_taken(self, tensors: dict[str, Tensor]) -> None:
        here = self._state()
        wrong = [key for key, live in here.items() if key in tensors and _shape(live) != _shape(tensors[key])]
        if wrong:
            raise ValueError(f"loaded, {', '.join(wrong)} still has another shape than in the ckpt")

    def _owns(self, tensor: Tensor) -> bool:
        if not hasattr(self, "_own"):
            self._own = {id(t) for t in (*self.target.parameters(), *self.target.buffers())}
        return id(tensor) in self._own


def _has_several_ranks() -> bool:
    """DDP looks at the flags when it wraps the module: changed behind its back, ranks would train apart."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _owner(key: str) -> str:
    """The path of the module that a key of a state dict belongs to."""
    return key.rpartition(".")[0]


def _fits(saved: Tensor | None, live: Tensor) -> bool:
    return saved is not None and _shape(saved) == _shape(live)


def _would_take(module: nn.Module, saved: dict[str, Any]) -> bool:
    """Whether a module that loads in a way of its own would load these tensors, tried on a copy without memory."""
    if module._load_state_dict_pre_hooks:
        return True  # they may hold on to the module itself: only the load will tell
    if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
        return False
    trial = copy.copy(module)
    for slots in ("_parameters", "_buffers"):
        tensors = module.__dict__[slots].items()
        trial.__dict__[slots] = {key: t if t is None else torch.empty_like(t, device="meta") for key, t in tensors}
    given = {key: torch.empty(_shape(tensor), dtype=tensor.dtype, device="meta") for key, tensor in saved.items()}
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    about = {"version": module._version}
    try:
        with torch.device("meta"):  # also what it makes on the way
            trial._load_from_state_dict(given, "", about, True, missing, unexpected, errors)
    except Exception:  # it wants to see values: only the load will tell
        return True
    return not (missing or unexpected or errors)


class Optimizer(Kind):
    """An optimizer. Its state changes in `step()` only and is read live; its groups are captured.

    The groups hold the learning rate, which a scheduler changes between a safe
    point and the next step.
    """

    kind = "optimizer"

    def __init__(self, target: torch.optim.Optimizer) -> None:
        super().__init__(target)
        self._laid: list[tuple[Tensor, tuple[int, ...] | None, tuple[int, ...]]] = []
        """Since the last load: each parameter, its strides when it was saved, and those for which its state is laid."""
        self._stale = 0
        """How many parameters had stale state when it was looked at last."""

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
        """A layer was exchanged, and the new parameters took the place of the old ones in the groups.

        `step()` does not look at the state of the old ones any more, so it is no part of what goes on.
        """
        if len(stale) > self._stale:
            log(
                "stale_state",
                level=logging.WARNING,
                optimizer=type(self.target).__name__,
                parameters=len(stale),
                shapes=", ".join(str(tuple(p.shape)) for p in stale[:5]),
                means="the optimizer holds state of parameters that are in none of its param_groups any more. It is "
                "not saved: give it up by `del optimizer.state[parameter]` when you exchange a layer. If such a "
                "parameter is to come back into a group, it begins without state after a resume",
            )
        self._stale = len(stale)

    def live(self) -> Any:
        return None

    def homes(self, value: Any) -> dict[str, Tensor]:
        return {}

    def differences(self, value: Any) -> list[str]:
        wrong = _class_difference(self.target, value)
        if wrong:
            return wrong
        here = [[tuple(p.shape) for p in group["params"]] for group in self.target.param_groups]
        there = [[tuple(shape) for shape in group] for group in value["shapes"]]
        if "strides" in value and [list(map(len, group)) for group in value["strides"]] != [
            list(map(len, group)) for group in value["shapes"]
        ]:
            raise ValueError("strides that are not those of the parameters")
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
            # A newer torch, or a newer optimizer, may have options that the ckpt does not know.
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
        # As load_state_dict() does at its end: the optimizer fills in what an older one did not have, with the values
        # that stand for how that one behaved.
        self.target.__setstate__({"state": self.target.state, "param_groups": groups})
        for group, unknown in zip(groups, options, strict=True):
            for key, option in unknown.items():
                group.setdefault(key, option)
        self._laid = [(p, was, tuple(p.stride())) for (p, _), was in zip(params, before, strict=True)]

    def first_step(self, name: str) -> None:
        """A module may be brought into another memory format after the load: its state follows."""
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
                means="these parameters lie in memory in another order than when they were saved; the values are the "
                "same, but sums may differ in the last bits. Make the model with the same memory format as before",
            )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _kept(value: Any) -> Any:
    """The structure copied, every tensor a second handle on the live memory."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_kept(item) for item in value)
    return value


def _laid_as(owner: Tensor, state: Any, before: tuple[int, ...] | None) -> Any:
    """The state of one parameter, each tensor as it lay beside the parameter, which had the strides `before`.

    Fused optimizers walk through the memory of parameter, gradient and state in one go: in another order the momentum
    of one element would go to another, without an error. If the parameter lies in another order here, or the ckpt is
    old and does not tell, the state is laid as the optimizer would make it.
    """
    if not isinstance(state, dict) or tuple(owner.stride()) == before:
        return state
    strides = tuple(torch.empty_like(owner, device="meta").stride())
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == owner.shape:
            state[key] = laid_out(value, strides)
    return state


def _at_home(value: Any, owner: Any, on_cpu: bool) -> Any:
    """State tensors on the device of their parameter, but for counters that torch keeps on the CPU."""
    if isinstance(value, Tensor):
        return value if on_cpu else value.to(owner.device)
    if isinstance(value, dict):
        return {key: _at_home(item, owner, on_cpu and key == "step") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_at_home(item, owner, on_cpu) for item in value)
    return value
