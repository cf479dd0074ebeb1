"""A model of several ranks that agree on what they save, small enough to look at every order of events.

A *world* is all there is at one moment: where each rank's loop and gate stand, what
each rank knows and how much of the log it has read, the log, and what lies on
storage. From each world lead the *moves* that are possible in it: a loop goes on, a
rank reads the log, a rank does what `migrator.ranks.protocol.next_act` tells it, notice
arrive, something breaks. `Model.search` visits every world that any order of moves
leads to, and says of each whether a promise is broken; the shortest way to the first
broken one can be read.

What a move is:

- A loop begins step p + 1 once all ranks have done p: the gradients of all are needed,
  and those of a rank that has not died before its backward pass are there. Whether a
  rank that stands, froze or died at p had given its gradients is left open, so both
  happen. The gate holds the loop back at its limit.
- Reading the log gives all of it. A rank acts on what it read last, however old that
  is, except that it has read what it wrote itself. Storage and its own gate are looked at
  in the moment of the act: what is on storage stays there, so an older look is the same
  as having acted earlier.
- Clocks may show anything: each of the three times of `View` may be over or not at any
  act. With `late` clocks they are over only when otherwise nothing would happen, and a
  few times before; with `never` only that for help: all ranks are quick.
- Dead ranks, and ended ones, do nothing. Frozen ones do nothing until they thaw, if ever.
- Behind some steps (`turns`) an epoch ends: each rank enters the next one by itself, and only then gives the gradients
  of the next step. What it was before can still be saved, unless that turns out to have changed (`spoiled`). A rank
  may never come out of what it does before it enters (`stays`).
- The log may be lost, for all ranks or for one. State may turn out to have changed at
  a safe point (`changed`): whoever holds, writes or commits it notices.

The promises:

1. Never torn: whatever a manifest combines was written from states of its step.
2. Never stuck: nothing can happen for ever, and when nothing more has to happen every
   rank that is alive, not frozen and heard the notice (all of them hear, as long as they have the log)
   has ended. One exception: a rank that saves alone, or is on its way to what was agreed on, whose state was found
   changed and whose loop cannot come to another safe point; the deadline ends it. Who ends with NOTHING has nothing:
   no step done, or its last state changed. Nobody stops without notice anywhere.
3. No step after the save. If ranks are quick and none is lost, one step is saved, and no loop
   is past it, but for those that had ended before they heard, and those whose state changed after
   their last step. And nobody is lost: what is saved no rank was kept from by what it does between two
   epochs, nor has passed without having it at hand. Whatever happens, no rank begins a step after it chose to save
   alone (unless the state it chose was found changed), and when a rank ends that reported in time or
   saved alone, something at or above the point it is at is saved. A rank that reported too late and is past the
   target may leave with the others, a step after what they saved.
4. The first decision binds: whoever does anything together does what was decided first.
5. One fate: what was committed together by a rank that has the log is begun anew by no rank that has it.

What is kept small, and why that loses nothing: a line that says again what was said
is not kept, and lines that everybody has read are kept sorted, since then only which lines
there are matters (not with `keeps_all`, for rules under which it does). A rank that ended or died has
no thoughts. Ranks differ by number only, so the first a notice comes to rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from migrator.ckpt.point import Point, Turns
from migrator.ranks import protocol
from migrator.ranks.protocol import AGAIN, COMMIT, Act, KnownLines, Line, Self, Step, View, done

OPEN = (99, 0)
"""The limit of a gate that lets everything through."""
ALL_READ = 99
NOT_SEEN = (-1, 0)


class Life:
    ALIVE, FROZEN, DEAD, BYE, DONE, NOTHING = range(6)
    names = ("alive", "frozen", "dead", "ended", "DONE", "NOTHING")


class Rank(NamedTuple):
    step: int = 0
    """The last safe point."""
    turn: int = 0
    """1: the loop is in the next epoch."""
    is_entering: bool = False
    """On the way into it."""
    is_dirty: bool = False
    """On the way to the next one."""
    mark: int = 0
    """1: the state changed, and nobody knows; 2: this safe point is known to be lost."""
    early: int = 2
    """The same of the safe point before the epoch that the loop is in."""
    limit: Point = OPEN
    """The gate lets nothing begin from here on."""
    life: int = Life.ALIVE
    me: int = 0
    """What the rank knows of itself: a number in `Model.selves`."""
    read: int = 0
    """How many lines of the log it has read."""
    is_hung: bool = False
    """The loop never goes on: it is in a collective that one of the others broke."""
    seen: Point = NOT_SEEN
    """Only if the reach is not read in one act with shutting the gate."""


class Manifest(NamedTuple):
    point: Point
    ballot: int
    """-1: a rank's that was alone."""
    had_log: bool


class Share(NamedTuple):
    point: Point
    members: tuple[int, ...]
    member: int
    is_whole: bool
    """The writer's state was that of the safe point."""


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    log: tuple[int, ...] = ()
    """Numbers in `Model.lines`."""
    shares: tuple[Share, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    lost: tuple[bool, ...] = ()
    """Who has lost the log."""
    ballot: int = 0
    """The highest that anybody has got to."""
    faults: tuple[int, ...] = ()
    """How many more of each."""


FAULTS = ("freeze", "thaw", "death", "lost", "cut", "unclean", "hasty", "hang", "stays", "spoiled")


_LOST, _CUT, _UNCLEAN, _HASTY, _SPOILED = map(FAULTS.index, ("lost", "cut", "unclean", "hasty", "spoiled"))


@dataclass(frozen=True)
class Setting:
    """How large a world, and what may go wrong in it how often."""

    ranks: int = 2
    steps: int = 2
    clock: Literal["never", "late", "any"] = "any"
    freeze: int = 0
    thaw: int = 0
    death: int = 0
    lost: int = 0
    """The log, for all at once."""
    cut: int = 0
    """The log, for one rank."""
    unclean: int = 0
    """On one rank, or on all at once."""
    hang: int = 0
    """A loop is for ever inside a collective that others may have come out of."""
    stays: int = 0
    """A loop is for ever between two epochs."""
    spoiled: int = 0
    """What was kept of the time before the epoch."""
    turns: tuple[int, ...] = ()
    """Behind these steps an epoch ends."""
    hasty: int = 0
    """With late clocks: how often a time is over although somebody could still do something."""
    notice: int = 9
    """How many ranks may get notice."""
    any_order: bool = False
    """The first notice may come to any rank."""

    def __str__(self) -> str:
        faults = [f"{name}={n}" for name in FAULTS if (n := getattr(self, name))]
        faults += [f"turns={','.join(map(str, self.turns))}"] if self.turns else []
        faults += [f"notice={self.notice}"] if self.notice < self.ranks else []
        return " ".join([f"{self.ranks}x{self.steps}", f"clock={self.clock}", *faults])


def _as_it_was_read(rank: int, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return lines


@dataclass(frozen=True)
class Rules:
    """The rules, or what a test makes of them."""

    next_act: Callable[[Self, View, int], Step] = protocol.next_act
    reading: Callable[[int, tuple[Line, ...]], tuple[Line, ...]] = _as_it_was_read
    reduces: bool = True
    """Whether what `Model` says of keeping the worlds few holds under these rules."""
    is_stop_split: bool = False
    is_alone_for_good: bool = True


class Move(NamedTuple):
    what: str
    world: World
    must: bool
    """It happens sooner or later, if nothing else does."""
    broken: str = ""
    act: Act | None = None


@dataclass
class Found:
    """What a search found."""

    setting: Setting
    worlds: int = 0
    moves: int = 0
    ends: int = 0
    """Worlds in which nothing more has to happen."""
    broken: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.setting}: {self.worlds} worlds, {self.moves} moves, {self.ends} ends"
        return "\n".join([text, *([f"BROKEN: {self.broken}"] if self.broken else []), *self.trace])


Asked = tuple[Act, "Line | Point | None", bool]
"""What to do, with what, and whether it happens sooner or later."""
Clocks = tuple[tuple[bool, ...], ...]
_CLOCKS: Clocks = tuple(itertools.product((True, False), repeat=3))
_QUICK = ((False, True, False), (False, False, False))


class Model:
    """All worlds of one setting under some rules."""

    def __init__(self, setting: Setting, rules: Rules | None = None) -> None:
        self.setting = setting
        self.rules = rules or Rules()
        self.size = setting.ranks
        self.selves: list[Self] = []
        self._self_numbers: dict[Self, int] = {}
        self.lines: list[Line] = []
        self._line_numbers: dict[Line, int] = {}
        self._acts: dict[tuple[object, ...], tuple[Asked, ...]] = {}
        self._logs: dict[tuple[int, tuple[int, ...]], KnownLines] = {}
        self._plans: dict[tuple[int, tuple[int, ...], int], protocol.Decision | None] = {}
        self._first: dict[tuple[tuple[int, ...], int], protocol.Decision | None] = {}
        self._reads: dict[tuple[object, ...], int] = {}
        self._knows: dict[tuple[int, tuple[int, ...], int], bool] = {}

    # Numbers for what is long.

    def _of_self(self, me: Self) -> int:
        number = self._self_numbers.get(me)
        if number is None:
            number = self._self_numbers[me] = len(self.selves)
            self.selves.append(me)
        return number

    def _of_line(self, line: Line) -> int:
        number = self._line_numbers.get(line)
        if number is None:
            number = self._line_numbers[line] = len(self.lines)
            self.lines.append(line)
        return number

    def _log(self, rank: int, read: tuple[int, ...]) -> KnownLines:
        key = (rank, read)
        log = self._logs.get(key)
        if log is None:
            lines = tuple(self.lines[number] for number in read)
            log = self._logs[key] = KnownLines(tuple(self.rules.reading(rank, lines)))
        return log

    def _plan(self, rank: int, read: tuple[int, ...], ballot: int) -> protocol.Decision | None:
        """What the rank takes for decided."""
        key = (rank, read, ballot)
        if key not in self._plans:
            self._plans[key] = self._log(rank, read).decision(ballot)
        return self._plans[key]

    def _first_decision(self, log: tuple[int, ...], ballot: int) -> protocol.Decision | None:
        """What is decided."""
        key = (log, ballot)
        if key not in self._first:
            lines = (self.lines[number] for number in log)
            line = next((line for line in lines if line.what == "decide" and line.ballot == ballot), None)
            self._first[key] = None if line is None else protocol.Decision(line.point, line.members, line.is_trained)
        return self._first[key]

    def _has_learned(self, number: int, rank: Rank, world: World) -> bool:
        key = (number, world.log[: rank.read], rank.me)
        if key not in self._knows:
            me = self.selves[rank.me]
            self._knows[key] = me.has_notice or me.is_stopped or self._log(number, key[1]).notice is not None
        return self._knows[key]

    # Worlds.

    def start(self) -> World:
        ranks = tuple(Rank(me=self._of_self(Self(number))) for number in range(self.size))
        faults = tuple(getattr(self.setting, name) for name in FAULTS)
        return World(ranks, lost=(False,) * self.size, faults=faults)

    def _with(self, world: World, number: int, rank: Rank) -> World:
        return world._replace(ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))

    def _tidy(self, world: World) -> World:
        """The same world, told in one way only."""
        ranks = world.ranks
        if any(rank.life >= Life.DEAD and rank.me >= 0 for rank in ranks):
            ranks = tuple(
                Rank(rank.step, rank.turn, rank.is_entering, rank.is_dirty, life=rank.life, me=-1, read=ALL_READ)
                if rank.life >= Life.DEAD
                else rank
                for rank in ranks
            )
            world = world._replace(ranks=ranks)
        if not self.rules.reduces:
            return world
        log = world.log
        if any(rank.read < len(log) for rank in ranks):
            ranks = tuple(self._read_on(world, number, rank) for number, rank in enumerate(ranks))
            if ranks != world.ranks:
                world = world._replace(ranks=ranks)
        common = min(rank.read for rank in ranks)
        if common >= 2:
            head = tuple(sorted(log[:common]))
            if head != log[:common]:
                world = world._replace(log=head + log[common:])
        return world

    def _read_on(self, world: World, number: int, rank: Rank) -> Rank:
        """Read what makes no difference, or can only be acted on like any later reading."""
        log = world.log
        if rank.read >= len(log) or world.lost[number]:
            return rank
        may_lose = world.faults[_LOST] > 0 or world.faults[_CUT] > 0
        key = (number, rank.me, rank.read, log, may_lose)
        read = self._reads.get(key)
        if read is None:
            read = rank.read
            while read < len(log) and self._is_idle(number, rank.me, log, read, may_lose):
                read += 1
            self._reads[key] = read
        return rank if read == rank.read else rank._replace(read=read)

    def _is_idle(self, number: int, mine: int, log: tuple[int, ...], read: int, may_lose: bool) -> bool:
        me, line = self.selves[mine], self.lines[log[read]]
        if me.is_alone:
            return True
        if line.what == "notice":
            return me.has_notice
        if line.what in ("reach", "decide", "fate") and line.ballot < me.ballot:
            return True
        before = [self.lines[other] for other in log[:read]]
        has_reported = any((o.what, o.rank, o.ballot) == ("reach", number, me.ballot) for o in before)
        if line.what == "decide":
            return has_reported and not may_lose
        if line.what == "fate":
            has_decision = any((o.what, o.ballot) == ("decide", me.ballot) for o in before)
            return line.fate == COMMIT and has_decision
        is_decided = self._first_decision(log, me.ballot) is not None
        return is_decided or not has_reported or self.setting.clock == "never"

    # Moves.

    def moves(self, world: World) -> Iterator[Move]:
        if self.rules.reduces:
            for number, rank in enumerate(world.ranks):
                if rank.life == Life.ALIVE:
                    moves = list(self._protocol(world, number, rank, _CLOCKS))
                    if len(moves) == 1 and self._is_private(world, rank, moves[0].act):
                        yield moves[0]
                        return
        clocks = _CLOCKS if self.setting.clock == "any" else _QUICK
        alive = [(number, rank) for number, rank in enumerate(world.ranks) if rank.life == Life.ALIVE]
        is_quiet = True
        for number, rank in alive:
            for move in self._of_rank(world, number, rank, clocks):
                is_quiet = is_quiet and not move.must
                yield move
        if self.setting.clock == "late" and (is_quiet or world.faults[_HASTY]):
            for number, rank in alive:
                usual = {move.world for move in self._protocol(world, number, rank, _QUICK)}
                for move in self._protocol(world, number, rank, _CLOCKS):
                    if move.world not in usual and is_quiet:
                        yield move
                    elif move.world not in usual:
                        faults = (*world.faults[:_HASTY], world.faults[_HASTY] - 1, *world.faults[_HASTY + 1 :])
                        yield move._replace(world=move.world._replace(faults=faults), must=False)
        yield from self._notice(world)
        yield from self._faults(world)

    def _of_rank(self, world: World, number: int, rank: Rank, clocks: Clocks) -> Iterator[Move]:
        yield from self._loop(world, number, rank)
        if rank.read < len(world.log) and not world.lost[number]:
            yield Move(f"{number} reads", self._with(world, number, rank._replace(read=len(world.log))), True)
        yield from self._protocol(world, number, rank, clocks)

    def _is_private(self, world: World, rank: Rank, act: Act | None) -> bool:
        """Nobody can tell whether this came now or later, and nothing takes its place: it may as well come now."""
        if act is Act.DONE:
            return not (rank.is_dirty or rank.is_entering) and _at(rank) >= rank.limit
        if act in (Act.LET, Act.TAKE):
            return self._stays_clean(world, rank)
        left = dict(zip(FAULTS, world.faults, strict=True))
        return act is Act.SHARE and not (left["death"] or left["freeze"]) and self._stays_clean(world, rank)

    def _stays_clean(self, world: World, rank: Rank) -> bool:
        """Nobody will be found unclean any more, and this rank has read of all who were."""
        if self.setting.unclean == self.setting.spoiled == 0:
            return True
        if world.faults[_UNCLEAN] or world.faults[_SPOILED]:
            return False
        if any(1 in (other.mark, other.early) for other in world.ranks):
            return False
        if any(other.me >= 0 and self.selves[other.me].is_unclean for other in world.ranks):
            return False
        return all(self.lines[line].what != "fate" for line in world.log[rank.read :])

    def _is_due(self, rank: Rank) -> bool:
        """The loop stands behind an epoch and has the next one to enter."""
        is_behind = rank.step in self.setting.turns and rank.step < self.setting.steps
        return is_behind and not (rank.turn or rank.is_dirty or rank.is_entering)

    def _loop(self, world: World, number: int, rank: Rank) -> Iterator[Move]:
        may_begin = _at(rank) < rank.limit and not rank.is_hung
        if rank.is_dirty:
            after = Rank(rank.step + 1, limit=rank.limit, life=rank.life, me=rank.me, read=rank.read, seen=rank.seen)
            yield Move(f"{number} reaches safe point {rank.step + 1}", self._with(world, number, after), True)
        elif rank.is_entering:
            after = rank._replace(turn=1, is_entering=False, early=rank.mark, mark=0)
            yield Move(f"{number} is in the next epoch", self._with(world, number, after), True)
        elif self._is_due(rank):
            if may_begin:
                after = rank._replace(is_entering=True)
                yield Move(f"{number} enters the next epoch", self._with(world, number, after), True)
        elif rank.step < self.setting.steps:
            if may_begin and all(
                other.step > rank.step or (other.step == rank.step and not (self._is_due(other) or other.is_entering))
                for other in world.ranks
            ):
                must = all(
                    other.step > rank.step
                    or other.is_dirty
                    or (other.life == Life.ALIVE and other.limit > _at(other) and not other.is_hung)
                    for other in world.ranks
                )
                must = must or any(other.step > rank.step or other.is_dirty for other in world.ranks)
                me = self.selves[rank.me]
                broken = ""
                if me.is_alone and (me.reach is None or me.reach[0] <= rank.step):
                    broken = f"{number} begins step {rank.step + 1} after it chose to save {me.reach} alone"
                after = rank._replace(is_dirty=True)
                yield Move(f"{number} begins step {rank.step + 1}", self._with(world, number, after), must, broken)
        elif not self._has_learned(number, rank, world):
            said = world if world.lost[number] else self._post(world, number, Line("bye", number))
            yield Move(f"{number} ends", self._with(said, number, rank._replace(life=Life.BYE)), True)

    def _notice(self, world: World) -> Iterator[Move]:
        told = [rank.life != Life.ALIVE or self.selves[rank.me].has_notice for rank in world.ranks]
        had = sum(rank.me >= 0 and self.selves[rank.me].has_notice for rank in world.ranks)
        if had >= self.setting.notice:
            return
        for number, rank in enumerate(world.ranks):
            if told[number] or (number and had == 0 and not world.log and not self.setting.any_order):
                continue
            me = self._of_self(replace(self.selves[rank.me], has_notice=True))
            yield Move(f"notice for {number}", self._with(world, number, rank._replace(me=me)), False)

    def _faults(self, world: World) -> Iterator[Move]:
        left = dict(zip(FAULTS, world.faults, strict=True))
        if not any(world.faults):
            return

        def spent(name: str) -> World:
            return world._replace(faults=tuple(n - (name == fault) for fault, n in left.items()))

        for number, rank in enumerate(world.ranks):
            if left["freeze"] and rank.life == Life.ALIVE:
                after = self._with(spent("freeze"), number, rank._replace(life=Life.FROZEN))
                yield Move(f"{number} freezes", after, False)
            if left["thaw"] and rank.life == Life.FROZEN:
                after = self._with(spent("thaw"), number, rank._replace(life=Life.ALIVE))
                yield Move(f"{number} thaws", after, False)
            if left["death"] and rank.life == Life.ALIVE:
                after = self._with(spent("death"), number, rank._replace(life=Life.DEAD))
                yield Move(f"{number} dies", after, False)
            if left["stays"] and rank.life == Life.ALIVE and self._is_due(rank) and not rank.is_hung:
                after = self._with(spent("stays"), number, rank._replace(is_hung=True))
                yield Move(f"{number} stays where it is", after, False)
            if left["spoiled"] and rank.life == Life.ALIVE and rank.early == 0 and not rank.is_dirty:
                after = self._with(spent("spoiled"), number, rank._replace(early=1))
                yield Move(f"what {number} was before the epoch changes", after, False)
            can_hang = not (rank.is_dirty or rank.is_hung) and rank.step < self.setting.steps
            if left["hang"] and rank.life == Life.ALIVE and can_hang:
                after = self._with(spent("hang"), number, rank._replace(is_hung=True))
                yield Move(f"{number}'s loop hangs", after, False)
            if left["unclean"] and self._can_change(rank):
                after = self._with(spent("unclean"), number, _changed(rank))
                yield Move(f"{number}'s state changes", after, False)
            if left["cut"] and rank.life == Life.ALIVE and not world.lost[number]:
                lost = tuple(was or number == other for other, was in enumerate(world.lost))
                yield Move(f"{number} loses the log", spent("cut")._replace(lost=lost), False)
        if left["lost"] and not all(world.lost):
            yield Move("all lose the log", spent("lost")._replace(lost=(True,) * self.size), False)
        if left["unclean"] and sum(map(self._can_change, world.ranks)) > 1:
            ranks = tuple(_changed(rank) if self._can_change(rank) else rank for rank in world.ranks)
            yield Move("everybody's state changes", spent("unclean")._replace(ranks=ranks), False)

    @staticmethod
    def _can_change(rank: Rank) -> bool:
        return rank.life == Life.ALIVE and not rank.is_dirty and rank.step > 0 and rank.mark == 0

    # What the rank that runs the protocol does.

    def _point(self, number: int, rank: Rank, world: World) -> tuple[Point | None, tuple[int, ...]]:
        """The safe point this rank is to save, and who shares the work."""
        me = self.selves[rank.me]
        if me.is_alone:
            return me.reach, (number,)
        decision = self._plan(number, world.log[: rank.read], me.ballot)
        if decision is None or decision.target is None:
            return None, ()
        return decision.target, decision.members

    def _missing(self, world: World, point: Point, members: tuple[int, ...]) -> list[int]:
        there = {share.member for share in world.shares if share.point == point and share.members == members}
        return [member for member in members if member not in there]

    def _protocol(self, world: World, number: int, rank: Rank, clocks: Clocks) -> Iterator[Move]:
        point, members = self._point(number, rank, world)
        read = world.log[: rank.read]
        is_committed = point is not None and any(manifest.point[0] == point[0] for manifest in world.manifests)
        is_complete = point is not None and bool(members) and not self._missing(world, point, members)
        is_there = point is not None and _has_come_to(rank, point)
        reach, _ = self._reach(rank)
        is_at_sooner = self.selves[rank.me].is_alone and point is not None and reach is not None and reach < point
        key = (rank.me, read, world.lost[number], is_committed, is_complete, is_there, is_at_sooner, clocks)
        acts = self._acts.get(key)
        if acts is None:
            log, is_lost = self._log(number, read), world.lost[number]
            view = View(log, is_lost, is_committed, is_complete, is_there, is_at_sooner)
            acts = self._acts[key] = self._asked(self.selves[rank.me], view, clocks)
        for asked in acts:
            yield from (move._replace(act=asked[0]) for move in self._do(world, number, rank, asked))

    def _asked(self, me: Self, view: View, clocks: Clocks) -> tuple[Asked, ...]:
        """What the rank is told, whatever the clocks show; first, when all times are over."""
        found: dict[Step, bool] = {}
        for clock in clocks:
            window, help_due, patience = clock
            timed = replace(view, window_is_over=window, help_is_due=help_due, patience_is_over=patience)
            found.setdefault(self.rules.next_act(me, timed, self.size), not found)
        return tuple((act, what, must) for (act, what), must in found.items() if act is not Act.WAIT)

    def _reach(self, rank: Rank) -> tuple[Point | None, Turns]:
        if rank.is_dirty:
            return (rank.step + 1, 0), ((0, ""),)
        has_early = ((0, ""),) if rank.turn and rank.early < 2 else ()
        here = ((rank.turn, "epoch" if rank.turn else ""),) if rank.mark < 2 else ()
        turns: Turns = (*has_early, *here)
        if rank.is_entering:
            return (rank.step, 1), (*turns, (1, ""))
        if turns:
            return (rank.step, turns[-1][0]), turns
        return ((rank.step + 1, 0), ((0, ""),)) if rank.step < self.setting.steps else (None, ())

    def _post(self, world: World, number: int, line: Line) -> World:
        """The log with the line, which its writer has read."""
        log = world.log
        if not self.rules.reduces or not self._is_said(log, line):
            log = (*log, self._of_line(line))
        return self._with(world._replace(log=log), number, world.ranks[number]._replace(read=len(log)))

    def _is_said(self, log: tuple[int, ...], line: Line) -> bool:
        said = [self.lines[number] for number in log]
        if line.what == "notice":
            return any(other.what == "notice" for other in said)
        if line.what in ("decide", "fate"):
            return any((other.what, other.ballot) == (line.what, line.ballot) for other in said)
        return line in said

    def _do(self, world: World, number: int, rank: Rank, asked: Asked) -> Iterator[Move]:
        act, what, must = asked
        me = self.selves[rank.me]
        text = f"{number} {act.name}"
        broken = ""
        after = world
        if act is Act.POST:
            assert isinstance(what, Line)
            assert not world.lost[number]
            yield Move(f"{text} {what.to_text().strip()}", self._post(world, number, what), must)
            return
        if act in (Act.DONE, Act.NOTHING):
            life = Life.DONE if act is Act.DONE else Life.NOTHING
            broken = self._wrong_end(world, number, rank, act)
            yield Move(text, self._with(world, number, rank._replace(life=life)), must, broken)
            return
        if act in (Act.STOP, Act.SAVE_ALONE):
            yield self._stop(world, number, rank, act, must)
            return
        if act is Act.ANEW:
            if not world.lost[number] and any(m.ballot == me.ballot and m.had_log for m in world.manifests):
                broken = f"{number} begins anew what was committed"
            after = world._replace(ballot=max(world.ballot, me.ballot + 1))
            yield Move(text, self._knowing(after, number, rank, done(me, act)), must, broken)
            return
        if not me.is_alone:
            own = self._plan(number, world.log[: rank.read], me.ballot)
            if own != self._first_decision(world.log, me.ballot):
                broken = f"{number} acts on {own}, which is not what was decided first"
        if act is Act.LET:
            assert isinstance(what, tuple)
            after = self._knowing(world, number, rank._replace(limit=what), done(me, act, reach=what))
            yield Move(f"{text} {what}", after, must, broken)
            return
        point, members = self._point(number, rank, world)
        assert point is not None
        is_whole = _has_come_to(rank, point)
        mark = "mark" if point[1] == rank.turn else "early"
        if is_whole and getattr(rank, mark) and act is not Act.COMMIT:
            unclean = self._knowing(world, number, rank._replace(**{mark: 2}), done(me, act, is_clean=False))
            yield Move(f"{text}, but it is unclean", unclean, must, broken)
            return
        if act is Act.TAKE:
            assert is_whole
        elif act in (Act.SHARE, Act.HELP):
            member = number if act is Act.SHARE else next(iter(self._missing(world, point, members)))
            if member in members:
                share = Share(point, members, member, is_whole)
                after = world._replace(shares=tuple(sorted({*world.shares, share})))
            text += f" share {member} of {members} at {point}"
        elif act is Act.COMMIT:
            assert not self._missing(world, point, members)
            after, worse = self._commit(world, number, me, point, members)
            broken = broken or worse
            text += f" {point}"
        yield Move(text, self._knowing(after, number, rank, done(me, act)), must, broken)

    def _knowing(self, world: World, number: int, rank: Rank, me: Self) -> World:
        return self._with(world, number, rank._replace(me=self._of_self(me)))

    def _stop(self, world: World, number: int, rank: Rank, act: Act, must: bool) -> Move:
        me = self.selves[rank.me]
        found, turns = self._reach(rank)
        if self.rules.is_stop_split and act is Act.STOP:
            if rank.seen == NOT_SEEN:
                after = self._with(world, number, rank._replace(seen=OPEN if found is None else found))
                return Move(f"{number} looks at its reach {found}", after, must)
            found = None if rank.seen == OPEN else rank.seen
        limit = _at(rank) if found is None else max(found, _at(rank))
        if act is Act.SAVE_ALONE and not self.rules.is_alone_for_good:
            limit = OPEN
        is_trained = found is not None and found[0] > 0
        known = done(me, act, reach=found, turns=turns, is_trained=is_trained)
        after = self._knowing(world, number, rank._replace(limit=limit, seen=NOT_SEEN), known)
        broken = ""
        if not any(self.lines[line].what == "notice" for line in world.log) and not self._was_told(world):
            broken = f"{number} stops though there were no notice"
        if act is Act.SAVE_ALONE and not me.is_alone and (me.is_unclean or (me.is_stopped and me.reach is None)):
            point, members = self._point(number, rank, world)
            if point is not None and not self._missing(world, point, members):
                broken = f"{number} has nothing of its own, and gives up {point}, of which all is there"
        return Move(f"{number} {act.name} at {found}", after, must, broken)

    def _was_told(self, world: World) -> bool:
        return any(rank.me >= 0 and self.selves[rank.me].has_notice for rank in world.ranks)

    def _commit(self, world: World, number: int, me: Self, point: Point, members: tuple[int, ...]) -> tuple[World, str]:
        broken = ""
        if any(manifest.point[0] == point[0] for manifest in world.manifests):
            return world, broken  # a ckpt's name has the step only
        shares = [share for share in world.shares if (share.point, share.members) == (point, members)]
        if not all(share.is_whole for share in shares):
            broken = f"torn: {number} commits {point} of {shares}"
        had_log = not world.lost[number]
        ballot = -1 if me.is_alone else me.ballot
        if not me.is_alone and had_log and world.ballot > me.ballot:
            broken = broken or f"{number} commits {point} though somebody began anew"
        manifest = Manifest(point, ballot, had_log)
        return world._replace(manifests=tuple(sorted({*world.manifests, manifest}))), broken

    # Promises.

    def _wrong_end(self, world: World, number: int, rank: Rank, act: Act) -> str:
        me = self.selves[rank.me]
        newest = max((manifest.point[0] for manifest in world.manifests), default=-1)
        at = rank.step + rank.is_dirty
        if act is Act.NOTHING:
            is_whole = not rank.is_dirty and 0 in (rank.mark, rank.early) and rank.step > 0
            return f"{number} has something to save" if is_whole or rank.is_dirty else ""
        decision = self._plan(number, world.log[: rank.read], me.ballot)
        was_in_time = me.is_alone or (decision is not None and number in decision.members)
        if newest < at and was_in_time:
            return f"{number} is at {at}, and only {newest} is saved"
        if self._is_calm(world) and any(self._is_kept_from(rank, manifest.point) for manifest in world.manifests):
            return f"{number} is lost: it can not save what is saved"
        return "" if newest >= 0 else f"{number} is done, and nothing is saved"

    def wrong_end(self, world: World) -> str:
        """What is wrong with a world in which nothing more has to happen."""
        told = any(self.lines[line].what == "notice" for line in world.log)
        for number, rank in enumerate(world.ranks):
            if rank.life != Life.ALIVE:
                continue
            learned = self._has_learned(number, rank, world)
            if not learned and not (told and not world.lost[number]):
                continue
            if not self._is_hopeless(world, number, rank):
                return f"{number} never ends"
        if self._is_calm(world) and (told or self._was_told(world)):
            return self._wrong_calm_end(world)
        return ""

    def _is_kept_from(self, rank: Rank, point: Point) -> bool:
        """What the rank does between two epochs keeps it from this safe point, or it went by and has nothing of it."""
        if rank.is_hung and self._is_due(rank) and point > _at(rank):
            return True
        may_lose = self.setting.unclean or self.setting.spoiled
        return not may_lose and point < _at(rank) and (point[0] < rank.step or rank.early == 2)

    def _is_hopeless(self, world: World, number: int, rank: Rank) -> bool:
        """It has lost what it was to save, and cannot get to another safe point: others have left or hang. It is
        alone, or on its way to what was agreed on, and alone it would go nowhere else."""
        me = self.selves[rank.me]
        decision = self._plan(number, world.log[: rank.read], me.ballot)
        is_bound = me.is_alone or (decision is not None and decision.target == me.reach)
        is_short = is_bound and me.reach is not None and not rank.is_dirty and rank.step < me.reach[0]
        return is_short and rank.mark == 2

    def _is_calm(self, world: World) -> bool:
        """All were quick, and nobody was lost."""
        setting = self.setting
        return setting.clock == "never" and not (
            setting.freeze or setting.death or setting.lost or setting.cut or setting.hang
        )

    def _wrong_calm_end(self, world: World) -> str:
        saved = [manifest.point[0] for manifest in world.manifests]
        left = [rank for rank in world.ranks if rank.life != Life.BYE]
        if not saved and all(rank.life == Life.NOTHING for rank in left):
            return ""  # nobody had anything to save: seen to when they ended
        if len(saved) != 1:
            return f"saved: {saved}"
        # Who lost its state after its last step has no other to go to.
        excused = self.setting.steps if self.setting.unclean else -1
        past = [rank for rank in left if rank.step + rank.is_dirty > saved[0] and rank.step != excused]
        return f"saved {saved[0]}, but a loop went on" if past else ""

    # The search.

    def search(self, limit: int = 10_000_000) -> Found:
        """Visit all worlds, nearest first; stop at the first broken promise."""
        found = Found(self.setting)
        start = self._tidy(self.start())
        after_of: list[list[int]] = []
        numbers: dict[World, int] = {start: 0}
        came: dict[World, tuple[World, str] | None] = {start: None}
        depth: list[World] = [start]
        for world in depth:  # it grows meanwhile
            is_end = True
            leads: list[int] = []
            after_of.append(leads)
            for what, after, must, broken, _ in self.moves(world):
                found.moves += 1
                is_end = is_end and not must
                if broken:
                    return self._told(found, came, world, what, broken)
                tidied = self._tidy(after)
                if tidied == world:
                    return self._told(found, came, world, what, "nothing comes of it, over and over")
                leads.append(numbers.setdefault(tidied, len(numbers)))
                if tidied not in came:
                    came[tidied] = (world, what)
                    depth.append(tidied)
                    if len(depth) > limit:
                        raise AssertionError(f"{self.setting}: more than {limit} worlds")
            found.worlds += 1
            if is_end:
                found.ends += 1
                if broken := self.wrong_end(world):
                    return self._told(found, came, world, "nothing more happens", broken)
        if (on_circle := _on_a_circle(after_of)) is not None:
            return self._told(found, came, depth[on_circle], "it goes round", "what happens can happen again for ever")
        return found

    def _told(
        self, found: Found, came: dict[World, tuple[World, str] | None], world: World, last: str, broken: str
    ) -> Found:
        trace = [last]
        at: World | None = world
        while at is not None and (before := came[at]) is not None:
            at, what = before
            trace.append(what)
        found.broken = broken
        found.trace = [f"  {what}" for what in reversed(trace)]
        found.trace.append("  where: " + "; ".join(self._shown(n, rank) for n, rank in enumerate(world.ranks)))
        found.trace.append(f"  saved: {[tuple(manifest) for manifest in world.manifests]}")
        return found

    def _shown(self, number: int, rank: Rank) -> str:
        state = f"on the way to {rank.step + 1}" if rank.is_dirty else f"at {_at(rank)}"
        state += " and on the way into the next epoch" if rank.is_entering else ""
        state += ", where it stays" if rank.is_hung else ""
        return f"{number} {Life.names[rank.life]} {state}"


def _at(rank: Rank) -> Point:
    return rank.step, rank.turn


def _has_come_to(rank: Rank, point: Point) -> bool:
    """And nothing was trained since."""
    return not rank.is_dirty and rank.step == point[0] and rank.turn >= point[1]


def _changed(rank: Rank) -> Rank:
    """Everything that this rank holds."""
    return rank._replace(mark=1, early=1 if rank.early == 0 else rank.early)


def _on_a_circle(after_of: list[list[int]]) -> int | None:
    """A world from which there is a way back to it; None: whatever happens comes to an end."""
    before = [0] * len(after_of)
    for leads in after_of:
        for number in leads:
            before[number] += 1
    free = [number for number, count in enumerate(before) if count == 0]
    for number in free:  # it grows meanwhile
        for after in after_of[number]:
            before[after] -= 1
            if before[after] == 0:
                free.append(after)
    return next((number for number, count in enumerate(before) if count), None)


__all__ = ["AGAIN", "COMMIT", "Found", "Model", "Rules", "Setting"]
