"""The number that `python -m migrator.grace` prints is enough: a real pod is saved in it, on a slow volume."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from migrator import grace
from migrator.storage import posix
from migrator.testing import Kubelet
from tests.support.harness import ROOT

RATE = 1e6
"""Bytes a second that the volume takes, here and in the pod."""

SCRIPT = f"""
import time
import torch
from migrator import migrator
from migrator.storage import posix

write = posix.PosixUpload.write

def slow(self, buffers, *, hold=False):
    time.sleep(sum(map(len, buffers)) / {RATE})
    write(self, buffers, hold=hold)

posix.PosixUpload.write = slow
state, model = {{"step": 0}}, torch.nn.Linear(500, 500)
optimizer = torch.optim.AdamW(model.parameters())
migrator.register("state", state)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening(every="off")
if migrator.resume:
    migrator.load_ckpt()
for i in range(10**6):
    state["step"] += 1
    model(torch.ones(500)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    migrator.safe_point()
    if i == 2:
        print("trains", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "train.py"
    made.write_text(SCRIPT)
    return made


@pytest.fixture
def slow_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    write = posix.PosixUpload.write

    def slow(self: posix.PosixUpload, buffers: Sequence[memoryview], *, hold: bool = False) -> None:
        time.sleep(sum(map(len, buffers)) / RATE)
        write(self, buffers, hold=hold)

    monkeypatch.setattr(posix.PosixUpload, "write", slow)


@pytest.mark.usefixtures("fork_server", "slow_volume")
def test_a_pod_with_the_printed_grace_is_saved_and_one_with_much_less_is_not(
    kubelet: Kubelet, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a step, written by its own way, at the speed that was measured."""
    volume = kubelet.volume("ckpts")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ["--json", "--ckpt", str(volume), "--step-s=0.1", "--probes=1", "--timeout-s=60"]
    assert grace.main([*options, str(script)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)

    number = found["terminationGracePeriodSeconds"]
    assert found["bytes_per_s"] == pytest.approx(RATE, rel=0.3)
    assert found["parts_s"]["write"] > 2
    pod = kubelet.run([sys.executable, script], grace_s=number)
    pod.wait_for_log("trains")
    stop = pod.delete()
    assert (stop.exit_code, stop.hook.code, stop.kill_s) == (143, 0, None), pod.log
    saved = [*volume.glob("default/*/manifest.json")]
    assert len(saved) == 1

    # By SIGTERM alone, behind which a kubelet waits for two seconds at least.
    pod = kubelet.run([sys.executable, script], grace_s=1, pre_stop=None)
    pod.wait_for_log("trains")
    stop = pod.delete()
    assert stop.kill_s is not None, pod.log
    assert "grace_too_short" in pod.log
    assert [*volume.glob("default/*/manifest.json")] == saved
