"""A job that was stopped, however often and wherever, ends as the one that was never stopped."""

from __future__ import annotations

import pytest

from tests.support import chance
from tests.support.harness import ROOT, Job
from tests.support.job_history import (
    Story,
    add_next,
    assert_as_if_nothing_had_happened,
    assert_each_sample_once,
    stopped,
    unstopped,
)

EVERYTHING = ROOT / "tests" / "support" / "scripts" / "everything.py"
SAMPLES = 38
LOADERS = ["elastic", "shuffle", "generator", "own generator", "custom", "stateful"]


def five_of(moments: list[str], *, seed: str) -> list[str]:
    """In mid-epoch, before an epoch's first step (twice), in mid-epoch, and from there to the end of all."""
    dice = chance.dice(seed)
    bounds = [
        "0:1:drawn",
        "0:8:drawn",
        "1:start",
        "1:3:drawn",
        "1:5:drawn",
        "1:8:drawn",
        "2:start",
        "2:3:drawn",
        "2:7:done",
    ]
    edges = [*map(moments.index, bounds), len(moments)]
    spans = [edges[0:2], edges[2:4], edges[4:6], edges[6:8], edges[8:10]]
    return [moments[dice.randrange(first, end)] for first, end in spans]


@pytest.mark.parametrize(
    ("loader", "workers"),
    [
        *((loader, "0") for loader in LOADERS),
        ("elastic", "2"),
        ("shuffle", "2"),
        ("persistent", "2"),
        *(pytest.param(loader, "2", marks=pytest.mark.long) for loader in LOADERS[2:]),
    ],
)
def test_stopped_five_times_it_ends_as_if_nothing_had_happened(job: Job, loader: str, workers: str):
    """Weights, optimizer, schedules, scaler, metrics, draws and samples, bit for bit, however batches are drawn."""
    env = {"LOADER": loader, "WORKERS": workers}
    reference = unstopped(job.use(EVERYTHING), **env)

    story = stopped(job, five_of(reference.moments, seed=loader + workers), **env)

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=3, samples=SAMPLES)


def is_turn(place: str) -> bool:
    """One moment of each batch, another one in the next (there is no step in every batch); and all between epochs."""
    if place.count(":") == 1:
        return True
    _, batch, name = place.split(":")
    kinds = ["drawn", "backward", "stepped" if int(batch) in (3, 6, 9, 10) else "done", "done"]
    return name == kinds[int(batch) % 4]


@pytest.mark.parametrize("loader", ["elastic", "shuffle"])
def test_stopped_at_every_batch_in_turn(job: Job, loader: str):
    """One batch a life: drawn, computed, stepped or done; in the evaluation, between epochs, after the last batch."""
    env = {"LOADER": loader, "EPOCHS": "1"}
    reference = unstopped(job.use(EVERYTHING), **env)
    places = [place for place in reference.moments if is_turn(place)]

    story = stopped(job, places, **env)

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=1, samples=SAMPLES)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loader", "turn"),
    [*(("elastic", turn) for turn in range(3)), *((loader, i % 3) for i, loader in enumerate(LOADERS[1:]))],
)
def test_stopped_once_at_each_moment(job: Job, loader: str, turn: int):
    """Each moment of a run, one at a time, in a job of its own; of the other loaders' moments every third."""
    env = {"LOADER": loader, "EPOCHS": "2"}
    reference = unstopped(job.use(EVERYTHING), **env)
    for number, place in enumerate(reference.moments[2 + turn :: 3]):
        story = stopped(job, [place], **env, MIGRATOR_JOB=f"job-{number}")
        assert_as_if_nothing_had_happened(story, reference)


@pytest.mark.long
@pytest.mark.parametrize("epoch", ["0", "1"])
def test_stopped_once_in_each_batch_with_workers_that_stay(job: Job, epoch: str):
    """Loader workers that live for several epochs: they are begun anew in mid-epoch, and kept from there on."""
    env = {"LOADER": "persistent", "EPOCHS": "2", "WORKERS": "2"}
    reference = unstopped(job.use(EVERYTHING), **env)
    places = [place for place in reference.moments if place.startswith(f"{epoch}:") and is_turn(place)]
    for number, place in enumerate(places):
        story = stopped(job, [place], **env, MIGRATOR_JOB=f"job-{number}")
        assert_as_if_nothing_had_happened(story, reference)


def test_stopped_from_outside_without_warning(job: Job):
    """SIGTERM to the process group while it trains at full speed with two loader workers, five times."""
    env = {"WORKERS": "2", "EPOCHS": "12"}
    reference = unstopped(job.use(EVERYTHING), **env)
    story = Story()
    dice = chance.dice("without warning")
    for _ in range(5):
        life = job.run(**env)
        life.wait_for(f"^trained {len(story.trained) + dice.randint(1, 7)} ")
        life.kill_group()
        assert life.wait() == 143, life.text
        add_next(story, life)
    last = job.run(**env)
    assert last.wait() == 0, last.text
    add_next(story, last)

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=12, samples=SAMPLES)
