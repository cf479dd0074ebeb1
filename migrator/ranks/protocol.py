"""How ranks come to one answer: which safe point all of them save before they leave.

The ranks share a log that can only grow and that all of them read in the same
order, and report to those who decide or collect; what one rank has read of both is
its *board*. Nothing is ever taken back: of several lines that say the
same thing differently, the first one counts. What a rank does next follows from
what it has read, what it has done and what lies on storage, and from nothing
else: `next_act` is a pure function, so that a model checker can drive as many
ranks through as many orders of events as there are.

    news      this rank must leave
    reach     the safe point I am at, or on my way to, and which turns of its step I can save; my gate is shut behind it
    decide    the target: of the highest step the turn that all can save; and who reported
    fate      of a decision: "commit", or "again" if it cannot be saved
    alone     I can not reach the target; I save what I have
    bye       my script has ended

Nobody waits for ever: whoever cannot get to the target settles for the safe point
it is at, for good, and saves that by itself.

The price: if a rank is lost in mid-step there may be two whole ckpts; the higher
step is taken.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Point = tuple[int, int]
"""A safe point: the step, and how often since then a new round of the loop was entered."""

Turns = tuple[tuple[int, str], ...]
"""Safe points of one step that a rank can still save, lowest first: the turn, and where in the script its loop stood.

The place is empty for turn 0, behind the step itself: there all ranks stand alike. At another turn an empty place is
one that is not known, and like no other.
"""

COMMIT, AGAIN = "commit", "again"


@dataclass(frozen=True)
class Line:
    """What one rank wrote on the board."""

    what: str
    rank: int
    ballot: int = 0
    """Which decision it is about: there is another one if the first could not be saved."""
    point: Point | None = None
    is_trained: bool = False
    members: tuple[int, ...] = ()
    fate: str = ""
    info: str = ""
    turns: Turns = ()
    """What can be saved of the step of `point`; none named: that very turn."""

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
        """The line this text is; None for what nobody of ours wrote."""
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
    """What was agreed on."""

    target: Point | None
    """None: nobody has anything to save."""
    members: tuple[int, ...]
    """Who reported in time, lowest first: they share the work."""
    is_trained: bool


@dataclass(frozen=True)
class Board:
    """What the lines say, read in order."""

    lines: tuple[Line, ...]

    @staticmethod
    def of(lines: Iterable[Line]) -> Board:
        return Board(tuple(lines))

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
    def news(self) -> Line | None:
        return next(iter(self.said("news")), None)

    def reaches(self, ballot: int) -> dict[int, Line]:
        """The first report of each rank."""
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
        """Whom nobody has to wait for: who ended, and who goes on alone."""
        return {line.rank for what in ("bye", "alone") for line in self.named(what)}


@dataclass(frozen=True)
class Self:
    """What one rank knows of itself."""

    rank: int
    has_news: bool = False
    ballot: int = 0
    is_stopped: bool = False
    """The gate is shut, and the reach was read behind it; for this ballot."""
    reach: Point | None = None
    turns: Turns = ()
    """What this rank can save of the step of its reach."""
    is_trained: bool = False
    let: Point | None = None
    """The gate lets the loop on up to here."""
    is_alone: bool = False
    is_taken: bool = False
    """The state of the target is held fast, ready to be written."""
    is_unclean: bool = False
    """The target's state is lost here: something changed it."""
    has_shared: bool = False
    """This rank's own share and its own state are durable."""


@dataclass(frozen=True)
class View:
    """What the rest of the world looks like to a rank right now."""

    board: Board
    """As it was read last."""
    is_lost: bool = False
    """The store that holds the board is gone: nothing is read or written there any more."""
    is_committed: bool = False
    """The manifest of the target, or of what this rank saves alone, exists."""
    is_complete: bool = False
    """Every share of the target is durable, whoever wrote it."""
    is_at_target: bool = False
    """The loop stands at the safe point that is to be saved."""
    is_at_sooner: bool = False
    """A rank alone stands at one below that, which can be saved too: it has entered an epoch on its way."""
    window_is_over: bool = False
    """Reports had time enough to come in."""
    help_is_due: bool = False
    """Shares that are still missing had time enough to be written by those whose they are."""
    is_over: bool = False
    """The loop has ended, and not at the safe point that is to be saved."""
    patience_is_over: bool = False
    """The target should have been reached, and saved, by now."""


class Act(enum.Enum):
    """What a rank does next."""

    WAIT = "wait"
    STOP = "stop"
    """Shut the gate, and read the reach behind it, in one act."""
    POST = "post"
    LET = "let"
    """Let the loop on to the target, and no further."""
    SETTLE = "settle"
    """Take the safe point this rank is at for its own target, for good."""
    TAKE = "take"
    """Hold the state of the target fast."""
    SHARE = "share"
    """Write this rank's own share and state."""
    HELP = "help"
    """Write the next share that is missing."""
    COMMIT = "commit"
    ANEW = "anew"
    """The target cannot be saved: begin anew."""
    DONE = "done"
    NOTHING = "nothing"
    """There is nothing to save, here or anywhere."""


Step = tuple[Act, Line | Point | None]


def next_act(me: Self, view: View, size: int) -> Step:
    """What this rank does next, and with what."""
    if view.is_committed:
        return Act.DONE, None
    if me.is_alone:
        return _alone(me, view)
    if view.is_lost and not (me.has_news or me.is_stopped or view.board.news):
        return Act.WAIT, None  # nobody must leave, as far as anybody can know
    if view.is_lost and (not me.is_stopped or view.board.decision(me.ballot) is None):
        return Act.SETTLE, None
    return _together(me, view, size)


def _together(me: Self, view: View, size: int) -> Step:
    board = view.board
    if board.news is None:
        return (Act.POST, Line("news", me.rank)) if me.has_news else (Act.WAIT, None)
    if not me.is_stopped:
        return Act.STOP, None
    reaches = board.reaches(me.ballot)
    if me.rank not in reaches and not view.is_lost:
        turns = () if me.turns == ((0, ""),) else me.turns
        return Act.POST, Line("reach", me.rank, me.ballot, me.reach, me.is_trained, turns=turns)
    decision = board.decision(me.ballot)
    if decision is None:
        is_all = board.out() | set(reaches) >= set(range(size))
        if view.window_is_over or is_all:
            return Act.POST, _decide(me, reaches, is_all=is_all)
        return Act.WAIT, None
    if decision.target is None or not decision.is_trained:
        # Whoever comes late and is whole has nobody left to agree with.
        return (Act.SETTLE if me.reach is not None and me.is_trained else Act.NOTHING), None
    if board.fate(me.ballot) == AGAIN:
        return Act.ANEW, None
    return _obey(me, view, decision)


def _decide(me: Self, reaches: dict[int, Line], *, is_all: bool) -> Line:
    able = {rank: line for rank, line in reaches.items() if line.point is not None}
    target = common_point(list(able.values()), is_all=is_all)
    is_trained = any(line.is_trained for line in able.values())
    return Line("decide", me.rank, me.ballot, target, is_trained, tuple(sorted(able)))


def common_point(reaches: Sequence[Line], *, is_all: bool) -> Point | None:
    """The safe point that all who sent these reports can save; `is_all`: no rank is left that could report.

    It is of the highest step. Nothing was trained between the turns of a step, so a rank that has passed one has lost
    nothing, while a rank that has not come to one may take long: alone in its evaluation, for example.
    """
    at = [(line.point, dict(line.turns or ((line.point[1], ""),))) for line in reaches if line.point is not None]
    if not at:
        return None
    step = max(point for point, _ in at)[0]
    # Whoever is below comes to turn 0 first.
    stands = [(point[1], turns) if point[0] == step else (-1, {0: ""}) for point, turns in at]
    alike = set.intersection(*({(t, place) for t, place in turns.items() if t == 0 or place} for _, turns in stands))
    if alike:
        # Who has not reported may stand at the lowest of them.
        return step, (max(alike) if is_all else min(alike))[0]
    # Somebody has to be let on, but not further than all can come.
    known = sorted({turn for _, turns in stands for turn in turns})
    return step, next(
        (turn for turn in known if all(turn in turns or turn > here for here, turns in stands)),
        max(here for here, _ in stands),
    )


def _obey(me: Self, view: View, decision: Decision) -> Step:
    target, fate = decision.target, view.board.fate(me.ballot)
    assert target is not None
    # With the board gone storage is the truth, and what was decided stays decided.
    must_agree = fate is None and not view.is_lost
    # What is complete is saved, whatever has become of the states it was written from.
    if me.is_unclean and must_agree and not view.is_complete:
        return Act.POST, Line("fate", me.rank, me.ballot, fate=AGAIN)
    commit: Step = (Act.POST, Line("fate", me.rank, me.ballot, fate=COMMIT)) if must_agree else (Act.COMMIT, None)
    if me.reach is not None and me.reach > target and not _can_save(me, target):
        return _if_due(view, (Act.SETTLE, None))
    without_me: Step = commit if view.is_complete else (Act.SETTLE, None)
    if me.is_unclean or me.reach is None:
        return _if_due(view, without_me)
    if me.let != target:
        return Act.LET, target
    if not me.is_taken:
        if view.is_at_target:
            return Act.TAKE, target
        # Whoever is on its way to the very target would come to nothing else alone.
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
    """This rank was there in this very step, and its state there is still at hand."""
    return me.reach is not None and me.reach[0] == point[0] and point[1] in dict(me.turns)


def _if_due(view: View, step: Step) -> Step:
    """What is left to do when nobody is to be waited for any more."""
    return step if view.patience_is_over else (Act.WAIT, None)


def _alone(me: Self, view: View) -> Step:
    """Whoever saves alone has settled; the loop never goes on from there."""
    if me.reach is None or not me.is_trained:
        return Act.NOTHING, None
    if me.is_unclean:
        return Act.SETTLE, None
    if not view.is_lost and me.rank not in view.board.out():
        return Act.POST, Line("alone", me.rank, me.ballot, me.reach)
    if not me.is_taken:
        if view.is_at_target:
            return Act.TAKE, me.reach
        # With nobody to agree with there is no use in going further than that.
        return (Act.SETTLE if view.is_at_sooner else Act.WAIT), None
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
    """This rank after it did what it was told; `reach` is what STOP or SETTLE found, or how far was LET."""
    if act is Act.STOP:
        return replace(me, is_stopped=True, reach=reach, turns=turns, is_trained=is_trained)
    if act is Act.SETTLE:
        return Self(
            me.rank,
            me.has_news,
            me.ballot,
            is_stopped=True,
            reach=reach,
            turns=turns,
            is_trained=is_trained,
            let=reach,
            is_alone=True,
        )
    if act is Act.ANEW:
        return Self(me.rank, me.has_news, me.ballot + 1)
    if act in (Act.TAKE, Act.SHARE, Act.HELP) and not is_clean:
        return replace(me, is_unclean=True, is_taken=False)
    if act is Act.TAKE:
        return replace(me, is_taken=True)
    if act is Act.SHARE:
        return replace(me, has_shared=True)
    if act is Act.LET:
        return replace(me, let=reach)
    return me
