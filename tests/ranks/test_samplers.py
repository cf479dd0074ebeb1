"""Loaders of several ranks that have no `ElasticSampler`: torch's own `DistributedSampler`, and streams in shards."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN, assert_resumes_as_if_nothing_had_happened
from tests.support.rank_history import RankStory

DISTRIBUTED = """
class Loader:
    sampler = DistributedSampler(data, shuffle=True, seed=int(os.environ.get("SEED", "5")))
    made = DataLoader(data, batch_size=4, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0")))
"""
STREAM = """
class Shard(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        id, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(rank * workers + id, 48, size * workers):
            yield data[i]

class Loader:
    sampler = None
    made = DataLoader(Shard(), batch_size=4, num_workers=int(os.environ.get("WORKERS", "0")))
"""
TRAIN = (
    """
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
registered = {"model": model, "optimizer": optimizer, "state": state}
"""
    + LISTEN
    + """
for epoch in EPOCHS:
    if Loader.sampler is not None:
        Loader.sampler.set_epoch(epoch)
    for x, ids in migrator.batches(Loader.made):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        trained(state["step"], loss.item().hex(), "ids", *(1000 * epoch + i for i in ids.tolist()))
"""
)


def script(loader: str, epochs: str = "migrator.epochs(3)") -> str:
    return BEGIN + GROUP + loader + TRAIN.replace("EPOCHS", epochs) + END


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("loader", [DISTRIBUTED, STREAM], ids=["DistributedSampler", "stream"])
def test_an_epoch_goes_on_on_as_many_ranks(job: Job, loader: str, workers: str) -> None:
    """Six steps an epoch: stopped in the middle of the first, at the end of it, and in the second."""
    job.write(script(loader))
    stops = [(3, 1), (6, 0), (8, 1)] if workers == "0" else [(8, 1)]

    story = assert_resumes_as_if_nothing_had_happened(job, stops, WORKERS=workers)

    for epoch in range(3):
        assert sorted(i - 1000 * epoch for i in story.ids if i // 1000 == epoch) == list(range(48))


def test_an_epoch_is_named_and_begun_anew_on_another_number_of_ranks(job: Job) -> None:
    """What one rank was handed says nothing where samples are dealt otherwise: no sample is left out."""
    job.write(script(DISTRIBUTED))
    story = RankStory()
    gang = job.gang(2, AT="8", AT_RANK="1")
    assert gang.wait() == [143, 143], gang.text
    story.add(gang)

    gang = job.gang(3)

    assert gang.wait() == [0, 0, 0], gang.text
    story.add(gang)
    repeated = gang.events("epoch_repeated")
    assert {rank for rank, _ in repeated} == {0, 1, 2}, gang.text
    numbers = [i for number in sorted(story.steps) if number > 8 for i in story.steps[number].ids]
    assert sorted(i for i in numbers) == sorted([*range(1000, 1048), *range(2000, 2048)]), gang.text


@pytest.mark.parametrize("stop", [6, 8])
def test_a_script_that_counts_its_epochs_by_steps(job: Job, stop: int) -> None:
    """At the end of an epoch such a script is in the next one, which is not over."""
    job.write(script(DISTRIBUTED, 'range(state["step"] // 6, 3)'))

    assert_resumes_as_if_nothing_had_happened(job, [(stop, "all")])


@pytest.mark.parametrize("why", ["epoch", "seed", "end of the epoch"])
def test_a_sampler_in_another_epoch_than_its_ckpt_is_refused(job: Job, why: str) -> None:
    """A script that counts its epochs from 0 again would train the rest of another epoch's order."""
    job.write(script(DISTRIBUTED, "migrator.epochs(3)" if why == "seed" else "range(3)"))
    gang = job.gang(2, AT="12" if why == "end of the epoch" else "8", AT_RANK="all")
    assert gang.wait() == [143, 143], gang.text

    gang = job.gang(2, **({"SEED": "6"} if why == "seed" else {}))

    assert gang.wait() == [1, 1], gang.text
    told = "seed is 6 here, 5 there" if why == "seed" else "epoch is 0 here, 1 there"
    for text in gang.texts:
        assert "UsageError: batches(loader): batch_sampler.sampler is a DistributedSampler" in text, gang.text
        assert told in text, gang.text
        assert "migrator.epochs(n)" in text, gang.text
        assert "\ntrained " not in text, gang.text
