"""DDP in the forms that scripts use it in, and what shards state, which is refused by name."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN, assert_resumes_as_if_nothing_had_happened

SAMPLER = """
sampler = ElasticSampler(data, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
torch.manual_seed(rank + 1)
"""
NET = (
    BEGIN
    + GROUP
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.unused = nn.Linear(3, 3) if KEYWORDS.get("find_unused_parameters") else None
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2))

model = DDP(Net(), **KEYWORDS)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
"""
    + SAMPLER
    + 'registered = {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state}\n'
    + LISTEN
)
EACH_BATCH = """
for epoch in range(sampler.epoch, 2):
    sampler.set_epoch(epoch)
    for x, ids in migrator.batches(loader):
        loss = model(x).square().mean()
        optimizer.zero_grad(set_to_none=epoch == 0)
        loss.backward()
        optimizer.step()
        state["step"] += 1
        trained(state["step"], loss.item().hex(), "ids", *ids.tolist())
"""
ACCUMULATING = """
for epoch in range(sampler.epoch, 2):
    sampler.set_epoch(epoch)
    for i, (x, ids) in enumerate(migrator.batches(loader)):
        is_last = (i + 1) % 4 == 0 or i + 1 == len(loader)
        with nullcontext() if is_last else model.no_sync():
            loss = model(x).square().mean() / 4
            loss.backward()
        moment(f"{epoch}:{i}")
        print("took", *ids.tolist())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            trained(state["step"], i, loss.item().hex(), "ids", *ids.tolist())
"""


@pytest.mark.parametrize(
    "keywords",
    [
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ],
    ids="-".join,
)
def test_ddp_with_other_keywords(job: Job, keywords: dict[str, bool]) -> None:
    """With buffers of their own (BatchNorm, `broadcast_buffers=False`) each rank gets its own back."""
    job.write(f"KEYWORDS = {keywords}\n{NET}{EACH_BATCH}{END}")

    assert_resumes_as_if_nothing_had_happened(job, [(3, 1), (8, 0)])


def test_a_stop_in_the_middle_of_an_accumulation(job: Job) -> None:
    """The batches since the last step are trained again, under `no_sync()`; an epoch is no multiple of four."""
    keywords = {"gradient_as_bucket_view": True}
    job.write(f"KEYWORDS = {keywords}\n{NET}{ACCUMULATING}{END}")

    assert_resumes_as_if_nothing_had_happened(job, [("0:1", 1), ("0:5", 0), ("1:4", "all")])


def test_two_models_that_train_each_other(job: Job) -> None:
    """A GAN: two DDP models, two optimizers, one of which steps in every second batch."""
    body = """
make, judge = DDP(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))), DDP(nn.Linear(8, 1))
of_make, of_judge = torch.optim.Adam(make.parameters(), lr=0.01), torch.optim.Adam(judge.parameters(), lr=0.01)
registered = {"make": make, "judge": judge, "of_make": of_make, "of_judge": of_judge}
registered |= {"sampler": sampler, "state": state}
"""
    train = """
for epoch in range(sampler.epoch, 2):
    sampler.set_epoch(epoch)
    for x, ids in migrator.batches(loader):
        made = make(torch.randn(len(x), 4))
        of_judge.zero_grad()
        loss = judge(made.detach()).mean() - judge(x).mean()
        loss.backward()
        of_judge.step()
        moment(f"judged {state['step']}")
        if state["step"] % 2:
            of_make.zero_grad()
            (-judge(made).mean()).backward()
            of_make.step()
        state["step"] += 1
        trained(state["step"], loss.item().hex(), "ids", *ids.tolist())
"""
    job.write(BEGIN + GROUP + SAMPLER + body + LISTEN + train + END)

    assert_resumes_as_if_nothing_had_happened(job, [("judged 3", 1), ("judged 6", 0), (9, 1)])


def test_a_synced_batchnorm_does_not_run_on_a_cpu(job: Job) -> None:
    """Once it does, it is to be stopped and resumed here, as the others are, and not only looked at."""
    body = """
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))))
migrator.register("model", model)
model(torch.rand(16, 8))
"""
    gang = job.write(BEGIN + GROUP + body).gang(2)

    assert gang.wait() == [1, 1], gang.text
    assert all("SyncBatchNorm" in text and "GPU" in text for text in gang.texts), gang.text


SHARDED = {
    "ZeroRedundancyOptimizer": """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DDP(nn.Linear(8, 4))
migrator.register("optimizer", ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
""",
    "FSDP": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
mesh = init_device_mesh("cpu", (size,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
migrator.register("model", model)
""",
    "an optimizer over DTensors": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = nn.Linear(8, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
migrator.register("optimizer", optimizer)
""",
    "an optimizer over DTensors that has no state yet": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = nn.Linear(8, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
migrator.register("optimizer", torch.optim.AdamW(model.parameters()))
""",
    "local shards in a dict": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
weights = distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (size,)), [Shard(0)])
migrator.register("weights", {"weights": weights})
""",
}


@pytest.mark.parametrize("what", SHARDED)
def test_sharded_state_is_refused_at_registration(job: Job, what: str) -> None:
    job.write(BEGIN + GROUP + SHARDED[what] + '\nprint("not refused")\n')

    gang = job.gang(2)

    assert gang.wait() == [1, 1], gang.text
    for text in gang.texts:
        assert "not refused" not in text, gang.text
        assert "RegistrationError" in text, gang.text
        assert "not supported yet" in text, gang.text
