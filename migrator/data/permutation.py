"""The order of an epoch, as a pure function of the position.

A job that resumes on other ranks must continue in exactly the same order. A list
of shuffled indices is too large for 10^12 samples, and the shuffles of torch and
numpy may change between versions. So the order is never stored: the sample at a
position is computed from seed, epoch, position and n, and from nothing else.

The results are frozen by golden vectors: if a change here moves a single result,
the ckpts of all jobs in mid-epoch become wrong.

Up to `TABLE` samples the order is a sort of random words. Above that, it is a
Feistel network over the next power of two; a result outside n goes through the
network again until it is inside (cycle walking), which keeps the mapping
one-to-one.

The price: above `TABLE` the order is not drawn from all n! orders; common
statistical tests do not show the difference. It is not cryptography.
"""

from __future__ import annotations

import hashlib
import operator
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

LARGEST = 2**62
"""Maximum number of samples."""
TABLE = 4096
"""Maximum number of samples whose order is a sorted table."""
ROUNDS = 12
"""Number of rounds of the Feistel network."""

Words = NDArray[np.uint64]


@overload
def permutation(seed: int, epoch: int, position: int, n: int) -> int: ...
@overload
def permutation(seed: int, epoch: int, position: NDArray[np.integer[Any]], n: int) -> NDArray[np.int64]: ...
def permutation(seed: int, epoch: int, position: int | NDArray[np.integer[Any]], n: int) -> int | NDArray[np.int64]:
    """Return the index of the sample at `position` in the order of the epoch: one number, or an array of numbers.

    `seed` and `epoch` may be any integers, negative or huge; each pair has its own order.
    """
    seed, epoch, n = operator.index(seed), operator.index(epoch), operator.index(n)
    if not 1 <= n <= LARGEST:
        raise ValueError(f"n is {n}, expected 1 to 2**62: pass the number of samples of the epoch")
    if not isinstance(position, np.ndarray):
        position = operator.index(position)
        _check_range(position, position, n)
        return int(_samples(seed, epoch, np.array([position], np.uint64), n)[0])
    if position.dtype.kind not in "iu":
        raise TypeError(f"position is an array of {position.dtype}, expected integers: use .astype('int64')")
    if position.size:
        _check_range(int(position.min()), int(position.max()), n)
    # With at least one dimension: without one, results are numpy scalars, for which numpy warns of overflow.
    flat = position.reshape(-1).astype(np.uint64)
    return _samples(seed, epoch, flat, n).astype(np.int64).reshape(position.shape)


def _check_range(lowest: int, highest: int, n: int) -> None:
    if lowest < 0 or highest >= n:
        found = lowest if lowest < 0 else highest
        raise ValueError(f"position is {found}, expected 0 to {n - 1}: positions count from 0 and end before n")


def _samples(seed: int, epoch: int, positions: Words, n: int) -> Words:
    if n <= TABLE:
        return _table(seed, epoch, n)[positions]
    samples = _scrambled(seed, epoch, n, positions)
    outside = np.flatnonzero(samples >= n)
    while outside.size:
        samples[outside] = _scrambled(seed, epoch, n, samples[outside])
        outside = outside[samples[outside] >= n]
    return samples


@lru_cache(maxsize=16)
def _table(seed: int, epoch: int, n: int) -> Words:
    return np.argsort(_words(seed, epoch, n, n), kind="stable").astype(np.uint64)


def _scrambled(seed: int, epoch: int, n: int, values: Words) -> Words:
    """Map the numbers below the next power of two one-to-one onto themselves."""
    bits = (n - 1).bit_length()
    shift = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    low, high = values & low_mask, values >> shift
    for key, other in _words(seed, epoch, n, ROUNDS).reshape(-1, 2):
        low ^= _mixed(high + key) & low_mask
        high ^= _mixed(low + other) & high_mask
    return high << shift | low


def _mixed(words: Words) -> Words:
    """Make each bit of a word depend on all its bits (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=16)
def _words(seed: int, epoch: int, n: int, count: int) -> Words:
    """`count` random words that depend only on seed, epoch and n."""
    # Hexadecimal, since Python refuses to print a huge integer in decimal.
    text = f"migrator {seed:x} {epoch:x} {n:x}".encode()
    return np.frombuffer(hashlib.shake_128(text).digest(8 * count), dtype="<u8").astype(np.uint64)
