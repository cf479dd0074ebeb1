"""A small training job that prints each step. Its numbers come from the environment.

STEPS in all, EVERY_STEP_S between them, BIG extra bytes in the model, RESUME=no to ignore a ckpt,
STOP_AT: SIGTERM to itself after that step, CRASH_AT: SIGKILL to itself after that step.
"""

import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator


def number(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)), torch.arange(64))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
if number("BIG", 0):
    model.register_parameter("big", nn.Parameter(torch.randn(int(number("BIG", 0)) // 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
metrics = {"step": 0, "losses": []}
sampler = ElasticSampler(data, seed=0)
loader = DataLoader(data, batch_size=4, sampler=sampler)

for name, value in {"model": model, "optimizer": optimizer, "metrics": metrics, "sampler": sampler}.items():
    migrator.register(name, value)
migrator.listening()
print("listens", flush=True)
if os.environ.get("RESUME") != "no" and migrator.resume:
    print("loaded", migrator.load_ckpt(), flush=True)
print("begins at", metrics["step"], flush=True)
if hasattr(model, "big"):
    model.big.grad = torch.ones_like(model.big)  # momentum for it as well

steps = int(number("STEPS", 64))
while metrics["step"] < steps:
    sampler.set_epoch(metrics["step"] // 16)
    for x, y, ids in migrator.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        metrics["step"] += 1
        metrics["losses"].append(loss.item())
        print("step", metrics["step"], "ids", *ids.tolist(), flush=True)
        time.sleep(number("EVERY_STEP_S", 0))
        if metrics["step"] == number("STOP_AT", -1):
            os.kill(os.getpid(), signal.SIGTERM)
            while not migrator._session.is_leaving:  # the watcher has it: no step begins any more
                time.sleep(0.0005)
        if metrics["step"] == number("CRASH_AT", -1):
            os.kill(os.getpid(), signal.SIGKILL)
        if metrics["step"] >= steps:
            break
print("weights", float(sum(p.detach().double().sum() for p in model.parameters())).hex(), metrics["losses"][-1])
