"""What each rank registers as its own: saved by each, whatever its size, and given back to each."""

from __future__ import annotations

import re
import signal

import pytest

from tests.support.harness import Job, until
from tests.support.rank_processes import Gang

# Each rank has a batch fetched ahead, and a model that it trains for itself. Both are far above what is copied.
SCRIPT = """
import hashlib, os, signal, time
import torch
from torch import distributed, nn
from migrator import migrator
from migrator.save import attempt as saving
from migrator.ranks import shares as sharing

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo")
sharing.SHARE_BYTES = 300
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank + 1)
local = nn.Linear(100, 100)
local_optimizer = torch.optim.Adam(local.parameters())
state = {"step": 0}
ahead = {"batch": torch.rand(10_000)}
OWN = os.environ.get("OWN", "yes") == "yes"

def digest():
    tensors = [ahead["batch"], *local.state_dict().values()]
    tensors += [s["exp_avg"] for s in local_optimizer.state.values()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]

migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.register("state", state)
migrator.register("ahead", ahead, own=OWN)
migrator.register("local", local, own=OWN)
migrator.register("local_optimizer", local_optimizer, own=OWN)
# before
migrator.listening(every=os.environ.get("EVERY", "off"))
if migrator.resume:
    migrator.load_ckpt()
    print("resumed", state["step"], digest(), flush=True)
distributed.barrier()  # nothing else holds the ranks together
while state["step"] < int(os.environ["STEPS"]):
    model(torch.ones(1, 8)).sum().backward()
    local(ahead["batch"][:100]).square().sum().backward()
    optimizer.step()
    local_optimizer.step()
    ahead["batch"] = torch.rand(10_000)
    state["step"] += 1
    print("step", state["step"], digest(), flush=True)
    migrator.safe_point()
"""

WRITES_LATE = """
write = saving.write_part
def write_late(storage, path, *args, **named):
    while "own-of" in path and state["step"] < 3:  # the loop has gone on meanwhile
        time.sleep(0.001)
    return write(storage, path, *args, **named)
saving.write_part = write_late
"""


def lines(gang: Gang, word: str) -> list[dict[int, str]]:
    """Of each rank the digest at each step."""
    return [
        {int(step): digest for step, digest in re.findall(rf"^{word} (\d+) (\w+)$", text, re.MULTILINE)}
        for text in gang.texts
    ]


def finish(gang: Gang, code: int = 0) -> Gang:
    assert gang.wait() == [code] * gang.size, gang.text
    return gang


@pytest.mark.parametrize("roots", ["shared", "own"])
def test_each_rank_gets_its_own_back(job: Job, roots: str) -> None:
    """Stopped by a notice to one of them; nothing is said of ranks that differ."""
    stop = '    if state["step"] == 3 and rank == 1:\n        os.kill(os.getpid(), signal.SIGTERM)\n'
    job.write(SCRIPT + stop)
    pods = {"pods": 2, "roots": roots}
    first = finish(job.gang(2, STEPS="1000000", **pods), 143)
    trained = lines(first, "step")
    second = finish(job.gang(2, STEPS="0", **pods))
    resumed = lines(second, "resumed")

    (step,) = resumed[0]
    assert [set(found) for found in resumed] == [{step}, {step}]
    assert [found[step] for found in resumed] == [found[step] for found in trained]
    assert resumed[0] != resumed[1]
    assert not first.events("ranks_differ") + second.events("own_of_another_rank"), first.text


def test_the_loop_goes_on_while_it_is_written(job: Job) -> None:
    """What a step is about to change is copied first, as with all that ranks share."""
    job.write(SCRIPT.replace("# before\n", WRITES_LATE))
    first, second = finish(job.gang(2, STEPS="3", EVERY="2")), finish(job.gang(2, STEPS="0"))
    trained, resumed = lines(first, "step"), lines(second, "resumed")

    assert resumed == [{2: found[2]} for found in trained], (first.text, second.text)


def test_without_it_large_tensors_are_taken_to_be_the_same(job: Job) -> None:
    """That they are not is said, with the way out."""
    stop = '    if state["step"] == 3 and rank == 1:\n        os.kill(os.getpid(), signal.SIGTERM)\n'
    gang = finish(job.write(SCRIPT + stop).gang(2, STEPS="1000000", OWN="no"), 143)

    assert any("own=True" in fields["means"] for _, fields in gang.events("ranks_differ")), gang.text


def test_on_another_number_of_ranks_it_is_said(job: Job) -> None:
    """Nobody can tell whose a third rank's own is."""
    job.write(SCRIPT + '    if state["step"] == 2:\n        migrator.save_ckpt()\n')
    finish(job.gang(2, STEPS="2"))
    gang = finish(job.gang(3, STEPS="0"))

    assert [rank for rank, _ in gang.events("own_of_another_rank")] == [0, 1, 2], gang.text


def test_without_the_own_state_of_a_lost_rank_there_is_no_ckpt(job: Job) -> None:
    """The next life would give rank 1 what rank 0 had. So all go on from the last periodic ckpt, each with its own."""
    hold = """
    if state["step"] == 5 and "HOLD" in os.environ:
        migrator.safe_point()
        print("holds", flush=True)
        time.sleep(60)
"""
    job.write(SCRIPT.replace("    migrator.safe_point()\n", hold + "    migrator.safe_point()\n"))
    job.env["MIGRATOR_GRACE_S"] = "6"
    first = job.gang(2, STEPS="6", EVERY="3", HOLD="yes", pods=2)
    first.wait_for("^holds$")
    until(lambda: any(name.endswith("-000000000003") for name in job.ckpts()), "the periodic ckpt")
    first.kill(signal.SIGKILL, ranks=[1])
    first.kill(ranks=[0])

    assert first[0].wait() == 143, first.text
    (failed,) = first[0].events("save_failed")
    assert failed["why"].startswith(
        '"rank 1 is lost, and with it what only it had: ahead, local, local_optimizer (own=True)'
    )
    assert job.ckpts() == ["000001-000000000003"]
    second = finish(job.gang(2, STEPS="0", pods=2))
    assert lines(second, "resumed") == [{3: found[3]} for found in lines(first, "step")]
    assert not second.events("own_of_another_rank")


def test_it_has_to_be_own_on_all_ranks(job: Job) -> None:
    """Otherwise one would wait for what another one does not write."""
    gang = job.write(SCRIPT).gang(2, STEPS="0", each={1: {"OWN": "no"}})

    assert gang.wait() == [1, 1]
    assert "ahead: a container on rank 1, a container (own) on rank 0" in gang.text
