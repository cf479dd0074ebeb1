"""When the next periodic save is due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from migrator.save import schedule as schedule_module
from migrator.save.schedule import FAILED_AGAIN_S, Schedule
from migrator.settings import Every

NOW_S = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands still until the test sets it."""
    found = SimpleNamespace(now_s=NOW_S)
    monkeypatch.setattr(schedule_module, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def test_steps_are_counted_and_not_timed() -> None:
    """Every third step, and the clock says nothing."""
    schedule = Schedule(Every(steps=3))

    assert [step for step in range(1, 8) if schedule.is_due_at(step)] == [3, 6]
    assert (schedule.is_time(), schedule.next_s) == (False, None)
    assert schedule.wait_s(has_trained=True) is None


def test_an_interval_begins_anew_behind_each_save(clock: SimpleNamespace) -> None:
    """It is time when the interval is over, and no step is due by its number."""
    schedule = Schedule(Every(seconds=600.0))
    assert not schedule.is_time()
    clock.now_s += 600
    assert schedule.is_time()
    assert not schedule.is_due_at(3)
    clock.now_s += 7
    schedule.begin_again()

    assert schedule.next_s == NOW_S + 600 + 7 + 600
    assert schedule.wait_s(has_trained=True) == 600
    assert schedule.wait_s(has_trained=False) == 1.0


@pytest.mark.parametrize(
    ("every", "again_s"),
    [
        (Every(steps=3), FAILED_AGAIN_S),
        (Every(seconds=600.0), FAILED_AGAIN_S),
        (Every(seconds=5.0), 5.0),
        (Every(), None),
    ],
)
def test_a_save_that_failed_is_tried_again_within_a_minute(every: Every, again_s: float | None) -> None:
    """Or after its own interval if that is shorter; never if no periodic saves are wanted."""
    schedule = Schedule(every)
    schedule.retry()

    assert schedule.next_s == (None if again_s is None else NOW_S + again_s)


def test_only_the_rank_that_keeps_time_has_a_next_time() -> None:
    """The others wait for its order, and count the steps by themselves."""
    schedule = Schedule(Every(seconds=0.0, steps=None), keeps_time=False)
    schedule.begin_again()
    schedule.retry()

    assert (schedule.is_time(), schedule.next_s) == (False, None)
    assert Schedule(Every(steps=2), keeps_time=False).is_due_at(4)
