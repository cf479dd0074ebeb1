"""The saving thread of one of several ranks.

As `saver`, but nothing is saved by one rank alone: saves are ordered ahead, for
one safe point on all ranks, and the last one is agreed on. Of the ranks in a pod
one answers the hook; and a rank stays, after the answer, where its leaving would
hurt others or bring it back to life.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from migrator.platform import container as environment
from migrator.notice import signal_file
from migrator.ranks.protocol import Line, Point
from migrator.state.capture import Capture
from migrator.errors import MigratorError, SaveFailed
from migrator.events import log
from migrator.leaving.leaving import Leaving, Outcome
from migrator.ranks.timing import ATTEMPTS
from migrator.save.progress import Progress
from migrator.ranks.peers import Ranks
from migrator.save.engine import FAILED_AGAIN_S, TICK_S, Saver, Ticket
from migrator.save.attempt import Attempt, GivenUp, Saved, Workshop, failed_text
from migrator.settings import Every, Settings
from migrator.notice.signal_file import SignalFile
from migrator.save.group.last_save import Missed, NothingToSave, Together, info_of, order
from migrator.notice.watcher import News

_OTHERS_S = 2.0
"""Rank 0, if it serves the job's store, leaves so long after the others at most."""
_GONE_ON = "it has gone on already"
_NOT_COPIED = "what is costly to copy was not copied there (capture_costly)"
_ASK_ALL = (
    "A rank that does not know of a save does not wait for it, if the ranks exchange nothing, and does not copy what "
    "is costly to copy. Call save_ckpt() on all ranks behind the same step"
)
_SPEAKER_S = 1.0
"""So long a rank lets each lower rank of its pod answer the hook."""


@dataclass(frozen=True)
class Pod:
    """What this rank's surroundings mean for the way it leaves."""

    position: int = 0
    """How many ranks of this pod are lower: the lowest answers the hook."""
    lower_pids: tuple[int, ...] = ()
    serves_store: bool = False
    """The job's store lives in this process."""


class _Sooner(Exception):  # noqa: N818 - internal
    """An earlier safe point has to be saved first."""


class JointSaver(Saver):
    """One rank's."""

    def __init__(
        self, shop: Workshop, settings: Settings, leaving: Leaving, file: SignalFile, *, ranks: Ranks, pod: Pod
    ) -> None:
        super().__init__(shop, settings, leaving, file)
        self._ranks = ranks
        self._pod = pod
        self._together = Together(shop, ranks, leaving, self._attempt_of_all)
        self._together.note_unclean = self._note_unclean
        self._targets: set[Point] = set()
        """Safe points that all ranks save without leaving."""
        self._asked: list[tuple[Point | None, Ticket]] = []
        self._taken: Point | None = None
        """The safe point that is being saved, or was saved last."""
        self._misses = 0
        self._has_nothing = False
        """No rank has anything to save: the next life need not wait for it."""
        self._speed_since: tuple[float, int] | None = None
        """When there was which step: after this life's first one, and after each save."""
        ranks.on_lines = self._read_board
        if ranks.rank:
            self._next_s = None

    # What others ask of it.

    def ask(self) -> Ticket:
        """Have all ranks save the safe point this one is at, or about to reach."""
        ticket, target = Ticket(), self._shop.gate.reach
        if target is None or self._is_closed or self._leaving.news is not None:
            ticket.error = SaveFailed(f"{self._why_no_more()}: no further save is made")
            ticket.done.set()
        elif self.newest is not None and self.newest.step == target[0]:
            ticket.saved = self.newest
            ticket.done.set()
        elif (why := self._together.missed(target)) is not None:
            ticket.error = SaveFailed(
                f"step {target[0]} could not be saved by all ranks, and is not tried again ({why}); the next step is"
            )
            ticket.done.set()
        else:
            with self._cond:
                self._asked.append((target, ticket))
            if not self._order(target):
                with self._cond:
                    self._asked = [asked for asked in self._asked if asked[1] is not ticket]
                saved = self.newest if self.newest is not None and self.newest.step == target[0] else None
                why = self._why_not(target)
                self._answer_tickets([ticket], saved, None if saved else SaveFailed(f"step {target[0]}: {why}"))
        return ticket

    def _why_no_more(self) -> str:
        return "the process is leaving" if self._leaving.news is not None else "its script has ended"

    def _why_not(self, target: Point) -> str:
        """What keeps this rank from saving that safe point."""
        gate = self._shop.gate
        reach = gate.reach
        if gate.is_at(target) and gate.is_lost(target):
            return _NOT_COPIED
        has_gone_on = reach is not None and reach > target and not gate.can_save(target)
        return _GONE_ON if has_gone_on else self._why_no_more()

    def _is_asked(self) -> bool:
        # Other ranks may wait for what this one was told to save: it does, or says that it can not.
        return bool(self._asked or self._targets)

    def at_step(self, step: int) -> None:
        if self._speed_since is None:
            self._speed_since = (time.monotonic(), step)
        super().at_step(step)

    def _be_ready_for(self, step: int) -> None:
        self._hear_order((step, 0))  # every rank counts the steps by itself

    def _pass_on(self, news: News) -> None:
        if news.is_local:
            self._ranks.tell_news(news.deadline_s)

    def _read_board(self, lines: list[Line]) -> None:
        """The ranks' thread: what others have to say."""
        for line in lines:
            if line.what == "news" and line.rank != self._ranks.rank:
                left_s = float(info_of(line).get("grace_left_s", self._settings.grace_s))
                self._ranks.hurry()
                self.tell(News(f"rank {line.rank}", time.monotonic() + left_s, left_s, is_local=False))
            elif line.what == "order" and line.rank != self._ranks.rank and line.point is not None:
                self._hear_order(line.point)
            elif line.what == "heard" and line.rank != self._ranks.rank:
                self._leaving.note_script_knows()
            elif line.what == "missed":
                with self._cond:
                    self._cond.notify_all()

    def _order(self, target: Point) -> bool:
        """Have all ranks save this safe point; False if this one can not any more, or need not."""
        self._ranks.post(order(target, self._ranks.rank), timeout_s=0)
        return self._hear_order(target)

    def _hear_order(self, target: Point) -> bool:
        gate = self._shop.gate
        with self._cond:
            if self.newest is not None and self.newest.step == target[0]:
                return False
            if target == self._taken:
                return True  # another rank's word for what this one is saving already
            if not gate.can_save(target) or self._is_closed or self._leaving.news is not None:
                self._together.miss(target, self._why_not(target))
                return False
            self._targets.add(target)
            self._ranks.hurry()  # whoever waits for this rank is to see that it lives, also in a long step
            gate.announce()
            gate.hold(min(self._targets))
            self._cond.notify_all()
            return True

    # Going on.

    def _wanted(self) -> bool:
        # The time is told by rank 0: no two clocks are the same.
        due = self._next_s is not None and time.monotonic() >= self._next_s and self._ranks.rank == 0
        return bool(self._targets) or (due and self._has_trained())

    def _save_and_go_on(self) -> None:
        target = min(self._targets, default=None)
        if target is None:
            self._order_ahead()
            return
        try:
            saved, error = self._save_with_others(target)
        except _Sooner:
            return
        if saved is None:
            self._taken = None
        with self._cond:
            self._targets.discard(target)
            answered = [ticket for point, ticket in self._asked if point == target]
            self._asked = [(point, ticket) for point, ticket in self._asked if point != target]
            if self._leaving.news is None:
                self._shop.gate.hold(min(self._targets, default=None))
                self._shop.gate.settle(keep_due=bool(self._targets))
                if not self._targets:
                    self._ranks.relax()
        self._answer_tickets(answered, saved, error)
        self._speed_since = (time.monotonic(), self._shop.gate.at[0])

    def _answer_tickets(self, tickets: list[Ticket], saved: Saved | None, error: Exception | None) -> None:
        for ticket in tickets:
            ticket.saved, ticket.error = saved, error
            ticket.done.set()

    def _order_ahead(self) -> None:
        """A periodic save is due: at a step that no rank has reached when it hears of it."""
        now_step = self._shop.gate.at[0]
        since_s, step = self._speed_since or (time.monotonic(), now_step)
        per_s = (now_step - step) / max(0.001, time.monotonic() - since_s)
        self._next_s = self._interval_end()
        ahead_s = self._ranks.pace.ahead_s(min(self._misses, ATTEMPTS))
        self._order((now_step + max(2, math.ceil(per_s * ahead_s)), 0))

    def _save_with_others(self, target: Point) -> tuple[Saved | None, Exception | None]:
        try:
            self._aside.prepare(self._live_bytes())
            saved = self._together.go_on(target, self._take_exactly(target))
            self.newest, self._misses = saved, 0
            if saved.size:
                self._bytes_per_s = saved.size / max(saved.took_s, 1e-6)
            self._tell_if_too_long(saved)
            if self._ranks.rank == 0:
                self._look_for_later(saved)
            self._retire()
            return saved, None
        except GivenUp:
            return None, SaveFailed("the save was given up: the pod is leaving and the newest step is saved instead")
        except Missed as missed:
            self._misses += 1
            if self._ranks.rank == 0 and self._misses % (ATTEMPTS + 1):  # else at its next time
                log("save_retry", level=logging.INFO, why=missed, after_s=0.0)
                if not self._shop.gate.is_closed and self._interval_end() is not None:
                    self._order_ahead()
            is_of_one = any(why in str(missed) for why in (_GONE_ON, _NOT_COPIED))
            advice = f". {_ASK_ALL}" if is_of_one else ""
            return None, SaveFailed(f"step {target[0]} could not be saved by all ranks: {missed}{advice}")
        except _Sooner:
            raise
        except Exception as failure:  # a periodic save never ends training
            log("save_failed", level=logging.ERROR, why=failed_text(failure), before=self._name_of_newest())
            if self._settings.every != Every() and self._ranks.rank == 0:
                again_s = time.monotonic() + FAILED_AGAIN_S
                self._next_s = again_s if self._next_s is None else min(self._next_s, again_s)
            return None, failure
        finally:
            self._aside.free()

    def _take_exactly(self, target: Point) -> Capture:
        gate = self._shop.gate
        while True:
            capture = gate.take(TICK_S, exact=target)
            if capture is not None:
                with self._cond:
                    self._taken = target
                    # The next one may be due before this one is committed.
                    self._targets.discard(target)
                    gate.hold(min(self._targets, default=None))
                return capture
            if self._leaving.news is not None:
                raise GivenUp
            if min(self._targets, default=target) < target:
                raise _Sooner  # whoever asked for it may stand there until it is saved
            why = self._together.missed(target)
            if why is None and gate.is_lost(target):
                why = "it changed since"
            elif why is None and gate.at > target and not gate.is_at(target):
                why = _GONE_ON
            elif why is None and gate.is_closed and not gate.is_at(target):
                why = "its script has ended"
            if why is not None:
                self._together.miss(target, why)
                raise Missed(why)

    def _attempt_of_all(self, capture: Capture, is_leaving: bool, members: tuple[int, ...]) -> Attempt:
        news = self._leaving.news
        progress = Progress("saving", grace_end_s=news.deadline_s if is_leaving and news is not None else None)

        def on_block(done: int, total: int) -> None:
            self._leaving.advanced_s = time.monotonic()
            self._ranks.advanced += 1
            progress(done, total)
            self.for_hook(done, total)
            if done == total:
                progress.close()
            if not is_leaving and self._leaving.news is not None:
                self._weigh(done, total, capture.step)

        return Attempt(
            self._shop, capture, aside=self._aside, may_open=not is_leaving, on_block=on_block, members=members
        )

    def _last_save(self) -> Outcome:
        try:
            saved = self._together.leave()
        except NothingToSave:
            self._has_nothing = True
            return self.explain_nothing()
        except Exception as error:  # whatever it is, the hook must hear of it
            return self._not_saved(error)
        self.newest = saved
        return self._outcome(saved)

    def _mark(self, *, is_leaving: bool, is_safe: bool = False) -> None:
        if not (self._shop.writes and (self._leaving.pod_is_dying or self._shop.rank == 0)):
            return
        if is_leaving or is_safe or self._has_nothing:  # if it is not safe here, it may still become so elsewhere
            super()._mark(is_leaving=is_leaving)

    def _retire(self, *, sweeps: bool = True) -> None:
        if self.newest is not None and self._together.committed == self.newest.ckpt:
            super()._retire(sweeps=sweeps and self._leaving.news is None)

    def _save_and_leave(self) -> Outcome:
        outcome = super()._save_and_leave()
        with self._cond:
            asked, self._asked = self._asked, []
        error = None if outcome.is_safe else SaveFailed(outcome.why)
        self._answer_tickets([ticket for _, ticket in asked], self.newest if outcome.is_safe else None, error)
        return outcome

    # Answering, and staying where that is better.

    def _speaks(self) -> bool:
        return self._pod.position == 0

    def _nobody_answers(self) -> bool:
        """One rank of a pod answers, the lowest that can."""
        end_s = time.monotonic() + _SPEAKER_S * self._pod.position
        while True:
            try:
                asked = self._file.read()
            except MigratorError:
                return False
            if asked is None or asked.word != signal_file.SAVE:
                return False
            if time.monotonic() > end_s or not any(map(environment.is_alive, self._pod.lower_pids)):
                return True
            time.sleep(TICK_S / 2)

    def _stay(self) -> None:
        """After the answer: leaving too early would hurt somebody else."""
        ranks, leaving = self._ranks, self._leaving
        assert leaving.news is not None
        if self._pod.serves_store:
            ranks.follow("leave")
        # Who serves the store ends as soon as it has read this line of all.
        ranks.is_done = True
        ranks.post(Line("out", ranks.rank), timeout_s=0.2)
        if self._pod.serves_store:
            # Who has not heard of the decision yet finds it in the store, which ends with this process.
            end_s = min(time.monotonic() + _OTHERS_S, leaving.news.deadline_s)
            while time.monotonic() < end_s and not ranks.is_lost:
                gone = ranks.board.out() | {line.rank for line in ranks.lines("out")} | {ranks.rank}
                if not any(map(ranks.is_alive_there, set(range(ranks.size)) - gone)):
                    break
                ranks.wait(TICK_S)
        if not ranks.is_lost:
            # The store may end before this process does; torch would print a page about that.
            ranks.close()
        super()._stay()
