"""What periodic saves cost the training loop, and pauses between their writes where that is too much.

A save takes disk and processors from a loop that goes on beside it. What the loop takes longer than usual, from one
safe point to the next, is the cost of that save. If several saves in a row cost more than one percent of the time, the
next ones pause between their writes, so that a loop which reads its data from the same disk gets its turn. If saves
have cost next to nothing for a while, the pauses get shorter again.

Only saves that nobody waits for pause, and only when all that is left to write was copied: before, a pause would be one
of the loop at the gate. So intervals in which the loop came to the gate are left out as well, and those that are
several times as long as usual, of an evaluation for example.

The price: such a save takes longer until it is durable, up to a quarter of the time from one save to the next.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from migrator.events import log

SHARE = 0.01
"""Maximum share of the time that periodic saves may cost."""
STRIKES = 3
"""So many saves in a row have to cost more, before anything is changed: one or two may be an accident."""
CHEAP = 16
"""After so many saves in a row that cost less than a quarter of it, the pauses get shorter."""
STRETCH_MAX = 8.0
"""The writing takes at most so many times as long."""
PAUSED_SHARE = 0.25
"""Maximum share of the time from one save to the next that is spent in pauses."""
PAUSED_MAX_S = 60.0
"""Maximum time in seconds of all pauses of a save."""
PAUSE_MAX_S = 0.5
"""Maximum time in seconds of one pause."""
INTERVALS = 64
"""So many intervals between safe points say what is usual."""
_OTHERS = 4.0
"""An interval that is so many times as long as usual is none of training alone."""
_TICK_S = 0.01
"""Seconds of one piece of a pause."""


class Pace:
    """How fast the periodic saves of one life write."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._usual_s: deque[float] = deque(maxlen=INTERVALS)
        """Intervals between safe points, while no save worked."""
        self._beside_s: list[float] = []
        """Those during which the save worked from their begin on."""
        self._stepped_s: float | None = None
        self._is_working = False
        self._worked_before = False
        """A save worked at the last safe point."""
        self._began_s: float | None = None
        """When the last save began that counts."""
        self._is_judged = True
        self._wrote_s: float | None = None
        """When the last write ended, in this attempt."""
        self._left_s = 0.0
        """What is left of the time for pauses in this save."""
        self._strikes = self._cheap = 0
        self.stretch = 1.0
        """How many times as long as it could the writing takes."""
        self.paused_s = 0.0
        """What the last save spent in pauses."""

    def at_step(self) -> None:
        """The training thread has reached a safe point."""
        with self._lock:
            now_s = self._clock()
            if self._stepped_s is not None:
                if self._worked_before:
                    self._beside_s.append(now_s - self._stepped_s)
                elif not self._is_working:
                    self._usual_s.append(now_s - self._stepped_s)
            self._stepped_s, self._worked_before = now_s, self._is_working

    def begin(self, *, is_waited_for: bool) -> None:
        """A save begins beside the loop."""
        with self._lock:
            now_s = self._clock()
            self._left_s = self.paused_s = 0.0
            if self._began_s is not None:
                passed_s = now_s - self._began_s
                self._judge(passed_s)
                self._left_s = 0.0 if is_waited_for else min(PAUSED_SHARE * passed_s, PAUSED_MAX_S)
            self._began_s = None if is_waited_for else now_s
            self._is_judged = True
            self._beside_s = []
            self._is_working = True

    def attempt(self) -> None:
        """Its writing begins, perhaps anew."""
        self._wrote_s = None

    def end(self, *, is_saved: bool) -> None:
        """It is over. What it cost shows at the next safe point."""
        with self._lock:
            self._is_working = False
            self._is_judged = not is_saved

    def pause(self, is_urgent: Callable[[], bool]) -> None:
        """Between two writes."""
        begin_s = now_s = self._clock()
        if self._wrote_s is not None:
            pause_s = min((self.stretch - 1) * (begin_s - self._wrote_s), self._left_s, PAUSE_MAX_S)
            while now_s < begin_s + pause_s and not is_urgent():
                self._sleep(min(_TICK_S, begin_s + pause_s - now_s))
                now_s = self._clock()
            self._left_s -= now_s - begin_s
            self.paused_s += now_s - begin_s
        self._wrote_s = now_s

    def _judge(self, passed_s: float) -> None:
        if self._is_judged or not self._usual_s:
            return
        usual_s = statistics.fmean(self._usual_s)
        counted = [interval_s for interval_s in self._beside_s if interval_s < _OTHERS * usual_s]
        share = (sum(counted) - len(counted) * usual_s) / max(passed_s, 1e-6)
        self._strikes = self._strikes + 1 if share > SHARE else 0
        self._cheap = self._cheap + 1 if share < SHARE / 4 else 0
        if self._cheap >= CHEAP:
            self._cheap, self.stretch = 0, max(1.0, self.stretch / 2)
        if self._strikes < STRIKES or self.stretch >= STRETCH_MAX:
            return
        self._strikes, self.stretch = 0, 2 * self.stretch
        log(
            "save_slows_steps",
            level=logging.WARNING,
            share_percent=100 * share,
            means="periodic saves cost the loop more than 1 % of its time, so they pause between their writes from now "
            "on; a longer MIGRATOR_EVERY costs less",
        )
