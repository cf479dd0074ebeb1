"""What a job really trained, from the diaries of all its processes: the numbers of the fault table.

A life is one group of ranks, from its begin to its end. Each life writes which lives and steps it continues, as it
found them in its ckpt. So it is known what is in the weights at the end. All other steps were lost: they were trained,
and no later life continued them.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Step = tuple[int, int]
"""A life and the number of the step in the training."""


@dataclass
class Life:
    """One group of ranks."""

    number: int
    ranks: int
    begins: int = 0
    """The step that it found in the ckpt."""
    lineage: list[list[int]] = field(default_factory=list)
    """The lives that it continues, itself at the end, each with the step at which it began."""
    begun: set[int] = field(default_factory=set)
    """The ranks that loaded and were about to train."""
    steps: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """By number and rank: when it was over, its epoch, its samples."""
    weights: dict[int, dict[int, str]] = field(default_factory=dict)
    """By epoch and rank."""
    over: dict[int, str] = field(default_factory=dict)
    """The ranks that came to the end of the training, with their weights."""

    @property
    def last(self) -> int:
        return max(self.steps, default=self.begins)

    @property
    def first_step_at(self) -> float | None:
        """When all its ranks had made their first step; None: they have not."""
        first = self.steps.get(self.begins + 1, {})
        return max(step["at"] for step in first.values()) if len(first) == self.ranks else None

    def step_s(self, first: int, last: int) -> float:
        """Seconds that a step took, between these two."""
        ends = [max(step["at"] for step in self.steps[number].values()) for number in (first, last)]
        return (ends[1] - ends[0]) / (last - first)


class History:
    """All lives so far, in the order in which they began."""

    def __init__(self, diaries: Path) -> None:
        self._diaries = diaries
        self._read: dict[Path, int] = {}
        """Bytes of each diary that were read."""
        self._found: dict[int, Life] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since."""
        for file in sorted(self._diaries.glob("*.jsonl")):
            number, rank, _, ranks = file.stem.split("-")
            life = self._found.setdefault(int(number), Life(int(number), int(ranks)))
            with file.open("rb") as opened:
                opened.seek(self._read.setdefault(file, 0))
                # A process may be in the middle of its last line, or was killed there.
                whole, end, _ = opened.read().rpartition(b"\n")
            self._read[file] += len(whole + end)
            for line in whole.splitlines():
                _note(life, int(rank), json.loads(line))

    @property
    def lives(self) -> list[Life]:
        return [self._found[number] for number in sorted(self._found)]

    def is_over(self) -> bool:
        """All ranks of the newest life came to the end."""
        lives = self.lives
        return bool(lives) and len(lives[-1].over) == lives[-1].ranks

    @property
    def step(self) -> int:
        """The newest step of the newest life."""
        lives = self.lives
        return lives[-1].last if lives else 0

    @property
    def trained(self) -> list[Life]:
        """The lives that made a step."""
        return [life for life in self.lives if life.steps]

    def lost(self) -> list[int]:
        """For each life that continued another one: how many steps of the ones before it did not continue."""
        counts = []
        for before, after in itertools.pairwise(self.trained):
            had = self._steps(before, until=before.last)
            counts.append(len(had - self._steps(after, until=after.begins)))
        return counts

    def unequal_weights(self) -> list[str]:
        """Where the ranks of one life did not have the same weights."""
        found = []
        for number, life in enumerate(self.lives, 1):
            kinds = {f"epoch {epoch}": weights for epoch, weights in life.weights.items()} | {"the end": life.over}
            found += [f"life {number}, {what}" for what, of in kinds.items() if len(set(of.values())) > 1]
        return found

    def samples(self, *, in_weights: bool) -> dict[int, Counter[int]]:
        """By epoch, how often each sample was trained: by the steps in the last weights, or by all there were."""
        kept = self._steps(self.lives[-1], until=self.lives[-1].last)
        counts: dict[int, Counter[int]] = {}
        for life in self.lives:
            for number, ranks in life.steps.items():
                if not in_weights or (life.number, number) in kept:
                    for step in ranks.values():
                        counts.setdefault(step["epoch"], Counter()).update(step["ids"])
        return counts

    def _steps(self, life: Life, *, until: int) -> set[Step]:
        """All steps that were made on the way to this step of this life."""
        ends = [begin for _, begin in life.lineage[1:]] + [until]
        return {
            (number, step)
            for (number, begin), end in zip(life.lineage, ends, strict=True)
            for step in range(begin + 1, end + 1)
        }


def _note(life: Life, rank: int, line: dict[str, Any]) -> None:
    if "begins" in line:
        life.begins, life.lineage = line["begins"], line["lives"]
        life.begun.add(rank)
    elif "step" in line:
        life.steps.setdefault(line["step"], {})[rank] = line
    elif "epoch_over" in line:
        life.weights.setdefault(line["epoch_over"], {})[rank] = line["weights"]
    elif "over" in line:
        life.over[rank] = line["weights"]
