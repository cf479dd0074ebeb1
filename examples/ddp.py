"""The plain example on several ranks under DDP. It can resume on any other number of ranks.

    torchrun --nproc-per-node 2 examples/ddp.py    # stop it with `kill <pid of torchrun>`, run it again with 3

Without torchrun: start one process for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment. Only the lines with a comment are there because of migrator.
"""

import argparse
import json
from pathlib import Path

import fsspec
import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--steps", help="directory for one file per rank with one line of JSON per step")
parser.add_argument("--weights", default="digits.pt", help="file or URL for the trained weights")
args = parser.parse_args()

distributed.init_process_group("gloo")  # before listening(), which all ranks call
rank, ranks = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(rank)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1500], labels[:1500], torch.arange(1500))
test_images, test_labels = images[1500:][rank::ranks], labels[1500:][rank::ranks]

model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 16, 10),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
metrics = {"step": 0, "accuracy": []}

sampler = ElasticSampler(train, seed=0)  # instead of DistributedSampler: knows its place on any number of ranks
loader = DataLoader(train, batch_size=30, sampler=sampler)

migrator.register("model", model)  # the same names on every rank
migrator.register("optimizer", optimizer)
migrator.register("scheduler", scheduler)
migrator.register("metrics", metrics)
migrator.register("sampler", sampler)
migrator.listening()  # from here on any pod may be taken away at any moment
if migrator.resume:  # there is a ckpt:
    migrator.load_ckpt()  # all of the above is as it was when it was saved, on every rank

if args.steps:
    Path(args.steps).mkdir(parents=True, exist_ok=True)
log = open(Path(args.steps) / f"rank-{rank}.jsonl", "a", buffering=1) if args.steps else None

for epoch in range(sampler.epoch, args.epochs):  # begins with the epoch of the ckpt
    sampler.set_epoch(epoch)
    model.train()
    for x, y, ids in migrator.batches(loader):  # every finished batch is a safe point
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        metrics["step"] += 1
        if log:
            log.write(
                json.dumps({"epoch": epoch, "step": metrics["step"], "loss": loss.item(), "ids": ids.tolist()}) + "\n"
            )
    scheduler.step()

    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).sum()
    tested = torch.tensor([right.item(), len(test_labels)])
    distributed.all_reduce(tested)
    accuracy = (tested[0] / tested[1]).item()
    metrics["accuracy"].append(accuracy)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f} on {ranks} ranks", flush=True)

if rank == 0:
    with fsspec.open(args.weights, "wb") as file:
        torch.save(model.module.state_dict(), file)
distributed.barrier()
distributed.destroy_process_group()
