"""The manifest: the JSON whose appearance is the commit.

It says which parts belong to a ckpt and what their bytes must be, and holds
everything that is not a large tensor. Its own digest stands in front, so a flipped
bit anywhere in it is found; and it is read strictly: whoever accepts a manifest
that is nearly right loads wrong state.

    {"digest":"<32 hex digits>","manifest":{...}}

The price: a version of the package that wants to say more has to raise FORMAT.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from migrator.storage.file_io import block_count
from migrator.errors import CkptCorrupt, CkptMismatch, SaveFailed
from migrator.ckpt.tensor_file import PartRecord

FORMAT = 2
"""2 keeps strides and large numpy arrays; 1 had neither, and is read as well."""
READABLE = (1, 2)
LIMIT = 256 << 20
"""No manifest is larger. What is large belongs into a part."""
NAME = "manifest.json"

_CKPT = re.compile(r"([0-9]{6,})-([0-9]{12,})", re.ASCII)
_BY = r"rank-[0-9]{5}(?:-[0-9]{1,9})?"
_PART = re.compile(rf"(?:part-([0-9]{{5}})-of-([0-9]{{5}})(?:-{_BY})?|own-of-{_BY})\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_COUNT_MAX = 1 << 62


@dataclass(frozen=True)
class Manifest:
    """What a ckpt consists of."""

    generation: int
    step: int
    job: str
    ranks: int
    parts: tuple[PartRecord, ...]
    objects: dict[str, dict[str, Any]]
    """Of each registered name its "kind" and its "tree"."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else a resume needs: random states, the state of the loop."""
    written: dict[str, Any] = field(default_factory=dict)
    """When, where and by which versions."""

    @property
    def ckpt(self) -> str:
        return ckpt_name(self.generation, self.step)

    @property
    def bytes(self) -> int:
        """The size of all parts."""
        return sum(part.bytes for part in self.parts)

    def to_bytes(self) -> builtins.bytes:
        payload = {
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
        if len(data) > LIMIT:
            raise SaveFailed(
                f"the manifest of {self.ckpt} would take {len(data)} bytes, at most {LIMIT} are read back. "
                "Keep large numbers of values in tensors or numpy arrays, not in lists."
            )
        return data

    @classmethod
    def from_bytes(cls, data: builtins.bytes) -> Manifest:
        """The manifest these bytes are; `CkptCorrupt` for any others, `CkptMismatch` for those of a newer version."""
        payload = unseal("manifest", data)
        found = payload.pop("format", None)
        if type(found) is int and found > FORMAT:
            # Not corrupt: going back to an older ckpt, or deleting this one, would lose good work.
            raise CkptMismatch(
                f"the ckpt was written by a newer migrator: format {found}, this one reads {FORMAT}. "
                "Update the package, or start without the ckpt: MIGRATOR_RESUME=never."
            )
        if type(found) is not int or found not in READABLE:
            raise CkptCorrupt(f"the manifest has the format {found!r:.80}; expected one of {READABLE}")
        _expect_keys(payload, cls.__dataclass_fields__, "the manifest")
        return cls(
            generation=_count(payload["generation"], "generation", least=1),
            step=_count(payload["step"], "step"),
            job=_typed(payload["job"], str, "job"),
            ranks=_count(payload["ranks"], "ranks", least=1),
            parts=parts_from(payload["parts"]),
            objects=objects_from(payload["objects"]),
            extra=_typed(payload["extra"], dict, "extra"),
            written=_typed(payload["written"], dict, "written"),
        )


def own_name(rank: int, attempt: int = 1) -> str:
    """The file of what one rank has for itself."""
    return f"own-of-{_by(rank, attempt)}.safetensors"


def _by(rank: int, attempt: int) -> str:
    return f"rank-{rank:05d}" + (f"-{attempt}" if attempt > 1 else "")


def ckpt_name(generation: int, step: int) -> str:
    return f"{generation:06d}-{step:012d}"


def parse_ckpt_name(name: str) -> tuple[int, int] | None:
    """(generation, step); None if it is not the name of a ckpt."""
    match = _CKPT.fullmatch(name)
    if match is None:
        return None
    found = int(match[1]), int(match[2])
    return found if max(found) < _COUNT_MAX and ckpt_name(*found) == name else None


def part_name(index: int, count: int, *, rank: int | None = None, attempt: int = 1) -> str:
    """The file of a share. With several ranks it says who wrote it, so that none ever writes over another's."""
    return f"part-{index:05d}-of-{count:05d}{'' if rank is None else '-' + _by(rank, attempt)}.safetensors"


def is_part_name(name: str) -> bool:
    """Whether a file of this name can be a part."""
    return _PART.fullmatch(name) is not None


def seal(kind: str, payload: Mapping[str, Any]) -> bytes:
    """JSON with its digest in front."""
    body = _compact(payload)
    return b'{"digest":"%s","%s":%s}\n' % (_digest(body), kind.encode("ascii"), body)


def unseal(kind: str, data: bytes) -> dict[str, Any]:
    """What was sealed, if these are, to the last bit, the bytes that `seal` made."""
    head, middle, tail = b'{"digest":"', b'","%s":' % kind.encode("ascii"), b"}\n"
    start = len(head) + 32 + len(middle)
    body = data[start : -len(tail)]
    if data != head + data[len(head) : len(head) + 32] + middle + body + tail:
        raise CkptCorrupt(f"the {kind} does not have the form of one ({len(data)} bytes)")
    if data[len(head) : len(head) + 32] != _digest(body):
        raise CkptCorrupt(f"the {kind} does not have the digest it claims")
    try:
        payload = json.loads(body)
        # Double keys, other blanks, other ways to write a number: none of ours writes them.
        is_ours = isinstance(payload, dict) and _compact(payload) == body
    except (ValueError, RecursionError) as error:
        raise CkptCorrupt(f"the {kind} is no JSON: {error!r:.200}") from error
    if not is_ours:
        raise CkptCorrupt(f"the {kind} is JSON of another form than ours")
    return dict(payload)


def _compact(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("ascii")


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_128(body).hexdigest().encode("ascii")


def parts_from(found: Any) -> tuple[PartRecord, ...]:
    """The parts that a manifest or a rank's record names, or `CkptCorrupt`."""
    parts = tuple(_part(part) for part in _typed(found, list, "parts"))
    if len({part.name for part in parts}) != len(parts):
        raise CkptCorrupt("the manifest names a part twice")
    return parts


def _part(found: Any) -> PartRecord:
    part = _typed(found, dict, "part")
    _expect_keys(part, ("name", "bytes", "digest", "blocks"), "a part")
    name = _typed(part["name"], str, "name of a part")
    match = _PART.fullmatch(name)
    if match is None or (match[1] is not None and int(match[1]) >= int(match[2])):
        raise CkptCorrupt(f"the manifest names the part {name!r:.80}; expected part-<i>-of-<n>.safetensors")
    size = _count(part["bytes"], f"size of {name}")
    blocks = _typed(part["blocks"], list, f"blocks of {name}")
    if len(blocks) != block_count(size):
        raise CkptCorrupt(f"the manifest has {len(blocks)} block digests for {size} bytes of {name}")
    for digest in (part["digest"], *blocks):
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise CkptCorrupt(f"the manifest has {digest!r:.80} as a digest in {name}")
    return PartRecord(name, size, part["digest"], tuple(blocks))


def objects_from(found: Any) -> dict[str, dict[str, Any]]:
    """What a manifest or a rank's record says of registered objects, or `CkptCorrupt`."""
    objects: dict[str, dict[str, Any]] = _typed(found, dict, "objects")
    for name, entry in objects.items():
        _expect_keys(_typed(entry, dict, name), ("kind", "tree"), name)
        _typed(entry["kind"], str, f"kind of {name}")
    return objects


def _typed(value: Any, kind: type[Any], what: str) -> Any:
    if type(value) is not kind:
        raise CkptCorrupt(f"the manifest has {value!r:.80} as {what:.80}; expected {kind.__name__}")
    return value


def _count(value: Any, what: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _COUNT_MAX:
        raise CkptCorrupt(f"the manifest has {value!r:.80} as {what}; expected an integer of at least {least}")
    return value


def _expect_keys(found: Mapping[str, Any], expected: Any, what: str) -> None:
    if found.keys() != set(expected):
        missing, more = sorted(set(expected) - found.keys()), sorted(found.keys() - set(expected))
        raise CkptCorrupt(f"{what:.80} lacks {missing} and has {more!s:.200} too much")
