"""The manifest: the JSON whose appearance is the commit.

It says which parts belong to a ckpt and what their bytes must be, and holds
everything that is not a large tensor. Its own digest stands in front (`sealed.py`), so a
flipped bit anywhere in it is found. Known fields are read strictly: a manifest that is
nearly right would load wrong state. It has at most `MANIFEST_LIMIT` bytes, in every version.

Within a format, fields may be added: to the manifest, to the entry of a part, to that
of an object, to `extra` and `written`. A version that does not know a field ignores it,
and keeps it when it writes what it has read. So a field can be added like that only if ignoring it never loads wrong
state. All else needs a new format: a field that must not be ignored, one that is left out
or gets another meaning, a new node in a tree. A version that does not know a format
refuses the ckpt with its name, and does not load an older one in its place.

The price: the reader of each format stays here for good.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from migrator.ckpt.digests import block_count
from migrator.ckpt.names import COUNT_MAX, ckpt_name, is_part_name
from migrator.ckpt.sealed import check_format, seal, unseal
from migrator.errors import CkptCorrupt, SaveFailed

FORMAT = 2
"""The number of the format that is written."""
MANIFEST_LIMIT = 256 << 20
"""Bytes of a manifest at most. Anything large belongs into a part."""
_TOOK_MOST_S = 1e6
"""Seconds that a save may have taken; a longer time is none."""

_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class PartRecord:
    """What the manifest says of a part."""

    name: str
    """The file's name inside the ckpt's directory."""
    bytes: int
    digest: str
    blocks: tuple[str, ...]
    header: tuple[int, str] | None = None
    """Bytes and digest of the file's header, so that it can be proven before a whole block was read; None: unknown."""
    tensor_digests: Mapping[str, builtins.bytes] = field(default_factory=dict, compare=False, repr=False)
    """The digest of each tensor as it was written. Only the writer knows it."""
    as_read: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The entry as it was read: unknown fields are written again."""

    def to_json(self) -> dict[str, Any]:
        known = {"name": self.name, "bytes": self.bytes, "digest": self.digest, "blocks": list(self.blocks)}
        if self.header is not None:
            known["header"] = {"bytes": self.header[0], "digest": self.header[1]}
        return {**self.as_read, **known}


@dataclass(frozen=True)
class Manifest:
    """What a ckpt consists of."""

    generation: int
    step: int
    job: str
    ranks: int
    parts: tuple[PartRecord, ...]
    objects: dict[str, dict[str, Any]]
    """The "kind" and the "tree" of each registered name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else a resume needs: random states, the state of the loop."""
    written: dict[str, Any] = field(default_factory=dict)
    """When, where and by which versions it was written."""
    as_read: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All fields as they were read, in their order: unknown ones are written again."""

    @property
    def ckpt(self) -> str:
        return ckpt_name(self.generation, self.step)

    @property
    def bytes(self) -> int:
        """The size of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def took_s(self) -> float | None:
        """Seconds that the save took; None if an older version wrote it."""
        found = self.written.get("took_s")
        # Whatever else stands there: nothing that is loaded depends on it.
        is_known = isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < _TOOK_MOST_S
        return found if is_known else None

    def to_bytes(self) -> builtins.bytes:
        payload = {
            **self.as_read,
            "format": FORMAT,
            "generation": self.generation,
            "step": self.step,
            "job": self.job,
            "ranks": self.ranks,
            "parts": [part.to_json() for part in self.parts],
            "objects": self.objects,
            "extra": self.extra,
            "written": self.written,
        }
        data = seal("manifest", payload)
        if len(data) > MANIFEST_LIMIT:
            raise SaveFailed(
                f"the manifest of {self.ckpt} would take {len(data)} bytes, at most {MANIFEST_LIMIT} are read back. "
                "Keep large numbers of values in tensors or numpy arrays, not in lists."
            )
        return data

    @classmethod
    def from_bytes(cls, data: builtins.bytes) -> Manifest:
        """The manifest in these bytes; `CkptMismatch` if a newer version wrote them, `CkptCorrupt` if none did."""
        payload = unseal("manifest", data)
        # A newer format is not corrupt: loading an older ckpt instead, or deleting this one, would lose good work.
        number = check_format(payload.get("format"), READERS, "the ckpt", _WITHOUT)
        return READERS[number](payload)


_WITHOUT = "start without the ckpt: MIGRATOR_RESUME=never"


def _fields_of_1_and_2(payload: dict[str, Any]) -> Manifest:
    """Format 2 added strides and large numpy arrays, which are nodes of trees. The fields are the same."""
    _expect_fields(payload, ("generation", "step", "job", "ranks", "parts", "objects", "extra", "written"), "manifest")
    return Manifest(
        generation=_count(payload["generation"], "generation", least=1),
        step=_count(payload["step"], "step"),
        job=_typed(payload["job"], str, "job"),
        ranks=_count(payload["ranks"], "ranks", least=1),
        parts=parts_from(payload["parts"]),
        objects=objects_from(payload["objects"]),
        extra=_typed(payload["extra"], dict, "extra"),
        written=_typed(payload["written"], dict, "written"),
        as_read=payload,
    )


READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _fields_of_1_and_2, 2: _fields_of_1_and_2}
"""The reader of each format that was ever written."""


def parts_from(found: Any) -> tuple[PartRecord, ...]:
    """The parts that a manifest or a rank's record names, or `CkptCorrupt`."""
    parts = tuple(_part(part) for part in _typed(found, list, "parts"))
    if len({part.name for part in parts}) != len(parts):
        raise CkptCorrupt("the manifest names a part twice")
    return parts


def _part(found: Any) -> PartRecord:
    part = _typed(found, dict, "part")
    _expect_fields(part, ("name", "bytes", "digest", "blocks"), "entry of a part")
    name = _typed(part["name"], str, "name of a part")
    if not is_part_name(name):
        raise CkptCorrupt(f"the manifest names the part {name!r:.80}; expected part-<i>-of-<n>.safetensors")
    size = _count(part["bytes"], f"size of {name}")
    blocks = _typed(part["blocks"], list, f"blocks of {name}")
    if len(blocks) != block_count(size):
        raise CkptCorrupt(f"the manifest has {len(blocks)} block digests for {size} bytes of {name}")
    header = None
    if "header" in part:
        entry = _typed(part["header"], dict, f"header of {name}")
        _expect_fields(entry, ("bytes", "digest"), f"header of {name}")
        header = (_count(entry["bytes"], f"size of the header of {name}", least=8), entry["digest"])
    for digest in (part["digest"], *blocks, *([] if header is None else [header[1]])):
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise CkptCorrupt(f"the manifest has {digest!r:.80} as a digest in {name}")
    return PartRecord(name, size, part["digest"], tuple(blocks), header, as_read=part)


def objects_from(found: Any) -> dict[str, dict[str, Any]]:
    """What a manifest or a rank's record says of registered objects, or `CkptCorrupt`."""
    objects: dict[str, dict[str, Any]] = _typed(found, dict, "objects")
    for name, entry in objects.items():
        _expect_fields(_typed(entry, dict, name), ("kind", "tree"), f"entry of {name}")
        _typed(entry["kind"], str, f"kind of {name}")
    return objects


def _typed(value: Any, kind: type[Any], what: str) -> Any:
    if type(value) is not kind:
        raise CkptCorrupt(f"the manifest has {value!r:.80} as {what:.80}; expected {kind.__name__}")
    return value


def _count(value: Any, what: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < COUNT_MAX:
        raise CkptCorrupt(f"the manifest has {value!r:.80} as {what}; expected an integer of at least {least}")
    return value


def _expect_fields(found: Mapping[str, Any], expected: tuple[str, ...], what: str) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise CkptCorrupt(f"the {what:.80} lacks {', '.join(missing)}")
