"""Which ckpts there are: what is listed, in which order, what is a fork, and what is whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from migrator.ckpt import catalog
from migrator.ckpt.catalog import beside, ckpts, furthest_first, others, uncommitted, whole
from migrator.ckpt.names import ckpt_name, part_name
from migrator.ckpt.part_writer import write_part
from migrator.errors import CkptCorrupt, StorageError
from migrator.storage.posix import PosixStorage
from tests.support.volume import failing, live, record, save, written


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path, "job")


# Which there are, and which is the newest.


def test_ckpts_are_listed_by_generation_then_step(storage: PosixStorage) -> None:
    """As numbers, not as text."""
    for _ in range(10):
        live(storage)
    names = [save(storage, *place) for place in ((9, 900), (10, 5), (10, 40), (2, 7))]
    assert ckpts(storage, live(storage).lineage) == [names[2], names[1], names[0], names[3]]


def test_the_ckpt_that_was_trained_furthest_comes_first(storage: PosixStorage) -> None:
    """Whatever the number of its life: a doomed pod that starts slowly has a higher one than its replacement."""
    for _ in range(3):
        live(storage)
    names = [save(storage, *place) for place in ((1, 1000), (2, 1693), (3, 1010), (3, 1000))]
    assert furthest_first(storage, live(storage)) == [names[1], names[2], names[3], names[0]]


def test_what_may_be_of_a_lineage_that_was_given_up_comes_last(storage: PosixStorage) -> None:
    """Behind an unreadable record nothing is certain: training that was begun anew on purpose has fewer steps."""
    live(storage)
    old = [save(storage, 1, 5000), save(storage, 1, 6000)]
    live(storage, fresh=True)
    new = [save(storage, 2, 10), save(storage, 2, 20)]
    assert furthest_first(storage, live(storage)) == new[::-1]
    record(storage, 2).write_bytes(b"")

    assert furthest_first(storage, live(storage)) == [*new[::-1], *old[::-1]]


def test_what_is_certain_comes_first_however_short_it_is(storage: PosixStorage) -> None:
    """One step of a life that is known counts for more than many behind a record that cannot be read."""
    live(storage)
    uncertain = save(storage, 1, 5000)
    live(storage)
    record(storage, 2).write_bytes(b"")
    live(storage)
    certain = save(storage, 3, 1)

    assert furthest_first(storage, live(storage)) == [certain, uncertain]


@pytest.mark.parametrize("listed", [ckpts, uncommitted])
def test_a_long_lineage_is_not_searched_for_each_ckpt(storage: PosixStorage, listed: Callable[..., list[str]]) -> None:
    """A job that was stopped a thousand times may have as many ckpts: the work grows with them, not with the square."""
    compared = 0

    class Life(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    count = 30
    for number in range(1, 1 + count):
        save(storage, number, number)
    listed(storage, tuple(Life(number) for number in range(count, 0, -1)))

    assert compared <= 2 * count


# Forks.


def branches(storage: PosixStorage) -> list[str]:
    return beside(storage, furthest_first(storage, live(storage)))


def test_lives_in_a_row_are_no_fork(storage: PosixStorage) -> None:
    """Each went on from the last ckpt of the one before it; also if some of them saved nothing, or are deleted."""
    for _ in range(6):
        live(storage)
    first = [save(storage, 1, step, continues=None) for step in (10, 20)]
    second = [save(storage, 2, step, continues=first[1]) for step in (30, 40)]
    save(storage, 5, 50, continues=second[1])
    assert branches(storage) == []
    for name in second:
        (storage.directory / name / "manifest.json").unlink()
    assert branches(storage) == []


@pytest.mark.parametrize("ancestor", ["kept", "deleted"])
def test_two_lives_that_went_on_from_one_ckpt_are_a_fork(storage: PosixStorage, ancestor: str) -> None:
    """Whichever number has come further, and whether what they have in common is still there."""
    for _ in range(3):
        live(storage)
    start = save(storage, 1, 1000, continues=None)
    real = [save(storage, 2, step, continues=start) for step in (1500, 1693)]
    doomed = save(storage, 3, 1010, continues=start)
    if ancestor == "deleted":
        (storage.directory / start / "manifest.json").unlink()
    assert branches(storage) == [doomed]
    further = save(storage, 3, 1700, continues=start)
    assert furthest_first(storage, live(storage))[0] == further
    assert branches(storage) == real[::-1]
    # Who goes on from there leaves the other branch behind for good.
    save(storage, 6, 1800, continues=further)
    assert branches(storage) == real[::-1]


def test_a_life_that_would_not_die_is_a_fork(storage: PosixStorage) -> None:
    """It saved on after the next one had gone on from an earlier ckpt of it."""
    for _ in range(2):
        live(storage)
    start = save(storage, 1, 1000, continues=None)
    late = save(storage, 1, 1200, continues=None)
    save(storage, 2, 1500, continues=start)
    assert branches(storage) == [late]


def test_two_lives_from_the_start_are_a_fork(storage: PosixStorage) -> None:
    """Both began before there was any ckpt."""
    for _ in range(2):
        live(storage)
    early = save(storage, 1, 30, continues=None)
    save(storage, 2, 50, continues=None)
    assert branches(storage) == [early]


@pytest.mark.parametrize("said", [{}, {"continues": 7}, {"continues": "000009-000000000001"}, {"continues": "x"}])
def test_nothing_is_named_that_is_not_certain(storage: PosixStorage, said: dict[str, Any]) -> None:
    """Ckpts from before this was written down, or that say what cannot be: none of them is called a fork."""
    for _ in range(2):
        live(storage)
    save(storage, 1, 30, **said)
    save(storage, 2, 50, **said)
    assert branches(storage) == []


@pytest.mark.timeout(20)
def test_ckpts_that_name_one_another_are_no_endless_way(storage: PosixStorage) -> None:
    """No save writes that, and a hostile manifest may."""
    for _ in range(3):
        live(storage)
    save(storage, 2, 30, continues="000002-000000000030")
    save(storage, 3, 50, continues="000002-000000000030")
    assert branches(storage) == []


def test_a_ckpt_is_made_durable_before_its_name(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own names first, then its name in the job: a crash in between leaves no ckpt that lacks something."""
    synced: list[str] = []
    monkeypatch.setattr(PosixStorage, "make_durable", lambda of, directory="": synced.append(directory))
    catalog.make_durable(storage, "000001-000000000010")
    assert synced == ["000001-000000000010", ""]


def test_a_damaged_ckpt_is_no_reason_not_to_start(storage: PosixStorage) -> None:
    """It is named when it is to be loaded."""
    live(storage)
    name = save(storage, 1, 30, continues=None)
    os.truncate(storage.directory / name / "manifest.json", 50)
    assert branches(storage) == []
    assert beside(storage, []) == []


# What is one, and what is whole.


def test_only_what_was_committed_is_a_ckpt(storage: PosixStorage) -> None:
    """Parts alone are nothing, nor is a hidden file or a directory with another name."""
    live(storage)
    write_part(storage, f"{ckpt_name(1, 5)}/{part_name(0, 1)}", {"w": torch.zeros(1)})
    storage.put(f"{ckpt_name(1, 6)}/.manifest.json.tmp", b"", exclusive=True)
    storage.put("1-7/manifest.json", b"", exclusive=True)
    assert ckpts(storage, (1,)) == []


def test_ckpts_of_other_lineages_are_only_named(storage: PosixStorage) -> None:
    """They are there, but not ours."""
    live(storage)
    theirs = save(storage, 1, 5)
    ours = live(storage, fresh=True)
    mine = save(storage, 2, 1)
    assert ckpts(storage, ours.lineage) == [mine]
    assert others(storage, ours.lineage) == [theirs]


def test_a_whole_ckpt_has_all_its_parts(storage: PosixStorage) -> None:
    """Its manifest is given."""
    name = save(storage, 1, 5)
    assert whole(storage, name).step == 5


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "no part", "short part", "moved", "directory"])
def test_a_ckpt_that_is_not_whole_is_named(storage: PosixStorage, damage: str) -> None:
    """So that the one before it can be taken."""
    name = save(storage, 1, 5)
    directory = storage.directory / name
    if damage == "no manifest":
        (directory / "manifest.json").unlink()
    elif damage == "torn manifest":
        os.truncate(directory / "manifest.json", 50)
    elif damage == "no part":
        (directory / part_name(0, 1)).unlink()
    elif damage == "short part":
        os.truncate(directory / part_name(0, 1), 50)
    elif damage == "directory":
        (directory / "manifest.json").unlink()
        (directory / "manifest.json").mkdir()
    else:
        name = ckpt_name(1, 6)
        directory.rename(storage.directory / name)
    with pytest.raises(CkptCorrupt, match=name):
        whole(storage, name)


def test_a_disk_that_fails_is_not_called_corrupt(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an error that passes would make us take an older ckpt."""
    name = save(storage, 1, 5)

    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StorageError):
        whole(storage, name)


def test_what_is_uncommitted_in_another_lineage_is_not_ours(storage: PosixStorage) -> None:
    """What is named there is deleted: it may be what another job of that name is writing."""
    written(storage, 1, 10)
    written(storage, 2, 20)
    save(storage, 2, 30)
    assert catalog.uncommitted(storage, (2,)) == [ckpt_name(2, 20)]


def test_the_manifest_of_another_ckpt_makes_none(storage: PosixStorage) -> None:
    """A directory that was copied under another name would be loaded as a step that was never saved."""
    name = save(storage, 1, 10)
    (storage.directory / name).rename(storage.directory / ckpt_name(1, 20))
    with pytest.raises(CkptCorrupt, match=f"its manifest is that of {name}"):
        catalog.whole(storage, ckpt_name(1, 20))


def test_what_is_wrong_with_a_part_is_said(storage: PosixStorage) -> None:
    """That it is gone is another story than that it was cut off."""
    name = save(storage, 1, 10)
    part = storage.directory / name / part_name(0, 1)
    size = part.stat().st_size
    os.truncate(part, 20)
    with pytest.raises(CkptCorrupt, match=f"has 20 bytes; {size} bytes were committed"):
        catalog.whole(storage, name)
    part.unlink()
    with pytest.raises(CkptCorrupt, match=f"is missing; {size} bytes were committed"):
        catalog.whole(storage, name)


def test_a_ckpt_that_is_a_link_is_named_and_one_that_cannot_be_listed_is_an_error(
    storage: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first can be walked back from; of the second nobody knows what it is."""
    storage.make_directory("")
    (storage.directory / ckpt_name(1, 10)).symlink_to(tmp_path)
    assert catalog.ckpts(storage, (1,)) == [ckpt_name(1, 10)]
    assert catalog.uncommitted(storage, (1,)) == []
    real = PosixStorage.list

    def listed(of: PosixStorage, directory: str = "") -> list[str]:
        return real(of, directory) if not directory else failing(errno.EIO)()

    monkeypatch.setattr(PosixStorage, "list", listed)
    with pytest.raises(StorageError, match="it fails"):
        catalog.ckpts(storage, (1,))
