"""What a client of an object store can do: single requests, each with an error of ours if it fails.

`object_storage.py` keeps the promises of `base.py` with these requests. A client makes no
promises of its own: a request that failed may have acted all the same, and one that was given
up may act later.

No credential and no signed URL leaves a client: `scrubbed` cleans every text that comes from
a library.
"""

from __future__ import annotations

import builtins
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from migrator.errors import StorageError
from migrator.storage.base import Upload

_SECRETS = re.compile(
    r"(?ix)"
    # S3, and signed URLs of all
    r"(X-(?:Amz|Goog)-[A-Za-z-]+[=:]\s*|<Token-[0-9]+>|WebIdentityToken[\"'>:=\s]+|AWSAccessKeyId=|Signature=|Credential=|SessionToken[\"'>:=\s]+"
    r"|AccessKeyId[\"'>:=\s]+|SecretAccessKey[\"'>:=\s]+"
    # headers; the value has the scheme in front of it
    r"|Authorization[\"']?[:=\s]*[\"']?(?:(?:Bearer|Basic|SharedKey(?:Lite)?|AWS4-HMAC-SHA256)\s+)?|Bearer\s+"
    # Azure
    r"|\bsig=|AccountKey=|SharedAccess(?:Signature|Key)=|sas_?token[\"'>:=\s]+|account_?key[\"'>:=\s]+"
    # OAuth, as in forms and in JSON
    r"|(?:access|refresh|id)_token[\"':=\s]+|client_(?:secret|assertion)[\"':=\s]+|private_key(?:_id)?[\"':=\s]+"
    # a user in a URL
    r"|://(?=[^/\s@]+@))(?:-----BEGIN.*?-----END[^-]*-----|[^\s&\"'<>,@]+)"
)


@dataclass(frozen=True)
class Found:
    """What the store says of an object."""

    size: int
    modified_s: float
    etag: str | None = None
    writer: str = ""
    """Which `put` wrote it, if that was asked to say so; only `head` knows."""


@dataclass(frozen=True)
class Listing:
    """The objects and the directories below a prefix, one level deep, by their names without the prefix."""

    objects: dict[str, Found] = field(default_factory=dict)
    directories: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PendingUpload:
    """A multipart upload that was begun and neither finished nor aborted."""

    key: str
    id: str
    began_s: float


class ConditionRefusedError(StorageError):
    """The store does not know requests with a condition."""


class ObjectClient(ABC):
    """One bucket, or what a store has in its place. All methods may be called by several threads at the same time."""

    name: str
    """Which library makes the requests, for the log."""
    where: str
    """The bucket as a URL without credentials, ending with a slash."""

    @abstractmethod
    def put(self, key: str, data: bytes, *, absent: bool = False, etag: str | None = None, writer: str = "") -> None:
        """Write a small object.

        `absent`: only if there is none; else `StorageExistsError`. `etag`: only if the object has this one; else
        `StorageExistsError` as well. A store that refuses such conditions raises `ConditionRefusedError`; one that
        ignores them writes. `writer` is kept beside the object: libraries repeat a request whose answer was lost, and
        then the caller finds out by it who wrote the object that is there.
        """

    @abstractmethod
    def get(self, key: str, *, limit: int) -> bytes:
        """The first `limit` bytes of an object."""

    @abstractmethod
    def read(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
        """Fill a buffer with what lies from `offset` on; returns how many bytes there were.

        `StorageForeignError` if the object has another etag.
        """

    @abstractmethod
    def head(self, key: str) -> Found | None:
        """What the store says of an object; None if there is none."""

    @abstractmethod
    def list(self, prefix: str) -> Listing:
        """What lies below a prefix that ends with a slash."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object; it is fine if there is none."""

    @abstractmethod
    def upload(self, key: str, *, size: int = 0) -> Upload:
        """A large object, written piece by piece; `size` as in `Storage.upload`."""

    @abstractmethod
    def uploads(self, prefix: str) -> builtins.list[PendingUpload]:
        """The pending uploads of keys that begin with this prefix, at any depth."""

    @abstractmethod
    def abort(self, pending: PendingUpload) -> None:
        """Abort an upload; it is fine if it is over. It can no longer be finished."""

    @abstractmethod
    def hurry(self, is_on: bool = True) -> None:
        """From now on give up a silent connection early, and try less often; `is_on=False`: no longer."""

    def rest(self) -> None:  # noqa: B027 - most have no connections of their own
        """An object has been read: connections that were kept for more of it may end."""

    @abstractmethod
    def now(self) -> float:
        """The store's clock."""


class PartedUpload(Upload):
    """An upload that is sent in parts of one size, but for the last. Each is in memory once more."""

    takes_later = True

    def __init__(self, where: str, part_size: int) -> None:
        self.where = where
        self.bytes = 0
        self._part_size = part_size
        self._rest: builtins.list[builtins.bytes | memoryview] = []
        self._filled = 0

    @abstractmethod
    def send(self, part: builtins.bytes) -> None:
        """Send the next part, or have a thread send it. Waits while too many are under way."""

    def write(self, buffers: Sequence[memoryview], *, hold: bool = False) -> None:
        for buffer in buffers:
            self.bytes += len(buffer)
            at = 0
            while at < len(buffer):
                piece = buffer[at : at + self._part_size - self._filled]
                self._rest.append(piece if hold else builtins.bytes(piece))
                self._filled += len(piece)
                at += len(piece)
                if self._filled == self._part_size:
                    self.send_rest()

    def send_rest(self) -> None:
        """What does not fill a part, as the last one."""
        part, self._rest, self._filled = b"".join(self._rest), [], 0
        self.send(part)

    @property
    def has_rest(self) -> bool:
        return bool(self._filled)


def scrubbed(text: object) -> str:
    """A text of a library on one line, without credentials and signatures."""
    return _SECRETS.sub(r"\1***", " ".join(str(text).split()))[:600]
