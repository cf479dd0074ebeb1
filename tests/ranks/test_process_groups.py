"""Process groups that the script makes in other ways, destroys early, or makes anew while it runs."""

from __future__ import annotations

import re

import pytest

from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, LISTEN, assert_resumes_as_if_nothing_had_happened

OPTIONS = 'rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])'
PORT = 'int(os.environ["MASTER_PORT"])'
OWN_STORE = f'store = dist.TCPStore("127.0.0.1", {PORT}, int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0")'
TRAIN = (
    """
rank, size = dist.get_rank(), dist.get_world_size()
net = nn.Linear(8, 4)
model = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
sampler = ElasticSampler(data, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler)
registered = {"model": net, "optimizer": optimizer, "sampler": sampler, "state": state}
"""
    + LISTEN
    + """
for epoch in range(sampler.epoch, EPOCHS):
    sampler.set_epoch(epoch)
    for x, ids in migrator.batches(loader):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        trained(state["step"], loss.item().hex(), "ids", *ids.tolist())
    BETWEEN
"""
)


def script(group: str, *, between: str = "pass", epochs: int = 3) -> str:
    return BEGIN + f"\n{group}\n" + TRAIN.replace("EPOCHS", str(epochs)).replace("BETWEEN", between)


ANEW = """
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    model = DDP(net)
"""
ENV = 'from datetime import timedelta\ndist.init_process_group("gloo")'


def test_a_group_that_is_made_anew_after_each_epoch(job: Job) -> None:
    """At the same address: the server that this life still needs has the keys of all groups before."""
    job.write(script(ENV, between=ANEW, epochs=8) + END)

    assert_resumes_as_if_nothing_had_happened(job, [(32, 1)])


def test_a_group_that_is_made_anew_at_another_port(job: Job) -> None:
    other = 'os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)\n    dist.init'
    job.write(script(ENV, between=ANEW.replace("dist.init", other)) + END)

    assert_resumes_as_if_nothing_had_happened(job, [(5, 0), (8, 1)])


def test_a_group_that_is_made_anew_by_other_ranks_is_refused(job: Job) -> None:
    swapped = 'os.environ["RANK"] = str(1 - rank)\n    dist.init'
    job.write(script(ENV, between=ANEW.replace("dist.init", swapped)) + END)

    gang = job.gang(2)

    assert gang.wait() == [1, 1], gang.text
    for rank, text in enumerate(gang.texts):
        assert f"this process is rank {1 - rank} of 2 now, and was rank {rank} of 2 in listening()" in text, gang.text
        assert "migrator.close()" in text, gang.text


def test_a_script_that_goes_on_behind_the_end_of_its_group(job: Job) -> None:
    """Rank 0, which served the store, too. A stop there finds its ckpt."""
    end = """
dist.destroy_process_group()
moment("behind")
print("final", digest(*registered.values()), flush=True)
"""
    job.write(script(ENV) + end)

    story = assert_resumes_as_if_nothing_had_happened(job, [(5, 0)])

    again = {"MIGRATOR_JOB": "again"}
    gang = job.gang(2, AT="behind", AT_RANK="all", **again)
    assert set(gang.wait()) <= {0, 143}, gang.text  # its last line is as good as its end
    assert {fields["step"] for _, fields in gang.events("leaving")} == {"18"}, gang.text
    gang = job.gang(2, **again)
    assert gang.wait() == [0, 0], gang.text
    for rank, text in enumerate(gang.texts):
        assert "resumed 18" in text, gang.text
        assert f"final {story.final[rank]}" in text, gang.text


@pytest.mark.parametrize(
    "group",
    [
        f'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + os.environ["MASTER_PORT"], {OPTIONS})',
        f"{OWN_STORE}\ndist.init_process_group('gloo', store=dist.PrefixStore('mine', store), {OPTIONS})",
        "dist.init_process_group()",
        'dist.init_process_group("gloo")\neven, all_of_them = dist.new_group([0]), dist.new_group([0, 1])',
    ],
    ids=["tcp", "a store of the script's own", "no backend", "subgroups"],
)
def test_groups_made_in_other_ways(job: Job, group: str) -> None:
    job.write(script(group) + END)

    assert_resumes_as_if_nothing_had_happened(job, [(4, 1), (8, 0)])


@pytest.mark.parametrize(
    ("group", "store"),
    [
        (f'dist.init_process_group("gloo", init_method=Path("met").absolute().as_uri(), {OPTIONS})', "FileStore"),
        ('dist.init_process_group("gloo", store=dist.FileStore("met", 2), ' + OPTIONS + ")", "FileStore"),
    ],
    ids=["file", "FileStore"],
)
def test_stores_through_which_ranks_cannot_agree_are_refused(job: Job, group: str, store: str) -> None:
    job.write(script(group) + END)

    gang = job.gang(2)

    assert gang.wait() == [1, 1], gang.text
    for text in gang.texts:
        assert re.search(f"UsageError: listening.*made with a {store}.*TCPStore.*tcp://", text), gang.text
        assert "resumed" not in text, gang.text


def test_several_trainings_each_with_a_group_of_its_own(job: Job) -> None:
    """`close()`, another group at the same address, `listening()` again: nothing of the life before is in the way.

    Without DDP, which keeps its group, so that torch by itself hangs here.
    """
    body = """
from datetime import timedelta
for fold in range(6):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"step": 0}
    for name, value in {"model": model, "optimizer": optimizer, "state": state}.items():
        migrator.register(name, value)
    migrator.listening(job=f"fold-{fold}", every="off")
    if migrator.resume:
        migrator.load_ckpt()
    print("fold", fold, "from", state["step"], flush=True)
    while state["step"] < 3:
        model(torch.ones(4, 8)).square().mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        migrator.safe_point()
        moment(f"{fold}:{state['step']}")
    print("weights", fold, digest(model), flush=True)
    migrator.close()
    dist.barrier()
    rank, gone = dist.get_rank(), Path(f"gone-{os.environ.get('AT')}-{fold}")
    dist.destroy_process_group()
    if rank == 0:
        gone.touch()  # with its group the store is gone: before that rank 1 would find the old one, with us or without
    while not gone.exists():
        time.sleep(0.002)
"""
    job.write(BEGIN + body)

    gang = job.gang(2, AT="4:2", AT_RANK="1")
    assert gang.wait() == [143, 143], gang.text
    assert all("fold 4 from 0" in text for text in gang.texts), gang.text

    gang = job.gang(2)
    assert gang.wait() == [0, 0], gang.text
    assert all(re.search("^fold 4 from [23]$", text, re.M) and "weights 5" in text for text in gang.texts), gang.text
