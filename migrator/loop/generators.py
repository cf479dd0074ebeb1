"""The states of random generators: read, compared, put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from migrator.state.adapters import random_generators


def state_of(generator: Any) -> Any:
    """The state of one generator, of whichever library."""
    return random_generators.Generator(generator).capture()


def restore_generators(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put registered generators back, by name. Those that the ckpt does not know are left as they are."""
    for name, generator in generators.items():
        if name in states:
            random_generators.set_state(generator, states[name])


def are_equal(one: Any, other: Any) -> bool:
    """Whether two states of the same generator are the same."""
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(are_equal(one[key], other.get(key)) for key in one)
    if isinstance(one, (list, tuple)) and len(one) < 16:
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, (Tensor, np.ndarray)):
        return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    return bool(one == other)
