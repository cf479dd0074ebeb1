"""A job of one process saves: the newest safe point, or the next one."""

from __future__ import annotations

import enum
from collections.abc import Callable

from migrator.errors import SaveFailed, StorageError
from migrator.events import log
from migrator.leaving.leaving import Outcome
from migrator.notice.watcher import Notice
from migrator.save.results import GIVEN_UP, SCRIPT_ENDED, GivenUp, NothingToSave, Saved, Unclean
from migrator.save.strategy import TICK_S, SaverTools
from migrator.save.tickets import Ticket, answer_all


class Why(enum.Enum):
    PERIODIC = "periodic"
    ASKED = "asked"
    LEAVING = "leaving"


class Solo:
    """The strategy of one process."""

    def __init__(self, tools: SaverTools) -> None:
        self._gate = tools.context.gate
        self._capturer = tools.context.capturer
        self._leaving = tools.leaving
        self._cond = tools.cond
        self._schedule = tools.schedule
        self._ckpts = tools.ckpts
        self._changed_objects = tools.changed_objects
        self._reply = tools.reply
        self._attempts = tools.attempts
        self._tickets: list[Ticket] = []
        self._taken: list[Ticket] = []
        """Of those, the ones that wait for the save under way."""
        self._is_periodic_due = False
        self._least_step = 0
        """A periodic save is meant for this step, or a later one."""
        self._is_closed = False

    # Called by other threads.

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        """No other rank can have a notice."""

    def ask(self) -> Ticket:
        """Save the newest safe point, or the next one; the ticket tells how it went."""
        ticket = Ticket()
        with self._cond:
            # The last save answers only the tickets that were there when it began.
            if self._is_closed or self._leaving.notice is not None:
                why = "its script has ended" if self._leaving.notice is None else "the process is leaving"
                ticket.answer(None, SaveFailed(f"{why}: no further save is made"))
                return ticket
            self._tickets.append(ticket)
            self._gate.announce()
            self._cond.notify_all()
        return ticket

    def at_step(self, step: int, *, is_next_due: bool) -> None:
        if not is_next_due:
            return
        with self._cond:
            self._is_periodic_due = True
            self._least_step = step + 1
            self._gate.announce()
            self._cond.notify_all()

    def pass_on(self, notice: Notice) -> None:
        """There is no other rank."""

    def close(self) -> None:
        self._is_closed = True

    # Called by the saving thread.

    @property
    def is_wanted(self) -> bool:
        return bool(self._tickets) or self._is_periodic_due

    @property
    def is_asked(self) -> bool:
        return bool(self._tickets)

    def begin(self) -> bool:
        with self._cond:
            self._taken, self._tickets = self._tickets, []
            self._is_periodic_due = False
        return True

    def save(self) -> Saved:
        return self._save(Why.ASKED if self._taken else Why.PERIODIC)

    def end(self, saved: Saved | None, failure: Exception | None) -> None:
        self._schedule.begin_again()
        if failure is not None:
            self._schedule.retry()
        answer_all(self._taken, saved, SaveFailed(GIVEN_UP) if isinstance(failure, GivenUp) else failure)
        self._taken = []
        with self._cond:
            # A caller asked for a save just before a periodic one was due: the periodic one is still to be made.
            self._is_periodic_due |= saved is not None and saved.step < self._least_step
            keep_due = bool(self._tickets) or self._is_periodic_due or self._leaving.notice is not None
            self._gate.end_save(keep_due=keep_due)

    def retire(self) -> None:
        self._ckpts.retire()

    def save_last(self, failure: StorageError | None) -> Saved:
        with self._cond:
            self._taken, self._tickets = [*self._taken, *self._tickets], []
        if not self._gate.has_trained:
            raise NothingToSave
        return self._save(Why.LEAVING)

    def leave_to_others(self, failure: StorageError) -> bool:
        return False

    def end_last(self, outcome: Outcome) -> None:
        saved = self._ckpts.newest if outcome.is_safe else None
        answer_all(self._taken, saved, None if saved else SaveFailed(outcome.why))
        self._leaving.stay_for_agent(speaks=self._reply.speaks)

    def _save(self, why: Why) -> Saved:
        """Makes attempts until one is committed. Raises `GivenUp` if a notice comes first."""
        gate = self._gate
        gate.announce()
        while True:
            # The caller of save_ckpt() may be the main thread, which makes no further step while it waits.
            waits = why is Why.PERIODIC and not self._tickets
            capture = gate.take(TICK_S, least_step=self._least_step if waits else 0)
            if capture is None:
                self._check_is_worth_waiting(why)
                continue
            try:
                newest = self._ckpts.of_step(capture.step)
                if newest is not None:
                    log("joined", ckpt=newest.ckpt, step=capture.step)
                    return newest
                return self._attempts.make(capture, is_leaving=why is Why.LEAVING).run()
            except Unclean as error:
                gate.spoil(capture)
                self._changed_objects.note(error.names, capture.step, error.why)
            finally:
                if why is not Why.LEAVING:
                    gate.open()
                gate.unpin(capture)

    def _check_is_worth_waiting(self, why: Why) -> None:
        """There is no safe point that can be saved yet: raise if there will be none in time."""
        if why is Why.LEAVING:
            if self._gate.is_over:
                raise SaveFailed(SCRIPT_ENDED)
            if self._leaving.left_s < 0:
                raise SaveFailed(self._why_no_safe_point())
        elif self._leaving.notice is not None:
            raise GivenUp
        elif why is Why.PERIODIC and self._gate.is_closed:
            raise GivenUp  # that the script ended first is no failure
        elif self._gate.is_over:
            raise SaveFailed(SCRIPT_ENDED)

    def _why_no_safe_point(self) -> str:
        if changed := self._changed_objects.names:
            return (
                f"no safe point was reached within the grace after {', '.join(changed)} changed outside "
                "optimizer.step(); register only what stands still in long evaluations, or make the grace longer"
            )
        if restless := self._capturer.restless:
            return (
                f"no safe point could be copied within the grace: another thread changed "
                f"{', '.join(sorted(restless))} each time"
            )
        return self._leaving.why_no_safe_point
