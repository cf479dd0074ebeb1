"""Reads the one file that the predecessor, pytorchjob-migration, wrote.

A `migration.pth` is a pickle. It is read with `weights_only=True`, which makes only
tensors and plain containers, and only if the predecessor's own variable names it.
It holds no place in the epoch and no random states, so the interrupted epoch begins
anew, as it did there.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from migrator.errors import CkptCorrupt, CkptMismatch
from migrator.state.adapters import base, module, optimizer, stateful
from migrator.state.registry import Registry


def load(path: Path, registry: Registry) -> None:
    """Put the file's contents into what is registered. All differences are listed before anything is touched."""
    try:
        _check_archive(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise CkptCorrupt(
            f"{path} is not a file that can be loaded without running code from it: {error!s:.300}\n"
            "Move it away to start without it."
        ) from error
    if not isinstance(found, dict):
        raise CkptCorrupt(f"{path} holds a {type(found).__name__}; expected the dict that pytorchjob-migration writes")
    if not all(isinstance(key, str) for key in found):
        raise CkptCorrupt(f"{path} holds a dict with keys that are no names; pytorchjob-migration writes names only")
    values = {key: _without_wrapper(value) for key, value in found.items()}
    lines = [f"in the file, not registered: {key}" for key in values if key not in registry]
    for key, adapter in registry:
        if key not in values:
            lines.append(f"registered, not in the file: {key}")
        elif isinstance(adapter, module.Module):
            lines += [f"{key}{line}" for line in _differences(path, key, adapter, values[key])]
    if lines:
        raise CkptMismatch(
            f"{path} does not fit what is registered:\n  "
            + "\n  ".join(lines)
            + "\nRegister the same names as the script that wrote it, or move it away to start without it."
        )
    for key, adapter in registry:
        _restore(path, key, adapter, values[key])


def _check_archive(path: Path) -> None:
    """Raise if this is not an uncompressed zip, as `torch.save()` makes it.

    A compressed one could take any amount of memory. And for other formats some versions of torch run code in spite of
    `weights_only=True`.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size, unpacked = path.stat().st_size, sum(entry.file_size for entry in entries)
    if unpacked > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(f"it is compressed, {unpacked} bytes in {size}, which torch.save() does not do")


def _differences(path: Path, name: str, kind: base.Adapter, value: Any) -> list[str]:
    try:
        return kind.differences(value)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CkptCorrupt(f"{path}: {name!r} is not of the form that pytorchjob-migration writes") from error


def _restore(path: Path, name: str, kind: base.Adapter, value: Any) -> None:
    try:
        if isinstance(kind, (optimizer.Optimizer, stateful.Scheduler)):
            kind.target.load_state_dict(value)
        else:
            kind.restore(value)
    except Exception as error:  # the script's own load_state_dict() may raise anything
        raise CkptMismatch(f"{path}: {name!r} could not be restored: {type(error).__name__}: {error}") from error


def _without_wrapper(value: Any) -> Any:
    """Without the prefix `module.`, which the predecessor saved with the keys of a wrapped model."""
    if isinstance(value, dict) and value and all(isinstance(k, str) and k.startswith("module.") for k in value):
        return {key.removeprefix("module."): item for key, item in value.items()}
    return value
