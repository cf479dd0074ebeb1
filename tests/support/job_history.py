"""What a job did over all its lives, and whether it shows that there was more than one.

A script prints `resumed <step>` once it has loaded, `trained <step> ... ids <ids>` after
each step and `final ...` at its end; an id is the sample plus 1000 times the epoch.
Lines of different runs can be compared as they are: numbers are printed to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.harness import Job, Process


@dataclass
class Story:
    """The steps that count: what a later life trains again does not."""

    trained: dict[int, str] = field(default_factory=dict)
    evaluated: dict[str, str] = field(default_factory=dict)
    final: str = ""
    lives: list[Process] = field(default_factory=list)

    def add(self, life: Process) -> None:
        """One more life, after those before it."""
        self.lives.append(life)
        resumed = int(life.wait_for(r"^resumed (\d+)$").group(1))
        assert resumed <= len(self.trained), "it goes on from a step that no life trained"
        self.trained = {step: line for step, line in self.trained.items() if step <= resumed}
        for step, line in re.findall(r"^trained (\d+) (.*)$", life.text, re.MULTILINE):
            self.trained[int(step)] = line
        for epoch, line in re.findall(r"^evaluated (\d+) (.*)$", life.text, re.MULTILINE):
            assert self.evaluated.setdefault(epoch, line) == line, "the same evaluation, another result"
        self.final = "".join(re.findall(r"^final (.*)$", life.text, re.MULTILINE))

    @property
    def ids(self) -> list[int]:
        """The samples in the order in which they were trained."""
        return [int(i) for step in sorted(self.trained) for i in self.trained[step].split(" ids ")[1].split()]

    @property
    def moments(self) -> list[str]:
        """Where the last life could have been stopped."""
        return re.findall(r"^moment (.*)$", self.lives[-1].text, re.MULTILINE)


def unstopped(job: Job, **env: str) -> Story:
    """The job as nobody stops it, on a volume of its own."""
    story = Story()
    life = job.run(**env, MIGRATOR_JOB="unstopped", MIGRATOR_SIGNAL=str(job.directory / "other-pod" / "signal"))
    assert life.wait() == 0, life.text
    story.add(life)
    return story


def stopped(job: Job, places: Sequence[str], **env: str) -> Story:
    """The job as it is stopped at each of these moments, one a life, and then goes on to its end."""
    story = Story()
    for number, place in enumerate(places):
        life = job.run(**env, AT=place, HOW=("sigterm", "file")[number % 2])
        code = life.wait()
        add_next(story, life)
        # Notice in the last lines of a script may find it at its end: that is as good.
        assert code == 143 or (code == 0 and story.final), life.text
        assert story.moments.count(place) == 1, life.text
    last = job.run(**env)
    assert last.wait() == 0, last.text
    add_next(story, last)
    return story


def add_next(story: Story, life: Process) -> None:
    """One more life. When the one before it was stopped, it trained no step behind the one it saved."""
    before = max(story.trained, default=0)
    story.add(life)
    assert f"\nresumed {before}\n" in f"\n{life.text}", f"behind step {before}:\n{life.text}"


def assert_as_if_nothing_had_happened(story: Story, reference: Story) -> None:
    for step, line in reference.trained.items():
        assert story.trained.get(step) == line, f"step {step}:\n{story.lives[-1].text}"
    assert story.trained == reference.trained
    assert story.evaluated == reference.evaluated
    assert story.final == reference.final


def assert_each_sample_once(story: Story, *, epochs: int, samples: int) -> None:
    assert sorted(story.ids) == [1000 * epoch + i for epoch in range(epochs) for i in range(samples)]
