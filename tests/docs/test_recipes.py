"""The loops of the page of recipes, run as they stand there: stopped, resumed, and compared bit for bit."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.docs.test_pages import logged
from tests.support.harness import ROOT, Job, Process

PAGE = (ROOT / "docs" / "recipes.md").read_text()
WARNINGS = {name for name, levels in logged().items() if "info" not in levels}


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)


def headings() -> list[str]:
    return re.findall(r"^## (.+)$", PAGE, flags=re.M)


(HEAD,) = blocks(PAGE.partition("\n## ")[0])
SECTIONS = dict(zip(headings(), PAGE.split("\n## ")[1:], strict=True))
RECIPES = {name: found for name, text in SECTIONS.items() if (found := blocks(text))}


def recipe(name: str) -> str:
    """The script of this heading, and what a test sees of it."""
    (block,) = RECIPES[name]
    return f"from tests.support.scripts.recipe import *\n{HEAD}\n{block}\nfinish()\n"


class Told:
    """What a script showed over all its lives; a step is trained once, a loss made again is the same."""

    def __init__(self) -> None:
        self.trained: dict[tuple[str, int], str] = {}
        self.lost: dict[tuple[str, int], str] = {}
        self.final: dict[str, str] = {}

    def add(self, life: Process) -> None:
        for word, job, number, rest in re.findall(
            r"^(began|lost|trained|final) (\S+) (\S+) ?(.*)$", life.text, re.MULTILINE
        ):
            if word == "began":
                last = max((step for of, step in self.trained if of == job), default=0)
                assert last == int(number), f"the life before ended at {last}\n{life.text}"
            elif word == "trained":
                assert (job, int(number)) not in self.trained, life.text
                self.trained[job, int(number)] = rest
            elif word == "lost":
                found = self.lost.setdefault((job, int(number)), rest)
                assert found == rest, f"the same batch, another loss\n{life.text}"
            else:
                self.final[job] = f"{number} {rest}"


def unstopped(job: Job) -> Told:
    told = Told()
    life = job.run(MIGRATOR_CKPT=str(job.directory / "elsewhere"))
    assert life.wait() == 0, life.text
    told.add(life)
    assert told.lost
    assert told.final
    return told


def stopped(job: Job, places: Sequence[str]) -> Told:
    """At each of these moments, one a life, without a word of warning; then to the end."""
    told = Told()
    for number, place in enumerate([*places, ""]):
        life = job.run(AT=place, HOW=("sigterm", "file")[number % 2])
        assert life.wait() == (143 if place else 0), life.text
        assert not place or f"\nmoment {place}\n" in life.text
        assert not set(re.findall(r" migrator rank \d+: (\w+)", life.text)) & WARNINGS, life.text
        assert bool(life.events("loaded")) == bool(number), life.text
        told.add(life)
    return told


def check(job: Job, places: Sequence[str]) -> Told:
    """It is the same training."""
    told, reference = stopped(job, places), unstopped(job)
    assert told.trained == reference.trained
    assert told.lost == reference.lost
    assert told.final == reference.final
    return told


MOMENTS = {
    "Steps without a loader": ["default step 3", "default backward 5", "default step 9"],
    "Steps over a loader": ["default step 3", "default backward 8", "default step 11"],
    "Gradient accumulation": ["default backward 6", "default step 2", "default step 3"],
    "Gradient scaler": ["default backward 3", "default step 4", "default step 9"],
    "Averaged weights": ["default step 3", "default backward 5", "default step 10"],
    "Two optimizers": ["default step 3", "default step 6", "default backward 20"],
    "A batch fetched ahead": ["default backward 3", "default step 7", "default step 9"],
    "Tasks one after another": ["default step 3", "default backward 7", "default step 11"],
    "Curriculum": ["default step 4", "default backward 7", "default step 9"],
    "Episodes": ["default step 2", "default backward 4", "default step 8"],
    "Rollouts": ["default step 1", "default backward 4", "default step 8"],
    "Evaluation every k steps": ["default evaluation 2", "default step 5", "default step 8"],
    "Updates by hand": ["default backward 3", "default backward 8"],
    "Several folds": ["fold-0 step 4", "fold-1 step 2", "fold-1 backward 6"],
    "Augmentation in workers": ["default step 2", "default backward 5", "default step 9"],
    "Progress for KubeDL": ["default step 2", "default backward 8", "default step 9"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resumes_bit_for_bit(job: Job, name: str) -> None:
    job.write(recipe(name))
    check(job, MOMENTS[name])


def test_the_page_begins_with_a_list_of_its_recipes() -> None:
    (contents, *_) = PAGE.split("\n## ")
    assert re.findall(r"^\| \[(.+?)\]\(#\S+\) \|", contents, flags=re.M) == [*SECTIONS]
    assert [*RECIPES] == [*MOMENTS]


def test_a_section_without_a_script_names_an_example_that_is_tested() -> None:
    """Nothing on this page is only said."""
    tested = (ROOT / "tests" / "docs" / "test_examples.py").read_text()
    for name in SECTIONS.keys() - RECIPES.keys():
        examples = re.findall(r"\]\(\.\./examples/(\w+\.py)\)", SECTIONS[name])
        assert examples, name
        assert all(f'"{example}"' in tested for example in examples), name


def test_a_step_that_the_scaler_skips_is_trained_once_and_nothing_is_said(job: Job) -> None:
    """It leaves neither gradients nor a step, but it is no batch that nobody used."""
    script = recipe("Gradient scaler").replace("2.0**16", "2.0**126")
    job.write(script)
    told = check(job, ["default backward 9", "default step 9"])

    assert len(told.lost) == 12
    assert len(told.trained) < 12


@pytest.mark.parametrize("place", ["before", "behind"])
def test_only_an_evaluation_before_the_batch_costs_a_notice_no_time(job: Job, place: str) -> None:
    """Behind the step the save waits for it, and here in vain: it is longer than the grace."""
    script = recipe("Evaluation every k steps")
    if place == "behind":
        evaluation = re.search(r"^        if .*\n.*evaluate\(\)\)\n", script, re.M)
        assert evaluation is not None
        script = script.replace(evaluation[0], "")
        script = script.replace('state["step"] += 1\n', 'state["step"] += 1\n' + evaluation[0])
    moment = "default evaluation 2"
    life = job.write(script).run(AT=moment, IS_LONG=moment, MIGRATOR_GRACE_S="2")

    assert life.wait() == 143, life.text
    assert len(job.ckpts()) == (place == "before")


README = (ROOT / "README.md").read_text()
BODY = """\
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics["steps"] += 1
"""


def test_the_script_of_the_readme_resumes_bit_for_bit(job: Job) -> None:
    """The first lines that anybody reads, with a step in the place of the dots."""
    script = blocks(README)[0]
    assert script.endswith("        ...\n")
    script = script.removesuffix("        ...\n") + BODY
    # Smaller batches, since there are 24 samples; and fewer workers, since each life starts them anew.
    script = script.replace("batch_size=32", "batch_size=4").replace("num_workers=4", "num_workers=1")
    head = f"from tests.support.scripts.recipe import *\n{HEAD}\nmetrics, epochs = {{'steps': 0}}, 2\n"
    job.write(f"{head}{script}\nfinish()\n")

    told = check(job, ["default step 3", "default backward 8"])

    assert len(told.trained) == 12


RANKS = """
from torch import distributed
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(distributed.get_rank())
"""
ON_RANKS = {
    "Gradient accumulation": ["default step 1", "default backward 5"],
    "A batch fetched ahead": ["default backward 3", "default step 7"],
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_recipe_resumes_bit_for_bit_on_two_ranks(job: Job, name: str) -> None:
    """The same lines behind `init_process_group()`; only one rank is told to go, another one each time."""
    told, reference = [Told(), Told()], [Told(), Told()]
    job.write(recipe(name).replace(HEAD, HEAD + RANKS))
    for number, place in enumerate([*ON_RANKS[name], ""]):
        gang = job.gang(2, each={number % 2: {"AT": place}}, pods=2)
        assert gang.wait() == [143 if place else 0] * 2, gang.text
        for rank in range(2):
            told[rank].add(gang[rank])
    gang = job.gang(2, MIGRATOR_CKPT=str(job.directory / "elsewhere"))
    assert gang.wait() == [0, 0], gang.text
    for rank in range(2):
        reference[rank].add(gang[rank])
        assert vars(told[rank]) == vars(reference[rank]), gang.text
    assert told[0].lost != told[1].lost


NOT_FOLLOWED = """
state = {"step": 0}
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.register("sampler", sampler)
migrator.register("state", state)
migrator.listening()
batches = forever(LOOP)
other = forever(OTHER)
while state["step"] < 9:
    (x, y), (u, _) = next(batches), next(other)
    (F.mse_loss(model(x), y) + model(u).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    if state["step"] % 2 == 0:
        with torch.no_grad():
            shown = iter(DataLoader(data, batch_size=8))
            sum(model(x).sum() for x, _ in shown)
    migrator.safe_point()
"""


@pytest.mark.parametrize(
    ("loop", "other", "count"),
    [
        ("loader", "[(torch.ones(1, 4), 0)]", 1),
        ("migrator.batches(loader)", "DataLoader(data, batch_size=2)", 1),
        ("migrator.batches(loader)", "[(torch.ones(1, 4), 0)]", 0),
        ("migrator.batches(Chained())", "[(torch.ones(1, 4), 0)]", 0),
    ],
)
def test_a_loader_that_no_ckpt_knows_the_place_of_is_named(job: Job, loop: str, other: str, count: int) -> None:
    """Alone or beside another one; not an evaluation, and not loaders inside of what batches() goes over."""
    chained = (
        "class Chained:\n    def __len__(self):\n        return 6\n    def __iter__(self):\n        yield from loader\n"
    )
    forever = "def forever(loader):\n    while True:\n        yield from loader\n"
    script = NOT_FOLLOWED.replace("LOOP", loop).replace("OTHER", other)
    life = job.write(f"from tests.support.scripts.recipe import *\n{HEAD}\n{chained}\n{forever}\n{script}").run()

    assert life.wait() == 0, life.text
    assert len(life.events("loader_not_followed")) == count, life.text
