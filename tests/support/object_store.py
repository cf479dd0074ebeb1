"""An object store for the crash search: every act is durable at once, so a crash only ends its writers.

What is left then is different from a disk: uploads that stay pending, and of a directory that was being deleted, name
by name, any of the names that came last.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator

from migrator.storage.base import Storage
from migrator.storage.memory import Bucket, MemoryStorage

_NUMBER = re.compile(r"\.[0-9]+(?=\.upload)")


class ObjectStore:
    """A `tests.support.crashes.Machine`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.has_links = True
        self.sampled = 0
        self._process = threading.local()
        self._bucket = _Bucket(self)

    def storage(self, job: str) -> Storage:
        return _ObjectStorage(self._bucket, job)

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
        return found | {hidden: b"".join(upload.pieces) for hidden, upload in self._bucket.pending.items()}

    def with_changed_byte(self, path: str) -> ObjectStore:
        left = self.killed()
        file = left._bucket.files[path]
        data = bytearray(file.data)
        data[len(data) * 7 // 8] ^= 4
        left._bucket.files[path] = type(file)(bytes(data), file.modified_s)
        return left


class _Bucket(Bucket):
    def __init__(self, machine: ObjectStore) -> None:
        super().__init__(lambda: machine.now_s)
        self.machine = machine

    def begin(self, key: str) -> str:
        self.machine.before("create", key)
        return super().begin(key)

    def append(self, hidden: str, pieces: list[bytes]) -> None:
        self.machine.before("write", hidden)
        super().append(hidden, pieces)

    def finish(self, hidden: str, *, exclusive: bool = False) -> None:
        self.machine.before("finish", hidden)
        super().finish(hidden, exclusive=exclusive)

    def abort(self, hidden: str) -> None:
        if hidden in self.pending:
            self.machine.before("abort", hidden)
        super().abort(hidden)


class _ObjectStorage(MemoryStorage):
    bucket: _Bucket

    def change(self, name: str, data: bytes) -> None:
        self.bucket.machine.before("write", self._key(name))
        super().change(name, data)

    def delete(self, name: str) -> None:
        self.bucket.machine.before("unlink", self._key(name))
        super().delete(name)

    def delete_all(self, name: str) -> None:
        """One name after another, as there is no such call."""
        key = self._key(name)
        for there in (self.bucket.pending, self.bucket.files):
            for found in sorted(found for found in there if found == key or found.startswith(f"{key}/")):
                self.bucket.machine.before("unlink", found)
                there.pop(found, None)
