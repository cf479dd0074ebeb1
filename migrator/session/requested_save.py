"""`save_ckpt()`: a save that the script asks for, and waits for if it wants to."""

from __future__ import annotations

import logging
import os
import threading

from migrator.errors import SaveFailed, UsageError
from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.loop.gate import Gate, Phase
from migrator.loop.safe_points import SafePoints
from migrator.save.engine import Saver
from migrator.session.departure import Departure


class RequestedSave:
    """Makes the newest safe point durable."""

    def __init__(
        self, gate: Gate, safe_points: SafePoints, saver: Saver, *, leaving: Leaving, departure: Departure
    ) -> None:
        self._gate = gate
        self._safe_points = safe_points
        self._saver = saver
        self._leaving = leaving
        self._departure = departure
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    def save(self, *, wait: bool) -> str | None:
        """The name of the ckpt; None if there is none, or if it is not waited for."""
        if os.getpid() != self._pid:
            raise UsageError(
                "save_ckpt() was called in a forked child, where no thread saves. Call it in the process that called "
                "listening(). A child that trains something of its own calls close(), register() and listening() first."
            )
        self._safe_points.raise_postponed()
        newest = self._saver.newest
        if self._gate.phase in (Phase.FRESH, Phase.LOADED):
            return newest.ckpt if newest else None
        in_main = threading.get_ident() == self._thread
        if in_main and (why := self._safe_points.why_not_whole()) is not None:
            at = "there is no ckpt" if newest is None else f"the newest ckpt is {newest.ckpt}, of step {newest.step}"
            raise SaveFailed(f"save_ckpt(): {why}. What is half done is not saved; {at}.")
        if not (wait and in_main):
            return self._asked(in_main=in_main, wait=wait)
        self._gate.loop_waits = True
        try:
            return self._asked(in_main=True, wait=True)
        finally:
            self._gate.loop_waits = False

    def _asked(self, *, in_main: bool, wait: bool) -> str | None:
        ticket = self._saver.ask()
        if in_main and self._gate.phase is Phase.DIRTY:
            # A script that asks for a save here says that its state is whole here.
            self._safe_points.mark()
            self._safe_points.reach()
        if not wait:
            return None
        while not ticket.done.wait(0.05):
            if in_main and self._gate.is_unsavable:
                log(
                    "save_late",
                    level=logging.WARNING,
                    means="what is registered changed since the last safe point; it is saved at the next one",
                )
                return None
            if self._leaving.may_leave():
                self._leaving.leave()
        if ticket.error is not None and self._leaving.notice is not None:
            # A notice came meanwhile: the newest step is saved instead, and then the process leaves.
            self._departure.leave_when_decided()
        if ticket.error is not None:
            raise SaveFailed(f"the save was not made: {ticket.error}") from ticket.error
        return ticket.saved.ckpt if ticket.saved else None
