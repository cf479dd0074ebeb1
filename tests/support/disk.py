"""A disk that forgets: what a crash may leave of files and names that were not synced.

It stands where `os` stands in the storage modules, so the code that runs on it is the
product's own. Beside what a process sees it keeps what each call since the last sync
has changed, and makes from that *every* disk a power cut may leave:

- A name that was given, taken or moved is there or not, each for itself, until its
  directory is synced; what it stood for before may come back. No order is kept, not even
  that of one rename: the target may be there beside the source, or neither.
- The bytes of a file that was not synced are there or not, each sector for itself; the
  file may be empty, cut off, or of full length with zeros.
- What lies below a directory whose own name is lost is lost with it.

That is harder than any file system in use. A kill without a power cut leaves a disk on which
nothing is lost yet (`killed`): what was not synced may still be lost in a life to come.

The price: what no recovery looks at, the bytes of hidden files, is not taken apart
sector by sector but as nothing, half and all of it; and where more than `PRODUCT`
combinations of names are possible the extremes, each alone, all but one, and a seeded
sample of the others stand for them (`sampled` counts how often).
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from migrator.storage.base import Storage
from migrator.storage.posix import PosixStorage

SECTOR = 512
PRODUCT = 1024
_UUID = re.compile(r"\.[0-9a-f]{12}(?=\.tmp)")


class Cut(BaseException):
    """The process is dead: nothing that it does from now on has an effect."""


class File:
    """Bytes as a process sees them, and as they were when they were last synced."""

    __slots__ = ("data", "mtime", "synced")

    def __init__(self, data: bytes, synced: bytes | None, mtime: float) -> None:
        self.data = data
        self.synced = synced
        self.mtime = mtime

    def remains(self, *, all_of_it: bool) -> list[bytes]:
        """What a crash may leave of the bytes."""
        old = self.synced or b""
        if self.synced == self.data:
            return [self.data]
        new = self.data
        found = [new, old, new[: len(new) // 2]]
        if all_of_it:
            found += [bytes(len(new)), new[:-1]]
            sectors = range(-(-len(new) // SECTOR))
            few = itertools.product((False, True), repeat=len(sectors))
            one = ([i == j for j in sectors] for i in sectors)
            for kept in few if len(sectors) <= 4 else itertools.chain(one, ([not k for k in ks] for ks in list(one))):
                found.append(_torn(old, new, list(kept)))
        return list(dict.fromkeys(found))


def _torn(old: bytes, new: bytes, kept: list[bool]) -> bytes:
    before = old[: len(new)].ljust(len(new), b"\0")
    return b"".join((new if is_new else before)[i * SECTOR : (i + 1) * SECTOR] for i, is_new in enumerate(kept))


class Directory:
    """Names as a process sees them; of each that changed since the last sync all that it stood for."""

    __slots__ = ("before", "mtime", "names")

    def __init__(self, names: dict[str, int] | None = None) -> None:
        self.names: dict[str, int] = names or {}
        self.before: dict[str, list[int | None]] = {}
        self.mtime = 0.0


class Found(NamedTuple):
    """What `os.stat` says."""

    st_mode: int
    st_ino: int
    st_size: int
    st_mtime: float
    st_dev: int = 1


class Disk:
    """One volume."""

    def __init__(self) -> None:
        self.nodes: dict[int, File | Directory] = {1: Directory()}
        self.next = 2
        self.now_s = 1000.0
        self.has_links = True
        self.obeys = True
        """Whether it syncs when it is told to."""
        self.sampled = 0

    # What a story needs of a machine.

    def storage(self, job: str) -> Storage:
        """What a process works with that has mounted it."""
        return PosixStorage(Path("/"), job)

    def mount(self, before: Callable[[str, str], None]) -> None:
        """This thread is a process on this machine; see `Kernel`."""
        KERNEL.mount(self, before)

    def sleep(self, seconds: float) -> None:
        """Time goes by; others may go on."""
        KERNEL.before("sleep", "")
        self.now_s += seconds

    # What processes do.

    def node(self, path: str) -> tuple[int, File | Directory]:
        number, node = 1, self.nodes[1]
        for name in _parts(path):
            if not isinstance(node, Directory):
                raise _error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _error(errno.ENOENT, path)
            number = node.names[name]
            node = self.nodes[number]
        return number, node

    def parent(self, path: str) -> tuple[Directory, str]:
        above, _, name = path.rpartition("/")
        _, node = self.node(above)
        if not isinstance(node, Directory):
            raise _error(errno.ENOTDIR, path)
        return node, name

    def name(self, directory: Directory, name: str, number: int | None) -> None:
        """Give a name, or take it away (None)."""
        was = directory.names.get(name)
        values = directory.before.setdefault(name, [was])
        if number is None:
            del directory.names[name]
        else:
            directory.names[name] = number
        if number not in values:
            values.append(number)

    def add(self, directory: Directory, name: str, node: File | Directory) -> int:
        number, self.next = self.next, self.next + 1
        self.nodes[number] = node
        node.mtime = self.now_s
        self.name(directory, name, number)
        return number

    # What a crash leaves.

    def images(self) -> Iterator[Disk]:
        """Every disk that there may be after a power cut at this moment."""
        pending = [
            (number, name, values)
            for number, node in self.nodes.items()
            if isinstance(node, Directory)
            for name, values in node.before.items()
            if len(values) > 1
        ]
        seen = [entry for entry in pending if not entry[1].startswith(".")]
        hidden = [entry for entry in pending if entry[1].startswith(".")]
        for choice in self._choices([values for _, _, values in seen]):
            names = {(number, name): value for (number, name, _), value in zip(seen, choice, strict=True)}
            # Nobody looks at hidden files, so all of them together are as they were, or there, or gone.
            asides = [
                {(number, name): values[0] for number, name, values in hidden},
                {(number, name): max(values, key=lambda value: value or 0) for number, name, values in hidden},
                {(number, name): None if None in values else values[-1] for number, name, values in hidden},
            ]
            for aside in (asides[i] for i in range(3) if asides[i] not in asides[:i]):
                yield from self._with_bytes({**names, **aside})

    def killed(self) -> Disk:
        """This disk after all its processes were killed: as it is, with all that may still be lost."""
        copy = Disk()
        copy.now_s, copy.next = self.now_s + 1.0, self.next
        copy.has_links, copy.obeys = self.has_links, self.obeys
        for number, node in self.nodes.items():
            if isinstance(node, File):
                copy.nodes[number] = File(node.data, node.synced, node.mtime)
                continue
            directory = copy.nodes[number] = Directory(dict(node.names))
            directory.mtime = node.mtime
            directory.before = {name: list(values) for name, values in node.before.items() if len(values) > 1}
        return copy

    def _choices(self, values: list[list[int | None]]) -> Iterable[tuple[int | None, ...]]:
        count = 1
        for options in values:
            count *= len(options)
        if count <= PRODUCT:
            return itertools.product(*values)
        self.sampled += 1
        new = [options[-1] for options in values]
        old = [options[0] for options in values]
        found = [tuple(new), tuple(old)]
        for i in range(len(values)):
            found += [(*new[:i], old[i], *new[i + 1 :]), (*old[:i], new[i], *old[i + 1 :])]
        dice = random.Random(count)
        found += [tuple(dice.choice(options) for options in values) for _ in range(PRODUCT)]
        return dict.fromkeys(found)

    def _with_bytes(self, names: Mapping[tuple[int, str], int | None]) -> Iterator[Disk]:
        """The disk with these names, and all that may be left of its files."""
        image = Disk()
        image.now_s, image.next = self.now_s + 1.0, self.next
        image.has_links, image.obeys = self.has_links, self.obeys
        torn: dict[int, bool] = {}
        todo = [1]
        while todo:
            number = todo.pop()
            node = self.nodes[number]
            if isinstance(node, File):
                image.nodes[number] = File(node.data, node.data, node.mtime)
                continue
            kept = dict(node.names)
            for name in node.before:
                value = names.get((number, name), kept.get(name))
                if value is None:
                    kept.pop(name, None)
                else:
                    kept[name] = value
            copy = image.nodes[number] = Directory(kept)
            copy.mtime = node.mtime
            for name, value in kept.items():
                child = self.nodes[value]
                if value not in image.nodes:
                    todo.append(value)
                if isinstance(child, File) and child.synced != child.data:
                    torn[value] = torn.get(value, False) or not name.startswith(".")
        if not torn:
            yield image
            return
        for remains in itertools.islice(
            itertools.product(*(self._file(number).remains(all_of_it=seen) for number, seen in torn.items())), PRODUCT
        ):
            yield image.with_files(dict(zip(torn, remains, strict=True)))

    def _file(self, number: int) -> File:
        node = self.nodes[number]
        assert isinstance(node, File)
        return node

    def with_files(self, data: Mapping[int, bytes]) -> Disk:
        """The same disk, in good order, with other bytes in some files."""
        image = Disk()
        image.now_s, image.next = self.now_s, self.next
        image.has_links, image.obeys = self.has_links, self.obeys
        for number, node in self.nodes.items():
            if isinstance(node, File):
                bytes_ = data.get(number, node.data)
                image.nodes[number] = File(bytes_, bytes_, node.mtime)
            else:
                image.nodes[number] = Directory(dict(node.names))
                image.nodes[number].mtime = node.mtime
        return image

    def key(self) -> int:
        """The same for disks that no recovery can tell apart."""
        times: list[float] = []
        return hash((self._shape(1, times), _order(times)))

    def pending_key(self) -> int:
        """The same for disks that besides may lose the same."""
        return hash((self.key(), tuple(sorted(self._pending(1, ""), key=repr))))

    def _pending(self, number: int, path: str) -> Iterator[tuple[Any, ...]]:
        node = self.nodes[number]
        if isinstance(node, File):
            if node.synced != node.data:
                yield path, node.synced
            return
        for name, values in node.before.items():
            if len(values) > 1:
                yield f"{path}/{_plain(name)}", *(value and hash(self._shape(value, [])) for value in values)
        for name, child in node.names.items():
            yield from self._pending(child, f"{path}/{_plain(name)}")

    def visible(self) -> int:
        """The same for disks that do not differ but in hidden files."""
        return hash(tuple(sorted((path, data) for path, data in self.files().items() if "/." not in path)))

    def _shape(self, number: int, times: list[float]) -> Any:
        node = self.nodes[number]
        if isinstance(node, File):
            return node.data
        shape = []
        for name in sorted(node.names, key=_plain):
            child = self.nodes[node.names[name]]
            if name.endswith((".leaving", "manifest.json")):
                times.append(child.mtime)
            shape.append((_plain(name), self._shape(node.names[name], times)))
        return tuple(shape)

    def files(self) -> dict[str, bytes]:
        """All files by path."""
        return {path: self._file(number).data for path, number in self._walk(1, "")}

    def with_changed_byte(self, path: str) -> Disk:
        """The same disk, in good order, with one bit of a file changed."""
        number = dict(self._walk(1, ""))[path]
        data = bytearray(self._file(number).data)
        data[len(data) * 7 // 8] ^= 4
        return self.with_files({number: bytes(data)})

    def _walk(self, number: int, path: str) -> Iterator[tuple[str, int]]:
        node = self.nodes[number]
        if isinstance(node, File):
            yield path, number
            return
        for name, child in sorted(node.names.items()):
            yield from self._walk(child, f"{path}/{name}" if path else name)


def _order(times: list[float]) -> tuple[int, ...]:
    """Which of them are before which: all that is ever asked of times."""
    ranks = {time: i for i, time in enumerate(sorted(set(times)))}
    return tuple(ranks[time] for time in times)


def _plain(name: str) -> str:
    return _UUID.sub("", name) if name.startswith(".") else name


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _error(code: int, path: object) -> OSError:
    return OSError(code, os.strerror(code), str(path))


class Kernel:
    """What `posix` and `posix_calls` of `migrator.storage` take for `os`. Everything else is the real one's.

    `before` is called before each call that changes the disk or makes something durable, with its name: it may
    record, let other processes go first, or raise `Cut`.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def mount(self, disk: Disk, before: Callable[[str, str], None]) -> None:
        """What this thread does from now on it does to this disk."""
        self._local.disk = disk
        self._local.before = before
        self._local.fds = {}

    @property
    def _disk(self) -> Disk:
        disk: Disk = self._local.disk
        return disk

    def before(self, call: str, path: object) -> None:
        self._local.before(call, str(path))
        self._disk.now_s += 0.001

    def _fd(self, path: str, number: int) -> int:
        fd = 1000 + len(self._local.fds)
        self._local.fds[fd] = [number, path, 0]
        return fd

    def _node(self, fd: int) -> tuple[File | Directory, str]:
        number, path, _ = self._local.fds[fd]
        return self._disk.nodes[number], path

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        disk, name = self._disk, str(path)
        if not flags & os.O_CREAT:
            number, node = disk.node(name)
            if flags & os.O_DIRECTORY and not isinstance(node, Directory):
                raise _error(errno.ENOTDIR, path)
            return self._fd(name, number)
        assert flags & os.O_EXCL, "nothing here is ever written over"
        self.before("create", path)
        directory, last = disk.parent(name)
        if last in directory.names:
            raise _error(errno.EEXIST, path)
        return self._fd(name, disk.add(directory, last, File(b"", None, disk.now_s)))

    def close(self, fd: int) -> None:
        assert fd in self._local.fds

    def read(self, fd: int, size: int) -> bytes:
        node, _ = self._node(fd)
        assert isinstance(node, File)
        piece = node.data[self._local.fds[fd][2] :][:size]
        self._local.fds[fd][2] += len(piece)
        return piece

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        node, _ = self._node(fd)
        assert isinstance(node, File)
        start = offset
        for buffer in buffers:
            piece = node.data[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            offset += len(piece)
        return offset - start

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        node, path = self._node(fd)
        self.before("write", path)
        assert isinstance(node, File)
        assert offset == len(node.data)
        new = b"".join(buffers)
        node.data += new
        node.mtime = self._disk.now_s
        return len(new)

    def fsync(self, fd: int) -> None:
        node, path = self._node(fd)
        self.before("sync", path)
        if not self._disk.obeys:
            return
        if isinstance(node, File):
            node.synced = node.data
        else:
            node.before = {}

    def link(self, source: Path, target: Path) -> None:
        self.before("link", target)
        disk = self._disk
        if not disk.has_links:
            raise _error(errno.EOPNOTSUPP, target)
        number, node = disk.node(str(source))
        directory, name = disk.parent(str(target))
        if name in directory.names:
            raise _error(errno.EEXIST, target)
        if isinstance(node, Directory):
            raise _error(errno.EPERM, target)
        disk.name(directory, name, number)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", target)
        disk = self._disk
        number, _ = disk.node(str(source))
        above, old = disk.parent(str(source))
        directory, name = disk.parent(str(target))
        disk.name(directory, name, number)
        disk.name(above, old, None)

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        disk = self._disk
        _, node = disk.node(str(path))
        if isinstance(node, Directory):
            raise _error(errno.EISDIR, path)
        directory, name = disk.parent(str(path))
        disk.name(directory, name, None)

    def mkdir(self, path: Path) -> None:
        self.before("mkdir", path)
        disk = self._disk
        directory, name = disk.parent(str(path))
        if name in directory.names:
            raise _error(errno.EEXIST, path)
        disk.add(directory, name, Directory())

    def rmdir(self, path: Path) -> None:
        self.before("rmdir", path)
        disk = self._disk
        _, node = disk.node(str(path))
        if not isinstance(node, Directory):
            raise _error(errno.ENOTDIR, path)
        if node.names:
            raise _error(errno.ENOTEMPTY, path)
        directory, name = disk.parent(str(path))
        disk.name(directory, name, None)

    def listdir(self, path: Path) -> list[str]:
        _, node = self._disk.node(str(path))
        if not isinstance(node, Directory):
            raise _error(errno.ENOTDIR, path)
        return list(node.names)

    def stat(self, path: Path) -> Found:
        return self._found(*self._disk.node(str(path)))

    lstat = stat

    def fstat(self, fd: int) -> Found:
        number, _, _ = self._local.fds[fd]
        return self._found(number, self._disk.nodes[number])

    @staticmethod
    def _found(number: int, node: File | Directory) -> Found:
        if isinstance(node, Directory):
            return Found(stat.S_IFDIR | 0o755, number, 0, node.mtime)
        return Found(stat.S_IFREG | 0o644, number, len(node.data), node.mtime)


KERNEL = Kernel()


@contextmanager
def instead_of_os() -> Iterator[None]:
    """The storage modules ask this kernel; a user of them has to mount a disk first."""
    with (
        patch("migrator.storage.posix.os", KERNEL),
        patch("migrator.storage.posix_calls.os", KERNEL),
        patch("migrator.storage.page_cache.sync_file_range", None),
        # For large files alone; it writes the same bytes in another order, before the same sync.
        patch("migrator.storage.direct_io.is_possible", lambda fd: False),
    ):
        yield
