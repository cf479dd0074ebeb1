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
