"""Lives that went on before a save of an earlier one was committed: what is known of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt.catalog import ckpts
from migrator.ckpt.continuation import go_on, gone_on_without
from migrator.ckpt.generations import claim
from migrator.ckpt.names import ckpt_name, note_name
from migrator.storage.posix import PosixStorage
from tests.support.volume import save


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path / "root", "job")


def begin(storage: PosixStorage, *, fresh: bool = False) -> list[str]:
    """A life that looks for what it may load."""
    generation = claim(storage, fresh=fresh, about={})
    return go_on(storage, generation.number, lambda: ckpts(storage, generation.lineage))


def test_who_began_before_a_ckpt_does_not_have_it(storage: PosixStorage) -> None:
    """Whatever it went on from; who has it, or comes later, is no reason to say anything."""
    begin(storage)
    save(storage, 1, 10)
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None

    assert begin(storage) == [ckpt_name(1, 10)]
    save(storage, 1, 20)
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None
    assert gone_on_without(storage, 1, ckpt_name(1, 20)) == (
        f"a later life of the job (generation 2) went on from {ckpt_name(1, 10)} and does not have it"
    )
    assert gone_on_without(storage, 2, ckpt_name(2, 30)) is None


def test_the_note_says_that_a_life_looks_again_until_it_has(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each further look, and without that word when two looks were the same. Each note replaces the last."""
    notes: list[dict[str, Any]] = []
    put = PosixStorage.put

    def noted(of: PosixStorage, name: str, data: bytes, **how: Any) -> None:
        put(of, name, data, **how)
        notes.append(json.loads(of.get(note_name(2))))

    monkeypatch.setattr(PosixStorage, "put", noted)
    looks = iter([[], ["000001-000000000005"], ["000001-000000000005", "000001-000000000003"]])

    assert go_on(storage, 2, lambda: next(looks)) == ["000001-000000000005", "000001-000000000003"]
    assert notes == [
        {"from": None, "looks": True},
        {"from": "000001-000000000005", "looks": True},
        {"from": "000001-000000000005"},
    ]


def test_of_several_later_lives_the_last_one_counts(storage: PosixStorage) -> None:
    """The ones between may have been lost as well."""
    for _ in range(2):
        begin(storage)
    save(storage, 1, 10)
    begin(storage)
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None
    save(storage, 1, 20)
    assert "generation 3" in str(gone_on_without(storage, 1, ckpt_name(1, 20)))


def test_a_life_that_begins_anew_has_nothing(storage: PosixStorage) -> None:
    """The lives behind it continue that one."""
    begin(storage)
    save(storage, 1, 10)
    begin(storage, fresh=True)

    assert gone_on_without(storage, 1, ckpt_name(1, 10)) == (
        "a later life of the job (generation 2) began anew and does not have it"
    )


def test_a_life_that_still_looks_will_find_it(storage: PosixStorage) -> None:
    """It has its number, and waits for the very save that is being made."""
    begin(storage)
    claim(storage, fresh=False, about={})
    save(storage, 1, 10)

    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None


def test_a_ckpt_that_comes_while_a_life_looks_is_either_found_or_said_to_be_late(storage: PosixStorage) -> None:
    """Between its first look and its note: the second look finds it."""
    begin(storage)
    generation = claim(storage, fresh=False, about={})
    looks: list[str | None] = []

    def look() -> list[str]:
        found = ckpts(storage, generation.lineage)
        if not looks:
            save(storage, 1, 10)  # committed, and looked for a later life, before there is a note
            looks.append(gone_on_without(storage, 1, ckpt_name(1, 10)))
        return found

    assert go_on(storage, generation.number, look) == [ckpt_name(1, 10)]
    assert looks == [None]
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"from":7}', b"[" * 100_000])
def test_a_note_that_cannot_be_read_is_no_sign_that_all_is_well(storage: PosixStorage, text: bytes) -> None:
    """A later life has looked, and it is not known what it found."""
    begin(storage)
    begin(storage)
    storage.put("generations/000002.from", text, exclusive=False)
    save(storage, 1, 10)

    assert "does not have it" in (gone_on_without(storage, 1, ckpt_name(1, 10)) or "")


def note_of_second_life(storage: PosixStorage, **note: object) -> None:
    storage.put("generations/000002.from", json.dumps(note).encode(), exclusive=False)


@pytest.mark.parametrize("origin", [ckpt_name(1, 10), ckpt_name(1, 5), None])
def test_a_life_that_looks_once_more_is_waited_for(
    storage: PosixStorage, origin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its note says before may still be mended: the ckpt came between its two looks."""
    begin(storage)
    begin(storage)
    save(storage, 1, 10)
    note_of_second_life(storage, looks=True, **{"from": ckpt_name(1, 5)})
    monkeypatch.setattr(time, "sleep", lambda _: note_of_second_life(storage, **{"from": origin}))

    late = gone_on_without(storage, 1, ckpt_name(1, 10))
    assert (late is None) == (origin == ckpt_name(1, 10))


def test_a_life_that_died_while_it_looked_is_not_waited_for_long(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would have found is not known: that is not said to be well."""
    begin(storage)
    begin(storage)
    save(storage, 1, 10)
    note_of_second_life(storage, looks=True, **{"from": ckpt_name(1, 5)})
    monkeypatch.setattr("migrator.ckpt.continuation._LOOKS_S", 0.05)

    assert "does not have it" in (gone_on_without(storage, 1, ckpt_name(1, 10)) or "")
