"""Reading one ckpt into everything registered, on one rank.

First the manifest, then the check whether the ckpt fits (`restore_plan.py`). Then the parts: every
byte is verified while it is read straight into the tensors' memory. A bad part is found on the
way; the ckpt before it is then loaded over what was half loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from migrator.ckpt.catalog import make_durable, whole
from migrator.ckpt.codec import DTYPES, dtype_name
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.tensor_file import read_part
from migrator.errors import CkptCorrupt, NoUsableCkpt, StorageNotFoundError
from migrator.events import log
from migrator.save.progress import Progress
from migrator.session.restore_plan import Loaded, RestorePlan
from migrator.state.registry import Registry
from migrator.storage.base import Storage


def load(storage: Storage, name: str, registry: Registry, *, rank: int = 0, size: int = 1) -> Loaded:
    """Load this ckpt, or raise `CkptCorrupt` or `CkptMismatch`."""
    manifest = whole(storage, name)
    plan = RestorePlan(manifest, registry, rank=rank, size=size, where=storage.where(name))
    loaded = plan.restore(read(storage, manifest, plan.homes()))
    try:
        # From now on this ckpt counts as saved. It may be there only because the node has not crashed yet.
        make_durable(storage, name)
    except StorageNotFoundError as error:
        raise CkptCorrupt(f"{name} was deleted while it was read: {error}") from error
    return loaded


def newest_usable(
    names: Iterable[str], load: Callable[[str], Loaded], *, where: object, on_bad: Callable[[str], None]
) -> Loaded:
    """The first of these ckpts that is what was committed. Those that are not are logged and left in place."""
    found = []
    for name in names:
        try:
            return load(name)
        except CkptCorrupt as error:
            found.append(str(error))
            on_bad(name)
            log("ckpt_bad", level=logging.ERROR, ckpt=name, why=error)
    raise NoUsableCkpt(
        f"none of the {len(found)} ckpts under {where} can be used:\n  "
        + "\n  ".join(found)
        + "\nNothing was deleted. Restore the volume, or start over knowingly: MIGRATOR_RESUME=never."
    )


def read(storage: Storage, manifest: Manifest, homes: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a ckpt, every byte verified."""
    tensors: dict[str, Tensor] = {}
    with Progress("loading") as progress:
        for part in manifest.parts:
            try:
                tensors |= read_part(storage, manifest.ckpt, part, homes, progress=progress)
            except StorageNotFoundError as error:
                # It was a file when the manifest was read.
                raise CkptCorrupt(f"{manifest.ckpt}: {error}") from error
    return tensors


def described(tensors: dict[str, Tensor]) -> list[Any]:
    """What another rank needs to make tensors of the same names and sizes."""
    return [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def made(described: list[Any]) -> dict[str, Tensor]:
    """Tensors as `described` says, to be filled."""
    return {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in described}
