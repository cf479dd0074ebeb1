"""Parameter servers in plain PyTorch: the rows of a large embedding lie on servers, the dense layers on workers.

    torchrun --nproc-per-node 4 --max-restarts 100 examples/parameter_server.py --servers 2

The first ranks are servers; each has a part of the rows, and an optimizer for them. The others are workers: each
fetches the rows of its batch, and sends their gradients back. All go through the same rounds, so a round ends on every
rank with a safe point, and all ranks save the same one.

Stopped with `kill <pid of torchrun>` and run again with as many servers and workers, it goes on as if nothing had
happened; with another number of them it refuses to. If one process is killed, torchrun starts all of them again from
the last periodic ckpt. Only the lines with a comment are there because of migrator.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator

ROWS, FIELDS, WIDTH = 20_000, 4, 16

parser = argparse.ArgumentParser()
parser.add_argument("--servers", type=int, default=1)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--steps", help="directory for one file per rank with one line of JSON per step")
parser.add_argument("--weights", default="weights", help="directory for one file per rank with what it trained")
args = parser.parse_args()

distributed.init_process_group("gloo")  # before listening(), which all ranks call
rank, ranks, servers = distributed.get_rank(), distributed.get_world_size(), args.servers
workers = ranks - servers
if not 0 < servers < ranks:
    sys.exit(f"--servers={servers} of {ranks} ranks: expected at least one server and one worker")
all_workers = distributed.new_group(range(servers, ranks))
is_server = rank < servers
torch.set_num_threads(1)

torch.manual_seed(0)
ids = torch.randint(ROWS, (6000, FIELDS))
clicked = (torch.randn(ROWS)[ids].sum(1) > 0).float()

torch.manual_seed(rank if is_server else servers)  # the dense layers begin alike on all workers
if is_server:
    model = nn.Embedding(-(-ROWS // servers), WIDTH)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
else:
    model = nn.Sequential(nn.Linear(FIELDS * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
metrics = {"step": 0}

# Servers go through worker 0's batches: that is how they know the rounds.
sampler = ElasticSampler(ids, seed=0, rank=max(0, rank - servers), size=workers)  # instead of DistributedSampler
loader = DataLoader(TensorDataset(ids, clicked), batch_size=30, sampler=sampler)

migrator.register("model", model, own=True)  # the same names on every rank; each has another model
migrator.register("optimizer", optimizer, own=True)
migrator.register("metrics", metrics)
migrator.register("sampler", sampler)
loss_of_epoch = migrator.meter("loss")  # a sum that goes on in the middle of its epoch
migrator.listening()  # from here on any process may be taken away at any moment
if migrator.resume:  # there is a ckpt:
    migrator.load_ckpt()  # each rank has its own again; with other servers or workers it raises CkptMismatch


def serve(size):
    """One round of a server: the rows that workers ask for, and the gradients that they send back."""
    answered = []
    for worker in range(servers, ranks):
        asked = torch.empty(size, FIELDS, dtype=torch.int64)
        distributed.recv(asked, worker)
        is_mine = (asked % servers == rank).unsqueeze(-1)
        rows = model(asked // servers) * is_mine
        distributed.send(rows.detach(), worker)
        answered.append(rows)
    for worker, rows in zip(range(servers, ranks), answered, strict=True):
        gradient = torch.empty_like(rows)
        distributed.recv(gradient, worker)
        rows.backward(gradient)


def train(asked, clicked):
    """One round of a worker."""
    rows = torch.zeros(len(asked), FIELDS, WIDTH)
    for server in range(servers):
        distributed.send(asked, server)
        part = torch.empty_like(rows)
        distributed.recv(part, server)
        rows += part
    rows.requires_grad_()
    loss = nn.functional.binary_cross_entropy_with_logits(model(rows.flatten(1)).squeeze(1), clicked)
    (loss / workers).backward()
    for server in range(servers):
        distributed.send(rows.grad, server)
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=all_workers)
    return loss.item()


if args.steps:
    Path(args.steps).mkdir(parents=True, exist_ok=True)
log = open(Path(args.steps) / f"rank-{rank}.jsonl", "a", buffering=1) if args.steps else None

for epoch in range(sampler.epoch, args.epochs):  # begins with the epoch of the ckpt
    sampler.set_epoch(epoch)
    for asked, labels in migrator.batches(loader):  # every finished round is a safe point, on servers as on workers
        optimizer.zero_grad()
        loss = serve(len(asked)) if is_server else train(asked, labels)
        optimizer.step()
        metrics["step"] += 1
        if not is_server:
            loss_of_epoch.add(loss, len(asked))
        if log:
            log.write(json.dumps({"epoch": epoch, "step": metrics["step"], "loss": loss}) + "\n")
    if not is_server:
        mean = loss_of_epoch.take()
        if rank == servers:
            print(f"epoch {epoch}: loss {mean:.4f} by {servers} servers and {workers} workers", flush=True)

Path(args.weights).mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), Path(args.weights) / f"rank-{rank}.pt")
distributed.barrier()
distributed.destroy_process_group()
