"""Several ranks save together: one safe point on all of them.

While training goes on, a save is ordered ahead, for a step that no rank has reached yet (`orders.py`), and made by all
ranks (`joint_save.py`). The last one is agreed on (`last_save.py`).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from migrator.ckpt.point import Point
from migrator.errors import SaveFailed, StorageError
from migrator.events import log
from migrator.leaving.leaving import Leaving, Outcome
from migrator.notice.watcher import Notice
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line
from migrator.ranks.timing import ATTEMPTS
from migrator.save.attempt import Attempt
from migrator.save.group.commits import Commits
from migrator.save.group.joint_save import JointSave
from migrator.save.group.last_save import LastSave
from migrator.save.group.orders import Orders
from migrator.save.group.rank_warnings import RankWarnings
from migrator.save.group.reasons import GONE_ON, advice, why_no_more, why_not
from migrator.save.reply import Pod
from migrator.save.results import GIVEN_UP, GivenUp, Missed, Postponed, Saved, failed_text
from migrator.save.strategy import TICK_S, SaverTools
from migrator.save.tickets import Ticket, answer_all
from migrator.state.capture import Capture

_OTHERS_S = 2.0
"""Maximum time in seconds that rank 0, if it serves the job's store, stays for the others."""


class Group:
    """The strategy of one of several ranks."""

    def __init__(self, tools: SaverTools, ranks: Peers, pod: Pod) -> None:
        self._context = tools.context
        self._gate = tools.context.gate
        self._leaving = tools.leaving
        self._grace_s = tools.grace_s
        self._cond = tools.cond
        self._schedule = tools.schedule
        self._ckpts = tools.ckpts
        self._reply = tools.reply
        self._attempts = tools.attempts
        self._ranks = ranks
        self._pod = pod
        self._orders = Orders(ranks)
        self._commits = Commits(tools.context, ranks)
        warnings = RankWarnings(ranks)
        self._joint_save = JointSave(
            tools.context,
            ranks,
            tools.leaving,
            orders=self._orders,
            commits=self._commits,
            warnings=warnings,
            changed_objects=tools.changed_objects,
        )
        self._last_save = LastSave(
            tools.context,
            ranks,
            tools.leaving,
            self._last_attempt,
            commits=self._commits,
            warnings=warnings,
            changed_objects=tools.changed_objects,
        )
        self._targets: set[Point] = set()
        """Safe points that all ranks save without leaving."""
        self._target: Point | None = None
        """The one of them that this thread is about to save, or saves."""
        self._asked: list[tuple[Point, Ticket]] = []
        self._taken: Point | None = None
        """The safe point that is being saved, or was saved last."""
        self._misses = 0
        """How many saves in a row some rank missed."""
        self._speed_since: tuple[float, int] | None = None
        """When there was which step: after this life's first one, and after each save."""
        self._is_closed = False

    # Called by other threads.

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        self._ranks.relax()
        self._ranks.listen(lambda lines: self._read(lines, on_notice))

    def ask(self) -> Ticket:
        """Have all ranks save the safe point this one is at, or about to reach."""
        ticket, target = Ticket(), self._gate.reach
        if target is None or self._is_closed or self._leaving.notice is not None:
            ticket.answer(None, SaveFailed(f"{why_no_more(self._leaving)}: no further save is made"))
        elif (saved := self._ckpts.of_step(target[0])) is not None:
            ticket.answer(saved, None)
        elif (why := self._orders.missed(target)) is not None:
            text = f"step {target[0]} could not be saved by all ranks, and is not tried again ({why}); the next step is"
            ticket.answer(None, SaveFailed(text))
        else:
            with self._cond:
                self._asked.append((target, ticket))
            if not self._order(target):
                with self._cond:
                    self._asked = [asked for asked in self._asked if asked[1] is not ticket]
                saved = self._ckpts.of_step(target[0])
                why = why_not(target, self._gate, self._leaving)
                ticket.answer(saved, None if saved else SaveFailed(f"step {target[0]}: {why}"))
        return ticket

    def at_step(self, step: int, *, is_next_due: bool) -> None:
        if self._speed_since is None:
            self._speed_since = (time.monotonic(), step)
        if is_next_due:
            self._hear_order((step + 1, 0))  # every rank counts the steps by itself

    def pass_on(self, notice: Notice) -> None:
        if notice.is_local:
            self._ranks.tell_notice(notice.deadline_s)

    def close(self) -> None:
        self._is_closed = True

    def _read(self, lines: list[Line], on_notice: Callable[[Notice], None]) -> None:
        """The ranks' thread: what others have to say."""
        for line in lines:
            if line.what == "notice" and line.rank != self._ranks.rank:
                left_s = float(_info_of(line).get("grace_left_s", self._grace_s))
                self._ranks.hurry()
                on_notice(Notice(f"rank {line.rank}", time.monotonic() + left_s, left_s, is_local=False))
            elif line.what == "order" and line.rank != self._ranks.rank and line.point is not None:
                self._hear_order(line.point)
            elif line.what == "heard" and line.rank != self._ranks.rank:
                self._leaving.note_script_knows()
            elif line.what == "missed":
                with self._cond:
                    self._cond.notify_all()

    # Orders.

    def _order(self, target: Point) -> bool:
        """Have all ranks save this safe point; False if this rank cannot any more, or need not."""
        self._orders.give(target)
        return self._hear_order(target)

    def _hear_order(self, target: Point) -> bool:
        with self._cond:
            if self._ckpts.of_step(target[0]) is not None:
                return False
            if target == self._taken:
                return True  # another rank's order for what this one is saving already
            if not self._gate.can_save(target) or self._is_closed or self._leaving.notice is not None:
                self._orders.miss(target, why_not(target, self._gate, self._leaving))
                return False
            self._targets.add(target)
            self._ranks.hurry()  # a rank that waits for this one has to see that it lives, also in a long step
            self._gate.announce()
            self._hold_at_next()
            self._cond.notify_all()
            return True

    def _hold_at_next(self) -> None:
        self._gate.hold(min(self._targets, default=None))

    def _order_ahead(self) -> None:
        """A periodic save is due: at a step that no rank has reached when it hears of it."""
        now_step = self._gate.at[0]
        since_s, step = self._speed_since or (time.monotonic(), now_step)
        per_s = (now_step - step) / max(0.001, time.monotonic() - since_s)
        self._schedule.begin_again()
        ahead_s = self._ranks.timing.ahead_s(min(self._misses, ATTEMPTS))
        self._order((now_step + max(2, math.ceil(per_s * ahead_s)), 0))

    # A save that goes on.

    @property
    def is_wanted(self) -> bool:
        return bool(self._targets)

    @property
    def is_asked(self) -> bool:
        # Other ranks may wait for a save that was ordered: this rank makes it, or posts that it cannot.
        return bool(self._asked or self._targets)

    def begin(self) -> bool:
        self._target = min(self._targets, default=None)
        if self._target is None:
            self._order_ahead()
        return self._target is not None

    def save(self) -> Saved:
        assert self._target is not None
        target = self._target
        try:
            capture = self._take(target)
            attempt = self._attempts.make(capture, is_leaving=False, members=self._members())
            saved = self._joint_save.save(target, capture, attempt)
        except Missed as missed:
            self._misses += 1
            if self._ranks.rank == 0 and self._misses % (ATTEMPTS + 1):  # else at its next time
                log("save_retry", level=logging.INFO, why=missed, after_s=0.0)
                if not self._gate.is_closed and self._schedule.has_interval:
                    self._order_ahead()
            raise
        self._misses = 0
        return saved

    def _members(self) -> tuple[int, ...]:
        """The ranks that share the work."""
        is_of_one = self._context.exchange is not None or self._ranks.lines("apart")
        return (0,) if is_of_one else tuple(range(self._ranks.size))

    def _take(self, target: Point) -> Capture:
        while True:
            capture = self._gate.take(TICK_S, exact=target)
            if capture is not None:
                with self._cond:
                    self._taken = target
                    # The next one may be due before this one is committed.
                    self._targets.discard(target)
                    self._hold_at_next()
                return capture
            if self._leaving.notice is not None:
                raise GivenUp
            if min(self._targets, default=target) < target:
                raise Postponed  # a script that asked for the earlier one may stand there until it is saved
            why = self._orders.missed(target)
            if why is None and self._gate.is_lost(target):
                why = "it changed since"
            elif why is None and self._gate.at > target and not self._gate.is_at(target):
                why = GONE_ON
            elif why is None and self._gate.is_closed and not self._gate.is_at(target):
                why = "its script has ended"
            if why is not None:
                self._orders.miss(target, why)
                raise Missed(why)

    def end(self, saved: Saved | None, failure: Exception | None) -> None:
        target, error = self._target, failure
        assert target is not None
        if isinstance(failure, GivenUp):
            error = SaveFailed(GIVEN_UP)
        elif isinstance(failure, Missed):
            error = SaveFailed(f"step {target[0]} could not be saved by all ranks: {failure}{advice(str(failure))}")
        elif failure is not None:
            self._schedule.retry()
        if failure is not None:
            saved = self._taken = None
        with self._cond:
            self._targets.discard(target)
            answered = [ticket for point, ticket in self._asked if point == target]
            self._asked = [(point, ticket) for point, ticket in self._asked if point != target]
            if self._leaving.notice is None:
                self._hold_at_next()
                self._gate.end_save(keep_due=bool(self._targets))
                if not self._targets:
                    self._ranks.relax()
        answer_all(answered, saved, error)
        self._speed_since = (time.monotonic(), self._gate.at[0])

    def retire(self) -> None:
        newest = self._ckpts.newest
        if newest is not None and self._commits.own == newest.ckpt:
            self._ckpts.retire(sweeps=self._leaving.notice is None)

    # The last save.

    def save_last(self, failure: StorageError | None) -> Saved:
        return self._last_save.save(failure)

    def _last_attempt(self, capture: Capture, members: tuple[int, ...]) -> Attempt:
        return self._attempts.make(capture, is_leaving=True, members=members)

    def leave_to_others(self, failure: StorageError) -> bool:
        log("save_retry", level=logging.WARNING, why=failed_text(failure), after_s=0.0)
        self._last_save.leave_to_others(failure)
        return True

    def end_last(self, outcome: Outcome) -> None:
        _leave_after_others(self._ranks, self._leaving, self._pod)
        self._leaving.stay_for_agent(speaks=self._reply.speaks, pod_is_asked=self._reply.pod_is_asked)
        with self._cond:
            asked, self._asked = self._asked, []
        error = None if outcome.is_safe else SaveFailed(outcome.why)
        answer_all([ticket for _, ticket in asked], self._ckpts.newest if outcome.is_safe else None, error)


def _info_of(line: Line) -> dict[str, Any]:
    """What a line's text says; empty if it is not ours."""
    try:
        found = json.loads(line.info)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _leave_after_others(ranks: Peers, leaving: Leaving, pod: Pod) -> None:
    """After the answer: a store that ends too early would hurt the others."""
    assert leaving.notice is not None
    if pod.serves_store:
        ranks.follow("leave")
    # A rank that serves the store ends as soon as it has read this line of all.
    ranks.is_done = True
    ranks.post(Line("out", ranks.rank), timeout_s=0.2)
    if pod.serves_store:
        # A rank that has not heard of the decision yet finds it in the store, which ends with this process.
        end_s = min(time.monotonic() + _OTHERS_S, leaving.notice.deadline_s)
        while time.monotonic() < end_s and not ranks.store_is_unreachable:
            gone = ranks.known.out() | {line.rank for line in ranks.lines("out")} | {ranks.rank}
            if not any(map(ranks.is_alive_there, set(range(ranks.size)) - gone)):
                break
            ranks.wait(TICK_S)
    if not ranks.store_is_unreachable:
        # The store may end before this process does; torch would print a page about that.
        ranks.close()
