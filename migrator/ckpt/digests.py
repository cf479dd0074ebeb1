"""Digests of a file's bytes, block by block.

Only one thread, from front to back, could compute a single digest of a file.
So the bytes are cut into blocks with a digest each, computed in any order, and
the digest of the file is the digest of these digests.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK = 64 << 20
"""Bytes of a file with one digest. A thread reads so many at once, and a flipped bit makes so many unreadable."""


def block_digest(pieces: Iterable[memoryview]) -> str:
    """The digest of one block, which may lie in several pieces."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def digest_of_blocks(blocks: Iterable[str]) -> str:
    """The digest of a file, from the digests of its blocks."""
    return xxhash.xxh3_128(b"".join(map(bytes.fromhex, blocks))).hexdigest()


def block_count(size: int) -> int:
    """How many blocks a file of `size` bytes has."""
    return -(-size // BLOCK)


class Digest:
    """The digests of a file whose bytes arrive in order."""

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
        """The digest of the file, and those of its blocks."""
        if self._room < BLOCK:
            self._close_block()
        return digest_of_blocks(self._blocks), tuple(self._blocks)

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = xxhash.xxh3_128()
        self._room = BLOCK
