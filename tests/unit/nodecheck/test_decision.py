"""Who meets whom, who is at fault and who is slow, for any number of nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.nodecheck.decision import (
    FAILED_TWICE,
    FAILED_WITH_A_GOOD_ONE,
    GONE,
    Outcome,
    Result,
    anew,
    faults,
    neighbours,
    outcomes,
    slow,
)

COUNTS = st.integers(1, 41)
REDUCE_S = 0.2
"""Seconds of an all-reduce between two good nodes whose matmul takes one second."""


def played(
    groups: list[tuple[int, ...]],
    *,
    dead: Collection[int] = (),
    broken: Collection[int] = (),
    pace: Mapping[int, float] | None = None,
) -> list[Outcome]:
    """A round: the dead are silent, those with a broken network reach nobody, the others need their time."""
    pace = pace or {}
    reports: dict[int, float | None] = {}
    for group in groups:
        works = len(group) == 1 or not any(node in broken or node in dead for node in group)
        slowest = max(pace.get(node, 1.0) for node in group)
        for node in group:
            if node not in dead:
                reduce_s = REDUCE_S * slowest if len(group) > 1 else 0.0
                reports[node] = pace.get(node, 1.0) + reduce_s if works else None
    return outcomes(groups, reports)


def check(
    count: int,
    *,
    dead: Collection[int] = (),
    broken: Collection[int] = (),
    pace: Mapping[int, float] | None = None,
) -> tuple[list[Outcome], list[Outcome]]:
    """Both rounds."""
    first = played(neighbours(count), dead=dead, broken=broken, pace=pace)
    return first, played(anew(first), dead=dead, broken=broken, pace=pace)


@st.composite
def first_rounds(draw: st.DrawFn) -> list[Outcome]:
    """Any outcome of round 1, plausible or not."""
    groups = neighbours(draw(COUNTS))
    said = st.one_of(st.none(), st.floats(0.01, 100))
    count = sum(map(len, groups))
    reports = {node: draw(said) for node in range(count) if draw(st.integers(0, 3))}
    return outcomes(groups, reports)


# Who meets whom.


@given(COUNTS)
def test_in_round_1_neighbours_meet(count: int) -> None:
    """Each node once; of an odd number the last one is alone."""
    groups = neighbours(count)

    assert [node for group in groups for node in group] == [*range(count)]
    assert all(len(group) == 2 for group in groups[: count // 2])


@given(first_rounds())
def test_in_round_2_each_node_meets_another_one(first: list[Outcome]) -> None:
    """Each node once, in pairs, at most one alone; and nobody the same one again, where there is a choice."""
    groups = anew(first)

    assert sorted(node for group in groups for node in group) == [*range(len(first))]
    assert [len(group) for group in groups] == [2] * (len(first) // 2) + [1] * (len(first) % 2)
    if len(first) > 2:
        assert not [group for group in groups if len(group) == 2 and group[1] in first[group[0]].partners]


@given(first_rounds())
def test_in_round_2_a_suspect_meets_a_node_that_has_passed(first: list[Outcome]) -> None:
    """As far as there are enough of those: otherwise two suspects would say nothing about each other again."""
    suspects = {node for node, one in enumerate(first) if one.result is not Result.PASSED}
    if 2 * len(suspects) > len(first):
        return

    for group in anew(first):
        assert len(suspects.intersection(group)) <= 1, group


# Who is at fault.


@given(COUNTS)
def test_of_good_nodes_none_is_at_fault(count: int) -> None:
    """And none is slow."""
    rounds = check(count)

    assert faults(*rounds) == {}
    assert slow(*rounds) == {}


@given(COUNTS, st.data())
def test_the_dead_are_at_fault_and_nobody_else(count: int, data: st.DataObject) -> None:
    """However many: a node that failed because its partner was silent is not blamed for it."""
    dead = data.draw(st.sets(st.integers(0, count - 1)))

    assert faults(*check(count, dead=dead)) == dict.fromkeys(sorted(dead), GONE)


@given(st.integers(3, 41), st.data())
def test_one_node_without_network_is_at_fault_and_nobody_else(count: int, data: st.DataObject) -> None:
    """It reports like the others, through the store, and so does each node that it meets."""
    broken = data.draw(st.integers(0, count - 1))
    pace = {node: data.draw(st.floats(1.0, 1.5)) for node in range(count)}

    assert faults(*check(count, broken={broken}, pace=pace)).keys() == {broken}


def test_a_node_that_was_alone_meets_another_one_in_round_2() -> None:
    """Whatever its time was: only then its network is checked at all."""
    first = outcomes(neighbours(5), {0: 1.0, 1: 1.1, 2: 1.4, 3: 1.5, 4: 1.2})

    assert len(next(group for group in anew(first) if 4 in group)) == 2


def test_of_two_nodes_that_fail_together_both_are_blamed() -> None:
    """Nobody else is there to say which one it is."""
    assert faults(*check(2, broken={0})) == {0: FAILED_TWICE, 1: FAILED_TWICE}


def test_one_node_by_itself_cannot_show_that_its_network_is_broken() -> None:
    """It meets nobody."""
    assert faults(*check(1, broken={0})) == {}


def test_a_node_that_was_alone_is_blamed_if_its_partner_is_proven() -> None:
    """Of three nodes the last is alone in round 1, where its broken network does not show."""
    first, second = check(3, broken={2})

    assert first[2].result is Result.PASSED
    assert not first[2].partners
    assert faults(first, second) == {2: FAILED_WITH_A_GOOD_ONE}


def test_a_node_that_failed_once_is_not_at_fault() -> None:
    """A fault that passes, a switch that restarts for example, costs nobody its pod."""
    first = played(neighbours(4), broken={1})
    second = played(anew(first))

    assert [one.result for one in first] == [Result.FAILED, Result.FAILED, Result.PASSED, Result.PASSED]
    assert faults(first, second) == {}


def test_a_node_that_comes_back_is_not_at_fault_and_one_that_goes_is() -> None:
    """What counts is whether it is there at the end: it could not train."""
    first = played(neighbours(4), dead={1})

    assert faults(first, played(anew(first))) == {}
    good = played(neighbours(4))
    assert faults(good, played(anew(good), dead={1})) == {1: GONE}


# Who is slow.


@given(st.integers(2, 41), st.floats(4, 1000), st.randoms(use_true_random=False), st.data())
def test_one_slow_node_is_named_and_none_of_those_it_met(
    count: int, times: float, dice: object, data: st.DataObject
) -> None:
    """Its partners wait for it in the all-reduce, but only in one round, or in no other."""
    pace = {node: data.draw(st.floats(1.0, 1.2)) for node in range(count)}
    node = data.draw(st.integers(0, count - 1))
    pace[node] = times

    rounds = check(count, pace=pace)

    assert slow(*rounds).keys() == {node}
    assert faults(*rounds) == {}


@pytest.mark.parametrize(("times", "expected"), [(2.0, set()), (2.01, {1})])
def test_slow_means_more_than_twice_the_median(times: float, expected: set[int]) -> None:
    """In its better round."""
    first = outcomes(neighbours(4), {0: 1.0, 1: 9.0, 2: 1.0, 3: 1.0})
    second = outcomes(anew(first), {0: 1.0, 1: times, 2: 1.0, 3: 1.0})

    assert slow(first, second).keys() == expected


def test_a_failed_node_has_no_part_in_the_median() -> None:
    """The others are compared with each other."""
    rounds = check(4, dead={0}, pace={1: 1.0, 2: 1.0, 3: 5.0})

    assert slow(*rounds).keys() == {3}
