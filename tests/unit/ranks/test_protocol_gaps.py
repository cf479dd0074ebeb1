"""Lines of the commit protocol, each held to its place by a test that takes milliseconds.

Many were found by `tests.support.mutants`: something was changed there, and no quick test failed. The crash model, or a test
with real processes, may notice some of them as well, later.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from migrator.ckpt import generations as lineage
from migrator.ckpt import retention
from migrator.storage import posix as storages
from migrator.state.capture import Capturer
from migrator.errors import CkptCorrupt, SaveFailed, StorageError
from migrator.loop.gate import Gate
from migrator.ckpt.generations import DIRECTORY, Generation, claim, is_leaving, mark_leaving, record_name
from migrator.ckpt.manifest import NAME, Manifest, ckpt_name, own_name, parse_ckpt_name, part_name, seal, unseal
from migrator.ckpt.tensor_file import read_part, write_part
from migrator.ckpt.retention import retire
from migrator.save.attempt import Aside, Attempt, Unclean, Workshop
from migrator.ranks.shares import RankRecord
from migrator.storage.posix import LocalStorage
from tests.support.crashes import Toy
from tests.unit.storage.test_posix import Calls


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    made = LocalStorage(tmp_path / "root", "job")
    made.make_directory("ckpt")
    return made


def names_in(directory: Path) -> list[str]:
    """All of them, hidden ones too."""
    return sorted(path.name for path in directory.iterdir())


def _told(*_: Any, **__: Any) -> None:
    """A call that answers that it has done it, and has not."""


# Storage: what a call says is not believed.


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        ("unlink", "delete", "still there"),
        ("link", "exclusive", "reported as linked"),
        ("rename", "replace", "reported as renamed"),
        ("mkdir", "make", "reported as made"),
    ],
)
def test_a_call_that_says_it_has_done_what_it_has_not_is_an_error(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str, name: str, said: str
) -> None:
    """Of a commit that is only told nobody may hear as of a commit."""
    storage.put("old", b"", exclusive=True)
    acts = {
        "delete": lambda: storage.delete("old"),
        "exclusive": lambda: storage.put("ckpt/new", b"", exclusive=True),
        "replace": lambda: storage.put("ckpt/new", b"", exclusive=False),
        "make": lambda: storage.make_directory("other"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _told)
        with pytest.raises(StorageError, match=said):
            acts[name]()


def test_a_rename_that_leaves_both_names_is_an_error(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it was a copy, and nobody knows whose bytes are the ones that were synced."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", os.link)
        with pytest.raises(StorageError, match="reported as renamed"):
            storage.put("ckpt/new", b"", exclusive=False)


def test_a_volume_that_gives_back_other_bytes_does_not_pass_the_check(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is not only written, it is compared."""
    monkeypatch.setattr(LocalStorage, "get", lambda *_, **__: b"other")
    with pytest.raises(StorageError, match="gave back other bytes"):
        storage.check()


def test_a_volume_that_cannot_give_a_name_once_does_not_pass_the_check(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a commit needs is tried by the probe: not only a rename."""

    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="commit"):
        storage.check()


@pytest.mark.parametrize("exclusive", [True, False])
def test_what_the_check_refuses_gets_no_name(storage: LocalStorage, exclusive: bool) -> None:
    """It looks when the bytes wait aside in the directory, and nothing is left of them."""
    seen = []

    def check() -> None:
        seen.append((storage.list("ckpt"), len(storage.list("ckpt", aside=True))))
        raise StorageError("not now")

    with pytest.raises(StorageError, match="not now"):
        storage.put("ckpt/manifest.json", b"{}", exclusive=exclusive, check=check)
    assert seen == [([], 1)]
    assert names_in(storage.directory / "ckpt") == []


# Storage: what it asks the kernel for.


def test_no_file_stays_open(storage: LocalStorage) -> None:
    """A job lives for weeks; each verb closes what it has opened, also when it fails."""
    before = names_in(Path("/proc/self/fd"))
    storage.put("ckpt/a", b"abc", exclusive=True)
    storage.put("ckpt/a", b"abc", exclusive=False)
    storage.get("ckpt/a")
    storage.now()
    storage.sync_directory("ckpt")
    with pytest.raises(StorageError):
        storage.get("ckpt")
    with storage.write("ckpt/b"):
        pass
    with storage.write("ckpt/b") as file:
        file.finish()
    assert names_in(Path("/proc/self/fd")) == before


def test_without_links_no_file_stays_open(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a claim stay behind."""

    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    before = names_in(Path("/proc/self/fd"))
    storage.put("ckpt/a", b"abc", exclusive=True)
    assert names_in(Path("/proc/self/fd")) == before
    assert names_in(storage.directory / "ckpt") == ["a"]


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(storage: LocalStorage) -> None:
    """Nobody writes to it: whoever waited would wait for ever, and a load hangs worse than it fails."""
    os.mkfifo(storage.directory / "pipe")
    with pytest.raises(StorageError, match="no regular file") as refusal:
        storage.get("pipe")
    assert refusal.value.errno == errno.EISDIR
    assert storage.size("pipe") is None


def test_no_more_is_read_than_may_be_there(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte more than the limit tells that it is too large; and large files come in pieces."""
    asked = []
    real = os.read

    def read(fd: int, size: int) -> bytes:
        asked.append(size)
        return real(fd, size)

    storage.put("record", b"x" * 1000, exclusive=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        with pytest.raises(StorageError, match="larger than 4"):
            storage.get("record", limit=4)
        assert asked == [5]
        storage.get("record")
    assert max(asked) == 1 << 24


@pytest.fixture
def one_name_aside(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody has made, for whatever reason, the very file that is about to be written aside."""
    taken = storage.directory / "ckpt" / ".taken.000000000000.tmp"
    taken.write_bytes(b"not ours")
    monkeypatch.setattr(storages, "_aside", lambda target: taken)
    return taken


def test_a_file_aside_is_always_a_new_one(storage: LocalStorage, one_name_aside: Path) -> None:
    """Two that write into one file would both commit it."""
    with pytest.raises(StorageError, match="exists"):
        storage.write("ckpt/part")
    assert one_name_aside.read_bytes() == b"not ours"
    with pytest.raises(StorageError, match="exists"):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)


def test_only_a_directory_is_synced_as_one(storage: LocalStorage) -> None:
    """A file of that name would be synced, and the names that matter would not."""
    storage.put("file", b"", exclusive=True)
    with pytest.raises(StorageError) as refusal:
        storage.sync_directory("file")
    assert refusal.value.errno == errno.ENOTDIR


def test_nothing_is_written_through_a_link(storage: LocalStorage, tmp_path: Path) -> None:
    """A job's directory holds all that is its own; what a link leads to may be another job's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (storage.directory / "link").symlink_to(elsewhere)
    acts = [
        lambda: storage.put("link/a", b"", exclusive=False),
        lambda: storage.put("link", b"", exclusive=False),
        lambda: storage.list("link"),
        lambda: storage.delete_directory("link"),
    ]
    for act in acts:
        with pytest.raises(StorageError, match="is a link") as refusal:
            act()
        assert refusal.value.errno == errno.ELOOP
    assert names_in(elsewhere) == []


def test_a_file_where_a_directory_was_expected_is_deleted_alone(storage: LocalStorage) -> None:
    """The name is what is to go; what lies beside it stays."""
    storage.put("a", b"", exclusive=True)
    storage.put("b", b"", exclusive=True)
    storage.delete_directory("a")
    assert storage.list() == ["b", "ckpt"]


def test_a_directory_goes_in_one_piece_and_for_good_before_what_is_in_it(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash that brought it back under its name would bring it back with some of its files gone."""
    storage.put("ckpt/a", b"", exclusive=True)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        storage.delete_directory("ckpt")
    assert calls.made == [("rename", "aside"), ("fsync", "job"), ("unlink", "a"), ("rmdir", "aside")]


def test_a_directory_that_is_aside_already_is_deleted_where_it_is(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is none that anybody would find."""
    storage.make_directory(".ckpt.000000000000.tmp")
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        storage.delete_directory(".ckpt.000000000000.tmp")
    assert calls.made == [("rmdir", "aside")]


def test_a_file_is_no_directory_to_make(storage: LocalStorage) -> None:
    """It is said so at once, not when something is to be written below it."""
    storage.put("file", b"", exclusive=True)
    with pytest.raises(StorageError, match="is a file"):
        storage.make_directory("file")


def test_the_clock_can_be_asked_before_anything_was_written(tmp_path: Path) -> None:
    """A life that begins asks it, and the directory may not be there yet."""
    assert LocalStorage(tmp_path / "root", "new").now() > 0


# Retention: what is swept, and when.


def life(storage: LocalStorage) -> Generation:
    return claim(storage, fresh=False, about={})


def written(storage: LocalStorage, generation: int, step: int) -> Manifest:
    name = ckpt_name(generation, step)
    part = write_part(storage, f"{name}/{part_name(0, 1)}", {"w": torch.full((3,), float(step))})
    return Manifest(generation, step, "job", 1, (part,), {})


def saved(storage: LocalStorage, generation: int, step: int) -> str:
    manifest = written(storage, generation, step)
    storage.put(f"{manifest.ckpt}/{NAME}", manifest.to_bytes(), exclusive=True)
    return manifest.ckpt


def stamped(storage: LocalStorage, name: str, *, later_than: int, by_s: float) -> Path:
    """A file or directory that was written so many seconds after a life had begun, by the storage's clock."""
    path = storage.directory / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.touch()
    began = storage.modified(record_name(later_than))
    assert began is not None
    os.utime(path, (began + by_s, began + by_s))
    return path


ASIDE = ".part.000000000000.tmp"


@pytest.mark.parametrize("place", ["", f"{DIRECTORY}/"])
def test_what_dead_writers_left_aside_is_swept(storage: LocalStorage, place: str) -> None:
    """What is from before this life began; what came with it or after may be another life's that begins right now."""
    ours = life(storage)
    saved(storage, 1, 10)
    before = stamped(storage, f"{place}{ASIDE}", later_than=1, by_s=-1)
    at = stamped(storage, f"{place}.b{ASIDE}", later_than=1, by_s=0)
    after = stamped(storage, f"{place}.c{ASIDE}", later_than=1, by_s=1)
    retire(storage, ours, keep=1, sweeps=False)
    assert before.exists()
    retire(storage, ours, keep=1)
    assert (before.exists(), at.exists(), after.exists()) == (False, True, True)


def test_a_ckpt_that_was_being_deleted_is_swept(storage: LocalStorage) -> None:
    """It is a directory, with files in it."""
    ours = life(storage)
    saved(storage, 1, 10)
    (storage.directory / ASIDE).mkdir()
    (storage.directory / ASIDE / "part").touch()
    stamped(storage, ASIDE, later_than=1, by_s=-1)
    retire(storage, ours, keep=1)
    assert storage.list(aside=True) == []


def test_marks_that_are_over_are_swept(storage: LocalStorage) -> None:
    """Those of earlier lives of this lineage; not its own, and not those of others."""
    life(storage)
    life(storage)
    ours = claim(storage, fresh=True, about={})
    for number in (1, 3):
        mark_leaving(storage, number, 30.0)
    later = life(storage)
    mark_leaving(storage, 4, 30.0)
    stamped(storage, f"{DIRECTORY}/000003.leaving", later_than=4, by_s=-1e6)
    assert not is_leaving(storage, 3)
    saved(storage, 4, 10)
    retire(storage, later, keep=1)
    assert ours.lineage == (3,)
    assert [name for name in storage.list(DIRECTORY) if name.endswith(".leaving")] == [
        "000001.leaving",
        "000004.leaving",
    ]


def test_of_a_ckpt_only_what_its_manifest_names_is_kept(storage: LocalStorage) -> None:
    """Of all but the newest, in which somebody may still be writing; what is none of ours is not touched."""
    ours = life(storage)
    names = [saved(storage, 1, step) for step in (10, 20)]
    mine = {NAME, part_name(0, 1)}
    more = {part_name(0, 1, rank=3), "rank-00001.json", ASIDE}
    for name in names:
        for file in (*more, "notes.txt"):
            (storage.directory / name / file).touch()
    assert retire(storage, ours, keep=2) == []
    assert set(names_in(storage.directory / names[0])) == {*mine, "notes.txt"}
    assert set(names_in(storage.directory / names[1])) == {*mine, *more, "notes.txt"}


def test_a_ckpt_of_a_life_that_may_still_be_saving_is_not_swept(storage: LocalStorage) -> None:
    """A rank of it may be about to write what it found missing."""
    life(storage)
    old = saved(storage, 1, 10)
    (storage.directory / old / ASIDE).touch()
    mark_leaving(storage, 1, 30.0)
    ours = life(storage)
    saved(storage, 2, 20)
    retire(storage, ours, keep=2)
    assert ASIDE in names_in(storage.directory / old)
    assert storage.list(DIRECTORY).count("000001.leaving") == 1


def test_a_ckpt_of_a_newer_version_counts_and_is_not_swept(storage: LocalStorage) -> None:
    """It cannot be judged here: it is neither corrupt nor a reason to keep one more."""
    ours = life(storage)
    names = [saved(storage, 1, step) for step in (10, 20, 30)]
    newer = seal("manifest", {"format": 3})
    (storage.directory / names[1] / NAME).write_bytes(newer)
    (storage.directory / names[1] / ASIDE).touch()
    assert retire(storage, ours, keep=2) == names[:1]
    assert ASIDE in names_in(storage.directory / names[1])


def begins_at(monkeypatch: pytest.MonkeyPatch, storage: LocalStorage, function: str, *, before: bool) -> None:
    """Another life of the job begins just before, or just after, retention has called this."""
    real = getattr(retention, function)
    begun: list[Generation] = []

    def call(*arguments: Any, **more: Any) -> Any:
        if before and not begun:
            begun.append(life(storage))
        found = real(*arguments, **more)
        if not begun:
            begun.append(life(storage))
        return found

    monkeypatch.setattr(retention, function, call)


def test_a_life_that_begins_meanwhile_ends_the_deleting(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be loading what was superfluous a moment ago: not even what is aside goes then."""
    ours = life(storage)
    names = [saved(storage, 1, step) for step in (10, 20, 30)]
    hidden = stamped(storage, ASIDE, later_than=1, by_s=-1)
    begins_at(monkeypatch, storage, "_delete", before=False)
    assert retire(storage, ours, keep=1) == names[:1]
    assert hidden.exists()
    assert lineage.ckpts(storage, (1,)) == names[:0:-1]


def test_a_life_that_begins_meanwhile_ends_the_sweeping(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there was nothing to delete."""
    ours = life(storage)
    saved(storage, 1, 10)
    hidden = stamped(storage, ASIDE, later_than=1, by_s=-1)
    begins_at(monkeypatch, storage, "_superfluous", before=True)
    assert retire(storage, ours, keep=1) == []
    assert hidden.exists()


def test_a_ckpt_is_deleted_manifest_first_and_for_good(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is durable before the next one, the last one too."""
    ours = life(storage)
    first, second = saved(storage, 1, 10), saved(storage, 1, 20)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        retire(storage, ours, keep=1)
    assert calls.made == [
        ("fsync", second),
        ("fsync", "job"),
        ("unlink", NAME),
        ("fsync", first),
        ("rename", "aside"),
        ("fsync", "job"),
        ("unlink", part_name(0, 1)),
        ("rmdir", "aside"),
        ("fsync", "job"),
    ]


def test_where_nothing_was_deleted_nothing_is_said_and_nothing_synced(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs after each commit: a sync more each time would be paid by each of them."""
    ours = life(storage)
    name = saved(storage, 1, 10)
    with monkeypatch.context() as patch, caplog.at_level("INFO", "migrator"):
        calls = Calls(patch)
        retire(storage, ours, keep=1)
    assert calls.made == [("fsync", name), ("fsync", "job")]
    assert caplog.messages == []


def test_what_lies_in_the_way_of_a_sync_is_told(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last sync fails: what is gone is said to be gone, and nothing is raised."""
    ours = life(storage)
    names = [saved(storage, 1, step) for step in (10, 20)]

    def sync(of: LocalStorage, name: str = "") -> None:
        if not storage.list(names[0]) and not name:
            raise StorageError("it does not sync")

    monkeypatch.setattr(LocalStorage, "sync_directory", sync)
    with caplog.at_level("INFO", "migrator"):
        assert retire(storage, ours, keep=1) == names[:1]
    assert "it does not sync" in caplog.text
    assert "retired" in caplog.text


# One attempt: what is written, and what is believed at the commit.


def attempts(
    storage: LocalStorage,
    *,
    size: int = 1,
    toys: list[Toy] | None = None,
    may_open: bool = False,
    on_block: Callable[[], None] = lambda: None,
    **more: Any,
) -> list[Attempt]:
    """The same save as each rank of a job sees it; nothing is written yet."""
    generation = Generation(1, None, (1,), frozenset({1}))
    made = []
    for rank in range(size):
        toy = toys[rank] if toys else Toy(rank)
        toy.metrics["rank"] = rank
        capturer = Capturer(toy.registry)
        gate = Gate(capturer)
        gate.publish(capturer.take(10, None, full=True))
        capture = gate.take(0)
        assert capture is not None
        shop = Workshop(storage, generation, "job", toy.registry, capturer, gate, rank=rank, size=size, **more)
        made.append(
            Attempt(
                shop,
                capture,
                aside=Aside(),
                may_open=may_open,
                on_block=lambda done, total: on_block(),
                members=tuple(range(size)),
            )
        )
    return made


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a share, however small the state."""
    monkeypatch.setattr("migrator.ranks.shares.SHARE_BYTES", 1)


FIRST = ckpt_name(1, 10)


def test_a_save_of_the_same_step_is_joined_and_made_durable(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that failed at the last moment may have made it: it is neither written again nor believed unsynced."""
    (first,), (second,) = attempts(storage), attempts(storage)
    assert first.standing() is None
    saved_first = first.run()
    assert first.is_committed()
    before = names_in(storage.directory / FIRST)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        joined = second.run()
    assert (joined.ckpt, joined.step, joined.size) == (saved_first.ckpt, 10, saved_first.size)
    assert calls.made == [("fsync", FIRST), ("fsync", "job")]
    assert names_in(storage.directory / FIRST) == before


def test_who_does_not_see_the_root_finds_nothing_standing(storage: LocalStorage) -> None:
    """It does not even look."""
    attempts(storage)[0].run()
    assert attempts(storage, writes=False)[0].standing() is None


def test_a_commit_whose_answer_got_lost_is_one(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is there: whatever the call said, the ckpt exists, and it is made durable."""
    (attempt,) = attempts(storage)
    attempt.share()
    real = LocalStorage.put

    def put(of: LocalStorage, name: str, data: bytes, **more: Any) -> None:
        real(of, name, data, **more)
        raise StorageError("the answer got lost", errno=errno.EIO)

    monkeypatch.setattr(LocalStorage, "put", put)
    assert attempt.commit().ckpt == FIRST
    assert lineage.whole(storage, FIRST).step == 10


def test_a_commit_that_failed_is_none(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is not there: the failure is told."""
    (attempt,) = attempts(storage)
    attempt.share()

    def put(*_: Any, **__: Any) -> None:
        raise StorageError("the volume is full", errno=errno.ENOSPC)

    monkeypatch.setattr(LocalStorage, "put", put)
    with pytest.raises(StorageError, match="full"):
        attempt.commit()
    assert storage.list(FIRST) == [part_name(0, 1)]


def no_links_and_a_dead_claim(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    (storage.directory / FIRST / f".{NAME}.claim").touch()


def test_a_claim_that_was_never_used_keeps_nobody_from_committing(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it has died, or is slow: then its manifest is as good as this one."""
    (attempt,) = attempts(storage)
    attempt.share()
    no_links_and_a_dead_claim(storage, monkeypatch)
    assert attempt.commit().ckpt == FIRST
    assert lineage.whole(storage, FIRST).step == 10


@pytest.mark.parametrize("claimed", [False, True], ids=["link", "claimed by the dead"])
def test_a_ckpt_whose_parts_were_swept_is_not_committed(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """A later life has taken this one for dead: there is no manifest that names what is gone."""
    (attempt,) = attempts(storage)
    attempt.share()
    if claimed:
        no_links_and_a_dead_claim(storage, monkeypatch)
    claim(storage, fresh=False, about={})
    claim(storage, fresh=False, about={})
    storage.delete(f"{FIRST}/{part_name(0, 1)}")
    with pytest.raises(StorageError, match="A later life") as refusal:
        attempt.commit()
    assert refusal.value.errno == errno.ENOENT
    assert storage.list(FIRST) == []


def test_who_comes_second_joins_and_replaces_nothing(storage: LocalStorage) -> None:
    """Both ranks commit what both have written; the first manifest stays, to the byte."""
    one, other = attempts(storage, size=2)
    for attempt in (one, other):
        attempt.share()
    for attempt in (one, other):
        assert attempt.look().missing() == []
    one.commit()
    manifest = storage.get(f"{FIRST}/{NAME}")
    assert other.commit().ckpt == FIRST
    assert storage.get(f"{FIRST}/{NAME}") == manifest


def test_each_rank_writes_its_share_and_says_so(storage: LocalStorage, shared_out: None) -> None:
    """A part and a record of each; the manifest names both parts."""
    one, other = attempts(storage, size=2)
    one.share()
    assert storage.list(FIRST) == [part_name(0, 2, rank=0), "rank-00000.json"]
    assert one.look().missing() == [1]
    other.share()
    assert storage.list(FIRST)[1:] == [part_name(1, 2, rank=1), "rank-00000.json", "rank-00001.json"]
    assert one.look().missing() == other.look().missing() == []
    assert one.help() is None
    one.commit()
    parts = lineage.whole(storage, FIRST).parts
    assert [part.name for part in parts] == [part_name(0, 2, rank=0), part_name(1, 2, rank=1)]


def test_a_share_that_nobody_wrote_is_written_by_who_is_there(storage: LocalStorage, shared_out: None) -> None:
    """Under a name of its own, and the others hear of it."""
    one, other = attempts(storage, size=2)
    one.share()
    assert one.look().missing() == [1]
    assert one.help() == 1
    assert one.look().missing() == []
    assert one.help() is None
    record = RankRecord.from_bytes(storage.get(f"{FIRST}/rank-00000.json"))
    assert {share: part.name for share, part in record.shares.items()} == {
        0: part_name(0, 2, rank=0),
        1: part_name(1, 2, rank=0),
    }
    one.commit()
    assert lineage.whole(storage, FIRST).ranks == 2
    assert other.standing() is not None


def test_what_is_not_what_the_others_were_told_of_is_not_written(storage: LocalStorage, shared_out: None) -> None:
    """A tensor that changed between the digest and the write: its share would be put together with those of others."""
    toys = [Toy(0), Toy(1)]
    one, _ = attempts(storage, size=2, toys=toys)
    one.share()
    # By way of numpy nothing counts the change.
    for parameter in toys[0].model.parameters():
        parameter.numpy()[:] = 7
    with pytest.raises(Unclean, match="model"):
        one.help()
    assert one.look().missing() == [1]


def test_a_second_try_writes_under_other_names(storage: LocalStorage, shared_out: None) -> None:
    """A slow write of the first one never lands in what the second one has finished."""
    toy = Toy(0)
    (first, _) = attempts(storage, size=2, toys=[toy, Toy(1)])
    first.share()
    tries = first._shop.tries
    (second, _) = attempts(storage, size=2, toys=[toy, Toy(1)], tries=tries)
    second.share()
    parts = [name for name in storage.list(FIRST) if name.startswith("part")]
    assert parts == [part_name(0, 2, rank=0, attempt=2), part_name(0, 2, rank=0)]


def test_what_is_a_ranks_own_and_large_has_a_part_of_its_own(
    storage: LocalStorage, shared_out: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its share, under a name that says whose it is."""
    monkeypatch.setattr("migrator.save.attempt.OWN_INLINE_BYTES", 0)
    one, other = attempts(storage, size=2)
    one.share()
    other.share()
    one.look()
    one.commit()
    names = {part.name for part in lineage.whole(storage, FIRST).parts}
    assert names == {part_name(0, 2, rank=0), part_name(1, 2, rank=1), own_name(0), own_name(1)}


def test_who_does_not_see_the_root_writes_nothing(storage: LocalStorage, shared_out: None) -> None:
    """It only hands on what is its own."""
    one, other = attempts(storage, size=2, writes=False)
    other.share()
    assert storage.list(FIRST) == ["rank-00001.json"]
    record = RankRecord.from_bytes(storage.get(f"{FIRST}/rank-00001.json"))
    assert (dict(record.shares), record.own) == ({}, None)
    assert one.standing() is None


def test_a_job_of_one_rank_writes_one_part_and_no_record(storage: LocalStorage) -> None:
    """Nobody would read it."""
    (attempt,) = attempts(storage)
    saved_one = attempt.run()
    assert storage.list(FIRST) == [NAME, part_name(0, 1)]
    assert saved_one.size == storage.size(f"{FIRST}/{part_name(0, 1)}")


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mark sees a change: what is left are the digests."""
    monkeypatch.setattr(Capturer, "changed", lambda self, capture: [])


def changed(toy: Toy) -> None:
    for parameter in toy.model.parameters():
        parameter.numpy()[:] = 7


def test_what_changed_since_the_safe_point_is_not_even_begun(storage: LocalStorage) -> None:
    """The marks are looked at before the first byte."""
    toy = Toy()
    (attempt,) = attempts(storage, toys=[toy])
    toy.set(7.0)
    with pytest.raises(Unclean, match="model"):
        attempt.share()
    assert storage.list(FIRST) == []


def test_a_share_that_is_not_what_was_told_is_refused_by_its_digest(
    storage: LocalStorage, shared_out: None, unseen: None
) -> None:
    """Also if it is now in memory what was written: the other ranks count on what they were told."""
    toy = Toy()
    one, _ = attempts(storage, size=2, toys=[toy, Toy(1)])
    one.share()
    changed(toy)
    with pytest.raises(Unclean, match="model"):
        one.help()


@pytest.mark.parametrize("size", [1, 2])
def test_what_changed_while_it_was_written_is_refused_by_its_digest(
    storage: LocalStorage, shared_out: None, unseen: None, size: int
) -> None:
    """What was written is good, but the next share would not be of the same moment."""
    toy = Toy()
    one = attempts(storage, size=size, toys=[toy, Toy(1)], on_block=lambda: changed(toy))[0]
    with pytest.raises(Unclean, match="model"):
        one.share()


def test_what_changed_while_another_ranks_share_was_written_is_refused(
    storage: LocalStorage, shared_out: None, unseen: None
) -> None:
    """Whoever writes it reads it from its own memory."""
    toy = Toy()
    blocks = []

    def on_block() -> None:
        blocks.append(1)
        if len(blocks) > 1:
            changed(toy)

    one, _ = attempts(storage, size=2, toys=[toy, Toy(1)], on_block=on_block)
    one.share()
    assert len(blocks) == 1
    with pytest.raises(Unclean, match="model"):
        one.help()


def test_a_rank_without_a_share_proves_its_state_too(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state goes into the record, and it has to be that of the safe point when the record is made."""
    toy = Toy(1)
    _, other = attempts(storage, size=2, toys=[Toy(0), toy])
    real = Attempt._digests_of_same

    def digests(attempt: Attempt) -> dict[str, str]:
        found = real(attempt)
        toy.set(7.0)
        return found

    monkeypatch.setattr(Attempt, "_digests_of_same", digests)
    with pytest.raises(Unclean, match="model"):
        other.share()
    assert storage.list(FIRST) == []


@pytest.mark.parametrize("size", [1, 2])
def test_small_state_is_copied_aside_and_the_loop_goes_on(
    storage: LocalStorage, shared_out: None, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """What the loop changes from then on is not in the ckpt; state of just that size is small."""
    monkeypatch.setattr("migrator.save.attempt.SMALL_BYTES", 4 * 320 // size)
    toys = [Toy(rank) for rank in range(size)]
    real = Gate.open

    def opened(gate: Gate, *arguments: Any, **more: Any) -> Any:
        """The loop steps at once."""
        for toy in toys:
            changed(toy)
        return real(gate, *arguments, **more)

    monkeypatch.setattr(Gate, "open", opened)
    made = attempts(storage, size=size, toys=toys, may_open=True)
    for attempt in made:
        for toy in toys:
            toy.set(0.0)
        attempt._capture = attempt._shop.capturer.take(10, None, full=True)
        attempt.share()
        assert attempt._is_apart
    made[0].look()
    made[0].commit()
    for part in lineage.whole(storage, FIRST).parts:
        for name, tensor in read_part(storage, FIRST, part).items():
            assert not (name.startswith("model/") and tensor.any()), name


def test_the_last_save_lets_no_loop_go_on(storage: LocalStorage) -> None:
    """Nothing follows it that could be lost."""
    (attempt,) = attempts(storage, may_open=False)
    attempt.share()
    assert not attempt._is_apart


def test_large_state_is_not_copied_before_the_loop_waits(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory would be taken for nothing."""
    monkeypatch.setattr("migrator.save.attempt.SMALL_BYTES", 4 * 320 - 1)
    apart: list[bool] = []
    made = attempts(storage, may_open=True, on_block=lambda: apart.append(made[0]._is_apart))
    made[0].share()
    assert apart == [False]


def test_a_copy_that_is_not_what_it_was_made_of_is_refused(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, unseen: None
) -> None:
    """The state changed while it was copied: the copies are of no moment at all."""
    monkeypatch.setattr(Aside, "copies", lambda self, of: {key: tensor.clone() + 1 for key, tensor in of.items()})
    (attempt,) = attempts(storage, may_open=True)
    with pytest.raises(Unclean, match="model"):
        attempt.share()
    assert storage.list(FIRST) == []


# Lineage: whose ckpts are whose, and how long a mark counts.


def test_what_is_uncommitted_in_another_lineage_is_not_ours(storage: LocalStorage) -> None:
    """What is named there is deleted: it may be what another job of that name is writing."""
    written(storage, 1, 10)
    written(storage, 2, 20)
    saved(storage, 2, 30)
    assert lineage.uncommitted(storage, (2,)) == [ckpt_name(2, 20)]


def test_the_manifest_of_another_ckpt_makes_none(storage: LocalStorage) -> None:
    """A directory that was copied under another name would be loaded as a step that was never saved."""
    name = saved(storage, 1, 10)
    (storage.directory / name).rename(storage.directory / ckpt_name(1, 20))
    with pytest.raises(CkptCorrupt, match=f"its manifest is that of {name}"):
        lineage.whole(storage, ckpt_name(1, 20))


def test_what_is_wrong_with_a_part_is_said(storage: LocalStorage) -> None:
    """That it is gone is another story than that it was cut off."""
    name = saved(storage, 1, 10)
    part = storage.directory / name / part_name(0, 1)
    size = part.stat().st_size
    os.truncate(part, 20)
    with pytest.raises(CkptCorrupt, match=f"has 20 bytes; {size} bytes were committed"):
        lineage.whole(storage, name)
    part.unlink()
    with pytest.raises(CkptCorrupt, match=f"is missing; {size} bytes were committed"):
        lineage.whole(storage, name)


def test_a_life_may_say_twice_that_it_is_leaving(storage: LocalStorage) -> None:
    """A first attempt failed and left its mark; what counts is the second."""
    mark_leaving(storage, 1, 5.0)
    mark_leaving(storage, 1, 30.0)
    assert b"30.0" in storage.get(f"{DIRECTORY}/000001.leaving")


def test_a_mark_counts_ten_times_its_grace_and_no_longer(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the storage's clock, to the moment."""
    mark_leaving(storage, 1, 30.0)
    since = storage.modified(f"{DIRECTORY}/000001.leaving")
    assert since is not None
    for age_s, counts in ((299.0, True), (300.0, False), (301.0, False)):
        monkeypatch.setattr(LocalStorage, "now", lambda self, age_s=age_s: since + age_s)
        assert is_leaving(storage, 1) is counts


def failing(code: int) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise StorageError("it fails", errno=code)

    return call


MARK = f"{DIRECTORY}/000001.leaving"


def test_a_link_in_the_place_of_a_mark_is_none(storage: LocalStorage, tmp_path: Path) -> None:
    """No life of ours makes one, and whoever followed it would wait for something else."""
    storage.make_directory(DIRECTORY)
    (storage.directory / MARK).symlink_to(tmp_path)
    assert not is_leaving(storage, 1)


def test_a_directory_in_the_place_of_a_mark_is_one(storage: LocalStorage) -> None:
    """It cannot be read, so it is given an ordinary grace."""
    storage.make_directory(DIRECTORY)
    (storage.directory / MARK).mkdir()
    assert is_leaving(storage, 1)


def test_a_mark_that_goes_while_it_is_read_is_over(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The life before has just said that it is done."""
    mark_leaving(storage, 1, 30.0)
    monkeypatch.setattr(LocalStorage, "get", failing(errno.ENOENT))
    assert not is_leaving(storage, 1)


@pytest.mark.parametrize("verb", ["modified", "get"])
def test_a_volume_that_fails_is_not_taken_for_one_without_marks(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Who does not know whether somebody is saving neither loads nor deletes."""
    mark_leaving(storage, 1, 30.0)
    monkeypatch.setattr(LocalStorage, verb, failing(errno.EIO))
    with pytest.raises(StorageError, match="it fails"):
        is_leaving(storage, 1)


def test_a_mark_without_any_grace_is_over_at_once(storage: LocalStorage) -> None:
    """None is as good a number as any other."""
    mark_leaving(storage, 1, 0.0)
    assert not is_leaving(storage, 1)


def test_a_ckpt_of_the_moment_of_the_mark_is_what_was_waited_for(storage: LocalStorage) -> None:
    """The storage's clock may be coarse: both were written in one tick of it."""
    name = saved(storage, 1, 10)
    mark_leaving(storage, 1, 30.0)
    now = int(storage.now())
    for path in (f"{name}/{NAME}", MARK):
        os.utime(storage.directory / path, (now, now))
    assert lineage.wait_for_leaving(storage, (2, 1), clock=lambda: 0.0, sleep=pytest.fail) == 0


def test_a_ckpt_that_is_a_link_is_named_and_one_that_cannot_be_listed_is_an_error(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first can be walked back from; of the second nobody knows what it is."""
    (storage.directory / ckpt_name(1, 10)).symlink_to(tmp_path)
    assert lineage.ckpts(storage, (1,)) == [ckpt_name(1, 10)]
    assert lineage.uncommitted(storage, (1,)) == []
    real = LocalStorage.list

    def listed(of: LocalStorage, directory: str = "", *, aside: bool = False) -> list[str]:
        return real(of, directory, aside=aside) if not directory else failing(errno.EIO)()

    monkeypatch.setattr(LocalStorage, "list", listed)
    with pytest.raises(StorageError, match="it fails"):
        lineage.ckpts(storage, (1,))


@pytest.mark.parametrize(
    "record",
    [
        {"generation": 2, "continues": 0, "about": {}},
        {"generation": 1, "continues": None, "about": {}},
        {"generation": 2, "continues": None, "about": {}, "more": 1},
    ],
    ids=["continues none that exists", "of another generation", "of another form"],
)
def test_a_record_that_is_not_its_own_proves_nothing(storage: LocalStorage, record: dict[str, Any]) -> None:
    """What lies before it can be loaded, and nothing of it is deleted."""
    life(storage)
    life(storage)
    (storage.directory / record_name(2)).write_bytes(seal("generation", record))
    third = life(storage)
    assert third.lineage == (3, 2, 1)
    assert third.proven == {3, 2}


def test_records_that_a_failing_volume_holds_back_are_not_taken_for_damaged(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life that guessed its lineage would go on with less than there is."""
    life(storage)
    monkeypatch.setattr(LocalStorage, "get", failing(errno.EIO))
    with pytest.raises(StorageError, match="it fails"):
        life(storage)


# Records of ranks.


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
def test_a_record_with_numbers_that_are_none_is_corrupt(storage: LocalStorage, wrong: dict[str, Any]) -> None:
    """Each would become part of a name, or an index."""
    attempt = attempts(storage, size=2)[1]
    attempt.share()
    record = unseal("rank", storage.get(f"{FIRST}/rank-00001.json"))
    assert RankRecord.from_bytes(seal("rank", record)).rank == 1
    with pytest.raises(CkptCorrupt, match="not one of ours"):
        RankRecord.from_bytes(seal("rank", record | wrong))


# Manifests and names.


def test_a_manifest_as_large_as_is_read_back_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that is a byte larger: nobody would load it."""
    manifest = Manifest(1, 10, "job", 1, (), {})
    size = len(manifest.to_bytes())
    monkeypatch.setattr("migrator.ckpt.manifest.LIMIT", size)
    assert len(manifest.to_bytes()) == size
    monkeypatch.setattr("migrator.ckpt.manifest.LIMIT", size - 1)
    with pytest.raises(SaveFailed, match=f"would take {size} bytes, at most {size - 1}"):
        manifest.to_bytes()


def test_a_name_with_numbers_that_no_manifest_holds_is_that_of_no_ckpt() -> None:
    """It could never be loaded; so it is not listed either, whichever of the two is too large."""
    last = (1 << 62) - 1
    assert parse_ckpt_name(ckpt_name(1, last)) == (1, last)
    assert parse_ckpt_name(ckpt_name(last, 1)) == (last, 1)
    assert parse_ckpt_name(ckpt_name(1, last + 1)) is None
    assert parse_ckpt_name(ckpt_name(last + 1, 1)) is None


def test_a_manifest_with_a_number_that_no_name_holds_is_corrupt() -> None:
    """Name and manifest agree on what is too large."""
    last = (1 << 62) - 1
    assert Manifest.from_bytes(Manifest(1, last, "job", 1, (), {}).to_bytes()).step == last
    with pytest.raises(CkptCorrupt, match="step"):
        Manifest.from_bytes(Manifest(1, last + 1, "job", 1, (), {}).to_bytes())


def test_a_start_syncs_all_directories_above_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made them may have died before their names were synced; one that may not be opened was there before."""
    (tmp_path / "a" / "root" / "job").mkdir(parents=True)
    synced: list[Path] = []

    def sync(self: LocalStorage, directory: Path) -> None:
        synced.append(directory)
        if directory == tmp_path.parent:
            raise StorageError("not ours", errno=errno.EACCES)

    monkeypatch.setattr(LocalStorage, "_sync", sync)
    LocalStorage(tmp_path / "a" / "root", "job").check()

    above = [tmp_path / "a" / "root", tmp_path / "a", tmp_path, tmp_path.parent, tmp_path.parent.parent]
    assert synced[: len(above)] == above


def test_a_start_that_cannot_sync_the_directories_above_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that are not ours to open."""
    (tmp_path / "root" / "job").mkdir(parents=True)

    def sync(self: LocalStorage, directory: Path) -> None:
        if directory == tmp_path:  # further down another sync would say it
            raise StorageError("the volume fails", errno=errno.EIO)

    monkeypatch.setattr(LocalStorage, "_sync", sync)
    with pytest.raises(StorageError, match="the volume fails"):
        LocalStorage(tmp_path / "root", "job").check()


def test_a_record_is_made_when_the_one_it_continues_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash could leave it without: what it continues would never be cleaned up."""
    storage = LocalStorage(tmp_path, "job")
    lineage.claim(storage, fresh=False, about={})
    calls: list[tuple[str, str]] = []
    sync, put = LocalStorage.sync_directory, LocalStorage.put

    def noted_sync(self: LocalStorage, name: str = "") -> None:
        calls.append(("sync", name))
        sync(self, name)

    def noted_put(self: LocalStorage, name: str, data: bytes, **how: Any) -> None:
        calls.append(("put", name))
        put(self, name, data, **how)

    monkeypatch.setattr(LocalStorage, "sync_directory", noted_sync)
    monkeypatch.setattr(LocalStorage, "put", noted_put)
    lineage.claim(storage, fresh=False, about={})

    assert calls == [("sync", "generations"), ("put", "generations/000002.json")]
