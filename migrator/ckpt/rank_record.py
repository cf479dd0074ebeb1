"""What one rank has written, and what is its own: JSON beside the parts. The manifest is made of these records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from migrator.ckpt.manifest import PartRecord, objects_from, parts_from
from migrator.ckpt.names import COUNT_MAX
from migrator.ckpt.point import Point
from migrator.ckpt.sealed import check_format, seal, unseal
from migrator.errors import CkptCorrupt

RANK_FORMAT = 1
"""Of the record of a rank. As in the manifest, fields that may be ignored need no new number."""

_SAME_VERSION = "run the same version on all ranks"

_TYPES = {"rank": int, "at": list, "plan": str, "same": dict, "objects": dict, "extra": dict, "shares": dict}


@dataclass(frozen=True)
class RankRecord:
    """What one rank has written, and what is its own."""

    rank: int
    at: Point
    plan: str
    same: Mapping[str, str]
    """The digest of each registered object's shared tensors."""
    objects: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    shares: Mapping[int, PartRecord] = field(default_factory=dict)
    own: PartRecord | None = None
    as_read: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All fields as they were read: unknown ones are written again."""

    def to_bytes(self) -> bytes:
        return seal(
            "rank",
            {
                **self.as_read,
                "format": RANK_FORMAT,
                "rank": self.rank,
                "at": list(self.at),
                "plan": self.plan,
                "same": dict(self.same),
                "objects": self.objects,
                "extra": self.extra,
                "shares": {str(share): part.to_json() for share, part in self.shares.items()},
                "own": None if self.own is None else self.own.to_json(),
            },
        )

    @staticmethod
    def from_bytes(data: bytes) -> RankRecord:
        """The record in these bytes; `CkptMismatch` if a newer version wrote them, `CkptCorrupt` if none did."""
        found = unseal("rank", data)
        check_format(found.get("format", 1), range(1, RANK_FORMAT + 1), "what a rank wrote", _SAME_VERSION)
        try:
            wrong = [name for name, kind in _TYPES.items() if type(found[name]) is not kind]
            if wrong:
                raise TypeError(", ".join(wrong))
            step, turn = found["at"]
            numbers = [found["rank"], step, turn, *map(int, found["shares"])]
            if not all(type(number) is int and 0 <= number < COUNT_MAX for number in numbers):
                raise ValueError(f"{numbers!r:.80} are not a rank, a safe point and shares")
            parts = parts_from(list(found["shares"].values()))
            own = None if found["own"] is None else parts_from([found["own"]])[0]
            return RankRecord(
                found["rank"],
                (step, turn),
                found["plan"],
                found["same"],
                objects_from(found["objects"]),
                found["extra"],
                dict(zip(map(int, found["shares"]), parts, strict=True)),
                own,
                found,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CkptCorrupt(f"the record of a rank is not one of ours: {error!r:.200}") from error
