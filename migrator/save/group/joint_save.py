"""A save that goes on, made by all ranks: exactly this safe point on every rank, or none.

It is made when a periodic save is due, and when a script asks for a save. Each rank writes its share, and lets its loop
go on. Rank 0 commits when all ranks have written theirs. Every wait has an end (`ranks/timing.py`): no rank gives up
while any rank writes, and no rank waits longer for a rank that neither writes nor shows a sign of life.
"""

from __future__ import annotations

import time

from migrator.ckpt.point import Point
from migrator.errors import SaveFailed
from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.ranks.peers import Peers
from migrator.ranks.timing import GONE_S, LOOK_S, STORE_GONE_S
from migrator.save.attempt import Attempt
from migrator.save.changed_objects import ChangedObjects
from migrator.save.context import SaveContext
from migrator.save.group.commits import Commits
from migrator.save.group.orders import Orders
from migrator.save.group.rank_warnings import RankWarnings
from migrator.save.results import GivenUp, Missed, Saved, Unclean, failed_text
from migrator.state.capture import Capture

_KEPT_ENDS = 64
"""For how many saves the store keeps how they ended."""


class JointSave:
    """One rank's side of such saves, one after the other."""

    def __init__(
        self,
        context: SaveContext,
        ranks: Peers,
        leaving: Leaving,
        *,
        orders: Orders,
        commits: Commits,
        warnings: RankWarnings,
        changed_objects: ChangedObjects,
    ) -> None:
        self._gate = context.gate
        self._ranks = ranks
        self._leaving = leaving
        self._orders = orders
        self._commits = commits
        self._warnings = warnings
        self._changed_objects = changed_objects
        self._ends: list[str] = []
        """Keys in the store that say how saves ended, oldest first."""

    def save(self, target: Point, capture: Capture, attempt: Attempt) -> Saved:
        """Save this safe point with all others; the loop may go on as soon as this rank's part is safe.

        Raises `Missed` if another rank cannot, `GivenUp` if a notice comes.
        """
        self._ranks.hurry()
        start_s = time.monotonic()
        try:
            standing = attempt.standing()
            if standing is not None:
                log("joined", ckpt=standing.ckpt, step=standing.step)
                return standing
            attempt.share()
        except Unclean as error:
            self._gate.spoil(capture)
            self._changed_objects.note(error.names, capture.step, error.why)
            self._orders.miss(target, f"{', '.join(error.names)} changed outside a step")
            raise Missed("it changed outside a step") from error
        except GivenUp:
            raise
        except Exception as error:  # whatever it is, no rank is to wait for this one
            self._orders.miss(target, failed_text(error))
            raise
        finally:
            self._gate.open()
            self._gate.unpin(capture)
        try:
            return self._meet(target, attempt, self._ranks.timing.stall_s(time.monotonic() - start_s))
        except (GivenUp, Missed):
            raise
        except Exception as error:
            self._orders.miss(target, failed_text(error))
            raise

    def _meet(self, target: Point, attempt: Attempt, stall_s: float) -> Saved:
        """Wait until rank 0 has committed what all ranks have written. No rank gives up while any rank writes."""
        leads = self._ranks.rank == 0
        known, moved, moved_s = {self._ranks.rank}, -1, time.monotonic()
        while True:
            if attempt.is_committed():
                return Saved(attempt.name, target[0], 0, 0.0)
            if leads:
                gathering = attempt.look()
                self._warnings.name_odd(gathering)
                if len(gathering.records) == self._ranks.size and not gathering.missing():
                    return self._commit_unless_missed(target, attempt)
                known = set(gathering.records)
                if gathering.unlike():
                    self._orders.miss(target, "ranks hold different tensors; rank 0 writes all from now on")
                for rank, unread in gathering.newer.items():
                    self._orders.miss(target, f"of rank {rank}: {unread}")
            if self._leaving.notice is not None:
                raise GivenUp
            why = self._orders.missed(target)
            if why is not None:
                raise Missed(why)
            waits_for = set(range(self._ranks.size)) - known if leads else {0}
            # Rank 0 shows the others that a rank for which it waits makes progress.
            moves, before = len(known) + sum(map(self._ranks.advanced_there, waits_for)), moved
            if moves != before:
                moved, moved_s = moves, time.monotonic()
                if leads:
                    self._ranks.advance()
            self._give_up_if_stalled(target, waits_for, time.monotonic() - moved_s, stall_s)
            self._ranks.wait(self._ranks.timing.look_on_storage_s(leads=leads))

    def _give_up_if_stalled(self, target: Point, waits_for: set[int], waited_s: float, stall_s: float) -> None:
        # If the store is gone with the rank that served it, that rank has committed already or never will.
        # A dead rank will not write any more.
        is_dead = not self._ranks.store_is_unreachable and not all(map(self._ranks.is_alive_there, waits_for))
        if not is_dead and waited_s <= (STORE_GONE_S if self._ranks.is_disconnected else stall_s):
            return
        leads = self._ranks.rank == 0
        if not leads and self.decide_end(target, "missed") == "commit":
            return  # rank 0 has all it needs
        who = f"rank {', '.join(map(str, sorted(waits_for)))}" if waits_for else "the share of some rank"
        why = "shows no sign of life" if is_dead else f"was waited for {waited_s:.0f} s"
        what = "has not written what belongs to" if leads else "has not committed"
        raise SaveFailed(f"{who} {what} step {target[0]} and {why}")

    def _commit_unless_missed(self, target: Point, attempt: Attempt) -> Saved:
        """On rank 0, when all shares are there. Raises `Missed` if another rank has given up before."""
        if self.decide_end(target, "commit") == "missed":
            raise Missed(self._orders.missed(target) or "another rank has given it up")
        saved = attempt.commit()
        self._commits.note_own(saved.ckpt)
        self._ranks.forget_old()
        return saved

    def decide_end(self, target: Point, word: str) -> str:
        """How this save ends, on all ranks: "commit" or "missed". The first word counts; without the store, this one.

        Raises `GivenUp` at a notice.
        """
        key, found = self._ranks.key_of("end", target), []
        self._ranks.later(lambda store: found.append(store.compare_set(key, "", word)))
        end_s = time.monotonic() + GONE_S
        while not found and not self._ranks.is_disconnected and time.monotonic() < end_s:
            if self._leaving.notice is not None:
                raise GivenUp
            self._ranks.wait(LOOK_S)
        if self._ranks.rank == 0:
            self._ends.append(key)
        if len(self._ends) > _KEPT_ENDS:
            old = self._ends.pop(0)
            self._ranks.later(lambda store: store.delete_key(old))
        return str(found[0], "ascii") if found else word
