"""Large files around the page cache: real O_DIRECT where the disk below the tests has it, and each way it can fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from migrator.errors import StorageForeignError, StorageFullError, StorageTransientError
from migrator.storage import direct_io, page_cache
from migrator.storage.direct_io import PAGE, DirectFile, DirectReader, cached_share, is_possible, set_direct
from migrator.storage.page_cache import Bypass, LargeFile, Way, find_bypass, large_file
from migrator.storage.posix import PosixStorage


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory on a disk: the others of the tests may be in memory, around which there is no way."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        fd = os.open(f"{place}/probe", os.O_RDWR | os.O_CREAT)
        works = is_possible(fd)
        os.close(fd)
        if not works:
            pytest.skip("LOUD: nothing is written around the page cache: /var/tmp has no O_DIRECT")
        yield Path(place)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of one page."""
    monkeypatch.setattr(direct_io, "BUFFER", PAGE)
    monkeypatch.setattr(direct_io, "HUGE_PAGE", PAGE)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """None is left."""
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "migrator-writes"] == []


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def written(fd: int, size: int, expected: int = 0) -> bytes:
    """A file of so many bytes that was finished; what it should hold."""
    whole = np.random.default_rng(size).bytes(size)
    file = DirectFile(fd, expected)
    try:
        file.write([memoryview(whole)])
        file.finish()
    finally:
        file.close()
    return whole


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.lists(st.integers(0, 3 * PAGE), max_size=4), max_size=5), seed=st.integers(0, 100))
def test_all_bytes_arrive_in_order(new_directory: Callable[[], Path], sizes: list[list[int]], seed: int) -> None:
    """Wherever they begin in memory and however they are divided; and the buffers may change behind each call."""
    draws = np.random.default_rng(seed)
    path, whole = new_directory() / "file", b""
    with path.open("xb") as opened:
        file = DirectFile(opened.fileno())
        for call in sizes:
            pieces = [bytearray(draws.bytes(size + 3)) for size in call]
            whole += b"".join(bytes(piece[3:]) for piece in pieces)
            file.write([memoryview(piece)[3:] for piece in pieces])
            for piece in pieces:
                piece[:] = bytes(len(piece))
        assert file.size == len(whole)
        file.finish()
        file.close()
    assert path.read_bytes() == whole


def test_all_of_it_goes_around_the_cache(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write from aligned memory to an aligned place; what is behind the last byte is cut off."""
    fd = os.open(on_disk / "file", os.O_RDWR | os.O_CREAT)
    seen: list[tuple[int, int, bool, int]] = []
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        memory = np.frombuffer(buffers[0], np.uint8).ctypes.data
        seen.append((offset, sum(map(len, buffers)), is_direct(fd), memory % PAGE))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", write)
    whole = written(fd, 20 * PAGE + 7)
    assert sorted(seen) == [(at * PAGE, PAGE, True, 0) for at in range(21)]
    assert cached_share(fd, 20 * PAGE) == 0
    os.close(fd)
    assert (on_disk / "file").read_bytes() == whole


@pytest.mark.parametrize(
    ("expected", "steps"),
    [
        (0, []),
        (1, [(0, 1)]),
        (7 * PAGE, [(0, 4 * PAGE), (4 * PAGE, 3 * PAGE)]),
        (9 * PAGE + 5, [(0, 4 * PAGE), (4 * PAGE, 4 * PAGE), (8 * PAGE, PAGE + 5)]),
        (1000 * PAGE, [(at * PAGE, 4 * PAGE) for at in (0, 4, 8)]),
    ],
)
def test_space_is_reserved_before_it_is_written(
    fd: int, monkeypatch: pytest.MonkeyPatch, expected: int, steps: list[tuple[int, int]]
) -> None:
    """As many bytes as are expected, but not many at a time; the file has as many as were written."""
    monkeypatch.setattr(direct_io, "RESERVED", 4 * PAGE)
    real, taken = direct_io._fallocate, list[tuple[int, ...]]()

    def take(*given: int) -> int:
        taken.append(given[2:])
        return int(real(*given)) if real is not None else -1

    monkeypatch.setattr(direct_io, "_fallocate", take)
    whole = written(fd, 9 * PAGE + 5, expected)
    assert taken == steps
    assert os.pread(fd, 2000 * PAGE, 0) == whole


@pytest.mark.parametrize("take", [None, lambda *_: -1])
def test_space_that_cannot_be_reserved_is_found_by_the_writes(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Any
) -> None:
    """A file system without such a call, or a disk that is full: the writes tell which."""
    monkeypatch.setattr(direct_io, "_fallocate", take)
    assert written(fd, 9 * PAGE + 5, 9 * PAGE + 5) == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("most", [1, 1000, 2048, PAGE - 1])
def test_what_one_write_leaves_is_written_by_the_next(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The rest of a short write may begin where O_DIRECT is refused. Then it goes through the cache."""
    real, count = os.pwritev, [0]

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        count[0] += 1
        return real(fd, [buffers[0][:most]] if count[0] % 3 == 1 else buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", write)
    assert written(fd, 9 * PAGE + 5) == (tmp_path / "file").read_bytes()


def test_a_disk_that_takes_no_such_memory_gets_an_ordinary_write(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of more bytes than a page, say: found out in the midst of it."""
    real = os.pwritev

    def refuse(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", refuse)
    assert written(fd, 9 * PAGE + 5) == (tmp_path / "file").read_bytes()


def fails(monkeypatch: pytest.MonkeyPatch, code: int, *, from_byte: int) -> list[int]:
    """From this byte on each write fails. Where it was tried."""
    real, tried = os.pwritev, list[int]()

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if offset >= from_byte:
            tried.append(offset)
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", write)
    return tried


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("size", [3 * PAGE, 9 * PAGE + 5])
def test_an_error_ends_the_file(fd: int, monkeypatch: pytest.MonkeyPatch, code: int, size: int) -> None:
    """Also one of the very last write, and whatever call it is told by."""
    fails(monkeypatch, code, from_byte=2 * PAGE)
    with pytest.raises(OSError, match=os.strerror(code)):
        written(fd, size)


def test_after_an_error_nothing_more_is_written(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full is not asked for each buffer that waits."""
    tried = fails(monkeypatch, errno.ENOSPC, from_byte=0)
    with pytest.raises(OSError, match="No space"):
        written(fd, 400 * PAGE)
    assert len(tried) <= direct_io.THREADS
    file = DirectFile(fd)
    with pytest.raises(OSError, match="No space"):  # noqa: PT012 - whichever it is
        for _ in range(1000):
            file.write([memoryview(bytes(PAGE))])
    with pytest.raises(OSError, match="No space"):
        file.write([memoryview(b"1")])
    file.close()


def test_nothing_written_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no loop without end."""
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="nothing was written at byte 0"):
        written(fd, PAGE)


@pytest.mark.parametrize("most", [0, 1])
def test_fewer_threads_than_wanted_are_enough(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A container's limit on processes is one on threads."""
    real, started = threading.Thread.start, list[threading.Thread]()

    def start(self: threading.Thread) -> None:
        if self.name == "migrator-writes":
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert written(fd, 9 * PAGE + 5) == (tmp_path / "file").read_bytes()
    assert len(started) == most


def test_close_waits_for_what_is_under_way(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a descriptor that was closed is given to the next file: our bytes would land in it."""
    real, may_go, began, ended = os.pwritev, threading.Event(), threading.Event(), list[int]()

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        began.set()
        assert may_go.wait(60)
        ended.append(offset)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", write)
    file = DirectFile(fd)
    file.write([memoryview(bytes(4 * PAGE))])
    assert began.wait(60)
    closes = threading.Thread(target=file.close)
    closes.start()
    closes.join(0.05)
    assert closes.is_alive()
    may_go.set()
    closes.join(60)
    assert 1 <= len(ended) <= direct_io.THREADS, "what was not begun is not written any more"
    file.close()


def test_no_more_than_the_buffers_are_filled(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs does not take the memory."""
    real, may_go = os.pwritev, threading.Event()

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        assert may_go.wait(60)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", write)
    file = DirectFile(fd)
    fills = threading.Thread(target=lambda: file.write([memoryview(bytes(PAGE))] * 100))
    fills.start()
    while file.size < direct_io.BUFFERS * PAGE:
        assert fills.is_alive()
    fills.join(0.05)
    assert (file.size, fills.is_alive()) == (direct_io.BUFFERS * PAGE, True)
    may_go.set()
    fills.join(60)
    file.finish()
    assert file.size == 100 * PAGE == os.fstat(fd).st_size


def test_memory_is_used_again_when_nobody_uses_it(fd: int, tmp_path: Path) -> None:
    """To touch fresh memory takes time. Two files at the same time have each its own."""
    direct_io._idle.clear()
    first, second = DirectFile(fd), DirectFile(fd)
    used = [file._memory for file in (first, second)]
    assert used[0] is not used[1]
    for file in (first, second, first):
        file.close()
    third, fourth = DirectFile(fd), DirectFile(fd)
    assert third._memory is used[0]
    assert fourth._memory is not used[0]
    for file in (third, fourth):
        file.close()
    assert len(direct_io._idle) == 1


@pytest.mark.parametrize(("size", "is_touched"), [(page_cache.DIRECT_FROM - 1, False), (page_cache.DIRECT_FROM, True)])
def test_memory_is_ready_before_the_first_large_file(on_disk: Path, size: int, is_touched: bool) -> None:
    """A small state needs none, and a directory that cannot be written around the cache neither."""
    storage = PosixStorage(on_disk, "job")
    storage.check()
    direct_io._idle.clear()
    storage.expect(size)
    assert [len(memory) for memory in direct_io._idle] == [direct_io.BUFFERS * direct_io.BUFFER] * is_touched
    storage._bypass = Bypass(Way.DONTCACHE)
    direct_io._idle.clear()
    storage.expect(size)
    assert direct_io._idle == []


def test_memory_that_there_is_not_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that needs it will be written by another way."""
    direct_io._idle.clear()

    def none(size: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(direct_io, "_memory", none)
    direct_io.touch_memory()
    assert direct_io._idle == []


def test_a_closed_file_is_closed(fd: int) -> None:
    """Its memory and the number of its descriptor may be another one's."""
    file = DirectFile(fd)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write([memoryview(bytes(PAGE))])
    with pytest.raises(ValueError, match="closed"):
        file.finish()


def test_an_error_without_threads_ends_the_file_too(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the file could be finished with a hole in it."""
    monkeypatch.setattr(DirectFile, "_start", lambda self: None)
    fails(monkeypatch, errno.ENOSPC, from_byte=0)
    file = DirectFile(fd)
    with pytest.raises(OSError, match="No space"):
        file.write([memoryview(bytes(PAGE))])
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        file.finish()
    file.close()


def test_a_failed_file_keeps_nothing_alive(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error keeps its frames alive, and these what was to be written; a training may run without the collector."""
    fails(monkeypatch, errno.ENOSPC, from_byte=0)
    gc.collect()
    gc.disable()
    try:
        file = DirectFile(fd)
        gone = weakref.ref(file)
        with contextlib.suppress(OSError):
            file.write([memoryview(bytes(40 * PAGE))])
            file.finish()
        file.close()
        del file
        assert gone() is None
    finally:
        gc.enable()


def test_a_flag_that_is_refused_later_is_done_without(fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes through the cache."""
    monkeypatch.setattr(direct_io, "set_direct", refuses(errno.EINVAL))
    assert written(fd, 9 * PAGE + 5) == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()])
def test_without_memory_for_buffers_it_is_an_ordinary_file(
    fd: int, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A limit on the address space costs no save."""

    def refuse(size: int) -> memoryview:
        raise error

    direct_io._idle.clear()
    monkeypatch.setattr(direct_io, "_memory", refuse)
    assert isinstance(large_file(fd, Bypass(Way.NONE, is_direct=True), 1 << 40), LargeFile)
    assert not is_possible(fd)


# Where it is used.


def refuses(code: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("where", ["set_direct", "os.pwritev"])
def test_where_it_does_not_work_it_is_not_used(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    """Told by the flag or by the first write."""
    fd = os.open(on_disk / "file", os.O_WRONLY | os.O_CREAT)
    assert find_bypass(fd).is_direct
    monkeypatch.setattr(f"migrator.storage.direct_io.{where}", refuses(code))
    assert not is_possible(fd)
    assert not is_direct(fd)
    os.close(fd)


@pytest.mark.parametrize("told", [1.0, None])
def test_what_is_in_the_cache_behind_the_write_did_not_go_around_it(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, told: float | None
) -> None:
    """A file system in memory, or one that does not tell: the copy into a buffer would be one more."""
    storage = PosixStorage(on_disk, "job")
    storage.check()
    assert storage.traits()["writes"] == "O_DIRECT"
    if told is None:
        monkeypatch.setattr(direct_io, "_mincore", None)
    else:
        monkeypatch.setattr(direct_io, "cached_share", lambda *_: told)
    storage.check()
    assert storage.traits()["writes"] != "O_DIRECT"


@pytest.mark.parametrize("error", [OSError(errno.ENODEV, "No such device"), ValueError("mmap length is greater")])
def test_a_file_that_cannot_be_mapped_goes_through_the_cache(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """FUSE, or a server that tells the size late: `listening()` works, and so does a load."""
    real = mmap.mmap

    def refuse(fd: int, *arguments: Any, **more: Any) -> Any:
        if fd >= 0:
            raise error
        return real(fd, *arguments, **more)

    monkeypatch.setattr("migrator.storage.direct_io.mmap.mmap", refuse)
    storage = PosixStorage(on_disk, "job")
    storage.check()
    assert storage.traits()["writes"] != "O_DIRECT"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_opened_again_goes_through_the_cache(
    cold: PosixStorage, monkeypatch: pytest.MonkeyPatch, whole: bytes, code: int
) -> None:
    """No /proc, or a server that lets nobody read what is being written."""
    monkeypatch.setattr("migrator.storage.posix_calls.opened_again", refuses(code))
    before = open_now()
    assert not read_by(cold, monkeypatch, whole)
    cold.check()
    assert cold.traits()["writes"] != "O_DIRECT"
    assert open_now() == before


def test_a_disk_that_fails_is_told_of(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no file system without O_DIRECT."""
    monkeypatch.setattr("migrator.storage.direct_io.os.pwritev", refuses(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        is_possible(fd)
    assert not is_direct(fd)


def test_only_large_files_use_it(fd: int) -> None:
    """And only where it works."""
    works = Bypass(Way.NONE, is_direct=True)
    assert isinstance(large_file(fd, works, page_cache.DIRECT_FROM), DirectFile)
    assert isinstance(large_file(fd, works, page_cache.DIRECT_FROM - 1), LargeFile)
    assert isinstance(large_file(fd, Bypass(Way.DONTCACHE), 1 << 40), LargeFile)
    assert (str(works), str(Bypass(Way.DONTCACHE))) == ("O_DIRECT", "RWF_DONTCACHE")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PosixStorage:
    """One on which all files go around the cache."""
    monkeypatch.setattr(page_cache, "DIRECT_FROM", 0)
    storage = PosixStorage(tmp_path, "job")
    storage.check()
    storage._bypass = Bypass(Way.NONE, is_direct=True)
    return storage


def test_an_upload_is_whole(volume: PosixStorage) -> None:
    """Synced and named behind the last byte."""
    whole = np.random.default_rng(1).bytes(9 * PAGE + 5)
    with volume.upload("ckpt/part", size=len(whole)) as file:
        file.write([memoryview(whole)])
        assert volume.list("ckpt") == []
        file.finish()
    assert volume.get("ckpt/part", limit=len(whole)) == whole


def test_the_sync_comes_behind_the_last_byte(volume: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is under way when the file is synced would not be durable."""
    called: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = real(*args)
            called.append(name)
            return found

        return call

    for name in ("pwritev", "fsync", "rename"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    with volume.upload("ckpt/part", size=0) as file:
        called.clear()
        file.write([memoryview(bytes(9 * PAGE + 5))])
        file.finish()
    assert called[: called.index("fsync")].count("pwritev") == 10
    assert called[called.index("fsync") :].count("pwritev") == 0


def test_an_upload_that_is_left_waits_before_its_descriptor_is_closed(
    volume: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is under way would land in the next file with this number."""
    real, began, may_go, closed = os.pwritev, threading.Event(), threading.Event(), list[int]()

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        began.set()
        assert may_go.wait(60)
        assert closed == []
        return real(fd, buffers, offset, *flags)

    with volume.upload("ckpt/part", size=0) as file:
        monkeypatch.setattr(os, "pwritev", write)
        file.write([memoryview(bytes(PAGE))])
        assert began.wait(60)
        real_close, number = os.close, file._fd

        def close(fd: int) -> None:
            if fd == number:
                closed.append(fd)
            real_close(fd)

        monkeypatch.setattr(os, "close", close)
        threading.Timer(0.05, may_go.set).start()
    assert closed == [number]


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageFullError), (errno.EIO, StorageTransientError)])
@pytest.mark.parametrize("size", [PAGE, 9 * PAGE + 5])
def test_a_failed_upload_leaves_nothing(
    volume: PosixStorage, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], size: int
) -> None:
    """Neither a name nor a thread that writes."""
    with volume.upload("ckpt/part", size=size) as file:
        fails(monkeypatch, code, from_byte=0)
        with pytest.raises(kind, match=r"cannot write .*ckpt/part"):  # noqa: PT012 - whichever of the two tells it
            file.write([memoryview(bytes(size))])
            file.finish()
    assert volume.list("ckpt") == volume.leftovers("ckpt") == []


def test_the_flag_is_of_one_descriptor(tmp_path: Path) -> None:
    """Another one of the same file is not changed."""
    first = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    second = os.open(tmp_path / "file", os.O_RDWR)
    try:
        set_direct(first, is_direct=True)
        assert (is_direct(first), is_direct(second)) == (True, False)
        set_direct(first, is_direct=False)
        assert not is_direct(first)
    finally:
        os.close(first)
        os.close(second)


# Reading.


def test_how_much_of_a_file_is_cached(on_disk: Path) -> None:
    """Looking does not change it."""
    path = on_disk / "file"
    path.write_bytes(bytes(128 * PAGE + 1))
    with path.open("rb") as file:
        fd = file.fileno()
        assert cached_share(fd, 128 * PAGE) == 1
        dropped(path)
        assert cached_share(fd, 128 * PAGE) == 0
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 64 * PAGE, 0)
        assert cached_share(fd, 128 * PAGE) == 0.5
        assert cached_share(fd, 0) == 1


@pytest.fixture
def whole() -> bytes:
    """What the file holds."""
    return np.random.default_rng(7).bytes(9 * PAGE + 5)


def dropped(path: Path) -> None:
    """Put the file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def reader(on_disk: Path, whole: bytes) -> Iterator[DirectReader]:
    (on_disk / "whole").write_bytes(whole)
    reader = DirectReader(os.open(on_disk / "whole", os.O_RDONLY | os.O_DIRECT))
    yield reader
    reader.close()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 9 * PAGE), sizes=st.lists(st.integers(0, 3 * PAGE), max_size=5))
def test_any_range_is_read(reader: DirectReader, whole: bytes, offset: int, sizes: list[int]) -> None:
    """Into memory that begins anywhere; also what ends with the file."""
    buffers = [memoryview(bytearray(size + 3))[3:] for size in sizes]
    size = sum(sizes)
    if offset + size > len(whole):
        with pytest.raises(EOFError, match=f"ends already at byte {len(whole)}"):
            reader.read(buffers, offset)
        return
    reader.read(buffers, offset)
    assert b"".join(buffers) == whole[offset : offset + size]
    assert reader._free.qsize() == direct_io.BUFFERS, "each buffer is given back"


def test_many_threads_read_at_the_same_time(
    reader: DirectReader, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a buffer of its own; more of them than there are buffers wait."""
    real, most, now, lock = os.preadv, 0, 0, threading.Lock()
    all_in = threading.Event()

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
            if now == direct_io.BUFFERS:
                all_in.set()
        assert all_in.wait(60)
        found = real(fd, buffers, offset)
        with lock:
            now -= 1
        return found

    monkeypatch.setattr(os, "preadv", read)
    found = [bytearray(PAGE) for _ in range(9)]
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(lambda i: reader.read([memoryview(found[i])], i * PAGE), range(9)))
    assert b"".join(found) == whole[: 9 * PAGE]
    assert most == direct_io.BUFFERS


def test_memory_that_is_still_read_into_is_not_used_again(on_disk: Path, whole: bytes) -> None:
    """A read that was left alone would put its bytes into what a save writes."""
    (on_disk / "whole").write_bytes(whole)
    for is_read in (True, False):
        direct_io._idle.clear()
        reader = DirectReader(os.open(on_disk / "whole", os.O_RDONLY | os.O_DIRECT))
        if is_read:
            reader._free.get()
        reader.close()
        reader.close()
        assert len(direct_io._idle) == (0 if is_read else 1)


@pytest.mark.parametrize("most", [PAGE, 5000, 3 * PAGE])
def test_a_short_read_is_gone_on_with(
    reader: DirectReader, whole: bytes, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Whatever the kernel gives at a time."""
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return min(most, real(fd, buffers, offset))

    monkeypatch.setattr(os, "preadv", read)
    found = bytearray(9000)
    reader.read([memoryview(found)], 3)
    assert bytes(found) == whole[3:9003]


@pytest.fixture
def cold(on_disk: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> PosixStorage:
    """A volume with this file, which is not in the page cache."""
    monkeypatch.setattr(page_cache, "DIRECT_FROM", 0)
    storage = PosixStorage(on_disk, "job")
    storage.check()
    (storage.directory / "ckpt").mkdir()
    (storage.directory / "ckpt" / "part").write_bytes(whole)
    dropped(storage.directory / "ckpt" / "part")
    return storage


def read_by(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> bool:
    """Read the file, and say whether that went around the page cache."""
    seen: set[bool] = set()
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if not flags:
            seen.add(is_direct(fd))
        return real(fd, buffers, offset, *flags)

    with monkeypatch.context() as patch, storage.open("ckpt/part") as file:
        patch.setattr(os, "preadv", read)
        found = bytearray(len(whole) - 7)
        file.read([memoryview(found)[:5], memoryview(found)[5:]], 7)
    assert bytes(found) == whole[7:]
    assert len(seen) == 1
    return seen == {True}


def test_a_file_that_is_not_in_memory_is_read_around_the_cache(
    cold: PosixStorage, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    """And does not get there by that; nor is one read that is there already, or that others read as well."""
    assert read_by(cold, monkeypatch, whole)
    assert read_by(cold, monkeypatch, whole)
    cold.get("ckpt/part", limit=len(whole))
    assert not read_by(cold, monkeypatch, whole)
    dropped(cold.directory / "ckpt" / "part")
    assert read_by(cold, monkeypatch, whole)
    monkeypatch.setattr(page_cache, "DIRECT_FROM", len(whole) + 1)
    assert not read_by(cold, monkeypatch, whole)
    monkeypatch.setattr(page_cache, "DIRECT_FROM", 0)
    dropped(cold.directory / "ckpt" / "part")
    cold.read_with_others()
    assert not read_by(cold, monkeypatch, whole)


def test_what_is_in_the_cache_in_part_is_read_around_it(
    cold: PosixStorage, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    """Until most of it is there."""
    for share, goes_around in ((0.0, True), (0.7, True), (0.9, False)):
        monkeypatch.setattr("migrator.storage.posix.cached_share", lambda *_, share=share: share)
        assert read_by(cold, monkeypatch, whole) == goes_around


def test_a_read_that_is_refused_is_an_ordinary_one(
    cold: PosixStorage, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    """By the file system; but an error of the disk is told."""
    real = os.preadv
    code = errno.EINVAL

    def refuse(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if is_direct(fd):
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", refuse)
    with cold.open("ckpt/part") as file:
        found = bytearray(len(whole))
        file.read([memoryview(found)], 0)
        assert bytes(found) == whole
        code = errno.EIO
        with pytest.raises(StorageTransientError, match="cannot read"):
            file.read([memoryview(found)], 0)


def test_a_file_that_became_shorter_is_foreign(cold: PosixStorage, whole: bytes) -> None:
    """As by the page cache."""
    with cold.open("ckpt/part") as file, pytest.raises(StorageForeignError, match="shorter"):
        file.read([memoryview(bytearray(len(whole) + 1))], 0)


def open_now() -> list[str]:
    return sorted(os.path.realpath(place) for place in Path("/proc/self/fd").iterdir())


def test_no_descriptor_is_left(cold: PosixStorage, whole: bytes) -> None:
    """Also where the reading fails."""
    before = open_now()
    for _ in range(3):
        with cold.open("ckpt/part") as file:
            file.read([memoryview(bytearray(10))], 0)
        with pytest.raises(StorageForeignError), cold.open("ckpt/part") as file:
            file.read([memoryview(bytearray(10))], len(whole))
    assert open_now() == before
