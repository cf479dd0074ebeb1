"""How long ranks wait for one another and how often they look, with the reasons.

Some limits that are right for two ranks are wrong for a thousand, and some that are right for a grace of ten minutes
are wrong for ten seconds. These limits are computed from the number of ranks, the time left, and the measured round
trip to the store.

A late rank is not lost. A rank counts as lost if its beat has not changed for `stale_s` while the store answered; and
even then nothing final is decided before the time limits below are over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HUNG_S = 2.0
"""Maximum time, in seconds, to wait for an answer of the store if no deadline is known."""
GONE_S = 60.0
"""Maximum time, in seconds, to wait in `listening()` and `load_ckpt()` for a rank without a beat, which may be
importing or compiling. Also the maximum time to wait for the store there."""
STALL_S = 60.0
"""Minimum time, in seconds, without progress on any rank after which a periodic save is given up, though all ranks are
alive."""
STORE_GONE_S = 2.0
"""Maximum time, in seconds, that a rank waits for what other ranks were about to write if the store is gone."""
LOOK_S = 0.015
"""Maximum time, in seconds, of one wait of a save for a new line, for the gate or for an answer of the store."""
ATTEMPTS = 5
"""How often a periodic save that a rank missed is ordered again at once. After that it waits for its next regular
time."""


@dataclass
class Timing:
    """The time limits of one rank in a job of `size` ranks."""

    size: int
    round_trip_s: float = 0.0
    """The round trip of a call to the store, in seconds: the longest recent one."""

    # Looking for new lines, and sending beats.

    @property
    def idle_look_s(self) -> float:
        """Time between two looks without a ring, which is lost if the rank that should ring dies. 200 looks a second in
        all."""
        return max(1.0, self.size / 200)

    def busy_look_s(self, *, leads: bool) -> float:
        """Time between two looks of a busy rank. Ranks that collect reports look often; the others have the bell, and
        look at most 2,000 times a second in all."""
        return 0.015 if leads else max(0.015, self.size / 2000)

    @property
    def beat_s(self) -> float:
        """Time between two beats of a busy rank: at most 1,000 beats a second in all."""
        return max(0.25, self.size / 1000)

    # When a rank or the store counts as lost.

    @property
    def stale_s(self) -> float:
        """Time without a new beat after which a rank counts as lost. Eight beats, and an allowance for a slow store."""
        return max(3.0, 8 * self.beat_s) + 10 * self.round_trip_s

    def hung_s(self, left_s: float | None) -> float:
        """Maximum time to wait for a call to the store: a quarter of the time left. Not less, because a rank that gives
        up the store saves alone, and this is final."""
        return HUNG_S if left_s is None else max(HUNG_S, 0.25 * left_s)

    # Leaving.

    def window_s(self, grace_s: float) -> float:
        """Time in which reports are collected before any rank checks which ranks are alive."""
        return min(2.0 + 10 * self.round_trip_s, 0.1 * grace_s)

    def window_end_s(self, grace_s: float) -> float:
        """Maximum time from the notice to the decision. Ranks that have not reported by then are not waited for."""
        return max(self.window_s(grace_s), 0.2 * grace_s)

    @property
    def agree_s(self) -> float:
        """Time to plan for between a notice and the decision, for who chooses a grace: as long as reports may be
        collected at most, and 2.3 s for 1,024 ranks (measured; less for fewer)."""
        return 0.0 if self.size == 1 else self.window_s(math.inf) + 2.3 * self.size / 1024

    def patience_s(self, left_s: float, *, all_alive: bool) -> float:
        """Maximum time, from the decision, in which a rank below the target tries to reach it. The rest must be enough
        to save alone. It is short if a rank is lost, because this rank may then hang in a collective with it; if none
        is lost this rank is only slow."""
        return (0.6 if all_alive else 0.25) * max(0.0, left_s)

    def states_s(self, left_s: float) -> float:
        """Maximum time to wait for the own state of other ranks, if they are alive."""
        return 0.4 * max(0.0, left_s)

    def stand_in_s(self, position: int) -> float:
        """How much later than the first rank this rank does a job that one rank does for all, if no earlier rank has
        done it."""
        return 0.0 if position == 0 else 0.3 + 0.05 * position + 10 * self.round_trip_s

    # Going on.

    def ahead_s(self, misses: int) -> float:
        """Lead time of a scheduled save of all ranks. It doubles each time that a rank learns of the order too late."""
        return (0.4 + self.size / 1000 + 10 * self.round_trip_s) * float(2**misses)

    def stall_s(self, own_s: float) -> float:
        """Time without progress after which a periodic save is given up. `own_s`: how long this rank's own share
        took."""
        return max(STALL_S, 5 * own_s)

    def look_on_storage_s(self, *, leads: bool) -> float:
        """Time between two looks on storage for what other ranks have written: at most 500 looks a second in all."""
        return 0.02 if leads else max(0.02, self.size / 500)
