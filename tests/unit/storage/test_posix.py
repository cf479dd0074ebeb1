"""A volume: what is durable, what is exclusive, and what is told when it fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migrator.errors import SettingsError, StorageError
from migrator.storage.posix import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root", "job")


def everything(storage: LocalStorage) -> list[str]:
    return sorted(str(path.relative_to(storage.root)) for path in storage.root.rglob("*"))


def write(storage: LocalStorage, name: str, data: bytes) -> None:
    with storage.write(name) as file:
        file.write([memoryview(data)])
        file.finish()


class Calls:
    """What the kernel was asked for, in order; and what it is to answer with an error."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        self.fail: dict[tuple[str, str], int] = {}
        for name in ("fsync", "link", "rename", "mkdir", "unlink", "rmdir", "pwritev"):
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            shown = self._shown(self._path(arguments[1 if name in ("link", "rename") else 0]))
            self.made.append((name, shown))
            code = self.fail.get((name, shown))
            if code is not None:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **more)

        return call

    @staticmethod
    def _path(argument: Any) -> Path:
        return Path(f"/proc/self/fd/{argument}").readlink() if isinstance(argument, int) else Path(argument)

    @staticmethod
    def _shown(path: Path) -> str:
        return "aside" if path.name.startswith(".") else path.name


@pytest.fixture
def calls(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    storage.make_directory("ckpt")
    with monkeypatch.context() as patch:
        yield Calls(patch)


# --- small files


def test_what_was_put_is_there(storage: LocalStorage) -> None:
    """Under its name, in directories that are made as needed, with nothing left aside."""
    storage.put("a/b.json", b"one", exclusive=True)
    storage.put("a/c.json", b"two", exclusive=False)
    storage.put("a/c.json", b"three", exclusive=False)
    assert storage.get("a/b.json") == b"one"
    assert storage.get("a/c.json") == b"three"
    assert storage.list("a") == ["b.json", "c.json"]
    assert everything(storage) == ["job", "job/a", "job/a/b.json", "job/a/c.json"]


def test_an_exclusive_name_is_given_once(storage: LocalStorage) -> None:
    """Of many who want it at the same time one gets it, the others are told, and its bytes stay."""
    start, won, lost = threading.Barrier(8), [], []

    def put(i: int) -> None:
        start.wait()
        try:
            storage.put("claim", b"%d" % i, exclusive=True)
            won.append(i)
        except FileExistsError:
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


def test_bytes_are_durable_before_their_name_and_the_name_before_success(storage: LocalStorage, calls: Calls) -> None:
    """Write, sync, link, sync the directory: any other order can leave an empty commit after a node crash."""
    storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert calls.made == [
        ("pwritev", "aside"),
        ("fsync", "aside"),
        ("link", "manifest.json"),
        ("unlink", "aside"),
        ("fsync", "ckpt"),
    ]


def test_replacing_keeps_the_same_order(storage: LocalStorage, calls: Calls) -> None:
    """The old bytes are there until the new ones are safe."""
    storage.put("ckpt/mark", b"{}", exclusive=False)
    assert [call for call in calls.made if call[0] != "unlink"] == [
        ("pwritev", "aside"),
        ("fsync", "aside"),
        ("rename", "mark"),
        ("fsync", "ckpt"),
    ]


def test_new_directories_are_durable_from_the_top(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_without_links_a_name_is_given_once_as_well(storage: LocalStorage, calls: Calls, code: int) -> None:
    """Some network file systems have no links; whoever comes second is told all the same."""
    calls.fail["link", "manifest.json"] = code
    storage.put("ckpt/manifest.json", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        storage.put("ckpt/manifest.json", b"second", exclusive=True)
    assert storage.get("ckpt/manifest.json") == b"first"
    assert calls.made.index(("fsync", "aside")) < calls.made.index(("rename", "manifest.json"))
    assert everything(storage) == ["job", "job/ckpt", "job/ckpt/manifest.json"]


def test_without_links_a_crash_in_between_leaves_no_empty_name(storage: LocalStorage, calls: Calls) -> None:
    """Between claim and rename there is no file under the name, so nobody takes it for a commit."""
    calls.fail["link", "manifest.json"] = errno.EPERM
    calls.fail["rename", "manifest.json"] = errno.EIO
    with pytest.raises(StorageError):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert storage.list("ckpt") == []
    del calls.fail["rename", "manifest.json"]
    storage.put("ckpt/manifest.json", b"{}", exclusive=True)


def test_without_links_who_comes_while_another_claims_is_told(storage: LocalStorage, calls: Calls) -> None:
    """The right to rename is given once."""
    calls.fail["link", "manifest.json"] = errno.EPERM
    (storage.directory / "ckpt" / ".manifest.json.claim").touch()
    with pytest.raises(FileExistsError):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ETIMEDOUT, errno.EIO])
def test_a_link_whose_answer_got_lost_counts(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The name is there and it is our file: that is success, whatever the call said."""
    real = os.link

    def link(source: Any, target: Any) -> None:
        real(source, target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    storage.put("claim", b"ours", exclusive=True)
    assert storage.get("claim") == b"ours"


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_bytes_that_are_not_safe_get_no_name_and_no_second_try(storage: LocalStorage, calls: Calls, call: str) -> None:
    """A sync that failed once may report success the second time, with the bytes gone."""
    calls.fail[call, "aside"] = errno.EIO
    with pytest.raises(StorageError) as failure:
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert failure.value.transient
    assert len([made for made in calls.made if made == (call, "aside")]) == 1
    assert everything(storage) == ["job", "job/ckpt"]


def test_a_name_that_is_not_safe_is_no_success(storage: LocalStorage, calls: Calls) -> None:
    """Without the directory's sync a node crash could undo the commit."""
    calls.fail["fsync", "ckpt"] = errno.EIO
    with pytest.raises(StorageError, match="sync"):
        storage.put("ckpt/manifest.json", b"{}", exclusive=True)


def test_a_file_system_without_directory_sync_is_taken_as_it_is(storage: LocalStorage, calls: Calls) -> None:
    """FUSE and SMB say EINVAL; there is nothing else one could do."""
    calls.fail["fsync", "ckpt"] = errno.EINVAL
    storage.put("ckpt/manifest.json", b"{}", exclusive=True)
    assert storage.get("ckpt/manifest.json") == b"{}"
    assert ("fsync", "ckpt") in calls.made


# --- large files


def test_a_large_file_appears_when_it_is_whole(storage: LocalStorage) -> None:
    """Until then nobody sees it under its name."""
    with storage.write("ckpt/part") as file:
        file.write([memoryview(b"abc"), memoryview(b"def")])
        file.write([memoryview(b"ghi")])
        assert storage.list("ckpt") == []
        file.finish()
    assert file.bytes == 9
    assert storage.get("ckpt/part") == b"abcdefghi"
    assert everything(storage) == ["job", "job/ckpt", "job/ckpt/part"]


def test_a_large_file_is_synced_before_it_gets_its_name(storage: LocalStorage, calls: Calls) -> None:
    """And the name of the directory it lies in before its first byte, whoever made that directory."""
    write(storage, "ckpt/part", b"abc")
    storage.sync_directory("ckpt")
    assert [call for call in calls.made if call[0] != "unlink"] == [
        ("fsync", "job"),
        ("pwritev", "aside"),
        ("fsync", "aside"),
        ("rename", "part"),
        ("fsync", "ckpt"),
    ]


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_large_file_that_failed_is_not_there(storage: LocalStorage, calls: Calls, call: str) -> None:
    """Nor does it take room."""
    calls.fail[call, "aside"] = errno.EIO
    with pytest.raises(StorageError, match="part"):
        write(storage, "ckpt/part", b"abc")
    assert everything(storage) == ["job", "job/ckpt"]


def test_close_errors_are_told(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may say only when the file is closed that the quota was reached."""
    with storage.write("ckpt/part") as file:
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


def test_an_abandoned_file_leaves_nothing(storage: LocalStorage) -> None:
    """Neither by an exception nor by forgetting to finish."""

    def interrupted() -> memoryview:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), storage.write("ckpt/part") as file:
        file.write([memoryview(b"abc"), interrupted()])
    with storage.write("ckpt/part") as file:
        file.write([memoryview(b"abc")])
    assert everything(storage) == ["job", "job/ckpt"]


# --- looking and deleting


def test_sizes_and_listings_of_what_is_not_there(storage: LocalStorage) -> None:
    """None and empty, not errors: before the first save there is nothing."""
    assert storage.size("ckpt/part") is None
    assert storage.modified("ckpt/part") is None
    assert storage.list() == storage.list("ckpt") == []
    storage.delete("ckpt/part")
    storage.delete_directory("ckpt")
    storage.put("file", b"abc", exclusive=True)
    assert storage.size("file") == 3
    assert storage.size("file/below") is None
    assert storage.size("") is None, "a directory is no file"


def test_deleting_a_directory_takes_what_is_hidden_too(storage: LocalStorage) -> None:
    """A killed writer leaves a file aside; the directory goes all the same."""
    storage.put("ckpt/part", b"", exclusive=True)
    (storage.directory / "ckpt" / ".part.123.tmp").touch()
    storage.delete_directory("ckpt")
    assert everything(storage) == ["job"]


def test_reading_is_limited(storage: LocalStorage) -> None:
    """A huge file under the name of a small one does not fill the memory."""
    storage.put("record", b"12345", exclusive=True)
    assert storage.get("record", limit=5) == b"12345"
    with pytest.raises(StorageError, match="larger than 4"):
        storage.get("record", limit=4)


def test_the_storages_clock_advances_and_leaves_nothing(storage: LocalStorage) -> None:
    """Ages of files are told by the clock that stamped them."""
    storage.put("mark", b"", exclusive=True)
    modified = storage.modified("mark")
    assert modified is not None
    assert 0 <= storage.now() - modified < 60
    assert everything(storage) == ["job", "job/mark"]


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "a\0b"])
def test_names_do_not_lead_outside(storage: LocalStorage, name: str) -> None:
    """Whatever a manifest says."""
    with pytest.raises(StorageError, match="not a name inside"):
        storage.get(name)


@pytest.mark.parametrize("job", ["", "..", ".hidden", "/abs", "a/../b"])
def test_job_names_do_not_lead_outside(tmp_path: Path, job: str) -> None:
    """Said by the name of the setting."""
    with pytest.raises(SettingsError, match="MIGRATOR_JOB"):
        LocalStorage(tmp_path, job)


# --- errors


def test_check_passes_where_files_can_be_made(storage: LocalStorage) -> None:
    """And leaves nothing but the directory."""
    storage.check()
    storage.check()
    assert everything(storage) == ["job"]


def test_check_names_a_root_that_is_a_file(storage: LocalStorage) -> None:
    """A common slip: the variable of the predecessor named a file."""
    storage.root.write_text("")
    with pytest.raises(StorageError, match="is a file") as failure:
        storage.check()
    assert failure.value.errno == errno.ENOTDIR
    assert not failure.value.transient


def test_check_names_another_root_where_none_can_be_made() -> None:
    """A file system of the kernel's own has no room for directories, and says that there is no such one."""
    with pytest.raises(StorageError, match=r"cannot make the directory /proc/ckpts: .* name another root"):
        LocalStorage(Path("/proc/ckpts"), "job").check()


def test_check_names_a_root_below_a_file(tmp_path: Path) -> None:
    """At any height."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is a file"):
        LocalStorage(tmp_path / "file" / "root", "job").check()


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
    storage: LocalStorage, calls: Calls, code: int, is_transient: bool, hint: str
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
def test_a_directory_without_the_right_to_write(storage: LocalStorage) -> None:
    """The real thing, where the tests do not run as root."""
    storage.root.mkdir()
    storage.root.chmod(0o500)
    with pytest.raises(StorageError) as failure:
        storage.check()
    assert failure.value.errno == errno.EACCES


LIMITED = """
import resource, sys
from pathlib import Path
from migrator.errors import StorageError
from migrator.storage.posix import LocalStorage
storage = LocalStorage(Path(sys.argv[1]), "job")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    with storage.write("ckpt/part") as file:
        file.write([memoryview(bytes(6_000)), memoryview(bytes(6_000))])
        file.finish()
except StorageError as error:
    print(error)
"""


@pytest.mark.processes
def test_a_write_that_is_cut_short_by_the_system_fails_and_leaves_nothing(tmp_path: Path) -> None:
    """A real limit: the first call moves a part of the bytes, the next one fails."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "File too large" in done.stdout
    assert list((tmp_path / "job" / "ckpt").iterdir()) == []
