"""Random generators of the script: torch, numpy, Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from migrator.state.adapters.base import Adapter
from migrator.state.adapters.containers import copied

_POSITIONS = {"MT19937": 624, "Philox": 4}
"""numpy generators that fill a buffer in advance, and the size of the buffer."""


def check_positions(state: Any) -> None:
    """`ValueError` if a numpy generator with this state would read outside of its buffer at the next draw.

    numpy checks everything else in a state, but not this position.
    """
    if isinstance(state, dict):
        name, inside = state.get("bit_generator"), state.get("state")
        position = inside.get("pos", state.get("buffer_pos")) if isinstance(inside, dict) else None
    elif isinstance(state, (tuple, list)) and len(state) >= 3:
        name, position = state[0], state[2]
    else:
        return
    most = _POSITIONS.get(name) if isinstance(name, str) else None
    if most is not None and not (type(position) is int and 0 <= position <= most):
        raise ValueError(f"the position in a state of {name} is not one of 0 to {most}")


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator of torch, numpy or Python. A wrong state raises here and not at a later draw."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
        if type(state[2]) not in (float, type(None)):
            # Otherwise the error would only come when a normal number is drawn.
            raise TypeError(f"the cached normal number is a {type(state[2]).__name__}, expected a float or None")
    else:
        check_positions(state)
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


class Generator(Adapter):
    """A random generator of the script: torch, numpy or Python."""

    kind = "generator"

    def capture(self) -> Any:
        if isinstance(self.target, torch.Generator):
            return self.target.get_state()
        if isinstance(self.target, random.Random):
            return self.target.getstate()
        if isinstance(self.target, np.random.Generator):
            return copied(self.target.bit_generator.state)
        return self.target.get_state(legacy=False)

    def live(self) -> Any:
        return None

    def restore(self, value: Any) -> None:
        set_state(self.target, value)
