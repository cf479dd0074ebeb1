"""Makes a golden ckpt: what a version of torch, and a format of ours, wrote.

    python tests/golden/make.py tests/golden/torch-2.4.1

To be run with the versions in question; what it made is kept for good. Beside the ckpt lies what the same process
trained from there on.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=0.1),
    "adam_fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1, amsgrad=True),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), weight_decay=0.1),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}
STEPS = 3


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(len(name))
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    steps: range,
) -> None:
    for number in steps:
        x = torch.sin(torch.arange(12.0).reshape(4, 3) + number)

        def closure(x: torch.Tensor = x) -> float:
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            return float(loss.detach())

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        scheduler.step()


def weights(model: nn.Module) -> list[float]:
    return [number for p in model.parameters() for number in p.detach().reshape(-1).tolist()]


def main(target: Path) -> None:
    from migrator import migrator

    made = {name: make(name) for name in OPTIMIZERS}
    for name, (model, optimizer, scheduler) in made.items():
        migrator.register(f"{name}_model", model)
        migrator.register(name, optimizer)
        migrator.register(f"{name}_schedule", scheduler)
    with tempfile.TemporaryDirectory() as directory:
        migrator.listening(ckpt=directory, signal=f"{directory}/signal", every="off")
        for parts in made.values():
            train(*parts, range(STEPS))
        migrator.safe_point()
        ckpt = migrator.save_ckpt()
        shutil.copytree(f"{directory}/default/{ckpt}", target / str(ckpt))
    for parts in made.values():
        train(*parts, range(STEPS, 2 * STEPS))
    after = {name: weights(parts[0]) for name, parts in made.items()}
    (target / "after.json").write_text(json.dumps({"torch": torch.__version__, "weights": after}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
