"""In the style of pytorchjob-migration: four lines, whole epochs. A stop costs the epoch in which it comes.

    python examples/epochs.py           # stop it with `kill <pid>` whenever you like, then run it again

No `batches()` and no `ElasticSampler`: safe points are implied, and an interrupted epoch starts again at its beginning,
with the weights of the moment of the stop. See examples/plain.py for how to resume within the epoch.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import migrator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
loader = DataLoader(train, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
metrics = {"epoch": -1, "best_epoch": -1, "best_loss": float("inf")}

migrator.register("model", model)  # what has to be saved
migrator.register("optimizer", optimizer)
migrator.register("metrics", metrics)
migrator.listening()  # watches for the notice from here on
if migrator.resume:  # the previous life left a ckpt
    migrator.load_ckpt()
    print(f"goes on after epoch {metrics['epoch']}", flush=True)

for epoch in range(metrics["epoch"] + 1, args.epochs):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    metrics["epoch"] = epoch
    if total < metrics["best_loss"]:
        metrics.update(best_epoch=epoch, best_loss=total)
    print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)
