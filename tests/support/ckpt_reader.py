"""Reads a ckpt without the package's own loading: what lies on the volume, as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from migrator.ckpt import codec as tree
from migrator.state.adapters.base import WITHOUT_GRAD
from migrator.ckpt.manifest import NAME, Manifest


def read(ckpt: Path) -> tuple[int, dict[str, Any]]:
    """The step and everything registered of the ckpt in this directory."""
    manifest = Manifest.from_bytes((ckpt / NAME).read_bytes())
    tensors = {}
    for part in manifest.parts:
        tensors |= load_file(ckpt / part.name)

    def get(stored: tree.Stored | tree.StoredArray) -> Any:
        if isinstance(stored, tree.StoredArray):
            return stored.array(tensors[stored.part.name])
        return tensors[stored.name]

    values = {name: tree.decode(entry["tree"], get=get) for name, entry in manifest.objects.items()}
    for value in values.values():
        if isinstance(value, dict):
            value.pop(WITHOUT_GRAD, None)  # no tensor
    return manifest.step, values
