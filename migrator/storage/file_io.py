"""Raw bytes between tensor memory and files: large calls, no copies, a digest of every block.

Each change of the GIL's owner beside a busy training loop costs up to a second,
so one call moves as much as it can; and filling the page cache is what makes an
ordinary large write slow, so the kernel is asked to pass it by where it knows how.

A digest of a whole file could only be made by one thread from front to back.
So the bytes are cut in blocks that are digested each for itself, in any order,
and the digest of the whole is that of the blocks' digests.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import xxhash

from migrator.errors import CkptCorrupt

BLOCK = 64 << 20
"""Bytes of a file that share one digest: what a flipped bit makes unreadable, what a thread reads at once."""

_IOV_MAX = 1024
_CALL_MAX = 1 << 30  # Linux moves at most 2 GiB less a page in one call
_RWF_DONTCACHE = 0x80


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, writable, not copied, kept alive by the view."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def write_all(fd: int, buffers: Iterable[memoryview], offset: int) -> int:
    """Write all buffers one after another from `offset` on; returns the offset behind them."""
    flags = _RWF_DONTCACHE

    def write(batch: Sequence[memoryview], at: int) -> int:
        nonlocal flags
        try:
            return os.pwritev(fd, batch, at, flags)
        except OSError as error:
            # The kernel or the file system does not know how to pass the cache by.
            if not flags or error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            flags = 0
            return os.pwritev(fd, batch, at)

    return _move(write, buffers, offset, lambda at: OSError(errno.EIO, f"nothing was written at byte {at}"))


def read_all(fd: int, buffers: Iterable[memoryview], offset: int) -> int:
    """Fill all buffers one after another from `offset` on; a file that ends before is `CkptCorrupt`."""

    def read(batch: Sequence[memoryview], at: int) -> int:
        return os.preadv(fd, batch, at)

    return _move(read, buffers, offset, lambda at: CkptCorrupt(f"the file ends already at byte {at}"))


def _move(
    call: Callable[[Sequence[memoryview], int], int],
    buffers: Iterable[memoryview],
    offset: int,
    stuck: Callable[[int], Exception],
) -> int:
    """Repeat `call` until it has moved everything: it may move less than it was given."""
    left = [piece for buffer in buffers for piece in _cut(buffer, _CALL_MAX)]
    left.reverse()
    while left:
        batch: list[memoryview] = []
        size = 0
        while left and len(batch) < _IOV_MAX and size + len(left[-1]) <= _CALL_MAX:
            size += len(left[-1])
            batch.append(left.pop())
        moved = call(batch, offset)
        if moved <= 0:
            raise stuck(offset)
        offset += moved
        left.extend(reversed(_behind(batch, moved)))
    return offset


def _behind(batch: list[memoryview], moved: int) -> list[memoryview]:
    for i, piece in enumerate(batch):
        if moved < len(piece):
            return [piece[moved:], *batch[i + 1 :]]
        moved -= len(piece)
    return []


def _cut(buffer: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(buffer), size):
        yield buffer[start : start + size]


def block_digest(pieces: Iterable[memoryview]) -> str:
    """The digest of one block, which may lie in several pieces."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def digest_of_blocks(blocks: Iterable[str]) -> str:
    """The digest of a whole file by the digests of its blocks."""
    return xxhash.xxh3_128(b"".join(map(bytes.fromhex, blocks))).hexdigest()


def block_count(size: int) -> int:
    """How many blocks a file of `size` bytes has."""
    return -(-size // BLOCK)


class Digest:
    """The digests of a file whose bytes come by in order."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._block = xxhash.xxh3_128()
        self._room = BLOCK

    def update(self, buffer: memoryview) -> None:
        while len(buffer):
            now, buffer = buffer[: self._room], buffer[self._room :]
            self._block.update(now)
            self._room -= len(now)
            if not self._room:
                self._close_block()

    def finish(self) -> tuple[str, tuple[str, ...]]:
        """The digest of everything, and that of each block."""
        if self._room < BLOCK:
            self._close_block()
        return digest_of_blocks(self._blocks), tuple(self._blocks)

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = xxhash.xxh3_128()
        self._room = BLOCK
