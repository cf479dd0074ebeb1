"""An object store for the crash search: every act is durable at once, so a crash only ends its writers.

What is left then is different from a disk: uploads that stay pending, and of a directory that was being deleted, name
by name, any of the names that came last.

One request of a story may fail: it is not done, or it is done and its answer is lost, or it is given up and acts
later, before a request of any writer, also of one that begins after the crash. And there are stores that ignore or
refuse requests with a condition.

The price: one request fails in each telling, not two; and only requests that change something do.
"""

from __future__ import annotations

import copy
import enum
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from migrator.errors import StorageError, StorageTransientError
from migrator.storage.base import Storage
from migrator.storage.memory import Bucket, MemoryClient, MemoryUpload
from migrator.storage.object_client import ConditionRefusedError, PendingUpload
from migrator.storage.object_storage import Conditions, ObjectStorage

_NUMBER = re.compile(r"\.[0-9]+(?=\.pending)|\.[0-9a-f]{12}(?=\.(upload|claim))")
_DELAYS = (1, 2, 3, 5, 8, 13, 21, 34, None)
"""After how many further requests a request that was given up acts; None: when the story is over."""


class Outcome(enum.Enum):
    """What becomes of a request that is answered with an error."""

    NOT_DONE = "not done"
    UNANSWERED = "done, without an answer"
    LATE = "done late"


@dataclass(frozen=True)
class Fault:
    """What happens to one request of a story."""

    at: int
    """How many came before it."""
    outcome: Outcome
    after: int | None = None
    """After how many further requests it acts; None: at the end."""

    def __str__(self) -> str:
        late = f", {self.after or 'all'} requests later" if self.outcome is Outcome.LATE else ""
        return f"request {self.at} is {self.outcome.value}{late}"


def faults(requests: int, dice: random.Random, delays: int = 3) -> list[Fault]:
    """One at each of so many requests: every outcome, and several delays."""
    found = []
    for at in range(requests):
        found += [Fault(at, Outcome.NOT_DONE), Fault(at, Outcome.UNANSWERED)]
        found += [Fault(at, Outcome.LATE, after) for after in dice.sample(_DELAYS, delays)]
    return found


@dataclass(frozen=True)
class _Request:
    """One that changes something."""

    call: str
    key: str
    data: bytes = b""
    absent: bool = False
    etag: str | None = None
    writer: str = ""
    upload: str = ""


class ObjectStore:
    """A `tests.support.crashes.Machine`."""

    def __init__(self, conditions: Conditions = Conditions.HONOURED, fault: Fault | None = None) -> None:
        self.now_s = 1000.0
        self.conditions = conditions
        # Who dies between a claim and the name leaves the claim, and a number that nobody gets.
        self.has_links = conditions is Conditions.HONOURED
        self.sampled = 0
        self.fault = fault
        self.told_as = ""
        """The story, for messages."""
        self.requests = 0
        self.has_failed = False
        self.has_acted_late = False
        self._late: list[tuple[int | None, _Request]] = []
        """What was given up, and before which request it acts."""
        self._is_forgiven = False
        self._process = threading.local()
        self._bucket = Bucket(lambda: self.now_s)
        self._store = MemoryClient(self._bucket)

    def storage(self, job: str) -> Storage:
        return ObjectStorage(_Client(self._bucket, self), "", job)

    def mount(self, before: Callable[[str, str], None]) -> None:
        self._process.before = before
        _HERE.machine = self

    def before(self, call: str, path: str) -> None:
        """A process is about to do this."""
        self._process.before(call, f"/{path}")
        self.now_s += 0.001

    def sleep(self, seconds: float) -> None:
        self.before("sleep", "")
        self.now_s += seconds

    def request(self, call: str, key: str, data: bytes = b"", **more: object) -> str:
        """One that changes something; the id of an upload that begins."""
        request = _Request(call, key, data, **more)  # type: ignore[arg-type]
        self.before(call, key)
        self._act_late(lambda due: due is not None and due <= self.requests)
        number, self.requests = self.requests, self.requests + 1
        if self.fault is None or self.fault.at != number:
            return self._act(request)
        self.has_failed = True
        if self.fault.outcome is Outcome.UNANSWERED:
            # An error is an answer as well, and that one is lost too.
            with suppress(StorageError):
                self._act(request)
        elif self.fault.outcome is Outcome.LATE:
            after = self.fault.after
            self._late.append((None if after is None else number + after, request))
        raise StorageTransientError(f"{call} {key}: no answer came")

    def settle(self) -> bool:
        """All that was given up acts now. Whether any of it has, until now."""
        self._act_late(lambda due: True)
        return self.has_acted_late

    def forgives(self) -> bool:
        """Whether an error may be that of the request that failed: once."""
        is_first, self._is_forgiven = not self._is_forgiven, self._is_forgiven or self.has_failed
        return is_first and self.has_failed

    def _act_late(self, is_due: Callable[[int | None], bool]) -> None:
        for late in [late for late in self._late if is_due(late[0])]:
            self._late.remove(late)
            self.has_acted_late = True
            with suppress(StorageError):
                self._act(late[1])

    def _act(self, request: _Request) -> str:
        if request.call == "put":
            has_condition = request.absent or request.etag is not None
            if has_condition and self.conditions is Conditions.REFUSED:
                raise ConditionRefusedError("501 NotImplemented")
            obeys = self.conditions is Conditions.HONOURED
            etag = request.etag if obeys else None
            absent = request.absent and obeys
            self._store.put(request.key, request.data, absent=absent, etag=etag, writer=request.writer)
        elif request.call == "delete":
            self._store.delete(request.key)
        elif request.call == "begin":
            return self._bucket.begin(request.key)
        elif request.call == "finish":
            self._bucket.finish(request.upload)
        else:
            self._bucket.abort(request.upload)
        return ""

    def images(self) -> Iterator[ObjectStore]:
        yield self.killed()

    def killed(self) -> ObjectStore:
        left = ObjectStore(self.conditions)
        left.now_s = self.now_s + 1.0
        left.requests = self.requests
        left.told_as = self.told_as
        left.has_acted_late = self.has_acted_late
        left._late = list(self._late)
        left._bucket.files = dict(self._bucket.files)
        left._bucket.pending = {
            id: replace(upload, pieces=[bytes(piece) for piece in upload.pieces])
            for id, upload in self._bucket.pending.items()
        }
        left._bucket.numbers = copy.copy(self._bucket.numbers)
        return left

    def key(self) -> int:
        # All that is ever asked of times is which come first.
        marks = (".leaving", "manifest.json")
        times = {name: file.modified_s for name, file in self._bucket.files.items() if name.endswith(marks)}
        order = {time: i for i, time in enumerate(sorted(set(times.values())))}
        ranks = tuple((name, order[time]) for name, time in sorted(times.items()))
        late = tuple(
            (None if due is None else due - self.requests, one.call, _NUMBER.sub("", one.key), one.data)
            for due, one in self._late
        )
        files = tuple(sorted((_NUMBER.sub("", name), data) for name, data in self.files().items()))
        return hash((files, ranks, late))

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


_HERE = threading.local()


class Time:
    """Stands for the module `time` of `migrator.storage.object_storage`: who waits lets others go on."""

    @staticmethod
    def sleep(seconds: float) -> None:
        _HERE.machine.sleep(seconds)


class Half:
    """Stands for its module `random`: a story is told the same each time."""

    @staticmethod
    def random() -> float:
        return 0.5


class _Client(MemoryClient):
    """Each request that changes something is the machine's to do."""

    def __init__(self, bucket: Bucket, machine: ObjectStore) -> None:
        super().__init__(bucket)
        self._machine = machine

    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str | None = None, writer: str = "") -> None:
        self._machine.request("put", key, data, absent=absent, etag=etag, writer=writer)

    def delete(self, key: str) -> None:
        self._machine.request("delete", key)

    def upload(self, key: str, *, size: int = 0) -> MemoryUpload:
        return _Upload(self.bucket, key, self._machine)

    def abort(self, pending: PendingUpload) -> None:
        self._machine.request("abort", pending.key, upload=pending.id)


class _Upload(MemoryUpload):
    def __init__(self, bucket: Bucket, key: str, machine: ObjectStore) -> None:
        self._bucket = bucket
        self._machine = machine
        self._key = key
        self.bytes = 0
        self._id = machine.request("begin", key)

    def finish(self) -> None:
        self._machine.request("finish", self._key, upload=self._id)

    def close(self) -> None:
        if self._id in self._bucket.pending:
            # As the clients do: the next life sweeps what could not be aborted.
            with suppress(StorageError):
                self._machine.request("abort", self._key, upload=self._id)
