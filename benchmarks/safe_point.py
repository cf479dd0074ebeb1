"""What a safe point costs the training loop.

    python benchmarks/safe_point.py [--json FILE]

Times `safe_point()` (capture, marks, publishing) for a small MLP, for a model with as many tensors as a ResNet-50, and
for one with 1,000 parameters, beside one training step of the same model on the same machine: the ratio is what counts.
The caches are as a whole step leaves them, which is most of the price; the last column shows safe points with nothing
in between.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROUNDS = {"mlp": 1000}
"""Number of steps that are measured."""
ROUNDS_OTHERS = 150
WARM_UP = 20
"""Steps before that: the first safe points find out where everything lies."""
BUDGETS_US = {"mlp": 50, "resnet-like": 150, "1000 tensors": 300}
"""Maximum median in the loop, in microseconds."""


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(64, 784)


def resnet_like() -> tuple[nn.Module, torch.Tensor]:
    """As many parameters (161) and BatchNorm buffers (159) as a ResNet-50, on images small enough for a CPU."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(52):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(16, 3, 16, 16)


def thousand() -> tuple[nn.Module, torch.Tensor]:
    """1,000 parameters, for each of which AdamW has three tensors more."""
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(500)]), torch.randn(8, 16)


def measure(name: str, model: nn.Module, x: torch.Tensor, directory: Path, *, sgd: bool = False) -> dict[str, Any]:
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
    # A safe point that leaves out what is costly would be measured as cheap.
    life._capturer._weigh = lambda *_: None
    y = torch.randint(0, 10, (len(x),))
    steps_us, points_us = [], []
    rounds = ROUNDS.get(name, ROUNDS_OTHERS)
    for number in range(WARM_UP + rounds):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        middle_s = time.perf_counter()
        job.safe_point()
        if number >= WARM_UP:
            points_us.append(1e6 * (time.perf_counter() - middle_s))
            steps_us.append(1e6 * (middle_s - start_s))
    warm_us = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        life.safe_points.reach()
        warm_us.append(1e6 * (time.perf_counter() - start_s))
    life.close()
    step_us, point_us = statistics.median(steps_us), statistics.median(points_us)
    found = {
        "name": name,
        "point_median_us": point_us,
        "point_p99_us": statistics.quantiles(points_us, n=100)[98],
        "point_warm_us": min(warm_us),
        "step_median_us": step_us,
        "share_of_step": point_us / step_us,
        "budget_us": BUDGETS_US.get(name),
    }
    budget = f" (budget {found['budget_us']})" if found["budget_us"] else ""
    print(
        f"{name:12} safe point {point_us:6.1f} us{budget}, p99 {found['point_p99_us']:6.1f}; "
        f"step {step_us:8.0f} us: {100 * found['share_of_step']:5.2f} %; {min(warm_us):6.1f} us in a warm cache"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("MIGRATOR_CKPT", None)
    with tempfile.TemporaryDirectory() as directory:
        found = [
            measure("mlp", *mlp(), Path(directory)),
            measure("resnet-like", *resnet_like(), Path(directory)),
            measure("resnet, SGD", *resnet_like(), Path(directory), sgd=True),
            measure("1000 tensors", *thousand(), Path(directory)),
        ]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
