"""S3 at the speed of the network: large objects by obstore, all else by s3fs.

obstore is written in Rust. It sends the parts of an upload and fetches ranges in threads of its own,
without the interpreter's lock. What it does not offer (conditional deletes, pending uploads, the
store's clock) are small requests, and `S3Client` makes them. Both use the credentials that botocore
finds, and renew them alike.

The price: an upload copies each of its parts once, so that the caller's memory is free again when
`write` returns. At most `PART * (SENDERS + 3)` bytes are in memory for that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from migrator.errors import (
    StorageAccessError,
    StorageError,
    StorageForeignError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage.base import Upload
from migrator.storage.object_client import PartedUpload, scrubbed
from migrator.storage.s3_client import CONNECT_S, HURRIED_TRIES, TRIES, S3Client

PART = 16 << 20
"""Bytes of one part of an upload. 10,000 of them are 160 GB; larger objects have larger parts."""
SENDERS = 6
"""Parts that are sent at the same time."""
_KEPT_S = 300.0
"""Seconds for which obstore keeps credentials that botocore gave it. botocore renews them before they expire."""


class ObstoreClient(S3Client):
    """One bucket."""

    name = "obstore"

    def __init__(self, bucket: str, *, grace_s: float = 30.0) -> None:
        super().__init__(bucket, grace_s=grace_s)
        self._stores = {
            False: self._store(self._silence_s(is_hurried=False), TRIES),
            True: self._store(self._silence_s(is_hurried=True), HURRIED_TRIES),
        }

    def _store(self, silence_s: float, tries: int) -> Any:
        import botocore.session
        from obstore.store import S3Store

        session = botocore.session.get_session()
        endpoint = self.endpoint

        def credentials() -> Any:
            found = session.get_credentials()
            if found is None:
                raise StorageAccessError("there are no credentials for the store")
            frozen = found.get_frozen_credentials()
            until = datetime.now(timezone.utc) + timedelta(seconds=_KEPT_S)
            named = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "expires_at": until}
            return {**named, **({"token": frozen.token} if frozen.token else {})}

        return S3Store(
            self.bucket,
            # Not None: obstore takes only a text. Without one it asks AWS.
            **dict[str, Any]({} if endpoint is None else {"endpoint": endpoint}),
            region=session.get_config_variable("region") or "us-east-1",
            credential_provider=credentials,
            # TLS protects the bytes on the way, and every block has a digest of our own.
            unsigned_payload=True,
            client_options={
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=silence_s),
            },
            retry_config={"max_retries": tries - 1, "retry_timeout": timedelta(seconds=tries * silence_s)},
        )

    @property
    def store(self) -> Any:
        return self._stores[self.is_hurried]

    def read(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        import obstore

        options = {"range": (offset, offset + len(buffer)), **({} if etag is None else {"if_match": etag})}
        try:
            answer = obstore.get(self.store, key, options=options)  # type: ignore[arg-type]
            data = memoryview(answer.bytes())
        except Exception as error:  # obstore raises its own kinds, and those of Python
            raise as_storage_error(error, f"read {self.where}{key}", is_conditional=etag is not None) from None
        if len(data) > len(buffer):
            raise StorageForeignError(f"{self.where}{key}: the store sent {len(data)} bytes, not {len(buffer)}")
        buffer[: len(data)] = data
        return len(data)

    def upload(self, key: str) -> Upload:
        return ObstoreUpload(self, key)


class ObstoreUpload(PartedUpload):
    """A multipart upload: a thread of ours hands obstore one part after another."""

    def __init__(self, client: ObstoreClient, key: str) -> None:
        super().__init__(f"{client.where}{key}")
        self._client = client
        self._key = key
        self._queue: queue.Queue[bytes | type[_GivenUp] | None] = queue.Queue(maxsize=2)
        self._has_begun = threading.Event()
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="migrator-put", daemon=True)
        self._thread.start()
        # obstore asks for the first part when the upload is pending.
        self._has_begun.wait()
        self._check()

    def _run(self) -> None:
        import obstore

        try:
            obstore.put(
                self._client.store,
                self._key,
                self._parts(),
                use_multipart=True,
                chunk_size=PART,
                max_concurrency=SENDERS,
            )
        except BaseException as error:  # an upload that was given up raises what `_parts` raised
            self._error = error
        finally:
            self._has_begun.set()
            self._is_over = True

    def _parts(self) -> Iterator[bytes]:
        self._has_begun.set()
        while (part := self._queue.get()) is not None:
            if not isinstance(part, bytes):
                raise part  # obstore aborts the upload then
            yield part

    @property
    def part_size(self) -> int:
        return PART

    def send(self, part: bytes) -> None:
        self._hand(part)

    def _hand(self, part: bytes | type[_GivenUp] | None) -> None:
        while True:
            if self._is_over:
                self._check()
                return
            try:
                self._queue.put(part, timeout=0.05)
            except queue.Full:
                continue
            return

    def finish(self) -> None:
        if self.has_rest:
            self.send_rest()
        self._hand(None)
        self._thread.join()
        try:
            self._check()
        except StorageError as error:
            # It may have been finished by a request whose answer was lost, and was then repeated.
            if not (error.transient or isinstance(error, StorageNotFoundError)) or not self._is_finished():
                raise

    def _is_finished(self) -> bool:
        if any(pending.key == self._key for pending in self._client.uploads(self._key)):
            return False
        found = self._client.head(self._key)
        return found is not None and found.size == self.bytes

    def close(self) -> None:
        if self._thread.is_alive():
            self._hand(_GivenUp)
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise as_storage_error(self._error, f"write {self.where}") from None


class _GivenUp(Exception):  # noqa: N818 - never seen by a user
    """The upload is not wanted any more."""


def as_storage_error(error: BaseException, doing: str, *, is_conditional: bool = False) -> StorageError:
    """What obstore raised, as an error of ours."""
    from obstore import exceptions

    text = f"cannot {doing}: {scrubbed(error)}"
    if isinstance(error, StorageError):
        return error
    if isinstance(error, exceptions.PreconditionError) and is_conditional:
        return StorageForeignError(f"{text}. It was replaced while it was read.")
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return StorageNotFoundError(text)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError):
        return StorageAccessError(f"{text}. Give the job the right to do this (docs/s3.md).")
    return StorageTransientError(f"{text}. See whether the store answers (AWS_ENDPOINT_URL).")
