"""A job whose tensors lie in memory as `channels_last` goes on to the bit."""

from __future__ import annotations

from tests.support.harness import Job

TRAIN = """
import hashlib
import sys
import torch
from torch import nn
from migrator import migrator

torch.manual_seed(1)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
model.to(memory_format=torch.channels_last)
data = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(8)]
for i, x in enumerate(migrator.batches(data)):
    optimizer.zero_grad()
    model(x).pow(2).sum().backward()
    optimizer.step()
    if len(sys.argv) > 1 and i == 3:
        migrator.safe_point()
        migrator.save_ckpt()
        sys.exit()
print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def test_a_channels_last_job_goes_on_to_the_bit(job: Job) -> None:
    """Although its script brings the model into that format only behind the load."""
    job.write(TRAIN)
    whole = job.run(env={"MIGRATOR_CKPT": str(job.directory / "other")})
    first = job.run("stop", env={"MIGRATOR_SIGNAL": str(job.directory / "pod2" / "signal")})
    assert first.wait() == 0, first.text
    second = job.run(env={"MIGRATOR_SIGNAL": str(job.directory / "pod2" / "signal")})
    assert (whole.wait(), second.wait()) == (0, 0), second.text

    assert second.events("loaded")
    ends = [run.text.rpartition("weights ")[2].split()[0] for run in (whole, second)]
    assert ends[0] == ends[1]
    assert not second.events("other_strides")
