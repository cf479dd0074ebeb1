"""Saves that several ranks make together. Runs on the saving thread of each.

Leaving: the acts that `agreement` asks for, done on the real gate, board and
storage. Going on: the target is told well ahead ("order"), or every rank knows
it; all ranks save exactly that safe point or none.

No wait here is without an end (`pace.py`): of others' reports at most a fifth of the grace,
of others' shares at most as long as one's own took, of their own states as long
as they show signs of life and there is time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from migrator.ranks import protocol as agreement
from migrator.ranks import large_values
from migrator.ranks.protocol import Act, Board, Decision, Line, Point, Self, View
from migrator.state.capture import Capture
from migrator.errors import SaveFailed, StorageError
from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.ckpt.generations import whole
from migrator.ckpt.manifest import ckpt_name, parse_ckpt_name
from migrator.ranks.timing import GONE_S, Pace
from migrator.ranks.peers import FEW, Once, Ranks, claim_of
from migrator.save.attempt import Attempt, GivenUp, Saved, Unclean, Workshop, failed_text
from migrator.ranks.shares import Gathering, OnStorage

_TICK_S = 0.015
_LATE_S = 2.0
"""So long past the deadline, what was begun may still come to an end."""
_STORE_GONE_S = 2.0
"""With the store gone, what others were about to write is waited for so long."""
_RETRY_S = 0.25
_KEPT_ENDS = 64
"""Of so many saves that went on it stays in the store how they ended."""

MakeAttempt = Callable[[Capture, bool, tuple[int, ...]], Attempt]


class NothingToSave(Exception):  # noqa: N818 - internal
    """No rank has trained anything."""


class Missed(Exception):  # noqa: N818 - internal
    """The safe point that was to be saved cannot be, on this rank or another."""


class ThroughStore:
    """For ranks that do not see the root: their own states reach the writer through the job's store."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def _key(self, ckpt: str, rank: int) -> str:
        return self._ranks.key(f"record/{ckpt}/{rank}")

    def forget(self, ckpt: str) -> None:
        """It is committed: its manifest has what the records said."""
        for rank in range(self._ranks.size):
            self._ranks.later(partial(large_values.delete, key=self._key(ckpt, rank)))

    def put(self, ckpt: str, rank: int, data: bytes) -> None:
        key = self._key(ckpt, rank)
        if self._ranks.call(lambda store: large_values.put(store, key, data)) is None:
            raise SaveFailed("the job's store does not answer, and this rank does not see the root of the ckpts")

    def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
        found = {}
        for rank in sorted(ranks):
            data = self._ranks.call(partial(_found, self._key(ckpt, rank)))
            if data:
                found[rank] = data
        return found

    def is_committed(self, ckpt: str) -> bool:
        return any(json.loads(line.info)["ckpt"] == ckpt for line in self._ranks.lines("saved"))


def _found(key: str, store: Any) -> bytes:
    return large_values.get(store, key) if store.check([key]) else b""


class Together:
    """One rank's side of the saves of all ranks."""

    def __init__(self, shop: Workshop, ranks: Ranks, leaving: Leaving, make_attempt: MakeAttempt) -> None:
        self._shop = shop
        self._ranks = ranks
        self._leaving = leaving
        self._make_attempt = make_attempt
        self.note_unclean: Callable[[list[str], int, str], None] = lambda names, step, why: None
        self._has_told_unlike = False
        self._ends: list[str] = []
        self.committed: str | None = None
        """The newest ckpt that this very rank committed: it is the one to clean up behind it."""
        self._begin()

    # Leaving.

    def _begin(self) -> None:
        self._capture: Capture | None = None
        self._attempt: Attempt | None = None
        self._since: dict[str, float] = {}
        self._share_s = 0.0
        self._next_look_s = 0.0
        self._was_committed = False
        self._gathering: Gathering | None = None

    def leave(self) -> Saved:
        """Agree, save, commit. Raises `SaveFailed`, `StorageError` or `NothingToSave`."""
        self._begin()
        self._ranks.hurry()
        self._ranks.left_s = lambda: self._leaving.left_s
        me = Self(self._ranks.rank, has_news=True)
        failure: StorageError | None = None
        retry_s = _RETRY_S
        while True:
            view = self._view(me)
            act, what = agreement.next_act(me, view, self._ranks.size)
            if act is Act.DONE:
                return self._done(me, view)
            if act is Act.NOTHING:
                if me.is_trained:
                    raise SaveFailed("the script ended before it reached a safe point")
                raise NothingToSave
            is_writing = act is Act.SHARE or (act is Act.COMMIT and self._shop.writes)
            is_late = self._leaving.left_s < -_LATE_S and not is_writing
            if act is Act.WAIT or failure is not None or is_late:
                self._give_up_if_hopeless(me, view, failure)
                self._ranks.wait(_TICK_S)
                continue
            try:
                me = self._do(me, act, what)
                if act is Act.COMMIT and me.has_shared and self._was_committed:
                    return self._done(me, view)
            except Unclean as error:
                me = self._unclean(me, act, error)
            except SaveFailed:
                self._next_look_s = 0.0
                if not self._view(me).is_committed:
                    raise
                # Another rank was quicker: what this one was still writing is in the ckpt already.
            except StorageError as error:
                log("save_retry", level=logging.WARNING, why=failed_text(error), after_s=retry_s)
                if not error.transient or self._leaving.left_s < retry_s:
                    # Others may still be able to: their shares do not need this rank.
                    failure = error
                    self._ranks.post(Line("failed", me.rank, info=failed_text(error)))
                    continue
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, 4.0)

    def _do(self, me: Self, act: Act, what: Line | Point | None) -> Self:
        gate = self._shop.gate
        if act is Act.POST:
            assert isinstance(what, Line)
            self._ranks.post(what)
        elif act in (Act.STOP, Act.SETTLE):
            if act is Act.SETTLE:
                self._release()
            reach, turns, is_trained = gate.stop() if act is Act.STOP else gate.settle_here()
            if act is Act.SETTLE:
                log("settled", level=logging.WARNING, step=reach[0] if reach else None, why=self._why_alone(me))
            return agreement.done(me, act, reach=reach, turns=turns, is_trained=is_trained)
        elif act is Act.LET:
            assert isinstance(what, tuple)
            decision = self._ranks.board.decision(me.ballot)
            members = ",".join(map(str, decision.members)) if decision else ""
            log("agreed", step=what[0], turn=what[1], here=gate.at[0], members=members)
            gate.let(what)
            return agreement.done(me, act, reach=what)
        elif act is Act.TAKE:
            assert isinstance(what, tuple)
            return self._take(me, what)
        elif act is Act.SHARE:
            return self._share(me)
        elif act is Act.HELP:
            assert self._attempt is not None
            share = self._attempt.help()
            if share is None:
                self._ranks.wait(_TICK_S)  # only what is other ranks' own is still missing
            else:
                log("share_taken_over", level=logging.WARNING, share=share, ckpt=self._attempt.name)
        elif act is Act.COMMIT:
            self._commit()
        elif act is Act.ANEW:
            log("agreed_anew", level=logging.WARNING, step=gate.at[0])
            self._release()
            self._since = {}
            return agreement.done(me, act)
        return me

    def _why_alone(self, me: Self) -> str:
        """What keeps this rank, as it was before, from saving with the others."""
        decision = self._ranks.board.decision(me.ballot)
        if me.is_unclean:
            return "what it holds changed outside a step"
        if decision is None or decision.target is None:
            lost = "the job's store is gone" if self._ranks.is_lost else "the others have nothing to save"
            return f"{lost}; no step was agreed on"
        if me.reach is None:
            return "its script ends"
        step, turn = decision.target
        if me.reach[0] > step:
            return f"it is past step {step}, which was agreed on"
        if me.reach > decision.target:
            return f"it is in the next epoch, and what it held of step {step} before that changed"
        where = f"the epoch behind step {step}" if turn else f"step {step}"
        return f"it did not come to {where}, which was agreed on, in time"

    def _take(self, me: Self, point: Point) -> Self:
        gate = self._shop.gate
        capture = gate.take(_TICK_S, exact=point)
        if capture is None:
            return agreement.done(me, Act.TAKE, is_clean=False) if gate.is_lost(point) else me
        self._capture = capture
        decision = self._ranks.board.decision(me.ballot)
        members = (me.rank,) if me.is_alone or decision is None else decision.members
        if self._shop.exchange is not None:
            members = (0,)
        self._attempt = self._make_attempt(capture, True, members)
        standing = self._attempt.standing()
        if standing is not None:
            self._was_committed = True
        return agreement.done(me, Act.TAKE)

    def _share(self, me: Self) -> Self:
        assert self._attempt is not None
        start_s = time.monotonic()
        try:
            self._attempt.share()
        except GivenUp:
            return me  # somebody said "again"; the board tells
        self._share_s = time.monotonic() - start_s
        self._since["shared"] = time.monotonic()
        self._next_look_s = 0.0
        return agreement.done(me, Act.SHARE)

    def _commit(self) -> None:
        assert self._attempt is not None
        if not self._shop.writes:
            return  # rank 0 commits; the board tells
        gathering = self._attempt.look()
        saved = self._attempt.commit()
        self._was_committed = True
        if saved.is_joined:
            return  # another rank saved this step, alone as well: it says what it has
        self._name_who_is_missing(gathering)
        self.committed = saved.ckpt
        self._tell_committed(self.committed)

    def _tell_committed(self, name: str) -> None:
        if self._shop.exchange is not None:
            self._ranks.post(Line("saved", self._ranks.rank, info=json.dumps({"ckpt": name})))
            self._shop.exchange.forget(name)

    def _unclean(self, me: Self, act: Act, error: Unclean) -> Self:
        if self._capture is not None:
            self._shop.gate.spoil(self._capture)
            self.note_unclean(error.names, self._capture.step, error.why)
        self._release()
        return agreement.done(me, act, is_clean=False)

    def _release(self) -> None:
        """Let go of what was taken; the loop may have to go on."""
        if self._capture is not None:
            self._shop.gate.open()
            self._shop.gate.unpin(self._capture)
        self._capture = self._attempt = self._gathering = None

    # What the world looks like.

    def _view(self, me: Self) -> View:
        board, now_s = self._ranks.board, time.monotonic()
        decision = None if not me.is_stopped else board.decision(me.ballot)
        if board.news is not None:
            self._since.setdefault("news", now_s)
        if decision is not None:
            self._since.setdefault("decision", now_s)
        target = me.reach if me.is_alone else (decision.target if decision else None)
        self._look(me, decision, target)
        return View(
            board=board,
            is_lost=self._ranks.is_lost,
            is_committed=self._was_committed,
            is_complete=me.has_shared and self._is_complete(),
            is_at_target=target is not None and self._shop.gate.is_at(target),
            is_at_sooner=me.is_alone and not me.is_taken and self._is_at_sooner(target),
            is_over=target is not None and self._shop.gate.is_closed and not self._shop.gate.is_at(target),
            window_is_over=self._is_window_over(board, me, now_s),
            help_is_due=self._shop.writes
            and self._collects()
            and now_s > self._since.get("shared", now_s) + max(0.1, self._share_s)
            and not self._gives_way(),
            patience_is_over=decision is not None and now_s > self._end_s("decision", self._patience_s),
        )

    def _is_at_sooner(self, target: Point | None) -> bool:
        reach = self._shop.gate.reach
        return target is not None and reach is not None and reach < target

    @property
    def _pace(self) -> Pace:
        return self._ranks.pace

    def _is_window_over(self, board: Board, me: Self, now_s: float) -> bool:
        """Whether to decide without those who have not reported: nobody waits long for who shows no sign of life."""
        news = self._leaving.news
        since_s, grace_s = self._since.get("news", now_s), news.grace_s if news else 30.0
        if now_s <= since_s + self._pace.window_s(grace_s) or not self._decides(now_s - since_s, grace_s):
            return False
        if now_s > since_s + self._pace.window_end_s(grace_s):
            return True
        silent = set(range(self._ranks.size)) - board.reaches(me.ballot).keys() - board.out()
        return not any(map(self._ranks.is_alive_there, silent))

    def _decides(self, waited_s: float, grace_s: float) -> bool:
        """Of many ranks the first decides; the others come after it, one by one."""
        rank = self._ranks.rank
        if self._ranks.size > FEW and rank:
            stand_in_s = self._pace.window_end_s(grace_s) + self._pace.stand_in_s(rank)
            if waited_s < stand_in_s:
                return False
        self._ranks.follow("leave")
        # With the store gone storage says what there is to know.
        return self._ranks.is_lost or self._ranks.has_read("leave")

    def _collects(self) -> bool:
        """Of many ranks the first one with a share looks what all have written; the others come after it."""
        if self._attempt is None:
            return False
        position = self._attempt.position
        shared_s = self._since.get("shared", float("inf"))
        if self._ranks.size > FEW and time.monotonic() < shared_s + self._pace.stand_in_s(position):
            return False
        self._ranks.follow("leave")
        # With the store gone storage says what there is to know.
        return self._ranks.is_lost or self._ranks.has_read("leave")

    def _look(self, me: Self, decision: Decision | None, target: Point | None) -> None:
        """At storage, now and then: is it committed, and what have the others written?"""
        now_s = time.monotonic()
        if now_s < self._next_look_s or target is None or not (me.is_trained or (decision and decision.is_trained)):
            return
        collects = self._collects()
        self._next_look_s = now_s + self._pace.look_on_storage_s(leads=collects)
        try:
            points = {target} | ({decision.target} if decision and decision.target else set())
            self._was_committed = any(self._is_committed(ckpt_name(self._number, p[0])) for p in points)
            if me.has_shared and self._attempt is not None and collects:
                before = len(self._gathering.records) if self._gathering else 0
                self._gathering = self._attempt.look()
                if len(self._gathering.records) > before:
                    self._leaving.advanced_s = now_s
                    self._ranks.advanced += 1
                self._tell_unlike(self._gathering)
        except StorageError as error:
            log("storage_warning", level=logging.WARNING, why=error)

    @property
    def _number(self) -> int:
        return self._shop.generation.number

    def _is_committed(self, name: str) -> bool:
        return (self._shop.exchange or OnStorage(self._shop.storage)).is_committed(name)

    def _is_complete(self) -> bool:
        """All shares are there, and of what is ranks' own all that can still be expected."""
        gathering, now_s = self._gathering, time.monotonic()
        if gathering is None or not self._shop.writes or gathering.missing():
            self._since.pop("complete", None)
            return False
        if (now_s < self._others_end_s() and self._awaited(gathering)) or self._gives_way():
            return False
        # All see it at about the same time: the lowest rank first.
        position = list(gathering.alike()).index(self._ranks.rank)
        first_s = self._since.setdefault("complete", now_s)
        return now_s >= first_s + self._pace.stand_in_s(position)

    def _others_end_s(self) -> float:
        """So long other ranks may take for what this one waits for."""
        shared_s = self._since["shared"]
        until_s = self._end_s("shared", self._pace.states_s)
        return min(until_s, shared_s + _STORE_GONE_S) if self._ranks.is_lost else until_s

    def _patience_s(self, left_s: float) -> float:
        size = self._ranks.size
        others = set(range(size)) - {self._ranks.rank} if size <= FEW else {0} - {self._ranks.rank}
        is_whole = not (self._ranks.is_lost or self._ranks.board.out() & others)
        return self._pace.patience_s(left_s, all_alive=is_whole and all(map(self._ranks.is_alive_there, others)))

    def _end_s(self, since: str, share_s: Callable[[float], float]) -> float:
        """Until when something is waited for that began then, for a share of the time that was left. A deadline that
        was heard of since, an earlier one, counts as well."""
        now_s = time.monotonic()
        since_s = self._since.get(since, now_s)
        return since_s + share_s(self._leaving.left_s + now_s - since_s)

    def _gives_way(self) -> bool:
        """The lowest rank holds other tensors than this one: its own are saved for all, unless it is lost."""
        gathering = self._gathering
        if gathering is None or min(gathering.records) in gathering.alike():
            return False
        lowest = min(gathering.records)
        is_there = self._ranks.is_lost or self._ranks.is_alive_there(lowest)
        return is_there and lowest not in self._failed() and time.monotonic() < self._others_end_s()

    def _failed(self) -> set[int]:
        return {line.rank for line in self._ranks.board.lines if line.what == "failed"}

    def _awaited(self, gathering: Gathering) -> set[int]:
        """Ranks that will still tell what is their own."""
        gone = self._ranks.board.out() | self._failed() | gathering.records.keys()
        if self._ranks.is_lost:
            return set(range(self._ranks.size)) - gone
        return {rank for rank in set(range(self._ranks.size)) - gone if self._ranks.is_alive_there(rank)}

    def _give_up_if_hopeless(self, me: Self, view: View, failure: StorageError | None) -> None:
        if failure is not None:
            board = self._ranks.board
            able = set(range(self._ranks.size)) - self._failed() - {me.rank} - board.out()
            if me.is_alone or not any(self._ranks.is_alive_there(rank) for rank in able):
                raise failure
        if self._leaving.left_s < 0:
            if failure is not None:
                raise failure
            if self._attempt is None or not me.has_shared:
                raise SaveFailed(self._leaving.why_no_safe_point)
            raise SaveFailed(self._why_uncommitted())

    def _why_uncommitted(self) -> str:
        """This rank has written its share, the grace is over, and there is no ckpt."""
        gathering = self._gathering
        if not self._shop.writes:
            return "rank 0, which writes for all ranks, did not commit within the grace"
        if gathering is None:
            return "what the other ranks wrote could not be looked at within the grace"
        missing = gathering.missing()
        if missing:
            silent = sorted(set(range(self._ranks.size)) - gathering.alike().keys())
            of = f"; nothing that fits came from rank {', '.join(map(str, silent))}" if silent else ""
            return f"{len(missing)} of {gathering.shares} shares were not written within the grace{of}"
        lowest = min(gathering.records)
        if lowest not in gathering.alike():
            return f"rank {lowest} holds other tensors than this one, and did not commit its own within the grace"
        return "all shares were written, but the ckpt was not committed within the grace"

    def _done(self, me: Self, view: View) -> Saved:
        decision = view.board.decision(me.ballot)
        points = [
            p for p in (me.reach if me.is_alone else None, decision.target if decision else None) if p is not None
        ]
        names = {ckpt_name(self._number, point[0]) for point in points}
        if me.is_alone and self._shop.writes:
            names |= self._further(max(names))
        for name in sorted(names, reverse=True):
            if not self._is_committed(name):
                continue
            step = int(name.rpartition("-")[2])
            if not self._shop.writes:
                return Saved(name, step, 0, 0.0)
            size = whole(self._shop.storage, name).bytes
            if self.committed != name:
                log("joined", ckpt=name, step=step)
                self._tell_committed(name)
            return Saved(name, step, size, 0.0)
        raise SaveFailed("the ckpt that the ranks agreed on was there and is gone; who deletes on the volume?")

    def _further(self, name: str) -> set[str]:
        """What other ranks that save alone have saved beyond this: a resumed job goes on from there."""
        found = {other: parse_ckpt_name(other) for other in self._shop.storage.list()}
        return {other for other, parsed in found.items() if parsed and parsed[0] == self._number and other > name}

    def _name_who_is_missing(self, gathering: Gathering) -> None:
        for rank in sorted(set(range(self._ranks.size)) - gathering.alike().keys()):
            what = "its random states and all that is its own"
            log("rank_lost", level=logging.WARNING, lost=rank, means=what, why=self._why_missing(rank, gathering))

    def _why_missing(self, rank: int, gathering: Gathering) -> str:
        """What is known of a rank whose own state is not in the ckpt. That it was late is said only if it was."""
        said = {line.what: line for line in self._ranks.board.lines if line.rank == rank}
        if rank in gathering.records:
            names = gathering.unlike().get(rank, [])
            return f"it holds other tensors than rank {min(gathering.alike())}: {', '.join(names)}"
        if "bye" in said:
            return "its script had ended"
        if "failed" in said:
            return f"it could not write: {said['failed'].info}"
        if "alone" in said:
            return "it could not come to this step and saves the one it is at"
        if self._ranks.is_lost:
            return "the job's store is gone, and nothing of it was found on storage in time"
        if not self._ranks.is_alive_there(rank):
            return "it shows no sign of life: its process ended, froze or was cut off"
        return "it is alive and had not written what is its own in time"

    def _tell_unlike(self, gathering: Gathering) -> None:
        unlike = gathering.unlike()
        if unlike and not self._has_told_unlike:
            self._has_told_unlike = True
            names = sorted({name for names in unlike.values() for name in names})
            log(
                "ranks_differ",
                level=logging.WARNING,
                ranks=",".join(map(str, unlike)),
                objects=",".join(names),
                means="of the ranks named nothing is saved; what each rank has for itself is registered with own=True",
            )
            if self._ranks.rank == 0:
                self._ranks.post(Line("apart", 0))

    # Going on.

    def go_on(self, target: Point, capture: Capture) -> Saved:
        """Save this safe point with all others; the loop is let on as soon as what is this rank's is safe.

        Raises `Missed` if another rank cannot, `GivenUp` if news of leaving come.
        """
        self._begin()
        self._ranks.hurry()
        start_s = time.monotonic()
        gate, self._capture = self._shop.gate, capture
        every = tuple(range(self._ranks.size))
        members = (0,) if self._shop.exchange is not None or self._ranks.lines("apart") else every
        attempt = self._attempt = self._make_attempt(capture, False, members)
        try:
            standing = attempt.standing()
            if standing is not None:
                log("joined", ckpt=standing.ckpt, step=standing.step)
                return standing
            attempt.share()
        except Unclean as error:
            gate.spoil(capture)
            self.note_unclean(error.names, capture.step, error.why)
            self.miss(target, f"{', '.join(error.names)} changed outside a step")
            raise Missed("it changed outside a step") from error
        except GivenUp:
            raise
        except Exception as error:  # whatever it is, nobody is to wait for this rank
            self.miss(target, failed_text(error))
            raise
        finally:
            self._release()
        try:
            return self._meet(target, attempt, self._pace.stall_s(time.monotonic() - start_s))
        except (GivenUp, Missed):
            raise
        except Exception as error:
            self.miss(target, failed_text(error))
            raise

    def _meet(self, target: Point, attempt: Attempt, stall_s: float) -> Saved:
        """Until rank 0 has what all have written, and has committed it. As long as anybody writes, nobody gives up."""
        leads = self._ranks.rank == 0
        known, moved, moved_s = {self._ranks.rank}, -1, time.monotonic()
        while True:
            if attempt.is_committed():
                return Saved(attempt.name, target[0], 0, 0.0)
            if leads:
                gathering = attempt.look()
                self._tell_unlike(gathering)
                if len(gathering.records) == self._ranks.size and not gathering.missing():
                    return self._commit_unless_missed(target, attempt)
                known = set(gathering.records)
                if gathering.unlike():
                    self.miss(target, "ranks hold different tensors; rank 0 writes all from now on")
            if self._leaving.news is not None:
                raise GivenUp
            why = self.missed(target)
            if why is not None:
                raise Missed(why)
            waits_for = set(range(self._ranks.size)) - known if leads else {0}
            # Rank 0 shows the others that somebody whom it waits for goes on.
            moves, before = len(known) + sum(map(self._ranks.advanced_there, waits_for)), moved
            if moves != before:
                moved, moved_s = moves, time.monotonic()
                self._ranks.advanced += leads
            self._give_up_if_stalled(target, waits_for, time.monotonic() - moved_s, stall_s)
            self._ranks.wait(self._pace.look_on_storage_s(leads=leads))

    def _give_up_if_stalled(self, target: Point, waits_for: set[int], waited_s: float, stall_s: float) -> None:
        # Whoever serves the store has ended, and has committed just before, or never will; nor will the dead.
        is_dead = not self._ranks.is_lost and not all(map(self._ranks.is_alive_there, waits_for))
        if not is_dead and waited_s <= (_STORE_GONE_S if self._ranks.is_cut_off else stall_s):
            return
        leads = self._ranks.rank == 0
        if not leads and self._how_it_ends(target, "missed") == "commit":
            return  # rank 0 has all it needs
        who = f"rank {', '.join(map(str, sorted(waits_for)))}" if waits_for else "the share of some rank"
        why = "shows no sign of life" if is_dead else f"was waited for {waited_s:.0f} s"
        what = "has not written what belongs to" if leads else "has not committed"
        raise SaveFailed(f"{who} {what} step {target[0]} and {why}")

    def _commit_unless_missed(self, target: Point, attempt: Attempt) -> Saved:
        """Rank 0, with all shares at hand. Who has given up has said so, or finds that it is too late for that."""
        if self._how_it_ends(target, "commit") == "missed":
            raise Missed(self.missed(target) or "another rank has given it up")
        saved = attempt.commit()
        self.committed = saved.ckpt
        self._tell_committed(saved.ckpt)
        self._ranks.forget_old()
        return saved

    def _how_it_ends(self, target: Point, word: str) -> str:
        """The first word on it counts, for all ranks; without the store one's own. Raises `GivenUp` if news come."""
        key, found = self._ranks.key_of("end", target), []
        self._ranks.later(lambda store: found.append(store.compare_set(key, "", word)))
        end_s = time.monotonic() + GONE_S
        while not found and not self._ranks.is_cut_off and time.monotonic() < end_s:
            if self._leaving.news is not None:
                raise GivenUp
            self._ranks.wait(_TICK_S)
        if self._ranks.rank == 0:
            self._ends.append(key)
        if len(self._ends) > _KEPT_ENDS:
            old = self._ends.pop(0)
            self._ranks.later(lambda store: store.delete_key(old))
        return str(found[0], "ascii") if found else word

    def miss(self, target: Point, why: str) -> None:
        """Tell the others that this safe point cannot be saved here."""
        line = Line("missed", self._ranks.rank, point=target, info=why)
        self._ranks.post(Once(line, claim_of(line), lambda lines: _is_among(line, lines)), timeout_s=0)

    def missed(self, target: Point) -> str | None:
        """Why a rank cannot save this safe point."""
        for line in self._ranks.lines("missed"):
            if line.point == target:
                return f"rank {line.rank}: {line.info}"
        return None


def _is_among(line: Line, lines: list[Line]) -> bool:
    return any(other.what == line.what and other.point == line.point for other in lines)


def order(target: Point, rank: int) -> Once:
    """All ranks are to save this safe point; whoever wants that says it once."""
    line = Line("order", rank, point=target)
    return Once(line, claim_of(line), lambda lines: _is_among(line, lines))


def info_of(line: Line) -> dict[str, Any]:
    """What a line's text says; empty if it is not ours."""
    try:
        found = json.loads(line.info)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
