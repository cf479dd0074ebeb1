"""Who of several ranks writes what, and how that becomes one ckpt.

Replicated tensors are divided into shares, one for each rank; a rank that is done
also writes shares that others have not written. Everything else (random states,
metrics, running statistics, the place in the loop) is a rank's own, and each
rank writes it for itself. A rank lists what it has written in a record beside its
parts. The manifest is made of these records, by the first rank that sees them
complete.

Only records of the same safe point, of the same plan and with the same digests
of the replicated tensors are combined.

The price: if ranks hold different tensors where all should hold the same, on
purpose or not, those of the lowest rank are saved for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest, PartRecord
from migrator.ckpt.names import MANIFEST, file_in, parse_rank_record_name, rank_record_name
from migrator.ckpt.point import Point
from migrator.ckpt.rank_record import RankRecord
from migrator.errors import CkptCorrupt, CkptMismatch, StorageError
from migrator.storage.base import Storage

SHARE_BYTES = 64 << 20
"""Bytes of the smallest share: below that another file costs more than it saves."""


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


class Exchange(Protocol):
    """How records get from rank to rank."""

    def put(self, ckpt: str, rank: int, data: bytes) -> None: ...

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        """The records of these ranks, as far as they are there."""

    def is_committed(self, ckpt: str) -> bool: ...

    def forget(self, ckpt: str) -> None:
        """The ckpt is committed: the records of it may be deleted."""


class OnStorage:
    """Records lie beside the parts: this needs nothing but a root that all ranks see."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def put(self, ckpt: str, rank: int, data: bytes) -> None:
        self._storage.put(file_in(ckpt, rank_record_name(rank)), data, exclusive=False)

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        there = {parse_rank_record_name(name) for name in self._storage.list(ckpt)}
        found = {}
        for rank in ranks & there:
            try:
                found[rank] = self._storage.get(file_in(ckpt, rank_record_name(rank)), limit=MANIFEST_LIMIT)
            except StorageError:
                continue  # replaced or deleted at this moment
        return found

    def is_committed(self, ckpt: str) -> bool:
        return MANIFEST in self._storage.list(ckpt)

    def forget(self, ckpt: str) -> None:
        pass  # retention takes the records with the ckpt


class Gathering:
    """The records of one save, as one rank has read them so far."""

    def __init__(self, exchange: Exchange, ckpt: str, plan: Plan, mine: RankRecord) -> None:
        self._exchange = exchange
        self._ckpt = ckpt
        self._plan = plan
        self._mine = mine
        self._found: dict[int, RankRecord] = {}
        self.newer: dict[int, str] = {}
        """Ranks whose records this version cannot read, and why."""

    def look(self, size: int) -> None:
        """Read the new records. While a share is missing the known ones as well: their ranks may write it."""
        known = set(self._found) if not self.missing() else set()
        for rank, data in self._exchange.get(self._ckpt, set(range(size)) - known - {self._mine.rank}).items():
            try:
                record = RankRecord.from_bytes(data)
            except CkptMismatch as error:
                self.newer[rank] = str(error)
                continue
            except CkptCorrupt:
                continue
            is_of_this = record.rank == rank and record.at == self._plan.at and record.plan == self._plan.digest
            # A manifest needs both.
            if is_of_this and record.extra.keys() >= {"random", "loop"}:
                self._found[rank] = record

    @property
    def shares(self) -> int:
        """How many shares the plan has."""
        return len(self._plan.shares)

    def add(self, mine: RankRecord) -> None:
        """This rank has written more than before."""
        self._mine = mine

    @property
    def mine(self) -> RankRecord:
        return self._mine

    @property
    def records(self) -> dict[int, RankRecord]:
        """All records of this safe point and plan, lowest rank first."""
        return dict(sorted({**self._found, self._mine.rank: self._mine}.items()))

    def alike(self) -> dict[int, RankRecord]:
        """The records of ranks that hold the same tensors as this one."""
        return {rank: record for rank, record in self.records.items() if record.same == self._mine.same}

    def unlike(self) -> dict[int, list[str]]:
        """Ranks that hold other tensors than this one, and the objects in which they differ."""
        return {
            rank: sorted(name for name in self._mine.same if self._mine.same[name] != record.same.get(name))
            for rank, record in self.records.items()
            if record.same != self._mine.same
        }

    def missing(self) -> list[int]:
        """The shares that no rank has written yet, beginning with the one after this rank's own."""
        written = {share for record in self.alike().values() for share in record.shares}
        count, mine = len(self._plan.shares), self._plan.share_of(self._mine.rank) or 0
        return [share for i in range(count) if (share := (mine + i) % count) not in written]

    def manifest(self, *, generation: int, job: str, ranks: int, written: dict[str, Any]) -> Manifest:
        """One ckpt of all records that are alike. A rank that has none gets the lowest rank's own state at the load."""
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
