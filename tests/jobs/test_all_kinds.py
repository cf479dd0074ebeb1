"""One script with every kind of object registered."""

from __future__ import annotations

from tests.support.harness import Job

ALL_KINDS = """
import random
import sys
from collections import deque
import numpy as np
import torch
from torch import nn
from migrator import ElasticSampler, migrator

fresh = sys.argv[1] == "first"
torch.manual_seed(1 if fresh else 2)
model = nn.Sequential(nn.Linear(30, 200), nn.BatchNorm1d(200), nn.Linear(200, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
things = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "scaler": torch.amp.GradScaler("cpu"),
    "sampler": ElasticSampler(100, seed=1 if fresh else 2),
    "metrics": {"loss": [], "best": None},
    "losses": [],
    "seen": set(),
    "window": deque(maxlen=3),
    "table": torch.zeros(9000),
    "array": np.zeros(5),
    "draws": np.random.default_rng(1 if fresh else 2),
    "python": random.Random(1 if fresh else 2),
    "torch": torch.Generator().manual_seed(1 if fresh else 2),
}
for name, thing in things.items():
    migrator.register(name, thing)
migrator.listening()
try:
    migrator.register("late", {})
except Exception as error:
    print("late:", type(error).__name__, error)
if migrator.resume:
    migrator.load_ckpt()

def show():
    torch.set_printoptions(profile="full")
    draws, python, generator = (things.pop(name) for name in ("draws", "python", "torch"))
    print([(n, t.state_dict() if hasattr(t, "state_dict") else t) for n, t in things.items()])
    print(draws.bit_generator.state, python.getstate(), generator.get_state().sum())
    print(torch.rand(1), random.random(), np.random.rand())

if fresh:
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.rand(8, 30)).pow(2).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        things["sampler"].advance(8)
        for name in ("losses", "window"):
            things[name].append(float(loss))
        things["metrics"]["loss"].append(float(loss))
        things["seen"].add(step)
        things["table"] += torch.rand(9000)
        things["array"] += things["draws"].random(5) + things["python"].random()
        migrator.safe_point()
    migrator.save_ckpt()
print("---")
show()
"""


def test_all_kinds_together_come_back_in_a_new_process(job: Job) -> None:
    """One script with everything registered: the new life has what the old one saved, and draws what it drew."""
    job.write(ALL_KINDS)
    first, second = job.run("first"), None
    assert first.wait() == 0, first.text
    second = job.run("second")
    assert second.wait() == 0, second.text

    for run in (first, second):
        assert "late: UsageError register('late', ...) after listening(): it would be missing" in run.text
    shown = [run.text.split("---\n")[1] for run in (first, second)]
    assert shown[0] == shown[1]
    assert len(shown[0]) > 100_000
