"""Who waits for a save."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from migrator.save.results import Saved


@dataclass
class Ticket:
    """One caller's wait for one save."""

    done: threading.Event = field(default_factory=threading.Event)
    saved: Saved | None = None
    error: Exception | None = None

    def answer(self, saved: Saved | None, error: Exception | None) -> None:
        self.saved, self.error = saved, error
        self.done.set()


def answer_all(tickets: Iterable[Ticket], saved: Saved | None, error: Exception | None) -> None:
    for ticket in tickets:
        ticket.answer(saved, error)
