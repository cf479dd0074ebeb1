"""Registered objects that were seen changing outside of an optimizer step."""

from __future__ import annotations

import logging

from migrator.events import log
from migrator.loop.gate import Gate

_LIMIT = 2
"""How often an object may change outside of a step before it is saved only while the loop stands at a safe point."""


class ChangedObjects:
    """Counts how often each was seen, and has the main thread held at safe points if it happens again."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._counts: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._counts)

    def note(self, names: list[str], step: int, why: str = "") -> None:
        for name in names:
            count = self._counts[name] = self._counts.get(name, 0) + 1
            log("changed_outside_step", level=logging.WARNING, object=name, step=step, **({"why": why} if why else {}))
            if count == _LIMIT:
                self._gate.holds_main = True
                log(
                    "main_thread_only",
                    level=logging.WARNING,
                    object=name,
                    means="its tensors change outside optimizer.step(), so it is saved only while the loop "
                    "stands at a safe point",
                )
