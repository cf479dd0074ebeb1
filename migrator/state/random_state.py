"""The random states of this process: torch, its devices, Python, numpy.

They are captured at every safe point, so the capture must be fast. numpy's `get_state`
takes longer than all others together and is called only if its state has changed.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch
import xxhash


def is_generator(value: object) -> bool:
    """Whether it is a random generator. A function, because numpy imports `numpy.random` at the first access."""
    return isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


class _Numpy:
    """numpy's global generator, read completely only if it has changed since the last capture.

    The raw state (624 words and a position) changes with each draw except one: the
    second of a pair of normal numbers comes from a cache. So an unchanged raw state
    is sufficient only while this cache is empty (`has_gauss` is 0).
    """

    RAW_BYTES = 624 * 4 + 4

    def __init__(self) -> None:
        self._raw = b""
        self._state: dict[str, Any] = {}
        self._generator: Any = None
        self._memory: Any = None
        """The raw state in the memory of `_generator`; None if that is of another kind."""

    def capture(self) -> dict[str, Any]:
        generator: Any = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._find(generator)
        if self._memory is None:
            return dict(np.random.get_state(legacy=False))
        raw = bytes(self._memory)
        if raw != self._raw or self._state.get("has_gauss", 1):
            self._raw, self._state = raw, dict(np.random.get_state(legacy=False))
        return self._state

    def _find(self, generator: Any) -> None:
        self._generator, self._memory, self._raw = generator, None, b""
        if type(generator).__name__ == "MT19937":
            self._memory = (ctypes.c_char * self.RAW_BYTES).from_address(generator.ctypes.state_address)


_numpy = _Numpy()


def capture() -> dict[str, Any]:
    """All random states, as values that can be stored. Does not change any of them."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": _numpy.capture()}
    # `is_available()` takes longer than all of the above.
    if torch.cuda.is_initialized() and torch.cuda.is_available():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def derived(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Random states for a rank that has none in the ckpt: computed from those of another rank, but different."""
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
    """Restore all random states. States of devices that this process does not have are ignored."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
