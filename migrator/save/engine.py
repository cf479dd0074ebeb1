"""The thread that saves: now and then, when asked, and for the last time.

It sleeps until there is something to do. A save that is not the last one lets the training go on; a notice goes
before it. Which safe point is saved, and by whom, is the strategy's answer (`strategy.py`); everything around it, from
the schedule to the answer to the hook, reads here from top to bottom.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from migrator.errors import StorageError
from migrator.events import log
from migrator.leaving.leaving import Leaving, Outcome
from migrator.loop.gate import Phase
from migrator.notice.signal_file import SignalFile
from migrator.notice.watcher import Notice
from migrator.ranks.peers import Peers
from migrator.save.context import SaveContext
from migrator.save.group.group import Group
from migrator.save.leaving_mark_keeper import LeavingMarkKeeper
from migrator.save.measured import note_and_end
from migrator.save.reply import Pod
from migrator.save.results import GivenUp, Missed, NothingToSave, Postponed, Saved, failed_text
from migrator.save.solo import Solo
from migrator.save.strategy import SaverTools, Strategy
from migrator.save.switch_interval import SwitchInterval
from migrator.save.tickets import Ticket
from migrator.settings import Settings

_RETRY_S = 0.25
"""Seconds until storage is tried again after an error; doubled each time."""
_RETRY_AT_MOST_S = 4.0
"""Maximum time in seconds between two of these tries."""
_SWITCH_S = 0.0005
"""The switch interval in seconds while this thread works, so that a busy training thread gives way."""
_LEAVING_SWITCH_S = 0.00005
"""The same from a notice on: at most one step is still waited for, and the saving thread needs little of the lock."""
_WHY_AT_MOST = 900
"""Characters of a reason that hook and kubelet get: what follows it has to fit as well. The log has all of it."""


def alone(
    context: SaveContext,
    settings: Settings,
    leaving: Leaving,
    file: SignalFile,
    explain_nothing: Callable[[], Outcome],
) -> Saver:
    """For a job of one process. `explain_nothing`: the answer to a notice if nothing was trained yet."""
    tools = SaverTools(context, settings, leaving, file)
    return Saver(tools, Solo(tools), explain_nothing)


def in_group(
    context: SaveContext,
    settings: Settings,
    leaving: Leaving,
    file: SignalFile,
    explain_nothing: Callable[[], Outcome],
    *,
    ranks: Peers,
    pod: Pod,
) -> Saver:
    """For one of several ranks."""
    tools = SaverTools(context, settings, leaving, file, pod=pod, on_advance=ranks.advance)
    return Saver(tools, Group(tools, ranks, pod), explain_nothing)


class Saver(threading.Thread):
    """One thread, one condition, one `close()`."""

    def __init__(self, tools: SaverTools, strategy: Strategy, explain_nothing: Callable[[], Outcome]) -> None:
        super().__init__(name="migrator-saver", daemon=True)
        self._context = tools.context
        self._leaving = tools.leaving
        self._cond = tools.cond
        self._schedule = tools.schedule
        self._ckpts = tools.ckpts
        self._speed = tools.speed
        self._cost = tools.cost
        self._attempts = tools.attempts
        self._reply = tools.reply
        self.for_hook = tools.reply.for_hook
        self._mark = LeavingMarkKeeper(tools.context, tools.leaving)
        self._memory = tools.memory
        self._strategy = strategy
        self._explain_nothing = explain_nothing
        self._switch_interval = SwitchInterval()
        self._measure = tools.measure
        self._is_prepared = False
        self._is_closed = False
        self._has_ended = False
        self._has_nothing = False
        """Nothing was trained: the next life need not wait for a ckpt of this one."""
        self.is_busy = False

    # What others ask of it.

    @property
    def newest(self) -> Saved | None:
        """The newest ckpt of this life, or the one it was loaded from."""
        return self._ckpts.newest

    @newest.setter
    def newest(self, saved: Saved) -> None:
        self._ckpts.newest = saved

    @property
    def bad(self) -> frozenset[str]:
        """Ckpts that turned out to be corrupt while loading."""
        return self._ckpts.bad

    @bad.setter
    def bad(self, ckpts: frozenset[str]) -> None:
        self._ckpts.bad = ckpts

    def went_on_from(self, ckpt: str) -> None:
        """This ckpt was loaded. The manifests of this life name it in `continues`."""
        self._context.origin[:] = [ckpt]

    def start(self) -> None:
        self._strategy.start(self.tell)
        self._memory.start()
        super().start()

    def ask(self) -> Ticket:
        """Save the newest safe point, or the next one; the ticket tells how it went."""
        return self._strategy.ask()

    def at_step(self, step: int) -> None:
        """A safe point was reached; if a periodic save is due at the next one, get ready for it."""
        self._attempts.at_step()
        if self._is_unprepared:
            with self._cond:
                self._cond.notify_all()
        self._strategy.at_step(step, is_next_due=self._schedule.is_due_at(step + 1))

    def tell(self, notice: Notice) -> None:
        """The pod must leave. Later notices only bring a request that wants its answer too."""
        # Before the saving thread is woken: no new step may begin from here on.
        self._context.gate.announce(is_leaving=True)
        with self._cond:
            if self._has_ended:
                return  # the script is over, and so is saving
            is_first = self._leaving.begin(notice)
        self._switch_interval.shorten(_LEAVING_SWITCH_S)
        self._leaving.hear(notice)
        self._strategy.pass_on(notice)
        if not is_first:
            self._reply.answer_again()
            return
        self._context.storage.hurry()
        self._reply.begin(notice, self._ckpts.name_of_newest)
        log("signal", source=notice.source, grace_left_s=notice.deadline_s - time.monotonic())
        with self._cond:
            self._cond.notify_all()

    def close(self, timeout_s: float) -> None:
        """Finish what is under way, then stop. May be called twice."""
        with self._cond:
            self._is_closed = True
            self._strategy.close()
            self._cond.notify_all()
        if self.is_alive():
            self.join(timeout_s)
        self._memory.close()

    # The thread.

    def run(self) -> None:
        while True:
            with self._cond:
                while not (self._leaving.notice or self._is_closed or self._is_due() or self._is_unprepared):
                    self._cond.wait(self._schedule.wait_s(has_trained=self._has_trained))
                if self._is_closed and not self._leaving.notice and not self._strategy.is_asked:
                    self._has_ended = True
                    return
            if self._leaving.notice is not None:
                with self._working():
                    self._leaving.decide(self._save_and_leave())
                    self._reply.answer_again()  # one may have come since the answer was written
                self._leaving.see_off()
                return
            if self._is_unprepared:
                self._prepare()
                continue
            with self._working():
                self._save_and_go_on()

    def _is_due(self) -> bool:
        return self._strategy.is_wanted or (self._schedule.is_time() and self._has_trained)

    @property
    def _is_unprepared(self) -> bool:
        return not self._is_prepared and self._context.gate.capture is not None and self._has_trained

    def _prepare(self) -> None:
        """Once, behind the first step. Before it an optimizer has no state, so nobody knows what a save will write."""
        self._is_prepared = True
        capture = self._context.gate.capture
        try:
            if capture is not None and self._measure is not None:
                note_and_end(self._measure, self._context)
            tensors = [] if capture is None else self._context.capturer.live(capture)
            if self._schedule.is_on:
                self._attempts.expect_copies(tensors)
            if tensors and self._context.writes:
                self._context.storage.expect(sum(tensor.nbytes for tensor in tensors))
        except Exception as error:  # the first save takes longer, and nothing else
            log("storage_warning", level=logging.WARNING, why=failed_text(error))

    @property
    def _has_trained(self) -> bool:
        return self._context.gate.phase in (Phase.CLEAN, Phase.DIRTY)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self.is_busy = True
        is_leaving = self._leaving.notice is not None
        self._switch_interval.shorten(_LEAVING_SWITCH_S if is_leaving else _SWITCH_S)
        try:
            yield
        finally:
            # A notice that came in the midst of a periodic save has shortened it for the last one.
            if is_leaving or self._leaving.notice is None:
                self._switch_interval.restore()
            self.is_busy = False

    # Save and go on.

    def _save_and_go_on(self) -> None:
        if not self._strategy.begin():
            return
        self._cost.begin()
        saved: Saved | None = None
        failure: Exception | None = None
        try:
            self._attempts.prepare()
            saved = self._ckpts.newest = self._strategy.save()
        except Postponed:
            return
        except (GivenUp, Missed) as why:
            failure = why
        except Exception as error:  # a periodic save never ends training
            failure = error
            log("save_failed", level=logging.ERROR, why=failed_text(error), before=self._ckpts.name_of_newest)
        finally:
            self._attempts.end()
        if saved is not None:
            self._follow_up(saved)
        self._strategy.end(saved, failure)
        if saved is not None:
            # Behind the answer: the callers wait for their ckpt, and not until an old one is deleted.
            self._tidy()

    def _follow_up(self, saved: Saved) -> None:
        """After a commit. Whatever goes wrong here, the ckpt is safe, and the script is told so."""
        try:
            self._speed.note(saved)
            self._speed.warn_if_too_long(saved)
            if self._context.rank == 0:
                self._ckpts.look_for_later(saved)
        except Exception as error:
            log("storage_warning", level=logging.WARNING, why=failed_text(error))

    def _tidy(self) -> None:
        try:
            self._strategy.retire()
        except Exception as error:
            log("storage_warning", level=logging.WARNING, why=failed_text(error))

    # Save and leave.

    def _save_and_leave(self) -> Outcome:
        self._mark.put()
        outcome = self._last_save()
        self._mark.stop_beating()
        self._reply.answer(outcome, has_trained=self._has_trained)
        # Before the mark goes: a life that waits for it looks for the note then.
        self._memory.close()
        self._mark.remove(is_certain=outcome.is_safe or self._has_nothing)
        if outcome.is_safe:
            self._strategy.retire()
        self._strategy.end_last(outcome)
        return outcome

    def _last_save(self) -> Outcome:
        """Until there is a ckpt, or nothing more can be done for one."""
        failure: StorageError | None = None
        pause_s = _RETRY_S
        while True:
            try:
                saved = self._ckpts.newest = self._strategy.save_last(failure)
                return self._outcome(saved)
            except NothingToSave:
                self._has_nothing = True
                return self._explain_nothing()
            except StorageError as error:
                if failure is not None:
                    return self._not_saved(error)
                if error.transient and self._leaving.left_s >= pause_s:
                    log("save_retry", level=logging.WARNING, why=failed_text(error), after_s=pause_s)
                elif self._strategy.leave_to_others(error):
                    failure = error
                    continue
                else:
                    return self._not_saved(error)
            except Exception as error:  # whatever it is, the hook must hear of it
                return self._not_saved(error)
            finally:
                self._attempts.end()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_AT_MOST_S)

    def _outcome(self, saved: Saved) -> Outcome:
        late = self._ckpts.look_for_later(saved)
        why = "saved" if late is None else f"saved, but {late}"
        return Outcome(True, why, saved.ckpt, saved.step, saved.size, late)

    def _not_saved(self, error: Exception) -> Outcome:
        why = failed_text(error) if isinstance(error, StorageError) else str(error) or repr(error)
        before = self._ckpts.name_of_newest
        log("save_failed", level=logging.ERROR, why=why, before=before)
        return Outcome(False, f"{why[:_WHY_AT_MOST]} (the ckpt before is untouched: {before})")
