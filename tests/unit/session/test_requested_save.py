"""While the main thread waits for a save, nothing is copied for it; and only then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.errors import SaveFailed
from migrator.loop.gate import Phase
from migrator.save.results import Saved
from migrator.save.tickets import Ticket
from migrator.session.requested_save import RequestedSave

SAVED = Saved("000001-000000000001", 1, 10, 0.1)


def requested(on_ask: Callable[[Any, Ticket], None]) -> tuple[RequestedSave, Any]:
    gate = SimpleNamespace(phase=Phase.CLEAN, loop_waits=False, is_unsavable=False)

    def ask() -> Ticket:
        ticket = Ticket()
        on_ask(gate, ticket)
        return ticket

    safe_points: Any = SimpleNamespace(raise_postponed=lambda: None, why_not_whole=lambda: None)
    saver: Any = SimpleNamespace(newest=None, ask=ask)
    leaving: Any = SimpleNamespace(may_leave=lambda: False, notice=None)
    return RequestedSave(gate, safe_points, saver, leaving=leaving, departure=None), gate  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [True, False])
def test_the_loop_waits_only_in_the_call(wait: bool) -> None:
    seen: list[bool] = []

    def on_ask(gate: Any, ticket: Ticket) -> None:
        seen.append(gate.loop_waits)
        ticket.answer(SAVED, None)

    save, gate = requested(on_ask)
    assert save.save(wait=wait) == (SAVED.ckpt if wait else None)
    assert seen == [wait]
    assert not gate.loop_waits


def test_after_an_error_the_loop_waits_no_more() -> None:
    """The next save may have to copy for it."""
    save, gate = requested(lambda gate, ticket: ticket.answer(None, ValueError("a disk that fails")))
    with pytest.raises(SaveFailed, match="a disk that fails"):
        save.save(wait=True)
    assert not gate.loop_waits


def test_another_thread_that_asks_says_nothing_of_the_loop() -> None:
    """Neither that it waits nor that it does not."""
    seen: list[bool] = []

    def on_ask(gate: Any, ticket: Ticket) -> None:
        seen.append(gate.loop_waits)
        ticket.answer(SAVED, None)

    save, gate = requested(on_ask)
    for waits in (False, True):
        gate.loop_waits = waits
        thread = threading.Thread(target=save.save, kwargs={"wait": True})
        thread.start()
        thread.join(10)
        assert gate.loop_waits is waits
    assert seen == [False, True]
