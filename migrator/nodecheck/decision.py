"""What the node check decides: who meets whom, which node is at fault, which node is slow.

Pure functions. A node is a number from 0 here. In round 1 neighbours meet. A group that
fails does not say which of its nodes is the cause, so in round 2 each node meets
another one, and a suspect meets a node that has passed. Who fails twice is at fault.

The rules count only what a node can be blamed for. If one node of a group is silent
(it ended, or stands still), the failure of the others says nothing about them. An odd
number leaves one node alone in each round. Alone it can pass, but that does not show
that its network works.

The price: with several broken nodes a good one that meets a broken one in both rounds is
blamed. Of two nodes that fail together nobody can say which one it is, so both are blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

FACTOR = 2.0
"""A node whose better round took more than this many times the median is slow."""

GONE = "gave no report in round 2"
FAILED_TWICE = "failed in both rounds"
FAILED_WITH_A_GOOD_ONE = "failed with a node that passed in the other round"


class Result(Enum):
    """How a round ended for one node."""

    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"
    """It failed, and a node of its group was silent: that is reason enough."""
    SILENT = "silent"
    """At least one of its ranks gave no report."""


@dataclass(frozen=True)
class Outcome:
    """One round of one node."""

    result: Result
    partners: tuple[int, ...]
    """The other nodes of its group; empty if it was alone."""
    elapsed_s: float = float("inf")
    """What matmul and all-reduce took together, if it passed."""

    @property
    def has_passed_with_others(self) -> bool:
        return self.result is Result.PASSED and bool(self.partners)


def neighbours(count: int) -> list[tuple[int, ...]]:
    """The groups of round 1: (0, 1), (2, 3) and so on. Of an odd number the last one is alone."""
    return [tuple(range(first, min(first + 2, count))) for first in range(0, count, 2)]


def anew(first: Sequence[Outcome]) -> list[tuple[int, ...]]:
    """The groups of round 2: the fastest node of round 1 meets the worst one, and so on towards the middle.

    No two nodes meet again, unless there are only two. Of an odd number the one in the middle is alone.
    """
    order = sorted(range(len(first)), key=lambda node: _standing(first[node]))
    half = len(order) // 2
    better, worse = order[:half], order[::-1][:half]
    alone = order[half:-half] if half else order
    for at in range(half):
        if worse[at] not in first[better[at]].partners:
            continue
        # Each node had one partner, so after an exchange with any other pair all of them have new ones.
        if half > 1:
            other = (at + 1) % half
            worse[at], worse[other] = worse[other], worse[at]
        elif alone:
            worse[at], alone = alone[0], [worse[at]]
    return [*zip(better, worse, strict=True), *((node,) for node in alone)]


def _standing(outcome: Outcome) -> tuple[int, float]:
    """Best first: passed, passed alone (its network is not known yet), unclear, failed, silent."""
    if outcome.result is Result.PASSED:
        return (0 if outcome.partners else 1), outcome.elapsed_s
    return (2 + [Result.UNCLEAR, Result.FAILED, Result.SILENT].index(outcome.result)), 0.0


def outcomes(groups: Sequence[tuple[int, ...]], reports: Mapping[int, float | None]) -> list[Outcome]:
    """How a round ended, node by node. `reports`: the seconds of those that passed, None for those that failed.

    A node that is not in `reports` was silent.
    """
    found: dict[int, Outcome] = {}
    for group in groups:
        failed = Result.FAILED if all(node in reports for node in group) else Result.UNCLEAR
        for node in group:
            partners = tuple(other for other in group if other != node)
            elapsed_s = reports.get(node)
            if elapsed_s is not None:
                found[node] = Outcome(Result.PASSED, partners, elapsed_s)
            else:
                found[node] = Outcome(failed if node in reports else Result.SILENT, partners)
    return [found[node] for node in sorted(found)]


def faults(first: Sequence[Outcome], second: Sequence[Outcome]) -> dict[int, str]:
    """The nodes at fault, each with the reason."""
    proven = {node for played in (first, second) for node, one in enumerate(played) if one.has_passed_with_others}
    found = {}
    for node, (before, now) in enumerate(zip(first, second, strict=True)):
        if now.result is Result.SILENT:
            # Whatever it did in round 1: it will not train.
            found[node] = GONE
        elif before.result in (Result.FAILED, Result.SILENT) and now.result is Result.FAILED:
            found[node] = FAILED_TWICE
        elif node not in proven and any(
            one.result is Result.FAILED and one.partners and proven.issuperset(one.partners) for one in (before, now)
        ):
            # Its other round says nothing: it was alone, or its partner was silent.
            found[node] = FAILED_WITH_A_GOOD_ONE
    return found


def slow(first: Sequence[Outcome], second: Sequence[Outcome], *, factor: float = FACTOR) -> dict[int, float]:
    """The slow nodes, each with its best time as a multiple of the median of all."""
    best = best_times(first, second)
    if not best:
        return {}
    median_s = sorted(best.values())[(len(best) - 1) // 2]  # of an even number the lower one
    found = {node: time_s / median_s for node, time_s in best.items() if time_s > factor * median_s}
    met = {
        node: [one.partners[0] for one in rounds if one.has_passed_with_others]
        for node, rounds in enumerate(zip(first, second, strict=True))
    }
    # A node that met only one other has that one's time too, if the all-reduce is what is slow.
    return {
        node: times for node, times in found.items() if len(met[node]) > 1 or not _is_slower(met[node][0], found, met)
    }


def _is_slower(partner: int, found: Mapping[int, float], met: Mapping[int, Sequence[int]]) -> bool:
    """The partner was slow with another node, too."""
    return partner in found and len(met[partner]) > 1


def best_times(first: Sequence[Outcome], second: Sequence[Outcome]) -> dict[int, float]:
    """The seconds of the better round of each node. A round alone does not count: it had no all-reduce."""
    best: dict[int, float] = {}
    for played in (first, second):
        for node, one in enumerate(played):
            if one.has_passed_with_others:
                best[node] = min(one.elapsed_s, best.get(node, one.elapsed_s))
    return best
