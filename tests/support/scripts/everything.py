"""A training job with a bit of everything whose progress must not show where it was stopped.

Dropout, BatchNorm, AdamW, a scheduler per step and one per epoch, a GradScaler that really skips
a step, accumulation, an evaluation each epoch, and draws from every random source.

LOADER says how batches are drawn, WORKERS by how many loader workers. AT names the moment of the
job at which it is stopped (`0:3:backward`: epoch 0, batch 3, after its backward pass), HOW the
way: `sigterm` or `file`. It then goes on as if nothing had happened.

Each line it prints can be compared with that of a job that was never stopped.
"""

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from migrator import ElasticSampler, migrator

EPOCHS, SAMPLES, BATCH, TOGETHER = int(os.environ.get("EPOCHS", "3")), 38, 4, 3
SKIPPED = 21
"""A batch with this sample makes gradients infinite once, so that the scaler skips the step."""


def moment(name):
    """A place where the pod may be taken away."""
    print("moment", name)
    if os.environ.get("AT") != name:
        return
    if os.environ.get("HOW", "sigterm") == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        file = Path(os.environ["MIGRATOR_SIGNAL"])
        aside = file.with_name("aside")
        aside.write_text(f"save\nrequest=r-1\ndeadline={time.time() + 20}\n")
        aside.rename(file)
    while not migrator._session.is_leaving:  # from then on no step begins
        time.sleep(0.0005)


class Drawn(Sampler):
    """A sampler of the user's own: draws with Python's generator, all at once."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


class Lazy(Sampler):
    """Another one, with a state of its own, that decides late."""

    def __init__(self):
        self.turn = 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        self.turn += 1
        left = list(range(SAMPLES))
        generator = np.random.default_rng(self.turn)
        while left:
            yield left.pop(generator.integers(len(left)))

    def state_dict(self):
        return {"turn": self.turn}

    def load_state_dict(self, state):
        self.turn = state["turn"]


def make_loader(data, sampler):
    workers = {"num_workers": int(os.environ.get("WORKERS", "0"))}
    kind = os.environ.get("LOADER", "elastic")
    if kind == "elastic":
        return DataLoader(data, batch_size=BATCH, sampler=sampler, **workers)
    if kind == "shuffle":
        return DataLoader(data, batch_size=BATCH, shuffle=True, **workers)
    if kind == "persistent":
        return DataLoader(data, batch_size=BATCH, shuffle=True, persistent_workers=True, **workers)
    if kind == "generator":
        return DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7), **workers)
    if kind == "own generator":
        own = RandomSampler(data, generator=torch.Generator().manual_seed(9))
        return DataLoader(data, batch_size=BATCH, sampler=own, **workers)
    if kind == "custom":
        return DataLoader(data, batch_size=BATCH, sampler=Drawn(), **workers)
    if kind == "stateful":
        return DataLoader(data, batch_size=BATCH, sampler=Lazy(), **workers)
    raise ValueError(kind)


def tell(*words):
    """In one piece: once all is saved the pod leaves at any place, between two words of a line as well."""
    print(" ".join(map(str, words)))


def hexed(value):
    return float(value).hex()


torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)), torch.arange(SAMPLES))
held_out = DataLoader(TensorDataset(torch.randn(12, 8), torch.randint(0, 3, (12,))), batch_size=6)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
per_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
per_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
sampler = ElasticSampler(data, seed=0)
loader = make_loader(data, sampler)
is_elastic = loader.sampler is sampler
state = {"epoch": 0, "batch": 0, "step": 0, "skipped": 0, "ids": [], "accuracies": [], "loss": 0.0}

for name, value in {
    "model": model,
    "optimizer": optimizer,
    "per_step": per_step,
    "per_epoch": per_epoch,
    "scaler": scaler,
    "sampler": sampler,
    "state": state,
}.items():
    migrator.register(name, value)
migrator.listening(every="off")
if migrator.resume:
    migrator.load_ckpt()
print("resumed", state["step"])

for epoch in range(sampler.epoch if is_elastic else state["epoch"], EPOCHS):
    moment(f"{epoch}:start")
    sampler.set_epoch(epoch)
    model.train()
    for x, y, ids in migrator.batches(loader):
        batch = state["batch"] = state["batch"] + 1
        moment(f"{epoch}:{batch}:drawn")
        state["ids"] += [1000 * epoch + i for i in ids.tolist()]
        draws = [hexed(torch.rand(())), hexed(random.random()), hexed(np.random.rand()), hexed(np.random.randn())]
        loss = nn.functional.cross_entropy(model(x), y) / TOGETHER
        state["loss"] += loss.item()
        if SKIPPED in ids and state["skipped"] <= epoch:
            state["skipped"] += 1
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        moment(f"{epoch}:{batch}:backward")
        if batch % TOGETHER == 0 or batch == len(loader):
            scale = scaler.get_scale()
            scaler.step(optimizer)
            moment(f"{epoch}:{batch}:stepped")
            scaler.update()
            optimizer.zero_grad()
            per_step.step()
            if scaler.get_scale() < scale:
                print("skipped", epoch, batch)
            else:
                state["step"] += 1
                print(
                    "trained",
                    *(state["step"], epoch, batch, hexed(state["loss"]), hexed(optimizer.param_groups[0]["lr"])),
                    *(hexed(scaler.get_scale()), *draws, "ids", *state["ids"]),
                )
                state["loss"], state["ids"] = 0.0, []
        moment(f"{epoch}:{batch}:done")
    moment(f"{epoch}:over")
    per_epoch.step()
    state["batch"] = 0
    model.eval()
    right = 0
    for i, (x, y) in enumerate(held_out):
        moment(f"{epoch}:evaluation {i}")
        with torch.no_grad():
            right += (model(x).argmax(1) == y).sum().item()
    state["accuracies"].append(right)
    state["epoch"] = epoch + 1
    tell("evaluated", epoch, right, hexed(torch.rand(())), hexed(random.random()), hexed(np.random.randn()))

digest = hashlib.sha256()
for part in (model, optimizer, per_step, per_epoch, scaler):
    for key, value in sorted(part.state_dict().items(), key=str):
        digest.update(repr((key, value.tolist() if isinstance(value, torch.Tensor) else value)).encode())
for moments in optimizer.state.values():
    for key, value in sorted(moments.items()):
        digest.update(repr((key, value.tolist())).encode())
print("final", digest.hexdigest(), state, torch.rand(3).tolist(), random.random(), np.random.rand())
