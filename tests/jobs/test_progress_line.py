"""The log of a whole job as KubeDL's autoscaler reads it, through stops, resumes and errors."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.kubedl import Seen, read

SCRIPT = """
import os
import time
import torch
from migrator import migrator

state, model = {"step": 0}, torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
migrator.register("state", state)
migrator.register(os.environ.get("NAME", "Epoch counter"), {})
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
while state["step"] < int(os.environ.get("STEPS", 10**9)):
    state["step"] += 1
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    migrator.progress(epoch=0, batch=state["step"], batches=500, latency_s=0.125, loss=1.0, accuracy=99.5)
    migrator.safe_point()
    if state["step"] == 3:
        time.sleep(float(os.environ.get("STUCK_S", "0")))
"""


def lines(text: str) -> list[Seen | None]:
    return [read(line) for line in text.split("\n")]


def test_a_line_is_there_at_once(job: Job) -> None:
    """Standard output is a file here, which Python writes in large pieces: the lines are seen while the job waits."""
    life = job.write(SCRIPT).run(STUCK_S="60")
    life.wait_for(r"^Epoch: \[0\]\[003/500\]")

    assert [seen for seen in lines(life.text) if seen] == [Seen(0, number, 0.125, 99.5) for number in (1, 2, 3)]


@pytest.mark.long  # the periodic save may come a safe point later than the script, which then sleeps, makes any
def test_no_line_of_a_job_confuses_or_crashes_the_autoscaler(job: Job) -> None:
    """Stopped, resumed, and ended by an error, with the word in the paths, the job's name and what is registered."""
    odd = {
        "MIGRATOR_CKPT": str(job.directory / "Epoch" / "of\tEpoch 3"),
        "MIGRATOR_JOB": "Epoch",
        "MIGRATOR_EVERY": "2",
        "MIGRATOR_Epoch": "3",
    }
    job.write(SCRIPT)
    lives = [job.run(STUCK_S="60", **odd)]
    lives[0].wait_for("committed")
    lives[0].wait_for("003/500")
    lives[0].kill()
    assert lives[0].wait() == 143, lives[0].text
    lives.append(job.run(STEPS="6", **odd))
    assert lives[1].wait() == 0, lives[1].text
    lives.append(job.run(NAME="EpochMeter", **odd))
    assert lives[2].wait() == 1, lives[2].text

    assert "CkptMismatch" in lives[2].text, lives[2].text
    assert r"E\pochMeter" in lives[2].text, lives[2].text
    for life in lives:
        batches = [seen.batch for seen in lines(life.text) if seen]
        assert batches == sorted(set(batches)), life.text
        assert len(batches) == life.text.count("Epoch: ["), life.text
