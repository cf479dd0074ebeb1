"""What a rank says of its share: read as it was written, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.names import own_name, part_name
from migrator.ckpt.rank_record import RANK_FORMAT, RankRecord
from migrator.ckpt.sealed import seal, unseal
from migrator.errors import CkptCorrupt, CkptMismatch
from migrator.storage.posix import PosixStorage
from tests.unit.ranks.test_shares import NAMES, part, record
from tests.unit.save.test_attempt import FIRST, attempts


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path / "root", "job")


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def records(draw: st.DrawFn) -> RankRecord:
    """Whatever a rank may have to say."""
    rank = draw(st.integers(0, 99999))
    shares = draw(st.sets(st.integers(0, 9), max_size=3))
    digests = st.builds(lambda digest: (digest,), DIGESTS)
    made = {
        share: PartRecord(part_name(share, 10, rank=rank), draw(st.integers(1, 1 << 20)), draw(DIGESTS), draw(digests))
        for share in sorted(shares)
    }
    own = PartRecord(own_name(rank), 5, draw(DIGESTS), draw(digests)) if draw(st.booleans()) else None
    return RankRecord(
        rank,
        (draw(st.integers(0, 1 << 40)), draw(st.integers(0, 9))),
        draw(DIGESTS),
        draw(st.dictionaries(NAMES, DIGESTS, max_size=3)),
        draw(st.dictionaries(NAMES, st.fixed_dictionaries({"kind": NAMES, "tree": TREES}), max_size=3)),
        draw(st.dictionaries(NAMES, TREES, max_size=3)),
        made,
        own,
    )


@given(records())
def test_a_record_comes_back_as_it_was_written(record: RankRecord) -> None:
    """To the last digest."""
    assert RankRecord.from_bytes(record.to_bytes()) == record


MORE = st.dictionaries(NAMES.map("x-{}".format), TREES, max_size=2)


@given(records(), st.data())
def test_what_is_not_known_in_a_record_is_ignored_and_kept(record: RankRecord, data: st.DataObject) -> None:
    """In the record and in its parts, in whatever order; a manifest that is made of it has those of the parts."""
    payload = json.loads(record.to_bytes())["rank"]
    payload["shares"] = {share: {**data.draw(MORE), **entry} for share, entry in payload["shares"].items()}
    sealed = seal("rank", {**data.draw(MORE), **payload, **data.draw(MORE)})

    found = RankRecord.from_bytes(sealed)

    assert found == record
    assert found.to_bytes() == sealed


def test_a_record_of_before_there_were_formats_is_read() -> None:
    """It is of format 1."""
    payload = json.loads(record(1, 1, own=True).to_bytes())["rank"]
    assert payload.pop("format") == RANK_FORMAT == 1

    assert RankRecord.from_bytes(seal("rank", payload)) == record(1, 1, own=True)


@given(st.dictionaries(NAMES, TREES, max_size=3), st.integers(RANK_FORMAT + 1, 1 << 70))
def test_whatever_else_a_newer_record_says_it_is_no_damage(payload: dict[str, Any], number: int) -> None:
    """Ranks of one job run different versions, and that has to be said."""
    with pytest.raises(CkptMismatch, match=r"newer migrator.*same version on all ranks"):
        RankRecord.from_bytes(seal("rank", {**payload, "format": number}))


@pytest.mark.parametrize("number", [0, -1, True, None, 1.0, "1"], ids=repr)
def test_a_record_of_a_format_that_cannot_be_is_corrupt(number: Any) -> None:
    """No rank of ours writes one."""
    payload = json.loads(record(1, 1).to_bytes())["rank"]
    with pytest.raises(CkptCorrupt):
        RankRecord.from_bytes(seal("rank", {**payload, "format": number}))


@given(records(), st.data())
def test_a_record_with_any_byte_changed_or_cut_off_is_corrupt(record: RankRecord, data: Any) -> None:
    """A rank that dies while it writes leaves no record that anybody takes for one."""
    whole = record.to_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place] ^= data.draw(st.integers(1, 255))

    for broken in (bytes(flipped), whole[:place], whole + b"\n"):
        with pytest.raises(CkptCorrupt):
            RankRecord.from_bytes(broken)


@given(st.binary(max_size=200))
def test_garbage_is_no_record(garbage: bytes) -> None:
    """Nothing but what was sealed is read."""
    with pytest.raises(CkptCorrupt):
        RankRecord.from_bytes(garbage)


FIELDS = ["rank", "at", "plan", "same", "objects", "extra", "shares", "own"]


@pytest.mark.parametrize("missing", FIELDS)
def test_a_record_that_lacks_a_field_is_corrupt(missing: str) -> None:
    """One that was sealed properly, by another version perhaps."""
    fields: dict[str, Any] = {
        "rank": 1,
        "at": [7, 0],
        "plan": "",
        "same": {},
        "objects": {},
        "extra": {},
        "shares": {},
        "own": None,
    }
    assert RankRecord.from_bytes(seal("rank", fields)).rank == 1
    del fields[missing]

    with pytest.raises(CkptCorrupt):
        RankRecord.from_bytes(seal("rank", fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("at", 7),
        ("at", [7]),
        ("at", ["x", 0]),
        ("shares", []),
        ("shares", {"first": part(part_name(0, 1)).to_json()}),
        ("shares", {"0": {"name": "../../x", "bytes": 1, "digest": "0" * 32, "blocks": ["0" * 32]}}),
        ("shares", {"0": {**part(part_name(0, 1)).to_json(), "bytes": -1}}),
        ("own", {}),
        ("own", "own-of-rank-00001.safetensors"),
        ("own", {**part(own_name(1)).to_json(), "digest": "short"}),
        ("rank", "one"),
        ("same", []),
        ("objects", []),
        ("extra", None),
        ("plan", None),
    ],
)
def test_a_record_of_another_form_is_corrupt(name: str, value: Any) -> None:
    """Sealed, but not what a rank of ours says: never an error that nobody expects, never a path out of the ckpt."""
    fields: dict[str, Any] = {
        "rank": 1,
        "at": [7, 0],
        "plan": "",
        "same": {},
        "objects": {},
        "extra": {},
        "shares": {},
        "own": None,
    }
    with pytest.raises(CkptCorrupt):
        RankRecord.from_bytes(seal("rank", {**fields, name: value}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": -1},
        {"rank": 1 << 62},
        {"at": [-1, 0]},
        {"at": [10, -1]},
        {"at": [10.0, 0]},
        {"at": [True, 0]},
        {"at": [1 << 62, 0]},
        {"shares": {"-1": {}}},
    ],
    ids=str,
)
def test_a_record_with_numbers_that_are_none_is_corrupt(storage: PosixStorage, wrong: dict[str, Any]) -> None:
    """Each would become part of a name, or an index."""
    attempt = attempts(storage, size=2)[1]
    attempt.share()
    record = unseal("rank", storage.get(f"{FIRST}/rank-00001.json"))
    assert RankRecord.from_bytes(seal("rank", record)).rank == 1
    with pytest.raises(CkptCorrupt, match="not one of ours"):
        RankRecord.from_bytes(seal("rank", record | wrong))


def test_what_is_kept_beside_the_fields_of_a_record_is_not_shown() -> None:
    """It says the same a second time, and a log would have all of it."""
    record = RankRecord(1, (5, 0), "0" * 32, {}, {}, {"random": None, "loop": None}, {}, None)
    assert "as_read" not in repr(RankRecord.from_bytes(record.to_bytes()))
