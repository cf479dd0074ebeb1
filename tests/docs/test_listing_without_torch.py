"""What lies on storage can be looked at without torch, numpy or a network: a tool for people starts quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from migrator.ckpt import generations
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import ckpt_name, file_in, manifest_name, part_name
from migrator.ckpt.part_writer import write_part
from migrator.storage.posix import PosixStorage
from tests.support.harness import ROOT

LISTING = """
import sys
from pathlib import Path

def no_network(event, arguments):
    assert not event.startswith("socket."), event

sys.addaudithook(no_network)
from migrator.ckpt import catalog, continuation, generations, leaving_mark, manifest, names, retention, sealed
from migrator.storage import base, memory, posix, posix_calls
storage = posix.PosixStorage(Path(sys.argv[1]), "job")
for name in catalog.ckpts(storage, frozenset(generations.numbers(storage))):
    manifest, about = catalog.whole(storage, name), generations.read_about(storage, 1)
    print(name, manifest.bytes, about, leaving_mark.is_leaving(storage, 1))
print(*sorted({"torch", "numpy", "ssl", "http", "asyncio"} & sys.modules.keys()))
"""


@pytest.mark.processes
def test_ckpts_are_listed_without_torch(tmp_path: Path) -> None:
    """Names, manifests, records and marks; no module that is slow to import, and no socket."""
    storage = PosixStorage(tmp_path, "job")
    generations.claim(storage, fresh=False, about={"script": "train.py"})
    for step in (10, 20):
        ckpt = ckpt_name(1, step)
        part = write_part(storage, file_in(ckpt, part_name(0, 1)), {"w": torch.ones(3)})
        manifest = Manifest(1, step, "job", 1, (part,), {})
        storage.put(manifest_name(ckpt), manifest.to_bytes(), exclusive=True)

    command = [sys.executable, "-c", LISTING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)

    about = "{'script': 'train.py'}"
    assert done.stdout.splitlines() == [
        f"{ckpt_name(1, 20)} {part.bytes} {about} False",
        f"{ckpt_name(1, 10)} {part.bytes} {about} False",
        "",
    ]
