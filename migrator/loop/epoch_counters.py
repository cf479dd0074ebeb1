"""Numbers that scripts keep in local variables and would lose at a resume: the epoch, and sums over an epoch.

An epoch counter is a part of the loop's state, so it needs no `register()`. A meter
is an object like any other that is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from migrator.errors import UsageError


class Meter:
    """A sum and a count that are part of every ckpt: `migrator.meter("loss")` makes one.

    There is no `reset()`, because at the beginning of an epoch it would throw away what was just loaded. Call
    `take()` at the end of an epoch: it returns the mean and begins anew.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | torch.Tensor, count: int = 1) -> None:
        """Add the mean of `count` samples. A tensor on a device is waited for, as `item()` does."""
        number = float(value.item() if isinstance(value, torch.Tensor) else value)
        self._sum += number * count
        self._count += count

    @property
    def sum(self) -> float:
        """Of all that was added since the last `take()`."""
        return self._sum

    @property
    def count(self) -> int:
        """How many samples were added since the last `take()`."""
        return self._count

    @property
    def mean(self) -> float:
        """The sum divided by the count; nan if nothing was added."""
        return self._sum / self._count if self._count else float("nan")

    def take(self) -> float:
        """Return the mean and begin anew."""
        mean = self.mean
        self._sum, self._count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """The sum and the count."""
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._sum, self._count = float(state["sum"]), int(state["count"])


@dataclass
class Count:
    """Where one loop over epochs stands."""

    epoch: int
    is_over: bool = False
    """The loop was left and the script went on to another one: it wants no further epoch of this one."""
    is_live: bool = False


class EpochCounters:
    """All `migrator.epochs()` of a session, by name."""

    def __init__(self) -> None:
        self._noted: dict[str, Count] = {}
        self._loaded: dict[str, Count] | None = None
        self._begun: set[str] = set()

    def state(self) -> dict[str, Any]:
        """Part of every capture."""
        return {name: {"epoch": count.epoch, "is_over": count.is_over} for name, count in self._noted.items()}

    @property
    def now(self) -> tuple[tuple[str, int], ...] | None:
        """The epochs that are under way; None if there is none."""
        return tuple((name, count.epoch) for name, count in self._noted.items() if count.is_live) or None

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state()` in a ckpt; it is empty if the ckpt has none."""
        self._loaded = {name: Count(found["epoch"], found["is_over"]) for name, found in state.items()}
        self._noted = dict(self._loaded)

    def begin(self, name: str, start: int | None, *, is_stopped: bool) -> Count:
        """A loop over epochs begins; returns the epoch it begins with."""
        if name in self._begun:
            raise UsageError(
                f"epochs(..., name={name!r}): there was a loop of this name in this life already, and a resume could "
                'not tell them apart. Give each a name of its own: migrator.epochs(5, name="finetune").'
            )
        if self._loaded is not None and not self._loaded and start is None:
            raise UsageError(
                "epochs(...): the ckpt that was loaded does not say in which epoch it was made: the script did not "
                "count its epochs by migrator.epochs(), or had not come to it. Say where to begin if the ckpt does "
                "not: migrator.epochs(10, start=sampler.epoch)."
            )
        for other in self._begun:
            # It does not matter how it was left (by `break`, by an exception that was caught): the script has gone
            # on. But a script that stops because of a notice still wants the other epochs in its next life.
            self._noted[other].is_over |= not (self._noted[other].is_live or is_stopped)
        self._begun.add(name)
        # Without a ckpt the first epoch is 0.
        first = start if self._loaded is not None and not self._loaded else None
        return self._noted.setdefault(name, Count(first or 0))


def run(count: Count, total: int, on_next: Callable[[], None]) -> Iterator[int]:
    """The numbers of the epochs that are left."""
    count.is_live = True
    try:
        while count.epoch < total and not count.is_over:
            yield count.epoch
            count.epoch += 1
            on_next()
    finally:
        count.is_live = False
