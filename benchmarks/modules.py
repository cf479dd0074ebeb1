"""What it costs to look at a model: seconds by its number of modules and parameters, all of them tiny.

    python benchmarks/modules.py

Times what is done once for a registration, a save (its time with the gate shut: no step is made meanwhile) and a load,
beside the module's own `state_dict()`. Each time the model doubles the numbers may double, and no more.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

BLOCKS = [500, 1000, 2000, 4000, 8000]


def model_of(blocks: int) -> nn.Module:
    """Three modules, four parameters and three buffers a block."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(blocks)))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def measure(blocks: int, directory: Path) -> dict[str, float]:
    """Seconds of each of the three, of the time the gate is shut, and of `state_dict()`."""
    from migrator.ckpt import generations
    from migrator.loop.gate import Gate
    from migrator.save.attempt import Attempt
    from migrator.save.context import SaveContext
    from migrator.save.staging import StagingBuffer
    from migrator.session import restore
    from migrator.state.capture import Capturer
    from migrator.state.registry import Registry
    from migrator.storage.posix import PosixStorage

    model = model_of(blocks)
    optimizer = trained(model)
    start_s = time.perf_counter()
    model.state_dict()
    own_s = time.perf_counter() - start_s

    start_s = time.perf_counter()
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    register_s = time.perf_counter() - start_s

    storage = PosixStorage(directory, "job")
    capturer = Capturer(registry)
    gate = Gate(capturer)
    context = SaveContext(storage, generations.claim(storage, fresh=False, about={}), "job", registry, capturer, gate)
    gate.publish(capturer.take(1, None, full=True))
    gate.announce()
    capture = gate.take(1.0)
    assert capture is not None
    start_s = time.perf_counter()
    attempt = Attempt(context, capture, staging=StagingBuffer(), may_open=False, on_block=lambda done, total: None)
    ckpt = attempt.run().ckpt
    save_s = time.perf_counter() - start_s

    start_s = time.perf_counter()
    restore.load(storage, ckpt, registry)
    load_s = time.perf_counter() - start_s
    return {"state_dict": own_s, "register": register_s, "save": save_s, "load": load_s}


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'modules':>8} {'parameters':>10} {'state_dict':>12} {'register':>12} {'save':>12} {'load':>12}")
    for blocks in BLOCKS:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(blocks, Path(directory))
        print(f"{3 * blocks + 1:8} {4 * blocks:10} " + " ".join(f"{seconds:10.3f} s" for seconds in found.values()))


if __name__ == "__main__":
    main()
