"""What the demo takes from a cluster: pods that are started, deleted as kubelet does it, and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
GRACE_S = 30
DEADLINE_S = 300.0


class Pod:
    """One container: a training process, a signal file of its own, and hooks."""

    def __init__(self, directory: Path, volume: Path, place: dict[str, str]) -> None:
        directory.mkdir(parents=True)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MIGRATOR", "MIGRATION"))},
            **place,
            "MIGRATOR_CKPT": str(volume),
            "MIGRATOR_SIGNAL": str(directory / "signal"),
            "MIGRATOR_GRACE_S": str(GRACE_S),
            "OMP_NUM_THREADS": "1",
        }
        self.output = directory / "output.txt"

    def start(self, command: list[str]) -> None:
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, env=self.env, stdout=output, stderr=output)

    def stop(self, *, hook: bool) -> None:
        """As kubelet does it: preStop inside the grace, then SIGTERM."""
        if hook:
            subprocess.run(["sh", str(HERE.parent / "hooks" / "preStop.sh")], env=self.env, check=True, timeout=GRACE_S)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def event(self, name: str) -> dict[str, str]:
        """The fields of the newest log line of this name."""
        line = next(line for line in reversed(self.output.read_text().splitlines()) if f": {name} " in line)
        return dict(word.split("=", 1) for word in line.split(f": {name} ")[1].split() if "=" in word)


class Life:
    """One life of a job: a pod for each rank, all with the same volume. `ranks=0`: one process, no ranks."""

    def __init__(self, name: str, volume: Path, *, ranks: int, epochs: int) -> None:
        self.volume = volume
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        places = [{**job, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)] or [{}]
        self.pods = [Pod(volume.parent / f"{name}-{rank}", volume, place) for rank, place in enumerate(places)]
        (volume / "steps").mkdir(parents=True, exist_ok=True)
        log = f"--steps={volume / 'steps'}" if ranks else f"--log={volume / 'steps' / 'rank-0.jsonl'}"
        script = str(HERE / ("ddp.py" if ranks else "plain.py"))
        for pod in self.pods:
            pod.start([sys.executable, script, f"--epochs={epochs}", log, f"--weights={volume / 'weights.pt'}"])

    def wait(self) -> list[int]:
        return [pod.process.wait(DEADLINE_S) for pod in self.pods]

    def wait_for_end(self) -> None:
        if any(self.wait()):
            sys.exit(self.text)

    @property
    def text(self) -> str:
        return "\n".join(pod.output.read_text() for pod in self.pods)

    def wait_for_step(self, step: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while last_step(self.volume) < step:
            if any(pod.process.poll() is not None for pod in self.pods) or time.monotonic() > end_s:
                sys.exit(f"the trainer did not reach step {step}:\n{self.text}")
            time.sleep(0.002)

    def delete(self, pod: int, *, hook: bool) -> dict[str, object]:
        """One pod goes, the others are left to themselves: what it cost."""
        start_s = time.monotonic()
        self.pods[pod].stop(hook=hook)
        hook_s = time.monotonic() - start_s
        codes = self.wait()
        took_s = hook_s if hook else time.monotonic() - start_s
        leaving = self.pods[pod].event("leaving")
        return {
            "stopped by": "preStop.sh, then SIGTERM" if hook else "SIGTERM",
            "ranks": len(self.pods),
            "saved step": int(leaving["step"]),
            "news to commit, ms": f"{1000 * float(leaving['since_signal_s']):.0f}",
            "until done, ms": f"{1000 * took_s:.0f}",
            "bytes": leaving["bytes"],
            "steps lost": last_step(self.volume) - int(leaving["step"]),
            "exit codes": " ".join(map(str, codes)),
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def steps(volume: Path) -> list[list[dict]]:
    """What each rank wrote, life after life."""
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
