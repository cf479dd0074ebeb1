"""Another thread of the script may change what is registered: that ends no training."""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from migrator.state.adapters.containers import copied
from migrator.state.capture import Capturer
from tests.unit.state.test_adapters import registered


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("make", [dict, OrderedDict, list, deque, set], ids=lambda make: make.__name__)
def test_a_thread_may_add_to_what_is_registered(make: Any) -> None:
    """A background thread that counts, into a dict that holds lists: each copy is one of some moment."""
    things = make()
    is_over = threading.Event()

    def add() -> None:
        number = 0
        while not is_over.is_set():
            for number in range(number, number + 200):  # noqa: B020 - goes on where it was
                if isinstance(things, dict):
                    things[number] = [number]
                elif isinstance(things, set):
                    things.add((number,))
                else:
                    things.append([number])
            things.clear()

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(1000):
            copied({"inner": things, "more": [{}]})
    finally:
        is_over.set()
        thread.join()


class Busy:
    """Its state is walked through by Python code while somebody changes it, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def state_dict(self) -> dict[str, int]:
        if self.times:
            self.times -= 1
            numbers = {1: 1}
            for number in numbers:
                numbers[number + 1] = 1
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.times = state["times"]


def test_what_fails_now_and_then_is_copied_again(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has to know."""
    busy = Busy(0)
    capturer = Capturer(registered(busy=busy))
    busy.times = 5
    assert not capturer.take(1, None, full=True).missing
    assert not caplog.records


def test_what_always_fails_is_named_once_and_tried_at_the_next_safe_point(caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on; such a safe point cannot be saved."""
    busy = Busy(0)
    capturer = Capturer(registered(busy=busy, metrics={"x": 1}))
    busy.times = 1_000
    with caplog.at_level(logging.WARNING):
        captures = [capturer.take(step, None, full=step > 1) for step in range(4)]

    assert [capture.missing for capture in captures] == [{"busy"}] * 4
    assert captures[0].values.keys() == {"metrics"}
    assert capturer.restless == {"busy"}
    (record,) = caplog.records
    assert "changed_while_copied object=busy" in record.getMessage()
    busy.times = 0
    assert not capturer.take(4, None, full=True).missing
    assert not capturer.restless


def test_an_error_of_another_kind_is_the_scripts_own() -> None:
    """It is not tried again."""
    busy = Busy(0)
    capturer = Capturer(registered(busy=busy))
    busy.state_dict = lambda: {}[1]  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        capturer.take(1, None, full=True)
