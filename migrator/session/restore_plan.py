"""What one rank takes from a ckpt, checked against what is registered before anything is touched.

A ckpt that does not fit is refused with all differences at once. Whatever cannot be undone when
it turns out to be damaged, random states and places in loops, is tried or checked first.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from dataclasses import dataclass
from random import Random
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from migrator.ckpt import codec
from migrator.ckpt.codec import Stored, StoredArray, laid_out
from migrator.ckpt.manifest import Manifest, objects_from
from migrator.errors import CkptCorrupt, CkptMismatch
from migrator.events import log
from migrator.state import random_state
from migrator.state.adapters.base import is_large
from migrator.state.adapters.containers import Container, TensorOrArray
from migrator.state.adapters.module import Module
from migrator.state.adapters.random_generators import check_positions, set_state
from migrator.state.places import Places, is_same, place_of
from migrator.state.registry import Registry

_RANK = re.compile(r"[0-9]{1,9}", re.ASCII)
_LOOP = {
    "handed": int,
    "is_over": bool,
    "batch_size": int,
    "origin": dict,
    "alike": bool,
    "now": dict,
    "at": str,
    "starts": list,
}


@dataclass(frozen=True)
class Loaded:
    """A ckpt that is now in the registered objects."""

    ckpt: str
    step: int
    random: dict[str, Any]
    loop: dict[str, Any] | None
    size: int
    ranks: int
    """How many ranks it was saved with."""


class RestorePlan:
    """What one rank takes from a manifest. It fits what is registered, and nothing was touched yet."""

    def __init__(
        self, manifest: Manifest, registry: Registry, *, rank: int = 0, size: int = 1, where: str | None = None
    ) -> None:
        self._manifest = manifest
        self._registry = registry
        self._rank = rank
        own = _own(manifest, rank) if manifest.ranks == size else {}
        entries = {**manifest.objects, **own.get("objects", {})}
        self._loop = own.get("loop", manifest.extra.get("loop"))
        self._trees = {key: entry["tree"] for key, entry in entries.items()}
        self._values = {key: _decoded(entry["tree"]) for key, entry in entries.items()}
        kinds = {key: entry["kind"] for key, entry in entries.items()}
        _check_fit(where or manifest.ckpt, kinds, self._values, registry)
        self._homes: dict[str, Tensor] = {}
        self._copied: set[str] = set()
        """Those of which a save writes a copy: it does not see that such a tensor is in two places."""
        self._shared: list[tuple[str, str]] = []
        """Names of two tensors of modules for which there is one place here."""
        self._find_homes(where or manifest.ckpt)
        missing = manifest.extra.get("missing")
        self._has_own = manifest.ranks == size and not (isinstance(missing, list) and rank in missing)

    def _find_homes(self, ckpt: str) -> None:
        """Each tensor of the ckpt gets a place of its own.

        `best = model.state_dict()` is the model's own memory. If the script has put a copy there before it was saved,
        the ckpt holds two tensors, and in the next life they begin as one again.
        """
        arrays = _names_of_arrays(self._values)
        taken: dict[Any, str] = {}
        # What cannot be replaced by something else comes first.
        for key, adapter in sorted(self._registry, key=lambda entry: not isinstance(entry[1], (Module, TensorOrArray))):
            for stored, tensor in adapter.homes(self._values[key]).items():
                if stored in self._homes:
                    continue
                if stored in arrays or (isinstance(adapter, Module) and not isinstance(tensor, nn.Parameter)):
                    self._copied.add(stored)
                place = place_of(tensor)
                if place not in taken:
                    self._homes[stored] = tensor.detach()
                    taken |= {} if place is None else {place: stored}
                elif not isinstance(adapter, Container):
                    self._share(ckpt, taken[place], stored, tensor)

    def _share(self, ckpt: str, one: str, other: str, tensor: Tensor) -> None:
        """Two of the ckpt have one place, which cannot be another one."""
        if is_large(tensor) and not {one, other} & self._copied:
            raise CkptMismatch(
                f"the ckpt {ckpt} holds {one} and {other} as two tensors, and here they are one. Make them two before "
                "load_ckpt(), as the script had done when it was saved, or start without the ckpt: "
                "MIGRATOR_RESUME=never."
            )
        self._shared.append((one, other))

    def _check_shared(self, read: dict[str, Tensor]) -> None:
        for one, other in self._shared:
            if one in read and other in read and not is_same(read[one], read[other]):
                raise CkptMismatch(
                    f"the ckpt {self._manifest.ckpt} holds other values in {one} than in {other}, and here they are "
                    "one. Make them two before load_ckpt(), or start without the ckpt: MIGRATOR_RESUME=never."
                )

    def _places(self, read: dict[str, Tensor], filled: dict[str, Any]) -> Places:
        """What was read into its place, what modules hold, and what is registered itself: it cannot be replaced."""
        copied = {id(read[stored]) for stored in self._copied & read.keys()}
        places = Places(apart={id(tensor) for tensor in read.values()} - copied)
        for stored in self._homes.keys() & read.keys():
            places.note(self._homes[stored], read[stored])
        for key, adapter in self._registry:
            if isinstance(adapter, Module):
                for name, live in adapter.live().items():
                    places.note(live, filled[key].get(name))
            elif isinstance(adapter, (Container, TensorOrArray)):
                places.note(adapter.target, filled[key])
        return places

    def homes(self) -> dict[str, Tensor]:
        """By name: the tensor of this process that a stored one is read into."""
        return self._homes

    def restore(self, read: dict[str, Tensor]) -> Loaded:
        """Put everything in place."""
        name = self._manifest.ckpt
        tensors = _Tensors(read, self._homes)
        random = self._random(tensors)
        loop = _filled(_decoded(self._loop), tensors)
        if loop is not None:
            _check_loop(name, loop)
        for key, kind in self._registry:
            if kind.may_lack:
                self._registry.storable.remember(key, self._trees[key])
        filled = {key: _filled(self._values[key], tensors) for key, _ in self._registry}
        self._check_shared(read)
        places = self._places(read, filled)
        for key, kind in self._registry:
            try:
                if isinstance(kind, Container):
                    kind.restore(filled[key], places)
                else:
                    kind.restore(filled[key])
            except Exception as error:  # the script's own load_state_dict() may raise anything
                raise CkptMismatch(
                    f"the ckpt {name} could not be put back into {key!r}: {type(error).__name__}: {error}\n"
                    "Start without the ckpt: MIGRATOR_RESUME=never."
                ) from error
        if self._registry.own and not self._has_own:
            names = ",".join(sorted(self._registry.own))
            log("own_of_another_rank", level=logging.WARNING, ckpt=name, objects=names)
        return Loaded(name, self._manifest.step, random, loop, self._manifest.bytes, self._manifest.ranks)

    def _random(self, tensors: _Tensors) -> dict[str, Any]:
        """This rank's random states. If the ckpt has none for it, they are derived from those of another rank."""
        states = _filled(_decoded(self._manifest.extra.get("random")), tensors)
        if states is None:
            return {}
        if not isinstance(states, dict) or not all(isinstance(key, str) and _RANK.fullmatch(key) for key in states):
            raise CkptCorrupt(f"{self._manifest.ckpt}: its random states are not kept by rank")
        own, ranks = str(self._rank), sorted(states, key=int)
        if not ranks or (own in states and type(states[own]) in (NoneType, dict) and not states[own]):
            return {}
        other = own if own in states else ranks[self._rank % len(ranks)]
        _check_random(self._manifest.ckpt, states[other])
        if other == own:
            return dict(states[own])
        log("random_derived", level=logging.WARNING, ckpt=self._manifest.ckpt, other=other)
        return random_state.derived(states[other], self._rank)


def _names_of_arrays(value: Any) -> set[str]:
    """The names under which a ckpt stores numpy arrays."""
    if isinstance(value, StoredArray):
        return {value.part.name}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return {name for item in items for name in _names_of_arrays(item)}


def _own(manifest: Manifest, rank: int) -> dict[str, Any]:
    found = manifest.extra.get("own", {})
    own = found.get(str(rank), {}) if isinstance(found, dict) else {}
    try:
        return {**own, "objects": objects_from(own.get("objects", {}))}
    except (TypeError, AttributeError, CkptCorrupt) as error:
        raise CkptCorrupt(
            f"{manifest.ckpt}: what is rank {rank}'s own is not of the form that a save writes"
        ) from error


def _check_loop(name: str, loop: Any) -> None:
    """Checked here, because it is used only when a loop begins: too late to take another ckpt."""
    loops = loop.get("loops") if isinstance(loop, dict) else None
    if not isinstance(loops, dict):
        raise CkptCorrupt(f"{name}: the place in its loops is not of the form that a save writes")
    for label, state in loops.items():
        is_ours = isinstance(label, str) and isinstance(state, dict)
        if not is_ours or any(type(state[key]) is not kind for key, kind in _LOOP.items() if key in state):
            raise CkptCorrupt(f"{name}: the place in one of its loops is not of the form that a save writes")
        if "origin" in state:
            _check_random(name, state["origin"].get("random"))
    epochs = loop.get("epochs", {})
    if not isinstance(epochs, dict) or not all(map(_is_count, epochs.values())):
        raise CkptCorrupt(f"{name}: the numbers of its epochs are not of the form that a save writes")


def _is_count(found: Any) -> bool:
    if not isinstance(found, dict) or not found.keys() >= {"epoch", "is_over"}:
        return False
    return type(found["epoch"]) is int and found["epoch"] >= 0 and type(found["is_over"]) is bool


def _check_random(name: str, states: Any) -> None:
    """Random states are put back last of all. Whether they can be is tried here, on generators that nobody uses."""
    try:
        set_state(torch.Generator(), states["torch"])
        set_state(Random(0), states["python"])
        if "numpy" in states:
            set_state(np.random.RandomState(type(np.random.mtrand._rand._bit_generator)(0)), states["numpy"])
        if not all(isinstance(state, Tensor) for state in states.get("cuda", ())):
            raise TypeError("a device has a state that is no tensor")
    except Exception as error:  # torch, Python and numpy raise many kinds of errors
        raise CkptCorrupt(f"{name}: its random states are not such as a generator has: {error!r:.200}") from error


def _decoded(node: Any) -> Any:
    """The value with `Stored` in the place of tensors that lie in a part."""
    return codec.decode(node, get=lambda stored: stored)


class _Tensors:
    """The tensors of a ckpt, as its parts hold them: row by row."""

    def __init__(self, tensors: dict[str, Tensor], homes: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._homes = homes

    def get(self, stored: Stored) -> Tensor:
        """One of them, in memory of the strides that it had."""
        tensor = self._tensors.get(stored.name)
        if tensor is None or tensor.dtype != stored.dtype or tuple(tensor.shape) != stored.shape:
            raise CkptCorrupt(f"the manifest names a tensor {stored.name!r} that its parts do not hold like that")
        home = self._homes.get(stored.name)
        # A tensor that fits its home is copied into that, whatever strides it has there.
        if stored.strides is None or (home is not None and home.shape == tensor.shape and home.dtype == tensor.dtype):
            return tensor
        # Replaces the other one, so that both are in memory for one tensor at a time only.
        self._tensors[stored.name] = laid_out(tensor, stored.strides)
        return self._tensors[stored.name]


def _filled(value: Any, tensors: _Tensors) -> Any:
    """The value with its tensors."""
    if isinstance(value, Stored):
        return tensors.get(value)
    if isinstance(value, StoredArray):
        return value.array(tensors.get(value.part))
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _filled(value[key], tensors)
        return _proven(value)
    if type(value) in (list, tuple):
        return _proven(type(value)([_filled(item, tensors) for item in value]))
    if isinstance(value, deque):
        return deque((_filled(item, tensors) for item in value), value.maxlen)
    return value


def _proven(value: Any) -> Any:
    try:
        check_positions(value)
    except ValueError as error:
        raise CkptCorrupt(str(error)) from error
    return value


def _check_fit(name: str, kinds: dict[str, Any], values: dict[str, Any], registry: Registry) -> None:
    lines = [f"in the ckpt, not registered: {key}" for key in values if key not in registry]
    lines += [f"registered, not in the ckpt: {key}" for key, _ in registry if key not in values]
    for key, adapter in registry:
        if key not in values:
            continue
        if kinds[key] != adapter.kind:
            lines.append(f"{key}: is a {adapter.kind} here, a {kinds[key]} there")
            continue
        try:
            lines += [f"{key}{line}" for line in adapter.differences(values[key])]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CkptCorrupt(f"{name}: the state of {key!r} is not of the form that a save writes") from error
    if lines:
        raise CkptMismatch(
            f"the ckpt {name} does not fit what is registered:\n  "
            + "\n  ".join(lines)
            + "\nRegister what is missing before load_ckpt(), or start without the ckpt: MIGRATOR_RESUME=never.\n"
            "To take a part of it only (the weights, not the optimizer), start without it and read its tensors from "
            f"{name}/*.safetensors, where they are named '<registered name>/<key>': see CkptMismatch in "
            "docs/troubleshooting.md."
        )
