"""Shares, and what is put together of the ranks' records: without processes, for all kinds of ranks and tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.ckpt.manifest import Manifest, PartRecord
from migrator.ckpt.names import own_name, part_name
from migrator.ckpt.rank_record import RANK_FORMAT, RankRecord
from migrator.ckpt.sealed import seal
from migrator.ranks.shares import Gathering, OnStorage, Plan
from migrator.storage.posix import PosixStorage

CKPT = "000001-000000000007"
AT = (7, 0)
NAMES = st.text(min_size=1, max_size=12)
SIZES = st.dictionaries(NAMES, st.integers(0, 1 << 40), max_size=30)
MEMBERS = st.sets(st.integers(0, 40), min_size=1, max_size=12)
BYTES = st.integers(1, 1 << 38)


def part(name: str) -> PartRecord:
    return PartRecord(name, 12, "0" * 32, ("0" * 32,))


# The plan.


@given(SIZES, MEMBERS, BYTES, st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_any_order(sizes: dict[str, int], members: set[int], least: int, dice: Any) -> None:
    """Each rank makes it for itself, from what it has registered and whom it has heard of."""
    items, ranks = list(sizes.items()), list(members)
    plan = Plan.of(AT, members, sizes, share_bytes=least)
    dice.shuffle(items)
    dice.shuffle(ranks)

    assert Plan.of(AT, ranks, dict(items), share_bytes=least) == plan


@given(SIZES, MEMBERS, BYTES)
def test_a_plan_gives_each_tensor_to_one_share_and_each_share_to_one_rank(
    sizes: dict[str, int], members: set[int], least: int
) -> None:
    """And there is always a share, that a ckpt without tensors has somebody to write it too."""
    plan = Plan.of(AT, members, sizes, share_bytes=least)

    assert sorted(name for share in plan.shares for name in share) == sorted(sizes)
    assert 1 <= len(plan.shares) <= len(members)
    having = [rank for rank in sorted(members) if plan.share_of(rank) is not None]
    assert [plan.share_of(rank) for rank in having] == list(range(len(plan.shares)))
    assert having == sorted(members)[: len(having)]
    assert all(plan.share_of(rank) is None for rank in range(45) if rank not in members)


@given(SIZES, MEMBERS, BYTES)
def test_shares_are_balanced(sizes: dict[str, int], members: set[int], least: int) -> None:
    """No two differ by more than the largest tensor, and nothing small is shared out."""
    plan = Plan.of(AT, members, sizes, share_bytes=least)
    filled = [sum(sizes[name] for name in share) for share in plan.shares]

    assert max(filled) - min(filled) <= max(sizes.values(), default=0)
    assert len(plan.shares) == 1 or (len(plan.shares) - 1) * least < sum(sizes.values())
    if sum(sizes.values()) > least and len(members) > 1:
        assert len(plan.shares) > 1


@given(SIZES.filter(bool), MEMBERS, BYTES, st.data())
def test_another_plan_has_another_digest(sizes: dict[str, int], members: set[int], least: int, data: Any) -> None:
    """Of another safe point, other members, one size or one name: nothing of theirs is put together."""
    name = data.draw(st.sampled_from(sorted(sizes)))
    rest = {other: size for other, size in sizes.items() if other != name}
    others = [
        Plan.of((8, 0), members, sizes, share_bytes=least),
        Plan.of((7, 1), members, sizes, share_bytes=least),
        Plan.of(AT, members ^ {3, 41}, sizes, share_bytes=least),
        Plan.of(AT, members, {**sizes, name: sizes[name] + 1}, share_bytes=least),
        Plan.of(AT, members, rest, share_bytes=least),
    ]

    assert Plan.of(AT, members, sizes, share_bytes=least).digest not in {plan.digest for plan in others}


# Putting together.

SAME = {"model": "a" * 32, "optimizer": "b" * 32}
PLAN = Plan.of(AT, [0, 1, 2], {"w": 900, "v": 800, "u": 700}, share_bytes=100)


def record(rank: int, *shares: int, own: bool = False, **more: Any) -> RankRecord:
    """What a rank has written of PLAN, with a state of its own."""
    objects = {"model": {"kind": "module", "tree": "alike"}, "metrics": {"kind": "dict", "tree": [rank]}}
    extra = {"random": f"random {rank}", "loop": f"loop {rank}"}
    made = RankRecord(rank, AT, PLAN.digest, SAME, objects, extra)
    written = {share: part(part_name(share, 3, rank=rank)) for share in shares}
    return replace(made, **{"shares": written, "own": part(own_name(rank)) if own else None, **more})


class Handed:
    """Records that lie where any rank finds them."""

    def __init__(self, **data: bytes) -> None:
        self.data = {int(name.removeprefix("rank")): found for name, found in data.items()}
        self.asked: list[set[int]] = []

    def put(self, ckpt: str, rank: int, data: bytes) -> None:
        self.data[rank] = data

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        self.asked.append(ranks)
        return {rank: data for rank, data in self.data.items() if rank in ranks}

    def is_committed(self, ckpt: str) -> bool:
        return False


def gathered(mine: RankRecord, *others: RankRecord, size: int = 3) -> Gathering:
    exchange = Handed()
    for other in others:
        exchange.put(CKPT, other.rank, other.to_bytes())
    gathering = Gathering(exchange, CKPT, PLAN, mine)
    gathering.look(size)
    return gathering


def put_together(gathering: Gathering, ranks: int = 3) -> Manifest:
    return gathering.manifest(generation=1, job="job", ranks=ranks, written={"host": "h"})


@pytest.mark.parametrize(
    "stranger",
    [
        record(1, 1, at=(6, 0)),
        record(1, 1, at=(7, 1)),
        record(1, 1, plan="c" * 32),
    ],
    ids=["another step", "another round", "another plan"],
)
def test_records_of_another_safe_point_or_plan_do_not_count(stranger: RankRecord) -> None:
    """They are left over from an attempt before this one, in the same directory."""
    gathering = gathered(record(0, 0), stranger, record(2, 2))

    assert list(gathering.records) == [0, 2]
    assert gathering.missing() == [1]


def test_a_record_under_another_rank_s_name_does_not_count() -> None:
    """Nor one that is torn."""
    exchange = Handed(rank1=record(2, 1).to_bytes(), rank2=record(2, 2).to_bytes()[:-9])
    gathering = Gathering(exchange, CKPT, PLAN, record(0, 0))
    gathering.look(3)

    assert list(gathering.records) == [0]
    assert gathering.missing() == [1, 2]


def newer(found: RankRecord) -> bytes:
    """What a rank of a newer version would have written."""
    return seal("rank", {**json.loads(found.to_bytes())["rank"], "format": RANK_FORMAT + 1})


def test_a_record_of_a_newer_version_does_not_count_and_is_told_of() -> None:
    """It is there, so nobody has to wait until it comes."""
    exchange = Handed(rank1=newer(record(1, 1)), rank2=record(2, 2).to_bytes())
    gathering = Gathering(exchange, CKPT, PLAN, record(0, 0))
    gathering.look(3)

    assert list(gathering.records) == [0, 2]
    assert gathering.missing() == [1]
    assert list(gathering.newer) == [1]
    assert "newer migrator" in gathering.newer[1]


def test_ranks_that_hold_other_tensors_are_named_and_nothing_of_theirs_is_used() -> None:
    """Neither their shares nor what is their own; they count as missing."""
    gathering = gathered(record(0, 0, 2), record(1, 1, same={**SAME, "model": "c" * 32}), record(2, 2))

    assert gathering.unlike() == {1: ["model"]}
    assert list(gathering.alike()) == [0, 2]
    assert gathering.missing() == [1]
    gathering.add(record(0, 0, 1, 2))
    manifest = put_together(gathering)
    assert manifest.extra["missing"] == [1]
    assert manifest.extra["random"] == {"0": "random 0", "2": "random 2"}
    assert not [part.name for part in manifest.parts if "-rank-00001" in part.name]


def test_seen_from_the_rank_that_differs_the_others_do() -> None:
    """Each puts together only what is as its own."""
    mine = record(1, 1, same={**SAME, "model": "c" * 32})
    gathering = gathered(mine, record(0, 0), record(2, 2))

    assert gathering.unlike() == {0: ["model"], 2: ["model"]}
    assert list(gathering.alike()) == [1]
    assert gathering.missing() == [2, 0]


def test_a_rank_with_an_object_more_differs_in_that() -> None:
    """Whichever of the two has it."""
    more, less = {**SAME, "ema": "d" * 32}, {"model": SAME["model"]}

    assert gathered(record(0, 0, same=more), record(1, 1)).unlike() == {1: ["ema"]}
    assert gathered(record(0, 0), record(1, 1, same=less)).unlike() == {1: ["optimizer"]}


def test_the_missing_shares_come_in_another_order_on_each_rank() -> None:
    """Two ranks that help do not begin with the same one."""
    assert gathered(record(0)).missing() == [0, 1, 2]
    assert gathered(record(1)).missing() == [1, 2, 0]
    assert gathered(record(2, 2)).missing() == [0, 1]


def test_what_was_found_once_is_read_again_only_while_a_share_is_missing() -> None:
    """A rank that helps replaces its record; when all is there nobody's can matter any more."""
    exchange = Handed(rank1=record(1, 1).to_bytes())
    gathering = Gathering(exchange, CKPT, PLAN, record(0, 0))
    gathering.look(3)
    assert gathering.missing() == [2]
    exchange.put(CKPT, 1, record(1, 1, 2).to_bytes())
    gathering.look(3)

    assert gathering.missing() == []
    gathering.look(3)
    assert exchange.asked[-1] == {2}


@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=5, max_size=5),
    st.sets(st.integers(0, 4), min_size=1),
    st.sets(st.integers(0, 4)),
    st.data(),
)
def test_a_manifest_of_whichever_records_there_are(
    shares: list[set[int]], present: set[int], unlike: set[int], data: Any
) -> None:
    """Every share once, by somebody who holds the same; whoever is not in it is said to be missing."""
    me = data.draw(st.sampled_from(sorted(present)))
    unlike = (unlike & present) - {me}
    made = {
        rank: record(rank, *sorted(shares[rank]), own=rank % 2 == 1, **({"same": {}} if rank in unlike else {}))
        for rank in present
    }
    gathering = gathered(made[me], *(made[rank] for rank in present - {me}), size=5)
    alike = sorted(present - unlike)
    assert sorted(gathering.missing()) == sorted({0, 1, 2} - set().union(*(shares[rank] for rank in alike)))
    if gathering.missing():
        gathering.add(record(me, 0, 1, 2, own=me % 2 == 1))

    manifest = put_together(gathering, ranks=5)

    base = alike[0]
    assert (manifest.generation, manifest.step, manifest.ranks, manifest.job) == (1, 7, 5, "job")
    assert manifest.extra.get("missing", []) == sorted(set(range(5)) - set(alike))
    assert manifest.objects == gathering.records[base].objects
    assert manifest.extra["loop"] == f"loop {base}"
    assert manifest.extra["random"] == {str(rank): f"random {rank}" for rank in alike}
    own = {str(r): {"objects": {"metrics": {"kind": "dict", "tree": [r]}}, "loop": f"loop {r}"} for r in alike[1:]}
    assert manifest.extra.get("own", {}) == own
    names = [part.name for part in manifest.parts]
    assert sorted(int(name[5:10]) for name in names if name.startswith("part-")) == [0, 1, 2]
    assert sorted(name for name in names if name.startswith("own-")) == [own_name(r) for r in alike if r % 2]
    assert {int(name.split("rank-")[1][:5]) for name in names} <= set(alike)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_with_all_ranks_there_nothing_is_said_to_be_missing() -> None:
    """Nor to be a rank's own when all have the same."""
    alike = {"objects": {}, "extra": {"random": "r", "loop": None}}
    manifest = put_together(gathered(record(0, 0, **alike), record(1, 1, **alike), record(2, 2, **alike)))

    assert "missing" not in manifest.extra
    assert {rank: entry["objects"] for rank, entry in manifest.extra["own"].items()} == {"1": {}, "2": {}}


# On storage.


def test_records_lie_beside_the_parts(tmp_path: Path) -> None:
    """Only those asked for, only proper names; a rank may replace its own."""
    storage = PosixStorage(tmp_path, "job")
    exchange = OnStorage(storage)
    assert exchange.get(CKPT, {0, 1}) == {}
    for rank in (0, 1, 12):
        exchange.put(CKPT, rank, b"%d" % rank)
    exchange.put(CKPT, 1, b"anew")
    (storage.directory / CKPT / "rank-1.json").write_bytes(b"no")
    (storage.directory / CKPT / "rank-00002.json.aside").write_bytes(b"no")

    assert exchange.get(CKPT, {1, 2, 12}) == {1: b"anew", 12: b"12"}
    assert not exchange.is_committed(CKPT)
    storage.put(f"{CKPT}/manifest.json", b"{}", exclusive=True)
    assert exchange.is_committed(CKPT)
