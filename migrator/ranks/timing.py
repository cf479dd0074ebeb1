"""How long ranks wait for one another, and how often they look, with the reasons.

What would be right for two ranks and wrong for a thousand, or right for a grace of ten minutes and wrong for one of ten
seconds, follows from the number of ranks, the time left, and the round trip to the store as it was measured.

Whoever is late is not lost. Lost is who shows no sign of life for `stale_s`, read while the store answered; and even
then nothing is decided for good before the times below are over.
"""

from __future__ import annotations

from dataclasses import dataclass

HUNG_S = 2.0
"""No answer of the store for so long is none, where nobody knows how much time there is."""
GONE_S = 60.0
"""In `listening()` and `load_ckpt()` a rank that does not beat is given so long: it may be importing, or compiling. And
so long the store, where nobody has to leave."""
STALL_S = 60.0
"""A save that is not the last one is given up when no rank has written anything for so long, though all are alive."""
ATTEMPTS = 5
"""A periodic save that a rank missed is ordered again at once, so often; then at its next time."""


@dataclass
class Pace:
    """Of one rank among `size`."""

    size: int
    round_trip_s: float = 0.0
    """The longest of the last calls to the store."""

    # Looking, and showing that one is there.

    @property
    def idle_look_s(self) -> float:
        """Without a ring: it may be lost with who was about to ring. 200 looks a second in all."""
        return max(1.0, self.size / 200)

    def busy_look_s(self, *, leads: bool) -> float:
        """Who collects what others say looks often. The others are rung for: 2,000 looks a second in all."""
        return 0.015 if leads else max(0.015, self.size / 2000)

    @property
    def beat_s(self) -> float:
        """So often a busy rank shows that it is alive: 1,000 beats a second in all."""
        return max(0.25, self.size / 1000)

    # Whom to take for lost.

    @property
    def stale_s(self) -> float:
        """No beat for so long: the process froze, died or was cut off. Eight beats, and what a slow store adds."""
        return max(3.0, 8 * self.beat_s) + 10 * self.round_trip_s

    def hung_s(self, left_s: float | None) -> float:
        """A call to the store that takes longer is not waited for any more: a quarter of the time left, since what a
        rank does without the store, it does alone and for good."""
        return HUNG_S if left_s is None else max(HUNG_S, 0.25 * left_s)

    # Leaving.

    def window_s(self, grace_s: float) -> float:
        """All who report within this are members, without a look at who is alive."""
        return min(2.0 + 10 * self.round_trip_s, 0.1 * grace_s)

    def window_end_s(self, grace_s: float) -> float:
        """Nobody is waited for longer before a step is decided on, however alive."""
        return max(self.window_s(grace_s), 0.2 * grace_s)

    def patience_s(self, left_s: float, *, all_alive: bool) -> float:
        """From the decision: so long a rank that is below the target tries to come there. What is left has to do for a
        save alone. Where a rank is lost it may hang in their last collective; where none is it is only slow."""
        return (0.6 if all_alive else 0.25) * max(0.0, left_s)

    def states_s(self, left_s: float) -> float:
        """So long what is other ranks' own is waited for, if they are alive."""
        return 0.4 * max(0.0, left_s)

    def stand_in_s(self, position: int) -> float:
        """So much later than the first does a rank do what one has to do for all: the one before it comes first."""
        return 0.0 if position == 0 else 0.3 + 0.05 * position + 10 * self.round_trip_s

    # Going on.

    def ahead_s(self, misses: int) -> float:
        """A save of all ranks is ordered so long before its step; longer each time that one of them heard too late."""
        return (0.4 + self.size / 1000 + 10 * self.round_trip_s) * float(2**misses)

    def stall_s(self, own_s: float) -> float:
        """`own_s`: what this rank needed for its own share."""
        return max(STALL_S, 5 * own_s)

    def look_on_storage_s(self, *, leads: bool) -> float:
        """So often storage is asked what others have written: 500 looks a second in all."""
        return 0.02 if leads else max(0.02, self.size / 500)
