"""A job's names in an object store, and what "once" and "durable" mean there.

An object appears with all of its bytes when its PUT is answered, and is durable then. What must
exist at most once (a generation, a commit) is written by a PUT that fails if the name is taken
(`If-None-Match: *`). Not every store honours that: `check` finds out. A store that ignores or
refuses it gets a claim first: a hidden object of a name that no other writer makes, then a LIST.
Who sees another claim, or the name itself, withdraws. So of two writers at least one sees the
other, and at most one goes on.

A request whose answer was lost may have acted, and libraries repeat it. So an object that is written
once carries the name of the call that wrote it, and after an error what is there decides.

A directory is deleted name by name, after its pending uploads were aborted: a writer that is
still at work there fails.

The price: a `check` of `put` that looks at other names is asked twice, because nothing here is
atomic over two names.
"""

from __future__ import annotations

import builtins
import enum
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone

from migrator.errors import (
    StorageError,
    StorageExistsError,
    StorageForeignError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage.base import SMALL, Reader, Storage, Upload, check_job, check_name, probe
from migrator.storage.object_client import ConditionRefusedError, Found, ObjectClient, PendingUpload

RANGE = 16 << 20
"""Bytes of one ranged GET."""
READERS = 8
"""Ranged GETs at the same time, of one file."""
_TRIES = 4
"""How often a PUT that must act once is made, and a range is read."""
_PAUSE_S = 0.1
"""Seconds before it is made again; doubled each time."""
_ROUNDS = 100
"""How often what is left of a directory is listed and deleted."""
_CLAIM_TRIES = 8
"""How often a writer that met another claim tries again."""
_CLAIM_PAUSE_S = 0.05
"""Seconds before it does, times a random number and the number of tries."""
_CLOCK_S = 60.0
"""Seconds by which the node's clock and the store's may differ without a warning. S3 refuses requests from 900 on."""


class Conditions(enum.Enum):
    """What a store does with a PUT that has a condition."""

    UNKNOWN = "not tried yet"
    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


class ObjectStorage(Storage):
    """The objects `<prefix>/<job>/...`; all names are relative to that."""

    root: str
    acts_late = True

    def __init__(self, client: ObjectClient, prefix: str, job: str) -> None:
        check_job(job)
        self.client = client
        prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.root = f"{client.where}{prefix}".rstrip("/")
        self._prefix = f"{prefix}{job}/"
        self.conditions = Conditions.UNKNOWN
        self._weaknesses: builtins.list[str] = []
        self._is_hurried = False

    def __repr__(self) -> str:
        return f"ObjectStorage({self.where()!r}, {self.client.name})"

    def where(self, name: str = "") -> str:
        return f"{self.client.where}{self._prefix}{name}"

    # Whether everything works.

    def check(self) -> None:
        # A store that cannot be reached is an answer within seconds.
        self.client.hurry()
        try:
            self._check()
        finally:
            self.client.hurry(self._is_hurried)

    def _check(self) -> None:
        name = f".probe.{uuid.uuid4().hex[:12]}.upload"
        self._find_out_about_conditions(name)
        probe(self, name)
        key = self._prefix + name
        try:
            self.client.put(key, b"probe")
            if name not in self.client.list(self._prefix).objects:
                raise StorageError(
                    f"{self.where()}: a LIST does not show an object that was written before it. Such a store cannot "
                    "keep ckpts: the next life would not find the newest one. Name another one (MIGRATOR_CKPT)."
                )
        finally:
            self.client.delete(key)
        # Begun and aborted: both rights are needed in the last seconds of a pod.
        with self.client.upload(key):
            for pending in self.client.uploads(self._prefix):
                # Said here: what a failed upload could not abort is left to the next life, without a word.
                if pending.key == key:
                    self.client.abort(pending)
        self._compare_clocks()

    def _compare_clocks(self) -> None:
        try:
            there = datetime.fromtimestamp(self.client.now(), timezone.utc)
        except StorageError:
            return  # no save needs it
        here = datetime.now(timezone.utc)
        differs_s = (here - there).total_seconds()
        self._weaknesses = []
        if abs(differs_s) > _CLOCK_S:
            self._weaknesses.append(
                f"the clock of this node shows {here:%Y-%m-%d %H:%M:%S} UTC, that of {self.client.where} "
                f"{there:%Y-%m-%d %H:%M:%S}: they differ by {abs(differs_s):.0f} s. Set the node's clock (NTP): S3 "
                "refuses requests from 15 minutes on, and credentials are renewed by this clock"
            )

    def _find_out_about_conditions(self, name: str) -> None:
        key = self._prefix + name
        try:
            # The first one may say it as well: if its answer was lost, and a library repeated it.
            for data in (b"first", b"second"):
                self.client.put(key, data, absent=True)
            self.conditions = Conditions.IGNORED
        except StorageExistsError:
            self.conditions = Conditions.HONOURED
        except ConditionRefusedError:
            self.conditions = Conditions.REFUSED
        except BaseException:
            # What failed first says more than this does.
            with suppress(StorageError):
                self.client.delete(key)
            raise
        self.client.delete(key)

    def traits(self) -> dict[str, str]:
        return {"client": self.client.name, "conditional_writes": self.conditions.value}

    def weaknesses(self) -> builtins.list[str]:
        return self._weaknesses

    # Small objects.

    def put(self, name: str, data: bytes, *, exclusive: bool, check: Callable[[], None] = lambda: None) -> None:
        key, data = self._key(name), bytes(data)
        check()
        if not exclusive:
            self._put_over(key, data)
        elif self._honours_conditions():
            self._put_once(key, data)
        else:
            with self._claimed(key):
                self._put_over(key, data)
        self._check_again(key, check)

    def _check_again(self, key: str, check: Callable[[], None]) -> None:
        for turn in range(_TRIES):
            try:
                return check()
            except StorageError as error:
                # A request that failed says nothing against the name. Deleting it now might undo what others have seen.
                if error.transient:
                    if turn + 1 == _TRIES:
                        raise
                else:
                    self._withdraw(key)
                    raise
            except BaseException:
                self._withdraw(key)
                raise
            time.sleep(_PAUSE_S * 2**turn)
        return None

    def _withdraw(self, key: str) -> None:
        with suppress(StorageError):
            self.client.delete(key)

    def _honours_conditions(self) -> bool:
        if self.conditions is Conditions.UNKNOWN:
            self._find_out_about_conditions(f".probe.{uuid.uuid4().hex[:12]}.upload")
        return self.conditions is Conditions.HONOURED

    def _put_over(self, key: str, data: bytes) -> None:
        try:
            self.client.put(key, data)
        except StorageError as error:
            if not error.transient or not self._is_there(key, data):
                raise

    def _put_once(self, key: str, data: bytes) -> None:
        writer = uuid.uuid4().hex
        for turn in range(_TRIES):
            try:
                self.client.put(key, data, absent=True, writer=writer)
                return
            except StorageExistsError as error:
                # The name may be taken by a try of this very call, whose answer was lost.
                found = self.client.head(key)
                if found is not None and found.writer == writer:
                    return
                # Amazon also refuses one of two that arrive together, and both may be gone.
                if found is not None or turn + 1 == _TRIES:
                    raise StorageExistsError(f"{self.client.where}{key} is there already, of another writer") from error
            except StorageError as error:
                # Made again, it finds the name taken if it has acted.
                if not error.transient or turn + 1 == _TRIES:
                    raise
            time.sleep(_PAUSE_S * 2**turn)

    def _is_there(self, key: str, data: bytes) -> bool:
        try:
            return self.client.get(key, limit=len(data) + 1) == data
        except StorageError:
            return False

    @contextmanager
    def _claimed(self, key: str) -> Iterator[None]:
        """Where the store has no conditions: at most one writer is inside, and only if there is no such key."""
        directory, _, name = key.rpartition("/")
        for turn in range(1, _CLAIM_TRIES + 1):
            claim = f"{directory}/.{name}.{uuid.uuid4().hex[:12]}.claim"
            self.client.put(claim, b"")
            try:
                there = self.client.list(f"{directory}/").objects
                if name in there:
                    break
                others = [other for other in there if _is_claim(other, name) and not claim.endswith(f"/{other}")]
                if not others:
                    yield
                    return
            finally:
                # What is left of it is a leftover; the name may have been given.
                self._withdraw(claim)
            time.sleep(_CLAIM_PAUSE_S * turn * random.random())
        raise StorageExistsError(f"{self.client.where}{key} is there already, or claimed by another writer")

    def change(self, name: str, data: bytes) -> None:
        key = self._key(name)
        found = self.client.head(key)
        if found is None:
            raise StorageNotFoundError(f"there is no file {self.where(name)} to be changed")
        if self._honours_conditions() and found.etag is not None:
            try:
                self.client.put(key, bytes(data), etag=found.etag)
            except StorageExistsError as error:
                # Also if a library has repeated a request that had acted.
                if self.client.head(key) is None:
                    raise StorageNotFoundError(f"{self.where(name)} was deleted while it was changed") from error
                if not self._is_there(key, bytes(data)):
                    raise StorageTransientError(f"{self.where(name)} was changed by another process") from error
        else:
            self.client.put(key, bytes(data))

    def get(self, name: str, *, limit: int = SMALL) -> bytes:
        data = self.client.get(self._key(name), limit=limit + 1)
        if len(data) > limit:
            raise StorageForeignError(f"{self.where(name)} is larger than {limit} bytes; none of ours is")
        return data

    # Large objects.

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        key = self._key(name)
        found = self.client.head(key)
        if found is None:
            raise StorageNotFoundError(f"there is no file {self.where(name)}")
        with ThreadPoolExecutor(READERS, thread_name_prefix="migrator-get") as pool:
            try:
                yield ObjectReader(self.client, key, found, pool)
            finally:
                self.client.rest()

    def upload(self, name: str, *, size: int = 0) -> Upload:
        return self.client.upload(self._key(name), size=size)

    # Looking.

    def list(self, directory: str = "") -> builtins.list[str]:
        prefix = self._below(directory)
        listing = self.client.list(prefix)
        found = {*listing.objects, *listing.directories}
        if not directory:
            pending = (upload.key.removeprefix(prefix) for upload in self.client.uploads(prefix))
            found |= {name.partition("/")[0] for name in pending if "/" in name}
        return sorted(name for name in found if name and not name.startswith("."))

    def leftovers(self, directory: str = "") -> builtins.list[str]:
        prefix = self._below(directory)
        hidden = [name for name in self.client.list(prefix).objects if name.startswith(".")]
        pending = [upload for upload in self.client.uploads(prefix) if "/" not in upload.key.removeprefix(prefix)]
        names = [*hidden, *(_name_of(upload) for upload in pending)]
        return sorted(f"{directory}/{name}" if directory else name for name in names)

    def size(self, name: str) -> int | None:
        found = self.client.head(self._key(name))
        return None if found is None else found.size

    def modified(self, name: str) -> float | None:
        upload = self._pending(name)
        if upload is not None:
            return upload.began_s
        found = self.client.head(self._key(name))
        return None if found is None else found.modified_s

    def hurry(self) -> None:
        self._is_hurried = True
        self.client.hurry()

    def now(self) -> float:
        return self.client.now()

    def make_durable(self, directory: str = "") -> None:
        listing = self.client.list(self._below(directory))
        if directory and not listing.objects:
            raise StorageNotFoundError(f"there is nothing in {self.where(directory)}")

    # Deleting.

    def delete(self, name: str) -> None:
        self.client.delete(self._key(name))

    def delete_all(self, name: str) -> None:
        upload = self._pending(name)
        if upload is not None:
            self.client.abort(upload)
            return
        key = self._key(name)
        for pending in self.client.uploads(key):
            if pending.key == key or pending.key.startswith(f"{key}/"):
                self.client.abort(pending)
        # Until nothing is left: a writer that looked before may still finish its name here.
        for _ in range(_ROUNDS):
            there = self.client.list(f"{key}/").objects
            if not there:
                break
            for found in there:
                self.client.delete(f"{key}/{found}")
        else:
            raise StorageTransientError(f"{self.where(name)}: what is deleted there is listed again and again")
        self.client.delete(key)

    def _pending(self, name: str) -> PendingUpload | None:
        """The upload that a name of `leftovers` stands for."""
        directory, _, last = name.rpartition("/")
        if not (last.startswith(".") and last.endswith(_UPLOAD)):
            return None
        prefix = self._below(directory)
        with suppress(StorageNotFoundError):
            for upload in self.client.uploads(prefix):
                if "/" not in upload.key.removeprefix(prefix) and _name_of(upload) == last:
                    return upload
        return None

    def _key(self, name: str) -> str:
        check_name(name, self.where())
        return self._prefix + name

    def _below(self, directory: str) -> str:
        return f"{self._key(directory)}/" if directory else self._prefix


_UPLOAD = ".pending"


def _name_of(upload: PendingUpload) -> str:
    return f".{upload.key.rpartition('/')[2]}.{upload.id.replace('/', '_')}{_UPLOAD}"


def _is_claim(found: str, name: str) -> bool:
    return found.startswith(f".{name}.") and found.endswith(".claim")


class ObjectReader(Reader):
    """Ranged GETs of one object, several at the same time, all of the same version."""

    def __init__(self, client: ObjectClient, key: str, found: Found, pool: ThreadPoolExecutor) -> None:
        self._client = client
        self._key = key
        self._found = found
        self._pool = pool

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        ranges: list[tuple[memoryview, int]] = []
        for buffer in buffers:
            if offset + len(buffer) > self._found.size:
                raise StorageForeignError(f"{self._client.where}{self._key} ends already at byte {self._found.size}")
            ranges += [(buffer[at : at + RANGE], offset + at) for at in range(0, len(buffer), RANGE)]
            offset += len(buffer)
        if len(ranges) == 1 or threading.current_thread().name.startswith("migrator-get"):
            for buffer, at in ranges:
                self._fill(buffer, at)
            return
        for done in [self._pool.submit(self._fill, buffer, at) for buffer, at in ranges]:
            done.result()

    def _fill(self, buffer: memoryview, offset: int) -> None:
        for turn in range(_TRIES):
            try:
                read = self._client.read(self._key, buffer, offset, etag=self._found.etag)
                break
            except StorageError as error:
                # An answer that ends too early is no error to the libraries that repeat requests.
                if not error.transient or turn + 1 == _TRIES:
                    raise
            time.sleep(_PAUSE_S * 2**turn)
        if read != len(buffer):
            raise StorageForeignError(
                f"{self._client.where}{self._key}: {read} bytes came from byte {offset} on, of {len(buffer)}"
            )
