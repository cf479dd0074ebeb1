"""The random states of this process: what a safe point has of them is what comes next, whatever happened before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.state import random_state

OPERATIONS: dict[str, Any] = {
    "seed": lambda kept: np.random.seed(3),
    "one normal": lambda kept: np.random.randn(),
    "normals": lambda kept: np.random.randn(4),
    "uniform": lambda kept: np.random.rand(),
    "keep": lambda kept: kept.append(np.random.get_state()),
    "back": lambda kept: kept and np.random.set_state(kept[-1]),
    "python": lambda kept: random.gauss(0, 1),
    "torch": lambda kept: torch.randn(3),
    "safe point": lambda kept: random_state.capture(),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = random_state.capture()
    yield
    random_state.restore(before)


def draws() -> list[Any]:
    """What comes next."""
    return [torch.rand(2).tolist(), random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), np.random.rand()]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(names=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=14))
def test_what_comes_next_comes_again(names: list[str]) -> None:
    """Also if a state was put back that differs in nothing but a normal number that waits to be drawn."""
    kept: list[Any] = []
    for name in names:
        OPERATIONS[name](kept)
    state = random_state.capture()
    expected = draws()
    draws()
    random_state.restore(state)
    assert draws() == expected


def test_a_normal_number_that_waits_after_the_same_seed() -> None:
    """Three normal numbers and four of them take as much from the generator: after three, one is left."""
    for count, waits in ((4, 0), (3, 1)):
        np.random.seed(123)
        np.random.randn(count)
        assert random_state.capture()["numpy"]["has_gauss"] == waits


def test_another_generator_of_numpy() -> None:
    """One may be put in the place of the usual one."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        state = random_state.capture()
        expected = draws()
        random_state.restore(state)
        assert draws() == expected
    finally:
        np.random.set_bit_generator(before)
