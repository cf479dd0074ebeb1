"""Object stores by filesystems of fsspec: Google Cloud Storage, Azure Blob Storage, and this process's memory.

fsspec promises less than an object store keeps. So `_KINDS` lists the filesystems whose source was read, and what may
be relied on there. All others are refused in the settings. Three things differ from a client of one store:

- **Writing once.** `mode="create"` of fsspec is by default a look and then a write. It is used only where the source
  shows one conditional request. Elsewhere `ConditionRefusedError` says so, and `ObjectStorage` uses claims. Nothing
  keeps a writer's name: a request that a library repeats after it has acted finds its own object, and is reported as
  one that met another writer's. A generation then takes the next number, and a commit compares the bytes.
- **Pending uploads.** fsspec shows none. So a hidden marker beside the name is written before the first byte, and
  `finish` looks for it before and after the object gets its name. `abort` deletes the marker. What the store itself
  keeps of a dead upload is not seen and not deleted: Google and Azure delete it after a week.
- **Time.** Few filesystems have timeouts. So each call runs in a thread of its own, and is given up after a while.

The price: more requests than a client of one store makes, a thread for each, and each part of an upload is in memory
about four times. Reads are not tied to one version of an object; the digests of the blocks notice a mixture.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import queue
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from migrator.errors import (
    SettingsError,
    StorageAccessError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage.base import Upload
from migrator.storage.object_client import (
    ConditionRefusedError,
    Found,
    Listing,
    ObjectClient,
    PartedUpload,
    PendingUpload,
    scrubbed,
)

PART = 16 << 20
"""Bytes that are sent at once, at least."""
_UNIT, _PARTS = 256 << 10, 9_000
"""Google takes multiples of 256 KiB, s3fs up to 10,000 parts, Azure up to 50,000 blocks."""
CALL_S = 60.0
"""Seconds after which a call is given up, with all that the library repeats in it. A call moves one part at most."""
_HURRIED_S = 3.0
"""The least of that in a pod that must leave."""
_OF_GRACE = 1 / 3
"""In a pod that must leave, the same as a part of the grace."""

_MARKER = re.compile(r"(?P<directory>(?:.*/)?)\.(?P<name>[^/]+)\.(?P<id>[0-9a-f]{12})\.uploading")
_TIMES = ("LastModified", "last_modified", "mtime", "created")
"""Under which of these names a filesystem says when an object was written: s3fs, adlfs, gcsfs, memory."""


@dataclass(frozen=True)
class _Kind:
    """What the source of a filesystem shows."""

    module: str
    type: str
    creates: bool
    """Whether `mode="create"` is atomic."""
    streams: bool
    """Whether an open file is invisible until it is closed."""
    to_do: str
    """Where it finds credentials."""


_GOOGLE = _Kind(
    # Not `gcsfs.GCSFileSystem`: in zonal buckets that one shows a file while it is written. This one fails there.
    "gcsfs.core",
    "GCSFileSystem",
    creates=True,  # one request with ifGenerationMatch=0
    streams=True,
    to_do="See GOOGLE_APPLICATION_CREDENTIALS, or the service account of the pod",
)
_AZURE = _Kind(
    "adlfs",
    "AzureBlobFileSystem",
    creates=True,  # one request with If-None-Match: *
    streams=True,
    to_do="See AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the identity of the pod",
)
_KINDS = {
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "abfs": _AZURE,
    "az": _AZURE,
    "memory": _Kind(
        "fsspec.implementations.memory",
        "MemoryFileSystem",
        creates=True,  # a look and then a write, but under `_IN_MEMORY`
        streams=False,
        to_do="It needs no credentials",
    ),
    # `s3_client.py` does more with S3. This is for tests on a real server.
    "s3": _Kind("s3fs", "S3FileSystem", creates=True, streams=True, to_do="See AWS_ACCESS_KEY_ID"),
}
_IN_MEMORY = threading.Lock()
"""Held while a file is written to memory: all clients there are in this process."""


class FsspecClient(ObjectClient):
    """One bucket or container, or what lies below a prefix in it."""

    def __init__(self, protocol: str, root: str, *, aside: str = "", grace_s: float = 30.0) -> None:
        """`root` is `bucket/prefix`. Hidden objects that measure the clock are made below `aside`, a key's prefix."""
        self._kind = kind = _KINDS[protocol]
        self.where = f"{protocol}://{root}/"
        self._aside = aside
        self._hurried_s = min(CALL_S, max(_HURRIED_S, grace_s * _OF_GRACE))
        self._limit_s = CALL_S
        self.name = kind.module.partition(".")[0]
        try:
            made = getattr(importlib.import_module(kind.module), kind.type)
        except ImportError as error:
            raise SettingsError(f"{protocol}:// needs {self.name}, which cannot be imported: {error}") from None
        self._fs = self.call("reach", "", made, skip_instance_cache=True, use_listings_cache=False)
        self._root = str(made._strip_protocol(root))

    def hurry(self, is_on: bool = True) -> None:
        self._limit_s = self._hurried_s if is_on else CALL_S

    def call(self, doing: str, key: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What `act` returns, or an error of ours. If it is given up it goes on, and may act later."""
        ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put((act(*arguments, **named), None))
            except BaseException as error:
                ended.put((None, error))

        threading.Thread(target=run, name="migrator-store", daemon=True).start()
        limit_s = self._limit_s
        try:
            found, error = ended.get(timeout=limit_s)
        except queue.Empty:
            raise StorageTransientError(
                f"cannot {doing} {self.where}{key}: no answer within {limit_s:g} s. See whether the store answers."
            ) from None
        if error is not None:
            raise as_storage_error(error, f"{doing} {self.where}{key}", self._kind.to_do) from None
        return found

    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str | None = None, writer: str = "") -> None:
        if etag is not None or (absent and not self._kind.creates):
            raise ConditionRefusedError(f"{self.name} has no such condition for {self.where}{key}")
        try:
            self.call("write", key, self._pipe, key, data, **({"mode": "create"} if absent else {}))
        except _UnknownModeError as error:
            raise ConditionRefusedError(str(error)) from None
        except StorageNotFoundError as error:
            raise StorageAccessError(
                f"{error} Is the bucket there? Make it, or name another (MIGRATOR_CKPT)."
            ) from None

    def _pipe(self, key: str, data: bytes, **mode: str) -> None:
        try:
            if self._kind.streams:
                self._fs.pipe_file(self._path(key), data, **mode)
            else:
                with _IN_MEMORY:
                    self._fs.pipe_file(self._path(key), data, **mode)
        except (NotImplementedError, TypeError, ValueError) as error:
            # Versions before `mode` was known.
            if mode:
                raise _UnknownModeError(f"{self.name} cannot write only what is absent: {scrubbed(error)}") from None
            raise

    def get(self, key: str, *, limit: int) -> bytes:
        found = self.head(key)
        if found is None:
            raise StorageNotFoundError(f"there is no {self.where}{key}")
        # Not a range of what is small: of an empty object no range can be had.
        part = {} if found.size <= limit else {"start": 0, "end": limit}
        data: bytes = self.call("read", key, self._fs.cat_file, self._path(key), **part)
        return data[:limit]

    def read(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        if not len(buffer):
            return 0
        end = offset + len(buffer)
        data: bytes = self.call("read", key, self._fs.cat_file, self._path(key), start=offset, end=end)
        if len(data) > len(buffer):
            raise StorageTransientError(f"{self.where}{key}: {len(data)} bytes came, not {len(buffer)}")
        buffer[: len(data)] = data
        return len(data)

    def head(self, key: str) -> Found | None:
        try:
            info = self.call("look at", key, self._info, key)
        except StorageNotFoundError:
            return None
        return None if info["type"] == "directory" else Found(int(info["size"]), self._when(info, key))

    def _info(self, key: str) -> Any:
        self._fs.invalidate_cache()
        return self._fs.info(self._path(key))

    def _when(self, info: dict[str, Any], key: str) -> float:
        found = next((info[name] for name in _TIMES if info.get(name) is not None), None)
        if isinstance(found, datetime):
            return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(found, int | float):
            return float(found)
        raise StorageError(f"{self.name} does not say when {self.where}{key} was written")

    def list(self, prefix: str) -> Listing:
        objects: dict[str, Found] = {}
        directories: set[str] = set()
        for info in self._below("ls", prefix):
            name = str(info["name"]).rstrip("/").removeprefix(self._path(prefix))
            # Some filesystems answer with the object of the directory's name, or with what lies beside it.
            if not name or "/" in name or _MARKER.fullmatch(name):
                continue
            if info["type"] == "directory":
                directories.add(name)
            else:
                objects[name] = Found(int(info["size"]), self._when(info, name))
        return Listing(objects, frozenset(directories))

    def uploads(self, prefix: str) -> builtins.list[PendingUpload]:
        found = []
        for info in self._below("find", prefix.rpartition("/")[0]):
            name = str(info["name"]).removeprefix(f"{self._root}/")
            marker = _MARKER.fullmatch(name)
            if marker is not None and (key := marker["directory"] + marker["name"]).startswith(prefix):
                found.append(PendingUpload(key, marker["id"], self._when(info, name)))
        return found

    def _below(self, how: str, prefix: str) -> Iterator[dict[str, Any]]:
        """What lies below a prefix: `ls` one level deep, `find` at any depth."""

        def look() -> Any:
            self._fs.invalidate_cache()
            return getattr(self._fs, how)(self._path(prefix).rstrip("/"), detail=True)

        try:
            found = self.call("list", prefix, look)
        except StorageNotFoundError:
            return iter(())
        infos = found.values() if isinstance(found, dict) else found
        below = self._path(prefix).rstrip("/") + "/"
        return (info for info in infos if str(info["name"]).startswith(below))

    def delete(self, key: str) -> None:
        with suppress(StorageNotFoundError):
            self.call("delete", key, self._fs.rm_file, self._path(key))

    def upload(self, key: str, *, size: int = 0) -> Upload:
        return FsspecUpload(self, key, size)

    def open(self, key: str) -> Any:
        """A file of the filesystem. It has no name before it is closed."""
        if self._kind.streams:
            return self.call("begin the upload of", key, self._fs.open, self._path(key), "wb", block_size=PART)
        return _Held(lambda data: self._pipe(key, data))

    def abort(self, pending: PendingUpload) -> None:
        self.delete(marker_of(pending))

    def now(self) -> float:
        key = f"{self._aside}.probe.{uuid.uuid4().hex[:12]}.upload"
        try:
            self.put(key, b"")
            found = self.head(key)
        finally:
            with suppress(StorageError):
                self.delete(key)
        if found is None:
            raise StorageTransientError(f"{self.where}{key} was deleted before its time was read")
        return found.modified_s

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class FsspecUpload(PartedUpload):
    """A file of the filesystem, and the marker that says it is pending."""

    def __init__(self, client: FsspecClient, key: str, size: int) -> None:
        super().__init__(f"{client.where}{key}", max(PART, -(-size // _PARTS // _UNIT) * _UNIT))
        self._client = client
        self._key = key
        self._pending = PendingUpload(key, uuid.uuid4().hex[:12], 0.0)
        self._is_over = False
        client.put(marker_of(self._pending), b"")
        try:
            self._file = client.open(key)
        except BaseException:
            with suppress(StorageError):
                client.abort(self._pending)
            raise

    def send(self, part: bytes) -> None:
        self._client.call("write", self._key, self._file.write, part)

    def finish(self) -> None:
        if self.has_rest:
            self.send_rest()
        self._check()
        self._client.call("finish the upload of", self._key, self._file.close)
        try:
            # A sweep that came in between has not seen the object.
            self._check()
        except StorageError:
            with suppress(StorageError):
                self._client.delete(self._key)
            raise
        self._is_over = True
        # The object has its name; a marker that stays is a leftover.
        with suppress(StorageError):
            self._client.abort(self._pending)

    def _check(self) -> None:
        if self._client.head(marker_of(self._pending)) is None:
            raise StorageNotFoundError(f"the upload of {self.where} was aborted before it was finished")

    def close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        with suppress(StorageError):
            self._client.call("give up the upload of", self._key, self._file.discard)
        self._file.closed = True
        with suppress(StorageError):
            self._client.abort(self._pending)

    def __del__(self) -> None:
        # A file of fsspec that is collected as garbage is finished, if it was not closed.
        if hasattr(self, "_file"):
            self._file.closed = True


class _Held:
    """A file for filesystems that show an open one: all of it is in memory until it is closed."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.closed = False
        self._put = put
        self._data = bytearray()

    def write(self, part: bytes) -> None:
        self._data += part

    def close(self) -> None:
        self._put(bytes(self._data))

    def discard(self) -> None:
        self._data.clear()


class _UnknownModeError(StorageError):
    """This version of the filesystem does not know `mode="create"`."""


def marker_of(pending: PendingUpload) -> str:
    """The key of the object that says of an upload that it is pending."""
    directory, slash, name = pending.key.rpartition("/")
    return f"{directory}{slash}.{name}.{pending.id}.uploading"


_NO_CREDENTIALS = {"DefaultCredentialsError", "RefreshError", "ClientAuthenticationError", "NoCredentialsError"}


def as_storage_error(error: BaseException, doing: str, to_do: str) -> StorageError:
    """What a filesystem raised, as an error of ours. A library may have put its own error around that of another."""
    if isinstance(error, StorageError):
        return error
    text, found = f"cannot {doing}: {type(error).__name__}: {scrubbed(error)}.", _errors(error)
    statuses = {str(status) for one in found for status in (_status(one),) if status is not None}
    if any(isinstance(one, FileExistsError) for one in found) or "412" in statuses:
        return StorageExistsError(text)
    if any(isinstance(one, FileNotFoundError | IsADirectoryError) for one in found) or "404" in statuses:
        return StorageNotFoundError(text)
    if (
        any(isinstance(one, PermissionError) or type(one).__name__ in _NO_CREDENTIALS for one in found)
        or statuses & {"401", "403"}
        or str(error).startswith("Forbidden")  # gcsfs
    ):
        return StorageAccessError(f"{text} {to_do}; the job has to write, read, list and delete there.")
    is_full = any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in found)
    if is_full or any(isinstance(one, MemoryError) for one in found) or "507" in statuses:
        return StorageFullError(text)
    return StorageTransientError(f"{text} See whether the store answers. {to_do}.")


def _errors(error: BaseException) -> builtins.list[BaseException]:
    """The error and those that caused it."""
    found: builtins.list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found


def _status(error: BaseException) -> object:
    """The HTTP status, as azure, gcsfs, aiohttp and botocore name it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return next((found for name in ("status_code", "code", "status") if (found := getattr(error, name, None))), None)
