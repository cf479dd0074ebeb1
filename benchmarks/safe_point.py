"""What a safe point costs the training loop.

    python benchmarks/safe_point.py

Times `safe_point()` (capture, marks, publishing) for a small MLP and for a model with as many tensors as a ResNet-50,
beside one training step of the same model on the same machine: the ratio is what counts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROUNDS = 300


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(64, 784)


def resnet_like() -> tuple[nn.Module, torch.Tensor]:
    """As many parameters (161) and BatchNorm buffers (159) as a ResNet-50, on images small enough for a CPU."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(52):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(16, 3, 16, 16)


def measure(name: str, model: nn.Module, x: torch.Tensor, directory: Path, *, sgd: bool = False) -> None:
    from migrator.api import Migrator

    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job = Migrator()
    job.register("model", model)
    job.register("optimizer", optimizer)
    job.register("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 1000))
    job.register("metrics", {"loss": 0.0, "step": 0})
    job.listening(ckpt=str(directory / name), signal=str(directory / name / "signal"), every="off")
    life: Any = job._session
    y = torch.randint(0, 10, (len(x),))
    steps_us, points_us = [], []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        middle_s = time.perf_counter()
        job.safe_point()
        points_us.append(1e6 * (time.perf_counter() - middle_s))
        steps_us.append(1e6 * (middle_s - start_s))
    warm_us = []
    life._capturer._weigh = lambda *_: None  # nothing but safe points: every capture would count as costly
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        life.safe_points.reach()
        warm_us.append(1e6 * (time.perf_counter() - start_s))
    life.close()
    point_us, step_us = statistics.median(points_us), statistics.median(steps_us)
    print(
        f"{name:12} safe point {point_us:6.1f} us in the loop, {min(warm_us):6.1f} us in a warm cache; "
        f"step {step_us:8.0f} us; {100 * point_us / step_us:5.2f} %"
    )


def main() -> None:
    torch.set_num_threads(1)
    os.environ.pop("MIGRATOR_CKPT", None)
    with tempfile.TemporaryDirectory() as directory:
        measure("mlp", *mlp(), Path(directory))
        measure("resnet-like", *resnet_like(), Path(directory))
        measure("resnet, SGD", *resnet_like(), Path(directory), sgd=True)


if __name__ == "__main__":
    main()
