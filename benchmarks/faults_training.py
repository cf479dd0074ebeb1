"""The script that all ranks of the fault table run: DDP on scikit-learn's digits, and a diary of what was trained.

Started by torchrun, in the pods that `faults_job.py` makes. Like any script it knows nothing of the faults. What it
writes besides is for `faults_history.py`: each process has a file of its own, with a line for its begin, for each step
and for the weights at the end of each epoch. What this life continues is registered, and so comes out of the ckpt
itself: a life is a number that rank 0 makes, and a line of lives says which steps are in the weights.

A step takes `--pace` seconds until the file `go` lies beside the diaries, and a second in a life that continues another
one. So each fault finds the job in the middle of its training, and so does a pod that comes late, however fast or slow
the machine is. What is left to train behind `go` takes no time.
"""

import argparse
import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import migrator

migrator.watch()  # the notice counts while torch is imported

import numpy  # noqa: E402
import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path, help="with digits.npz; the diaries go there")
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--batch", type=int, required=True, help="samples of one rank in one step")
parser.add_argument("--timeout", type=float, required=True, help="seconds that a collective may take")
parser.add_argument("--pace", type=float, required=True, help="seconds that a step of the first life takes at least")
args = parser.parse_args()

distributed.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
rank, ranks = distributed.get_rank(), distributed.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)

digits = numpy.load(args.directory / "digits.npz")
images = torch.tensor(digits["images"]).unsqueeze(1)
train = TensorDataset(images, torch.tensor(digits["labels"]), torch.arange(len(images)))
network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, stride=2),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(16 * 16, 10),
)
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sampler = migrator.ElasticSampler(train, seed=0)
loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
state = {"step": 0, "lives": []}

migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.register("sampler", sampler)
migrator.register("state", state)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()

life = torch.tensor([time.time_ns()])
distributed.broadcast(life, 0)
state["lives"].append([life.item(), state["step"]])

diary = (args.directory / "diaries" / f"{life.item()}-{rank}-of-{ranks}.jsonl").open("a", buffering=1)


def note(**fields):
    diary.write(json.dumps({"at": time.time(), **fields}) + "\n")


def weights():
    """A digest of every parameter and of the optimizer's moments."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


begins = state["step"]
note(begins=begins, lives=state["lives"], pod=os.environ["HOSTNAME"])
for epoch in range(sampler.epoch, args.epochs):
    sampler.set_epoch(epoch)
    for x, y, ids in migrator.batches(loader):
        if state["step"] > begins and not (args.directory / "go").exists():
            time.sleep(1.0 if begins else args.pace)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        state["step"] += 1
        note(step=state["step"], epoch=epoch, ids=ids.tolist())
    note(epoch_over=epoch, weights=weights())
note(over=state["step"], weights=weights())

distributed.barrier()
distributed.destroy_process_group()
