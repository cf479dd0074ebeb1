"""When the next periodic save is due: every N steps or every N seconds, and again after a failure."""

from __future__ import annotations

import time

from migrator.settings import Every

FAILED_AGAIN_S = 60.0
"""Maximum time in seconds until a periodic save that failed is tried again; a shorter interval counts instead."""
_MIN_WAIT_S = 0.05
"""Minimum time in seconds between two looks at the clock, also when a save is overdue."""
_UNTRAINED_WAIT_S = 1.0
"""How often in seconds a thread that waits for the first training step looks whether it was made."""


class Schedule:
    """The clock of periodic saves. Of several ranks only rank 0 keeps time: no two clocks are the same."""

    def __init__(self, every: Every, *, keeps_time: bool = True) -> None:
        self._every = every
        self._keeps_time = keeps_time
        self.next_s: float | None = None
        """When the next save is due by the clock; None: never."""
        self.begin_again()

    @property
    def has_interval(self) -> bool:
        return self._every.seconds is not None

    @property
    def is_on(self) -> bool:
        """Periodic saves are wanted, on this rank or on all."""
        return self._every != Every()

    def is_due_at(self, step: int) -> bool:
        """The safe point of this step is one that has to be saved."""
        return self._every.steps is not None and step % self._every.steps == 0

    def is_time(self) -> bool:
        return self.next_s is not None and time.monotonic() >= self.next_s

    def begin_again(self) -> None:
        """The interval is counted from now on."""
        if self._keeps_time:
            self.next_s = None if self._every.seconds is None else time.monotonic() + self._every.seconds

    def retry(self) -> None:
        """A save failed: try again before the interval is over, unless no periodic saves are wanted."""
        if self._keeps_time and self.is_on:
            again_s = time.monotonic() + FAILED_AGAIN_S
            self.next_s = again_s if self.next_s is None else min(self.next_s, again_s)

    def wait_s(self, *, has_trained: bool) -> float | None:
        """Maximum time in seconds until the clock has to be looked at again; None: it need not."""
        if self.next_s is None:
            return None
        return max(_MIN_WAIT_S, self.next_s - time.monotonic()) if has_trained else _UNTRAINED_WAIT_S
