"""Behind an epoch's last step ranks stand on both sides of what follows it: all save one safe point all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.harness import ROOT, ForkServer, Job, until
from tests.support.rank_history import (
    RankStory,
    add_next_ranks,
    assert_each_sample_once_over_ranks,
    assert_ranks_as_if_nothing_had_happened,
    unstopped_ranks,
)
from tests.support.rank_processes import Gang

LONELY = ROOT / "tests" / "support" / "scripts" / "lonely.py"
EPOCHS, SAMPLES, BATCH = 3, 24, 4
LOSSES = ["rank_lost", "saving_alone", "store_lost", "ranks_differ", "save_failed"]
"""Nobody was lost, and nothing failed: no rank says any of these."""
SOON_S = 2.0
"""Of a grace of 20 s. A rank that was waited for and given up costs a quarter of it."""

Reference = Callable[..., RankStory]


@pytest.fixture(scope="module")
def reference(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The job as nobody stops it, trained once for each number of ranks and way."""
    known: dict[tuple[Any, ...], RankStory] = {}
    jobs: list[Job] = []

    def unstopped(size: int, **env: str) -> RankStory:
        key = (size, *sorted(env.items()))
        if key not in known:
            jobs.append(Job(fork_server, tmp_path_factory.mktemp("reference")).use(LONELY))
            known[key] = unstopped_ranks(jobs[-1], size, **env)
        return known[key]

    yield unstopped
    for job in jobs:
        job.end()


def per_epoch(size: int) -> int:
    return SAMPLES // (BATCH * size)


def left(gang: Gang) -> int:
    """All ranks left soon and together, and nobody was lost; with which step."""
    assert gang.wait() == [143] * gang.size, gang.text
    assert {name: gang.events(name) for name in LOSSES if gang.events(name)} == {}, gang.text
    leaving = gang.events("leaving")
    assert [rank for rank, _ in leaving] == list(range(gang.size)), gang.text
    assert max(float(fields["since_signal_s"]) for _, fields in leaving) < SOON_S, gang.text
    assert len({fields["step"] for _, fields in leaving}) == 1, gang.text
    return int(leaving[0][1]["step"])


def goes_on_to_the_end(job: Job, story: RankStory, size: int, **env: str) -> Gang:
    gang = job.gang(size, **env)
    assert gang.wait() == [0] * size, gang.text
    assert gang.events("random_derived") == [], gang.text
    add_next_ranks(story, gang)
    return gang


def assert_nothing_shows(story: RankStory, reference: RankStory) -> None:
    assert_ranks_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once_over_ranks(story, epochs=EPOCHS, samples=SAMPLES)


def is_in_evaluation(gang: Gang, epoch: int) -> None:
    """Rank 0 is, and all the others are in the next epoch's first batch."""
    gang.wait_for(f"^evaluates {epoch}$", ranks=[0])
    gang.wait_for(f"^drawn {epoch + 1} 0$", ranks=range(1, gang.size))


@pytest.mark.parametrize("wrapped", ["no", "yes"])
@pytest.mark.parametrize("how", ["sigterm to all", "signal file of the last"])
@pytest.mark.parametrize("size", [2, 3])
def test_stopped_while_rank_0_alone_evaluates(
    job: Job, reference: Reference, size: int, how: str, wrapped: str
) -> None:
    """All ranks save the epoch's last step at once, rank 0 with them, and the evaluation is done anew."""
    story = RankStory()
    gang = job.use(LONELY).gang(size, pods=size, STAYS="1", WRAPPED=wrapped)
    is_in_evaluation(gang, 1)

    if how == "sigterm to all":
        gang.kill()
    else:
        gang.ask(size - 1)

    assert left(gang) == 2 * per_epoch(size)
    add_next_ranks(story, gang)
    goes_on_to_the_end(job, story, size, WRAPPED=wrapped)
    assert_nothing_shows(story, reference(size, WRAPPED=wrapped))


@pytest.mark.parametrize("size", [2, 3])
def test_save_ckpt_on_rank_0_alone_behind_its_evaluation(job: Job, reference: Reference, size: int) -> None:
    """The others are in the next epoch by then and save the step all the same, each as it was behind it."""
    story = RankStory()
    first = job.use(LONELY).gang(size, SAVES="yes", STAYS="2")
    is_saved = f"^saved 000001-{2 * per_epoch(size):012d}$"
    first.wait_for(is_saved, ranks=[0])
    first.wait_for("^evaluates 2$", ranks=[0])
    assert {name: first.events(name) for name in LOSSES if first.events(name)} == {}, first.text
    first.kill(9)
    first.wait()
    story.add(first)

    last = job.gang(size)
    assert last.wait() == [0] * size, last.text
    assert story.add(last) == 2 * per_epoch(size)
    assert_nothing_shows(story, reference(size))


def test_a_periodic_save_of_an_epochs_last_step_while_rank_0_evaluates(job: Job, reference: Reference) -> None:
    """It is of all ranks, and rank 0 does not have to come out of its evaluation for it."""
    story = RankStory()
    first = job.use(LONELY).gang(2, MIGRATOR_EVERY=str(per_epoch(2)), STAYS="1")
    is_in_evaluation(first, 1)
    until(lambda: f"000001-{2 * per_epoch(2):012d}" in job.ckpts(), "the ckpt", 20.0, lambda: first.text)
    first.kill(9)
    first.wait()
    assert {name: first.events(name) for name in LOSSES if first.events(name)} == {}, first.text
    story.add(first)

    last = job.gang(2)
    assert last.wait() == [0, 0], last.text
    assert story.add(last) == 2 * per_epoch(2)
    assert_nothing_shows(story, reference(2))


@pytest.mark.parametrize(("ranks", "plain"), [([0], "no"), ([1], "no"), ([0, 1], "no"), ([0], "yes")])
def test_stopped_when_all_are_in_the_next_epoch_no_evaluation_is_repeated(
    job: Job, reference: Reference, ranks: list[int], plain: str
) -> None:
    """Whatever they go over: that they are all in the same loop is seen by its place in the script."""
    story = RankStory()
    gang = job.use(LONELY).gang(2, pods=2, WAITS="1", PLAIN=plain)
    gang.wait_for("^drawn 1 0$")

    gang.kill(ranks=ranks)

    assert left(gang) == per_epoch(2)
    add_next_ranks(story, gang)
    last = goes_on_to_the_end(job, story, 2, PLAIN=plain)
    assert "evaluates 0" not in last.text
    assert_nothing_shows(story, reference(2, PLAIN=plain))


@pytest.mark.parametrize("size", [2, 3])
def test_what_changed_between_the_epochs_keeps_all_ranks_on_its_other_side(
    job: Job, reference: Reference, size: int
) -> None:
    """An average is updated behind the last step: no rank has the step before that any more, and rank 0 is let on."""
    story = RankStory()
    gang = job.use(LONELY).gang(size, pods=size, FINISHES="1", AVERAGES="yes")
    is_in_evaluation(gang, 1)

    gang.kill()

    assert left(gang) == 2 * per_epoch(size)
    assert gang.events("agreed_anew") == [], gang.text
    add_next_ranks(story, gang)
    last = goes_on_to_the_end(job, story, size, AVERAGES="yes")
    assert "evaluates 1" not in last.text
    assert_nothing_shows(story, reference(size, AVERAGES="yes"))


def test_what_is_found_changed_only_when_it_is_read_makes_all_agree_anew(job: Job, reference: Reference) -> None:
    """No rank has the step before the epoch any more, nor a mark that says so. Rank 0 comes into the next epoch, or,
    if it had noticed by itself before, to its first step."""
    story = RankStory()
    gang = job.use(LONELY).gang(2, pods=2, FINISHES="1", AVERAGES="yes", BLIND="yes")
    is_in_evaluation(gang, 1)

    gang.kill()

    assert left(gang) in (2 * per_epoch(2), 2 * per_epoch(2) + 1)
    assert {rank for rank, _ in gang.events("agreed_anew")} == {0, 1}, gang.text
    add_next_ranks(story, gang)
    goes_on_to_the_end(job, story, 2, AVERAGES="yes")
    assert_nothing_shows(story, reference(2, AVERAGES="yes"))


def test_stopped_while_rank_0_alone_evaluates_behind_an_epoch_that_was_left_by_break(
    job: Job, reference: Reference
) -> None:
    """That the loop is over is known at a safe point of its own: rank 0 stands there, and the others are past it."""
    env = {"BREAKS": str(per_epoch(2) - 1)}
    story = RankStory()
    gang = job.use(LONELY).gang(2, pods=2, STAYS="1", **env)
    is_in_evaluation(gang, 1)

    gang.kill(ranks=[1])

    assert left(gang) == 2 * (per_epoch(2) - 1)
    assert {fields["turn"] for _, fields in gang.events("agreed")} == {"1"}, gang.text
    add_next_ranks(story, gang)
    goes_on_to_the_end(job, story, 2, **env)
    assert_ranks_as_if_nothing_had_happened(story, reference(2, **env))


APART = """
import os, time
from datetime import timedelta
import torch
from torch import distributed, nn
from migrator import migrator
from migrator.errors import SaveFailed

rank = int(os.environ["RANK"])
distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening()
for step in range(1, 11):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    migrator.safe_point()
    if rank == 0:
        if step == 1:
            distributed.barrier()
        time.sleep(0.06)  # nobody waits for it
if rank == 1:
    distributed.barrier()
else:
    try:
        migrator.save_ckpt()
    except SaveFailed as error:
        print("told:", error)
distributed.barrier()
distributed.destroy_process_group()
"""


def test_ranks_that_train_apart_are_told_how_to_save_and_go_on(job: Job) -> None:
    """No step can be saved by all of them; no periodic save that fails for that ends any of them."""
    gang = job.write(APART.replace("range(1, 11)", "range(1, 11 if rank == 0 else 31)")).gang(2, MIGRATOR_EVERY="0.1s")

    assert gang.wait() == [0, 0], gang.text
    assert (
        "told: the save was not made: step 10 could not be saved by all ranks: rank 1: it has gone on" in gang[0].text
    )
    assert "Call save_ckpt() on all ranks behind the same step" in gang[0].text
    assert {rank for rank, _ in gang.events("save_retry")} == {0}, gang.text
    assert job.ckpts() == []
