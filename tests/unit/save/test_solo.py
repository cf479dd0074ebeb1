"""A job of one process: who may still ask for a save."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

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
