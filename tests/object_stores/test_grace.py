"""`python -m migrator.grace` with a root in a bucket: a real server takes the bytes, and nothing is left in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from migrator import grace
from migrator.storage.object_storage import ObjectStorage
from migrator.storage.s3_client import S3Client
from tests.object_stores.conftest import BUCKET
from tests.support.harness import Job

SCRIPT = """
import torch
from migrator import migrator

model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening(every="off")
model(torch.ones(300)).sum().backward()
optimizer.step()
migrator.save_ckpt()
"""


def everything(prefix: str) -> list[str]:
    """All objects below a prefix, and all uploads that are pending there."""
    client = S3Client(BUCKET)
    found, directories = [], [f"{prefix}/"]
    while directories:
        place = directories.pop()
        there = client.list(place)
        found += [place + name for name in there.objects]
        directories += [f"{place}{name}/" for name in there.directories]
    return sorted(found) + [pending.key for pending in client.uploads(f"{prefix}/")]


@pytest.fixture
def saved(stored: Job) -> Job:
    life = stored.write(SCRIPT).run()
    assert life.wait() == 0, life.text
    return stored


def test_a_bucket_is_measured_and_left_as_it_was(saved: Job, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The size of the newest ckpt there, and the speed of uploads as a save makes them."""
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    before = everything(prefix)

    assert grace.main(["--json", "--ckpt", url, "--probe-mb=6", "--probes=2"]) == 0

    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    (ckpt,) = [name for name in ObjectStorage(S3Client(BUCKET), prefix, "default").list() if name[0] == "0"]
    assert 12 * 300 * 300 < found["bytes"] < 13 * 300 * 300
    assert found["bytes_per_s"] > 0
    assert any(ckpt in key for key in before)
    assert everything(prefix) == before
