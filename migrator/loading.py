"""The way back: the newest whole ckpt into everything registered.

First the manifest, then the fit: a ckpt that does not fit is refused with all
differences at once, before anything registered was touched. Then the parts, every
byte verified while it is read straight into the tensors' memory. A bad part is
found on the way; the ckpt before it is then loaded over what was half loaded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from migrator import tree
from migrator.errors import CkptCorrupt, CkptMismatch
from migrator.lineage import whole
from migrator.manifest import Manifest
from migrator.parts import read_part
from migrator.progress import Progress
from migrator.registry import Registry
from migrator.storage import LocalStorage
from migrator.tree import Stored


@dataclass(frozen=True)
class Loaded:
    """A ckpt that is now in the registered objects."""

    ckpt: str
    step: int
    random: dict[str, Any]
    loop: dict[str, Any] | None
    size: int


def load(storage: LocalStorage, name: str, registry: Registry) -> Loaded:
    """Load this ckpt, or raise `CkptCorrupt` or `CkptMismatch`."""
    manifest = whole(storage, name)
    values = {key: _decoded(entry["tree"]) for key, entry in manifest.objects.items()}
    _check_fit(f"{storage.root / name}", manifest, values, registry)
    homes: dict[str, Tensor] = {}
    for key, kind in registry:
        for stored, tensor in kind.homes(values[key]).items():
            homes.setdefault(stored, tensor.detach())
    tensors: dict[str, Tensor] = {}
    with Progress("loading") as progress:
        for part in manifest.parts:
            tensors |= read_part(storage, name, part, homes, progress=progress)
    extra = {key: _filled(_decoded(value), tensors) for key, value in manifest.extra.items()}
    filled = {key: _filled(values[key], tensors) for key, _ in registry}
    for key, kind in registry:
        try:
            kind.restore(filled[key])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise CkptMismatch(
                f"the ckpt {name} could not be put back into {key!r}: {type(error).__name__}: {error}\n"
                "Start without the ckpt: MIGRATOR_RESUME=never."
            ) from error
    random = extra.get("random") or {}
    size = sum(part.bytes for part in manifest.parts)
    return Loaded(name, manifest.step, random.get("0") or {}, extra.get("loop"), size)


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


def _check_fit(name: str, manifest: Manifest, values: dict[str, Any], registry: Registry) -> None:
    lines = [f"in the ckpt, not registered: {key}" for key in values if key not in registry]
    lines += [f"registered, not in the ckpt: {key}" for key, _ in registry if key not in values]
    for key, kind in registry:
        if key not in values:
            continue
        if manifest.objects[key]["kind"] != kind.kind:
            lines.append(f"{key}: is a {kind.kind} here, a {manifest.objects[key]['kind']} there")
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
