"""An object store for the crash search: every act is durable at once, so a crash only ends its writers.

What is left then is different from a disk: uploads that stay pending, and of a directory that was being deleted, name
by name, any of the names that came last.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from migrator.storage.base import Storage
from migrator.storage.memory import Bucket, MemoryClient, MemoryUpload
from migrator.storage.object_client import PendingUpload
from migrator.storage.object_storage import ObjectStorage

_NUMBER = re.compile(r"\.[0-9]+(?=\.pending)|\.[0-9a-f]{12}(?=\.(upload|claim))")


class ObjectStore:
    """A `tests.support.crashes.Machine`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.has_links = True
        self.sampled = 0
        self._process = threading.local()
        self._bucket = Bucket(lambda: self.now_s)

    def storage(self, job: str) -> Storage:
        return ObjectStorage(_Client(self._bucket, self), "", job)

    def mount(self, before: Callable[[str, str], None]) -> None:
        self._process.before = before

    def before(self, call: str, path: str) -> None:
        """A process is about to do this."""
        self._process.before(call, f"/{path}")
        self.now_s += 0.001

    def sleep(self, seconds: float) -> None:
        self.before("sleep", "")
        self.now_s += seconds

    def images(self) -> Iterator[ObjectStore]:
        yield self.killed()

    def killed(self) -> ObjectStore:
        left = ObjectStore()
        left.now_s = self.now_s + 1.0
        left._bucket.files = dict(self._bucket.files)
        left._bucket.pending = copy.deepcopy(self._bucket.pending)
        left._bucket.numbers = copy.copy(self._bucket.numbers)
        return left

    def key(self) -> int:
        # All that is ever asked of times is which come first.
        marks = (".leaving", "manifest.json")
        times = {name: file.modified_s for name, file in self._bucket.files.items() if name.endswith(marks)}
        order = {time: i for i, time in enumerate(sorted(set(times.values())))}
        ranks = tuple((name, order[time]) for name, time in sorted(times.items()))
        return hash((tuple(sorted((_NUMBER.sub("", name), data) for name, data in self.files().items())), ranks))

    pending_key = key

    def files(self) -> dict[str, bytes]:
        found = {name: file.data for name, file in self._bucket.files.items()}
        pending = self._bucket.pending.items()
        return found | {f"{upload.key}.{id}.pending": b"".join(upload.pieces) for id, upload in pending}

    def with_changed_byte(self, path: str) -> ObjectStore:
        left = self.killed()
        file = left._bucket.files[path]
        data = bytearray(file.data)
        data[len(data) * 7 // 8] ^= 4
        left._bucket.files[path] = replace(file, data=bytes(data))
        return left


class _Client(MemoryClient):
    """Each request that changes something is announced before it acts."""

    def __init__(self, bucket: Bucket, machine: ObjectStore) -> None:
        super().__init__(bucket)
        self._machine = machine

    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str | None = None) -> None:
        self._machine.before("put", key)
        super().put(key, data, absent=absent, etag=etag)

    def delete(self, key: str) -> None:
        self._machine.before("delete", key)
        super().delete(key)

    def upload(self, key: str) -> MemoryUpload:
        self._machine.before("begin", key)
        return _Upload(self.bucket, key, self._machine)

    def abort(self, pending: PendingUpload) -> None:
        self._machine.before("abort", pending.key)
        super().abort(pending)


class _Upload(MemoryUpload):
    def __init__(self, bucket: Bucket, key: str, machine: ObjectStore) -> None:
        super().__init__(bucket, key)
        self._machine = machine
        self._key = key

    def finish(self) -> None:
        self._machine.before("finish", self._key)
        super().finish()

    def close(self) -> None:
        if self._id in self._bucket.pending:
            self._machine.before("abort", self._key)
        super().close()
