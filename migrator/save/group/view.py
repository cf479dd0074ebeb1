"""The view of one rank during the last save: what the ranks have reported, written and committed.

`next_act` in `ranks/protocol.py` decides from this view. Every wait has an end (`ranks/timing.py`). A rank waits for
the reports of other ranks at most a fifth of the grace, and for their shares at most as long as its own share took. It
waits for their own states while they show signs of life and there is time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from migrator.ckpt.point import Point
from migrator.errors import StorageError
from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.ranks.peers import FEW, Peers
from migrator.ranks.protocol import Decision, KnownLines, Self, View
from migrator.ranks.shares import Gathering
from migrator.ranks.timing import STORE_GONE_S
from migrator.save.attempt import Attempt
from migrator.save.context import SaveContext
from migrator.save.group.commits import Commits
from migrator.save.group.rank_warnings import RankWarnings


class GroupView:
    """Makes the view, and keeps the time at which each wait began."""

    def __init__(
        self, context: SaveContext, ranks: Peers, leaving: Leaving, *, commits: Commits, warnings: RankWarnings
    ) -> None:
        self._context = context
        self._ranks = ranks
        self._leaving = leaving
        self._commits = commits
        self._warnings = warnings
        self._attempt: Attempt | None = None
        self._since: dict[str, float] = {}
        """When this rank learned of the notice and of the decision, wrote its share, and saw all that it waits for."""
        self._share_s = 0.0
        """How long this rank's own share took."""
        self._next_look_s = 0.0
        self.is_committed = False
        self.gathering: Gathering | None = None
        """What the ranks had written at the last look."""

    # What this rank does changes the view.

    def begin_attempt(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def end_attempt(self) -> None:
        self._attempt = self.gathering = None

    def note_share(self, took_s: float) -> None:
        """This rank's share is written."""
        self._share_s = took_s
        self._since["shared"] = time.monotonic()
        self.look_again()

    def look_again(self) -> None:
        """Look at storage the next time, even if the last look was a moment ago."""
        self._next_look_s = 0.0

    def begin_anew(self) -> None:
        """The ranks must agree again: forget when the waits began."""
        self._since = {}

    # The view.

    def of(self, me: Self) -> View:
        known, now_s = self._ranks.known, time.monotonic()
        decision = None if not me.is_stopped else known.decision(me.ballot)
        if known.notice is not None:
            self._since.setdefault("notice", now_s)
        if decision is not None:
            self._since.setdefault("decision", now_s)
        target = me.reach if me.is_alone else (decision.target if decision else None)
        self._look(me, decision, target)
        return View(
            known=known,
            store_is_unreachable=self._ranks.store_is_unreachable,
            is_committed=self.is_committed,
            is_complete=me.has_shared and self._is_complete(),
            is_at_target=target is not None and self._context.gate.is_at(target),
            is_at_sooner=me.is_alone and not me.is_taken and self._is_at_sooner(target),
            is_over=target is not None and self._context.gate.is_closed and not self._context.gate.is_at(target),
            window_is_over=self._is_window_over(known, me, now_s),
            help_is_due=self._context.writes
            and self._collects()
            and now_s > self._since.get("shared", now_s) + max(0.1, self._share_s)
            and not self._gives_way(),
            patience_is_over=decision is not None and now_s > self._end_s("decision", self._patience_s),
        )

    def _is_at_sooner(self, target: Point | None) -> bool:
        reach = self._context.gate.reach
        return target is not None and reach is not None and reach < target

    def _is_window_over(self, known: KnownLines, me: Self, now_s: float) -> bool:
        """Whether to decide without the ranks that have not reported: earlier if none of them shows a sign of life."""
        notice = self._leaving.notice
        since_s, grace_s = self._since.get("notice", now_s), notice.grace_s if notice else 30.0
        if now_s <= since_s + self._ranks.timing.window_s(grace_s) or not self._decides(now_s - since_s, grace_s):
            return False
        if now_s > since_s + self._ranks.timing.window_end_s(grace_s):
            return True
        silent = set(range(self._ranks.size)) - known.reaches(me.ballot).keys() - known.out()
        return not any(map(self._ranks.is_alive_there, silent))

    def _decides(self, waited_s: float, grace_s: float) -> bool:
        """Whether this rank may decide. Of many ranks rank 0 decides; the others stand in, one after the other."""
        rank = self._ranks.rank
        if self._ranks.size > FEW and rank:
            stand_in_s = self._ranks.timing.window_end_s(grace_s) + self._ranks.timing.stand_in_s(rank)
            if waited_s < stand_in_s:
                return False
        self._ranks.follow("leave")
        # If the store is gone, the shared log has no new lines: what is on storage decides.
        return self._ranks.store_is_unreachable or self._ranks.has_read("leave")

    def _collects(self) -> bool:
        """Whether this rank reads what all have written. Of many ranks the first member does; the others stand in."""
        if self._attempt is None:
            return False
        position = self._attempt.position
        shared_s = self._since.get("shared", float("inf"))
        if self._ranks.size > FEW and time.monotonic() < shared_s + self._ranks.timing.stand_in_s(position):
            return False
        self._ranks.follow("leave")
        # If the store is gone, the shared log has no new lines: what is on storage decides.
        return self._ranks.store_is_unreachable or self._ranks.has_read("leave")

    def _look(self, me: Self, decision: Decision | None, target: Point | None) -> None:
        """Look on storage, now and then: is there a ckpt, and what have the other ranks written?"""
        now_s = time.monotonic()
        if now_s < self._next_look_s or target is None or not (me.is_trained or (decision and decision.is_trained)):
            return
        collects = self._collects()
        self._next_look_s = now_s + self._ranks.timing.look_on_storage_s(leads=collects)
        try:
            points = {target} | ({decision.target} if decision and decision.target else set())
            self.is_committed = any(self._commits.is_there(self._commits.name(p[0])) for p in points)
            if me.has_shared and self._attempt is not None and collects:
                before = len(self.gathering.records) if self.gathering else 0
                self.gathering = self._attempt.look()
                if len(self.gathering.records) > before:
                    self._leaving.advanced_s = now_s
                    self._ranks.advance()
                self._warnings.name_odd(self.gathering)
        except StorageError as error:
            log("storage_warning", level=logging.WARNING, why=error)

    def _is_complete(self) -> bool:
        """All shares are there, and all own states that can still be expected."""
        gathering, now_s = self.gathering, time.monotonic()
        if gathering is None or not self._context.writes or gathering.missing():
            self._since.pop("complete", None)
            return False
        if (now_s < self._others_end_s() and self._awaited(gathering)) or self._gives_way():
            return False
        # All ranks see this at about the same time, so the lowest rank goes first.
        position = list(gathering.alike()).index(self._ranks.rank)
        first_s = self._since.setdefault("complete", now_s)
        return now_s >= first_s + self._ranks.timing.stand_in_s(position)

    def _others_end_s(self) -> float:
        """Until when this rank waits for what other ranks still have to write."""
        shared_s = self._since["shared"]
        until_s = self._end_s("shared", self._ranks.timing.states_s)
        return min(until_s, shared_s + STORE_GONE_S) if self._ranks.store_is_unreachable else until_s

    def _patience_s(self, left_s: float) -> float:
        size = self._ranks.size
        others = set(range(size)) - {self._ranks.rank} if size <= FEW else {0} - {self._ranks.rank}
        is_whole = not (self._ranks.store_is_unreachable or self._ranks.known.out() & others)
        return self._ranks.timing.patience_s(
            left_s, all_alive=is_whole and all(map(self._ranks.is_alive_there, others))
        )

    def _end_s(self, since: str, limit_of: Callable[[float], float]) -> float:
        """When a wait ends that began at `since` and may take a share of the time that was left then.

        An earlier deadline that became known since then counts.
        """
        now_s = time.monotonic()
        since_s = self._since.get(since, now_s)
        return since_s + limit_of(self._leaving.left_s + now_s - since_s)

    def _gives_way(self) -> bool:
        """This rank holds other tensors than the lowest rank. Those of the lowest rank are saved, unless it is lost."""
        gathering = self.gathering
        if gathering is None or min(gathering.records) in gathering.alike():
            return False
        lowest = min(gathering.records)
        is_there = self._ranks.store_is_unreachable or self._ranks.is_alive_there(lowest)
        return is_there and lowest not in self.failed() and time.monotonic() < self._others_end_s()

    def failed(self) -> set[int]:
        return {line.rank for line in self._ranks.known.lines if line.what == "failed"}

    def _awaited(self, gathering: Gathering) -> set[int]:
        """Ranks whose own state can still be expected."""
        gone = self._ranks.known.out() | self.failed() | gathering.records.keys() | gathering.newer.keys()
        if self._ranks.store_is_unreachable:
            return set(range(self._ranks.size)) - gone
        return {rank for rank in set(range(self._ranks.size)) - gone if self._ranks.is_alive_there(rank)}
