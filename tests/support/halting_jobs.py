"""Lives of `scripts/halting.py`: jobs that stand still at a request to their store until a test lets them go on."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.bucket import Bucket, reach
from tests.support.harness import ROOT, Job, Process, until

HALTING = ROOT / "tests" / "support" / "scripts" / "halting.py"


def stops(life: Process, halt: str) -> None:
    """Until the whole process stands still at this request."""
    life.wait_for(f"^halts {halt}$")
    state = Path(f"/proc/{life.pid}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the process to be stopped")


def wakes(life: Process) -> None:
    life.kill(signal.SIGCONT)
    life.wait_for("^goes on$")


def next_life(job: Job, store: Bucket, **env: str) -> Process:
    """The life after all others. It loads the furthest ckpt, of which every byte is right, and sweeps."""
    expected = store.whole()[0]
    life = job.run(**{"MIGRATOR_EVERY": "1", **env, "STEPS": str(reach(expected)[0] + 3)})
    assert life.wait() == 0, life.text
    assert [event["ckpt"] for event in life.events("loaded")] == [expected], life.text
    assert not life.events("ckpt_bad"), life.text
    return life


def said_of_saves(life: Process) -> dict[str, list[str]]:
    """The ckpts that a life says it committed, and what it says of failures."""
    return {
        "committed": [event["ckpt"] for event in life.events("committed")],
        "failed": [event["why"] for event in life.events("save_failed")],
    }


def pod(job: Job, number: int) -> str:
    """The signal file of another pod."""
    return str(job.directory / f"pod-{number}" / "signal")


def ends(life: Process, number: int = signal.SIGTERM) -> None:
    life.kill(number)
    assert life.wait() == 143, life.text
