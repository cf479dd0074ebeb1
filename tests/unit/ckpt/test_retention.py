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
import torch

from migrator.errors import CkptCorrupt
from migrator.ckpt.generations import Generation, ckpts, claim, mark_leaving, unmark_leaving, whole
from migrator.ckpt.manifest import Manifest, ckpt_name, part_name
from migrator.ckpt.tensor_file import read_part, write_part
from migrator.ckpt.retention import retire
from migrator.storage.posix import LocalStorage
from tests.support import chance


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path, "job")


def live(storage: LocalStorage, *, fresh: bool = False) -> Generation:
    return claim(storage, fresh=fresh, about={})


def write(storage: LocalStorage, generation: int, step: int) -> Manifest:
    name = ckpt_name(generation, step)
    part = write_part(storage, f"{name}/{part_name(0, 1)}", {"w": torch.full((3,), float(step))})
    return Manifest(generation, step, "job", 1, (part,), {})


def save(storage: LocalStorage, generation: int, step: int) -> str:
    manifest = write(storage, generation, step)
    storage.put(f"{manifest.ckpt}/manifest.json", manifest.to_bytes(), exclusive=True)
    return manifest.ckpt


def directories(storage: LocalStorage) -> list[str]:
    return [name for name in storage.list() if name != "generations"]


def test_the_newest_are_kept(storage: LocalStorage) -> None:
    """`keep` of them, and what was deleted is said, oldest first."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30, 40)]
    assert retire(storage, life, keep=2) == names[:2]
    assert directories(storage) == names[2:]
    assert retire(storage, life, keep=2) == []
    assert all(whole(storage, name) for name in names[2:])


def test_at_least_one_is_kept_whatever_is_asked(storage: LocalStorage) -> None:
    """The last ckpt is never superfluous."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20)]
    assert retire(storage, life, keep=0) == names[:1]


def test_what_is_not_whole_does_not_count(storage: LocalStorage) -> None:
    """Two whole ones are kept beside a torn one; the torn one goes when it is older than both."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30, 40)]
    os.truncate(storage.directory / names[2] / part_name(0, 1), 20)
    assert retire(storage, life, keep=2) == names[:1]
    names.append(save(storage, 1, 50))
    assert retire(storage, life, keep=2) == names[1:3]
    assert directories(storage) == names[3:]


def test_what_was_found_corrupt_does_not_count(storage: LocalStorage) -> None:
    """Its sizes are right, but while loading a digest was not: the one before it is the one that works."""
    earlier = live(storage)
    good, bad = save(storage, earlier.number, 10), save(storage, earlier.number, 20)
    life = live(storage)
    first = save(storage, 2, 30)
    assert retire(storage, life, keep=2, bad=frozenset({bad})) == []
    second = save(storage, 2, 40)
    assert retire(storage, life, keep=2, bad=frozenset({bad})) == [good, bad]
    assert directories(storage) == [first, second]


def test_too_few_whole_ones_delete_nothing(storage: LocalStorage) -> None:
    """Torn ones might still be worth something to somebody."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    for name in names[:2]:
        os.truncate(storage.directory / name / "manifest.json", 20)
    assert retire(storage, life, keep=2) == []
    assert directories(storage) == names


def test_who_sees_a_later_life_deletes_nothing(storage: LocalStorage) -> None:
    """It may be the one that was thought dead; the later life may be loading just now."""
    life = live(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    live(storage)
    assert retire(storage, life, keep=1) == []
    assert directories(storage) == names


def test_a_life_that_is_behind_another_one_deletes_only_its_own(storage: LocalStorage) -> None:
    """The other one has come further, and is what the next life goes on from. Once this one has, the rest goes."""
    for _ in range(2):
        live(storage)
    real = [save(storage, 2, step) for step in (500, 600)]
    doomed = live(storage)
    torn = ckpt_name(2, 550)
    write(storage, 2, 550)
    names = [save(storage, 3, step) for step in (510, 520, 530)]
    assert retire(storage, doomed, keep=2) == names[:1]
    assert directories(storage) == sorted([*real, torn, *names[1:]])
    names.append(save(storage, 3, 610))
    assert retire(storage, doomed, keep=2) == [real[0], torn, names[1], names[2]]
    assert directories(storage) == [real[1], names[3]]


def test_the_first_commit_retires_what_earlier_lives_left(storage: LocalStorage) -> None:
    """Not the claim of a number, not the load: only when there is something newer."""
    old = [save(storage, live(storage).number, 10 * i) for i in (1, 2, 3)]
    life = live(storage)
    assert retire(storage, life, keep=2) == []
    new = save(storage, 4, 35)
    assert retire(storage, life, keep=2) == old[:2]
    assert directories(storage) == [old[2], new]


def test_nothing_of_an_earlier_life_goes_while_one_may_still_be_leaving(storage: LocalStorage) -> None:
    """What it is writing must not vanish under it; our own is ours to delete."""
    old = [save(storage, live(storage).number, 10 * i) for i in (1, 2)]
    write(storage, 2, 25)
    mark_leaving(storage, 2, 30)
    life = live(storage)
    mine = [save(storage, 3, step) for step in (30, 40)]
    assert retire(storage, life, keep=1) == mine[:1]
    assert directories(storage) == [*old, ckpt_name(2, 25), mine[1]]
    unmark_leaving(storage, 2)
    assert retire(storage, life, keep=1) == [*old, ckpt_name(2, 25)]


def test_other_lineages_are_never_touched(storage: LocalStorage) -> None:
    """Committed or not."""
    live(storage)
    theirs = [save(storage, 1, step) for step in (10, 20, 30)]
    write(storage, 1, 40)
    life = live(storage, fresh=True)
    mine = [save(storage, 2, step) for step in (1, 2, 3)]
    assert retire(storage, life, keep=1) == mine[:2]
    assert directories(storage) == [*theirs, ckpt_name(1, 40), mine[2]]


def test_what_an_unreadable_record_makes_uncertain_is_kept(storage: LocalStorage) -> None:
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


def test_what_was_never_committed_is_swept(storage: LocalStorage) -> None:
    """Leftovers of thrown away attempts, of this life and earlier ones, hidden files too."""
    live(storage)
    write(storage, 1, 5)
    life = live(storage)
    write(storage, 2, 10)
    storage.put(f"{ckpt_name(2, 11)}/.part.tmp", b"", exclusive=True)
    storage.make_directory(ckpt_name(2, 12))
    name = save(storage, 2, 20)
    assert retire(storage, life, keep=2) == [ckpt_name(1, 5), *(ckpt_name(2, step) for step in (10, 11, 12))]
    assert directories(storage) == [name]


def test_what_had_come_further_is_not_swept_until_it_is_passed(storage: LocalStorage) -> None:
    """Its writer may live after all, and commit it this very moment: then it is what the next life goes on from."""
    live(storage)
    write(storage, 1, 50)
    life = live(storage)
    names = [save(storage, 2, step) for step in (20, 30)]
    assert retire(storage, life, keep=1) == names[:1]
    assert directories(storage) == [ckpt_name(1, 50), names[1]]
    names.append(save(storage, 2, 60))
    assert retire(storage, life, keep=1) == [ckpt_name(1, 50), names[1]]
    assert directories(storage) == [names[2]]


def test_what_is_being_written_is_not_swept(storage: LocalStorage) -> None:
    """Neither by its name nor by its place above the newest commit."""
    life = live(storage)
    write(storage, 1, 10)
    save(storage, 1, 20)
    write(storage, 1, 30)
    assert retire(storage, life, keep=1, current=ckpt_name(1, 10)) == []
    assert directories(storage) == [ckpt_name(1, step) for step in (10, 20, 30)]


def test_what_another_rank_may_be_about_to_commit_is_not_swept(storage: LocalStorage) -> None:
    """Leaving, two ranks may each save a step of their own; committed ones are retired all the same."""
    life = live(storage)
    old, newer = save(storage, 1, 10), write(storage, 1, 15).ckpt
    newest = save(storage, 1, 20)

    assert retire(storage, life, keep=1, sweeps=False) == [old]
    assert directories(storage) == [newer, newest]


def test_failures_are_told_and_not_raised(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def story(storage: LocalStorage, safe: list[str]) -> None:
    """Two lives that save, commit and retire; `safe` gets the name of each commit that was reported."""
    for number, steps in ((1, (10, 20, 30)), (2, (40, 50))):
        life = live(storage)
        assert life.number == number
        for step in steps:
            mark_leaving(storage, number, 0)
            safe.append(save(storage, number, step))
            unmark_leaving(storage, number)
            retire(storage, life, keep=1)


def assert_nothing_is_lost(storage: LocalStorage, safe: list[str], steps: list[str]) -> None:
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
            story(LocalStorage(base / "disk", "job"), safe)
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
        assert_nothing_is_lost(LocalStorage(base / "disk", "job"), safe, STEPS)
        shutil.rmtree(base)


def test_a_power_cut_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """The node dies: bytes and names that were not synced are there, or half there, or not."""
    total = run_story(tmp_path / "whole", 1 << 30)[0].count
    for cut_at in chance.some("power cuts", range(total), 0.4):
        base = tmp_path / str(cut_at)
        disk, safe = run_story(base, cut_at)
        for i, lost in enumerate(disk.losses()):
            disk.image(base / f"image{i}", lost)
            assert_nothing_is_lost(LocalStorage(base / f"image{i}", "job"), safe, STEPS)
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
            assert_nothing_is_lost(LocalStorage(base / "image", "job"), safe, STEPS)
        except (AssertionError, CkptCorrupt):
            lost += 1
    assert lost > total // 20
