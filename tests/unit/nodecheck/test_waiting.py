"""A call that never ends is abandoned at its deadline, and an exception comes through."""

from __future__ import annotations

import threading

import pytest

from migrator.nodecheck.waiting import StillRunning, Waiter


def test_a_result_and_an_exception_come_through() -> None:
    """As if the call had been made here."""
    waiter = Waiter()

    assert waiter.within(5, "add", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        waiter.within(5, "divide", lambda: 1 // 0)
    assert not waiter.has_abandoned


def test_a_call_that_hangs_is_abandoned() -> None:
    """At its deadline, with what it was; and it is remembered that the thread is still there."""
    waiter, end = Waiter(), threading.Event()

    with pytest.raises(StillRunning, match=r"read the disk: no end within 0\.2 s"):
        waiter.within(0.2, "read the disk", end.wait)

    assert waiter.has_abandoned
    end.set()
