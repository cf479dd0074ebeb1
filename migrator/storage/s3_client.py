"""S3 by s3fs: every request that the interface needs. What its errors mean is in `s3_errors.py`.

s3fs finds endpoint, region and credentials as the AWS tools do. Its calls run on one thread
with an event loop, so several of ours may wait for it at the same time. A multipart upload
sends its parts by a few threads; each part is copied once, because s3fs takes no memoryview.

The price: about half a gigabyte a second, and 1 to 2 s of CPU for each gigabyte. `obstore`
is several times faster (`obstore_client.py`).
"""

from __future__ import annotations

import base64
import builtins
import email.utils
import hashlib
import os
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from migrator.errors import (
    SettingsError,
    StorageAccessError,
    StorageCredentialsError,
    StorageError,
    StorageForeignError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage.base import Upload
from migrator.storage.object_client import (
    Found,
    Listing,
    ObjectClient,
    PartedUpload,
    PendingUpload,
    scrubbed,
)
from migrator.storage.plain_http import PlainHttp, plain_http
from migrator.storage.s3_errors import EXISTS, as_storage_error, code_of

PART = 16 << 20
"""Bytes of one part of a large object. Those of smaller ones are smaller: `pace`."""
_PART_MIN, _PARTS = 5 << 20, 9_000
"""S3 takes 10,000 parts of 5 MiB to 5 GiB; R2 wants all but the last of one size."""
SENDERS = 4
"""Parts that are sent at the same time, at most. Each is in memory once more."""
_AT_ONCE = 1 / 4
"""Not more than this part of an object is under way at the same time. So on a link that is just fast enough for it each
request is over well before the time for the whole object is."""
TRIES = 6
"""How often a request is made at most, by the library."""
HURRIED_TRIES = 3
"""The same in a pod that must leave: a save that failed is tried again as a whole until the deadline."""
CONNECT_S, READ_S = 3.0, 20.0
"""Seconds that a connection, and a silence on it, may take before the request is given up and made again."""
_OF_GRACE, _UPLOAD_OF_GRACE = 1 / 6, 5 / 12
"""In a pod that must leave, the same for a silence, as a part of the grace: time is left to make the request again. A
part that is sent may take longer: what the system has taken from us may still be on its way."""

_WRITER = "migrator-writer"
"""Under this name an object keeps which `put` wrote it."""

_RENEWED_S = 0.5
"""Seconds before new credentials are looked for again: many requests may fail of the old ones together."""


@dataclass(frozen=True)
class Patience:
    """When a request is given up and made again, and how often.

    The libraries make it again, also where the store answers 503 (SlowDown) or 500: botocore in its mode "standard",
    obstore by its `retry_config`. An error that is left then is a `StorageTransientError`.
    """

    silence_s: float
    tries: int


class S3Client(ObjectClient):
    """One bucket."""

    name = "s3fs"

    def __init__(self, bucket: str, *, grace_s: float = 30.0) -> None:
        self.bucket = bucket
        self.where = f"s3://{bucket}/"
        self.endpoint, self.region = configured()
        self.is_hurried = False
        self.is_careful = False
        """An upload failed for a reason that may be a slow link: the next one sends one small part at a time."""
        self.calm = Patience(READ_S, TRIES)
        self.hurried = Patience(min(READ_S, max(1.0, grace_s * _OF_GRACE)), HURRIED_TRIES)
        self.hurried_upload = Patience(min(READ_S, max(1.0, grace_s * _UPLOAD_OF_GRACE)), HURRIED_TRIES)

        self._renewing = threading.Lock()
        self._renewed_s = 0.0
        # Made now: in the last seconds of a pod there is no time for it.
        self.connect()

    def connect(self) -> None:
        """Make what makes the requests, with the credentials that are found now."""
        import s3fs

        def made(patience: Patience) -> Any:
            found = s3fs.S3FileSystem(
                endpoint_url=self.endpoint,
                client_kwargs={"region_name": self.region},
                config_kwargs={
                    "connect_timeout": CONNECT_S,
                    "read_timeout": patience.silence_s,
                    "retries": {"mode": "standard", "total_max_attempts": patience.tries},
                    "max_pool_connections": 32,
                    # Every block has a digest of ours, so bodies need no SHA-256 of botocore's.
                    "s3": {"payload_signing_enabled": False},
                    # Not every store knows the checksums that newer libraries add.
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
                skip_instance_cache=True,
                use_listings_cache=False,
            )
            found.retries = 1  # botocore repeats, within the limits above
            return found

        self.__dict__.pop("_plain", None)
        calm = made(self.calm)
        self._filesystems = {False: calm, True: made(self.hurried)}
        self._sending = {False: calm, True: made(self.hurried_upload)}

    def renew(self, error: StorageError) -> StorageError:
        """Returns the error. After one of credentials the next request looks for new ones: libraries keep theirs."""
        if isinstance(error, StorageCredentialsError):
            with self._renewing:
                if time.monotonic() - self._renewed_s > _RENEWED_S:
                    self.connect()
                    self._renewed_s = time.monotonic()
        return error

    def hurry(self, is_on: bool = True) -> None:
        self.is_hurried = is_on

    @property
    def patience_s(self) -> float:
        """How long a part may be on its way."""
        return (self.hurried_upload if self.is_hurried else self.calm).silence_s

    def call(self, doing: str, method: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
        """One request; its answer, or an error of ours."""
        of = {} if key is None else {"Key": key}
        filesystems = self._sending if method == "upload_part" else self._filesystems
        try:
            found: dict[str, Any] = filesystems[self.is_hurried].call_s3(method, Bucket=self.bucket, **of, **fields)
        except Exception as error:  # s3fs, botocore and aiohttp raise many kinds
            doing = f"{doing} {self.where}{key or fields.get('Prefix', '')}"
            raise self.renew(as_storage_error(error, doing, method)) from None
        return found

    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str | None = None, writer: str = "") -> None:
        conditions: dict[str, Any] = {"IfNoneMatch": "*"} if absent else {}
        conditions |= {"IfMatch": etag} if etag is not None else {}
        said = {"Metadata": {_WRITER: writer}} if writer else {}
        # By this the store notices a body that was cut. Some would keep an empty object.
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode("ascii")
        self.call("write", "put_object", key, Body=data, ContentMD5=digest, **conditions, **said)

    def get(self, key: str, *, limit: int) -> bytes:
        return self._range(key, 0, limit, None)

    def read(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        plain = self._plain
        if plain is not None and plain.fill(key, buffer, offset, etag=etag):
            return len(buffer)
        return self.read_by_library(key, buffer, offset, etag=etag)

    @cached_property
    def _plain(self) -> PlainHttp | None:
        return plain_http(self.endpoint, self.region, self.bucket, self.calm.silence_s)

    def rest(self) -> None:
        if self._plain is not None:
            self._plain.close()

    def read_by_library(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        """As `read`."""
        data = self._range(key, offset, len(buffer), etag)
        buffer[: len(data)] = data
        return len(data)

    def _range(self, key: str, offset: int, size: int, etag: str | None) -> bytes:
        fields: dict[str, Any] = {} if etag is None else {"IfMatch": etag}

        fs = self._filesystems[self.is_hurried]

        async def fetch() -> tuple[bytes, bool]:
            answer = await fs._call_s3(
                "get_object", Bucket=self.bucket, Key=key, Range=f"bytes={offset}-{offset + size - 1}", **fields
            )
            async with answer["Body"] as body:
                data: bytes = await body.read()
            expected = answer.get("ContentLength")
            if expected is not None and len(data) < expected:
                raise ConnectionError(f"{len(data)} of {expected} bytes came")
            return data, "ContentRange" in answer

        import fsspec.asyn

        try:
            found: tuple[bytes, bool] = fsspec.asyn.sync(fs.loop, fetch)
        except Exception as error:
            if code_of(error) in ("InvalidRange", "416"):
                return b""
            if etag is not None and code_of(error) in EXISTS:
                raise StorageForeignError(f"{self.where}{key} was replaced while it was read") from None
            raise self.renew(as_storage_error(error, f"read {self.where}{key}", "get_object")) from None
        # Some stores answer a ranged request with the whole object.
        data, is_range = found
        return data[:size] if is_range else data[offset : offset + size]

    def head(self, key: str) -> Found | None:
        try:
            answer = self._look("head_object", key)
        except StorageNotFoundError:
            return None
        return Found(answer["ContentLength"], answer["LastModified"].timestamp(), answer.get("ETag"), _writer(answer))

    def _look(self, method: str, key: str | None = None) -> dict[str, Any]:
        """A HEAD. Its refusal does not say why, so a request that is answered with a text is made behind it."""
        try:
            return self.call("look at", method, key)
        except StorageAccessError as refused:
            try:
                self.call("list", "list_objects_v2", Prefix=key or "", MaxKeys=1)
            except StorageAccessError as error:
                raise error from None
            except StorageError:
                raise refused from None
            raise

    def list(self, prefix: str) -> Listing:
        objects: dict[str, Found] = {}
        directories: set[str] = set()
        token: dict[str, Any] = {}
        while True:
            answer = self.call("list", "list_objects_v2", Prefix=prefix, Delimiter="/", **token)
            for one in answer.get("Contents", ()):
                name = one["Key"].removeprefix(prefix)
                if name:
                    objects[name] = Found(one["Size"], one["LastModified"].timestamp(), one.get("ETag"))
            directories |= {one["Prefix"].removeprefix(prefix).rstrip("/") for one in answer.get("CommonPrefixes", ())}
            if not answer.get("IsTruncated"):
                return Listing(objects, frozenset(directories))
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        try:
            self.call("delete", "delete_object", key)
        except StorageNotFoundError:
            return

    def upload(self, key: str, *, size: int = 0) -> Upload:
        return S3Upload(self, key, size)

    def uploads(self, prefix: str) -> builtins.list[PendingUpload]:
        found: builtins.list[PendingUpload] = []
        markers: dict[str, Any] = {}
        while True:
            try:
                answer = self.call("list the uploads below", "list_multipart_uploads", Prefix=prefix, **markers)
            except StorageNotFoundError:
                return found  # so `rclone serve s3` says that there has been none since it was started
            found += [
                PendingUpload(one["Key"], one["UploadId"], one["Initiated"].timestamp())
                for one in answer.get("Uploads", ())
                if one["Key"].startswith(prefix)
            ]
            if not answer.get("IsTruncated"):
                return found
            # SeaweedFS says one of the two only, and takes no more than it said.
            said = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker")}
            markers = {name: value for name, value in said.items() if value}
            if not markers:
                return found

    def abort(self, pending: PendingUpload) -> None:
        try:
            self.call("abort the upload of", "abort_multipart_upload", pending.key, UploadId=pending.id)
        except StorageNotFoundError:
            return

    def now(self) -> float:
        answer = self._look("head_bucket")
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise StorageError(f"{self.where} does not say what time it is: an answer has no Date")
        return email.utils.parsedate_to_datetime(date).timestamp()


def configured() -> tuple[str | None, str]:
    """The URL of the store, None for Amazon's, and its region: found as the AWS tools find them."""
    import botocore.exceptions
    import botocore.session

    session = botocore.session.get_session()
    try:
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        return _endpoint(session), region
    except botocore.exceptions.BotoCoreError as error:
        raise SettingsError(
            f"S3 cannot be used: {scrubbed(error)}. See AWS_PROFILE, AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE."
        ) from None


def _endpoint(session: Any) -> str | None:
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    found = (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or services.get("s3", {}).get("endpoint_url")
        or profile.get("endpoint_url")
    )
    return str(found) if found else None


def pace(size: int, senders: int, *, is_careful: bool) -> tuple[int, int]:
    """Bytes of each part, and how many parts are sent at the same time, for an object of so many bytes."""
    least = -(-size // _PARTS)
    if is_careful:
        return max(_PART_MIN, least), 1
    most = senders * PART
    at_once = max(_PART_MIN, min(most, int(size * _AT_ONCE))) if size else most
    part = max(_PART_MIN, min(PART, at_once // senders), least)
    return part, max(1, min(senders, at_once // part))


class S3Upload(PartedUpload):
    """A multipart upload: a few threads send parts while more bytes come. s3fs takes bytes only."""

    def __init__(self, client: S3Client, key: str, size: int) -> None:
        part_size, senders = pace(size, SENDERS, is_careful=client.is_careful)
        super().__init__(f"{client.where}{key}", part_size)
        self._client = client
        self._key = key
        self._parts: builtins.list[Future[dict[str, Any]]] = []
        self._room = threading.Semaphore(senders)
        self._is_over = False
        self._id = str(client.call("begin the upload of", "create_multipart_upload", key)["UploadId"])

    def send(self, part: bytes) -> None:
        self._room.acquire()
        for sent in self._parts:
            if sent.done():
                sent.result()
        self._parts.append(self._sent(len(self._parts) + 1, part))

    def _sent(self, number: int, data: builtins.bytes) -> Future[dict[str, Any]]:
        sent: Future[dict[str, Any]] = Future()

        def run() -> None:
            try:
                sent.set_result(self._put(number, data))
            except BaseException as error:  # raised where the result is asked for
                sent.set_exception(error)

        # Not of an executor: the interpreter waits for its threads at its end, and a pod whose store hangs must end.
        threading.Thread(target=run, name="migrator-put", daemon=True).start()
        return sent

    def _put(self, number: int, data: builtins.bytes) -> dict[str, Any]:
        try:
            answer = self._client.call(
                "write", "upload_part", self._key, UploadId=self._id, PartNumber=number, Body=data
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}
        except StorageError as error:
            self._client.is_careful |= isinstance(error, StorageTransientError)
            raise
        finally:
            self._room.release()

    def finish(self) -> None:
        if self.has_rest or not self._parts:
            self.send_rest()
        parts = [part.result() for part in self._parts]
        try:
            self._client.call(
                "finish the upload of",
                "complete_multipart_upload",
                self._key,
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            )
        except StorageError as error:
            # It may have been finished by a request whose answer was lost, and was then repeated.
            if not (error.transient or isinstance(error, StorageNotFoundError)) or not self._is_finished():
                raise
        self._is_over = True
        self._client.is_careful = False

    def _is_finished(self) -> bool:
        """No upload is pending any more, and the object has as many bytes as were sent."""
        if any(pending.id == self._id for pending in self._client.uploads(self._key)):
            return False
        found = self._client.head(self._key)
        return found is not None and found.size == self.bytes

    def close(self) -> None:
        # Behind a notice not longer than a part may take: what hangs is aborted.
        while wait(self._parts, timeout=self._client.patience_s).not_done and not self._client.is_hurried:
            continue
        if not self._is_over:
            self._is_over = True
            try:
                self._client.abort(PendingUpload(self._key, self._id, 0.0))
            except StorageError:
                return  # the next life sweeps it


def _writer(answer: dict[str, Any]) -> str:
    said = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
    return str(said.get(_WRITER, ""))
