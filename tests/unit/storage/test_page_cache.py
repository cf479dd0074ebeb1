"""Large files past the page cache: by each way, in bounded memory, and by none where the kernel offers none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.errors import StorageTransientError
from migrator.storage import page_cache
from migrator.storage.page_cache import Bypass, LargeFile, Way, find_bypass
from migrator.storage.posix import PosixStorage


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


class Ranges:
    """Notes what the kernel is asked to bring to the disk, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.code = 0
        monkeypatch.setattr(page_cache, "sync_file_range", self)

    def __call__(self, fd: int, offset: int, size: int, flags: int) -> None:
        self.asked.append((offset, size, flags))
        if self.code:
            raise OSError(self.code, os.strerror(self.code))


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    return Ranges(monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("PIECE", 10), ("PIECE_MAX", 40), ("WINDOW", 60), ("PAGE", 10)):
        monkeypatch.setattr(page_cache, name, size)


@pytest.mark.parametrize("way", Way)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.binary(max_size=70), max_size=5), max_size=6))
def test_all_bytes_arrive_in_order(new_directory: Callable[[], Path], way: Way, calls: list[list[bytes]]) -> None:
    """Whatever the pieces are."""
    path = new_directory() / "file"
    with pytest.MonkeyPatch.context() as patch, path.open("xb") as opened:
        small.__wrapped__(patch)  # type: ignore[attr-defined]
        file = LargeFile(opened.fileno(), Bypass(way, waits=True))
        for pieces in calls:
            file.write([memoryview(piece) for piece in pieces])
        whole = b"".join(piece for pieces in calls for piece in pieces)
        assert file.size == len(whole)
    assert path.read_bytes() == whole


def test_what_is_found_is_told(tmp_path: Path) -> None:
    """Where ckpts go; nothing is left behind."""
    storage = PosixStorage(tmp_path, "job")
    storage.check()
    assert storage.traits()["writes"] in {"O_DIRECT", *(way.value for way in Way)}
    assert list((tmp_path / "job").iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [OSError(code, os.strerror(code)) for code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)]
    + [NotImplementedError("pwritev2")],
)
def test_the_next_way_is_taken_where_one_is_unknown(
    fd: int, ranges: Ranges, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An older kernel, another file system, another C library, another system."""
    real = os.pwritev

    def take(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        return real(fd, buffers, offset)

    def refuse(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise error
        return real(fd, buffers, offset)

    monkeypatch.setattr("migrator.storage.direct_io.is_possible", lambda fd: False)
    monkeypatch.setattr(os, "pwritev", take)
    assert find_bypass(fd) == Bypass(Way.DONTCACHE, waits=True)
    ranges.code = errno.EPERM
    assert find_bypass(fd) == Bypass(Way.DONTCACHE, waits=False)
    ranges.code = 0
    monkeypatch.setattr(os, "pwritev", refuse)
    assert find_bypass(fd) == Bypass(Way.DROP_BEHIND, waits=True)
    LargeFile(fd, Bypass(Way.DONTCACHE)).write([memoryview(b"abc")])
    ranges.code = errno.EINVAL
    assert find_bypass(fd) == Bypass(Way.NONE)
    monkeypatch.setattr(page_cache, "sync_file_range", None)
    assert find_bypass(fd) == Bypass(Way.NONE)


def test_a_volume_that_fails_is_no_volume_without_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when the life begins."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage = PosixStorage(tmp_path, "job")
    storage.check()
    monkeypatch.setattr("migrator.storage.page_cache.calls.write_past_cache", fail)
    with pytest.raises(StorageTransientError, match="Input/output"):
        storage.check()
    assert list((tmp_path / "job").iterdir()) == []


@pytest.mark.parametrize("way", [Way.DONTCACHE, Way.DROP_BEHIND])
def test_no_more_than_a_window_is_under_way(fd: int, ranges: Ranges, small: None, way: Way) -> None:
    """What is written is waited for, from front to back; the last of it by the sync at the end."""
    LargeFile(fd, Bypass(way, waits=True)).write([memoryview(bytes(300))])
    began = [(at, size) for at, size, flags in ranges.asked if flags == 2]
    waits = [(at, size) for at, size, flags in ranges.asked if flags != 2]
    assert began == ([] if way is Way.DONTCACHE else [(at, 10) for at in range(0, 300, 10)])
    assert [at for at, _ in waits] == list(range(0, 240, 20))
    assert {size for _, size in waits} == {20}


def test_without_a_way_nothing_is_asked(fd: int, ranges: Ranges, small: None) -> None:
    """It is an ordinary write."""
    LargeFile(fd, Bypass(Way.NONE, waits=True)).write([memoryview(bytes(300))])
    assert ranges.asked == []


def test_pieces_grow_where_calls_take_long(
    fd: int, ranges: Ranges, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call may wait for the interpreter's lock."""
    monkeypatch.setattr(page_cache, "_SLOW_S", 0.0)
    LargeFile(fd, Bypass(Way.DROP_BEHIND, waits=True)).write([memoryview(bytes(150))])
    assert [size for _, size, flags in ranges.asked if flags == 2] == [10, 20, 40, 40, 40]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EOPNOTSUPP, errno.EINVAL])
def test_an_error_of_the_disk_is_told_at_once(fd: int, ranges: Ranges, small: None, code: int) -> None:
    """The kernel tells it once: the sync at the end would not see it any more."""
    ranges.code = code
    with pytest.raises(OSError, match=os.strerror(code)):
        LargeFile(fd, Bypass(Way.DONTCACHE, waits=True)).write([memoryview(bytes(300))])


def test_only_what_works_is_asked(fd: int, ranges: Ranges, small: None, tmp_path: Path) -> None:
    """Where a range cannot be waited for, the sync at the end brings all to the disk."""
    LargeFile(fd, Bypass(Way.DONTCACHE, waits=False)).write([memoryview(bytes(300))])
    assert ranges.asked == []
    assert (tmp_path / "file").stat().st_size == 300


def test_what_the_disk_has_leaves_the_cache(
    fd: int, ranges: Ranges, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not do that by itself."""
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: dropped.append((at, size)))
    LargeFile(fd, Bypass(Way.DROP_BEHIND, waits=True)).write([memoryview(bytes(300))])
    assert dropped == [(at, size) for at, size, flags in ranges.asked if flags == 7]
    assert len(dropped) > 5
    dropped.clear()
    LargeFile(fd, Bypass(Way.DONTCACHE, waits=True)).write([memoryview(bytes(300))])
    assert dropped == []


def test_pieces_end_with_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is written twice has to be waited for."""
    for name, size in (("PIECE", 10_000), ("PIECE_MAX", 10_000)):
        monkeypatch.setattr(page_cache, name, size)
    ends: list[int] = []
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        ends.append(offset + sum(map(len, buffers)))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    file = LargeFile(fd, Bypass(Way.NONE))
    for _ in range(2):
        file.write([memoryview(bytes(9001))] * 3)
    assert [end % 4096 for end in ends if end not in (27003, 54006)] == [0] * (len(ends) - 2)
