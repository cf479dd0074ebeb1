"""How fast a place takes bytes: the slowest of several files, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from migrator.errors import StorageFullError
from migrator.storage.bandwidth import measure
from migrator.storage.memory import Bucket, MemoryStorage
from migrator.storage.posix import PosixStorage, PosixUpload


class Slow(PosixStorage):
    """A directory on a disk of which the speed is told, by a clock of its own."""

    def __init__(self, root: Path, rates: Sequence[float], *, full_at: int = -1) -> None:
        super().__init__(root, "job")
        self.now_s = 0.0
        self.expected: list[int] = []
        self.uploads: list[str] = []
        self._rates = [*rates]
        self._full_at = full_at

    def clock(self) -> float:
        return self.now_s

    def expect(self, size: int) -> None:
        self.expected.append(size)

    def upload(self, name: str, *, size: int = 0) -> PosixUpload:
        if len(self.uploads) == self._full_at:
            raise StorageFullError("full")
        self.uploads.append(name)
        self.now_s += size / self._rates[len(self.uploads) - 1]
        return super().upload(name, size=size)

    def put(self, *args: object, **more: object) -> None:
        super().put(*args, **more)  # type: ignore[arg-type]
        self.now_s += 0.125 * len(self.uploads)


def test_the_slowest_file_counts(tmp_path: Path) -> None:
    """A disk that other pods use is quick at one moment and slow at the next."""
    storage = Slow(tmp_path, [4e6, 1e6, 2e6])
    storage.check()
    storage.now_s = 0.0

    found = measure(storage, 3_000_000, count=3, clock=storage.clock)

    assert found.each_s == (0.75, 3.0, 1.5)
    assert found.bytes_per_s == 1e6
    assert found.small_s == 0.375
    assert storage.expected == [3_000_000]


class Counting(PosixStorage):
    """Notes how large its files are when they have their names."""

    sizes: list[int]

    def delete_all(self, name: str) -> None:
        self.sizes = [path.stat().st_size for path in sorted((self.directory / name).glob("large-*"))]
        super().delete_all(name)


@pytest.mark.parametrize("size", [1, 4097, 9_000_001])
def test_the_files_have_the_size_that_was_asked_for(tmp_path: Path, size: int) -> None:
    """Written by the way of a save's parts, the last page of a large one too."""
    storage = Counting(tmp_path, "job")
    storage.check()

    found = measure(storage, size, count=2)

    assert storage.sizes == [size, size]
    assert found.bytes_per_s > 0


@pytest.mark.slow
def test_a_file_that_is_larger_than_what_is_drawn_is_whole(tmp_path: Path) -> None:
    """Its bytes repeat, and its end is no whole piece."""
    storage = Counting(tmp_path, "job")
    storage.check()
    measure(storage, (64 << 20) + 5, count=1)

    assert storage.sizes == [(64 << 20) + 5]


@pytest.mark.parametrize("full_at", [-1, 0, 1])
def test_nothing_is_left_behind(tmp_path: Path, full_at: int) -> None:
    """Neither of what went well nor of what failed."""
    storage = Slow(tmp_path, [1e6] * 3, full_at=full_at)
    storage.check()
    if full_at < 0:
        measure(storage, 5000, count=3)
    else:
        with pytest.raises(StorageFullError):
            measure(storage, 5000, count=3)

    assert [*storage.directory.iterdir()] == []


def test_an_object_store_is_measured_the_same_way() -> None:
    """By its uploads, which are deleted too."""
    bucket = Bucket()
    storage = MemoryStorage(bucket, "job")
    storage.check()

    assert measure(storage, 5000, count=2).size == 5000
    assert not bucket.files
    assert not bucket.pending
