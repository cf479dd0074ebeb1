"""What a job of several ranks did over all its lives, each on any number of ranks.

The lines are those of `tests/support/scripts/ranked.py`. As in `story.py` a step counts until a
life resumes from before it; here it also has to be there on every rank of its life.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from migrator.ckpt.catalog import whole
from migrator.session import restore
from migrator.storage.posix import PosixStorage
from tests.support.harness import Job
from tests.support.rank_processes import Gang


@dataclass(frozen=True)
class Step:
    """One step of all ranks of one life."""

    size: int
    lines: dict[int, str]
    """What each rank printed behind the number of the step."""

    @property
    def ids(self) -> list[int]:
        """The samples in the order of the epoch: of each rank the first, of each the second, and so on."""
        shares = [[int(i) for i in self.lines[rank].split(" ids ")[1].split()] for rank in range(self.size)]
        assert len({len(share) for share in shares}) == 1, f"ranks trained unequally many samples: {shares}"
        return [share[place] for place in range(len(shares[0])) for share in shares]


@dataclass
class RankStory:
    """The steps that count, and how it ended; each by rank."""

    steps: dict[int, Step] = field(default_factory=dict)
    evaluated: dict[str, dict[int, str]] = field(default_factory=dict)
    final: dict[int, str] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    """The step each life began behind."""
    lives: list[list[str]] = field(default_factory=list)
    """What each rank of each life wrote."""

    def add(self, ranks: Gang | Sequence[str]) -> int:
        """One more life, after those before it: what its ranks wrote. The step it resumed from."""
        texts = ranks.texts if isinstance(ranks, Gang) else list(ranks)
        self.lives.append(texts)
        resumed = {"".join(re.findall(r"^resumed (\d+)$", text, re.MULTILINE)) for text in texts}
        if not any(re.search("^trained ", text, re.MULTILINE) for text in texts) and len(resumed) > 1:
            resumed.discard("")  # one that was still in `listening()` when another was told left there
        assert len(resumed) == 1, f"ranks resumed from different steps: {resumed}\n{self.text}"
        assert "" not in resumed, f"no rank came as far as `resumed`\n{self.text}"
        first = int(resumed.pop())
        self.resumed.append(first)
        self.steps = {number: step for number, step in self.steps.items() if number <= first}
        self._check_complete(first)
        for rank, text in enumerate(texts):
            for number, line in re.findall(r"^trained (\d+) (.*)$", text, re.MULTILINE):
                self.steps.setdefault(int(number), Step(len(texts), {})).lines[rank] = line
        self._add_evaluated(texts)
        self.final = _last(texts, "final")
        self.weights = _last(texts, "weights")
        return first

    def _add_evaluated(self, texts: list[str]) -> None:
        for rank, text in enumerate(texts):
            for epoch, line in re.findall(r"^evaluated (\d+) (.*)$", text, re.MULTILINE):
                self.evaluated.setdefault(epoch, {})[rank] = line

    def _check_complete(self, until: int) -> None:
        """Every rank trained every step up to this one."""
        numbers = set(range(1, until + 1))
        assert set(self.steps) >= numbers, f"no life trained {sorted(numbers - set(self.steps))}\n{self.text}"
        for number in numbers:
            step = self.steps[number]
            assert len(step.lines) == step.size, f"step {number} was trained by {list(step.lines)} only\n{self.text}"

    @property
    def ids(self) -> list[int]:
        """The samples of all ranks in the order in which they were trained."""
        self._check_complete(max(self.steps, default=0))
        return [i for number in sorted(self.steps) for i in self.steps[number].ids]

    @property
    def moments(self) -> list[str]:
        """Where the last life could have been stopped."""
        return re.findall(r"^moment (.*)$", self.lives[-1][0], re.MULTILINE)

    @property
    def text(self) -> str:
        """What the last life wrote, for messages."""
        return "\n".join(f"--- life {len(self.lives)}, rank {r}\n{text}" for r, text in enumerate(self.lives[-1]))


def _last(texts: list[str], word: str) -> dict[int, str]:
    found = {rank: re.findall(rf"^{word} (.*)$", text, re.MULTILINE) for rank, text in enumerate(texts)}
    return {rank: lines[-1] for rank, lines in found.items() if lines}


def unstopped_ranks(job: Job, size: int, **more: Any) -> RankStory:
    """The job as nobody stops it, with ckpts and signal file of its own."""
    story = RankStory()
    apart = {"MIGRATOR_JOB": "unstopped", "MIGRATOR_SIGNAL": str(job.directory / "other-pod" / "signal")}
    gang = job.gang(size, **{**more, **apart})
    assert gang.wait() == [0] * size, gang.text
    story.add(gang)
    return story


def stopped_ranks(job: Job, places: Sequence[tuple[str, int]], sizes: Sequence[int], **more: Any) -> RankStory:
    """The job as it is stopped at these moments, each on this rank, one a life, and then goes on to its end.

    `sizes` says on how many ranks each life runs, the last one included.
    """
    assert len(sizes) == len(places) + 1
    story = RankStory()
    for turn, ((place, rank), size) in enumerate(zip(places, sizes, strict=False)):
        gang = job.gang(size, **{**more, "AT": place, "AT_RANK": str(rank), "HOW": ("sigterm", "file")[turn % 2]})
        codes = gang.wait()
        add_next_ranks(story, gang)
        # Notice in the last lines of a script may find it at its end: that is as good.
        assert codes == [143] * size or (codes == [0] * size and story.final), gang.text
        assert story.lives[-1][rank].count(f"moment {place}\n") == 1, gang.text
    gang = job.gang(sizes[-1], **more)
    assert gang.wait() == [0] * sizes[-1], gang.text
    add_next_ranks(story, gang)
    return story


def add_next_ranks(story: RankStory, ranks: Gang | Sequence[str]) -> None:
    """One more life. When the one before it was stopped, no rank of it trained a step behind the one it saved."""
    before = max(story.steps, default=0)
    resumed = story.add(ranks)
    assert resumed == before, f"resumed from step {resumed}, behind step {before}:\n{story.text}"


def assert_ranks_as_if_nothing_had_happened(story: RankStory, reference: RankStory) -> None:
    """Rank by rank, to the last bit. Only lives of as many ranks as the reference can be compared so."""
    for number, step in reference.steps.items():
        found = story.steps.get(number)
        assert found == step, f"step {number}: {found}, expected {step}; stopped at {story.resumed}\n{story.text}"
    assert story.steps == reference.steps
    assert story.evaluated == reference.evaluated
    assert story.final == reference.final
    assert story.weights == reference.weights
    assert_ranks_agree(story)


def assert_ranks_agree(story: RankStory) -> None:
    """All ranks of the last life came to its end, with the same weights and optimizer state."""
    assert set(story.weights) == set(range(len(story.lives[-1]))), story.text
    assert len(set(story.weights.values())) == 1, story.weights


def assert_each_sample_once_over_ranks(story: RankStory, *, epochs: int, samples: int, padding: int = 0) -> None:
    """Over all ranks and lives. Of each epoch the last `padding` samples, and no others, are repeated ones."""
    by_epoch: dict[int, list[int]] = {}
    for number in story.ids:
        by_epoch.setdefault(number // 1000, []).append(number % 1000)
    assert sorted(by_epoch) == list(range(epochs))
    for epoch, ids in by_epoch.items():
        assert sorted(ids[:samples]) == list(range(samples)), f"epoch {epoch}: {_amiss(ids[:samples], samples)}"
        assert len(ids) == samples + padding, f"epoch {epoch}: repeated at its end are {ids[samples:]}"


def _amiss(ids: list[int], samples: int) -> str:
    twice = sorted({i for i in ids if ids.count(i) > 1})
    return f"twice {twice}, never {sorted(set(range(samples)) - set(ids))}"


def whole_steps(job: Job) -> list[int]:
    """The steps of all committed ckpts, oldest first; every byte of each was read and is what it has to be."""
    storage = PosixStorage(job.root, job.env.get("MIGRATOR_JOB", "default"))
    found = []
    for name in job.ckpts():
        if (storage.directory / name).is_dir():
            manifest = whole(storage, name)
            assert restore.read(storage, manifest, {}), name
            found.append(manifest.step)
    return found
