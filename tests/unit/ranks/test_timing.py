"""How long ranks wait for one another, and how often they ask."""

from __future__ import annotations

import pytest

from migrator.ranks.timing import Timing


@pytest.mark.parametrize("size", [2, 64, 1024, 4096])
def test_what_all_ranks_ask_of_the_store_is_bounded(size: int) -> None:
    timing = Timing(size)

    assert size / timing.idle_look_s <= 200
    assert size / timing.busy_look_s(leads=False) <= 2000 or size < 30
    assert size / timing.beat_s <= 1000
    assert timing.stale_s >= 8 * timing.beat_s
    assert 0.1 <= timing.ahead_s(0) <= 5


@pytest.mark.parametrize("grace_s", [5.0, 30.0, 600.0])
def test_the_waits_of_a_leave_fit_into_its_grace(grace_s: float) -> None:
    """Reports, the way to the target, others' states: behind all of them there is time to save alone."""
    timing = Timing(1024, round_trip_s=0.05)
    left_s = grace_s - timing.window_end_s(grace_s)
    left_s -= timing.patience_s(left_s, all_alive=False)
    left_s -= timing.states_s(left_s)

    assert timing.window_s(grace_s) <= timing.window_end_s(grace_s)
    assert left_s >= 0.3 * grace_s
