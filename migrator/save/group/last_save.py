"""The last save of several ranks: they agree on a step, save it, and one of them commits it.

The acts that `ranks/protocol.py` asks for are done here, on the real gate, log and storage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from migrator.ckpt.point import Point
from migrator.errors import SaveFailed, StorageError
from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.ranks import protocol
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Act, Line, Self, View
from migrator.ranks.timing import LOOK_S
from migrator.save.attempt import Attempt
from migrator.save.changed_objects import ChangedObjects
from migrator.save.context import SaveContext
from migrator.save.group.commits import Commits
from migrator.save.group.rank_warnings import RankWarnings
from migrator.save.group.reasons import why_alone, why_uncommitted
from migrator.save.group.view import GroupView
from migrator.save.results import SCRIPT_ENDED, NothingToSave, Saved, Unclean, failed_text
from migrator.state.capture import Capture

_LATE_S = 2.0
"""Seconds past the deadline in which acts other than writing still begin. A write that advances is never stopped."""

MakeAttempt = Callable[[Capture, tuple[int, ...]], Attempt]
"""For a capture, and the ranks that share the work."""


class LastSave:
    """One rank's side."""

    def __init__(
        self,
        context: SaveContext,
        ranks: Peers,
        leaving: Leaving,
        make_attempt: MakeAttempt,
        *,
        commits: Commits,
        warnings: RankWarnings,
        changed_objects: ChangedObjects,
    ) -> None:
        self._context = context
        self._gate = context.gate
        self._ranks = ranks
        self._leaving = leaving
        self._make_attempt = make_attempt
        self._commits = commits
        self._warnings = warnings
        self._changed_objects = changed_objects
        self._view = GroupView(context, ranks, leaving, commits=commits, warnings=warnings)
        self._me = Self(ranks.rank, has_notice=True)
        self._capture: Capture | None = None
        self._attempt: Attempt | None = None

    def save(self, failure: StorageError | None = None) -> Saved:
        """Agree, save, commit; goes on where it was if it is called again after a `StorageError`.

        `failure`: this rank cannot write any more, and waits for what the others can.
        Raises `SaveFailed`, `StorageError` or `NothingToSave`.
        """
        self._ranks.hurry()
        self._ranks.must_leave_within(lambda: self._leaving.left_s)
        while True:
            me = self._me
            view = self._view.of(me)
            act, what = protocol.next_act(me, view, self._ranks.size)
            if act is Act.DONE:
                return self._done(me, view)
            if act is Act.NOTHING:
                if me.is_trained:
                    raise SaveFailed(SCRIPT_ENDED)
                raise NothingToSave
            is_writing = act is Act.SHARE or (act is Act.COMMIT and self._context.writes)
            is_late = self._leaving.left_s < -_LATE_S and not is_writing
            if act is Act.WAIT or failure is not None or is_late:
                self._give_up_if_hopeless(me, failure)
                self._ranks.wait(LOOK_S)
                continue
            try:
                self._me = self._do(me, act, what)
                if act is Act.COMMIT and me.has_shared and self._view.is_committed:
                    return self._done(me, view)
            except Unclean as error:
                self._me = self._unclean(me, act, error)
            except SaveFailed:
                self._view.look_again()
                if not self._view.of(me).is_committed:
                    raise
                # Another rank was faster: what this rank was still writing is in the ckpt already.

    def leave_to_others(self, failure: StorageError) -> None:
        """This rank cannot write. Others may: they can write its share as well."""
        self._ranks.post(Line("failed", self._ranks.rank, info=failed_text(failure)))

    # The acts.

    def _do(self, me: Self, act: Act, what: Line | Point | None) -> Self:
        if act is Act.POST:
            assert isinstance(what, Line)
            self._ranks.post(what)
        elif act is Act.STOP:
            reach, turns, is_trained = self._gate.stop()
            return protocol.done(me, act, reach=reach, turns=turns, is_trained=is_trained)
        elif act is Act.SAVE_ALONE:
            return self._save_alone(me)
        elif act is Act.LET:
            assert isinstance(what, tuple)
            return self._let(me, what)
        elif act is Act.TAKE:
            assert isinstance(what, tuple)
            return self._take(me, what)
        elif act is Act.SHARE:
            return self._share(me)
        elif act is Act.HELP:
            self._help()
        elif act is Act.COMMIT:
            self._commit()
        elif act is Act.ANEW:
            log("agreed_anew", level=logging.WARNING, step=self._gate.at[0])
            self._release()
            self._view.begin_anew()
            return protocol.done(me, act)
        return me

    def _save_alone(self, me: Self) -> Self:
        self._release()
        reach, turns, is_trained = self._gate.stop_here()
        step = reach[0] if reach else None
        log("saving_alone", level=logging.WARNING, step=step, why=why_alone(self._ranks, me))
        return protocol.done(me, Act.SAVE_ALONE, reach=reach, turns=turns, is_trained=is_trained)

    def _let(self, me: Self, point: Point) -> Self:
        decision = self._ranks.known.decision(me.ballot)
        members = ",".join(map(str, decision.members)) if decision else ""
        log("agreed", step=point[0], turn=point[1], here=self._gate.at[0], members=members)
        self._gate.let(point)
        return protocol.done(me, Act.LET, reach=point)

    def _take(self, me: Self, point: Point) -> Self:
        capture = self._gate.take(LOOK_S, exact=point)
        if capture is None:
            return protocol.done(me, Act.TAKE, is_clean=False) if self._gate.is_lost(point) else me
        self._capture = capture
        decision = self._ranks.known.decision(me.ballot)
        members = (me.rank,) if me.is_alone or decision is None else decision.members
        if self._context.exchange is not None:
            members = (0,)
        self._attempt = self._make_attempt(capture, members)
        self._view.begin_attempt(self._attempt)
        if self._attempt.standing() is not None:
            self._view.is_committed = True
        return protocol.done(me, Act.TAKE)

    def _share(self, me: Self) -> Self:
        assert self._attempt is not None
        start_s = time.monotonic()
        self._attempt.share()
        self._view.note_share(time.monotonic() - start_s)
        return protocol.done(me, Act.SHARE)

    def _help(self) -> None:
        assert self._attempt is not None
        share = self._attempt.help()
        if share is None:
            self._ranks.wait(LOOK_S)  # only own states of other ranks are still missing
        else:
            log("share_taken_over", level=logging.WARNING, share=share, ckpt=self._attempt.name)

    def _commit(self) -> None:
        assert self._attempt is not None
        if not self._context.writes:
            return  # rank 0 commits; the shared log says when
        gathering = self._attempt.look()
        saved = self._attempt.commit()
        self._view.is_committed = True
        if saved.is_joined:
            return  # another rank saved this step, alone as well: it says what it has
        self._warnings.name_missing(gathering)
        self._commits.note_own(saved.ckpt)

    def _unclean(self, me: Self, act: Act, error: Unclean) -> Self:
        if self._capture is not None:
            self._gate.spoil(self._capture)
            self._changed_objects.note(error.names, self._capture.step, error.why)
        self._release()
        return protocol.done(me, act, is_clean=False)

    def _release(self) -> None:
        """Let go of what was taken; the loop may have to go on."""
        if self._capture is not None:
            self._gate.open()
            self._gate.unpin(self._capture)
        self._capture = self._attempt = None
        self._view.end_attempt()

    # The end.

    def _give_up_if_hopeless(self, me: Self, failure: StorageError | None) -> None:
        if failure is not None:
            able = set(range(self._ranks.size)) - self._view.failed() - {me.rank} - self._ranks.known.out()
            if me.is_alone or not any(self._ranks.is_alive_there(rank) for rank in able):
                raise failure
        if self._leaving.left_s < 0:
            if failure is not None:
                raise failure
            if self._attempt is None or not me.has_shared:
                raise SaveFailed(self._leaving.why_no_safe_point)
            raise SaveFailed(why_uncommitted(self._ranks, self._view.gathering, writes=self._context.writes))

    def _done(self, me: Self, view: View) -> Saved:
        decision = view.known.decision(me.ballot)
        points = [me.reach if me.is_alone else None, decision.target if decision else None]
        names = {self._commits.name(point[0]) for point in points if point is not None}
        saved = self._commits.furthest(names, is_alone=me.is_alone)
        if saved is None:
            raise SaveFailed("the ckpt that the ranks agreed on was there and is gone; who deletes on the volume?")
        return saved
