"""Lives of a job: who continues whom, which ckpts are theirs, and who waits for whom."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.errors import CkptCorrupt, StorageError
from migrator.ckpt.generations import (
    Generation,
    beside,
    ckpts,
    claim,
    furthest_first,
    is_leaving,
    mark_leaving,
    not_claimed,
    others,
    unmark_leaving,
    wait_for_leaving,
    whole,
)
from migrator.ckpt.manifest import Manifest, ckpt_name, part_name
from migrator.ckpt.tensor_file import write_part
from migrator.storage.posix import LocalStorage

ABOUT = {"script": "train.py", "argv": ["--lr", "0.1"], "host": "pod-0"}


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path, "job")


def live(storage: LocalStorage, *, fresh: bool = False) -> Generation:
    return claim(storage, fresh=fresh, about=ABOUT)


def save(storage: LocalStorage, generation: int, step: int, **written: Any) -> str:
    name = ckpt_name(generation, step)
    part = write_part(storage, f"{name}/{part_name(0, 1)}", {"w": torch.full((3,), float(step))})
    manifest = Manifest(generation, step, "job", 1, (part,), {}, written=written)
    storage.put(f"{name}/manifest.json", manifest.to_bytes(), exclusive=True)
    return name


def record(storage: LocalStorage, number: int) -> Path:
    return storage.directory / "generations" / f"{number:06d}.json"


def mark(storage: LocalStorage, number: int) -> Path:
    return storage.directory / "generations" / f"{number:06d}.leaving"


class Clock:
    """Time that passes only while somebody sleeps; what happens meanwhile is up to the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[float, Any]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        while self.events and self.events[0][0] <= self.now - 100.0 + 1e-9:
            self.events.pop(0)[1]()

    def wait(self, storage: LocalStorage, lineage: tuple[int, ...]) -> float:
        return wait_for_leaving(storage, lineage, clock=self, sleep=self.sleep)


# --- numbers and lineages


def test_lives_are_numbered_and_continue_one_another(storage: LocalStorage) -> None:
    """Each continues the one before it and so all of them."""
    first, second, third = (live(storage) for _ in range(3))
    assert [g.number for g in (first, second, third)] == [1, 2, 3]
    assert [g.continues for g in (first, second, third)] == [None, 1, 2]
    assert third.lineage == (3, 2, 1)
    assert third.proven == {1, 2, 3}


def test_a_life_that_leaves_at_once_leaves_no_trace(storage: LocalStorage) -> None:
    """It sees what it would continue, and nobody sees it."""
    live(storage)
    now = not_claimed(storage, fresh=False)
    assert (now.number, now.continues, now.lineage, now.is_claimed) == (2, 1, (2, 1), False)
    assert not_claimed(storage, fresh=True).lineage == (2,)
    assert live(storage) == Generation(2, 1, (2, 1), frozenset({1, 2}))


def test_a_fresh_start_begins_a_lineage_of_its_own(storage: LocalStorage) -> None:
    """And who comes after continues that, not what was before."""
    live(storage)
    fresh = live(storage, fresh=True)
    assert (fresh.number, fresh.continues, fresh.lineage) == (2, None, (2,))
    assert live(storage).lineage == (3, 2)


def test_a_number_is_claimed_once(storage: LocalStorage) -> None:
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


def test_a_life_that_no_listing_shows_yet_is_continued(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may list an older state of the directory; that the number is taken is proof enough."""
    live(storage)
    live(storage)
    real = storage.list
    monkeypatch.setattr(
        storage, "list", lambda directory="": [n for n in real(directory) if not n.startswith("000002")]
    )
    now = live(storage)
    assert (now.number, now.continues, now.lineage) == (3, 2, (3, 2, 1))


def test_the_record_says_who_lived(storage: LocalStorage) -> None:
    """Readable without this package."""
    live(storage)
    found = json.loads(record(storage, 1).read_text())["generation"]
    assert found == {"generation": 1, "continues": None, "about": ABOUT}


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "gone", "other", "directory"])
def test_ckpts_below_an_unreadable_record_stay_reachable(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture, damage: str
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


def test_ckpts_without_any_record_are_found(storage: LocalStorage) -> None:
    """Somebody cleaned up the small files and left the large ones."""
    name = save(storage, 7, 10)
    now = live(storage)
    assert (now.number, now.lineage) == (8, (8, 7))
    assert ckpts(storage, now.lineage) == [name]


def test_a_record_that_continues_itself_or_the_future_ends(storage: LocalStorage) -> None:
    """Whatever records say, the way back ends."""
    from migrator.ckpt.manifest import seal

    for number, continues in ((1, 1), (2, 9), (3, True), (4, -1), (5, "4")):
        data = seal("generation", {"generation": number, "continues": continues, "about": {}})
        storage.put(f"generations/{number:06d}.json", data, exclusive=True)
    assert live(storage).lineage == (6, 5, 4, 3, 2, 1)


def test_another_script_or_other_arguments_show(storage: LocalStorage) -> None:
    """What differs is handed to the caller to warn; another host is no difference."""
    claim(storage, fresh=False, about=ABOUT)
    same = claim(storage, fresh=False, about={**ABOUT, "argv": ("--lr", "0.1"), "host": "pod-1"})
    other = claim(storage, fresh=False, about={**ABOUT, "argv": ["--lr", "0.2"]})
    assert same.differs == {}
    assert other.differs == {"argv": (["--lr", "0.1"], ["--lr", "0.2"])}
    assert claim(storage, fresh=True, about={"script": "other.py"}).differs == {}


# --- ckpts


def test_ckpts_are_listed_by_generation_then_step(storage: LocalStorage) -> None:
    """As numbers, not as text."""
    for _ in range(10):
        live(storage)
    names = [save(storage, *place) for place in ((9, 900), (10, 5), (10, 40), (2, 7))]
    assert ckpts(storage, live(storage).lineage) == [names[2], names[1], names[0], names[3]]


# --- forks


def test_the_ckpt_that_was_trained_furthest_comes_first(storage: LocalStorage) -> None:
    """Whatever the number of its life: a doomed pod that starts slowly has a higher one than its replacement."""
    for _ in range(3):
        live(storage)
    names = [save(storage, *place) for place in ((1, 1000), (2, 1693), (3, 1010), (3, 1000))]
    assert furthest_first(storage, live(storage)) == [names[1], names[2], names[3], names[0]]


def test_what_may_be_of_a_lineage_that_was_given_up_comes_last(storage: LocalStorage) -> None:
    """Behind an unreadable record nothing is certain: training that was begun anew on purpose has fewer steps."""
    live(storage)
    old = [save(storage, 1, 5000), save(storage, 1, 6000)]
    live(storage, fresh=True)
    new = [save(storage, 2, 10), save(storage, 2, 20)]
    assert furthest_first(storage, live(storage)) == new[::-1]
    record(storage, 2).write_bytes(b"")

    assert furthest_first(storage, live(storage)) == [*new[::-1], *old[::-1]]


def branches(storage: LocalStorage) -> list[str]:
    return beside(storage, furthest_first(storage, live(storage)))


def test_lives_in_a_row_are_no_fork(storage: LocalStorage) -> None:
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
def test_two_lives_that_went_on_from_one_ckpt_are_a_fork(storage: LocalStorage, ancestor: str) -> None:
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


def test_a_life_that_would_not_die_is_a_fork(storage: LocalStorage) -> None:
    """It saved on after the next one had gone on from an earlier ckpt of it."""
    for _ in range(2):
        live(storage)
    start = save(storage, 1, 1000, continues=None)
    late = save(storage, 1, 1200, continues=None)
    save(storage, 2, 1500, continues=start)
    assert branches(storage) == [late]


def test_two_lives_from_the_start_are_a_fork(storage: LocalStorage) -> None:
    """Both began before there was any ckpt."""
    for _ in range(2):
        live(storage)
    early = save(storage, 1, 30, continues=None)
    save(storage, 2, 50, continues=None)
    assert branches(storage) == [early]


@pytest.mark.parametrize("said", [{}, {"continues": 7}, {"continues": "000009-000000000001"}, {"continues": "x"}])
def test_nothing_is_named_that_is_not_certain(storage: LocalStorage, said: dict[str, Any]) -> None:
    """Ckpts from before this was written down, or that say what cannot be: none of them is called a fork."""
    for _ in range(2):
        live(storage)
    save(storage, 1, 30, **said)
    save(storage, 2, 50, **said)
    assert branches(storage) == []


def test_a_damaged_ckpt_is_no_reason_not_to_start(storage: LocalStorage) -> None:
    """It is named when it is to be loaded."""
    live(storage)
    name = save(storage, 1, 30, continues=None)
    os.truncate(storage.directory / name / "manifest.json", 50)
    assert branches(storage) == []
    assert beside(storage, []) == []


def test_only_what_was_committed_is_a_ckpt(storage: LocalStorage) -> None:
    """Parts alone are nothing, nor is a hidden file or a directory with another name."""
    live(storage)
    write_part(storage, f"{ckpt_name(1, 5)}/{part_name(0, 1)}", {"w": torch.zeros(1)})
    storage.put(f"{ckpt_name(1, 6)}/.manifest.json.tmp", b"", exclusive=True)
    storage.put("1-7/manifest.json", b"", exclusive=True)
    assert ckpts(storage, (1,)) == []


def test_ckpts_of_other_lineages_are_only_named(storage: LocalStorage) -> None:
    """They are there, but not ours."""
    live(storage)
    theirs = save(storage, 1, 5)
    ours = live(storage, fresh=True)
    mine = save(storage, 2, 1)
    assert ckpts(storage, ours.lineage) == [mine]
    assert others(storage, ours.lineage) == [theirs]


def test_a_whole_ckpt_has_all_its_parts(storage: LocalStorage) -> None:
    """Its manifest is given."""
    name = save(storage, 1, 5)
    assert whole(storage, name).step == 5


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "no part", "short part", "moved", "directory"])
def test_a_ckpt_that_is_not_whole_is_named(storage: LocalStorage, damage: str) -> None:
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


def test_a_disk_that_fails_is_not_called_corrupt(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an error that passes would make us take an older ckpt."""
    name = save(storage, 1, 5)

    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StorageError):
        whole(storage, name)


# --- leaving


def test_without_a_mark_nobody_waits(storage: LocalStorage) -> None:
    """An ordinary restart loses no time; one's own mark is none of these."""
    for _ in range(2):
        live(storage)
    mark_leaving(storage, 2, 30)
    assert Clock().wait(storage, (2, 1)) == 0


def test_the_next_life_waits_until_the_mark_is_gone(storage: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """The save was given up, or it is done and the mark was taken away; said once."""
    mark_leaving(storage, 1, 30)
    clock = Clock()
    clock.events = [(3.0, lambda: unmark_leaving(storage, 1))]
    with caplog.at_level(logging.INFO, "migrator"):
        assert clock.wait(storage, (2, 1)) == pytest.approx(3.0, abs=0.3)
    assert caplog.text.count("waiting_for_leaving generation=1") == 1


def test_the_next_life_waits_until_the_ckpt_is_there(storage: LocalStorage) -> None:
    """A kill after the commit leaves the mark; the ckpt is what counts."""
    mark_leaving(storage, 1, 30)
    clock = Clock()
    clock.events = [(2.0, lambda: save(storage, 1, 12) and None)]
    assert clock.wait(storage, (2, 1)) == pytest.approx(2.0, abs=0.3)


def test_a_ckpt_from_before_the_mark_is_not_what_is_waited_for(storage: LocalStorage) -> None:
    """The periodic save of an hour ago is not the one that is under way."""
    save(storage, 1, 10)
    os.utime(storage.directory / ckpt_name(1, 10) / "manifest.json", (1e9, 1e9))
    mark_leaving(storage, 1, 5)
    assert Clock().wait(storage, (2, 1)) == pytest.approx(5.0)


def test_the_wait_ends_with_the_grace_by_our_own_clock(storage: LocalStorage) -> None:
    """Even if the mark's time lies in the future of the storage's clock."""
    mark_leaving(storage, 1, 30)
    os.utime(mark(storage, 1), (4e9, 4e9))
    assert Clock().wait(storage, (2, 1)) == pytest.approx(30.0)


def test_several_marks_are_waited_for_at_the_same_time(storage: LocalStorage) -> None:
    """Never longer than the longest grace."""
    mark_leaving(storage, 1, 20)
    mark_leaving(storage, 2, 30)
    mark_leaving(storage, 3, 10)
    assert Clock().wait(storage, (4, 3, 2, 1)) == pytest.approx(30.0)


def test_a_mark_of_another_lineage_is_nothing_to_us(storage: LocalStorage) -> None:
    """We would not load its ckpt."""
    mark_leaving(storage, 1, 20)
    assert Clock().wait(storage, (2,)) == 0


def test_a_mark_from_long_ago_is_over(storage: LocalStorage) -> None:
    """A crash in mid-save must not slow down every restart from then on."""
    mark_leaving(storage, 1, 30)
    assert is_leaving(storage, 1)
    since = storage.now() - 10 * 30 - 1
    os.utime(mark(storage, 1), (since, since))
    assert not is_leaving(storage, 1)
    assert Clock().wait(storage, (2, 1)) == 0


def test_a_mark_below_a_newer_ckpt_is_not_waited_for(storage: LocalStorage) -> None:
    """Generation 2 has a ckpt: whatever generation 1 may still commit comes after it."""
    mark_leaving(storage, 1, 30)
    save(storage, 2, 5)
    assert Clock().wait(storage, (3, 2, 1)) == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"grace_s":"x"}', b'{"grace_s":null}', b'{"grace_s":NaN}', b'{"grace_s":-5}']
)
def test_a_mark_that_cannot_be_read_is_given_an_ordinary_grace(storage: LocalStorage, content: bytes) -> None:
    """Somebody is leaving, only when he will be gone is not known."""
    storage.put("generations/000001.leaving", content, exclusive=True)
    assert Clock().wait(storage, (2, 1)) == pytest.approx(30.0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary(max_size=40) | st.floats().map(lambda grace: json.dumps({"grace_s": grace}).encode()))
def test_no_mark_makes_anybody_wait_without_end(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever it says."""
    storage = LocalStorage(tmp_path_factory.mktemp("mark"), "job")
    storage.put("generations/000001.leaving", content, exclusive=True)
    clock = Clock()
    assert wait_for_leaving(storage, (2, 1), clock=clock, sleep=clock.sleep, poll_s=500) <= 3600.1


def test_unmarking_twice_is_fine(storage: LocalStorage) -> None:
    """The end of a save and the end of a life both do it."""
    mark_leaving(storage, 1, 30)
    unmark_leaving(storage, 1)
    unmark_leaving(storage, 1)
    assert not is_leaving(storage, 1)
