"""A plain training script that survives the loss of its pod: one process, digits from scikit-learn.

    python examples/plain.py            # stop it with `kill <pid>` whenever you like, then run it again

Only the lines with a comment are there because of migrator.
"""

import argparse
import json

import fsspec
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--log", help="file for one line of JSON per step")
parser.add_argument("--weights", default="digits.pt", help="file or URL for the trained weights")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1500], labels[:1500], torch.arange(1500))
test_images, test_labels = images[1500:], labels[1500:]

model = nn.Sequential(
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
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
metrics = {"step": 0, "accuracy": []}

sampler = ElasticSampler(train, seed=0)  # instead of shuffle=True: knows its place in the epoch
loader = DataLoader(train, batch_size=32, sampler=sampler)

migrator.register("model", model)  # everything that makes up the training, by name
migrator.register("optimizer", optimizer)
migrator.register("scheduler", scheduler)
migrator.register("metrics", metrics)
migrator.register("sampler", sampler)
migrator.listening()  # from here on the pod may be taken away at any moment
if migrator.resume:  # there is a ckpt:
    migrator.load_ckpt()  # all of the above is as it was when it was saved

log = open(args.log, "a", buffering=1) if args.log else None

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
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    metrics["accuracy"].append(accuracy)
    print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)

with fsspec.open(args.weights, "wb") as file:
    torch.save(model.state_dict(), file)
