"""A job's directory on a volume: four verbs, and what "durable" and "exclusive" mean there.

A file is durable when its bytes were synced *and then* the directory that holds
its name; a name appears all at once because the bytes are written aside first,
in the same directory. What must exist at most once (a generation, a commit)
gets its name by link(), which unlike rename() never takes a name that is taken.

A sync that failed is never repeated on the same file: the kernel may have thrown
the pages away and would report success. The attempt fails and starts anew. And a
call that says it gave or took a name is not believed: the name is looked for.

The kernel is asked by way of `os` alone, here and in `blocks`: so a test can put
another one in its place, one that forgets what was not synced.

The price: a process killed in between leaves a hidden file aside, never a half one
in place. Retention sweeps it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from migrator.storage import file_io as blocks
from migrator.errors import SettingsError, StorageError

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})

_WHAT_TO_DO = {
    errno.ENOSPC: "Make room on the volume, or keep fewer ckpts (MIGRATOR_KEEP)",
    errno.EDQUOT: "Raise the quota, or keep fewer ckpts (MIGRATOR_KEEP)",
    errno.EACCES: "Give the job's user the right to write there, or name another root (MIGRATOR_CKPT)",
    errno.EPERM: "Give the job's user the right to write there, or name another root (MIGRATOR_CKPT)",
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


class LocalStorage:
    """The directory `<root>/<job>`; all names are relative to it."""

    def __init__(self, root: Path, job: str) -> None:
        if not job or job.startswith((".", "/")) or ".." in job.split("/") or "\0" in job:
            raise SettingsError(f"the job name {job!r} cannot name a directory; set another (MIGRATOR_JOB)")
        self.root = Path(root).absolute()
        self.directory = self.root / job
        self._place = str(self.directory)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.directory)!r})"

    def check(self) -> None:
        """Show by a probe that files can be made, read and removed here; `StorageError` if not."""
        probe = _aside(Path("probe")).name
        self.make_directory("")
        self._sync_above()
        self.put(probe, b"probe", exclusive=True)
        try:
            found = self.get(probe, limit=64)
        finally:
            self.delete(probe)
        if found != b"probe":
            raise StorageError(f"{self.directory} gave back other bytes than were written there")

    def put(self, name: str, data: bytes, *, exclusive: bool, check: Callable[[], None] = lambda: None) -> None:
        """Make a small file durable under its name, all at once.

        `exclusive`: `FileExistsError` if the name is taken, whatever another process does meanwhile. What `check`
        finds in the directory is there when the name appears, or it does not appear: a directory is removed in one
        piece, and the bytes that wait for their name would go with it.
        """
        target = self._path(name)
        self._make(target.parent)
        aside = _aside(target)
        try:
            with _told("write", target, needed=len(data)):
                _write_synced(aside, data)
            check()
            if exclusive:
                with _told("commit", target, passing=FileExistsError):
                    _link(aside, target)
            else:
                with _told("replace", target):
                    _rename(aside, target)
        finally:
            with suppress(OSError):
                os.unlink(aside)
        # The name lives in the directory; without this a node crash can undo it.
        self._sync(target.parent)

    def overwrite(self, name: str, data: bytes) -> None:
        """Other bytes, as many, in a small file that is there, without a sync. Who opens it from now on reads them."""
        path = self._path(name)
        with _told("write", path):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                blocks.write_all(fd, [memoryview(data)], 0)
            finally:
                os.close(fd)

    def write(self, name: str) -> PartFile:
        """A large file, written piece by piece; its name appears when it is finished."""
        target = self._path(name)
        self._make(target.parent)
        # Even if another process has made the directory: nobody told us that its name is durable.
        self._sync(target.parent.parent)
        return PartFile(target)

    def get(self, name: str, *, limit: int = 1 << 28) -> bytes:
        """The bytes of a small file."""
        path = self._path(name)
        pieces, room = [], limit + 1
        with self.open(name) as fd:
            while room > 0 and (piece := os.read(fd, min(room, _READ_MAX))):
                pieces.append(piece)
                room -= len(piece)
        if room <= 0:
            raise StorageError(f"{path} is larger than {limit} bytes; none of ours is", errno=errno.EFBIG)
        return b"".join(pieces)

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """A file descriptor to read from; errors while reading are told as ours."""
        path = self._path(name)
        with _told("read", path):
            # Without waiting: a pipe that nobody writes to would hold us for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise IsADirectoryError(errno.EISDIR, "it is no regular file", str(path))
                yield fd
            finally:
                os.close(fd)

    def size(self, name: str) -> int | None:
        """The size of a file; None if there is no such file."""
        found = self._stat(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def modified(self, name: str) -> float | None:
        """When a file was written, by the storage's clock; None if there is no such file."""
        found = self._stat(name)
        return None if found is None else found.st_mtime

    def now(self) -> float:
        """The storage's clock: it need not be this node's."""
        self.make_directory("")
        aside = _aside(self.directory / "clock")
        with _told("write", aside):
            try:
                _write_synced(aside, b"")
                return os.stat(aside).st_mtime
            finally:
                _unlink(aside)

    def list(self, directory: str = "", *, aside: bool = False) -> list[str]:
        """The names in a directory, sorted; empty if there is no such directory.

        `aside`: instead the hidden ones of what is being written, or was when its writer died.
        """
        path = self._path(directory)
        try:
            with _told("list", path, passing=(FileNotFoundError, NotADirectoryError)):
                names = sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in names if (_OURS.fullmatch(name) if aside else not name.startswith(_ASIDE))]

    def delete(self, name: str) -> None:
        """Remove a file; none there is fine."""
        path = self._path(name)
        with _told("delete", path):
            _unlink(path)
            if _is_there(path):
                raise OSError(errno.EIO, "it was reported as deleted and is still there")

    def delete_directory(self, name: str) -> None:
        """Remove a directory with the files in it, hidden ones too; none there is fine.

        It is moved aside first, in one piece: whoever still writes there fails, and finds no half of it.
        """
        path = self._path(name)
        with _told("delete", path), suppress(FileNotFoundError):
            if not _is_directory(path):
                os.unlink(path)
                return
            if not path.name.startswith(_ASIDE):
                aside = _aside(path)
                _rename(path, aside)
                # Else a crash could bring it back under its name with some of its files gone.
                self._sync(path.parent)
                path = aside
            for entry in sorted(os.listdir(path)):
                _unlink(path / entry)
            os.rmdir(path)

    def make_directory(self, name: str) -> None:
        """Make a directory and its name durable, with all above it."""
        self._make(self._path(name))

    def sync_directory(self, name: str = "") -> None:
        """Make durable what was made, renamed or removed in a directory."""
        self._sync(self._path(name))

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/") or name.count("/") > 1 or "\0" in name:
            raise StorageError(f"{name!r} is not a name inside {self.directory}", errno=errno.EACCES)
        # As text: this comes before every call, and a path costs more than the look at it.
        for place in dict.fromkeys((name.partition("/")[0], name)) if name else ():
            if _is_link(f"{self._place}/{place}"):
                raise StorageError(
                    f"{self._place}/{place} is a link to somewhere else; a job's ckpts lie in its own directory. "
                    "Move there what the link leads to, or remove the link. (The root itself may be a link.)",
                    errno=errno.ELOOP,
                )
        return self.directory / name

    def _stat(self, name: str) -> os.stat_result | None:
        path = self._path(name)
        try:
            with _told("look at", path, passing=(FileNotFoundError, NotADirectoryError)):
                return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _make(self, directory: Path) -> None:
        with _told("make the directory", directory):
            if _is_directory(directory):
                return
        if directory.parent != directory:
            self._make(directory.parent)
        with _told("make the directory", directory):
            try:
                os.mkdir(directory)
            except FileExistsError:
                if not _is_directory(directory):
                    raise NotADirectoryError(errno.ENOTDIR, "is a file", str(directory)) from None
            if not _is_there(directory):
                raise OSError(errno.EIO, "it was reported as made and is not there")
        self._sync(directory.parent)

    def _sync_above(self) -> None:
        """Make durable where the job lies: who made these directories may have died before it synced their names."""
        place = self.directory
        while place != place.parent:
            with _told("look at", place):
                is_mounted_here = os.stat(place).st_dev != os.stat(place.parent).st_dev
            if is_mounted_here:
                return
            place = place.parent
            try:
                self._sync(place)
            except StorageError as error:
                # What may not even be opened was there before us.
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise

    def _sync(self, directory: Path) -> None:
        with _told("sync", directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                # Some file systems (FUSE, SMB) have no sync for directories and no need of one.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            finally:
                os.close(fd)


class PartFile:
    """A large file on its way; nobody sees it under its name before it is whole and synced."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._aside = _aside(target)
        self._fd = -1
        self.bytes = 0
        with _told("write", target):
            self._fd = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append the buffers."""
        with _told("write", self._target, needed=sum(map(len, buffers))):
            self.bytes = blocks.write_all(self._fd, buffers, self.bytes)

    def finish(self) -> None:
        """Make the bytes durable and give them their name; `sync_directory` makes the name durable."""
        with _told("sync", self._target):
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                # A network file system may tell only here that it could not store the bytes.
                os.close(fd)
            _rename(self._aside, self._target)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
        with suppress(OSError):
            os.unlink(self._aside)


_ASIDE = "."
_OURS = re.compile(r"\..+\.(?:[0-9a-f]{12}\.tmp|claim)", re.ASCII)
_READ_MAX = 1 << 24


def _aside(target: Path) -> Path:
    return target.with_name(f"{_ASIDE}{target.name.lstrip('.')}.{uuid.uuid4().hex[:12]}.tmp")


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        blocks.write_all(fd, [memoryview(data)], 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _rename(aside: Path, target: Path) -> None:
    os.rename(aside, target)
    if _is_there(aside) or not _is_there(target):
        raise OSError(errno.EIO, "it was reported as renamed and is not")


def _link(aside: Path, target: Path) -> None:
    """Give the file its name unless somebody has it: `FileExistsError`."""
    try:
        os.link(aside, target)
        if not _is_there(target):
            raise OSError(errno.EIO, "it was reported as linked and is not")
    except OSError as error:
        # Over a network the answer to a link that was made can get lost; the call repeated finds it taken.
        if _is_same_file(aside, target):
            return
        if error.errno not in _NO_LINKS:
            raise
        _claim_and_rename(aside, target)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except OSError:
        return False


def _claim_and_rename(aside: Path, target: Path) -> None:
    """Where there are no links: an empty file that only one can make stands for the right to rename.

    Not the target itself: a crash in between would leave it there, empty, for ever.
    """
    claim = target.with_name(f"{_ASIDE}{target.name}.claim")
    os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        # By listing: who asks for the name alone may be told of an older time (NFS).
        if target.name in os.listdir(target.parent):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        _rename(aside, target)
    finally:
        _unlink(claim)


@contextmanager
def _told(
    doing: str,
    path: Path,
    *,
    needed: int | None = None,
    passing: type[OSError] | tuple[type[OSError], ...] = (),
) -> Iterator[None]:
    """Tell an `OSError` as ours: what was tried, where, why it failed, what to do."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        code = error.errno
        reason = (error.strerror or os.strerror(code)) if code is not None else str(error)
        room = _room(path, needed) if code in (errno.ENOSPC, errno.EDQUOT) else ""
        todo = _WHAT_TO_DO.get(code or 0, "See whether the volume works")
        raise StorageError(f"cannot {doing} {path}: {reason}{room}. {todo}.", errno=code) from error


def _room(path: Path, needed: int | None) -> str:
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return ""
    free = found.f_bavail * found.f_frsize
    return f" (needed {needed if needed is not None else 'some'} bytes, {free} are free)"
