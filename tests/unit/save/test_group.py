"""Saves that all ranks make while training goes on, seen from one rank."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.ranks.timing import ATTEMPTS, Timing
from migrator.save.group.group import Group
from migrator.save.results import Missed
from migrator.save.schedule import Schedule
from migrator.settings import Every


def test_a_save_that_is_missed_again_and_again_is_tried_again_at_its_next_time() -> None:
    """Each try is announced earlier; after some the next interval is waited for; and so on."""
    group: Any = object.__new__(Group)
    orders: list[tuple[int, int]] = []
    clock = time.monotonic()

    def missed(target: Any) -> None:
        raise Missed("rank 1: it has gone on already")

    group.__dict__.update(
        _ranks=SimpleNamespace(rank=0, timing=Timing(2)),
        _schedule=Schedule(Every(seconds=600.0)),
        _target=(1000, 0),
        _take=missed,
        _misses=0,
        _speed_since=(clock - 10.0, 0),
        _gate=SimpleNamespace(is_closed=False, at=(1000, 0)),
        _order=orders.append,
    )
    ordered = []
    for _ in range(2 * ATTEMPTS + 3):
        before = len(orders)
        with pytest.raises(Missed):
            group.save()
        ordered.append(len(orders) > before)

    assert ordered == [True] * ATTEMPTS + [False] + [True] * ATTEMPTS + [False] + [True]
    assert group._schedule.next_s == pytest.approx(clock + 600, abs=5)
    ahead = [step - 1000 for step, _ in orders[:ATTEMPTS]]
    assert all(later >= 1.8 * earlier for earlier, later in itertools.pairwise(ahead)), ahead
