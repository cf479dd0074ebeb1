"""How the ranks agree on the safe point that all of them save before they leave.

The ranks append to a shared log, which all of them read in the same order, and
send reports to the ranks that decide or collect. What one rank has read of both
is its *known lines*. Lines are never withdrawn: if several lines answer the same
question differently, the first one counts. The next act of a rank depends only on
its known lines, on what it has done, and on what is on storage. So `next_act` is
a pure function, and a model checker can run it through all orders of events.

    notice    this rank must leave
    reach     the safe point this rank is at, or on its way to, and the turns of its step that this rank can save;
              the gate is shut behind it
    decide    the target: in the highest step, the turn that all ranks can save; and which ranks have reported
    fate      of a decision: "commit", or "again" if the target cannot be saved
    alone     this rank cannot reach the target and saves the safe point that it is at
    bye       the script of this rank has ended

No rank waits without a limit. A rank that cannot reach the target saves the safe
point that it is at, by itself. This choice is final.

The price: if a rank is lost in the middle of a step there may be two complete
ckpts. The one with the higher step is loaded.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from migrator.ckpt.point import Point, Turns

COMMIT, AGAIN = "commit", "again"


@dataclass(frozen=True)
class Line:
    """What one rank wrote on the shared log."""

    what: str
    rank: int
    ballot: int = 0
    """The number of the decision it belongs to. If a target cannot be saved, a further decision is made."""
    point: Point | None = None
    is_trained: bool = False
    members: tuple[int, ...] = ()
    fate: str = ""
    info: str = ""
    turns: Turns = ()
    """The turns that can be saved in the step of `point`. Empty: only the turn of `point`."""

    def to_text(self) -> str:
        fields: dict[str, Any] = {"what": self.what, "rank": self.rank}
        fields |= {"ballot": self.ballot} if self.ballot else {}
        fields |= {"point": self.point} if self.point is not None else {}
        fields |= {"is_trained": True} if self.is_trained else {}
        fields |= {"members": self.members} if self.members else {}
        fields |= {"fate": self.fate} if self.fate else {}
        fields |= {"info": self.info} if self.info else {}
        fields |= {"turns": self.turns} if self.turns else {}
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @staticmethod
    def of(text: str) -> Line | None:
        """Parse a line; None if no rank of this job can have written this text."""
        try:
            fields = json.loads(text)
            point = fields.pop("point", None)
            members = tuple(int(rank) for rank in fields.pop("members", ()))
            turns = tuple((int(turn), str(place)) for turn, place in fields.pop("turns", ()))
            where = None if point is None else (int(point[0]), int(point[1]))
            return Line(point=where, turns=turns, members=members, **fields)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            return None


@dataclass(frozen=True)
class Decision:
    """The content of a `decide` line."""

    target: Point | None
    """None: no rank has anything to save."""
    members: tuple[int, ...]
    """The ranks that reported in time, in ascending order. They share the work."""
    is_trained: bool


@dataclass(frozen=True)
class KnownLines:
    """The lines that a rank has read, in order."""

    lines: tuple[Line, ...]

    @cached_property
    def _by(self) -> dict[str, list[Line]]:
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.what, []).append(line)
        return found

    def named(self, what: str) -> list[Line]:
        return self._by.get(what, [])

    def said(self, what: str, ballot: int = 0) -> list[Line]:
        return [line for line in self.named(what) if line.ballot == ballot]

    @property
    def notice(self) -> Line | None:
        return next(iter(self.said("notice")), None)

    def reaches(self, ballot: int) -> dict[int, Line]:
        """The first `reach` line of each rank."""
        found: dict[int, Line] = {}
        for line in self.said("reach", ballot):
            found.setdefault(line.rank, line)
        return found

    def decision(self, ballot: int) -> Decision | None:
        line = next(iter(self.said("decide", ballot)), None)
        return None if line is None else Decision(line.point, line.members, line.is_trained)

    def fate(self, ballot: int) -> str | None:
        return next((line.fate for line in self.said("fate", ballot)), None)

    def out(self) -> set[int]:
        """Ranks that need not be waited for: those that have ended, and those that save alone."""
        return {line.rank for what in ("bye", "alone") for line in self.named(what)}


@dataclass(frozen=True)
class Self:
    """The state of one rank in the agreement."""

    rank: int
    has_notice: bool = False
    ballot: int = 0
    is_stopped: bool = False
    """For this ballot the gate was shut, and then the reach was read."""
    reach: Point | None = None
    turns: Turns = ()
    """The turns that this rank can save in the step of its reach."""
    is_trained: bool = False
    let: Point | None = None
    """The gate lets the loop go on up to this point."""
    is_alone: bool = False
    is_taken: bool = False
    """The state of the target is captured and protected from changes, ready to be written."""
    is_unclean: bool = False
    """This rank cannot save the target any more: something changed its state."""
    has_shared: bool = False
    """This rank's own share and its own state are durable."""


@dataclass(frozen=True)
class View:
    """What a rank sees of the other ranks, of the store and of storage at this moment."""

    known: KnownLines
    """The lines that were read so far."""
    store_is_unreachable: bool = False
    """The store that holds the shared log cannot be reached: nothing is read or written there."""
    is_committed: bool = False
    """The manifest of the target, or of what this rank saves alone, exists."""
    is_complete: bool = False
    """Every share of the target is durable, no matter which rank wrote it."""
    is_at_target: bool = False
    """The loop stands at the safe point to be saved."""
    is_at_sooner: bool = False
    """A rank that saves alone stands at an earlier safe point of the same step, which can be saved as well: it has
    entered an epoch on its way."""
    window_is_over: bool = False
    """The time for reports to arrive is over."""
    help_is_due: bool = False
    """The time in which a rank writes its own share is over; other ranks write the shares that are missing."""
    is_over: bool = False
    """The loop has ended at another safe point than the one to be saved."""
    patience_is_over: bool = False
    """The time to reach and save the target is over."""


class Act(enum.Enum):
    """What a rank does next."""

    WAIT = "wait"
    STOP = "stop"
    """Shut the gate and then read the reach, in one act."""
    POST = "post"
    LET = "let"
    """Let the loop go on to the target, and no further."""
    SAVE_ALONE = "save alone"
    """Make the safe point that this rank is at its own target. This is final."""
    TAKE = "take"
    """Capture the state of the target and protect it from changes."""
    SHARE = "share"
    """Write the share and the state that belong to this rank."""
    HELP = "help"
    """Write the next missing share."""
    COMMIT = "commit"
    ANEW = "anew"
    """The target cannot be saved: start a new ballot."""
    DONE = "done"
    NOTHING = "nothing"
    """This rank has nothing to save, and no other rank has."""


Step = tuple[Act, Line | Point | None]


def next_act(me: Self, view: View, size: int) -> Step:
    """The next act of this rank, with the line or point that it needs."""
    if view.is_committed:
        return Act.DONE, None
    if me.is_alone:
        return _alone(me, view)
    if view.store_is_unreachable and not (me.has_notice or me.is_stopped or view.known.notice):
        return Act.WAIT, None  # no notice is known to this rank, so it must not leave
    if view.store_is_unreachable and (not me.is_stopped or view.known.decision(me.ballot) is None):
        return Act.SAVE_ALONE, None
    return _together(me, view, size)


def _together(me: Self, view: View, size: int) -> Step:
    known = view.known
    if known.notice is None:
        return (Act.POST, Line("notice", me.rank)) if me.has_notice else (Act.WAIT, None)
    if not me.is_stopped:
        return Act.STOP, None
    reaches = known.reaches(me.ballot)
    if me.rank not in reaches and not view.store_is_unreachable:
        turns = () if me.turns == ((0, ""),) else me.turns
        return Act.POST, Line("reach", me.rank, me.ballot, me.reach, me.is_trained, turns=turns)
    decision = known.decision(me.ballot)
    if decision is None:
        is_all = known.out() | set(reaches) >= set(range(size))
        if view.window_is_over or is_all:
            return Act.POST, _decide(me, reaches, is_all=is_all)
        return Act.WAIT, None
    if decision.target is None or not decision.is_trained:
        # The others have decided that there is nothing to save. A late rank with a whole state saves it alone.
        return (Act.SAVE_ALONE if me.reach is not None and me.is_trained else Act.NOTHING), None
    if known.fate(me.ballot) == AGAIN:
        return Act.ANEW, None
    return _obey(me, view, decision)


def _decide(me: Self, reaches: dict[int, Line], *, is_all: bool) -> Line:
    able = {rank: line for rank, line in reaches.items() if line.point is not None}
    target = common_point(list(able.values()), is_all=is_all)
    is_trained = any(line.is_trained for line in able.values())
    return Line("decide", me.rank, me.ballot, target, is_trained, tuple(sorted(able)))


def common_point(reaches: Sequence[Line], *, is_all: bool) -> Point | None:
    """The safe point that all ranks of these reports can save. `is_all`: no further rank can report.

    It is in the highest step. Nothing is trained between the turns of a step, so saving a turn that a rank has passed
    loses nothing, while a rank may need long to reach a later turn, for example in its evaluation.
    """
    at = [(line.point, dict(line.turns or ((line.point[1], ""),))) for line in reaches if line.point is not None]
    if not at:
        return None
    step = max(point for point, _ in at)[0]
    # A rank in a lower step comes to turn 0 first.
    stands = [(point[1], turns) if point[0] == step else (-1, {0: ""}) for point, turns in at]
    alike = set.intersection(*({(t, place) for t, place in turns.items() if t == 0 or place} for _, turns in stands))
    if alike:
        # A rank that has not reported may be able to save the lowest turn only.
        return step, (max(alike) if is_all else min(alike))[0]
    # Some rank has to go on, but not further than all ranks can come.
    known = sorted({turn for _, turns in stands for turn in turns})
    return step, next(
        (turn for turn in known if all(turn in turns or turn > here for here, turns in stands)),
        max(here for here, _ in stands),
    )


def _obey(me: Self, view: View, decision: Decision) -> Step:
    target, fate = decision.target, view.known.fate(me.ballot)
    assert target is not None
    # Without the shared log only storage shows what was done, and the decision stays in force.
    must_agree = fate is None and not view.store_is_unreachable
    # Complete shares are committed, even if the state that they were written from has changed since.
    if me.is_unclean and must_agree and not view.is_complete:
        return Act.POST, Line("fate", me.rank, me.ballot, fate=AGAIN)
    commit: Step = (Act.POST, Line("fate", me.rank, me.ballot, fate=COMMIT)) if must_agree else (Act.COMMIT, None)
    if me.reach is not None and me.reach > target and not _can_save(me, target):
        return _if_due(view, (Act.SAVE_ALONE, None))
    without_me: Step = commit if view.is_complete else (Act.SAVE_ALONE, None)
    if me.is_unclean or me.reach is None:
        return _if_due(view, without_me)
    if me.let != target:
        return Act.LET, target
    if not me.is_taken:
        if view.is_at_target:
            return Act.TAKE, target
        # A rank on its way to the target would have the same target alone.
        is_on_its_way = me.reach == target and not (view.is_complete or view.is_over)
        return (Act.WAIT, None) if is_on_its_way else _if_due(view, without_me)
    if not me.has_shared:
        return Act.SHARE, None
    if view.is_complete:
        return commit
    if view.help_is_due:
        return Act.HELP, None
    return Act.WAIT, None


def _can_save(me: Self, point: Point) -> bool:
    """This rank passed this point in the present step and still has the state of it."""
    return me.reach is not None and me.reach[0] == point[0] and point[1] in dict(me.turns)


def _if_due(view: View, step: Step) -> Step:
    """This step as soon as the time to wait for other ranks is over."""
    return step if view.patience_is_over else (Act.WAIT, None)


def _alone(me: Self, view: View) -> Step:
    """A rank that saves alone: its loop never goes on from there."""
    if me.reach is None or not me.is_trained:
        return Act.NOTHING, None
    if me.is_unclean:
        return Act.SAVE_ALONE, None
    if not view.store_is_unreachable and me.rank not in view.known.out():
        return Act.POST, Line("alone", me.rank, me.ballot, me.reach)
    if not me.is_taken:
        if view.is_at_target:
            return Act.TAKE, me.reach
        # There is no agreement to keep any more, so the earlier safe point is as good.
        return (Act.SAVE_ALONE if view.is_at_sooner else Act.WAIT), None
    return (Act.COMMIT, None) if me.has_shared else (Act.SHARE, None)


def done(
    me: Self,
    act: Act,
    *,
    reach: Point | None = None,
    turns: Turns = (),
    is_trained: bool = False,
    is_clean: bool = True,
) -> Self:
    """The state of this rank after `act`. `reach`: what STOP or SAVE_ALONE found, or the point given to LET."""
    if act is Act.STOP:
        return replace(me, is_stopped=True, reach=reach, turns=turns, is_trained=is_trained)
    if act is Act.SAVE_ALONE:
        return Self(
            me.rank,
            me.has_notice,
            me.ballot,
            is_stopped=True,
            reach=reach,
            turns=turns,
            is_trained=is_trained,
            let=reach,
            is_alone=True,
        )
    if act is Act.ANEW:
        return Self(me.rank, me.has_notice, me.ballot + 1)
    if act in (Act.TAKE, Act.SHARE, Act.HELP) and not is_clean:
        return replace(me, is_unclean=True, is_taken=False)
    if act is Act.TAKE:
        return replace(me, is_taken=True)
    if act is Act.SHARE:
        return replace(me, has_shared=True)
    if act is Act.LET:
        return replace(me, let=reach)
    return me
