"""The node check: two rounds, one verdict, and what follows from it.

A *node* is what is replaced as a whole: the ranks of one torchrun agent, if there are
several agents; else each rank is a node by itself. In each round two nodes meet, and all
their ranks measure together. All ranks decide by the same minutes (`exchange.py`), so
each comes to the same verdict, and nobody has to be told.

If the store is lost there are no minutes. Then a rank decides by itself: the host of the
store is at fault; or this rank, if it finds that it stood still meanwhile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from migrator import events, settings
from migrator.errors import SettingsError
from migrator.events import log
from migrator.nodecheck import decision
from migrator.nodecheck.decision import Outcome
from migrator.nodecheck.exchange import ANSWER_S, Exchange, NotInTime, Place, Reports, StoodStill, StoreLost
from migrator.nodecheck.measurement import Failed, Measurement, named
from migrator.nodecheck.waiting import StillRunning, Waiter
from migrator.notice import termination_message
from migrator.platform import container, launcher

EXIT_AT_FAULT = 138
"""Exit code of a rank whose node is at fault. KubeDL and Kubeflow take it as the script's own wish for a new pod."""
_END_S = 1.0
"""Time, in seconds, that a round may take beyond its deadline, to notice the deadline itself."""
_MOST_S = 86400.0
"""Maximum of each time, in seconds, that can be set."""
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")


@dataclass(frozen=True)
class Options:
    """What a check may take, and what it does about slow nodes."""

    timeout_s: float = 60.0
    """Deadline of each round, in seconds."""
    arrive_s: float = 600.0
    """Maximum time, in seconds, until all ranks have come to the check."""
    repeat: int = 10
    """How often a round repeats the matmul, and the all-reduce."""
    exclude_stragglers: bool = False
    """A slow node ends like one at fault."""

    def validate(self, caller: str) -> None:
        """`SettingsError` if a value is not allowed."""
        wrong = [
            f"{name} is {value!r}; allowed: {allowed}"
            for name, value, is_right, allowed in (
                ("timeout", self.timeout_s, 1 <= self.timeout_s <= _MOST_S, "seconds between 1 and 86400"),
                ("arrive", self.arrive_s, 1 <= self.arrive_s <= _MOST_S, "seconds between 1 and 86400"),
                ("repeat", self.repeat, self.repeat >= 1, "a whole number from 1"),
            )
            if not is_right
        ]
        if wrong:
            raise SettingsError(f"{caller}: " + "; ".join(wrong))


@dataclass(frozen=True)
class Node:
    """What is checked, and replaced, as a whole."""

    ranks: tuple[int, ...]
    host: str = ""
    number: str = ""
    """Its number in the job (`GROUP_RANK`), if it is not a single rank."""

    @property
    def name(self) -> str:
        """For messages: `node 1 (ranks 2-3, pod-1)`, `rank 2 (pod-2)`."""
        if not self.ranks:
            return self.host
        known = [named(self.ranks), self.host] if self.number else [self.host]
        inside = ", ".join(filter(None, known))
        return (f"node {self.number}" if self.number else named(self.ranks)) + (f" ({inside})" if inside else "")


@dataclass(frozen=True)
class Finding:
    """A node at fault, or a slow one, and what was found."""

    node: Node
    why: str


@dataclass(frozen=True)
class Verdict:
    """What the check found. It is the same on all ranks that have reported."""

    faults: tuple[Finding, ...]
    stragglers: tuple[Finding, ...]
    replaced: tuple[Finding, ...]
    """Whose pods have to be replaced before the job can start. Empty: it can start."""
    is_mine: bool
    """This rank belongs to one of them."""
    must_end_hard: bool = False
    """A call still hangs in this process, and the interpreter's end would wait for it."""


@dataclass
class _Round:
    """A round as the minutes show it."""

    groups: list[tuple[int, ...]]
    reports: Reports
    outcomes: list[Outcome]


class Check:
    """One check, as one rank makes it."""

    def __init__(self, place: Place, options: Options) -> None:
        self._place = place
        self._options = options
        self._waiter = Waiter()
        # Nobody who misses the deadline of a round has to be waited for longer than that.
        self._exchange = Exchange(place, self._waiter, answer_s=min(ANSWER_S, options.timeout_s))
        self._nodes: list[Node] = []

    def run(self) -> Verdict:
        """Check, log what was found, and leave together with the other ranks."""
        place, options = self._place, self._options
        log("node_check", ranks=place.size, store=place.address, timeout_s=options.timeout_s, repeat=options.repeat)
        if place.size == 1:
            return self._alone()
        try:
            verdict = self._together()
        except (StoreLost, NotInTime, StoodStill) as error:
            verdict = self._by_itself(error)
        self._say(verdict)
        if self._waiter.has_abandoned:
            return replace(verdict, must_end_hard=True)
        self._exchange.close()
        return verdict

    def _together(self) -> Verdict:
        place, options = self._place, self._options
        self._exchange.connect(options.arrive_s)
        note = {"node": os.environ.get("GROUP_RANK", ""), "host": container.pod_name()}
        notes = self._exchange.arrive(note, options.arrive_s)
        self._nodes = nodes_of(notes)
        missing = [rank for rank in range(place.size) if rank not in notes]
        if missing:
            why = f"did not come to the check within {options.arrive_s:g} s"
            verdict = self._verdict([Finding(Node((rank,)), why) for rank in missing], [])
            self._exchange.leave(notes, is_end=True)
            return verdict
        first = self._round(1, decision.neighbours(len(self._nodes)))
        second = self._round(2, decision.anew(first.outcomes))
        self._show(first, second)
        verdict = self._judge(first, second)
        self._exchange.leave(second.reports, is_end=bool(verdict.replaced))
        return verdict

    def _round(self, number: int, groups: list[tuple[int, ...]]) -> _Round:
        """Take part in a round, and read its minutes."""
        topic, rank, options = f"round {number}", self._place.rank, self._options
        (group,) = [group for group in groups if any(rank in self._nodes[node].ranks for node in group)]
        ranks = sorted(rank for node in group for rank in self._nodes[node].ranks)
        end_s = time.monotonic() + options.timeout_s + _END_S
        self._waiter.begin_round()
        report: dict[str, object] = {"failed": "the others were through with this round before this rank began it"}
        if not self._exchange.has_minutes(topic):
            log("node_round", round=number, meets=named([other for other in ranks if other != rank]))
            report = self._measured(topic, ranks, end_s - _END_S)
        # All ranks begin a round at about the same moment, so a rank that is in time has reported by then.
        reports = self._exchange.gather(topic, report, end_s - time.monotonic())
        return _Round(groups, reports, decision.outcomes(groups, self._by_node(reports)))

    def _measured(self, topic: str, ranks: Sequence[int], end_s: float) -> dict[str, object]:
        """The report of this rank."""
        options, rank, exchange = self._options, self._place.rank, self._exchange
        name = f"{topic} of {named(ranks)}"
        measurement = Measurement(
            lambda: exchange.store_for_group(name), rank, ranks, repeat=options.repeat, end_s=end_s
        )
        try:
            # By the clock: a rank that stood still has missed this round, and may be in time for the next one.
            left_s = _END_S + max(0.0, end_s - time.monotonic())
            times = self._waiter.within(left_s, name, measurement.run, is_by_clock=True)
        except Failed as error:
            return {"failed": str(error)}
        except StillRunning:
            return {"failed": f"{measurement.doing}: it hangs, no end within {options.timeout_s:g} s"}
        return {"matmul_s": times.matmul_s, "allreduce_s": times.allreduce_s}

    def _by_node(self, reports: Reports) -> dict[int, float | None]:
        """The seconds of each node's slowest rank; None if one of them failed. Not there: one of them is silent."""
        found: dict[int, float | None] = {}
        for number, node in enumerate(self._nodes):
            times = [_elapsed_s(reports[rank]) for rank in node.ranks if rank in reports]
            if len(times) == len(node.ranks):
                passed = [time_s for time_s in times if time_s is not None]
                found[number] = max(passed) if len(passed) == len(times) else None
        return found

    def _judge(self, first: _Round, second: _Round) -> Verdict:
        found = decision.faults(first.outcomes, second.outcomes)
        slow = decision.slow(first.outcomes, second.outcomes)
        faults = [
            Finding(self._nodes[number], f"{why}: {self._said(first, 1, number)}; {self._said(second, 2, number)}")
            for number, why in found.items()
        ]
        stragglers = [
            Finding(self._nodes[number], f"its better round took {times:.1f} times the median")
            for number, times in slow.items()
            if number not in found
        ]
        return self._verdict(faults, stragglers)

    def _said(self, played: _Round, number: int, node: int) -> str:
        """What the ranks of a node reported in a round, for people."""
        silent = [rank for rank in self._nodes[node].ranks if rank not in played.reports]
        if silent:
            return f"round {number}: no report of {named(silent)}"
        failed = [said["failed"] for rank in self._nodes[node].ranks if "failed" in (said := played.reports[rank])]
        return f"round {number}: {failed[0] if failed else 'passed'}"

    def _verdict(self, faults: Sequence[Finding], stragglers: Sequence[Finding]) -> Verdict:
        replaced = [*faults, *stragglers] if self._options.exclude_stragglers else [*faults]
        return Verdict(
            faults=tuple(faults),
            stragglers=tuple(stragglers),
            replaced=tuple(replaced),
            is_mine=any(self._place.rank in finding.node.ranks for finding in replaced),
        )

    def _by_itself(self, error: Exception) -> Verdict:
        """The verdict of a rank that has lost the others."""
        place, stood_still_s = self._place, self._waiter.longest_s
        lost = Node((place.rank,), container.pod_name())
        if isinstance(error, StoodStill) or stood_still_s > min(ANSWER_S, self._options.timeout_s):
            return self._verdict([Finding(lost, f"it stood still for {stood_still_s:.1f} s")], [])
        served_by = next((node for node in self._nodes if 0 in node.ranks), Node((0,)))
        if place.server != _RANK_0:
            served_by = Node((), place.server)
        return self._verdict([Finding(served_by, str(error))], [])

    def _alone(self) -> Verdict:
        """One rank has nobody to be compared with: its matmul works, or it does not."""
        self._nodes = [Node((0,), container.pod_name())]
        report = self._measured("round 1", [0], time.monotonic() + self._options.timeout_s)
        verdict = self._verdict([], [])
        if "failed" in report:
            verdict = self._verdict([Finding(self._nodes[0], str(report["failed"]))], [])
        else:
            self._show_row(0, [(named([]), report)])
        self._say(verdict)
        return replace(verdict, must_end_hard=self._waiter.has_abandoned)

    def _show(self, first: _Round, second: _Round) -> None:
        """Log the table, once: by the lowest rank that is there at the end."""
        if self._place.rank != min(second.reports, default=-1):
            return
        for rank in range(self._place.size):
            (number,) = [number for number, node in enumerate(self._nodes) if rank in node.ranks]
            rows = []
            for played in (first, second):
                partners = sorted(
                    rank for other in played.outcomes[number].partners for rank in self._nodes[other].ranks
                )
                rows.append((named(partners), played.reports.get(rank)))
            self._show_row(rank, rows)

    def _show_row(self, rank: int, rounds: Sequence[tuple[str, Mapping[str, object] | None]]) -> None:
        (node,) = [node for node in self._nodes if rank in node.ranks]
        cells: dict[str, Any] = {}
        for number, (met, report) in enumerate(rounds, start=1):
            cells[f"met_{number}"] = met
            elapsed_s = None if report is None else _elapsed_s(report)
            if report is None or elapsed_s is None:
                cells[f"round_{number}"] = "silent" if report is None else f"failed: {report['failed']}"
            else:
                cells |= {f"{part[:-2]}_{number}_s": report[part] for part in ("matmul_s", "allreduce_s")}
                cells[f"round_{number}_s"] = elapsed_s
        log("node_times", of=rank, node=node.number or rank, host=node.host, **cells)

    def _say(self, verdict: Verdict) -> None:
        for finding in verdict.stragglers:
            log("node_slow", level=logging.WARNING, node=finding.node.name, why=finding.why)
        for finding in verdict.faults:
            log("node_fault", level=logging.ERROR, node=finding.node.name, why=finding.why)
        if not verdict.faults:
            log("nodes_good", nodes=len(self._nodes), slow=len(verdict.stragglers))


_RANK_0 = Place.server


def nodes_of(notes: Reports) -> list[Node]:
    """The nodes of the ranks that have come: those of torchrun's agents if there are several, else single ranks."""
    numbers = [said["node"] for said in notes.values()]
    if not all(numbers) or len({*numbers}) == 1:
        return [Node((rank,), said["host"]) for rank, said in sorted(notes.items())]
    return [
        Node(tuple(ranks), notes[ranks[0]]["host"], number)
        for number in sorted({*numbers}, key=int)
        if (ranks := sorted(rank for rank, said in notes.items() if said["node"] == number))
    ]


def _elapsed_s(report: Mapping[str, Any]) -> float | None:
    """What matmul and all-reduce took together; None if the round failed."""
    return None if "failed" in report else float(report["matmul_s"] + report["allreduce_s"])


def run(place: Place, options: Options) -> Verdict:
    """Check the nodes; all ranks of the job call this."""
    events.ensure_visible()
    events.rank = place.rank
    return Check(place, options).run()


def prepare_end(verdict: Verdict) -> int:
    """Say to kubelet and to the agent what is to be done; the exit code with which this process has to end."""
    found = "; ".join(f"{finding.node.name}: {finding.why}" for finding in verdict.replaced)
    # The same text on all ranks, because the ranks of a container share its message.
    text = f"migrator: node check: replace the pod of {found}. The other pods have to start again"
    termination_message.write(text, settings.places(os.environ).termination_log)
    if not verdict.is_mine:
        return settings.exit_code(os.environ)
    agent = launcher.agent()
    restarts, most = (int(os.environ.get(name, "0")) for name in _RESTARTS)
    if agent is not None and restarts < most:
        # It would start these ranks again on the same node.
        agent.end()
    return EXIT_AT_FAULT
