"""Lives of a job: their numbers, which life continues which, and what their records say."""

from __future__ import annotations

import errno
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt import generations
from migrator.ckpt.catalog import ckpts
from migrator.ckpt.generations import Generation, claim, not_claimed, read_about
from migrator.ckpt.names import record_name
from migrator.ckpt.sealed import seal
from migrator.errors import CkptMismatch, StorageError
from migrator.storage.posix import PosixStorage
from tests.support.volume import ABOUT, failing, live, record, save


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path, "job")


def test_lives_are_numbered_and_continue_one_another(storage: PosixStorage) -> None:
    """Each continues the one before it and so all of them."""
    first, second, third = (live(storage) for _ in range(3))
    assert [g.number for g in (first, second, third)] == [1, 2, 3]
    assert [g.continues for g in (first, second, third)] == [None, 1, 2]
    assert third.lineage == (3, 2, 1)
    assert third.proven == {1, 2, 3}


def test_a_life_that_leaves_at_once_leaves_no_trace(storage: PosixStorage) -> None:
    """It sees what it would continue, and nobody sees it."""
    live(storage)
    now = not_claimed(storage, fresh=False)
    assert (now.number, now.continues, now.lineage, now.is_claimed) == (2, 1, (2, 1), False)
    assert not_claimed(storage, fresh=True).lineage == (2,)
    second = live(storage)
    assert second == Generation(2, 1, (2, 1), frozenset({1, 2}))
    assert second.is_claimed
    assert not_claimed(storage, fresh=False).number == 3


def test_a_fresh_start_begins_a_lineage_of_its_own(storage: PosixStorage) -> None:
    """And who comes after continues that, not what was before."""
    live(storage)
    fresh = live(storage, fresh=True)
    assert (fresh.number, fresh.continues, fresh.lineage) == (2, None, (2,))
    assert live(storage).lineage == (3, 2)


def test_a_number_is_claimed_once(storage: PosixStorage) -> None:
    """Lives that start at the same moment get numbers of their own, in one chain."""
    start, lives = threading.Barrier(6), []

    def begin() -> None:
        start.wait()
        lives.append(live(storage))

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lives.sort(key=lambda g: g.number)
    assert [g.number for g in lives] == [1, 2, 3, 4, 5, 6]
    assert [g.continues for g in lives] == [None, 1, 2, 3, 4, 5]


def test_a_life_that_no_listing_shows_yet_is_continued(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may list an older state of the directory; that the number is taken is proof enough."""
    live(storage)
    live(storage)
    real = storage.list
    monkeypatch.setattr(
        storage, "list", lambda directory="": [n for n in real(directory) if not n.startswith("000002")]
    )
    now = live(storage)
    assert (now.number, now.continues, now.lineage) == (3, 2, (3, 2, 1))


def test_the_record_says_who_lived(storage: PosixStorage) -> None:
    """Readable without this package."""
    live(storage)
    found = json.loads(record(storage, 1).read_text())["generation"]
    assert found == {"format": 1, "generation": 1, "continues": None, "about": ABOUT}


def rewrite(storage: PosixStorage, number: int, **changes: Any) -> None:
    """The record of a life says something else, or, where it is None, nothing of it."""
    payload = json.loads(record(storage, number).read_bytes())["generation"] | changes
    data = seal("generation", {key: value for key, value in payload.items() if key not in changes or value is not None})
    record(storage, number).write_bytes(data)


def test_a_record_of_before_there_were_formats_is_read(storage: PosixStorage) -> None:
    """It is of format 1."""
    live(storage)
    live(storage)
    rewrite(storage, 2, format=None)
    assert live(storage) == Generation(3, 2, (3, 2, 1), frozenset({1, 2, 3}))


def test_what_is_not_known_in_a_record_is_ignored(storage: PosixStorage) -> None:
    """A later version may say more of a life, without a new format."""
    live(storage)
    live(storage)
    rewrite(storage, 2, branch="b", about={**ABOUT, "argv": ["--other"], "version": "9"})
    now = live(storage)
    assert (now.lineage, now.proven) == ((3, 2, 1), {1, 2, 3})
    assert now.differs == {"argv": (["--other"], ["--lr", "0.1"])}


@pytest.mark.parametrize("newer", [2, 3], ids=["further back", "the last one"])
def test_no_life_goes_on_past_a_record_of_a_newer_format(storage: PosixStorage, newer: int) -> None:
    """It may say that the ckpts before it were given up. No number is taken, and the message says what to do."""
    for _ in range(3):
        live(storage)
    old = save(storage, 1, 10)
    rewrite(storage, newer, format=2, continues={"of": "another form"})
    before = sorted(path.name for path in storage.directory.rglob("*"))

    with pytest.raises(CkptMismatch, match=rf"generation {newer} was .* by a newer migrator: format 2, .* reads 1"):
        live(storage)
    with pytest.raises(CkptMismatch, match=r"Update.*MIGRATOR_RESUME=never.*delete .*generations/00000"):
        live(storage)

    assert sorted(path.name for path in storage.directory.rglob("*")) == before
    with pytest.raises(CkptMismatch):
        read_about(storage, newer)
    # A life that is about to leave trains nothing on a guess.
    leaving = not_claimed(storage, fresh=False)
    assert ckpts(storage, leaving.lineage) == [old]
    assert 1 not in leaving.proven
    # Both ways out.
    fresh = live(storage, fresh=True)
    assert (fresh.number, fresh.lineage) == (4, (4,))
    record(storage, 4).unlink()
    record(storage, newer).unlink()
    assert ckpts(storage, live(storage).lineage) == [old]


def test_a_life_that_a_newer_one_overtakes_in_the_moment_of_its_claim_looks_again(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one's number was free when this life looked, and is what it would continue."""
    live(storage)
    real = storage.put

    def put(name: str, data: bytes, *, exclusive: bool) -> None:
        payload = {**json.loads(data)["generation"], "format": 2}
        real(name, seal("generation", payload), exclusive=True)
        real(name, data, exclusive=exclusive)

    monkeypatch.setattr(storage, "put", put)
    with pytest.raises(CkptMismatch, match="generation 2 was written by a newer migrator"):
        live(storage)
    assert sorted(path.name for path in record(storage, 1).parent.iterdir()) == ["000001.json", "000002.json"]


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", [1]], ids=repr)
def test_a_record_of_a_format_that_cannot_be_is_damaged(storage: PosixStorage, number: Any) -> None:
    """As any other that no life of ours writes: guessed past, and nothing deleted there."""
    live(storage)
    live(storage)
    rewrite(storage, 2, format=number)
    now = live(storage)
    assert (now.lineage, now.proven) == ((3, 2, 1), {3, 2})


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "gone", "other", "directory"])
def test_ckpts_below_an_unreadable_record_stay_reachable(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """It is named, taken as continuing the one below it, and what is below is not certain enough to delete."""
    for _ in range(3):
        live(storage)
    old, lost = save(storage, 1, 10), save(storage, 2, 20)
    path = record(storage, 2)
    data = path.read_bytes()
    path.unlink()
    if damage == "other":
        path.write_bytes(record(storage, 3).read_bytes())
    elif damage == "directory":
        path.mkdir()
    elif damage != "gone":
        path.write_bytes({"cut": data[:-9], "empty": b"", "flip": data.replace(b"1", b"0", 1)}[damage])
    with caplog.at_level(logging.WARNING, "migrator"):
        now = live(storage)
    assert now.lineage == (4, 3, 2, 1)
    assert now.proven == {4, 3, 2}
    assert ckpts(storage, now.lineage) == [lost, old]
    assert "generation_unreadable generation=2" in caplog.text


def test_ckpts_without_any_record_are_found(storage: PosixStorage) -> None:
    """Somebody cleaned up the small files and left the large ones."""
    name = save(storage, 7, 10)
    now = live(storage)
    assert (now.number, now.lineage) == (8, (8, 7))
    assert ckpts(storage, now.lineage) == [name]


def test_a_record_that_continues_itself_or_the_future_ends(storage: PosixStorage) -> None:
    """Whatever records say, the way back ends."""
    for number, continues in ((1, 1), (2, 9), (3, True), (4, -1), (5, "4")):
        data = seal("generation", {"generation": number, "continues": continues, "about": {}})
        storage.put(f"generations/{number:06d}.json", data, exclusive=True)
    assert live(storage).lineage == (6, 5, 4, 3, 2, 1)


def test_another_script_or_other_arguments_show(storage: PosixStorage) -> None:
    """What differs is handed to the caller to warn; another host is no difference."""
    claim(storage, fresh=False, about=ABOUT)
    same = claim(storage, fresh=False, about={**ABOUT, "argv": ("--lr", "0.1"), "host": "pod-1"})
    other = claim(storage, fresh=False, about={**ABOUT, "argv": ["--lr", "0.2"]})
    assert same.differs == {}
    assert other.differs == {"argv": (["--lr", "0.1"], ["--lr", "0.2"])}
    assert claim(storage, fresh=True, about={"script": "other.py"}).differs == {}


@pytest.mark.parametrize(
    "record",
    [
        {"generation": 2, "continues": 0, "about": {}},
        {"generation": 1, "continues": None, "about": {}},
        {"generation": 2, "about": {}},
        {"format": 0, "generation": 2, "continues": None, "about": {}},
        {"format": None, "generation": 2, "continues": None, "about": {}},
    ],
    ids=["continues none that exists", "of another generation", "of another form", "format 0", "no format"],
)
def test_a_record_that_is_not_its_own_proves_nothing(storage: PosixStorage, record: dict[str, Any]) -> None:
    """What lies before it can be loaded, and nothing of it is deleted."""
    live(storage)
    live(storage)
    (storage.directory / record_name(2)).write_bytes(seal("generation", record))
    third = live(storage)
    assert third.lineage == (3, 2, 1)
    assert third.proven == {3, 2}


def test_records_that_a_failing_volume_holds_back_are_not_taken_for_damaged(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life that guessed its lineage would go on with less than there is."""
    live(storage)
    monkeypatch.setattr(PosixStorage, "get", failing(errno.EIO))
    with pytest.raises(StorageError, match="it fails"):
        live(storage)


def test_a_record_is_made_when_the_one_it_continues_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash could leave it without: what it continues would never be cleaned up."""
    storage = PosixStorage(tmp_path, "job")
    generations.claim(storage, fresh=False, about={})
    calls: list[tuple[str, str]] = []
    sync, put = PosixStorage.make_durable, PosixStorage.put

    def noted_sync(self: PosixStorage, name: str = "") -> None:
        calls.append(("sync", name))
        sync(self, name)

    def noted_put(self: PosixStorage, name: str, data: bytes, **how: Any) -> None:
        calls.append(("put", name))
        put(self, name, data, **how)

    monkeypatch.setattr(PosixStorage, "make_durable", noted_sync)
    monkeypatch.setattr(PosixStorage, "put", noted_put)
    generations.claim(storage, fresh=False, about={})

    assert calls == [("sync", "generations"), ("put", "generations/000002.json")]
