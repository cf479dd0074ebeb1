"""Which of several ranks print the line for KubeDL's autoscaler."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.kubedl import read

SCRIPT = """
import torch
from torch import distributed
from migrator import migrator

distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
migrator.register("model", model)
migrator.listening(every="off")
migrator.progress(epoch=1, batch=2, batches=9, latency_s=0.5, loss=1.0, accuracy=50.0)
"""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("resnet-worker-0", "resnet-worker-0", "resnet-worker-1"), [1, 0, 0]),
        (("resnet-worker-1", "resnet-worker-1", "resnet-worker-0"), [1, 0, 1]),
        (("resnet-master-0", "resnet-worker-0", "resnet-worker-0"), [1, 1, 0]),
    ],
)
def test_rank_0_prints_and_the_first_rank_of_worker_0(job: Job, names: tuple[str, ...], expected: list[int]) -> None:
    """KubeDL reads the log of `<job>-worker-0`; with a master, or under torchrun, rank 0 may be elsewhere."""
    pods = [sorted(set(names)).index(name) for name in names]
    each = {rank: {"HOSTNAME": name} for rank, name in enumerate(names)}
    gang = job.write(SCRIPT).gang(3, pods=pods, each=each)

    assert gang.wait() == [0, 0, 0], gang.text
    found = [[seen for line in text.split("\n") if (seen := read(line))] for text in gang.texts]
    assert [len(seen) for seen in found] == expected, gang.text
    assert all("Ranks 3" in text for text, seen in zip(gang.texts, found, strict=True) if seen), gang.text
