"""Storage in this process's memory, for tests: an object store that answers at once.

Like an object store it has no directories, only names with a slash in them, and what
is being written is a pending upload. Each act is one step under one lock, so it shows
which orders of acts are right, and nothing of what a crash does to a disk.

The price: everything is kept in memory, and copied on its way in and out.
"""

from __future__ import annotations

import builtins
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from migrator.errors import StorageExistsError, StorageForeignError, StorageNotFoundError
from migrator.storage.base import SMALL, Reader, Storage, Upload, check_job, check_name, probe


@dataclass(frozen=True)
class _File:
    data: bytes
    modified_s: float


@dataclass
class _Pending:
    key: str
    modified_s: float
    pieces: list[bytes] = field(default_factory=list)


class Bucket:
    """What all jobs and all their processes share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.files: dict[str, _File] = {}
        self.pending: dict[str, _Pending] = {}
        """Uploads that are not finished, by a hidden name."""
        self.numbers = itertools.count()

    def begin(self, key: str) -> str:
        """The hidden name of a new upload."""
        directory, _, name = key.rpartition("/")
        with self.lock:
            hidden = f"{directory}/.{name}.{next(self.numbers)}.upload"
            self.pending[hidden] = _Pending(key, self.clock())
        return hidden

    def append(self, hidden: str, pieces: list[bytes]) -> None:
        with self.lock:
            self._upload(hidden).pieces += pieces

    def finish(self, hidden: str, *, exclusive: bool = False) -> None:
        """The upload gets its name."""
        with self.lock:
            upload = self._upload(hidden)
            if exclusive and upload.key in self.files:
                raise StorageExistsError(f"{upload.key} is there already")
            self.files[upload.key] = _File(b"".join(upload.pieces), self.clock())
            del self.pending[hidden]

    def abort(self, hidden: str) -> None:
        with self.lock:
            self.pending.pop(hidden, None)

    def _upload(self, hidden: str) -> _Pending:
        if hidden not in self.pending:
            raise StorageNotFoundError(f"the upload {hidden} was deleted before it was finished")
        return self.pending[hidden]

    def find(self, key: str) -> _File:
        with self.lock:
            if key not in self.files:
                raise StorageNotFoundError(f"there is no file {key}")
            return self.files[key]


class MemoryStorage(Storage):
    """The names of one job in a bucket."""

    def __init__(self, bucket: Bucket, job: str) -> None:
        check_job(job)
        self.root = "memory:"
        self.bucket = bucket
        self._prefix = f"{job}/"

    def __repr__(self) -> str:
        return f"MemoryStorage({self.where()!r})"

    def where(self, name: str = "") -> str:
        return f"{self.root}{self._prefix}{name}"

    def check(self) -> None:
        probe(self, f".probe.{next(self.bucket.numbers)}.upload")

    def put(self, name: str, data: bytes, *, exclusive: bool, check: Callable[[], None] = lambda: None) -> None:
        hidden = self.bucket.begin(self._key(name))
        try:
            self.bucket.append(hidden, [bytes(data)])
            check()
            self.bucket.finish(hidden, exclusive=exclusive)
        finally:
            self.bucket.abort(hidden)

    def change(self, name: str, data: bytes) -> None:
        key = self._key(name)
        with self.bucket.lock:
            if key not in self.bucket.files:
                raise StorageNotFoundError(f"there is no file {self.where(name)} to be changed")
            self.bucket.files[key] = _File(bytes(data), self.bucket.clock())

    def get(self, name: str, *, limit: int = SMALL) -> bytes:
        found = self.bucket.find(self._key(name))
        if len(found.data) > limit:
            raise StorageForeignError(f"{self.where(name)} is larger than {limit} bytes; none of ours is")
        return found.data

    @contextmanager
    def open(self, name: str) -> Iterator[MemoryReader]:
        yield MemoryReader(self.where(name), self.bucket.find(self._key(name)).data)

    def upload(self, name: str) -> MemoryUpload:
        return MemoryUpload(self.bucket, self._key(name))

    def list(self, directory: str = "") -> builtins.list[str]:
        prefix = self._below(directory)
        with self.bucket.lock:
            there = [*self.bucket.files]
            if not directory:
                uploads = (upload.key for upload in self.bucket.pending.values())
                there += [key for key in uploads if "/" in key.removeprefix(prefix)]
        found = {key.removeprefix(prefix).partition("/")[0] for key in there if key.startswith(prefix)}
        return sorted(name for name in found if not name.startswith("."))

    def size(self, name: str) -> int | None:
        with self.bucket.lock:
            found = self.bucket.files.get(self._key(name))
        return None if found is None else len(found.data)

    def modified(self, name: str) -> float | None:
        key = self._key(name)
        with self.bucket.lock:
            found = self.bucket.files.get(key) or self.bucket.pending.get(key)
        return None if found is None else found.modified_s

    def now(self) -> float:
        return self.bucket.clock()

    def make_durable(self, directory: str = "") -> None:
        prefix = self._below(directory)
        with self.bucket.lock:
            if directory and not any(key.startswith(prefix) for key in self.bucket.files):
                raise StorageNotFoundError(f"there is nothing in {self.where(directory)}")

    def delete(self, name: str) -> None:
        key = self._key(name)
        with self.bucket.lock:
            self.bucket.files.pop(key, None)

    def delete_all(self, name: str) -> None:
        key = self._key(name)
        with self.bucket.lock:
            for names in (self.bucket.files, self.bucket.pending):
                for found in [found for found in names if found == key or found.startswith(f"{key}/")]:
                    del names[found]

    def leftovers(self, directory: str = "") -> builtins.list[str]:
        prefix = self._below(directory)
        with self.bucket.lock:
            # Also the probe of a process that died in `check`.
            there = [*self.bucket.pending, *(key for key in self.bucket.files if key.startswith(f"{prefix}."))]
        below = [key for key in there if key.startswith(prefix) and "/" not in key.removeprefix(prefix)]
        return sorted(key.removeprefix(self._prefix) for key in below)

    def _key(self, name: str) -> str:
        check_name(name, self.where())
        return self._prefix + name

    def _below(self, directory: str) -> str:
        return f"{self._key(directory)}/" if directory else self._prefix


class MemoryReader(Reader):
    """The bytes that a file had when it was opened."""

    def __init__(self, where: str, data: bytes) -> None:
        self._where = where
        self._data = memoryview(data)

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            piece = self._data[offset : offset + len(buffer)]
            if len(piece) < len(buffer):
                raise StorageForeignError(f"{self._where} ends already at byte {len(self._data)}")
            buffer[:] = piece
            offset += len(piece)


class MemoryUpload(Upload):
    """A pending upload."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._hidden = bucket.begin(key)
        self.bytes = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        pieces = [bytes(buffer) for buffer in buffers]
        self._bucket.append(self._hidden, pieces)
        self.bytes += sum(map(len, pieces))

    def finish(self) -> None:
        self._bucket.finish(self._hidden)

    def close(self) -> None:
        self._bucket.abort(self._hidden)
