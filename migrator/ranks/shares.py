"""Who of several ranks writes what, and how that becomes one ckpt.

Large tensors are the same on all ranks: they are shared out, and whoever is done
first writes what others have not written. Everything else (random states,
metrics, running statistics, the place in the loop) is a rank's own, and each
writes it for itself. What a rank has written it says in a record beside its
parts; the manifest is made of these records, by whichever rank sees them
complete first.

Only records of the same safe point, of the same plan and with the same digests
of the shared tensors are put together.

The price: ranks that hold different large tensors, on purpose or not, are seen
as what they are, not alike, and the lowest rank's are saved for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from migrator.ranks.protocol import Point
from migrator.errors import CkptCorrupt, StorageError
from migrator.ckpt.manifest import LIMIT, NAME, Manifest, objects_from, parts_from, seal, unseal
from migrator.ckpt.tensor_file import PartRecord
from migrator.storage.posix import LocalStorage

SHARE_BYTES = 64 << 20
"""Nothing smaller is shared out: a file more costs more than it saves."""

_RECORD = re.compile(r"rank-([0-9]{5})\.json", re.ASCII)
_TYPES = {"rank": int, "at": list, "plan": str, "same": dict, "objects": dict, "extra": dict, "shares": dict}


@dataclass(frozen=True)
class Plan:
    """The shares of one save."""

    at: Point
    members: tuple[int, ...]
    shares: tuple[tuple[str, ...], ...]
    """The names of the tensors in each; the first share is the first member's, and so on."""
    digest: str

    @staticmethod
    def of(at: Point, members: Iterable[int], sizes: Mapping[str, int], *, share_bytes: int | None = None) -> Plan:
        """The same on every rank that holds tensors of these names and sizes."""
        members = tuple(sorted(members))
        least = SHARE_BYTES if share_bytes is None else share_bytes
        count = max(1, min(len(members), -(-sum(sizes.values()) // least)))
        shares: list[list[str]] = [[] for _ in range(count)]
        filled = [0] * count
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            lightest = filled.index(min(filled))
            shares[lightest].append(name)
            filled[lightest] += sizes[name]
        what = repr((at, members, count, sorted(sizes.items())))
        return Plan(at, members, tuple(map(tuple, shares)), xxhash.xxh3_128(what.encode()).hexdigest())

    def share_of(self, rank: int) -> int | None:
        """The number of this rank's share, if it has one."""
        place = self.members.index(rank) if rank in self.members else len(self.shares)
        return place if place < len(self.shares) else None


@dataclass(frozen=True)
class RankRecord:
    """What one rank has written, and what is its own."""

    rank: int
    at: Point
    plan: str
    same: Mapping[str, str]
    """Of each registered object the digest of its shared tensors."""
    objects: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    shares: Mapping[int, PartRecord] = field(default_factory=dict)
    own: PartRecord | None = None

    def to_bytes(self) -> bytes:
        return seal(
            "rank",
            {
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
        """The record these bytes are, or `CkptCorrupt`."""
        found = unseal("rank", data)
        try:
            wrong = [name for name, kind in _TYPES.items() if type(found[name]) is not kind]
            if wrong:
                raise TypeError(", ".join(wrong))
            step, turn = found["at"]
            numbers = [found["rank"], step, turn, *map(int, found["shares"])]
            if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
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
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CkptCorrupt(f"the record of a rank is not one of ours: {error!r:.200}") from error


def is_record_name(name: str) -> bool:
    """Whether a file of this name can be what a rank said of itself."""
    return _RECORD.fullmatch(name) is not None


class Exchange(Protocol):
    """How records get from rank to rank."""

    def put(self, ckpt: str, rank: int, data: bytes) -> None: ...

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        """Those of these ranks that are there."""

    def is_committed(self, ckpt: str) -> bool: ...

    def forget(self, ckpt: str) -> None:
        """It is committed: what was put there for it may go."""


class OnStorage:
    """Beside the parts: needs nothing but the root that all ranks see."""

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage

    def put(self, ckpt: str, rank: int, data: bytes) -> None:
        self._storage.put(f"{ckpt}/rank-{rank:05d}.json", data, exclusive=False)

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        names = {int(match[1]): name for name in self._storage.list(ckpt) if (match := _RECORD.fullmatch(name))}
        found = {}
        for rank in ranks & names.keys():
            try:
                found[rank] = self._storage.get(f"{ckpt}/{names[rank]}", limit=LIMIT)
            except StorageError:
                continue  # replaced, or deleted, this very moment
        return found

    def is_committed(self, ckpt: str) -> bool:
        return NAME in self._storage.list(ckpt)

    def forget(self, ckpt: str) -> None:
        pass  # retention takes the records with the ckpt


class Gathering:
    """The records of one save as they come in, seen from one rank."""

    def __init__(self, exchange: Exchange, ckpt: str, plan: Plan, mine: RankRecord) -> None:
        self._exchange = exchange
        self._ckpt = ckpt
        self._plan = plan
        self._mine = mine
        self._found: dict[int, RankRecord] = {}

    def look(self, size: int) -> None:
        """Take in what is new. A share that is missing may still be taken over by somebody who has a record already."""
        settled = set(self._found) if not self.missing() else set()
        for rank, data in self._exchange.get(self._ckpt, set(range(size)) - settled - {self._mine.rank}).items():
            try:
                record = RankRecord.from_bytes(data)
            except CkptCorrupt:
                continue
            is_of_this = record.rank == rank and record.at == self._plan.at and record.plan == self._plan.digest
            # What a manifest is made of.
            if is_of_this and record.extra.keys() >= {"random", "loop"}:
                self._found[rank] = record

    @property
    def shares(self) -> int:
        """How many there are in all."""
        return len(self._plan.shares)

    def add(self, mine: RankRecord) -> None:
        self._mine = mine

    @property
    def mine(self) -> RankRecord:
        return self._mine

    @property
    def records(self) -> dict[int, RankRecord]:
        """Of this safe point and plan, lowest rank first."""
        return dict(sorted({**self._found, self._mine.rank: self._mine}.items()))

    def alike(self) -> dict[int, RankRecord]:
        """Those that hold the same tensors as this rank."""
        return {rank: record for rank, record in self.records.items() if record.same == self._mine.same}

    def unlike(self) -> dict[int, list[str]]:
        """Which ranks hold other tensors, and in which objects."""
        return {
            rank: sorted(name for name in self._mine.same if self._mine.same[name] != record.same.get(name))
            for rank, record in self.records.items()
            if record.same != self._mine.same
        }

    def missing(self) -> list[int]:
        """The shares that nobody has written yet, those behind this rank's own first."""
        written = {share for record in self.alike().values() for share in record.shares}
        count, mine = len(self._plan.shares), self._plan.share_of(self._mine.rank) or 0
        return [share for i in range(count) if (share := (mine + i) % count) not in written]

    def manifest(self, *, generation: int, job: str, ranks: int, written: dict[str, Any]) -> Manifest:
        """One ckpt of all records that are alike; the lowest rank's own state stands for ranks that have none."""
        alike = self.alike()
        base = next(iter(alike.values()))
        parts: dict[str, PartRecord] = {}
        for share in range(len(self._plan.shares)):
            part = next(record.shares[share] for record in alike.values() if share in record.shares)
            parts[part.name] = part
        missing = sorted(set(range(ranks)) - alike.keys())
        random: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for rank, record in alike.items():
            random[str(rank)] = record.extra["random"]
            if record.own is not None:
                parts[record.own.name] = record.own
            if rank == base.rank:
                continue
            others = {name: entry for name, entry in record.objects.items() if entry != base.objects.get(name)}
            own[str(rank)] = {"objects": others, "loop": record.extra["loop"]}
        return Manifest(
            generation=generation,
            step=self._plan.at[0],
            job=job,
            ranks=ranks,
            parts=tuple(parts.values()),
            objects=base.objects,
            extra={
                "random": random,
                "loop": base.extra["loop"],
                **({"own": own} if own else {}),
                **({"missing": missing} if missing else {}),
            },
            written=written,
        )
