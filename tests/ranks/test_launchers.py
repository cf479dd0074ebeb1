"""Jobs that are launched otherwise: torchrun without a rendezvous, ranks of mpirun and srun, Accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from tests.support.harness import Job, until
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN, assert_resumes_as_if_nothing_had_happened
from tests.support.rank_history import RankStory, add_next_ranks
from tests.support.rank_processes import free_port
from tests.support.torchruns import Torchrun

TRAIN = (
    """
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = ElasticSampler(data, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler)
registered = {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state}
"""
    + LISTEN
    + """
for epoch in range(sampler.epoch, 3):
    sampler.set_epoch(epoch)
    for x, ids in migrator.batches(loader):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        trained(state["step"], loss.item().hex(), "ids", *(1000 * epoch + i for i in ids.tolist()))
        while Path("stay").exists() and state["step"] == 4:
            time.sleep(0.002)
"""
)


def life(job: Job, meeting: str) -> list[Torchrun]:
    """The agents of one life."""
    if meeting == "standalone":
        return [job.torchrun(meeting=["--standalone", "--local-addr=127.0.0.1"])]
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [
        job.torchrun(nproc=1, nnodes="2", pod=rank, meeting=[f"--node-rank={rank}", *address], shares_store=True)
        for rank in (0, 1)
    ]


def texts(agents: Sequence[Torchrun]) -> list[str]:
    return [worker.text for agent in agents for worker in agent.lives[0]]


@pytest.mark.parametrize("meeting", ["standalone", "static"])
def test_torchrun_without_a_rendezvous(job: Job, meeting: str) -> None:
    """On one node by `--standalone`, on two by `--master-addr`: SIGTERM to one agent, and then by the hook."""
    job.write(BEGIN + GROUP + TRAIN + END)
    story = RankStory()
    stay = job.directory / "stay"
    stay.touch()

    agents = life(job, meeting)
    for agent in agents:
        agent.wait_for("^trained 4 ")
    agents[-1].terminate()
    until(lambda: "migrator rank 0: signal" in texts(agents)[0], "the notice on rank 0", context=lambda: agents[0].text)
    stay.unlink()
    assert [agent.wait() for agent in agents] == [1] * len(agents)
    add_next_ranks(story, texts(agents))
    assert story.resumed == [0], agents[0].text
    assert max(story.steps) == 4, agents[0].text

    agents = life(job, meeting)
    assert [agent.wait() for agent in agents] == [0] * len(agents), "\n".join(agent.text for agent in agents)
    add_next_ranks(story, texts(agents))
    assert story.resumed == [0, 4]
    assert sorted(story.ids) == sorted(1000 * epoch + i for epoch in range(3) for i in range(48))
    assert len(set(story.final.values())) == 1, story.text


@pytest.mark.parametrize(
    ("rank", "size"),
    [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("PMI_RANK", "PMI_SIZE")],
    ids=["mpirun", "srun", "MPICH"],
)
def test_ranks_that_only_their_launcher_numbers(job: Job, rank: str, size: str) -> None:
    """No RANK and no WORLD_SIZE when the group is made and when `listening()` is called."""
    group = f"""
for theirs, ours in (("{rank}", "RANK"), ("{size}", "WORLD_SIZE")):
    os.environ[theirs] = os.environ.pop(ours)
for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
    del os.environ[name]
address = "tcp://127.0.0.1:" + os.environ.pop("MASTER_PORT")
rank, size = int(os.environ["{rank}"]), int(os.environ["{size}"])
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
"""
    job.write(BEGIN + group + TRAIN + END)

    story = assert_resumes_as_if_nothing_had_happened(job, [(4, 1), (9, 0)])

    assert sorted(story.ids) == sorted(1000 * epoch + i for epoch in range(3) for i in range(48))
    assert "launcher_warning" not in story.text, story.text


ACCELERATE = (
    """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rank = accelerator.process_index
plain = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
model, optimizer, loader, scheduler = accelerator.prepare(
    plain, adam, DataLoader(data, batch_size=4, shuffle=True), torch.optim.lr_scheduler.StepLR(adam, 4, 0.9)
)
registered = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": state}
"""
    + LISTEN
    + """
for epoch in migrator.epochs(3):
    for x, ids in migrator.batches(loader):
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print("took", *ids.tolist())
        if accelerator.sync_gradients:
            state["step"] += 1
            trained(state["step"], loss.item().hex(), scheduler.get_last_lr(), "ids", *ids.tolist())
registered = {"model": accelerator.unwrap_model(model), "optimizer": adam, "state": state}
"""
)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate, which is not required")
def test_accelerate(job: Job) -> None:
    """Prepared model, optimizer, loader and scheduler, registered as they are; accumulation by `accumulate()`."""
    job.write(BEGIN + ACCELERATE + END)

    assert_resumes_as_if_nothing_had_happened(job, [(2, 1), (7, 0)])
