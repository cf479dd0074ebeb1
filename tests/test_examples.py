"""Each example runs, is stopped, resumes, and keeps what its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.harness import ROOT, Job, until

PLAIN = ROOT / "examples" / "plain.py"
EPOCHS = ROOT / "examples" / "epochs.py"


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def test_the_plain_example_goes_on_within_its_epoch_as_if_nothing_had_happened(job: Job) -> None:
    """Stopped twice in mid-epoch, it ends with the weights of the run that was never stopped, every sample once."""
    job.use(PLAIN)
    whole = job.run("--epochs", "3", "--weights", "whole.pt", MIGRATOR_CKPT=str(job.directory / "whole"))
    log = job.directory / "steps.jsonl"
    for step in (20, 70):
        life = job.run("--epochs", "3", "--log", str(log))
        until(lambda step=step: lines(log) >= step, f"step {step}", context=lambda life=life: life.text)
        life.kill()
        assert life.wait() == 143, life.text
    last = job.run("--epochs", "3", "--log", str(log), "--weights", "stopped.pt")
    assert last.wait() == 0, last.text
    assert whole.wait() == 0, whole.text

    one, other = (torch.load(job.directory / name, weights_only=True) for name in ("whole.pt", "stopped.pt"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    for epoch in range(3):
        assert sorted(i for s in steps if s["epoch"] == epoch for i in s["ids"]) == list(range(1500))


def test_the_epochs_example_repeats_the_epoch_it_was_stopped_in_and_no_other(job: Job) -> None:
    """The predecessor's four lines: nothing torn, no finished epoch again, the interrupted one from its start."""
    job.use(EPOCHS)
    life = job.run("--epochs", "200")
    life.wait_for("^epoch 3:")
    life.kill()
    assert life.wait() == 143, life.text
    done = life.text.count("\nepoch ")
    second = job.run("--epochs", str(done + 2))
    assert second.wait() == 0, second.text
    assert f"goes on after epoch {done - 1}" in second.text
    assert f"\nepoch {done}: " in second.text
    assert f"\nepoch {done - 1}: " not in second.text


def test_the_demo_keeps_the_promise(tmp_path: Path) -> None:
    """`make demo`: stopped by the real hook and by SIGTERM, nothing lost, nothing repeated, every bit equal."""
    demo = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "samples missed or repeated                       0\n" in demo.stdout
    assert "weights equal to the run that was never stopped  yes\n" in demo.stdout
    assert (tmp_path / "demo-out" / "loss.png").stat().st_size > 10_000
