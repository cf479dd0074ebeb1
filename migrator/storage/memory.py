"""An object store in this process's memory, for tests: it answers at once.

`ObjectStorage` makes the requests, as it does to a real store. Each request is one step
under one lock, so this shows which orders of requests are right.

The price: everything is kept in memory, and copied on its way in and out.
"""

from __future__ import annotations

import builtins
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from migrator.errors import StorageExistsError, StorageForeignError, StorageNotFoundError
from migrator.storage.base import Upload
from migrator.storage.object_client import Found, Listing, ObjectClient, PendingUpload
from migrator.storage.object_storage import ObjectStorage


@dataclass(frozen=True)
class _File:
    data: bytes
    modified_s: float
    etag: str
    writer: str


@dataclass
class _Pending:
    key: str
    modified_s: float
    pieces: list[bytes | memoryview] = field(default_factory=list)


class Bucket:
    """What all jobs and all their processes share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.files: dict[str, _File] = {}
        self.pending: dict[str, _Pending] = {}
        """Uploads that are not finished, by their ids."""
        self.numbers = itertools.count()

    def made(self, data: bytes, writer: str = "") -> _File:
        return _File(data, self.clock(), str(next(self.numbers)), writer)

    def begin(self, key: str) -> str:
        """The id of a new upload."""
        with self.lock:
            id = str(next(self.numbers))
            self.pending[id] = _Pending(key, self.clock())
        return id

    def append(self, id: str, pieces: Sequence[bytes | memoryview]) -> None:
        with self.lock:
            self._upload(id).pieces += pieces

    def finish(self, id: str) -> None:
        """The upload gets its name."""
        with self.lock:
            upload = self._upload(id)
            self.files[upload.key] = self.made(b"".join(upload.pieces))
            del self.pending[id]

    def abort(self, id: str) -> None:
        with self.lock:
            self.pending.pop(id, None)

    def _upload(self, id: str) -> _Pending:
        if id not in self.pending:
            raise StorageNotFoundError(f"the upload {id} was aborted before it was finished")
        return self.pending[id]

    def find(self, key: str) -> _File:
        with self.lock:
            if key not in self.files:
                raise StorageNotFoundError(f"there is no file {key}")
            return self.files[key]


class MemoryClient(ObjectClient):
    """The requests of one process."""

    name = "memory"
    where = "memory:"

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str | None = None, writer: str = "") -> None:
        with self.bucket.lock:
            there = self.bucket.files.get(key)
            if absent and there is not None:
                raise StorageExistsError(f"{key} is there already")
            if etag is not None and (there is None or there.etag != etag):
                raise StorageExistsError(f"{key} is not the one that was to be replaced")
            self.bucket.files[key] = self.bucket.made(bytes(data), writer)

    def get(self, key: str, *, limit: int) -> bytes:
        return self.bucket.find(key).data[:limit]

    def read(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        found = self.bucket.find(key)
        if etag is not None and found.etag != etag:
            raise StorageForeignError(f"{key} was replaced while it was read")
        piece = found.data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def head(self, key: str) -> Found | None:
        with self.bucket.lock:
            found = self.bucket.files.get(key)
        return None if found is None else Found(len(found.data), found.modified_s, found.etag, found.writer)

    def list(self, prefix: str) -> Listing:
        with self.bucket.lock:
            there = {
                key.removeprefix(prefix): file for key, file in self.bucket.files.items() if key.startswith(prefix)
            }
        return Listing(
            {
                name: Found(len(file.data), file.modified_s, file.etag)
                for name, file in there.items()
                if "/" not in name
            },
            frozenset(name.partition("/")[0] for name in there if "/" in name),
        )

    def delete(self, key: str) -> None:
        with self.bucket.lock:
            self.bucket.files.pop(key, None)

    def upload(self, key: str, *, size: int = 0) -> MemoryUpload:
        return MemoryUpload(self.bucket, key)

    def uploads(self, prefix: str) -> builtins.list[PendingUpload]:
        with self.bucket.lock:
            pending = list(self.bucket.pending.items())
        return [PendingUpload(one.key, id, one.modified_s) for id, one in pending if one.key.startswith(prefix)]

    def abort(self, pending: PendingUpload) -> None:
        self.bucket.abort(pending.id)

    def hurry(self, is_on: bool = True) -> None:
        """It answers at once."""

    def now(self) -> float:
        return self.bucket.clock()


class MemoryStorage(ObjectStorage):
    """The names of one job in a bucket."""

    def __init__(self, bucket: Bucket, job: str) -> None:
        super().__init__(MemoryClient(bucket), "", job)


class MemoryUpload(Upload):
    """A pending upload."""

    takes_later = True

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._id = bucket.begin(key)
        self.bytes = 0

    def write(self, buffers: Sequence[memoryview], *, hold: bool = False) -> None:
        # What holds still is taken as late as a client may take it.
        pieces = [buffer if hold else bytes(buffer) for buffer in buffers]
        self._bucket.append(self._id, pieces)
        self.bytes += sum(map(len, pieces))

    def finish(self) -> None:
        self._bucket.finish(self._id)

    def close(self) -> None:
        self._bucket.abort(self._id)
