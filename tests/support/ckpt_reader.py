"""Reads a ckpt without the package's own loading: what lies on the volume, as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from migrator.ckpt import codec
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import MANIFEST
from migrator.state.adapters.module import WITHOUT_GRAD


def read(ckpt: Path) -> tuple[int, dict[str, Any]]:
    """The step and everything registered of the ckpt in this directory."""
    manifest = Manifest.from_bytes((ckpt / MANIFEST).read_bytes())
    tensors = {}
    for part in manifest.parts:
        tensors |= load_file(ckpt / part.name)

    def get(stored: codec.Stored | codec.StoredArray) -> Any:
        if isinstance(stored, codec.StoredArray):
            return stored.array(tensors[stored.part.name])
        return tensors[stored.name]

    values = {name: codec.decode(entry["tree"], get=get) for name, entry in manifest.objects.items()}
    for value in values.values():
        if isinstance(value, dict):
            value.pop(WITHOUT_GRAD, None)  # no tensor
    return manifest.step, values
