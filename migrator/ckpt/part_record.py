"""What a manifest, and the record of a rank, say of a part."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PartRecord:
    """What the manifest says of a part."""

    name: str
    """The file's name inside the ckpt's directory."""
    bytes: int
    digest: str
    blocks: tuple[str, ...]
    tensor_digests: Mapping[str, builtins.bytes] = field(default_factory=dict, compare=False, repr=False)
    """The digest of each tensor as it was written. Only the writer knows it."""
    as_read: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The entry as it was read: unknown fields are written again."""

    def to_json(self) -> dict[str, Any]:
        known = {"name": self.name, "bytes": self.bytes, "digest": self.digest, "blocks": list(self.blocks)}
        return {**self.as_read, **known}
