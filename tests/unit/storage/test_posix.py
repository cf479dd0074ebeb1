"""A volume: what is durable, what is exclusive, and what is told when it fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migrator.errors import (
    SettingsError,
    StorageAccessError,
    StorageError,
    StorageExistsError,
    StorageForeignError,
    StorageTransientError,
)
from migrator.storage import posix_calls
from migrator.storage.posix import PosixStorage, as_storage_error
from tests.support.volume import Calls, names_in


@pytest.fixture
def storage(tmp_path_factory: pytest.TempPathFactory) -> PosixStorage:
    """On the disk: a file system in memory does not know all that it is asked for."""
    return PosixStorage(tmp_path_factory.mktemp("storage") / "root", "job")


def everything(storage: PosixStorage) -> list[str]:
    return sorted(str(path.relative_to(storage.root)) for path in storage.root.rglob("*"))


def write(storage: PosixStorage, name: str, data: bytes) -> None:
    with storage.upload(name) as file:
        file.write([memoryview(data)])
        file.finish()


@pytest.fixture
def calls(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    storage.make_directory("ckpt")
    with monkeypatch.context() as patch:
        yield Calls(patch)


# --- small files


def test_what_was_put_is_there(storage: PosixStorage) -> None:
    """Under its name, in directories that are made as needed, with nothing left aside."""
    storage.put("a/b.json", b"one", exclusive=True)
    storage.put("a/c.json", b"two", exclusive=False)
    storage.put("a/c.json", b"three", exclusive=False)
    assert storage.get("a/b.json") == b"one"
    assert storage.get("a/c.json") == b"three"
    assert storage.list("a") == ["b.json", "c.json"]
    assert everything(storage) == ["job", "job/a", "job/a/b.json", "job/a/c.json"]


def test_an_exclusive_name_is_given_once(storage: PosixStorage) -> None:
    """Of many who want it at the same time one gets it, the others are told, and its bytes stay."""
    start, won, lost = threading.Barrier(8), [], []

    def put(i: int) -> None:
        start.wait()
        try:
            storage.put("claim", b"%d" % i, exclusive=True)
            won.append(i)
        except StorageExistsError:
            lost.append(i)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    assert storage.get("claim") == b"%d" % won[0]
    assert everything(storage) == ["job", "job/claim"]


def test_bytes_are_durable_before_their_name_and_the_name_before_success(storage: PosixStorage, calls: Calls) -> None:
    """Write, sync, link, sync the directory: any other order can leave an empty commit after a node crash."""
    storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert calls.made == [
        ("pwritev", "aside"),
        ("fsync", "aside"),
        ("link", "manifest.json"),
        ("unlink", "aside"),
        ("fsync", "ckpt"),
    ]


def test_replacing_keeps_the_same_order(storage: PosixStorage, calls: Calls) -> None:
    """The old bytes are there until the new ones are safe."""
    storage.put("ckpt/mark", b"{}", exclusive=False)
    assert [call for call in calls.made if call[0] != "unlink"] == [
        ("pwritev", "aside"),
        ("fsync", "aside"),
        ("rename", "mark"),
        ("fsync", "ckpt"),
    ]


def test_new_directories_are_durable_from_the_top(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ckpt whose directory's name was lost in a crash is lost as well."""
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        storage.make_directory("ckpt")
    assert calls.made == [
        ("mkdir", "root"),
        ("fsync", storage.root.parent.name),
        ("mkdir", "job"),
        ("fsync", "root"),
        ("mkdir", "ckpt"),
        ("fsync", "job"),
    ]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_without_links_a_name_is_given_once_as_well(storage: PosixStorage, calls: Calls, code: int) -> None:
    """Some network file systems have no links; whoever comes second is told all the same."""
    calls.fail["link", "manifest.json"] = code
    storage.put("ckpt/manifest.json", b"first", exclusive=True)
    with pytest.raises(StorageExistsError):
        storage.put("ckpt/manifest.json", b"second", exclusive=True)
    assert storage.get("ckpt/manifest.json") == b"first"
    assert calls.made.index(("fsync", "aside")) < calls.made.index(("rename", "manifest.json"))
    assert everything(storage) == ["job", "job/ckpt", "job/ckpt/manifest.json"]


def test_without_links_a_crash_in_between_leaves_no_empty_name(storage: PosixStorage, calls: Calls) -> None:
    """Between claim and rename there is no file under the name, so nobody takes it for a commit."""
    calls.fail["link", "manifest.json"] = errno.EPERM
    calls.fail["rename", "manifest.json"] = errno.EIO
    with pytest.raises(StorageError):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert storage.list("ckpt") == []
    del calls.fail["rename", "manifest.json"]
    storage.put("ckpt/manifest.json", b"{}", exclusive=True)


def test_without_links_who_comes_while_another_claims_is_told(storage: PosixStorage, calls: Calls) -> None:
    """The right to rename is given once."""
    calls.fail["link", "manifest.json"] = errno.EPERM
    (storage.directory / "ckpt" / ".manifest.json.claim").touch()
    with pytest.raises(StorageExistsError):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ETIMEDOUT, errno.EIO])
def test_a_link_whose_answer_got_lost_counts(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The name is there and it is our file: that is success, whatever the call said."""
    real = os.link

    def link(source: Any, target: Any) -> None:
        real(source, target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    storage.put("claim", b"ours", exclusive=True)
    assert storage.get("claim") == b"ours"


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_bytes_that_are_not_safe_get_no_name_and_no_second_try(storage: PosixStorage, calls: Calls, call: str) -> None:
    """A sync that failed once may report success the second time, with the bytes gone."""
    calls.fail[call, "aside"] = errno.EIO
    with pytest.raises(StorageError) as failure:
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert failure.value.transient
    assert len([made for made in calls.made if made == (call, "aside")]) == 1
    assert everything(storage) == ["job", "job/ckpt"]


def test_a_name_that_is_not_safe_is_no_success(storage: PosixStorage, calls: Calls) -> None:
    """Without the directory's sync a node crash could undo the commit."""
    calls.fail["fsync", "ckpt"] = errno.EIO
    with pytest.raises(StorageError, match="sync"):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)


def test_a_file_system_without_directory_sync_is_taken_as_it_is(storage: PosixStorage, calls: Calls) -> None:
    """FUSE and SMB say EINVAL; there is nothing else one could do."""
    calls.fail["fsync", "ckpt"] = errno.EINVAL
    storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert storage.get("ckpt/manifest.json") == b"{}"
    assert ("fsync", "ckpt") in calls.made


# --- large files


def test_a_large_file_appears_when_it_is_whole(storage: PosixStorage) -> None:
    """Until then nobody sees it under its name."""
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(b"abc"), memoryview(b"def")])
        file.write([memoryview(b"ghi")])
        assert storage.list("ckpt") == []
        file.finish()
    assert file.bytes == 9
    assert storage.get("ckpt/part") == b"abcdefghi"
    assert everything(storage) == ["job", "job/ckpt", "job/ckpt/part"]


def test_a_large_file_is_synced_before_it_gets_its_name(storage: PosixStorage, calls: Calls) -> None:
    """Then its name is, and the name of its directory, even if another process made that."""
    for part in ("part", "part2"):
        calls.made.clear()
        write(storage, f"ckpt/{part}", b"abc")
        assert [call for call in calls.made if call[0] not in ("mkdir", "unlink")] == [
            ("pwritev", "aside"),
            ("fsync", "aside"),
            ("rename", part),
            ("fsync", "ckpt"),
            ("fsync", "job"),
        ]


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_large_file_that_failed_is_not_there(storage: PosixStorage, calls: Calls, call: str) -> None:
    """Nor does it take room."""
    calls.fail[call, "aside"] = errno.EIO
    with pytest.raises(StorageError, match="part"):
        write(storage, "ckpt/part", b"abc")
    assert everything(storage) == ["job", "job/ckpt"]


def test_close_errors_are_told(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may say only when the file is closed that the quota was reached."""
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(b"abc")])
        real = os.close

        def close(fd: int) -> None:
            real(fd)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close)
            with pytest.raises(StorageError) as failure:
                file.finish()
    assert failure.value.errno == errno.EDQUOT
    assert storage.list("ckpt") == []


def test_an_abandoned_file_leaves_nothing(storage: PosixStorage) -> None:
    """Neither by an exception nor by forgetting to finish."""

    def interrupted() -> memoryview:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), storage.upload("ckpt/part") as file:
        file.write([memoryview(b"abc"), interrupted()])
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(b"abc")])
    assert everything(storage) == ["job", "job/ckpt"]


# --- looking and deleting


def test_sizes_and_listings_of_what_is_not_there(storage: PosixStorage) -> None:
    """None and empty, not errors: before the first save there is nothing."""
    assert storage.size("ckpt/part") is None
    assert storage.modified("ckpt/part") is None
    assert storage.list() == storage.list("ckpt") == []
    storage.delete("ckpt/part")
    storage.delete_all("ckpt")
    storage.put("file", b"abc", exclusive=True)
    assert storage.size("file") == 3
    assert storage.size("file/below") is None
    assert storage.size("") is None, "a directory is no file"


def test_deleting_a_directory_takes_what_is_hidden_too(storage: PosixStorage) -> None:
    """A killed writer leaves a file aside; the directory goes all the same."""
    storage.put("ckpt/part", b"", exclusive=True)
    (storage.directory / "ckpt" / ".part.123.tmp").touch()
    storage.delete_all("ckpt")
    assert everything(storage) == ["job"]


def test_reading_is_limited(storage: PosixStorage) -> None:
    """A huge file under the name of a small one does not fill the memory."""
    storage.put("record", b"12345", exclusive=True)
    assert storage.get("record", limit=5) == b"12345"
    with pytest.raises(StorageError, match="larger than 4"):
        storage.get("record", limit=4)


def test_the_storages_clock_advances_and_leaves_nothing(storage: PosixStorage) -> None:
    """Ages of files are told by the clock that stamped them."""
    storage.put("mark", b"", exclusive=True)
    modified = storage.modified("mark")
    assert modified is not None
    assert 0 <= storage.now() - modified < 60
    assert everything(storage) == ["job", "job/mark"]


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "a\0b"])
def test_names_do_not_lead_outside(storage: PosixStorage, name: str) -> None:
    """Whatever a manifest says."""
    with pytest.raises(StorageError, match="not a name inside"):
        storage.get(name)


@pytest.mark.parametrize("job", ["", "..", ".hidden", "/abs", "a/../b"])
def test_job_names_do_not_lead_outside(tmp_path: Path, job: str) -> None:
    """Said by the name of the setting."""
    with pytest.raises(SettingsError, match="MIGRATOR_JOB"):
        PosixStorage(tmp_path, job)


# --- errors


def test_check_passes_where_files_can_be_made(storage: PosixStorage) -> None:
    """And leaves nothing but the directory."""
    storage.check()
    storage.check()
    assert everything(storage) == ["job"]


def test_check_names_a_root_that_is_a_file(storage: PosixStorage) -> None:
    """A common slip: the variable of the predecessor named a file."""
    storage.root.write_text("")
    with pytest.raises(StorageError, match="is a file") as failure:
        storage.check()
    assert failure.value.errno == errno.ENOTDIR
    assert not failure.value.transient


def test_check_names_another_root_where_none_can_be_made() -> None:
    """A file system of the kernel's own has no room for directories, and says that there is no such one."""
    with pytest.raises(StorageError, match=r"cannot make the directory /proc/ckpts: .* name another root"):
        PosixStorage(Path("/proc/ckpts"), "job").check()


def test_check_names_a_root_below_a_file(tmp_path: Path) -> None:
    """At any height."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is a file"):
        PosixStorage(tmp_path / "file" / "root", "job").check()


@pytest.mark.parametrize(
    ("code", "is_transient", "hint"),
    [
        (errno.ENOSPC, True, "MIGRATOR_KEEP"),
        (errno.EDQUOT, True, "quota"),
        (errno.EIO, True, "kernel log"),
        (errno.ESTALE, True, "mounted"),
        (errno.ETIMEDOUT, True, "volume"),
        (errno.EAGAIN, True, "volume"),
        (errno.EINTR, True, "volume"),
        (errno.EACCES, False, "right to write"),
        (errno.EPERM, False, "right to write"),
        (errno.EROFS, False, "writable"),
        (errno.ENOTDIR, False, "file"),
        (errno.ENOENT, False, "cleans up the volume"),
        (errno.EISDIR, False, "directory"),
        (errno.ENAMETOOLONG, False, "shorter"),
    ],
    ids=errno.errorcode.get,
)
def test_every_failure_says_what_where_why_and_what_to_do(
    storage: PosixStorage, calls: Calls, code: int, is_transient: bool, hint: str
) -> None:
    """And whether trying again has a point."""
    calls.fail["pwritev", "aside"] = code
    with pytest.raises(StorageError) as failure:
        storage.put("ckpt/manifest.json", b"12345", exclusive=True)
    text = str(failure.value)
    assert str(storage.directory / "ckpt" / "manifest.json") in text
    assert os.strerror(code) in text
    assert hint in text
    assert failure.value.errno == code
    assert failure.value.transient is is_transient
    assert isinstance(failure.value.__cause__, OSError)
    if code == errno.ENOSPC:
        assert "needed 5 bytes" in text
        assert "are free" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_the_right_to_write(storage: PosixStorage) -> None:
    """The real thing, where the tests do not run as root."""
    storage.root.mkdir()
    storage.root.chmod(0o500)
    with pytest.raises(StorageError) as failure:
        storage.check()
    assert failure.value.errno == errno.EACCES


# --- what a call says is not believed


def _told(*_: Any, **__: Any) -> None:
    """A call that answers that it has done it, and has not."""


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
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, call: str, name: str, said: str
) -> None:
    """Of a commit that is only told nobody may hear as of a commit."""
    storage.make_directory("ckpt")
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


def test_a_rename_that_leaves_both_names_is_an_error(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it was a copy, and nobody knows whose bytes are the ones that were synced."""
    storage.make_directory("ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", os.link)
        with pytest.raises(StorageError, match="reported as renamed"):
            storage.put("ckpt/new", b"", exclusive=False)


# --- the check at the start


def test_a_volume_that_gives_back_other_bytes_does_not_pass_the_check(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is not only written, it is compared."""
    monkeypatch.setattr(PosixStorage, "get", lambda *_, **__: b"other")
    with pytest.raises(StorageError, match="gave back other bytes"):
        storage.check()


def test_a_volume_that_cannot_give_a_name_once_does_not_pass_the_check(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a commit needs is tried by the probe: not only a rename."""

    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="commit"):
        storage.check()


def test_a_start_syncs_all_directories_above_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made them may have died before their names were synced; one that may not be opened was there before."""
    (tmp_path / "a" / "root" / "job").mkdir(parents=True)
    synced: list[Path] = []

    def sync(self: PosixStorage, directory: Path) -> None:
        synced.append(directory)
        if directory == tmp_path.parent:
            raise StorageAccessError("not ours", errno=errno.EACCES)

    monkeypatch.setattr(PosixStorage, "_sync", sync)
    PosixStorage(tmp_path / "a" / "root", "job").check()

    above = [tmp_path / "a" / "root", tmp_path / "a", tmp_path, tmp_path.parent, tmp_path.parent.parent]
    assert synced[: len(above)] == above


def test_a_start_that_cannot_sync_the_directories_above_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that are not ours to open."""
    (tmp_path / "root" / "job").mkdir(parents=True)

    def sync(self: PosixStorage, directory: Path) -> None:
        if directory == tmp_path:  # further down another sync would say it
            raise StorageTransientError("the volume fails", errno=errno.EIO)

    monkeypatch.setattr(PosixStorage, "_sync", sync)
    with pytest.raises(StorageError, match="the volume fails"):
        PosixStorage(tmp_path / "root", "job").check()


# --- what the kernel is asked for


@pytest.mark.parametrize("exclusive", [True, False])
def test_what_the_check_refuses_gets_no_name(storage: PosixStorage, exclusive: bool) -> None:
    """It looks when the bytes wait aside in the directory, and nothing is left of them."""
    storage.make_directory("ckpt")
    seen = []

    def check() -> None:
        seen.append((storage.list("ckpt"), len(storage.leftovers("ckpt"))))
        raise StorageError("not now")

    with pytest.raises(StorageError, match="not now"):
        storage.put("ckpt/manifest.json", b"{}", exclusive=exclusive, check=check)
    assert seen == [([], 1)]
    assert names_in(storage.directory / "ckpt") == []


def test_no_file_stays_open(storage: PosixStorage) -> None:
    """A job lives for weeks; each verb closes what it has opened, also when it fails."""
    storage.make_directory("ckpt")
    before = names_in(Path("/proc/self/fd"))
    storage.put("ckpt/a", b"abc", exclusive=True)
    storage.put("ckpt/a", b"abc", exclusive=False)
    storage.get("ckpt/a")
    storage.change("ckpt/a", b"xyz")
    storage.now()
    storage.make_durable("ckpt")
    with pytest.raises(StorageError):
        storage.get("ckpt")
    with storage.upload("ckpt/b"):
        pass
    with storage.upload("ckpt/b") as file:
        file.finish()
    assert names_in(Path("/proc/self/fd")) == before


def test_without_links_no_file_stays_open(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a claim stay behind."""
    storage.make_directory("ckpt")

    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    before = names_in(Path("/proc/self/fd"))
    storage.put("ckpt/a", b"abc", exclusive=True)
    assert names_in(Path("/proc/self/fd")) == before
    assert names_in(storage.directory / "ckpt") == ["a"]


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(storage: PosixStorage) -> None:
    """Nobody writes to it: whoever waited would wait for ever, and a load hangs worse than it fails."""
    storage.make_directory("ckpt")
    os.mkfifo(storage.directory / "pipe")
    with pytest.raises(StorageError, match="no regular file") as refusal:
        storage.get("pipe")
    assert refusal.value.errno == errno.EISDIR
    assert storage.size("pipe") is None
    with pytest.raises(StorageForeignError):
        storage.change("pipe", b"beat")


def test_no_more_is_read_than_may_be_there(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
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
def one_name_aside(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody has made, for whatever reason, the very file that is about to be written aside."""
    storage.make_directory("ckpt")
    taken = storage.directory / "ckpt" / ".taken.000000000000.tmp"
    taken.write_bytes(b"not ours")
    monkeypatch.setattr(posix_calls, "aside", lambda target: taken)
    return taken


def test_a_file_aside_is_always_a_new_one(storage: PosixStorage, one_name_aside: Path) -> None:
    """Two that write into one file would both commit it."""
    storage.make_directory("ckpt")
    with pytest.raises(StorageError, match="exists"):
        storage.upload("ckpt/part")
    assert one_name_aside.read_bytes() == b"not ours"
    with pytest.raises(StorageError, match="exists"):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)


def test_only_a_directory_is_synced_as_one(storage: PosixStorage) -> None:
    """A file of that name would be synced, and the names that matter would not."""
    storage.put("file", b"", exclusive=True)
    with pytest.raises(StorageError) as refusal:
        storage.make_durable("file")
    assert refusal.value.errno == errno.ENOTDIR


def test_nothing_is_written_through_a_link(storage: PosixStorage, tmp_path: Path) -> None:
    """A job's directory holds all that is its own; what a link leads to may be another job's."""
    storage.make_directory("ckpt")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (storage.directory / "link").symlink_to(elsewhere)
    acts = [
        lambda: storage.put("link/a", b"", exclusive=False),
        lambda: storage.put("link", b"", exclusive=False),
        lambda: storage.list("link"),
        lambda: storage.delete_all("link"),
    ]
    for act in acts:
        with pytest.raises(StorageError, match="is a link") as refusal:
            act()
        assert refusal.value.errno == errno.ELOOP
    assert names_in(elsewhere) == []


def test_a_file_where_a_directory_was_expected_is_deleted_alone(storage: PosixStorage) -> None:
    """The name is what is to go; what lies beside it stays."""
    storage.make_directory("ckpt")
    storage.put("a", b"", exclusive=True)
    storage.put("b", b"", exclusive=True)
    storage.delete_all("a")
    assert storage.list() == ["b", "ckpt"]


def test_a_directory_goes_in_one_piece_and_for_good_before_what_is_in_it(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash that brought it back under its name would bring it back with some of its files gone."""
    storage.make_directory("ckpt")
    storage.put("ckpt/a", b"", exclusive=True)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        storage.delete_all("ckpt")
    assert calls.made == [("rename", "aside"), ("fsync", "job"), ("unlink", "a"), ("rmdir", "aside")]


def test_a_directory_that_is_aside_already_is_deleted_where_it_is(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is none that anybody would find."""
    storage.make_directory(".ckpt.000000000000.tmp")
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        storage.delete_all(".ckpt.000000000000.tmp")
    assert calls.made == [("rmdir", "aside")]


def test_a_file_is_no_directory_to_make(storage: PosixStorage) -> None:
    """It is said so at once, not when something is to be written below it."""
    storage.put("file", b"", exclusive=True)
    with pytest.raises(StorageError, match="is a file"):
        storage.make_directory("file")


def test_the_clock_can_be_asked_before_anything_was_written(tmp_path: Path) -> None:
    """A life that begins asks it, and the directory may not be there yet."""
    assert PosixStorage(tmp_path / "root", "new").now() > 0


def test_an_error_says_what_the_system_said(tmp_path: Path) -> None:
    """In its words, without its number; an error without a number as it is."""

    def told(error: OSError) -> str:
        with pytest.raises(StorageError) as raised, as_storage_error("write", tmp_path / "a" / "b"):
            raise error
        return str(raised.value).replace(str(tmp_path), "")

    assert told(OSError(errno.EIO, "Input/output error")).startswith("cannot write /a/b: Input/output error. See the")
    assert told(OSError("it broke")) == "cannot write /a/b: it broke. See whether the volume works."
