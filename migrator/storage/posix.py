"""A job's directory on a volume, and what "durable" and "exclusive" mean there.

A file is durable when its bytes were synced *and then* the directory that holds
its name. A name appears all at once because the bytes are written aside first,
in the same directory. What must exist at most once (a generation, a commit)
gets its name by link(), which unlike rename() never takes a name that is taken.

A sync that failed is never repeated on the same file: the kernel may have thrown
the pages away and would report success. The attempt fails and starts anew.

A directory is deleted by moving it aside in one piece. So nobody finds half of it,
and whoever still writes there fails.

The price: a process killed in between leaves a hidden file aside, never a half one
in place. Retention sweeps it.
"""

from __future__ import annotations

import builtins
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from migrator.errors import (
    StorageAccessError,
    StorageError,
    StorageExistsError,
    StorageForeignError,
    StorageFullError,
    StorageNotFoundError,
    StorageReadOnlyError,
    StorageTransientError,
)
from migrator.storage import posix_calls as calls
from migrator.storage.base import SMALL, Reader, Storage, Upload, check_job, check_name, probe
from migrator.storage.direct_io import BUFFER, DirectReader, cached_share, touch_memory
from migrator.storage.page_cache import Bypass, Way, find_bypass, goes_direct, large_file

DIRECT_THREADS = 4
"""Threads that read around the page cache: some copy and verify, while others wait for the disk."""
_MOSTLY = 0.8
"""If more than this share of a file lies in the page cache, it is read from there: at twice the speed or more."""
_READ_MAX = 16 << 20
"""Bytes that one call reads of a small file, so that its limit and not its size takes memory."""

_KINDS: dict[int, type[StorageError]] = {
    errno.ENOENT: StorageNotFoundError,
    errno.EISDIR: StorageForeignError,
    errno.ENOTDIR: StorageForeignError,
    errno.ELOOP: StorageForeignError,
    errno.ENXIO: StorageForeignError,
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EFBIG: StorageFullError,
    errno.EACCES: StorageAccessError,
    errno.EPERM: StorageAccessError,
    errno.EROFS: StorageReadOnlyError,
    # Not StorageExistsError: that says that an exclusive name is taken. This is about a file that should be new.
    errno.EEXIST: StorageError,
    errno.ENAMETOOLONG: StorageError,
}
"""The class of a failed call, by its errno. All others may go away by themselves."""

_NO_RIGHT = (
    "Give the job's user the right to write there (in a pod: securityContext.fsGroup), or name another root "
    "(MIGRATOR_CKPT)"
)
_WHAT_TO_DO = {
    errno.ENOSPC: "Make room on the volume, or keep fewer ckpts (MIGRATOR_KEEP)",
    errno.EDQUOT: "Raise the quota, or keep fewer ckpts (MIGRATOR_KEEP)",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: "Mount the volume writable, or name another root (MIGRATOR_CKPT)",
    errno.ENOTDIR: "A part of the path is a file; name a directory (MIGRATOR_CKPT)",
    errno.EISDIR: "Something else lies where a file of a ckpt belongs; move it away",
    errno.ENAMETOOLONG: "Choose a shorter root (MIGRATOR_CKPT) or job name (MIGRATOR_JOB)",
    errno.ENOENT: "It should be there; see whether somebody cleans up the volume, or name another root (MIGRATOR_CKPT)",
    errno.EEXIST: "Something lies where a new file belongs; move it away",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or name another root (MIGRATOR_CKPT)",
    errno.EIO: "See the node's kernel log; the volume or the way to it is failing",
    errno.ESTALE: "The server forgot the file; see whether the volume was mounted anew",
}


class PosixStorage(Storage):
    """The directory `<root>/<job>`; all names are relative to it."""

    root: Path

    def __init__(self, root: Path, job: str) -> None:
        check_job(job)
        self.root = Path(root).absolute()
        self.directory = self.root / job
        self._place = str(self.directory)
        self._bypass = Bypass(Way.DONTCACHE)
        self._reads_alone = True

    def __repr__(self) -> str:
        return f"PosixStorage({str(self.directory)!r})"

    def where(self, name: str = "") -> str:
        return str(self.directory / name)

    def check(self) -> None:
        self.make_directory("")
        self._sync_above()
        probe(self, calls.aside(Path("probe")).name)
        self._bypass = self._found_bypass()

    def traits(self) -> dict[str, str]:
        return {"writes": str(self._bypass)}

    def _found_bypass(self) -> Bypass:
        aside = calls.aside(self.directory / "probe")
        with as_storage_error("write", aside):
            fd = calls.create(aside)
            try:
                return find_bypass(fd)
            finally:
                os.close(fd)
                calls.unlink(aside)

    def put(self, name: str, data: bytes, *, exclusive: bool, check: Callable[[], None] = lambda: None) -> None:
        target = self._path(name)
        self._make(target.parent)
        aside = calls.aside(target)
        try:
            with as_storage_error("write", target, needed=len(data)):
                calls.write_synced(aside, data)
            check()
            if exclusive:
                self._commit(aside, target)
            else:
                with as_storage_error("replace", target):
                    calls.rename(aside, target)
        finally:
            with suppress(OSError):
                os.unlink(aside)
        # The name lives in the directory; without this a node crash can undo it.
        self._sync(target.parent)

    @staticmethod
    def _commit(aside: Path, target: Path) -> None:
        try:
            with as_storage_error("commit", target, passing=FileExistsError):
                calls.link(aside, target)
        except FileExistsError as error:
            raise StorageExistsError(f"{target} is there already, written by another process") from error

    def change(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with as_storage_error("write", path):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                calls.write_all(fd, [memoryview(data)], 0)
            finally:
                os.close(fd)

    def get(self, name: str, *, limit: int = SMALL) -> bytes:
        path = self._path(name)
        pieces, room = [], limit + 1
        with self._descriptor(path) as fd:
            while room > 0 and (piece := os.read(fd, min(room, _READ_MAX))):
                pieces.append(piece)
                room -= len(piece)
        if room <= 0:
            raise StorageForeignError(f"{path} is larger than {limit} bytes; none of ours is", errno=errno.EFBIG)
        return b"".join(pieces)

    @contextmanager
    def open(self, name: str) -> Iterator[PosixReader]:
        path = self._path(name)
        with self._descriptor(path) as fd, closing(PosixReader(path, fd)) as reader:
            if self._reads_alone and goes_direct(self._bypass, os.fstat(fd).st_size):
                reader.go_direct()
            yield reader

    @contextmanager
    def _descriptor(self, path: Path) -> Iterator[int]:
        with as_storage_error("read", path):
            # Without waiting: a pipe that nobody writes to would hold us for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise IsADirectoryError(errno.EISDIR, "it is no regular file", str(path))
                yield fd
            finally:
                os.close(fd)

    def read_with_others(self) -> None:
        # Then one read by the page cache serves all of them.
        self._reads_alone = False

    def upload(self, name: str, *, size: int = 0) -> PosixUpload:
        target = self._path(name)
        self._make(target.parent.parent)
        with as_storage_error("make the directory", target.parent):
            calls.make_directory(target.parent)
        return PosixUpload(target, self._bypass, self._sync, size)

    def expect(self, size: int) -> None:
        if goes_direct(self._bypass, size):
            touch_memory()

    def list(self, directory: str = "") -> builtins.list[str]:
        return [name for name in self._names(directory) if not name.startswith(calls.HIDDEN)]

    def leftovers(self, directory: str = "") -> builtins.list[str]:
        found = [name for name in self._names(directory) if calls.LEFTOVER.fullmatch(name)]
        return [f"{directory}/{name}" if directory else name for name in found]

    def _names(self, directory: str) -> builtins.list[str]:
        path = self._path(directory)
        try:
            with as_storage_error("list", path, passing=(FileNotFoundError, NotADirectoryError)):
                return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        found = self._stat(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def modified(self, name: str) -> float | None:
        found = self._stat(name)
        return None if found is None else found.st_mtime

    def now(self) -> float:
        self.make_directory("")
        aside = calls.aside(self.directory / "clock")
        with as_storage_error("write", aside):
            try:
                calls.write_synced(aside, b"")
                return os.stat(aside).st_mtime
            finally:
                calls.unlink(aside)

    def make_durable(self, directory: str = "") -> None:
        self._sync(self._path(directory))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with as_storage_error("delete", path):
            calls.unlink(path)
            if calls.is_there(path):
                raise OSError(errno.EIO, "it was reported as deleted and is still there")

    def delete_all(self, name: str) -> None:
        path = self._path(name)
        with as_storage_error("delete", path), suppress(FileNotFoundError):
            if not calls.is_directory(path):
                os.unlink(path)
                return
            if not path.name.startswith(calls.HIDDEN):
                aside = calls.aside(path)
                calls.rename(path, aside)
                # Else a crash could bring it back under its name with some of its files gone.
                self._sync(path.parent)
                path = aside
            for entry in sorted(os.listdir(path)):
                calls.unlink(path / entry)
            os.rmdir(path)

    def make_directory(self, name: str) -> None:
        """Make a directory and its name durable, with all above it."""
        self._make(self._path(name))

    def _path(self, name: str) -> Path:
        check_name(name, self._place)
        # As text: this comes before every call, and a path costs more than the look at it.
        for place in dict.fromkeys((name.partition("/")[0], name)) if name else ():
            if calls.is_link(f"{self._place}/{place}"):
                raise StorageForeignError(
                    f"{self._place}/{place} is a link to somewhere else; a job's ckpts lie in its own directory. "
                    "Move there what the link leads to, or remove the link. (The root itself may be a link.)",
                    errno=errno.ELOOP,
                )
        return self.directory / name

    def _stat(self, name: str) -> os.stat_result | None:
        path = self._path(name)
        try:
            with as_storage_error("look at", path, passing=(FileNotFoundError, NotADirectoryError)):
                return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _make(self, directory: Path) -> None:
        with as_storage_error("make the directory", directory):
            if calls.is_directory(directory):
                return
        if directory.parent != directory:
            self._make(directory.parent)
        with as_storage_error("make the directory", directory):
            calls.make_directory(directory)
        self._sync(directory.parent)

    def _sync_above(self) -> None:
        """Make durable where the job lies: the process that made it may have died before it synced the names."""
        place = self.directory
        while place != place.parent:
            with as_storage_error("look at", place):
                is_mounted_here = os.stat(place).st_dev != os.stat(place.parent).st_dev
            if is_mounted_here:
                return
            place = place.parent
            # What may not even be opened was there before us.
            with suppress(StorageAccessError, StorageReadOnlyError):
                self._sync(place)

    def _sync(self, directory: Path) -> None:
        with as_storage_error("sync", directory):
            calls.sync_directory(directory)


class PosixReader(Reader):
    """An open file."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._direct: DirectReader | None = None

    def go_direct(self) -> None:
        """Read around the page cache, if the file system can do so and the file is not in it."""
        with suppress(OSError, AttributeError):
            if cached_share(self._fd, os.fstat(self._fd).st_size) > _MOSTLY:
                return
            self._direct = DirectReader(calls.opened_again(self._fd, os.O_RDONLY | os.O_DIRECT))
            self.threads, self.piece = DIRECT_THREADS, BUFFER

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        direct = self._direct
        try:
            with as_storage_error("read", self._path):
                if direct is None:
                    calls.read_all(self._fd, buffers, offset)
                    return
                try:
                    direct.read(buffers, offset)
                except OSError as error:
                    if error.errno not in calls.UNKNOWN:
                        raise
                    calls.read_all(self._fd, buffers, offset)
        except EOFError as error:
            raise StorageForeignError(f"{self._path}: {error}; it has become shorter since it was written") from error

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()


class PosixUpload(Upload):
    """A file that has a hidden name until it is whole and synced."""

    def __init__(self, target: Path, bypass: Bypass, sync_directory: Callable[[Path], None], size: int = 0) -> None:
        self._target = target
        self._whole = size
        self._sync_directory = sync_directory
        self._aside = calls.aside(target)
        self._fd = -1
        self.bytes = 0
        with as_storage_error("write", target):
            self._fd = calls.create(self._aside)
        self._file = large_file(self._fd, bypass, size)

    def write(self, buffers: Sequence[memoryview], *, hold: bool = False) -> None:
        needed = max(self._whole - self.bytes, sum(map(len, buffers)))
        with as_storage_error("write", self._target, needed=needed):
            self._file.write(buffers)
        self.bytes = self._file.size

    def finish(self) -> None:
        with as_storage_error("write", self._target, needed=self._whole):
            self._file.finish()
        with as_storage_error("sync", self._target):
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                # A network file system may say only here that it could not store the bytes.
                os.close(fd)
            calls.rename(self._aside, self._target)
        self._sync_directory(self._target.parent)
        # The directory's own name, even if another process made it: that one may have died before it was durable. Here
        # it takes a tenth of a millisecond, before the sync of the file it would take several.
        self._sync_directory(self._target.parent.parent)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._file.close()
            with suppress(OSError):
                os.close(fd)
        with suppress(OSError):
            os.unlink(self._aside)


def kind_of(code: int | None) -> type[StorageError]:
    """The class for an error of this number."""
    return StorageError if code is None else _KINDS.get(code, StorageTransientError)


@contextmanager
def as_storage_error(
    doing: str,
    path: Path,
    *,
    needed: int | None = None,
    passing: type[OSError] | tuple[type[OSError], ...] = (),
) -> Iterator[None]:
    """Raise an `OSError` as a `StorageError`: what was tried, where, why it failed, what to do.

    `needed`: the bytes that were to be written. `passing`: what is raised as it is.
    """
    try:
        yield
    except passing:
        raise
    except OSError as error:
        code = error.errno
        reason = (error.strerror or os.strerror(code)) if code is not None else str(error)
        room = _room(path, needed) if code in (errno.ENOSPC, errno.EDQUOT) else ""
        todo = _WHAT_TO_DO.get(code or 0, "See whether the volume works")
        raise kind_of(code)(f"cannot {doing} {path}: {reason}{room}. {todo}.", errno=code) from error


def _room(path: Path, needed: int | None) -> str:
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return ""
    free = found.f_bavail * found.f_frsize
    return f" (needed {needed if needed is not None else 'some'} bytes, {free} are free)"
