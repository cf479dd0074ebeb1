"""Notes of the memory that lives use: written, changed in place, read back, and never believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt.generations import numbers
from migrator.ckpt.memory_note import MemoryNote, change_note, delete_note, forget_notes, notes_of, put_note
from migrator.ckpt.names import memory_note_name, parse_memory_note_name
from migrator.errors import StorageNotFoundError
from migrator.storage.posix import PosixStorage
from tests.support.volume import live, names_in

NOTE = MemoryNote(
    peak=5, limit=9, copy=2, copied=1, kills=0, killed=0, container="0b8c5f9e-2c9b-4a3b-9d4c/1234567", pod="train-7d4fq"
)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    storage = PosixStorage(tmp_path / "root", "job")
    live(storage)
    return storage


def test_a_note_comes_back(storage: PosixStorage) -> None:
    """Of each pod of a life its own; of other lives none."""
    other = replace(NOTE, peak=(1 << 62) - 1, limit=None, kills=None, killed=3)
    put_note(storage, 1, 0, NOTE)
    put_note(storage, 1, 12, other)
    put_note(storage, 2, 0, NOTE)

    assert notes_of(storage, 1) == {0: NOTE, 12: other}
    assert notes_of(storage, 3) == {}
    delete_note(storage, 1, 0)
    delete_note(storage, 1, 0)
    assert notes_of(storage, 1) == {12: other}


def test_a_note_is_changed_in_place(storage: PosixStorage) -> None:
    """Whatever it says it has as many bytes, also with names that are longer than any."""
    put_note(storage, 1, 0, NOTE)
    longer = replace(NOTE, peak=(1 << 62) - 1, pod="\u2603" * 1000, container="\u2603" * 1000)
    change_note(storage, 1, 0, longer)

    assert notes_of(storage, 1) == {0: replace(longer, pod="\u2603" * 64, container="\u2603" * 64)}
    assert len(longer.to_bytes()) == len(NOTE.to_bytes())
    with pytest.raises(StorageNotFoundError):
        change_note(storage, 1, 5, NOTE)


def test_a_note_is_no_record_of_a_life(storage: PosixStorage) -> None:
    """It takes no number; so a version that does not know it takes no notice of it."""
    put_note(storage, 7, 3, NOTE)

    assert numbers(storage) == {1}


def test_notes_of_lives_that_are_over_are_deleted(storage: PosixStorage) -> None:
    """And no others."""
    for generation, rank in ((1, 0), (1, 5), (2, 0), (3, 0)):
        put_note(storage, generation, rank, NOTE)
    forget_notes(storage, {1, 3})

    assert names_in(storage.directory / "generations") == ["000001.json", "000002.memory-00000"]


@pytest.mark.parametrize("name", ["000001.memory", "1.memory-0", "000001.memory-1", "000001.memory-00001.tmp", "x"])
def test_other_names_are_none_of_notes(name: str) -> None:
    """Only what `memory_note_name` makes."""
    assert parse_memory_note_name(name) is None
    assert parse_memory_note_name(memory_note_name(1, 0).rpartition("/")[2]) == (1, 0)
    assert parse_memory_note_name(memory_note_name(1234567, 123456).rpartition("/")[2]) == (1234567, 123456)


SAYS: dict[str, Any] = json.loads(NOTE.to_bytes())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\0",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        *(
            json.dumps({**SAYS, name: value}).encode()
            for name in ("peak", "copy", "copied", "killed")
            for value in (None, -1, 1.5, True, "5", [], 1 << 62, float("nan"))
        ),
        json.dumps({**SAYS, "limit": -1}).encode(),
        json.dumps({**SAYS, "kills": "x"}).encode(),
        json.dumps({name: value for name, value in SAYS.items() if name != "pod"}).encode(),
    ],
    ids=lambda text: text[:12].decode("latin-1") + str(len(text)),
)
def test_what_is_no_note_is_none(storage: PosixStorage, text: bytes) -> None:
    """A note that was cut off, or that somebody else has written."""
    put_note(storage, 1, 0, NOTE)
    (storage.directory / memory_note_name(1, 1)).write_bytes(text)

    assert notes_of(storage, 1) == {0: NOTE}


def test_what_is_not_known_of_a_note_is_ignored(storage: PosixStorage) -> None:
    """A newer version may say more."""
    text = json.dumps({**SAYS, "swap": 7}).encode()
    (storage.directory / "generations" / "000001.memory-00000").write_bytes(text)

    assert notes_of(storage, 1) == {0: NOTE}
