"""The random states of this process: torch, its devices, Python, numpy.

They are captured at every safe point, so the capture must be fast. numpy's takes longer than all others together. It
is captured all the same: a second normal number that waits to be drawn shows in nothing else.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import xxhash


def is_generator(value: object) -> bool:
    """Whether it is a random generator. A function, because numpy imports `numpy.random` at the first access."""
    return isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


def capture() -> dict[str, Any]:
    """All random states, as values that can be stored. Does not change any of them."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": dict(np.random.get_state(legacy=False)),
    }
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
