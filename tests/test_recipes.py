"""The loops of the page of recipes, run as they stand there: stopped, resumed, and compared bit for bit."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.harness import ROOT, Job, Process

PAGE = (ROOT / "docs" / "recipes.md").read_text()
OBSERVED = "from tests.jobs.recipe import *\n"
ROW = re.compile(r"^\| \[(.+?)\]\(#\S+\) \|", re.M)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)


def headings() -> list[str]:
    return re.findall(r"^## (.+)$", PAGE, flags=re.M)


(HEAD,) = blocks(PAGE.partition("\n## ")[0])
RECIPES = {name: blocks(text) for name, text in zip(headings(), PAGE.split("\n## ")[1:], strict=True)}


def recipe(name: str) -> str:
    """The script of this heading, and what a test sees of it."""
    (block,) = RECIPES[name]
    return f"from tests.jobs.recipe import *\n{HEAD}\n{block}\nfinish()\n"


class Told:
    """What a script showed over all its lives; what a later life did again counts once, as it did it."""

    def __init__(self) -> None:
        self.trained: dict[tuple[str, int], str] = {}
        self.evaluated: dict[tuple[str, int], str] = {}
        self.final: dict[str, str] = {}
        self.moments: list[str] = []

    def add(self, life: Process) -> None:
        for word, job, number, rest in re.findall(
            r"^(began|trained|evaluated|final) (\S+) (\S+) ?(.*)$", life.text, re.MULTILINE
        ):
            if word == "began":
                last = max((step for of, step in self.trained if of == job), default=0)
                assert last == int(number), f"the life before ended at {last}\n{life.text}"
            elif word == "trained":
                assert (job, int(number)) not in self.trained
                self.trained[job, int(number)] = rest
            elif word == "evaluated":
                found = self.evaluated.setdefault((job, int(number)), rest)
                assert found == rest, f"the same evaluation, another result\n{life.text}"
            else:
                self.final[job] = f"{number} {rest}"
        self.moments = re.findall(r"^moment (.*)$", life.text, re.MULTILINE)


def check(job: Job, places: Sequence[str]) -> Told:
    """Not stopped, then stopped at these moments, one a life: it is the same training."""
    reference, told = Told(), Told()
    life = job.run(MIGRATOR_CKPT=str(job.directory / "elsewhere"))
    assert life.wait() == 0, life.text
    reference.add(life)
    for number, place in enumerate([*places, ""]):
        life = job.run(AT=place, HOW=("sigterm", "file")[number % 2])
        assert life.wait() == (143 if place else 0), life.text
        told.add(life)
        assert told.moments.count(place) == bool(place), life.text
        assert " WARNING" not in life.text, life.text
    assert told.trained == reference.trained, life.text
    assert told.evaluated == reference.evaluated, life.text
    assert told.final == reference.final, life.text
    assert reference.final
    return told


MOMENTS = {
    "Steps without a loader": ["default step 3", "default backward 4", "default step 18"],
    "Gradient accumulation": ["default backward 6", "default step 2", "default backward 9"],
    "Gradient scaler": ["default backward 3", "default step 4", "default step 9"],
    "Averaged weights": ["default step 3", "default backward 5", "default step 10"],
    "Two optimizers": ["default step 3", "default step 6", "default backward 20"],
    "A batch fetched ahead": ["default backward 2", "default step 7", "default step 18"],
    "Stages": ["default step 3", "default backward 6", "default step 10"],
    "Episodes": ["default step 2", "default backward 4", "default step 8"],
    "Evaluation every k steps": ["default evaluation 2", "default step 4", "default step 8"],
    "Updates by hand": ["default backward 3", "default backward 8"],
    "Several folds": ["fold-0 step 4", "fold-1 step 2", "fold-1 backward 6"],
    "Augmentation in workers": ["default step 2", "default backward 5", "default step 9"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resumes_bit_for_bit(job: Job, name: str) -> None:
    job.write(recipe(name))
    check(job, MOMENTS[name])
