"""The way back: the newest whole ckpt into everything registered.

First the manifest, then the fit: a ckpt that does not fit is refused with all
differences at once, before anything registered was touched. Then the parts, every
byte verified while it is read straight into the tensors' memory. A bad part is
found on the way; the ckpt before it is then loaded over what was half loaded.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from migrator import randomness, tree
from migrator.errors import CkptCorrupt, CkptMismatch
from migrator.events import log
from migrator.lineage import whole
from migrator.manifest import Manifest
from migrator.parts import read_part
from migrator.progress import Progress
from migrator.registry import Registry
from migrator.storage import LocalStorage
from migrator.tree import DTYPES, Stored, dtype_name


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


class Fit:
    """What one rank takes from a manifest, found to fit what is registered; nothing is touched yet."""

    def __init__(
        self, manifest: Manifest, registry: Registry, *, rank: int = 0, size: int = 1, where: str | None = None
    ) -> None:
        self._manifest = manifest
        self._registry = registry
        self._rank = rank
        own = _own(manifest, rank) if manifest.ranks == size else {}
        entries = {**manifest.objects, **own.get("objects", {})}
        self._loop = own.get("loop", manifest.extra.get("loop"))
        self._values = {key: _decoded(entry["tree"]) for key, entry in entries.items()}
        kinds = {key: entry["kind"] for key, entry in entries.items()}
        _check_fit(where or manifest.ckpt, kinds, self._values, registry)

    def homes(self) -> dict[str, Tensor]:
        """Where stored tensors live in this process."""
        homes: dict[str, Tensor] = {}
        for key, kind in self._registry:
            for stored, tensor in kind.homes(self._values[key]).items():
                homes.setdefault(stored, tensor.detach())
        return homes

    def restore(self, tensors: dict[str, Tensor]) -> Loaded:
        """Put everything in place."""
        name = self._manifest.ckpt
        random = self._random(tensors)
        loop = _filled(_decoded(self._loop), tensors)
        filled = {key: _filled(self._values[key], tensors) for key, _ in self._registry}
        for key, kind in self._registry:
            try:
                kind.restore(filled[key])
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
                raise CkptMismatch(
                    f"the ckpt {name} could not be put back into {key!r}: {type(error).__name__}: {error}\n"
                    "Start without the ckpt: MIGRATOR_RESUME=never."
                ) from error
        return Loaded(name, self._manifest.step, random, loop, self._manifest.bytes, self._manifest.ranks)

    def _random(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's own random states; where the ckpt has none for it, such as follow from another rank's."""
        states = _filled(_decoded(self._manifest.extra.get("random")), tensors) or {}
        if not isinstance(states, dict) or not all(rank.isdecimal() for rank in states):
            raise CkptCorrupt(f"{self._manifest.ckpt}: its random states are not kept by rank")
        if not states or str(self._rank) in states:
            return dict(states.get(str(self._rank)) or {})
        ranks = sorted(states, key=int)
        other = ranks[self._rank % len(ranks)]
        log("random_derived", level=logging.WARNING, ckpt=self._manifest.ckpt, other=other)
        return randomness.derived(states[other], self._rank)


def load(storage: LocalStorage, name: str, registry: Registry, *, rank: int = 0, size: int = 1) -> Loaded:
    """Load this ckpt, or raise `CkptCorrupt` or `CkptMismatch`."""
    manifest = whole(storage, name)
    fit = Fit(manifest, registry, rank=rank, size=size, where=f"{storage.root / name}")
    return fit.restore(read(storage, manifest, fit.homes()))


def read(storage: LocalStorage, manifest: Manifest, homes: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a ckpt, every byte verified."""
    tensors: dict[str, Tensor] = {}
    with Progress("loading") as progress:
        for part in manifest.parts:
            tensors |= read_part(storage, manifest.ckpt, part, homes, progress=progress)
    return tensors


def described(tensors: dict[str, Tensor]) -> list[Any]:
    """What another rank needs to make tensors of the same names and sizes."""
    return [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def made(described: list[Any]) -> dict[str, Tensor]:
    """Tensors as `described` says, to be filled."""
    return {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in described}


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as plain bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _own(manifest: Manifest, rank: int) -> dict[str, Any]:
    found = manifest.extra.get("own", {})
    own = found.get(str(rank), {}) if isinstance(found, dict) else {}
    if not isinstance(own, dict) or not isinstance(own.get("objects", {}), dict):
        raise CkptCorrupt(f"{manifest.ckpt}: what is rank {rank}'s own is not of the form that a save writes")
    return own


def _decoded(node: Any) -> Any:
    """The value with `Stored` in the place of tensors that lie in a part."""
    return tree.decode(node, get=lambda stored: stored)


def _filled(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with its tensors."""
    if isinstance(value, Stored):
        tensor = tensors.get(value.name)
        if tensor is None or tensor.dtype != value.dtype or tuple(tensor.shape) != value.shape:
            raise CkptCorrupt(f"the manifest names a tensor {value.name!r} that its parts do not hold like that")
        return tensor
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _filled(value[key], tensors)
        return value
    if type(value) in (list, tuple):
        return type(value)([_filled(item, tensors) for item in value])
    if isinstance(value, deque):
        return deque((_filled(item, tensors) for item in value), value.maxlen)
    return value


def _check_fit(name: str, kinds: dict[str, Any], values: dict[str, Any], registry: Registry) -> None:
    lines = [f"in the ckpt, not registered: {key}" for key in values if key not in registry]
    lines += [f"registered, not in the ckpt: {key}" for key, _ in registry if key not in values]
    for key, kind in registry:
        if key not in values:
            continue
        if kinds[key] != kind.kind:
            lines.append(f"{key}: is a {kind.kind} here, a {kinds[key]} there")
            continue
        try:
            lines += [f"{key}{line}" for line in kind.differences(values[key])]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CkptCorrupt(f"{name}: the state of {key!r} is not of the form that a save writes") from error
    if lines:
        raise CkptMismatch(
            f"the ckpt {name} does not fit what is registered:\n  "
            + "\n  ".join(lines)
            + "\nRegister what is missing before load_ckpt(), or start without the ckpt: MIGRATOR_RESUME=never."
        )
