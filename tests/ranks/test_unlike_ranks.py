"""Ranks that do not hold the same: own data, own draws, what one of them fills alone, own learning rates."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN, assert_resumes_as_if_nothing_had_happened

SCRIPT = (
    BEGIN
    + GROUP
    + """
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
torch.manual_seed(100 + rank)
random.seed(rank)
np.random.seed(rank)
loader = DataLoader(Subset(data, range(rank, 48, size)), batch_size=4, shuffle=True)
average = torch.zeros(8) + rank
history, filled_by_0, seen = [], {"loss": [], "best": None}, {}
registered = {"model": model, "optimizer": optimizer, "plateau": plateau, "scaler": scaler, "state": state}
registered |= {"history": history, "filled_by_0": filled_by_0, "seen": seen, "average": average}
own = OWN
"""
    + LISTEN
    + """
for epoch in migrator.epochs(4):
    for x, ids in migrator.batches(loader):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.mul_(0.9).add_(x[0], alpha=0.1)
        if rank == 0:
            filled_by_0["loss"].append(loss.item())
            filled_by_0["best"] = min(filled_by_0["loss"])
        history.extend([loss.item()] * (rank + 1))
        seen[rank] = seen.get(rank, 0) + len(x)
        state["step"] += 1
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        rate = optimizer.param_groups[0]["lr"]
        trained(state["step"], loss.item().hex(), rate, *drawn, digest(average, history), "ids", *ids.tolist())
    plateau.step(WATCHED)
    moment(f"over {epoch}")
"""
    + END
)


def script(*, watched: str = "1.0", own: str = '("average",)') -> str:
    return SCRIPT.replace("WATCHED", watched).replace("OWN", own)


def test_what_each_rank_has_for_itself_comes_back_to_it(job: Job) -> None:
    """Order of the data, draws, lists of other lengths, a dict that rank 0 fills alone, a tensor that is own=True."""
    job.write(script())

    assert_resumes_as_if_nothing_had_happened(job, [(3, 1), (8, 0), ("over 1", "all"), (15, 1)])


def test_learning_rates_of_the_ranks_own(job: Job) -> None:
    """Each rank's scheduler watches its own loss: right behind that the weights are the same, the rates are not."""
    job.write(script(watched="1.0 if rank else -float(epoch)"))

    assert_resumes_as_if_nothing_had_happened(job, [("over 1", "all")])


def test_models_that_drift_apart_are_named_or_each_ranks_own(job: Job) -> None:
    watched = "1.0 if rank else -float(epoch)"
    job.write(script(watched=watched))
    gang = job.gang(2, pods=2, AT="16", AT_RANK="1")
    assert gang.wait() == [143, 143], gang.text
    (differ, *_) = [fields for rank, fields in gang.events("ranks_differ") if rank == 0]
    assert differ["ranks"] == "1", gang.text
    assert "model" in differ["objects"], gang.text
    assert "own=True" in differ["means"], gang.text

    job.env["MIGRATOR_JOB"] = "each"
    job.write(script(watched=watched, own='("model", "optimizer", "plateau", "scaler", "average")'))
    assert_resumes_as_if_nothing_had_happened(job, [(16, 1), (20, 0)])


@pytest.mark.parametrize("sizes", [(2, 1), (2, 3)])
def test_on_another_number_of_ranks_what_is_own_is_that_of_the_lowest_and_said(
    job: Job, sizes: tuple[int, int]
) -> None:
    job.write(script())
    gang = job.gang(sizes[0], pods=2, AT="8", AT_RANK="1")
    assert gang.wait() == [143, 143], gang.text

    gang = job.gang(sizes[1])

    assert gang.wait() == [0] * sizes[1], gang.text  # though a rank's share of the data has another length
    for rank in range(sizes[1]):
        (said,) = gang[rank].events("own_of_another_rank")
        assert said["objects"] == "average", gang.text
        (repeated,) = gang[rank].events("epoch_repeated")
        assert "ElasticSampler" in repeated["means"], gang.text
