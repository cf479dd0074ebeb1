"""The thread that saves: now and then, when asked, and for the last time.

It sleeps until there is something to do. A save that is not the last one lets the
training go on; news of leaving goes before it. What is under way then is finished
or given up for the newest step, whichever the measured rate says fits the grace.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from migrator.platform import process_identity as identity
from migrator.platform import launcher
from migrator.ckpt import generations as lineage
from migrator.ckpt import retention
from migrator.notice import signal_file
from migrator.state.capture import Capture
from migrator.errors import MigratorError, SaveFailed, StorageError
from migrator.events import log
from migrator.loop.gate import Phase
from migrator.save.mark_keeper import Heartbeat
from migrator.notice.termination_message import LastWord
from migrator.leaving.leaving import Leaving, Outcome
from migrator.ckpt.generations import LeavingMark
from migrator.save.progress import ForHook, Progress
from migrator.save.attempt import Aside, Attempt, GivenUp, Saved, Unclean, Workshop, failed_text, room_for
from migrator.settings import Every, Settings
from migrator.notice.signal_file import SignalFile
from migrator.notice.watcher import News

TICK_S = 0.05
_RETRY_S = 0.25
FAILED_AGAIN_S = 60.0
"""A periodic save that failed is tried again after so long, or after its own interval if that is shorter."""
_UNCLEAN_LIMIT = 2
"""An object seen changing outside a step so often is saved at safe points only from then on."""
_SWITCH_S = 0.0005
_OF_GRACE = 0.7
"""A save that takes more of the time between SIGTERM and SIGKILL may not fit into it when the pod goes."""
_WHY_AT_MOST = 900
"""Of a longer reason hook and kubelet get the beginning: what follows it has to fit as well. The log has all of it."""


class Why(enum.Enum):
    PERIODIC = "periodic"
    ASKED = "asked"
    LEAVING = "leaving"


@dataclass
class Ticket:
    """Somebody waits for a save."""

    done: threading.Event = field(default_factory=threading.Event)
    saved: Saved | None = None
    error: Exception | None = None


class Saver(threading.Thread):
    """One thread, one condition, one `close()`."""

    def __init__(self, shop: Workshop, settings: Settings, leaving: Leaving, file: SignalFile) -> None:
        super().__init__(name="migrator-saver", daemon=True)
        self._shop = shop
        self._settings = settings
        self._leaving = leaving
        self._file = file
        self._cond = threading.Condition()
        self._tickets: list[Ticket] = []
        self._is_periodic_due = False
        self._least_step = 0
        self._is_closed = False
        self._has_ended = False
        self._aside = Aside()
        self._unclean: dict[str, int] = {}
        self._bytes_per_s = 0.0
        self._next_s = self._interval_end()
        self.newest: Saved | None = None
        """The newest ckpt of this life, or the one it was loaded from."""
        self.bad: frozenset[str] = frozenset()
        """Ckpts that turned out corrupt while loading."""
        self._has_told_of_time = False
        self.is_busy = False
        self.for_hook = ForHook(file.path)
        self._last_word = LastWord(settings.termination_log)
        self._heartbeat: Heartbeat | None = None
        self._later: str | None = None
        self.explain_nothing: Callable[[], Outcome] = lambda: Outcome(False, "nothing to save")
        """What to answer if nothing was trained yet."""

    # What others ask of it.

    def ask(self) -> Ticket:
        """Save the newest safe point, or the next one; the ticket tells how it went."""
        ticket = Ticket()
        with self._cond:
            if self._is_closed:
                ticket.error = SaveFailed("the process is leaving: no further save is made")
                ticket.done.set()
                return ticket
            self._tickets.append(ticket)
            self._shop.gate.announce()
            self._cond.notify_all()
        return ticket

    def went_on_from(self, ckpt: str) -> None:
        """This ckpt was loaded; those of this life say so."""
        self._shop.origin[:] = [ckpt]

    def at_step(self, step: int) -> None:
        """A safe point was reached; if a periodic save is due at the next one, get ready for it."""
        steps = self._settings.every.steps
        if steps is not None and (step + 1) % steps == 0:
            self._be_ready_for(step + 1)

    def _be_ready_for(self, step: int) -> None:
        with self._cond:
            self._is_periodic_due = True
            self._least_step = step
            self._shop.gate.announce()
            self._cond.notify_all()

    def tell(self, news: News) -> None:
        """The pod must leave. Later news only bring a request that wants its answer too."""
        # First of all: what the saver is woken for must find that no new step begins.
        self._shop.gate.announce(is_leaving=True)
        with self._cond:
            if self._has_ended:
                return  # the script is over, and so is saving
            is_first = self._leaving.begin(news)
        self._leaving.hear(news)
        self._pass_on(news)
        if not is_first:
            self._answer_again()
            return
        if self._speaks():
            self.for_hook.begin()
            left_s = news.deadline_s - time.monotonic()
            self._last_word.begin(
                f"told to leave by {news.source}, {left_s:.0f} s before the end of the grace, and ended before it "
                f"could say what was saved (the ckpt before: {self._name_of_newest()})"
            )
        log("signal", source=news.source, grace_left_s=news.deadline_s - time.monotonic())
        with self._cond:
            self._cond.notify_all()

    def _pass_on(self, news: News) -> None:
        """To others, for those who save with them."""

    def close(self, timeout_s: float) -> None:
        """Finish what is under way, then stop. May be called twice."""
        with self._cond:
            self._is_closed = True
            self._cond.notify_all()
        if self.is_alive():
            self.join(timeout_s)

    # The thread.

    def run(self) -> None:
        while True:
            with self._cond:
                while not (self._leaving.news or self._is_closed or self._wanted()):
                    self._cond.wait(self._sleep_s())
                if self._is_closed and not self._leaving.news and not self._is_asked():
                    self._has_ended = True
                    return
            if self._leaving.news is not None:
                with self._working():
                    outcome = self._save_and_leave()
                    self._leaving.decide(outcome)
                    self._answer_again()  # one may have come since the answer was written
                self._leaving.see_off()
                return
            with self._working():
                self._save_and_go_on()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self.is_busy = True
        interval_s = sys.getswitchinterval()
        # A busy training thread gives the interpreter lock back sooner.
        sys.setswitchinterval(min(interval_s, _SWITCH_S))
        try:
            yield
        finally:
            sys.setswitchinterval(interval_s)
            self.is_busy = False

    def _is_asked(self) -> bool:
        """Somebody waits for a save."""
        return bool(self._tickets)

    def _wanted(self) -> bool:
        due = self._next_s is not None and time.monotonic() >= self._next_s
        return bool(self._tickets) or self._is_periodic_due or (due and self._has_trained())

    def _has_trained(self) -> bool:
        return self._shop.gate.phase in (Phase.CLEAN, Phase.DIRTY)

    def _sleep_s(self) -> float | None:
        if self._next_s is None:
            return None
        return max(TICK_S, self._next_s - time.monotonic()) if self._has_trained() else 1.0

    def _interval_end(self) -> float | None:
        seconds = self._settings.every.seconds
        return None if seconds is None else time.monotonic() + seconds

    # Save and go on.

    def _save_and_go_on(self) -> None:
        with self._cond:
            tickets, self._tickets = self._tickets, []
            self._is_periodic_due = False
        saved: Saved | None = None
        error: Exception | None = None
        try:
            saved = self._save(Why.ASKED if tickets else Why.PERIODIC)
            self._tell_if_too_long(saved)
            self._look_for_later(saved)
            self._retire()
        except GivenUp:
            error = SaveFailed("the save was given up: the pod is leaving and the newest step is saved instead")
        except Exception as failure:  # a periodic save never ends training
            error = failure
            log("save_failed", level=logging.ERROR, why=failed_text(failure), before=self._name_of_newest())
        finally:
            self._aside.free()
        self._next_s = self._interval_end()
        if error is not None and self._settings.every != Every():
            again_s = time.monotonic() + FAILED_AGAIN_S
            self._next_s = again_s if self._next_s is None else min(self._next_s, again_s)
        for ticket in tickets:
            ticket.saved, ticket.error = saved, error
            ticket.done.set()
        with self._cond:
            # Somebody asked for a save just before a periodic one was due: that one is still to be made.
            self._is_periodic_due |= saved is not None and saved.step < self._least_step
            keep_due = bool(self._tickets) or self._is_periodic_due or self._leaving.news is not None
            self._shop.gate.settle(keep_due=keep_due)

    def _save(self, why: Why) -> Saved:
        """Attempts until one is committed. Raises `GivenUp` when news of leaving come first."""
        gate = self._shop.gate
        if why is not Why.LEAVING:
            self._aside.prepare(self._live_bytes())
        gate.announce()
        while True:
            # Whoever asks may be the main thread, which then makes no further step.
            waits = why is Why.PERIODIC and not self._tickets
            capture = gate.take(TICK_S, least_step=self._least_step if waits else 0)
            if capture is None:
                self._stop_waiting(why)
                continue
            try:
                if self.newest is not None and self.newest.step == capture.step:
                    log("joined", ckpt=self.newest.ckpt, step=capture.step)
                    return self.newest
                saved = self._attempt(capture, why)
            except Unclean as error:
                gate.spoil(capture)
                self._note_unclean(error.names, capture.step, error.why)
                continue
            finally:
                if why is not Why.LEAVING:
                    gate.open()
                gate.unpin(capture)
            self.newest = saved
            self._bytes_per_s = saved.size / max(saved.took_s, 1e-6)
            return saved

    def _stop_waiting(self, why: Why) -> None:
        if why is Why.LEAVING:
            if self._shop.gate.is_over:
                raise SaveFailed("the script ended before it reached a safe point")
            if self._leaving.left_s < 0 and self._unclean:
                raise SaveFailed(
                    f"no safe point was reached within the grace after {', '.join(self._unclean)} changed outside "
                    "optimizer.step(); register only what stands still in long evaluations, or make the grace longer"
                )
            if self._leaving.left_s < 0 and self._shop.capturer.restless:
                raise SaveFailed(
                    f"no safe point could be copied within the grace: another thread changed "
                    f"{', '.join(sorted(self._shop.capturer.restless))} each time"
                )
            if self._leaving.left_s < 0:
                raise SaveFailed(self._leaving.why_no_safe_point)
        elif self._leaving.news is not None:
            raise GivenUp
        elif why is Why.PERIODIC and self._shop.gate.is_closed:
            raise GivenUp  # that the script ended first is no failure
        elif self._shop.gate.is_over:
            raise SaveFailed("the script ended before it reached a safe point")

    def _attempt(self, capture: Capture, why: Why) -> Saved:
        is_leaving = why is Why.LEAVING
        end_s = self._leaving.news.deadline_s if is_leaving and self._leaving.news else None
        with Progress("saving", grace_end_s=end_s) as progress:

            def on_block(done: int, total: int) -> None:
                self._leaving.advanced_s = time.monotonic()
                progress(done, total)
                self.for_hook(done, total)
                if not is_leaving and self._leaving.news is not None:
                    self._weigh(done, total, capture.step)

            attempt = Attempt(self._shop, capture, aside=self._aside, may_open=not is_leaving, on_block=on_block)
            return attempt.run()

    def _retire(self, *, sweeps: bool = True) -> None:
        shop = self._shop
        retention.retire(shop.storage, shop.generation, keep=self._settings.keep, bad=self.bad, sweeps=sweeps)

    def _weigh(self, done: int, total: int, step: int) -> None:
        """News came in the middle of a save: go on with it, or give it up for the newest step?"""
        newest = self._shop.gate.capture
        if newest is not None and newest.step == step and self._shop.gate.phase is Phase.CLEAN:
            return  # it is the newest
        rate = self._bytes_per_s or 50e6
        if total / rate < 0.7 * self._leaving.left_s:
            log(
                "save_given_up",
                step=step,
                written=done,
                bytes=total,
                means="the newest step is saved instead",
            )
            raise GivenUp

    def _note_unclean(self, names: list[str], step: int, why: str = "") -> None:
        for name in names:
            count = self._unclean[name] = self._unclean.get(name, 0) + 1
            log("changed_outside_step", level=logging.WARNING, object=name, step=step, **({"why": why} if why else {}))
            if count == _UNCLEAN_LIMIT:
                self._shop.gate.holds_main = True
                log(
                    "main_thread_only",
                    level=logging.WARNING,
                    object=name,
                    means="its tensors change outside optimizer.step(), so it is saved only while the loop "
                    "stands at a safe point",
                )

    def _tell_if_too_long(self, saved: Saved) -> None:
        """Once: the last save, in a pod that goes, will not take less time than this one did."""
        agent = launcher.agent()
        grace_s = self._settings.grace_s
        left_s = launcher.sigterm_grace_s(grace_s, agent)
        if self._has_told_of_time or saved.took_s < _OF_GRACE * left_s or not self._speaks():
            return
        self._has_told_of_time = True
        instead = "make terminationGracePeriodSeconds and MIGRATOR_GRACE_S longer"
        if agent is not None and left_s < grace_s:
            instead = "give torchrun a longer --shutdown-timeout (TORCH_ELASTIC_SHUTDOWN_TIMEOUT in the pod)"
        log(
            "save_too_long",
            level=logging.WARNING,
            ckpt=saved.ckpt,
            bytes=saved.size,
            took_s=saved.took_s,
            left_s=left_s,
            means=f"a save takes about as long as a pod has from SIGTERM to SIGKILL, or longer: {instead}",
        )

    def _live_bytes(self) -> int:
        capture = self._shop.gate.capture
        if capture is None:
            return 0
        try:
            return sum(
                room_for(tensor)
                for name, kind in self._shop.registry
                if name in capture.values
                for tensor in kind.watched(capture.values[name])
            )
        except RuntimeError:  # the script is changing its modules at this moment
            return 0

    # Save and leave.

    def _save_and_leave(self) -> Outcome:
        with self._cond:
            tickets, self._tickets = self._tickets, []
        self._mark(is_leaving=True)
        outcome = self._last_save()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._answer(outcome)
        self._mark(is_leaving=False, is_safe=outcome.is_safe)
        if outcome.is_safe:
            self._retire()
        for ticket in tickets:
            ticket.saved = self.newest if outcome.is_safe else None
            ticket.error = None if ticket.saved else SaveFailed(outcome.why)
            ticket.done.set()
        self._stay()
        return outcome

    def _stay(self) -> None:
        """After the answer, where leaving too early would hurt somebody else, or bring this rank back to life."""
        self._leaving.stay_for_agent(speaks=self._speaks())

    def _last_save(self) -> Outcome:
        if not self._shop.gate.has_trained:
            return self.explain_nothing()
        pause_s = _RETRY_S
        while True:
            try:
                saved = self._save(Why.LEAVING)
                return self._outcome(saved)
            except Exception as error:  # whatever it is, the hook must hear of it
                transient = isinstance(error, StorageError) and error.transient
                if not transient or self._leaving.left_s < pause_s:
                    return self._not_saved(error)
                log("save_retry", level=logging.WARNING, why=failed_text(error), after_s=pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 4.0)

    def _outcome(self, saved: Saved) -> Outcome:
        late = self._look_for_later(saved)
        why = "saved" if late is None else f"saved, but {late}"
        return Outcome(True, why, saved.ckpt, saved.step, saved.size, late)

    def _look_for_later(self, saved: Saved) -> str | None:
        """A life that was thought dead, or is replaced already, saves for nobody. It is said and not hidden."""
        shop = self._shop
        if not shop.writes:
            return None
        try:
            late = lineage.gone_on_without(shop.storage, shop.generation.number, saved.ckpt)
        except StorageError as error:
            log("storage_warning", level=logging.WARNING, why=error)
            return None
        if late is not None and late != self._later:
            self._later = late
            log("later_life", level=logging.WARNING, ckpt=saved.ckpt, means=late)
        return late

    def _not_saved(self, error: Exception) -> Outcome:
        why = failed_text(error) if isinstance(error, StorageError) else str(error) or repr(error)
        before = self._name_of_newest()
        log("save_failed", level=logging.ERROR, why=why, before=before)
        return Outcome(False, f"{why[:_WHY_AT_MOST]} (the ckpt before is untouched: {before})")

    def _mark(self, *, is_leaving: bool, is_safe: bool = False) -> None:
        """Tell a life that starts meanwhile that a ckpt is coming, or that it need not wait any more."""
        if not self._shop.generation.is_claimed:
            return
        try:
            number = self._shop.generation.number
            if is_leaving:
                by = identity.mine() if self._shop.size == 1 else None  # what several make goes on without one of them
                mark = LeavingMark(max(1.0, self._leaving.left_s), by, beat=0)
                lineage.put_mark(self._shop.storage, number, mark)
                self._heartbeat = Heartbeat(self._shop.storage, number, mark)
                self._heartbeat.start()
            else:
                lineage.unmark_leaving(self._shop.storage, number)
        except MigratorError as error:
            log("storage_warning", level=logging.WARNING, why=error)

    def _answer(self, outcome: Outcome) -> None:
        news = self._leaving.news
        assert news is not None
        took_s = time.monotonic() - news.deadline_s + news.grace_s
        is_well = (outcome.is_safe and outcome.late is None) or not self._has_trained()
        level = logging.INFO if is_well else logging.ERROR
        log(
            "leaving",
            level=level,
            ckpt=outcome.ckpt,
            step=outcome.step,
            bytes=outcome.size,
            since_signal_s=took_s,
            why=outcome.why,
        )
        if self._speaks() or self._nobody_answers():
            # Before the answer: with that the container may end.
            self._last_word.say(_last_word(outcome, took_s))
            self._write_answer(outcome, took_s)
            self.for_hook.remove()

    def _speaks(self) -> bool:
        """This process is the one that answers the hook."""
        return True

    def _nobody_answers(self) -> bool:
        """Nor does another process that should have."""
        return False

    def _answer_again(self) -> None:
        """A request that comes while there is no outcome yet is answered with the others; one after it, now."""
        if self._leaving.outcome is not None and self._speaks():
            # SIGTERM again asks nothing, and ours to the main thread comes this way: the answer must stay.
            self._write_answer(self._leaving.outcome, 0.0, only_if_asked=True)

    def _write_answer(self, outcome: Outcome, took_s: float, *, only_if_asked: bool = False) -> None:
        """The request that is in the file now gets its answer, whichever brought the news."""
        fields: dict[str, object] = {"ckpt": outcome.ckpt, "step": outcome.step}
        if outcome.is_safe:
            fields |= {"bytes": outcome.size, "seconds": f"{took_s:.3f}", "late": outcome.late}
        else:
            fields |= {"error": outcome.why}
        try:
            asked = self._file.read()
            if asked is not None and asked.word == signal_file.SAVE:
                fields["request"] = asked.fields.get("request")
                hook = asked.fields.get("hook", "")
                self._leaving.hook = int(hook) if hook.isdecimal() and len(hook) < 10 else None
                if self._file.agent:
                    # For the ranks that it may start again in this pod.
                    fields |= {"deadline": asked.fields.get("deadline"), "agent": self._file.agent}
            elif only_if_asked or self._leaving.is_again:
                return
            self._file.write(signal_file.RESUME if outcome.is_safe else signal_file.INIT, **fields)
        except MigratorError as error:
            log("answer_failed", level=logging.ERROR, why=error)

    def _name_of_newest(self) -> str:
        return self.newest.ckpt if self.newest else "none"


def _last_word(outcome: Outcome, took_s: float) -> str:
    """For people who ask the cluster what became of the pod."""
    if not outcome.is_safe:
        return f"not saved: {outcome.why}"
    what = f"ckpt {outcome.ckpt}, step {outcome.step}, {outcome.size} bytes, {took_s:.2f} s after the signal"
    return f"{outcome.why}: {what}"
