"""The manifest is read as it was written, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.ckpt import manifest as module
from migrator.ckpt.codec import encode
from migrator.ckpt.digests import BLOCK
from migrator.ckpt.manifest import FORMAT, READERS, Manifest, PartRecord
from migrator.ckpt.names import part_name
from migrator.ckpt.sealed import seal, unseal
from migrator.errors import CkptCorrupt, CkptMismatch, SaveFailed


def example() -> Manifest:
    return Manifest(
        generation=7,
        step=412,
        job="mnist",
        ranks=2,
        parts=(
            PartRecord(part_name(0, 2), 2 * BLOCK + 1, "0" * 32, ("1" * 32, "2" * 32, "3" * 32), (4096, "5" * 32)),
            PartRecord(part_name(1, 2), 0, "4" * 32, ()),
        ),
        objects={"model": {"kind": "module", "tree": {"lr": 0.1, "größe": [1, None, "\ud800"]}}},
        extra={"random": {"0": {"!": "tuple", "v": [1]}}},
        written={"time": 1758715678.25, "host": "pod-0", "pid": 1},
    )


def test_a_manifest_comes_back_as_it_was() -> None:
    """Everything it says, through its bytes."""
    assert Manifest.from_bytes(example().to_bytes()) == example()
    assert example().ckpt == "000007-000000000412"
    assert example().bytes == 2 * BLOCK + 1


def test_its_form_is_one_line_with_the_digest_in_front() -> None:
    """Anybody can check and read it without this package."""
    data = example().to_bytes()
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 1
    read = json.loads(data)
    assert list(read) == ["digest", "manifest"]
    payload = json.dumps(read["manifest"], separators=(",", ":")).encode()
    assert xxhash.xxh3_128(payload).hexdigest() == read["digest"]
    assert read["manifest"]["format"] == 2


def test_what_is_kept_beside_the_fields_makes_no_other_one_of_it() -> None:
    """Nor has anybody to read it in a log."""
    found = Manifest.from_bytes(example().to_bytes())
    part = found.parts[0]
    assert found.as_read
    assert found == replace(found, as_read={})
    assert part == replace(part, as_read={}, tensor_digests={"w": b"1"})
    shown = repr(replace(found, parts=(replace(part, tensor_digests={"w": b"1"}),)))
    assert "as_read" not in shown
    assert "tensor_digests" not in shown


def test_what_only_the_writer_knows_is_not_in_it() -> None:
    """Digests of tensors are for the proof before the commit."""
    part = replace(example().parts[0], tensor_digests={"w": b"12345678"})
    assert replace(example(), parts=(part,)).to_bytes() == replace(example(), parts=example().parts[:1]).to_bytes()


def test_every_flipped_bit_is_found() -> None:
    """Each of the bits, in the digest and in the frame too."""
    data = bytearray(example().to_bytes())
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(CkptCorrupt):
                Manifest.from_bytes(bytes(data))
            data[at] ^= 1 << bit
    assert Manifest.from_bytes(bytes(data)) == example()


def test_every_cut_and_every_appendix_is_found() -> None:
    """A torn write, or a second one behind the first."""
    data = example().to_bytes()
    for end in range(len(data)):
        with pytest.raises(CkptCorrupt):
            Manifest.from_bytes(data[:end])
    for more in (b"\n", b" ", b"\0", data):
        with pytest.raises(CkptCorrupt):
            Manifest.from_bytes(data + more)


def changed(**changes: Any) -> bytes:
    """A manifest with a true digest that says something else; None takes a field away."""
    payload = json.loads(example().to_bytes())["manifest"] | changes
    return seal("manifest", {key: value for key, value in payload.items() if value is not None})


def part(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": part_name(0, 1), "bytes": 5, "digest": "0" * 32, "blocks": ["1" * 32]} | changes]


def test_the_changed_example_is_fine_without_a_change() -> None:
    """The cases below fail for what they change."""
    assert Manifest.from_bytes(changed()) == example()
    assert Manifest.from_bytes(changed(parts=part())).parts[0].bytes == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 0},
        {"generation": -1},
        {"generation": 7.0},
        {"generation": True},
        {"generation": 2**70},
        {"step": -1},
        {"step": "412"},
        {"job": 1},
        {"job": None},
        {"ranks": 0},
        {"format": 0},
        {"format": None},
        {"format": True},
        {"format": "1"},
        {"objects": []},
        {"objects": {"model": {"kind": "module"}}},
        {"objects": {"model": {"tree": 1, "more": 1}}},
        {"objects": {"model": {"kind": 1, "tree": 1}}},
        {"objects": {"model": 1}},
        {"extra": []},
        {"written": "now"},
        {"parts": {}},
        {"parts": [1]},
        {"parts": part(name="../part-00000-of-00001.safetensors")},
        {"parts": part(name="part-00000-of-00001.safetensors/..")},
        {"parts": part(name="part-00000-of-00001.safetensors\n")},
        {"parts": part(name="part-00001-of-00001.safetensors")},
        {"parts": part(name="part-\u0660\u0660\u0660\u0660\u0660-of-00001.safetensors")},
        {"parts": part(name="manifest.json")},
        {"parts": part(name=1)},
        {"parts": part(bytes=-1)},
        {"parts": part(bytes=5.0)},
        {"parts": part(bytes=0)},
        {"parts": part(bytes=BLOCK + 1)},
        {"parts": part(digest="0" * 31)},
        {"parts": part(digest="A" * 32)},
        {"parts": part(blocks=["x" * 32])},
        {"parts": part(blocks=[1])},
        {"parts": part(blocks="1" * 32)},
        {"parts": [{"name": part_name(0, 1), "bytes": 5, "digest": "0" * 32, "more": 1}]},
        {"parts": part() * 2},
    ],
    ids=repr,
)
def test_what_cannot_be_is_corrupt_even_with_a_true_digest(changes: dict[str, Any]) -> None:
    """Types, ranges, names that lead elsewhere, fields too few."""
    with pytest.raises(CkptCorrupt):
        Manifest.from_bytes(changed(**changes))


def test_a_newer_format_says_so() -> None:
    """Whoever rolled back the package learns what to do; it is no damage, and no reason to take an older ckpt."""
    with pytest.raises(CkptMismatch, match=r"newer migrator: format 3.*Update"):
        Manifest.from_bytes(changed(format=3))


@pytest.mark.parametrize("missing", ["generation", "step", "job", "ranks", "parts", "objects", "extra", "written"])
def test_a_manifest_that_lacks_a_field_is_corrupt(missing: str) -> None:
    """And says which."""
    with pytest.raises(CkptCorrupt, match=f"lacks {missing}"):
        Manifest.from_bytes(changed(**{missing: None}))


def test_the_format_before_is_read() -> None:
    """It has less to say: no strides, and no numpy arrays in parts. Written again it is of the present format."""
    found = Manifest.from_bytes(changed(format=1))
    assert found == example()
    assert found.to_bytes() == changed()


def test_the_format_that_is_written_is_the_newest_that_is_read() -> None:
    """Of each there is a reader."""
    assert max(READERS) == FORMAT
    assert sorted(READERS) == list(range(1, FORMAT + 1))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1}',
        b'{"a":1,"a":1}',
        b'{"a":1e0}',
        b'{"a":NaN}',
        b'{"a":"\xc3\xa4"}',
        b'{"a":"\\u0061"}',
        b"[]",
        b"1",
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b"\xff\xfe{\0}\0",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_json_of_another_form_is_corrupt(body: bytes) -> None:
    """None of ours writes blanks, double keys, nan or other spellings, and depth does not end the process."""
    data = b'{"digest":"%s","manifest":%s}\n' % (xxhash.xxh3_128(body).hexdigest().encode(), body)
    with pytest.raises(CkptCorrupt):
        unseal("manifest", data)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda body: b'{"digest":"' + body))
def test_any_bytes_are_corrupt_and_nothing_worse(data: bytes) -> None:
    """Nothing but CkptCorrupt leaves the reader."""
    with pytest.raises(CkptCorrupt):
        Manifest.from_bytes(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(Manifest.__dataclass_fields__)), json_values)
def test_any_value_in_any_field_is_read_or_corrupt(field: str, value: Any) -> None:
    """A digest proves that nothing changed, not that it makes sense."""
    try:
        Manifest.from_bytes(changed(**{field: value}))
    except CkptCorrupt:
        pass


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.integers(FORMAT + 1, 1 << 70))
def test_whatever_else_a_newer_format_says_it_is_no_damage(payload: dict[str, Any], number: int) -> None:
    """It may have none of the fields that this version knows, or others of the same names."""
    with pytest.raises(CkptMismatch, match=r"newer migrator.*Update"):
        Manifest.from_bytes(seal("manifest", {**payload, "format": number}))


def with_more(draw: Callable[[st.SearchStrategy[Any]], Any], fields: dict[str, Any]) -> dict[str, Any]:
    """These fields and some that nobody knows, anywhere among them."""
    more = draw(st.dictionaries(st.text(max_size=5), json_values, max_size=2))
    names = draw(st.permutations([*fields, *(name for name in more if name not in fields)]))
    return {name: fields.get(name, more.get(name)) for name in names}


def known(found: Manifest) -> Manifest:
    """Without what this version does not know of its objects."""
    objects = {name: {key: entry[key] for key in ("kind", "tree")} for name, entry in found.objects.items()}
    return replace(found, objects=objects)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_fields_that_are_not_known_change_nothing_and_are_kept(data: st.DataObject) -> None:
    """In the manifest, in a part, in an object: what a later version of this format says besides, in any order."""
    payload = json.loads(example().to_bytes())["manifest"]
    payload["parts"] = [with_more(data.draw, part) for part in payload["parts"]]
    payload["objects"] = {name: with_more(data.draw, entry) for name, entry in payload["objects"].items()}
    sealed = seal("manifest", with_more(data.draw, payload))

    found = Manifest.from_bytes(sealed)

    assert known(found) == example()
    assert found.to_bytes() == sealed
    # What this version changes is written as it is now.
    later = json.loads(replace(found, step=413).to_bytes())["manifest"]
    assert later == {**json.loads(sealed)["manifest"], "step": 413}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_every_object_that_is_json_survives(tree: dict[str, Any]) -> None:
    """Floats to the last bit, text with whatever characters."""
    found = replace(example(), objects={"a": {"kind": "dict", "tree": tree}})
    assert Manifest.from_bytes(found.to_bytes()) == found


def test_the_deepest_tree_fits_into_a_manifest() -> None:
    """What registration lets pass, the manifest can hold and read back."""
    value: Any = {}
    for _ in range(99):
        value = {1: value}
    found = replace(
        example(), objects={"a": {"kind": "dict", "tree": encode(value, put=lambda tensor, path: None, path="a")}}
    )
    assert Manifest.from_bytes(found.to_bytes()) == found


def test_a_manifest_too_large_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better to fail at the save, with advice, than at the load."""
    monkeypatch.setattr(module, "MANIFEST_LIMIT", 100)
    with pytest.raises(SaveFailed, match="tensors"):
        example().to_bytes()


def test_a_manifest_as_large_as_is_read_back_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that is a byte larger: nobody would load it."""
    manifest = Manifest(1, 10, "job", 1, (), {})
    size = len(manifest.to_bytes())
    monkeypatch.setattr("migrator.ckpt.manifest.MANIFEST_LIMIT", size)
    assert len(manifest.to_bytes()) == size
    monkeypatch.setattr("migrator.ckpt.manifest.MANIFEST_LIMIT", size - 1)
    with pytest.raises(SaveFailed, match=f"would take {size} bytes, at most {size - 1}"):
        manifest.to_bytes()


def test_a_manifest_with_a_number_that_no_name_holds_is_corrupt() -> None:
    """Name and manifest agree on what is too large."""
    last = (1 << 62) - 1
    assert Manifest.from_bytes(Manifest(1, last, "job", 1, (), {}).to_bytes()).step == last
    with pytest.raises(CkptCorrupt, match="step"):
        Manifest.from_bytes(Manifest(1, last + 1, "job", 1, (), {}).to_bytes())
