"""Pods that are killed because memory ran out, and what the next life says of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import memory_note_name
from migrator.testing import Kubelet, Pod
from tests.support.harness import ROOT, Job, events_in, until

pytest_plugins = ["migrator.testing.fixtures"]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "podded.py"
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MIGRATOR_EVERY": "5", "BIG_MB": "10"}
MI = 1 << 20


def note(root: Path, generation: int = 1) -> Path:
    """The note of a life of one process."""
    return root / "default" / memory_note_name(generation, 0)


def noted(path: Path) -> dict[str, object]:
    """What a note says as soon as it knows what a save copies."""

    def found() -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError):
            says: dict[str, object] = json.loads(path.read_text())
            return says if says["copied"] else {}
        return {}

    says: dict[str, object] = until(found, f"what {path.name} says of a copy")
    return says


def run(kubelet: Kubelet, **env: str) -> Pod:
    return kubelet.run([sys.executable, SCRIPT], env={**ENV, **env})


def test_the_life_after_a_kill_says_how_much_memory_was_used(kubelet: Kubelet) -> None:
    """In one line, with what a save copies. The life after one that left by a notice says nothing."""
    volume = kubelet.volume("ckpts")
    pod = run(kubelet)
    says = noted(note(volume))
    stop = pod.oom()
    assert (stop.exit_code, stop.reason, stop.hooks) == (137, "OOMKilled", ())
    assert note(volume).exists()

    second = run(kubelet)
    second.wait_for_log("^resumed [1-9]")
    (said,) = events_in(second.log, "memory_before")
    assert said["generation"] == "1"
    assert said["pod"] == pod.name
    assert int(said["peak_bytes"]) >= 10 * MI
    assert int(said["copy_bytes"]) == says["copy"] >= 10_000_000  # type: ignore[operator]
    assert said["means"].startswith('"the life before ended without a last save; ')
    noted(note(volume, 2))
    assert not note(volume).exists(), "deleted after the first commit of a later life"
    stop = second.delete()
    assert (stop.exit_code, stop.hook.code) == (143, 0)

    assert not note(volume, 2).exists()
    (volume / "go").touch()
    third = run(kubelet)
    assert third.wait().exit_code == 0
    assert events_in(third.log, "loaded")
    assert not events_in(third.log, "memory_before")
    assert not [*volume.glob("*/generations/*.memory-*")]


def test_a_life_that_ends_by_an_exception_is_not_taken_for_killed(job: Job) -> None:
    """Code of ours ran at its end, so its memory was not the reason."""
    job.write(GROWS)
    life = job.run(MIGRATOR_EVERY="5", FAILS="yes")
    assert life.wait() == 1, life.text
    assert "RuntimeError: enough" in life.text
    life = job.run(STEPS="1")
    assert life.wait() == 0, life.text

    assert not life.events("memory_before")


def test_a_ckpt_says_that_it_was_made_to_leave(job: Job) -> None:
    """By this the next life knows that the one before was not killed, if it looks before that one deletes its note."""
    job.write(GROWS)
    life = job.run(MIGRATOR_EVERY="off")
    until(lambda: note(job.root).exists(), "the note", context=lambda: life.text)
    life.kill()
    assert life.wait() == 143, life.text
    assert job.run(MIGRATOR_EVERY="off", UNTIL="saved").wait() == 0
    manifests = [Manifest.from_bytes(path.read_bytes()) for path in sorted(job.root.glob("*/*/manifest.json"))]

    assert [manifest.written.get("leaving") for manifest in manifests][:2] == [True, None]


# A real limit, and the real kernel.

LIMIT = 400 * MI
GROWS = """
import json, os, time
from pathlib import Path
if "GROUP" in os.environ:
    Path(os.environ["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
import torch
from torch import nn
from migrator import migrator
from migrator.platform import memory

model = nn.Linear(1000, 2000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"step": 0}
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.register("state", state)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
    print("resumed", state["step"], flush=True)
note = Path(os.environ["MIGRATOR_CKPT"], "default", "generations", "000001.memory-00000")

def peak():
    try:
        return json.loads(note.read_text())["peak"]
    except (OSError, ValueError):
        return 0

taken = []
while state["step"] < int(os.environ.get("STEPS", "1000000")):
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    migrator.safe_point()
    time.sleep(0.01)
    if "UNTIL" in os.environ and migrator.save_ckpt():
        break
    if "FAILS" in os.environ and peak():
        raise RuntimeError("enough")
    if "GROWS" not in os.environ or not peak():
        continue
    # Nearly all, and the rest when that is noted.
    limit = int(os.environ["GROWS"])
    if memory.of_container().used < 0.94 * limit or peak() >= 0.92 * limit:
        taken.append(bytearray(b"1") * (4 << 20))
"""


def own_group() -> Path | None:
    """The memory cgroup of this process, where it can be found."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup", *(["memory"] if controllers else []))
        if not controllers or "memory" in controllers.split(","):
            for group in (root / path.lstrip("/"), root):
                if (group / "memory.stat").exists():
                    return group
    return None


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A cgroup with a limit. Only few machines let a test make one."""
    parent = own_group()
    if parent is None:
        pytest.skip("LOUD: no cgroup of this process can be found, so no process can be given a limit of memory")
    group = parent / f"tests-{os.getpid()}-{tmp_path.name}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"LOUD: this machine lets no test make a cgroup with a limit of memory: {error}")
    try:
        names = [name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()]
        if not names:
            pytest.skip("LOUD: a cgroup made here has no limit of memory")
        (group / names[0]).write_text(str(LIMIT))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:

        def is_gone() -> bool:
            with contextlib.suppress(OSError):
                group.rmdir()
            return not group.exists()

        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        until(is_gone, "the end of the cgroup")


@pytest.mark.parametrize("is_in_place", [True, False], ids=["the same container", "a new one"])
def test_memory_that_really_ran_out_is_a_warning(job: Job, group: Path, is_in_place: bool) -> None:
    """Killed by the kernel at the limit of its cgroup. Where the kernel's count is still there, it is certain."""
    job.write(GROWS)
    life = job.run(MIGRATOR_EVERY="5", GROUP=str(group), GROWS=str(LIMIT))
    assert life.wait() == -signal.SIGKILL, life.text
    left = json.loads(note(job.root).read_text())
    assert 0.9 * LIMIT <= left["peak"] <= LIMIT
    assert left["limit"] == LIMIT

    again = job.run(STEPS="1", **({"GROUP": str(group)} if is_in_place else {}))
    assert again.wait() == 0, again.text
    (said,) = again.events("memory_before")
    assert int(said["limit_bytes"]) == LIMIT
    certain = "memory ran out in the life before, and the kernel killed 1 of its processes"
    assert (certain in said["means"]) == is_in_place, said
    condition = "" if is_in_place else r"if the pod says OOMKilled or exit code 137, "
    assert re.search(rf"; {condition}set resources\.limits\.memory above \d{{3}}Mi\"$", said["means"]), said
