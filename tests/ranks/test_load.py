"""What a job of any number of ranks gets back, whoever saved it and whatever has become of the ckpt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from migrator.ckpt.manifest import Manifest
from migrator.data.sampler import ElasticSampler
from tests.support import chance
from tests.support.harness import ROOT, Job
from tests.support.rank_history import (
    RankStory,
    add_next_ranks,
    assert_each_sample_once_over_ranks,
    assert_ranks_agree,
    assert_ranks_as_if_nothing_had_happened,
    stopped_ranks,
    unstopped_ranks,
)
from tests.support.rank_processes import Gang

RANKED = ROOT / "tests" / "support" / "scripts" / "ranked.py"
SIZES = [1, 2, 3, 4, 5]

# Trains up to the last of the steps SAVE, saves at each, and tells what it has and what each rank would draw next.
SAVES = """
import hashlib
import os
import random
import time
import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from migrator import ElasticSampler, migrator
from migrator.ranks import shares as sharing
from migrator.session import rank_group as team

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sharing.SHARE_BYTES = 300  # several shares, however small all is
team._SEE_S = 0.2  # a root that is not shared is not waited for so long
if size > 1:
    distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 6), torch.arange(400))
model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
sampler = ElasticSampler(data, seed=3)
loader = DataLoader(data, batch_size=2, sampler=sampler)
state = {"step": 0}
metrics = {"seen": []}
for source in (torch.manual_seed, random.seed, np.random.seed):
    source(50 + rank)

def digest(*values):
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

def flat(found):
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return [(key, flat(value)) for key, value in found.items()]
    return [flat(value) for value in found] if isinstance(found, (list, tuple)) else found

def tell(word):
    print(word, state["step"], digest(flat(model.state_dict())), digest(flat(optimizer.state_dict())), end=" ")
    print(sorted(sampler.state_dict().items()), "own", metrics)

def draws():
    return torch.rand(()).item().hex(), random.random().hex(), float(np.random.rand()).hex()

objects = {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state, "metrics": metrics}
# before
for name, value in objects.items():
    migrator.register(name, value)
migrator.listening(every="off")
if migrator.resume:
    print("took", migrator.load_ckpt())
tell("begins")
saves = [int(step) for step in os.environ.get("SAVE", "").split()]
if not saves:
    print("draws", *draws())
for x, ids in migrator.batches(loader) if saves else []:
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for param in model.parameters():
        if size > 1:
            distributed.all_reduce(param.grad)
    optimizer.step()
    state["step"] += 1
    metrics["seen"].append((rank, *ids.tolist()))
    if state["step"] in saves:
        migrator.save_ckpt()
        tell("saved")
        print("draws", *draws())
    if state["step"] == max(saves):
        break
if size > 1:
    distributed.destroy_process_group()
"""


def finish(gang: Gang) -> Gang:
    assert gang.wait() == [0] * gang.size, gang.text
    return gang


def told(gang: Gang, word: str) -> list[str]:
    """The last such line of each rank."""
    lines = [re.findall(rf"^{word} (.*)$", text, re.MULTILINE) for text in gang.texts]
    assert all(lines), gang.text
    return [found[-1] for found in lines]


def of_all(lines: Iterable[str]) -> str:
    """What all ranks have alike: weights, optimizer, sampler and state."""
    found = {line.partition(" own ")[0] for line in lines}
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.parametrize("source", SIZES)
def test_what_any_number_of_ranks_saved_any_number_gets_back(job: Job, source: int) -> None:
    """Weights, optimizer, sampler and state on every rank as they were saved; what is a rank's own where it fits."""
    saved = finish(job.write(SAVES).gang(source, SAVE="3"))
    is_same, own, drawn = of_all(told(saved, "saved")), told(saved, "saved"), told(saved, "draws")
    assert is_same.startswith("3 ")
    manifest = Manifest.from_bytes(next(job.root.glob("*/*/manifest.json")).read_bytes())
    assert len([part for part in manifest.parts if "-of-" in part.name]) == source, manifest.parts

    for size in SIZES:
        gang = finish(job.gang(size))

        begins, draws = told(gang, "begins"), told(gang, "draws")
        assert of_all(begins) == is_same, gang.text
        derived = [rank for rank, _ in gang.events("random_derived")]
        assert derived == list(range(source, size)), gang.text
        assert draws[:source] == drawn[:size], gang.text
        single = [number for line in draws for number in line.split()]
        assert len(set(single)) == 3 * size, f"ranks that draw the same: {draws}"
        if size == source:
            assert begins == own
        else:
            assert {line.partition(" own ")[2] for line in begins} == {own[0].partition(" own ")[2]}


def assert_each_sample_once(story: RankStory, *, samples: int, epochs: int, size: int) -> None:
    """Of each epoch, over all lives; what the last life, of so many ranks, padded at the epoch's end is counted."""
    for epoch in range(epochs):
        ids = [number % 1000 for number in story.ids if number // 1000 == epoch]
        before = sum(len(s.ids) for n, s in story.steps.items() if n <= story.resumed[-1]) if epoch == 0 else 0
        assert before < samples, "the epoch was over before the last life began"
        padding = ElasticSampler(samples).padding(size, before)
        assert sorted(ids[:samples]) == list(range(samples)), f"epoch {epoch}"
        assert len(ids) == samples + padding, f"epoch {epoch}: {len(ids) - samples} repeated, not {padding}"
        assert 0 <= padding < size


SIZES_OF_LIVES = [4, 3, 1, 5]


def test_no_sample_is_missed_or_repeated_over_four_three_one_and_five_ranks(job: Job) -> None:
    """Each life is stopped in mid-epoch by SIGTERM to one rank; only an epoch's very end is padded, as counted."""
    env = {"SAMPLES": "127", "EPOCHS": "2"}
    job.use(RANKED)
    story = RankStory()
    for size, at, rank in zip(SIZES_OF_LIVES[:-1], ["0:4:drawn", "0:6:backward", "0:8:done"], [2, 0, 0], strict=True):
        gang = job.gang(size, **env, AT=at, AT_RANK=str(rank))
        assert gang.wait() == [143] * size, gang.text
        add_next_ranks(story, gang)
    add_next_ranks(story, finish(job.gang(SIZES_OF_LIVES[-1], **env)))

    assert story.resumed[1:] == sorted(set(story.resumed[1:]))
    assert_each_sample_once(story, samples=127, epochs=2, size=SIZES_OF_LIVES[-1])
    assert_ranks_agree(story)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(5))
def test_no_sample_is_missed_or_repeated_when_stopped_from_outside(job: Job, turn: int) -> None:
    """The same with SIGTERM at any time, to any one rank or to all of them."""
    dice = chance.dice(turn)
    env = {"SAMPLES": "700", "EPOCHS": "1", "SLOW_RANK": "0", "SLOW_S": "0.02"}
    job.use(RANKED)
    story = RankStory()
    for size in SIZES_OF_LIVES[:-1]:
        gang = job.gang(size, **env)
        gang.wait_for(f"^trained {max(story.steps, default=0) + dice.randint(1, 9)} ")
        gang.kill(ranks=None if turn == 0 else [dice.randrange(size)])
        assert gang.wait() == [143] * size, gang.text
        add_next_ranks(story, gang)
    add_next_ranks(story, finish(job.gang(SIZES_OF_LIVES[-1], **env)))

    assert_each_sample_once(story, samples=700, epochs=1, size=SIZES_OF_LIVES[-1])


def flip_a_byte(ckpt: Path) -> None:
    part = next(iter(sorted(ckpt.glob("*.safetensors"))))
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)


@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_byte_makes_all_ranks_take_the_ckpt_before(job: Job, size: int) -> None:
    """Each rank names the bad one, and none begins with it."""
    saved = finish(job.write(SAVES).gang(2, SAVE="2 4"))
    assert len(job.ckpts()) == 2
    flip_a_byte(next(job.root.glob("*/000001-000000000004")))

    gang = finish(job.gang(size))

    assert told(gang, "took") == ["000001-000000000002"] * size
    assert [rank for rank, _ in gang.events("ckpt_bad")] == list(range(size))
    at_two = re.findall(r"^saved (2 .*)$", saved.text, re.MULTILINE)
    assert of_all(told(gang, "begins")) == of_all(at_two)


ONE_SEES_IT = """
import migrator.session.restore as loading
from migrator.errors import CkptCorrupt
read_part = loading.read_part

def reads(storage, ckpt, *args, **named):
    if rank == int(os.environ.get("BAD_RANK", "-1")) and ckpt.endswith("4"):
        raise CkptCorrupt(f"{ckpt}: only here")
    return read_part(storage, ckpt, *args, **named)

loading.read_part = reads
"""


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_rank_cannot_read_no_rank_takes(job: Job, bad: int) -> None:
    """The bytes that reach one rank are bad, on their way to it or in its cache: the others hear of it and follow."""
    saved = finish(job.write(SAVES.replace("# before\n", ONE_SEES_IT)).gang(2, SAVE="2 4"))

    gang = finish(job.gang(3, BAD_RANK=str(bad)))

    assert told(gang, "took") == ["000001-000000000002"] * 3
    named = gang.events("ckpt_bad")
    assert [rank for rank, _ in named] == [0, 1, 2]
    assert all("only here" in fields["why"] for _, fields in named)
    assert all(f"rank {bad} found" in fields["why"] for rank, fields in named if rank != bad)
    at_two = re.findall(r"^saved (2 .*)$", saved.text, re.MULTILINE)
    assert of_all(told(gang, "begins")) == of_all(at_two)


LACKS = """
if rank == int(os.environ.get("LACKS_RANK", "-1")):
    del objects["metrics"]
    objects["state"] = torch.zeros(1)
# One rank comes last; then another one reads so late that whoever serves the store could have ended.
from migrator.ranks.peers import Peers

def slow(name, by_s):
    was = getattr(Peers, name)

    def does(*args, **named):
        time.sleep(by_s)
        return was(*args, **named)

    setattr(Peers, name, does)

if rank == int(os.environ.get("LATE_RANK", "-1")):
    slow("tell", 1.2)
if rank == int(os.environ.get("SLOW_RANK", "-1")):
    slow("_exchange", 0.8)
"""


@pytest.mark.parametrize(("lacking", "late", "slow"), [(0, 2, 1), (2, 1, 2), (1, 2, 1)])
def test_ranks_that_register_differently_all_end_with_the_same_error(
    job: Job, lacking: int, late: int, slow: int
) -> None:
    """Rank 0 is what they are compared with; all differences at once, on every rank, however late it hears of them."""
    job.write(SAVES.replace("# before\n", LACKS))
    gang = job.gang(3, LACKS_RANK=str(lacking), LATE_RANK=str(late), SLOW_RANK=str(slow))

    assert gang.wait() == [1] * 3, gang.text

    errors = [
        re.sub(r"^\[rank\d\]: ?", "", text, flags=re.M).partition("RegistrationError: ")[2] for text in gang.texts
    ]
    assert errors[0] == errors[1] == errors[2], gang.text
    assert "\n  metrics: " in errors[0]
    assert "\n  state: a " in errors[0]
    assert not job.ckpts()


def test_roots_that_ranks_do_not_share_are_named_and_rank_0_writes_and_reads_for_all(job: Job) -> None:
    """Two pods with a volume each: to the last bit as one that was never stopped, whoever of them was told to leave."""
    apart = {"pods": 2, "roots": "own", "MIGRATOR_EVERY": "4"}
    reference = unstopped_ranks(job.use(RANKED), 2, MIGRATOR_EVERY="off")

    story = stopped_ranks(job, [("0:3:backward", 1), ("1:2:done", 0)], [2, 2, 2], **apart)

    assert_ranks_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once_over_ranks(story, epochs=3, samples=48)
    named = re.findall(r"migrator rank (\d): roots_apart ranks=(\S+)", "\n".join(story.lives[-1]))
    assert named == [("0", "1")]
    assert len(job.ckpts()) == 2
    assert not list((job.directory / "ckpts-1").glob("*/*/*.json")), "rank 1 wrote to a root of its own"


def test_roots_apart_and_another_number_of_ranks(job: Job) -> None:
    """What rank 0 reads reaches ranks that were not there when it was written."""
    saved = finish(job.write(SAVES).gang(2, pods=2, roots="own", SAVE="3"))

    gang = finish(job.gang(3, pods=3, roots="own"))

    assert of_all(told(gang, "begins")) == of_all(told(saved, "saved"))
    assert [rank for rank, _ in gang.events("random_derived")] == [2]
    assert gang.events("roots_apart")[0][1]["ranks"] == "1,2"


def test_a_bad_ckpt_of_rank_0_on_roots_apart(job: Job) -> None:
    """The only one who reads it tells all others, and all take the one before it."""
    finish(job.write(SAVES).gang(2, pods=2, roots="own", SAVE="2 4"))
    flip_a_byte(next(job.root.glob("*/000001-000000000004")))

    gang = finish(job.gang(2, pods=2, roots="own"))

    assert told(gang, "took") == ["000001-000000000002"] * 2


FOREIGN = """
import os
import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler
from migrator import migrator

distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.arange(48.0)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=1))
state = {"epoch": 0}
for name, value in {"model": model, "optimizer": optimizer, "state": state}.items():
    migrator.register(name, value)
migrator.listening(every="off")
if migrator.resume:
    migrator.load_ckpt()
stop = int(os.environ.get("STOP", "0"))
for epoch in range(state["epoch"], 2):
    state["epoch"] = epoch
    loader.sampler.set_epoch(epoch)
    for i, x in enumerate(migrator.batches(loader)):
        print("ids", epoch, *x.int().tolist())
        optimizer.zero_grad()
        model(torch.stack([x, x], 1)).sum().backward()
        for param in model.parameters():
            distributed.all_reduce(param.grad)
        optimizer.step()
        if epoch == 1 and i + 1 == stop:
            migrator.save_ckpt()
            os._exit(0)
distributed.destroy_process_group()
"""


def ids_of(gang: Gang, epoch: int) -> list[int]:
    return [
        int(i) for text in gang.texts for line in re.findall(rf"^ids {epoch} (.*)$", text, re.M) for i in line.split()
    ]


@pytest.mark.parametrize(("size", "repeats"), [(2, False), (3, True)])
def test_a_loader_of_torch_begins_its_epoch_anew_on_another_number_of_ranks(job: Job, size: int, repeats: bool) -> None:
    """It cannot be told what of the epoch is left: named, and no sample is missed. On as many ranks it goes on."""
    before = finish(job.write(FOREIGN).gang(2, STOP="5"))

    gang = finish(job.gang(size))

    assert [rank for rank, _ in gang.events("epoch_repeated")] == (list(range(size)) if repeats else [])
    assert ids_of(gang, 0) == []
    trained = ids_of(gang, 1) + ([] if repeats else ids_of(before, 1))
    assert sorted(trained) == list(range(48))
