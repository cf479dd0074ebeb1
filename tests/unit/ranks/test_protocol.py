"""Whatever the order of events: nothing torn, nobody stuck, one step on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.ckpt.point import Point
from migrator.ranks import protocol
from migrator.ranks.peers import REPORTS
from migrator.ranks.protocol import AGAIN, COMMIT, Act, KnownLines, Line, Self, Step, View
from tests.support import chance
from tests.support.model import Model, Rules, Setting

WORLDS = [
    Setting(2, 3, "never"),
    Setting(3, 2, "never", notice=1),
    Setting(3, 2, "late", death=1, notice=1),
    Setting(2, 1, "never", unclean=1),
    Setting(2, 2, "any", notice=1),
    Setting(2, 2, "late", death=1, hasty=1),
    Setting(2, 1, "any", lost=1),
    Setting(2, 1, "any", cut=1),
    Setting(2, 1, "any", freeze=1, thaw=1),
    Setting(2, 2, "late", unclean=1, notice=1),
    Setting(2, 1, "late", unclean=1, death=1, notice=1),
    Setting(2, 2, "late", hang=1, notice=1),
    Setting(2, 1, "late", hang=1, death=1, notice=1),
    Setting(2, 3, "never", turns=(1, 2)),
    Setting(2, 3, "never", turns=(1, 2), stays=1),
    Setting(2, 2, "never", turns=(1,), spoiled=1, notice=1),
    Setting(2, 2, "late", turns=(1,), stays=1, death=1, notice=1),
    Setting(2, 2, "late", turns=(1,), stays=1, hasty=1, notice=1),
    Setting(2, 2, "any", turns=(1,), stays=1, notice=1),
]
LONG_WORLDS = [
    Setting(3, 2, "never"),
    Setting(2, 3, "any"),
    Setting(2, 2, "any", freeze=1, thaw=1),
    Setting(2, 2, "any", death=1),
    Setting(2, 2, "any", lost=1),
    Setting(2, 3, "never", unclean=1),
    Setting(2, 2, "late", unclean=1, death=1, notice=1),
    Setting(2, 2, "late", hang=1, death=1),
    Setting(3, 1, "late", death=1),
    Setting(3, 2, "late", hasty=1, notice=1),
    Setting(3, 2, "late", freeze=1, notice=1),
    Setting(3, 2, "late", lost=1, notice=1),
    Setting(3, 1, "late", freeze=1, thaw=1, notice=1),
    Setting(3, 2, "never", turns=(1,), stays=1, notice=1),
    Setting(3, 2, "never", turns=(1,), stays=1),
    Setting(2, 3, "never", turns=(1, 2), spoiled=1),
    Setting(2, 2, "late", turns=(1,), spoiled=1, notice=1),
    Setting(2, 2, "any", turns=(1,), stays=1),
    Setting(2, 2, "late", turns=(1,), stays=1, lost=1, notice=1),
]


def look_at_all(setting: Setting) -> None:
    start_s = time.process_time()
    found = Model(setting).search()
    print(f"{found} ({time.process_time() - start_s:.1f} s)")

    assert not found.broken, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("setting", chance.some("worlds", WORLDS, 0.1), ids=str)
def test_every_order_of_events_keeps_the_promises(setting: Setting) -> None:
    """Never torn, never stuck, no step after the save, the first decision binds, and it has one fate."""
    look_at_all(setting)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", LONG_WORLDS, ids=str)
def test_every_order_of_events_keeps_the_promises_in_larger_worlds(setting: Setting) -> None:
    look_at_all(setting)


@pytest.mark.parametrize(
    "setting",
    chance.some("fewer", [Setting(2, 1, "never"), Setting(2, 1, "any", notice=1), Setting(2, 1, "late", death=1)], 0.3),
    ids=str,
)
def test_what_the_model_leaves_out_makes_no_difference(setting: Setting) -> None:
    """Fewer worlds, the same verdict as with all of them."""
    few, all_of_them = Model(setting).search(), Model(setting, Rules(reduces=False)).search()
    print(few, all_of_them, sep="\n")

    assert few.worlds < all_of_them.worlds
    assert (few.broken, all_of_them.broken) == ("", "")


# Each rule switched off.

NextAct = Callable[[Self, View, int], Step]


def instead(change: Callable[[Step, Self, View], Step]) -> NextAct:
    """What `next_act` says, but for what `change` makes of it."""
    return lambda me, view, size: change(protocol.next_act(me, view, size), me, view)


def post_as(fate: str, act: Act) -> NextAct:
    """Do at once what has to be agreed on."""

    def change(step: Step, me: Self, view: View) -> Step:
        what = step[1]
        return (act, None) if isinstance(what, Line) and what.fate == fate else step

    return instead(change)


def never(act: Act) -> NextAct:
    return instead(lambda step, me, view: (Act.WAIT, None) if step[0] is act else step)


def waits_for_the_log(step: Step, me: Self, view: View) -> Step:
    return (Act.WAIT, None) if view.store_is_unreachable and step[0] not in (Act.DONE, Act.NOTHING) else step


def saves_alone_without_notice(step: Step, me: Self, view: View) -> Step:
    return (Act.SAVE_ALONE, None) if view.store_is_unreachable and not me.is_stopped and step[0] is Act.WAIT else step


def gives_in(step: Step, me: Self, view: View) -> Step:
    """Late and whole, but the others have decided that there is nothing to save."""
    decision = view.known.decision(me.ballot)
    is_nothing = decision is not None and not decision.is_trained and not me.is_alone
    return (Act.NOTHING, None) if step[0] is Act.SAVE_ALONE and is_nothing else step


def leaves_what_is_complete(step: Step, me: Self, view: View) -> Step:
    """An unclean rank saves alone, even if all shares are there."""
    may_save_alone = me.is_unclean and not me.is_alone and view.patience_is_over
    return (Act.SAVE_ALONE, None) if may_save_alone and (step[0] is Act.COMMIT or step[0] is Act.POST) else step


def keeps_notice(rank: int, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return (Line("notice", rank), *lines) if any(line.rank == rank for line in lines) else lines


def own_first(rank: int, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(sorted(lines, key=lambda line: line.what == "decide" and line.rank != rank))


def last_first(rank: int, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(reversed(lines))


def says_nothing_of_notice(me: Self, view: View, size: int) -> Step:
    """A rank that has a notice acts on it, and the others never hear of it."""
    if me.has_notice:
        view = replace(view, known=KnownLines((Line("notice", me.rank), *view.known.lines)))
    return protocol.next_act(me, view, size)


def smallest(reaches: Sequence[Line], *, is_all: bool) -> Point | None:
    return min((line.point for line in reaches if line.point is not None), default=None)


def largest(reaches: Sequence[Line], *, is_all: bool) -> Point | None:
    return max((line.point for line in reaches if line.point is not None), default=None)


def highest_turn(reaches: Sequence[Line], *, is_all: bool) -> Point | None:
    return agreement_common_point(reaches, is_all=True)


def turn_0(reaches: Sequence[Line], *, is_all: bool) -> Point | None:
    """Whether or not all have it still."""
    point = agreement_common_point(reaches, is_all=is_all)
    return None if point is None else (point[0], 0)


agreement_common_point = protocol.common_point


def nobody(known: KnownLines) -> set[int]:
    return set()


@dataclass(frozen=True)
class Without:
    """The protocol without one of its rules, and the smallest world that shows what for it is there."""

    setting: Setting
    says: str
    rules: Rules = Rules(reduces=False)
    patch: tuple[object, str, object] | None = None


QUICK = Setting(2, 1, "never")
BETWEEN_EPOCHS = Setting(2, 2, "never", turns=(1,), stays=1)
WITHOUT = {
    "a notice is passed on": Without(QUICK, "never ends", Rules(next_act=says_nothing_of_notice, reduces=False)),
    "reach and gate in one act": Without(QUICK, "something to save", Rules(is_stop_split=True, reduces=False)),
    "the largest reach": Without(QUICK, "only 0 is saved", patch=(protocol, "common_point", smallest)),
    "of its turns one that all have": Without(BETWEEN_EPOCHS, "is lost", patch=(protocol, "common_point", largest)),
    "the turn before is saved from within the epoch": Without(
        BETWEEN_EPOCHS, "never ends", patch=(protocol, "_can_save", lambda me, point: False)
    ),
    "a turn that all have still": Without(
        Setting(2, 2, "never", turns=(1,), spoiled=1, notice=1), "never ends", patch=(protocol, "common_point", turn_0)
    ),
    "the first decision, not the last": Without(
        Setting(2, 1, "any"), "decided first", Rules(reading=last_first, reduces=False)
    ),
    "the first decision, not one's own": Without(
        Setting(2, 1, "any"), "decided first", Rules(reading=own_first, reduces=False)
    ),
    "missing shares are written": Without(
        Setting(2, 1, "late", death=1), "never ends", Rules(next_act=never(Act.HELP), reduces=False)
    ),
    "who cannot reach gives up": Without(
        Setting(2, 2, "late", hasty=1, death=1),
        "never ends",
        patch=(protocol, "_if_due", lambda view, step: (Act.WAIT, None)),
    ),
    "alone is for good": Without(
        Setting(2, 2, "late", hasty=1), "after it chose to save", Rules(is_alone_for_good=False, reduces=False)
    ),
    "a rank that cannot read the shared log goes on without": Without(
        Setting(2, 1, "late", lost=1), "never ends", Rules(next_act=instead(waits_for_the_log), reduces=False)
    ),
    "a rank that has neither the shared log nor a notice trains on": Without(
        Setting(2, 1, "late", lost=1), "no notice", Rules(next_act=instead(saves_alone_without_notice), reduces=False)
    ),
    "who ended is not waited for": Without(QUICK, "never ends", patch=(KnownLines, "out", nobody)),
    "to commit is agreed on": Without(
        Setting(2, 1, "late", unclean=1), "began anew", Rules(next_act=post_as(COMMIT, Act.COMMIT), reduces=False)
    ),
    "to begin anew is agreed on": Without(
        Setting(2, 1, "late", unclean=1), "began anew", Rules(next_act=post_as(AGAIN, Act.ANEW), reduces=False)
    ),
    "late and whole is saved": Without(
        Setting(2, 1, "late", hasty=1), "has something", Rules(next_act=instead(gives_in), reduces=False)
    ),
    "who is alone takes the next epoch on its way": Without(
        Setting(2, 2, "late", turns=(1,), stays=1, unclean=1, lost=1, notice=1),
        "never ends",
        Rules(next_act=lambda me, view, size: protocol.next_act(me, replace(view, is_at_sooner=False), size)),
    ),
    "what is complete is committed": Without(
        Setting(2, 1, "late", unclean=1, death=1),
        "gives up",
        Rules(next_act=instead(leaves_what_is_complete)),
    ),
}


@pytest.fixture
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Without:
    case: Without = WITHOUT[request.param]
    if case.patch is not None:
        monkeypatch.setattr(*case.patch)
    return case


@pytest.mark.slow
@pytest.mark.parametrize("without", chance.some("rules", WITHOUT, 0.2), indirect=True)
def test_without_any_rule_a_promise_breaks(without: Without) -> None:
    """The model would notice: no rule is there for nothing."""
    found = Model(without.setting, without.rules).search()
    print(found)

    assert found.broken
    assert without.says in found.broken


# Which turn of a step.

Reports = list[tuple[int, dict[int, str]]]
"""Of each rank of one step the turn it is at, and what it can save."""


def lines_of(reports: Reports, step: int = 7) -> list[Line]:
    return [
        Line("reach", rank, point=(step, turn), turns=tuple(sorted(turns.items())))
        for rank, (turn, turns) in enumerate(reports)
    ]


@pytest.mark.parametrize(
    ("reports", "turn"),
    [
        ([(0, {0: ""}), (1, {0: "", 1: "a"})], 0),
        ([(1, {0: "", 1: "a"}), (1, {0: "", 1: "a"})], 1),
        ([(1, {0: "", 1: "a"}), (1, {0: "", 1: "b"})], 0),
        ([(1, {0: "", 1: ""}), (1, {0: "", 1: ""})], 0),
        ([(2, {0: "", 1: "a", 2: "b"}), (1, {0: "", 1: "a"}), (4, {0: "", 1: "a", 3: "c", 4: "d"})], 1),
        ([(0, {0: ""}), (1, {1: "a"})], 1),
        ([(0, {0: ""}), (2, {1: "a", 2: "b"})], 1),
        ([(1, {1: "a"}), (3, {0: "", 2: "b", 3: "c"})], 2),
        ([(1, {1: "a"}), (1, {1: "b"})], 1),
        ([(2, {1: "a", 2: "b"}), (2, {1: "c", 2: "b"})], 2),
    ],
    ids=[
        "one has not entered the epoch",
        "all are in the epoch",
        "they are in different loops",
        "they are on the way, and nobody knows where to",
        "the highest that all have",
        "one has lost what it was before, and the other one is let on",
        "one is let on no further than it must",
        "both are let on or go back to where both can come",
        "what else could be done",
        "only of the later turn they say the same",
    ],
)
def test_of_the_turns_of_a_step_all_save_the_last_one_that_all_have(reports: Reports, turn: int) -> None:
    assert protocol.common_point(lines_of(reports), is_all=True) == (7, turn)


def test_who_has_not_reported_may_be_at_the_first_turn() -> None:
    """A rank that is late may be in its evaluation: what the others have of before that is taken, not the last one."""
    reports: Reports = [(1, {0: "", 1: "a"}), (1, {0: "", 1: "a"})]

    assert protocol.common_point(lines_of(reports), is_all=False) == (7, 0)


def test_who_is_a_step_behind_comes_to_its_first_turn() -> None:
    ahead, behind = lines_of([(1, {0: "", 1: "a"})]), lines_of([(3, {0: "", 3: "b"})], step=6)

    assert protocol.common_point([*ahead, *behind], is_all=True) == (7, 0)


def test_nobody_s_reports_have_no_point() -> None:
    assert protocol.common_point([], is_all=True) is None
    assert protocol.common_point([Line("reach", 0)], is_all=True) is None


reports = st.lists(
    st.tuples(st.integers(0, 1), st.dictionaries(st.integers(0, 4), st.sampled_from(["", "a", "b"]), min_size=1)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(reports=reports, is_all=st.booleans())
def test_if_there_is_a_turn_that_all_have_it_is_one_of_those(
    reports: list[tuple[int, dict[int, str]]], is_all: bool
) -> None:
    """And otherwise no rank has to go back to what it has lost."""
    step = max(step for step, _ in reports)
    sure = [{t: "" if t == 0 else place for t, place in turns.items()} for _, turns in reports]
    said = [
        Line("reach", rank, point=(at, max(turns)), turns=tuple(turns.items()))
        for rank, ((at, _), turns) in enumerate(zip(reports, sure, strict=True))
    ]
    have = [turns if at == step else {0: ""} for (at, _), turns in zip(reports, sure, strict=True)]
    common = [t for t in range(5) if all(t in h for h in have) and (t == 0 or {h[t] for h in have} in ({"a"}, {"b"}))]

    found = protocol.common_point(said, is_all=is_all)

    assert found is not None
    assert found[0] == step
    if common:
        assert found[1] == (max if is_all else min)(common)
    else:
        stands = [max(turns) if at == step else -1 for (at, _), turns in zip(reports, sure, strict=True)]
        assert all(found[1] in h or found[1] > at for h, at in zip(have, stands, strict=True))


# Lines as text.

points = st.none() | st.tuples(st.integers(0), st.integers(0))
lines = st.builds(
    Line,
    what=st.sampled_from(["notice", "reach", "decide", "fate", "alone", "bye"]),
    rank=st.integers(0, 10**6),
    ballot=st.integers(0, 99),
    point=points,
    is_trained=st.booleans(),
    members=st.lists(st.integers(0, 99)).map(tuple),
    fate=st.sampled_from(["", COMMIT, AGAIN]),
    info=st.text(),
    turns=st.lists(st.tuples(st.integers(0, 9), st.text(max_size=3)), max_size=3).map(tuple),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(line=lines)
def test_a_line_is_read_as_it_was_written(line: Line) -> None:
    """One line of text each, whatever is in it."""
    text = line.to_text()

    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert Line.of(text) == line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "null",
        "7",
        "[]",
        "{}",
        '"notice"',
        "{",
        '{"what":"notice"}',
        '{"rank":1}',
        '{"what":"notice","rank":1,"more":2}',
        '{"what":"reach","rank":1,"point":[1]}',
        '{"what":"reach","rank":1,"point":7}',
        '{"what":"reach","rank":1,"point":["a",0]}',
        '{"what":"decide","rank":1,"members":[null]}',
        '{"what":"decide","rank":1,"members":3}',
        '{"what":"reach","rank":1,"point":{"a":1}}',
        '{"what":"reach","rank":1,"point":[Infinity,0]}',
        '{"what":"reach","rank":1,"turns":7}',
        '{"what":"reach","rank":1,"turns":[0]}',
        '{"what":"reach","rank":1,"turns":[["a","b"]]}',
        '{"what":"reach","rank":1,"turns":[[0,"",1]]}',
        '{"what":"notice","rank":0}{"what":"notice","rank":1}',
    ],
)
def test_what_nobody_of_ours_wrote_is_no_line(text: str) -> None:
    assert Line.of(text) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(str))
def test_no_text_makes_reading_fail(text: str) -> None:
    """Not a line of ours, then; but never an error."""
    assert Line.of(text) is None


# Of many ranks, most read only what is for all.


def stands_in_late(me: Self, view: View, size: int) -> Step:
    """But for rank 0 nobody reads what others report, or collects, before it is late."""
    if me.rank and not (view.window_is_over or view.help_is_due):
        read = [line for line in view.known.lines if line.rank == me.rank or line.what not in REPORTS]
        view = replace(view, known=KnownLines(tuple(read)), is_complete=view.is_complete and me.is_alone)
    return protocol.next_act(me, view, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(2, 2, "late", notice=1, any_order=True),
        # 400,000 worlds: half a minute.
        pytest.param(Setting(2, 1, "late", unclean=1, notice=1), marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        Setting(2, 2, "late", turns=(1,), stays=1, notice=1),
        Setting(2, 1, "late", death=1, notice=1),
        Setting(2, 1, "late", lost=1, notice=1),
    ],
    ids=str,
)
def test_ranks_that_read_no_reports_keep_the_promises(setting: Setting) -> None:
    """Stood in for too late, but nothing else is different."""
    found = Model(setting, Rules(next_act=stands_in_late, reduces=False)).search()
    print(found)

    assert not found.broken, str(found)
