"""What periodic saves cost the training loop, and a slower writing where that is too much.

A save takes disk and processor from a loop that goes on beside it. Between two safe points the loop usually takes so
many seconds; what it takes longer while a save works is what the save costs. If that is more than one percent of the
time, save after save, the next ones pause between their writes: a loop that reads its data from the same disk then
gets its turn. No pause is made while the loop waits at the gate, or when the pod must leave.

The price: such a save takes longer until it is durable, up to a quarter of the time from one save to the next.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable

from migrator.events import log

SHARE = 0.01
"""Maximum share of the time that periodic saves may cost."""
STRIKES = 2
"""So many saves in a row have to cost more, before anything is changed: a single one may be an accident."""
STRETCH_MAX = 8.0
"""The writing takes at most so many times as long."""
PAUSED_SHARE = 0.25
"""Maximum share of the time from one save to the next that is spent in pauses."""
INTERVALS = 16
"""So many intervals between safe points say what is usual."""
_TICK_S = 0.01
"""Seconds of one piece of a pause."""


class Pace:
    """How fast the periodic saves of one life write. Its times are of a clock that never goes back."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._usual_s: deque[float] = deque(maxlen=INTERVALS)
        self._stepped_s: float | None = None
        self._is_working = False
        self._has_worked = False
        """A save worked since the last safe point."""
        self._slowed_s = 0.0
        """How much longer than usual the loop took beside the last save."""
        self._began_s: float | None = None
        self._took_s = 0.0
        self._wrote_s = 0.0
        """When the last write ended."""
        self._left_s = 0.0
        """What is left of the time for pauses in this save."""
        self._strikes = 0
        self.stretch = 1.0
        """How many times as long as it could the writing takes."""

    def at_step(self) -> None:
        """The loop has reached a safe point."""
        now_s = self._clock()
        if self._stepped_s is not None:
            interval_s = now_s - self._stepped_s
            if not (self._is_working or self._has_worked):
                self._usual_s.append(interval_s)
            elif self._usual_s:
                self._slowed_s += max(0.0, interval_s - statistics.median(self._usual_s))
        self._stepped_s, self._has_worked = now_s, self._is_working

    def begin(self, *, counts: bool) -> None:
        """A save begins beside the loop. `counts`: the loop does not wait for it on purpose."""
        now_s = self._clock()
        self._left_s = 0.0
        if self._began_s is not None:
            self._judge(now_s - self._began_s)
            self._left_s = PAUSED_SHARE * (now_s - self._began_s)
        self._began_s = now_s if counts else None
        self._wrote_s, self._slowed_s = now_s, 0.0
        self._is_working = self._has_worked = True

    def end(self) -> None:
        """The save is over. What it cost shows at the next safe point."""
        self._is_working = False
        self._took_s = 0.0 if self._began_s is None else self._clock() - self._began_s

    def pause(self, is_urgent: Callable[[], bool]) -> None:
        """Between two writes."""
        now_s = self._clock()
        pause_s = min((self.stretch - 1) * (now_s - self._wrote_s), self._left_s)
        end_s = now_s + pause_s
        while now_s < end_s and not is_urgent():
            self._sleep(min(_TICK_S, end_s - now_s))
            now_s = self._clock()
        self._left_s -= max(0.0, now_s - (end_s - pause_s))
        self._wrote_s = now_s

    def _judge(self, passed_s: float) -> None:
        # An evaluation beside a save takes long as well. No save costs more than the time that it takes.
        share = min(self._slowed_s, self._took_s) / max(passed_s, 1e-6)
        self._strikes = self._strikes + 1 if share > SHARE else 0
        if self._strikes < STRIKES or self.stretch >= STRETCH_MAX:
            return
        self._strikes = 0
        self.stretch *= 2
        log(
            "save_slows_steps",
            level=logging.WARNING,
            share_percent=100 * share,
            means="periodic saves cost the loop more than 1 % of its time, so they write more slowly from now on; "
            "a longer MIGRATOR_EVERY costs less",
        )
