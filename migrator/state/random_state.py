"""The random states of this process: torch, its devices, Python, numpy.

Captured at every safe point, so the price counts: numpy's own `get_state` takes
longer than all the rest together and is asked only if its state has moved.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch
import xxhash


def is_generator(value: object) -> bool:
    """Whether random numbers are drawn from it. In a function: numpy loads its random numbers when they are named."""
    return isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


class _Numpy:
    """numpy's global generator, read in full only when it moved since the last look.

    The raw state (624 words and a position) shows every draw but one: the second
    of a pair of normal numbers comes from a cache. So an unchanged raw state
    proves nothing while that cache is full (`has_gauss`), and everything while
    it is empty.
    """

    RAW_BYTES = 624 * 4 + 4

    def __init__(self) -> None:
        self._raw = b""
        self._state: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        generator: Any = np.random.mtrand._rand._bit_generator
        if type(generator).__name__ != "MT19937":
            return dict(np.random.get_state(legacy=False))
        raw = ctypes.string_at(generator.ctypes.state_address, self.RAW_BYTES)
        if raw != self._raw or self._state.get("has_gauss", 1):
            self._raw, self._state = raw, dict(np.random.get_state(legacy=False))
        return self._state


_numpy = _Numpy()


def capture() -> dict[str, Any]:
    """All random states, as values the typed tree can hold. Does not touch any of them."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": _numpy.capture()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def derived(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """States for a rank that has none in the ckpt: they follow from another rank's, and are not those."""
    words = bytes(state["torch"].tolist()) + rank.to_bytes(4, "little")
    seed = xxhash.xxh3_64(words).intdigest()
    made: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed >> 1).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if "numpy" in state:
        made["numpy"] = dict(np.random.RandomState(seed % (1 << 32)).get_state(legacy=False))
    return made


def restore(state: dict[str, Any]) -> None:
    """Put all random states back. What this process does not have is left out."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
