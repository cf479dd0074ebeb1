"""The fault table: what each fault costs an elastic job of four pods, beside what other systems document about it.

    python benchmarks/faults.py [--only "NAME;..."] [--list] [--json FILE] [--page docs/faults.md] [--dir DIRECTORY]

The pods are those of the stand-in kubelet: real processes, the real hook, real signals. In each pod a torchrun agent
runs one rank; the agents meet at a c10d store that the first pod serves. Nothing knows of the faults but the
scenario (`faults_scenarios.py`), and what they cost is read from what the ranks trained (`faults_history.py`).

The aim of each row: a fault with a notice loses no step, one without a notice at most the steps between two periodic
saves; no sample of any epoch is missing in the weights at the end, and none is in them twice; all ranks have the same
weights. A row that misses it is marked, what its pods wrote is kept, and the exit code is 1.

Everything ends with this command, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from faults_history import History  # noqa: E402
from faults_job import EPOCHS, EVERY, SAMPLES, PodNetwork, ScenarioError, TrainingJob  # noqa: E402
from faults_scenarios import SCENARIOS, SOURCES, Scenario, why_not  # noqa: E402
from suite import end_with_parent, machine  # noqa: E402

from migrator.testing import Kubelet, StandInError  # noqa: E402

SCENARIO_S = 400.0
"""Seconds that one scenario may take in a process of its own."""
HEADER = [
    *("fault", "notice", "steps lost", "seconds to the next step", "samples missed", "twice in the weights"),
    *("trained again", "weights equal", "ranks, life by life", "aim"),
]


@dataclass
class Row:
    """What one scenario cost."""

    name: str
    is_announced: bool
    lost: list[int] = field(default_factory=list)
    """Steps, for each life that continued another one."""
    next_step_s: list[float] = field(default_factory=list)
    """Seconds from each fault to the first step of a life that began after it."""
    missed: int = 0
    """Samples of all epochs that are not in the weights at the end."""
    twice: int = 0
    """How often too many a sample of an epoch is in them."""
    again: int = 0
    """How often a sample of an epoch was trained once more by any rank, also in steps that were lost."""
    unequal: list[str] = field(default_factory=list)
    """Where ranks had other weights than the others."""
    ranks: list[int] = field(default_factory=list)
    """Of each life that trained."""
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """In which way the aim was missed."""
    not_run: str | None = None
    took_s: float = 0.0

    @property
    def cells(self) -> list[str]:
        start = [self.name, "yes" if self.is_announced else "no"]
        if self.not_run is not None:
            return [*start, f"not run: {self.not_run}", *["-"] * (len(HEADER) - 3)]
        return [
            *start,
            "-" if not self.ranks else str(max(self.lost, default=0)),
            ", ".join(f"{seconds:.1f}" for seconds in self.next_step_s) or "-",
            *(str(count) if self.ranks else "-" for count in (self.missed, self.twice, self.again)),
            "-" if not self.ranks else "NO" if self.unequal else "yes",
            " ".join(map(str, self.ranks)) or "-",
            f"MISSED: {'; '.join(self.wrong)}" if self.wrong else "kept",
        ]


def run(scenario: Scenario, directory: Path) -> Row:
    """The whole scenario, in this process. At its end no process of it is left."""
    row = Row(scenario.name, scenario.is_announced)
    start_s = time.monotonic()
    with Kubelet(directory) as kubelet:
        network = PodNetwork(directory) if scenario.needs_network else None
        job = TrainingJob(kubelet, nodes=scenario.nodes, network=network)
        try:
            scenario.run(job)
            job.finish()
        except (ScenarioError, StandInError) as error:
            (directory / "error.txt").write_text(str(error))
            row.wrong.append(str(error).partition("\n")[0])
        else:
            judge(row, scenario, job)
        row.notes = job.notes
    row.took_s = time.monotonic() - start_s
    return row


def judge(row: Row, scenario: Scenario, job: TrainingJob) -> None:
    """Fill the row, and say where it misses the aim."""
    history = job.history
    row.lost, row.unequal = history.lost(), history.unequal_weights()
    row.ranks = [life.ranks for life in history.trained]
    row.next_step_s = [next_step_s(history, fault_at) for fault_at in job.faults_at]
    kept, trained = (history.samples(in_weights=only) for only in (True, False))
    row.missed = EPOCHS * SAMPLES - sum(len(counts) for counts in kept.values())
    row.twice, row.again = (sum(c.total() - len(c) for c in counts.values()) for counts in (kept, trained))
    if max(row.lost, default=0) > scenario.lost_at_most:
        row.wrong.append(f"steps lost: {row.lost}, at most {scenario.lost_at_most}")
    if row.missed or row.twice:
        row.wrong.append(f"{row.missed} samples missed, {row.twice} twice in the weights")
    row.wrong += [f"weights differ: {where}" for where in row.unequal]
    # A container may end before its hook has read the answer; that hook ends with it, by SIGKILL.
    codes = [hook.code for stop in job.stops for hook in stop.hooks]
    row.wrong += [f"preStop ended with {code}" for code in codes if code not in (0, 137)]


def next_step_s(history: History, fault_at: float) -> float:
    """Until all ranks of a life that began after the fault have made a step."""
    firsts = [life.first_step_at for life in history.lives if life.number / 1e9 > fault_at]
    return min(first for first in firsts if first is not None) - fault_at


def run_apart(scenario: Scenario, directory: Path) -> Row:
    """In a process of its own, which has a network of its own."""
    command = [*PodNetwork.inside(), sys.executable, str(HERE / "faults.py"), "--inside", scenario.name]
    with subprocess.Popen([*command, "--dir", str(directory)], stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(timeout=SCENARIO_S)
        except BaseException as error:
            # It ends its pods. If it does not, they end with it.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Row(scenario.name, scenario.is_announced, wrong=[f"not over within {SCENARIO_S:.0f} s"])
    lines = out.splitlines()
    if process.returncode or not lines:
        wrong = f"its process ended with {process.returncode}"
        return Row(scenario.name, scenario.is_announced, wrong=[wrong])
    return Row(**json.loads(lines[-1]))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, in columns."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True))} |" for line in cells)


def results(rows: list[Row], where: dict[str, Any]) -> str:
    """The table, and what has to be known to read it."""
    notes = [f"- {row.name}: {note}" for row in rows for note in row.notes]
    made = (
        f"{EPOCHS} epochs of {SAMPLES} samples, a periodic save every {EVERY} steps; {where['cores']} cores, Python "
        f"{where['python']}, torch {where['torch']}, {where['date']}, load {where['load_before']:.1f} before it began, "
        f"{sum(row.took_s for row in rows):.0f} s in all."
    )
    return "\n\n".join([table(HEADER, [row.cells for row in rows]), made, *(["\n".join(notes)] if notes else [])])


def documented() -> str:
    """What is done in each scenario, and what the other systems say about it."""
    rows = [[one.name, one.what, *one.documented.texts] for one in SCENARIOS]
    # Not in columns: some cells are long.
    header = ["fault", "what is done here", *SOURCES]
    lines = [header, ["---"] * len(header), *rows]
    sources = [f"- {system}: {', '.join(f'`{source}`' for source in its)}" for system, its in SOURCES.items()]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", *sources])


def fill(page: Path, texts: dict[str, str]) -> None:
    """Replace what is between `<!-- NAME -->` and `<!-- end -->`."""

    def one(place: re.Match[str]) -> str:
        return f"<!-- {place[1]} -->\n\n{texts[place[1]]}\n\n<!-- end -->" if place[1] in texts else place[0]

    page.write_text(re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", one, page.read_text(), flags=re.S))


def chosen(only: str | None) -> list[Scenario]:
    names = [one.name for one in SCENARIOS] if only is None else [name.strip() for name in only.split(";")]
    if unknown := [name for name in names if name not in {one.name for one in SCENARIOS}]:
        sys.exit(f"there is no {', '.join(unknown)}; there are: {'; '.join(one.name for one in SCENARIOS)}")
    return [one for one in SCENARIOS if one.name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="names of faults, separated by semicolons")
    parser.add_argument("--list", action="store_true", help="print the names and what is done, and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--page", type=Path, help="write the tables into this page, of all faults only")
    parser.add_argument("--dir", type=Path, help="keep there what the pods write (otherwise only of rows that miss)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # SIGTERM then ends all pods, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.inside is not None:
        end_with_parent()
        [scenario] = chosen(options.inside)
        print(json.dumps(asdict(run(scenario, options.dir))))
        return
    scenarios = chosen(options.only)
    if options.list:
        print("\n".join(f"{one.name}: {one.what}" for one in scenarios))
        return
    if options.page is not None and len(scenarios) < len(SCENARIOS):
        parser.error("--page needs the whole table, not --only")

    directory = options.dir or Path(tempfile.mkdtemp(prefix="faults-"))
    where = machine(HERE)
    rows: list[Row] = []
    try:
        for scenario in scenarios:
            rows.append(one_row(scenario, directory.resolve() / scenario.name.replace(" ", "-").replace(",", "")))
    finally:
        is_kept = options.dir is not None or any(row.wrong for row in rows)
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"\n{results(rows, where)}")
    if options.json is not None:
        found = {"machine": where, "every": EVERY, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.page is not None:
        fill(options.page, {"results": results(rows, where), "documented": documented()})
    if any(row.wrong for row in rows):
        sys.exit(f"\n{sum(bool(row.wrong) for row in rows)} of {len(rows)} miss the aim; see {directory}")


def one_row(scenario: Scenario, directory: Path) -> Row:
    print(f"{scenario.name} ...", end=" ", flush=True)
    if why := why_not(scenario):
        print("not run")
        return Row(scenario.name, scenario.is_announced, not_run=why)
    row = (run_apart if scenario.needs_network else run)(scenario, directory)
    print(f"{row.took_s:.0f} s{', MISSED' if row.wrong else ''}", flush=True)
    return row


if __name__ == "__main__":
    main()
