"""The order of an epoch: one-to-one, frozen, quick, and without a pattern that ordinary statistics see."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.data.permutation import LARGEST, TABLE, permutation

# n, then (seed, epoch, position, sample). They never change: jobs in mid-epoch rely on them.
GOLDEN = [
    (1, [(0, 0, 0, 0), (7, 3, 0, 0)]),
    (2, [(0, 0, 0, 0), (0, 0, 1, 1), (7, 3, 0, 0), (7, 3, 1, 1)]),
    (3, [(0, 0, 0, 2), (0, 0, 1, 1), (0, 0, 2, 0), (7, 3, 0, 0), (7, 3, 1, 2), (7, 3, 2, 1)]),
    (17, [(0, 0, 0, 13), (0, 0, 1, 12), (0, 0, 16, 1), (7, 3, 0, 15), (7, 3, 1, 3), (7, 3, 16, 10)]),
    (4096, [(0, 0, 0, 1108), (0, 0, 1, 3683), (0, 0, 4095, 3675), (7, 3, 2048, 2847), (7, 3, 4095, 740)]),
    (4097, [(0, 0, 0, 791), (0, 0, 1, 2775), (0, 0, 4096, 1870), (7, 3, 2048, 2790), (7, 3, 4096, 102)]),
    (10**6, [(0, 0, 0, 711499), (0, 0, 1, 398548), (0, 0, 999999, 379472), (7, 3, 500000, 451955)]),
    (10**6, [(-1, 0, 5, 65647), (2**64, 0, 5, 482227), (2**64 - 1, 0, 5, 333045), (-(2**100), 0, 5, 549293)]),
    (2**40, [(0, 0, 0, 249475177357), (0, 0, 2**39, 208151844961), (7, 3, 2**40 - 1, 1036211265694)]),
    (2**62, [(0, 0, 0, 2042619567842909811), (0, 0, 1, 903252279490702555)]),
    (2**62, [(7, 3, 2**61, 189786135707352468), (7, 3, 2**62 - 1, 2284094138920543371)]),
]


def order(n: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return permutation(seed, epoch, np.arange(n), n)


@pytest.mark.parametrize(("n", "vectors"), GOLDEN)
def test_the_order_is_frozen(n: int, vectors: list[tuple[int, int, int, int]]) -> None:
    """An order that moved would repeat and miss samples of every job that is in mid-epoch."""
    found = [(seed, epoch, at, permutation(seed, epoch, at, n)) for seed, epoch, at, _ in vectors]

    assert found == vectors


@pytest.mark.parametrize("n", [*range(1, 40), 4095, TABLE, TABLE + 1, 5000, 8191, 8192, 8193, 2**16, 2**16 + 1])
def test_every_sample_stands_at_exactly_one_position(n: int) -> None:
    """One-to-one for small n, primes, powers of two and what lies right beside them."""
    assert np.array_equal(np.arange(n), np.sort(order(n, seed=5, epoch=2)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(n=st.integers(TABLE + 1, LARGEST), seed=st.integers(), epoch=st.integers(0, 10**6), data=st.data())
def test_no_two_positions_of_a_huge_epoch_meet(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """Samples stay within 0 to n - 1 and differ wherever positions do, for any n and any seed."""
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))

    samples = permutation(seed, epoch, np.array(positions), n)

    assert len(positions) == len(set(samples.tolist()))
    assert 0 <= samples.min() <= samples.max() < n


@pytest.mark.parametrize("n", [17, TABLE + 1])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint64", ">i4"])
def test_an_array_is_answered_like_its_numbers(n: int, dtype: str) -> None:
    """Whatever integers positions are kept in and whatever their shape, the answers are the same."""
    positions = np.arange(12).astype(dtype).reshape(3, 4)

    samples = permutation(1, 2, positions, n)

    assert samples.shape == (3, 4)
    assert samples.dtype == np.int64
    assert samples.reshape(-1).tolist() == [permutation(1, 2, at, n) for at in range(12)]
    assert permutation(1, 2, 3, n) == permutation(1, 2, np.array(3), n)
    assert type(permutation(1, 2, 3, n)) is int


def test_no_positions_have_no_samples() -> None:
    """An empty array is no error: the last chunk of a rank may be one."""
    assert permutation(0, 0, np.array([], np.int64), 10).size == 0


def test_positions_and_the_cached_order_are_left_alone() -> None:
    """Neither the caller's array nor the answer of the next call changes when an answer is written to."""
    for n in (17, TABLE + 1):
        positions = np.arange(10)
        first = permutation(0, 0, positions, n)
        kept = first.copy()
        first[:] = 0

        assert np.array_equal(np.arange(10), positions)
        assert np.array_equal(kept, permutation(0, 0, positions, n))


@pytest.mark.parametrize(("position", "found"), [(-1, "-1"), (10, "10"), (2**70, str(2**70))])
def test_a_position_outside_the_epoch_is_refused(position: int, found: str) -> None:
    """A number outside 0 to n - 1 is an error of the caller, alone or within an array."""
    with pytest.raises(ValueError, match=f"position is {found}, expected 0 to 9"):
        permutation(0, 0, position, 10)
    if position < 2**62:
        with pytest.raises(ValueError, match=f"position is {found}, expected 0 to 9"):
            permutation(0, 0, np.array([0, position, 9]), 10)


@pytest.mark.parametrize("n", [0, -3, LARGEST + 1])
def test_an_n_out_of_bounds_is_refused(n: int) -> None:
    """There is no order of no samples, nor of more than 2**62."""
    with pytest.raises(ValueError, match=rf"n is {n}, expected 1 to 2\*\*62"):
        permutation(0, 0, 0, n)


@pytest.mark.parametrize("position", [1.0, np.array([1.0]), np.array([True])])
def test_positions_are_integers(position: Any) -> None:
    """A float that was rounded somewhere would name the wrong sample."""
    with pytest.raises(TypeError):
        permutation(0, 0, position, 10)


SIZES = [2, 3, 64, 4096, 4097, 6000, 8192]


@pytest.mark.parametrize("n", SIZES)
def test_every_position_gets_every_sample_equally_often(n: int) -> None:
    """Over many seeds the sample at a position is uniform (chi-squared over at most 32 bins)."""
    seeds, bins = 1500, min(n, 32)
    positions = np.unique([0, 1, n // 3, n // 2, n - 1])
    drawn = np.stack([permutation(seed, 0, positions, n) for seed in range(seeds)])
    expected = seeds * np.bincount(np.arange(n) * bins // n) / n

    for column in drawn.T:
        squared = (np.bincount(column * bins // n, minlength=bins) - expected) ** 2 / expected
        # Mean and variance of chi-squared are its degrees of freedom and twice those.
        assert squared.sum() < (bins - 1) + 5 * np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("n", SIZES[2:])
def test_neighbours_are_unrelated(n: int) -> None:
    """Adjacent positions hold uncorrelated samples: within one order, and over many seeds."""
    pairs = np.stack([permutation(seed, 0, np.array([0, 1]), n) for seed in range(1500)])
    within = order(n)

    assert abs(np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1]) < 4 / np.sqrt(1500)
    assert abs(np.corrcoef(within[:-1], within[1:])[0, 1]) < 4 / np.sqrt(n)


@pytest.mark.parametrize("n", SIZES[2:])
def test_other_seeds_and_epochs_have_unrelated_orders(n: int) -> None:
    """Two orders agree at about one position in n, as two random ones do, and are uncorrelated."""
    orders = [order(n, seed=seed, epoch=epoch) for seed in (-1, 0, 1, 2**64) for epoch in range(8)]
    pairs = [(a, b) for i, a in enumerate(orders) for b in orders[:i]]

    agreements = np.mean([np.count_nonzero(a == b) for a, b in pairs])
    correlations = np.array([np.corrcoef(a, b)[0, 1] for a, b in pairs]) * np.sqrt(n)

    assert 0.7 < agreements < 1.3
    assert abs(correlations).max() < 5
    assert 0.85 < correlations.std() < 1.15


def test_a_huge_epoch_costs_nothing_to_begin_and_little_to_walk() -> None:
    """The first sample of 2**40 comes at once, a million more within a second: there is no list."""
    began = time.perf_counter()
    permutation(123, 4, 0, 2**40)
    first_s = time.perf_counter() - began
    permutation(123, 4, np.arange(10**6), 2**39 + 1)
    million_s = time.perf_counter() - began - first_s

    assert first_s < 0.1
    assert million_s < 2
