"""The part of a cluster that the demo needs: pods that are started, deleted as kubelet does it, and started again."""

import json
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from migrator.testing import Kubelet

HERE = Path(__file__).resolve().parent
DEADLINE_S = 300.0


class Life:
    """One life of a job: a pod for each rank, all with the same volume. `ranks=0`: one process, no ranks."""

    def __init__(self, kubelet: Kubelet, name: str, volume: Path, *, ranks: int, epochs: int) -> None:
        self.volume = volume
        job = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [{**job, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)] or [job]
        (volume / "steps").mkdir(parents=True, exist_ok=True)
        log = "--steps=/ckpts/steps" if ranks else "--log=/ckpts/steps/rank-0.jsonl"
        command = ["python", HERE / ("ddp.py" if ranks else "plain.py"), f"--epochs={epochs}", log]
        command.append("--weights=/ckpts/weights.pt")
        self.pods = [
            kubelet.run(command, name=f"{name}-{rank}", env=place, volumes={"/ckpts": volume})
            for rank, place in enumerate(places)
        ]

    def wait_for_end(self) -> None:
        if any(pod.wait(DEADLINE_S).exit_code for pod in self.pods):
            sys.exit(self.text)

    @property
    def text(self) -> str:
        return "\n".join(pod.log for pod in self.pods)

    def wait_for_step(self, step: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while last_step(self.volume) < step:
            if any(pod.is_over.is_set() for pod in self.pods) or time.monotonic() > end_s:
                sys.exit(f"the trainer did not reach step {step}:\n{self.text}")
            time.sleep(0.002)

    def delete(self, number: int, *, hook: bool) -> dict[str, object]:
        """Deletes one pod, waits until all have ended, and returns what the stop cost."""
        pod = self.pods[number]
        stop = pod.delete(hooks=1 if hook else 0)
        stops = [one.wait(DEADLINE_S) for one in self.pods]
        leaving = event(pod.log, "leaving")
        return {
            "stopped by": "preStop.sh, then SIGTERM" if hook else "SIGTERM",
            "ranks": len(self.pods),
            "saved step": int(leaving["step"]),
            "notice to commit, ms": f"{1000 * float(leaving['since_signal_s']):.0f}",
            "until gone, ms": f"{1000 * stop.took_s:.0f}",
            "bytes": leaving["bytes"],
            "steps lost": last_step(self.volume) - int(leaving["step"]),
            "exit codes": " ".join(str(one.exit_code) for one in stops),
        }


def event(text: str, name: str) -> dict[str, str]:
    """The fields of the newest log line of this name."""
    line = next(line for line in reversed(text.splitlines()) if f": {name} " in line)
    return dict(word.split("=", 1) for word in line.split(f": {name} ")[1].split() if "=" in word)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def steps(volume: Path) -> list[list[dict]]:
    """The lines that each rank wrote, life after life."""
    files = sorted(volume.glob("steps/*.jsonl"))
    return [[json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in files]


def last_step(volume: Path) -> int:
    ends = [file.read_text().split("\n")[-2:-1] for file in volume.glob("steps/*.jsonl")]
    return max((json.loads(line)["step"] for end in ends for line in end), default=0)


def samples(volume: Path) -> list[Counter]:
    """How often each sample was trained, epoch by epoch, by all ranks together."""
    seen: dict[int, Counter] = {}
    for step in (step for rank in steps(volume) for step in rank):
        seen.setdefault(step["epoch"], Counter()).update(step["ids"])
    return [seen[epoch] for epoch in sorted(seen)]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (torch.load(volume / "weights.pt", weights_only=True) for volume in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def same_losses(one: Path, other: Path) -> bool:
    first, second = ([[s["loss"] for s in rank] for rank in steps(volume)] for volume in (one, other))
    return first == second
