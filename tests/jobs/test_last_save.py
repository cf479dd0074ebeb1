"""The last save of a job whose state is hard to take: what is saved, and what is said."""

from __future__ import annotations

from tests.support.harness import ROOT, Job

BUSY_TRAIN = """
import torch
from torch import nn
from migrator import migrator
from tests.unit.state.test_capture import Busy

model, busy = nn.Linear(2, 2), Busy(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for name, value in (("model", model), ("optimizer", optimizer), ("busy", busy)):
    migrator.register(name, value)
migrator.listening()
busy.times = 10**9
for step in migrator.batches(range(10**9)):
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    print("trained", flush=True)
"""


def test_a_last_save_that_fails_for_it_says_so(job: Job) -> None:
    """And not that the loop has no safe points."""
    life = job.write(BUSY_TRAIN).run(MIGRATOR_GRACE_S="1", PYTHONPATH=str(ROOT))
    life.wait_for("^trained")
    life.kill()
    assert life.wait() == 143, life.text
    assert "another thread changed busy each time" in life.events("save_failed")[0]["why"]


TRAIN = """
import pathlib
import torch
from torch import nn
from migrator import migrator

model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
metrics = {"loss": 0.0, "file": ""}
for name, value in (("model", model), ("optimizer", optimizer), ("metrics", metrics)):
    migrator.register(name, value)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
    print("metrics", metrics)
for step in migrator.batches(range(10_000_000)):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    optimizer.step()
    metrics["loss"] = step + 1
    if step == 3:
        metrics["file"] = pathlib.Path("best.pt")
        print("trained", flush=True)
"""


def test_the_last_save_is_made_although_metrics_hold_a_path(job: Job) -> None:
    """The pod goes, and nothing but that entry is lost."""
    life = job.write(TRAIN).run()
    life.wait_for("^trained")
    life.kill()
    assert life.wait() == 143, life.text

    assert len(life.events("unstorable")) == 1
    step = life.events("committed")[-1]["step"]
    again = job.run()
    again.wait_for(rf"^metrics {{'loss': {step}, 'file': ''}}")
