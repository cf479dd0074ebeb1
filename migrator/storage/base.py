"""The verbs that everything above uses to keep bytes under names, for a directory and for an object store alike.

A name is relative to the job: `record` or `directory/record`, with one slash at most. A directory is only the first
half of such names: it appears with the first name in it, and a store without directories shows none that is empty.
Names that begin with a dot belong to the storage itself; nobody else uses them.

What holds for every verb:

- Each may be called by several threads of several processes on several nodes at the same time.
- A name appears with all of its bytes or not at all, whatever happens to the writer.
- What a verb that returned has written is durable: it survives a crash of every node. `change` alone promises less.
- What a verb that returned has written, changed or deleted is seen by every call that begins later, in any process.
  `list` is the verb to rely on for that: a network file system may answer `size` of one name from an old cache.
  An object store with a LIST that lags behind cannot keep this, and `check` refuses it.
- A failure is a `StorageError`, and its class says which kind: `StorageNotFoundError` (no file of ours is there),
  `StorageForeignError` (something else is there), `StorageExistsError`, `StorageFullError`, `StorageAccessError`
  (`StorageCredentialsError` if it may pass),
  `StorageReadOnlyError`, `StorageTransientError`. Nothing else leaves a verb. After a failure the verb may have acted
  all the same, so a caller for whom that matters looks.

What each verb is on a directory (`posix`) and on an object store:

    check          write, read and delete a probe             the same; LIST shows it, a second exclusive PUT is refused
    put            write aside, sync, rename or link, sync    PUT; exclusive: If-None-Match: *
    change         write into the file, no sync               PUT with If-Match, so that it brings nothing back
    get            read                                       GET
    open           one descriptor, preadv                     ranged GETs in parallel, If-Match the first answer's ETag
    upload         write aside, sync, rename, sync            multipart upload; each `write` sends its parts in parallel
    list           listdir                                    LIST with a delimiter; of the job, pending uploads too
    size, modified stat                                       HEAD
    now            the time of a new file                     the Date of an answer
    make_durable   fsync of the directory                     one LIST: whatever is listed is durable
    delete         unlink                                     DELETE
    delete_all     move the directory aside, then unlink      abort uploads below, then LIST and DELETE
    leftovers      hidden files                               pending multipart uploads

The price: no rename, no locks, no appending. What has to happen once is an exclusive `put`.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from migrator.errors import SettingsError, StorageAccessError, StorageError

SMALL = 256 << 20
"""Bytes that `get` reads at most, unless its caller names another limit."""


class Storage(ABC):
    """The names and bytes of one job."""

    root: Path | str
    """What all jobs share, for messages."""
    acts_late = False
    """A write that failed may still act when another one of the same name has succeeded."""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """A name as people find it: a path or a URL. It is for messages only."""

    def traits(self) -> dict[str, str]:
        """What a life's log should say of the storage, beside its place; `check` has been called."""
        return {}

    def weaknesses(self) -> builtins.list[str]:
        """What a life's log should warn of, each with what to do; `check` has been called."""
        return []

    @abstractmethod
    def check(self) -> None:
        """Make the place for the job if it is missing, and show that everything a save needs works there.

        Exclusive writing, reading and deleting are tried, and nothing of that is left behind. A `StorageError` says
        what does not work. Several processes may check at the same time; one that dies in between leaves a leftover.
        """

    @abstractmethod
    def put(self, name: str, data: bytes, *, exclusive: bool, check: Callable[[], None] = lambda: None) -> None:
        """Give a name to a small file.

        `exclusive`: if the name is taken, `StorageExistsError` is raised and the bytes under it stay. Of several
        writers of one exclusive name at most one succeeds, whatever another process does meanwhile. Otherwise the
        bytes replace what is there, and the last writer wins.

        `check` is called when the bytes are safe and have no name yet. If it raises, no name is given and its error is
        raised. If `delete_all` is called on the directory after `check` has looked, the bytes are deleted too: `put`
        fails, and the name does not stay. So an object store calls `check` once more after the PUT, and deletes the
        name if it raises. If the store fails while it looks, the name stays, and the error says that it may pass.
        """

    @abstractmethod
    def change(self, name: str, data: bytes) -> None:
        """Change a small file that is there, to as many bytes, without making that durable.

        For a sign of life, which has to be quick on a busy volume. A reader may see the old bytes or the new ones.
        `StorageNotFoundError` if the name is gone: it never comes back by this.
        """

    @abstractmethod
    def get(self, name: str, *, limit: int = SMALL) -> bytes:
        """The bytes of a small file.

        `StorageNotFoundError` if there is none, `StorageForeignError` if it has more than `limit` bytes.
        """

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[Reader]:
        """A large file, to read ranges of it. `StorageNotFoundError` if there is none, here or at the first range."""

    @abstractmethod
    def upload(self, name: str, *, size: int = 0) -> Upload:
        """A large file, written piece by piece. Its name appears when it is finished; the last one to finish wins.

        `size` is how many bytes will come, if that is known. More or fewer are fine.
        """

    @abstractmethod
    def list(self, directory: str = "") -> list[str]:
        """The names in a directory, sorted, without what lies deeper; empty if there is no such directory.

        Of the job itself (`""`) these are files and directories, also directories in which something is only being
        uploaded: what a dead writer left there is found by that. Names that begin with a dot are left out.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The number of bytes of a file; None if there is no file of this name."""

    @abstractmethod
    def modified(self, name: str) -> float | None:
        """When a file was last written or changed, in seconds by the storage's clock; None if there is none.

        The clock may be as coarse as a second: equal times do not tell what came first.
        """

    @abstractmethod
    def now(self) -> float:
        """The storage's clock, which gives the times of `modified`. It may differ from this node's."""

    def expect(self, size: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Uploads of about so many bytes will come: prepare now what the first one would otherwise wait for."""

    def hurry(self) -> None:  # noqa: B027 - a volume has no timeouts of ours
        """The pod must leave: from now on give up a request that hangs early enough to make it again."""

    def read_with_others(self) -> None:  # noqa: B027 - only a node's memory can be shared
        """Other processes read the same files at the same time, perhaps on this node."""

    @abstractmethod
    def make_durable(self, directory: str = "") -> None:
        """From now on a crash changes nothing of what `list(directory)` shows, whichever process wrote or deleted it.

        For names of other writers, which may have died between giving a name and making it durable. And for names that
        have to be gone for good before others are deleted. The directory's own name is one of `list()`, so a caller
        that relies on what lies in it calls this for both. `StorageNotFoundError` if there is no such directory.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; it is fine if there is none. `make_durable` makes the removal durable."""

    @abstractmethod
    def delete_all(self, name: str) -> None:
        """Remove all names in a directory, also what is still being uploaded there, or a leftover, or a single file.

        It is fine if there is none. An upload below it can no longer be finished. A crash may leave a part of the
        names on storage that has no directories; so what makes the others valid is deleted before, by `delete`.
        """

    @abstractmethod
    def leftovers(self, directory: str = "") -> builtins.list[str]:
        """Names of what is being written in a directory and has no name of its own yet, sorted.

        A writer that died leaves it for ever, so retention sweeps what is old. The names are the storage's own. They
        are good for `modified` and `delete_all`, and for nothing else.
        """


class Reader(ABC):
    """A file of which ranges are read. Several threads may read at the same time."""

    threads = 2
    """So many are best: one alone does not keep a disk or a network busy."""
    piece = 64 << 20
    """Bytes that a call of `read` is best given."""

    @abstractmethod
    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers one after another with what lies from `offset` on, in calls as large as possible.

        `StorageForeignError` if the file ends before they are full.
        """


class Upload(ABC):
    """A large file on its way. Left without `finish`, it leaves nothing behind.

    One thread writes it.
    """

    bytes: int
    """How many were written so far."""
    takes_later = False
    """What is written with `hold` may be taken until `finish` has returned."""

    @abstractmethod
    def write(self, buffers: Sequence[memoryview], *, hold: bool = False) -> None:
        """Append the buffers, without a copy where that is possible.

        Their bytes are taken before this returns. `hold`: they may be taken later, because the caller leaves them as
        they are until `finish` or `close` has returned. On the way to a store that saves a copy.
        """

    @abstractmethod
    def finish(self) -> None:
        """Make the bytes durable, then give them their name for good, replacing what has it.

        A `StorageError` if the upload was deleted meanwhile, by `delete_all`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what is not finished. May be called twice, and after `finish`."""

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def probe(storage: Storage, name: str) -> None:
    """Write a file of this name exclusively, read and delete it; `StorageError` if other bytes come back."""
    storage.put(name, b"probe", exclusive=True)
    try:
        found = storage.get(name, limit=64)
    finally:
        storage.delete(name)
    if found != b"probe":
        raise StorageError(f"{storage.where()} gave back other bytes than were written there")


def check_job(job: str) -> None:
    """`SettingsError` unless a job of this name has its files below the root, and no other job's."""
    if not job or job.startswith((".", "/")) or ".." in job.split("/") or "\0" in job:
        raise SettingsError(f"the job name {job!r} cannot name a directory; set another (MIGRATOR_JOB)")


def check_name(name: str, where: object) -> None:
    """`StorageAccessError` if a name is none of this interface: whatever a manifest says, nothing else is touched."""
    if name.startswith("/") or ".." in name.split("/") or name.count("/") > 1 or "\0" in name:
        raise StorageAccessError(f"{name!r} is not a name inside {where}; expected `name` or `directory/name`")
