"""A job of one process: who may still ask for a save."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.save.pace import Pace
from migrator.save.solo import Solo


@pytest.mark.parametrize(
    ("is_closed", "notice", "why"),
    [
        (False, object(), "the process is leaving: no further save is made"),
        (True, object(), "the process is leaving: no further save is made"),
        (True, None, "its script has ended: no further save is made"),
    ],
)
def test_a_save_that_is_asked_for_too_late_is_refused_at_once(is_closed: bool, notice: Any, why: str) -> None:
    """The last save answers those who asked before it began; a later ticket would be answered by nobody."""
    solo: Any = object.__new__(Solo)
    solo.__dict__.update(_cond=threading.Condition(), _is_closed=is_closed, _leaving=SimpleNamespace(notice=notice))

    ticket = solo.ask()

    assert ticket.done.is_set()
    assert str(ticket.error) == why


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("who", [None, "_tickets", "_is_closed", "is_closed", "loop_waits", "leaving"])
def test_a_save_that_somebody_waits_for_does_not_pause(asked: bool, who: str | None) -> None:
    """Who asked for it, or for the next one; the script at its end; `save_ckpt()`; a pod that must leave."""
    gate = SimpleNamespace(is_closed=who == "is_closed", loop_waits=who == "loop_waits", has_trained=True)
    gate.announce = gate.open = gate.unpin = lambda *_: None
    gate.take = lambda *_, **__: SimpleNamespace(step=1)
    urgent: list[bool] = []

    def make(capture: Any, *, is_leaving: bool, is_urgent: Any) -> Any:
        urgent.append(is_urgent())
        return SimpleNamespace(run=lambda: SimpleNamespace(step=1))

    pace = Pace()
    solo: Any = object.__new__(Solo)
    solo.__dict__.update(
        _gate=gate,
        _cond=threading.Condition(),
        _taken=[object()] if asked else [],
        _tickets=[object()] if who == "_tickets" else [],
        _is_closed=who == "_is_closed",
        _least_step=0,
        _ckpts=SimpleNamespace(of_step=lambda step: None),
        _attempts=SimpleNamespace(make=make, pace=pace),
    )
    if who == "leaving":
        solo.save_last(None)
    else:
        solo.save()
        assert pace._is_judged is False, "it was saved"
        assert (pace._began_s is None) is asked
    assert urgent == [asked or who is not None]
