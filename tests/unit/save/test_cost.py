"""What saves cost the loop, and the line that says so."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from migrator.loop.gate import Gate
from migrator.save.cost import Cost


class Life:
    """Saves at intervals, and a loop that stands for some of the time."""

    def __init__(self, *, warns: bool = True) -> None:
        self._now_s = 100.0
        self._gate: Any = SimpleNamespace(stood_s=7.0)  # an earlier wait is no cost of these saves
        self._cost = Cost(self._gate, warns=warns, clock=lambda: self._now_s)

    def saves(self, *stood_s: float, every_s: float = 60.0) -> None:
        for one_s in stood_s:
            self._cost.begin()
            self._gate.stood_s += one_s
            self._now_s += every_s
        self._cost.begin()


def warnings(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [vars(record) for record in caplog.records]
    return [one["migrator_fields"] for one in found if one["migrator_event"] == "saves_slow_training"]


def test_saves_that_cost_more_than_a_percent(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the interval at which they would cost less."""
    life = Life()
    life.saves(1.0, 1.0, 1.0)
    (fields,) = warnings(caplog)
    assert fields["share_percent"] == pytest.approx(100 / 60)
    assert fields["stood_s"] == pytest.approx(1.0)
    assert "one in 100 s at most" in fields["means"]
    life.saves(1.0, 1.0, 1.0)
    assert len(warnings(caplog)) == 1


def test_saves_at_the_interval_that_it_names_cost_less(caplog: pytest.LogCaptureFixture) -> None:
    Life().saves(1.0, 1.0, 1.0, 1.0, 1.0, every_s=101.0)
    assert not warnings(caplog)


def test_a_slow_moment_is_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Two in a row are not three."""
    Life().saves(0.9, 0.9, 0.1, 0.9, 0.9)
    assert not warnings(caplog)


def test_short_waits_are_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A tiny model that is saved at every tenth step loses a percent, and nobody minds."""
    Life().saves(0.05, 0.05, 0.05, 0.05, every_s=0.5)
    assert not warnings(caplog)


def test_one_rank_says_it(caplog: pytest.LogCaptureFixture) -> None:
    Life(warns=False).saves(0.9, 0.9, 0.9, 0.9)
    assert not warnings(caplog)


def test_the_gate_counts_how_long_a_step_waited() -> None:
    """From another thread it is opened after a while; until then the loop stands."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    capturer: Any = SimpleNamespace(changed=lambda capture: [], release=lambda capture: None)
    gate = Gate(capturer)
    gate.install()
    try:
        optimizer.step()
        capture: Any = SimpleNamespace(
            step=1, turn=0, at=(1, 0), place="", pins=0, spoiled=False, missing=(), changed=[], is_full=True
        )
        gate.publish(capture)
        assert gate.stood_s == 0
        assert gate.take(0.0) is capture
        waits = threading.Event()

        def let_go() -> None:
            while not gate.someone_waits:
                waits.wait(0.001)
            gate.open()

        thread = threading.Thread(target=let_go)
        thread.start()
        optimizer.step()
        thread.join()
        assert gate.stood_s > 0
    finally:
        gate.remove()
