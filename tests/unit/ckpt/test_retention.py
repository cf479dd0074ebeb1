"""What is deleted, what never is, and that a crash at any moment loses no ckpt."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt import catalog, retention
from migrator.ckpt.catalog import ckpts, whole
from migrator.ckpt.generations import Generation, claim
from migrator.ckpt.leaving_mark import is_leaving, unmark_leaving
from migrator.ckpt.names import GENERATIONS, MANIFEST, ckpt_name, part_name
from migrator.ckpt.retention import retire
from migrator.ckpt.sealed import seal
from migrator.ckpt.tensor_file import read_part
from migrator.errors import CkptCorrupt, StorageError
from migrator.storage.posix import PosixStorage
from tests.support import chance
from tests.support.volume import ASIDE, Calls, live, mark_leaving, names_in, save, stamped, written


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path, "job")


def directories(storage: PosixStorage) -> list[str]:
    return [name for name in storage.list() if name != "generations"]


def test_the_newest_are_kept(storage: PosixStorage) -> None:
    """`keep` of them, and what was deleted is said, oldest first."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30, 40)]
    assert retire(storage, life, keep=2) == names[:2]
    assert directories(storage) == names[2:]
    assert retire(storage, life, keep=2) == []
    assert all(whole(storage, name) for name in names[2:])


def test_at_least_one_is_kept_whatever_is_asked(storage: PosixStorage) -> None:
    """The last ckpt is never superfluous."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20)]
    assert retire(storage, life, keep=0) == names[:1]


def test_what_is_not_whole_does_not_count(storage: PosixStorage) -> None:
    """Two whole ones are kept beside a torn one; the torn one goes when it is older than both."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30, 40)]
    os.truncate(storage.directory / names[2] / part_name(0, 1), 20)
    assert retire(storage, life, keep=2) == names[:1]
    names.append(save(storage, 1, 50))
    assert retire(storage, life, keep=2) == names[1:3]
    assert directories(storage) == names[3:]


def test_what_was_found_corrupt_does_not_count(storage: PosixStorage) -> None:
    """Its sizes are right, but while loading a digest was not: the one before it is the one that works."""
    earlier = live(storage)
    good, bad = save(storage, earlier.number, 10), save(storage, earlier.number, 20)
    life = live(storage)
    first = save(storage, 2, 30)
    assert retire(storage, life, keep=2, bad=frozenset({bad})) == []
    second = save(storage, 2, 40)
    assert retire(storage, life, keep=2, bad=frozenset({bad})) == [good, bad]
    assert directories(storage) == [first, second]


def test_too_few_whole_ones_delete_nothing(storage: PosixStorage) -> None:
    """Torn ones might still be worth something to somebody."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    for name in names[:2]:
        os.truncate(storage.directory / name / "manifest.json", 20)
    assert retire(storage, life, keep=2) == []
    assert directories(storage) == names


def test_who_sees_a_later_life_deletes_nothing(storage: PosixStorage) -> None:
    """It may be the one that was thought dead; the later life may be loading just now."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    live(storage)
    assert retire(storage, life, keep=1) == []
    assert directories(storage) == names


def test_a_life_that_is_behind_another_one_deletes_only_its_own(storage: PosixStorage) -> None:
    """The other one has come further, and is what the next life goes on from. Once this one has, the rest goes."""
    for _ in range(2):
        live(storage)
    real = [save(storage, 2, step) for step in (500, 600)]
    doomed = live(storage)
    torn = ckpt_name(2, 550)
    written(storage, 2, 550)
    names = [save(storage, 3, step) for step in (510, 520, 530)]
    assert retire(storage, doomed, keep=2) == names[:1]
    assert directories(storage) == sorted([*real, torn, *names[1:]])
    names.append(save(storage, 3, 610))
    assert retire(storage, doomed, keep=2) == [real[0], torn, names[1], names[2]]
    assert directories(storage) == [real[1], names[3]]


def test_the_first_commit_retires_what_earlier_lives_left(storage: PosixStorage) -> None:
    """Not the claim of a number, not the load: only when there is something newer."""
    old = [save(storage, live(storage).number, 10 * i) for i in (1, 2, 3)]
    life = live(storage)
    assert retire(storage, life, keep=2) == []
    new = save(storage, 4, 35)
    assert retire(storage, life, keep=2) == old[:2]
    assert directories(storage) == [old[2], new]


def test_nothing_of_an_earlier_life_goes_while_one_may_still_be_leaving(storage: PosixStorage) -> None:
    """What it is writing must not vanish under it; our own is ours to delete."""
    old = [save(storage, live(storage).number, 10 * i) for i in (1, 2)]
    written(storage, 2, 25)
    mark_leaving(storage, 2, 30)
    life = live(storage)
    mine = [save(storage, 3, step) for step in (30, 40)]
    assert retire(storage, life, keep=1) == mine[:1]
    assert directories(storage) == [*old, ckpt_name(2, 25), mine[1]]
    unmark_leaving(storage, 2)
    assert retire(storage, life, keep=1) == [*old, ckpt_name(2, 25)]


def test_other_lineages_are_never_touched(storage: PosixStorage) -> None:
    """Committed or not."""
    live(storage)
    theirs = [save(storage, 1, step) for step in (10, 20, 30)]
    written(storage, 1, 40)
    life = live(storage, fresh=True)
    mine = [save(storage, 2, step) for step in (1, 2, 3)]
    assert retire(storage, life, keep=1) == mine[:2]
    assert directories(storage) == [*theirs, ckpt_name(1, 40), mine[2]]


def test_what_an_unreadable_record_makes_uncertain_is_kept(storage: PosixStorage) -> None:
    """It may be another lineage's."""
    live(storage)
    theirs = save(storage, 1, 10)
    live(storage, fresh=True)
    middle = save(storage, 2, 20)
    (storage.directory / "generations" / "000002.json").write_bytes(b"")
    life = live(storage)
    save(storage, 3, 30)
    assert retire(storage, life, keep=1) == [middle]
    assert theirs in directories(storage)


def test_what_was_never_committed_is_swept(storage: PosixStorage) -> None:
    """Leftovers of thrown away attempts, of this life and earlier ones, hidden files too."""
    live(storage)
    written(storage, 1, 5)
    life = live(storage)
    written(storage, 2, 10)
    storage.put(f"{ckpt_name(2, 11)}/.part.tmp", b"", exclusive=True)
    storage.make_directory(ckpt_name(2, 12))
    name = save(storage, 2, 20)
    assert retire(storage, life, keep=2) == [ckpt_name(1, 5), *(ckpt_name(2, step) for step in (10, 11, 12))]
    assert directories(storage) == [name]


def test_what_had_come_further_is_not_swept_until_it_is_passed(storage: PosixStorage) -> None:
    """Its writer may live after all, and commit it this very moment: then it is what the next life goes on from."""
    live(storage)
    written(storage, 1, 50)
    life = live(storage)
    names = [save(storage, 2, step) for step in (20, 30)]
    assert retire(storage, life, keep=1) == names[:1]
    assert directories(storage) == [ckpt_name(1, 50), names[1]]
    names.append(save(storage, 2, 60))
    assert retire(storage, life, keep=1) == [ckpt_name(1, 50), names[1]]
    assert directories(storage) == [names[2]]


def test_what_is_being_written_is_not_swept(storage: PosixStorage) -> None:
    """Its place is above the newest commit."""
    life = live(storage)
    save(storage, 1, 20)
    written(storage, 1, 30)
    assert retire(storage, life, keep=1) == []
    assert directories(storage) == [ckpt_name(1, step) for step in (20, 30)]


def test_what_another_rank_may_be_about_to_commit_is_not_swept(storage: PosixStorage) -> None:
    """Leaving, two ranks may each save a step of their own; committed ones are retired all the same."""
    life = live(storage)
    old, newer = save(storage, 1, 10), written(storage, 1, 15).ckpt
    newest = save(storage, 1, 20)

    assert retire(storage, life, keep=1, sweeps=False) == [old]
    assert directories(storage) == [newer, newest]


def test_failures_are_told_and_not_raised(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ckpt is safe; that an old one takes up room is no reason to end anything."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]

    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "migrator"):
        patch.setattr(os, "unlink", fail)
        assert retire(storage, life, keep=1) == []
    assert "retention_failed" in caplog.text
    assert retire(storage, life, keep=1) == names[:2]


def test_nothing_goes_before_what_stays_is_durable(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit whose directory could not be synced can be listed and still be lost in a node crash."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20)]
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == names[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with caplog.at_level(logging.WARNING, "migrator"):
        monkeypatch.setattr(os, "fsync", fsync)
        assert retire(storage, life, keep=1) == []
    assert directories(storage) == names
    assert "retention_failed" in caplog.text


# --- crashes


class Cut(BaseException):
    """The power is gone: nothing that the process does from now on has an effect."""


@dataclass
class Disk:
    """A disk that forgets what was not synced.

    Files and names live on the real disk; beside them it is written down what was done
    to each directory since it was last synced, and which files have bytes that were not.
    `image` makes what a crash may leave.
    """

    root: Path
    cut_at: int = 1 << 30
    obeys: bool = True
    """Whether it syncs when it is told to."""
    count: int = 0
    pending: list[tuple[Path, str, Path | None]] = field(default_factory=list)
    """(directory, name, what the name stood for before: a copy, or None for nothing)."""
    unsynced: set[int] = field(default_factory=set)

    def before(self, name: str) -> None:
        if self.count >= self.cut_at:
            raise Cut(name)
        self.count += 1

    @contextmanager
    def plugged_in(self, patch: pytest.MonkeyPatch, saved: Path) -> Iterator[None]:
        real = {name: getattr(os, name) for name in ("open", "fsync", "pwritev", "link", "rename", "rmdir")}
        real |= {name: getattr(os, name) for name in ("unlink", "mkdir", "replace")}

        def remember(path: Path) -> None:
            kept: Path | None = None
            if path.exists():
                kept = saved / str(self.count) / path.name
                if not kept.parent.exists():
                    real["mkdir"](kept.parent)
                if path.is_dir():
                    real["mkdir"](kept)
                else:
                    # A hard link: later syncs of the file count for the old name, too.
                    real["link"](path, kept)
            self.pending.append((path.parent, path.name, kept))

        def path_of(fd: int) -> Path:
            return Path(f"/proc/self/fd/{fd}").readlink()

        def watched(name: str, effect: Any) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                self.before(name)
                effect(*arguments)
                return real[name](*arguments, **more)

            return call

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                self.before("open")
                remember(Path(path))
            return real["open"](path, flags, *more, **named)

        def synced(fd: int) -> None:
            path = path_of(fd)
            if not self.obeys:
                return
            if path.is_dir():
                self.pending = [entry for entry in self.pending if entry[0] != path]
            else:
                self.unsynced.discard(os.fstat(fd).st_ino)

        patch.setattr(os, "open", opened)
        patch.setattr(os, "fsync", watched("fsync", synced))
        patch.setattr(os, "pwritev", watched("pwritev", lambda fd, *_: self.unsynced.add(os.fstat(fd).st_ino)))
        patch.setattr(os, "link", watched("link", lambda source, target: remember(Path(target))))
        for name in ("rename", "replace"):
            patch.setattr(
                os, name, watched(name, lambda source, target: (remember(Path(target)), remember(Path(source))))
            )
        patch.setattr(os, "unlink", watched("unlink", lambda path: remember(Path(path))))
        patch.setattr(os, "mkdir", watched("mkdir", lambda path, *_: remember(Path(path))))
        patch.setattr(os, "rmdir", watched("rmdir", lambda path: remember(Path(path))))
        yield

    def losses(self) -> list[set[int]]:
        """Of what is pending: everything is lost, nothing, each alone, all but one."""
        every = set(range(len(self.pending)))
        return [every, set(), *({i} for i in every), *(every - {i} for i in every)]

    def image(self, target: Path, lost: set[int]) -> None:
        """What is there after the crash, if of the pending changes just these are lost."""
        shutil.copytree(self.root, target, copy_function=self._copy)
        for i in sorted(lost, reverse=True):
            directory, name, kept = self.pending[i]
            place = target / directory.relative_to(self.root) / name
            if not place.parent.is_dir():
                continue
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
            if kept is not None and kept.is_dir():
                place.mkdir()
            elif kept is not None:
                self._copy(kept, place)

    def _copy(self, source: Any, to: Any) -> None:
        data = Path(source).read_bytes()
        is_torn = Path(source).stat().st_ino in self.unsynced
        Path(to).write_bytes(data[: len(data) // 2] if is_torn else data)


def story(storage: PosixStorage, safe: list[str]) -> None:
    """Two lives that save, commit and retire; `safe` gets the name of each commit that was reported."""
    for number, steps in ((1, (10, 20, 30)), (2, (40, 50))):
        life = live(storage)
        assert life.number == number
        for step in steps:
            mark_leaving(storage, number, 0)
            safe.append(save(storage, number, step))
            unmark_leaving(storage, number)
            retire(storage, life, keep=1)


def assert_nothing_is_lost(storage: PosixStorage, safe: list[str], steps: list[str]) -> None:
    """What was reported as committed is there or something newer is, and whatever is there is whole."""
    life = live(storage)
    found = ckpts(storage, life.lineage)
    for name in found:
        manifest = whole(storage, name)
        tensors = read_part(storage, name, manifest.parts[0])
        assert tensors["w"].tolist() == [float(manifest.step)] * 3
    if safe:
        assert found, f"{safe[-1]} was committed and there is nothing"
        assert steps.index(found[0]) >= steps.index(safe[-1])


STEPS = [ckpt_name(1, 10), ckpt_name(1, 20), ckpt_name(1, 30), ckpt_name(2, 40), ckpt_name(2, 50)]


def run_story(base: Path, cut_at: int, *, obeys: bool = True) -> tuple[Disk, list[str]]:
    """The story up to the cut; the process' clean-up code runs, and has no effect."""
    (base / "disk").mkdir(parents=True)
    (base / "saved").mkdir()
    disk, safe = Disk(base / "disk", cut_at, obeys), []
    with pytest.MonkeyPatch.context() as patch, disk.plugged_in(patch, base / "saved"):
        try:
            story(PosixStorage(base / "disk", "job"), safe)
        except Cut:
            pass
    return disk, safe


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """SIGKILL before each of the calls that change something: the files stay as they are."""
    total = run_story(tmp_path / "whole", 1 << 30)[0].count
    assert total > 100
    for cut_at in range(total):
        base = tmp_path / str(cut_at)
        safe = run_story(base, cut_at)[1]
        assert_nothing_is_lost(PosixStorage(base / "disk", "job"), safe, STEPS)
        shutil.rmtree(base)


def test_a_power_cut_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """The node dies: bytes and names that were not synced are there, or half there, or not."""
    total = run_story(tmp_path / "whole", 1 << 30)[0].count
    for cut_at in chance.some("power cuts", range(total), 0.3):
        base = tmp_path / str(cut_at)
        disk, safe = run_story(base, cut_at)
        for i, lost in enumerate(disk.losses()):
            disk.image(base / f"image{i}", lost)
            assert_nothing_is_lost(PosixStorage(base / f"image{i}", "job"), safe, STEPS)
        shutil.rmtree(base)


def test_the_disk_of_these_tests_does_forget(tmp_path: Path) -> None:
    """Without syncs the same story does lose ckpts: the tests above can fail."""
    total = run_story(tmp_path / "whole", 1 << 30)[0].count
    lost = 0
    for cut_at in range(0, total, 5):
        base = tmp_path / str(cut_at)
        disk, safe = run_story(base, cut_at, obeys=False)
        disk.image(base / "image", disk.losses()[0])
        try:
            assert_nothing_is_lost(PosixStorage(base / "image", "job"), safe, STEPS)
        except (AssertionError, CkptCorrupt):
            lost += 1
    assert lost > total // 20


# --- what is swept, and when


@pytest.mark.parametrize("place", ["", f"{GENERATIONS}/"])
def test_what_dead_writers_left_aside_is_swept(storage: PosixStorage, place: str) -> None:
    """What is from before this life began; what came with it or after may be another life's that begins right now."""
    ours = live(storage)
    save(storage, 1, 10)
    before = stamped(storage, f"{place}{ASIDE}", later_than=1, by_s=-1)
    at = stamped(storage, f"{place}.b{ASIDE}", later_than=1, by_s=0)
    after = stamped(storage, f"{place}.c{ASIDE}", later_than=1, by_s=1)
    retire(storage, ours, keep=1, sweeps=False)
    assert before.exists()
    retire(storage, ours, keep=1)
    assert (before.exists(), at.exists(), after.exists()) == (False, True, True)


def test_a_ckpt_that_was_being_deleted_is_swept(storage: PosixStorage) -> None:
    """It is a directory, with files in it."""
    ours = live(storage)
    save(storage, 1, 10)
    (storage.directory / ASIDE).mkdir()
    (storage.directory / ASIDE / "part").touch()
    stamped(storage, ASIDE, later_than=1, by_s=-1)
    retire(storage, ours, keep=1)
    assert storage.leftovers() == []


def test_marks_that_are_over_are_swept(storage: PosixStorage) -> None:
    """Those of earlier lives of this lineage; not its own, and not those of others."""
    live(storage)
    live(storage)
    ours = claim(storage, fresh=True, about={})
    for number in (1, 3):
        mark_leaving(storage, number, 30.0)
    later = live(storage)
    mark_leaving(storage, 4, 30.0)
    stamped(storage, f"{GENERATIONS}/000003.leaving", later_than=4, by_s=-1e6)
    assert not is_leaving(storage, 3)
    save(storage, 4, 10)
    retire(storage, later, keep=1)
    assert ours.lineage == (3,)
    assert [name for name in storage.list(GENERATIONS) if name.endswith(".leaving")] == [
        "000001.leaving",
        "000004.leaving",
    ]


def test_of_a_ckpt_only_what_its_manifest_names_is_kept(storage: PosixStorage) -> None:
    """Of all but the newest, in which somebody may still be writing; what is none of ours is not touched."""
    ours = live(storage)
    names = [save(storage, 1, step) for step in (10, 20)]
    mine = {MANIFEST, part_name(0, 1)}
    more = {part_name(0, 1, rank=3), "rank-00001.json", ASIDE}
    for name in names:
        for file in (*more, "notes.txt"):
            (storage.directory / name / file).touch()
    assert retire(storage, ours, keep=2) == []
    assert set(names_in(storage.directory / names[0])) == {*mine, "notes.txt"}
    assert set(names_in(storage.directory / names[1])) == {*mine, *more, "notes.txt"}


def test_a_ckpt_of_a_life_that_may_still_be_saving_is_not_swept(storage: PosixStorage) -> None:
    """A rank of it may be about to write what it found missing."""
    live(storage)
    old = save(storage, 1, 10)
    (storage.directory / old / ASIDE).touch()
    mark_leaving(storage, 1, 30.0)
    ours = live(storage)
    save(storage, 2, 20)
    retire(storage, ours, keep=2)
    assert ASIDE in names_in(storage.directory / old)
    assert storage.list(GENERATIONS).count("000001.leaving") == 1


def test_a_ckpt_of_a_newer_version_counts_and_is_not_swept(storage: PosixStorage) -> None:
    """It cannot be judged here: it is neither corrupt nor a reason to keep one more."""
    ours = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    newer = seal("manifest", {"format": 3})
    (storage.directory / names[1] / MANIFEST).write_bytes(newer)
    (storage.directory / names[1] / ASIDE).touch()
    assert retire(storage, ours, keep=2) == names[:1]
    assert ASIDE in names_in(storage.directory / names[1])


def begins_at(monkeypatch: pytest.MonkeyPatch, storage: PosixStorage, function: str, *, before: bool) -> None:
    """Another life of the job begins just before, or just after, retention has called this."""
    real = getattr(retention, function)
    begun: list[Generation] = []

    def call(*arguments: Any, **more: Any) -> Any:
        if before and not begun:
            begun.append(live(storage))
        found = real(*arguments, **more)
        if not begun:
            begun.append(live(storage))
        return found

    monkeypatch.setattr(retention, function, call)


def test_a_life_that_begins_meanwhile_ends_the_deleting(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be loading what was superfluous a moment ago: not even what is aside goes then."""
    ours = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    hidden = stamped(storage, ASIDE, later_than=1, by_s=-1)
    begins_at(monkeypatch, storage, "_delete", before=False)
    assert retire(storage, ours, keep=1) == names[:1]
    assert hidden.exists()
    assert catalog.ckpts(storage, (1,)) == names[:0:-1]


def test_a_life_that_begins_meanwhile_ends_the_sweeping(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there was nothing to delete."""
    ours = live(storage)
    save(storage, 1, 10)
    hidden = stamped(storage, ASIDE, later_than=1, by_s=-1)
    begins_at(monkeypatch, storage, "_superfluous", before=True)
    assert retire(storage, ours, keep=1) == []
    assert hidden.exists()


def test_a_ckpt_is_deleted_manifest_first_and_for_good(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is durable before the next one, the last one too."""
    ours = live(storage)
    first, second = save(storage, 1, 10), save(storage, 1, 20)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        retire(storage, ours, keep=1)
    assert calls.made == [
        ("fsync", second),
        ("fsync", "job"),
        ("unlink", MANIFEST),
        ("fsync", first),
        ("rename", "aside"),
        ("fsync", "job"),
        ("unlink", part_name(0, 1)),
        ("rmdir", "aside"),
        ("fsync", "job"),
    ]


def test_where_nothing_was_deleted_nothing_is_said_and_nothing_synced(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs after each commit: a sync more each time would be paid by each of them."""
    ours = live(storage)
    name = save(storage, 1, 10)
    with monkeypatch.context() as patch, caplog.at_level("INFO", "migrator"):
        calls = Calls(patch)
        retire(storage, ours, keep=1)
    assert calls.made == [("fsync", name), ("fsync", "job")]
    assert caplog.messages == []


def test_what_lies_in_the_way_of_a_sync_is_told(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last sync fails: what is gone is said to be gone, and nothing is raised."""
    ours = live(storage)
    names = [save(storage, 1, step) for step in (10, 20)]

    def sync(of: PosixStorage, name: str = "") -> None:
        if not storage.list(names[0]) and not name:
            raise StorageError("it does not sync")

    monkeypatch.setattr(PosixStorage, "make_durable", sync)
    with caplog.at_level("INFO", "migrator"):
        assert retire(storage, ours, keep=1) == names[:1]
    assert "it does not sync" in caplog.text
    assert "retired" in caplog.text
