"""S3 at the speed of the network: large objects by obstore, all else by s3fs.

obstore is written in Rust. It sends the parts of an upload and fetches ranges in threads of its own,
without the interpreter's lock. What it does not offer (conditional deletes, pending uploads, the
store's clock) are small requests, and `S3Client` makes them. Both use the credentials that botocore
finds, and renew them alike.

An upload sends from the caller's memory where that holds still, and a read copies what comes, a
little at a time, to where it belongs.

The price: bytes that do not hold still are copied on their way. At most `PART * (SENDERS + 4)` bytes
are in memory for that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from migrator.errors import (
    StorageAccessError,
    StorageCredentialsError,
    StorageError,
    StorageForeignError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage.base import Upload
from migrator.storage.object_client import scrubbed
from migrator.storage.s3_client import CONNECT_S, PART, Patience, S3Client, pace
from migrator.storage.s3_errors import NO_CREDENTIALS, SEE, by_code, code_in, lacking

SENDERS = 6
"""Parts that are sent at the same time, at most."""
_SMALL = 256 << 10
"""Smaller buffers are joined: each one that obstore gets costs a turn of the interpreter."""
_CHUNK = 128 << 10
"""Bytes, about, that a read hands over at a time: few enough to stay in the processor's cache."""
_LOOK_S = 0.05
"""Seconds between two looks at a thread that is waited for."""
_PAUSE = timedelta(seconds=0.3)
"""Before a request is made again, at least."""
_ANSWER_S = 3600.0
"""Seconds that a range may take on its way, as long as it comes."""
_KEPT_S = 10.0
"""Seconds for which obstore keeps credentials that botocore gave it. botocore renews them before they expire."""


class ObstoreClient(S3Client):
    """One bucket."""

    name = "obstore"

    def connect(self) -> None:
        super().connect()

        def reading(patience: Patience) -> Any:
            silence, whole = timedelta(seconds=patience.silence_s), timedelta(seconds=_ANSWER_S)
            return self._store(patience, read_timeout=silence, timeout=whole)

        def uploading(patience: Patience) -> Any:
            # A request that sends is given up by its whole time: its silence cannot be seen.
            return self._store(patience, timeout=timedelta(seconds=patience.silence_s))

        self._reading = {False: reading(self.calm), True: reading(self.hurried)}
        self._uploading = {False: uploading(self.calm), True: uploading(self.hurried_upload)}

    def _store(self, patience: Patience, **timeouts: timedelta) -> Any:
        import botocore.session
        from obstore.store import S3Store

        session = botocore.session.get_session()
        endpoint = self.endpoint

        def credentials() -> Any:
            found = session.get_credentials()
            if found is None:
                raise StorageCredentialsError(f"there are no credentials for the store. {NO_CREDENTIALS}.")
            frozen = found.get_frozen_credentials()
            until = datetime.now(timezone.utc) + timedelta(seconds=_KEPT_S)
            named = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "expires_at": until}
            return {**named, **({"token": frozen.token} if frozen.token else {})}

        return S3Store(
            self.bucket,
            # Not None: obstore takes only a text. Without one it asks AWS.
            **dict[str, Any]({} if endpoint is None else {"endpoint": endpoint}),
            region=self.region,
            credential_provider=credentials,
            # TLS protects the bytes on the way, and every block has a digest of our own.
            unsigned_payload=True,
            client_options=dict[str, Any](
                allow_http=endpoint is not None and endpoint.startswith("http://"),
                connect_timeout=timedelta(seconds=CONNECT_S),
                **timeouts,
            ),  # type: ignore[arg-type]
            retry_config={
                # Without a floor, all tries may be over before a short cut is.
                "backoff": {"init_backoff": _PAUSE, "max_backoff": 10 * _PAUSE, "base": 2},
                "max_retries": patience.tries - 1,
                "retry_timeout": timedelta(seconds=patience.tries * patience.silence_s),
            },
        )

    @property
    def uploading(self) -> Any:
        """The store for the uploads that begin now."""
        return self._uploading[self.is_hurried]

    def read_by_library(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        import obstore

        options = {"range": (offset, offset + len(buffer)), **({} if etag is None else {"if_match": etag})}
        store, read = self._reading[self.is_hurried], 0
        try:
            answer = obstore.get(store, key, options=options)  # type: ignore[arg-type]
            for chunk in answer.stream(min_chunk_size=_CHUNK):
                if read + len(chunk) > len(buffer):
                    raise StorageForeignError(f"{self.where}{key}: the store sent more than {len(buffer)} bytes")
                buffer[read : read + len(chunk)] = memoryview(chunk)
                read += len(chunk)
        except Exception as error:  # obstore raises its own kinds, and those of Python
            if "non-partial" in str(error):
                # The store has answered a ranged request with the whole object.
                return super().read_by_library(key, buffer, offset, etag=etag)
            doing = f"read {self.where}{key}"
            raise self.renew(as_storage_error(error, doing, "get_object", is_conditional=etag is not None)) from None
        return read

    def upload(self, key: str, *, size: int = 0) -> Upload:
        return ObstoreUpload(self, key, size)


class ObstoreUpload(Upload):
    """A multipart upload: a thread of ours hands obstore what is written."""

    takes_later = True

    def __init__(self, client: ObstoreClient, key: str, size: int) -> None:
        self.bytes = 0
        self._client = client
        self._key = key
        self._part, self._senders = pace(size, SENDERS, is_careful=client.is_careful)
        self._rest: list[bytes | memoryview] = []
        self._filled = 0
        self._queue: queue.Queue[list[bytes | memoryview] | type[_GivenUp] | None] = queue.Queue(maxsize=2)
        self._has_begun = threading.Event()
        self._error: BaseException | None = None
        self._is_over = False
        self._is_hurried = client.is_hurried
        self._is_left = False
        """It was waited for long enough."""
        self._thread = threading.Thread(target=self._run, name="migrator-put", daemon=True)
        self._thread.start()
        # obstore asks for the first bytes when the upload is pending.
        self._has_begun.wait()
        self._check()

    def _run(self) -> None:
        import obstore

        try:
            obstore.put(
                self._client.uploading,
                self._key,
                self._pieces(),
                use_multipart=True,
                chunk_size=self._part,
                max_concurrency=self._senders,
            )
        except BaseException as error:  # an upload that was given up raises what `_pieces` raised
            self._error = error
        finally:
            self._has_begun.set()
            self._is_over = True

    def _pieces(self) -> Iterator[bytes | memoryview]:
        self._has_begun.set()
        while (pieces := self._queue.get()) is not None:
            if not isinstance(pieces, list):
                raise pieces  # obstore aborts the upload then
            yield from pieces

    def write(self, buffers: Sequence[memoryview], *, hold: bool = False) -> None:
        for piece in _cut(buffers, hold=hold):
            self.bytes += len(piece)
            self._rest.append(piece)
            self._filled += len(piece)
            if self._filled >= PART:
                pieces, self._rest, self._filled = self._rest, [], 0
                self._hand(pieces)

    def _hand(self, pieces: list[bytes | memoryview] | type[_GivenUp] | None) -> None:
        """Give the thread something to send, or to end with. Waits while there is too much."""

        def is_handed() -> bool:
            with suppress(queue.Full):
                self._queue.put(pieces, timeout=_LOOK_S)
                return True
            return self._is_over

        self._wait(is_handed)
        if self._is_over:
            self._check()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Of an upload that began before the notice, behind it not longer than a part may take.

        Its requests have the patience of the time before. Those of an upload that begins behind it are given up early
        themselves, and all together may take as long as the link needs.
        """
        hurried_s: float | None = None
        while not is_done():
            if self._is_hurried or not self._client.is_hurried:
                continue
            hurried_s = hurried_s or time.monotonic()
            if time.monotonic() - hurried_s > self._client.patience_s:
                self._is_left = True
                raise StorageTransientError(
                    f"cannot write {self._client.where}{self._key}: no part of it arrived within "
                    f"{self._client.patience_s:g} s, and the pod must leave"
                )

    def finish(self) -> None:
        self._hand(self._rest)
        self._hand(None)
        self._wait(self._is_joined)
        try:
            self._check()
        except StorageError as error:
            # It may have been finished by a request whose answer was lost, and was then repeated.
            if not (error.transient or isinstance(error, StorageNotFoundError)) or not self._is_finished():
                raise
        self._client.is_careful = False

    def _is_joined(self) -> bool:
        self._thread.join(_LOOK_S)
        return not self._thread.is_alive()

    def _is_finished(self) -> bool:
        if any(pending.key == self._key for pending in self._client.uploads(self._key)):
            return False
        found = self._client.head(self._key)
        return found is not None and found.size == self.bytes

    def close(self) -> None:
        # What failed before says more than this does.
        with suppress(StorageError):
            if self._thread.is_alive() and not self._is_left:
                self._hand(_GivenUp)
                self._wait(self._is_joined)
        if self._is_left and self._thread.is_alive():
            # The thread hangs, and ends with the process. Without its upload it can do nothing.
            with suppress(StorageError):
                for pending in self._client.uploads(self._key):
                    if pending.key == self._key:
                        self._client.abort(pending)

    def _check(self) -> None:
        if self._error is not None:
            error = self._client.renew(
                as_storage_error(self._error, f"write {self._client.where}{self._key}", "upload_part")
            )
            self._client.is_careful |= isinstance(error, StorageTransientError)
            raise error from None


def _cut(buffers: Sequence[memoryview], *, hold: bool) -> Iterator[bytes | memoryview]:
    """Pieces of at most `PART` bytes, copied unless their memory holds still; small buffers are joined."""
    small: list[memoryview] = []
    filled = 0
    for buffer in filter(len, buffers):
        if len(buffer) < _SMALL:
            small.append(buffer)
            filled += len(buffer)
            if filled < _SMALL:
                continue
        if filled:
            yield b"".join(small)
            small, filled = [], 0
        if len(buffer) >= _SMALL:
            for at in range(0, len(buffer), PART):
                piece = buffer[at : at + PART]
                yield piece if hold else bytes(piece)
    if filled:
        yield b"".join(small)


class _GivenUp(Exception):  # noqa: N818 - never seen by a user
    """The upload is not wanted any more."""


def as_storage_error(error: BaseException, doing: str, method: str, *, is_conditional: bool = False) -> StorageError:
    """What obstore raised, as an error of ours."""
    from obstore import exceptions

    if isinstance(error, StorageError):
        return error
    text = f"cannot {doing}: {scrubbed(error)}"
    if isinstance(error, exceptions.PreconditionError) and is_conditional:
        return StorageForeignError(f"{text}. It was replaced while it was read.")
    # The code first. obstore's kinds do not say it: expired credentials, for example, are a bad request.
    known = by_code(code_in(error), text, method)
    if known is not None:
        return known
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return StorageNotFoundError(text)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError):
        return StorageAccessError(f"{text}. {lacking(method)}.")
    return StorageTransientError(f"{text}. {SEE}")
