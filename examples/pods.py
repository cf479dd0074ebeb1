"""The part of a cluster that the demo needs: pods that are started, deleted as kubelet does it, and started again."""

import json
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from migrator.testing import Kubelet
from migrator.testing.s3_server import S3Server, why_not

HERE = Path(__file__).resolve().parent
DEADLINE_S = 300.0
BUCKET = "demo"


class Cluster:
    """Pods, each with the volume of its job. If there is a server, the ckpts are in its bucket, and all else is not."""

    def __init__(self, kubelet: Kubelet, server: S3Server | None) -> None:
        self.kubelet = kubelet
        self.server = server

    def env(self, volume: Path) -> dict[str, str]:
        """What a pod needs to find its ckpts."""
        if self.server is None:
            return {"MIGRATOR_CKPT": "/ckpts"}
        return {**self.server.env(), "MIGRATOR_CKPT": f"s3://{BUCKET}/{volume.name}"}

    def copy(self, volume: Path, to: Path) -> None:
        """A second job goes on from where this one is."""
        shutil.copytree(volume, to)
        if self.server is not None:
            self.bucket.copy(f"{BUCKET}/{volume.name}", f"{BUCKET}/{to.name}", recursive=True)

    def ckpts(self) -> list[str]:
        """Where the ckpts of all jobs are."""
        if self.server is None:
            found = self.kubelet.directory.glob("*/default/*/manifest.json")
            return sorted(str(path.parent.relative_to(Path.cwd())) for path in found)
        found = self.bucket.glob(f"{BUCKET}/*/default/*/manifest.json")
        return sorted(f"s3://{path.removesuffix('/manifest.json')}" for path in found)

    @property
    def bucket(self):
        import s3fs

        env = self.server.env()
        keys = {"key": env["AWS_ACCESS_KEY_ID"], "secret": env["AWS_SECRET_ACCESS_KEY"]}
        return s3fs.S3FileSystem(**keys, endpoint_url=env["AWS_ENDPOINT_URL"], use_listings_cache=False)


@contextmanager
def begin(directory: Path, *, s3: bool) -> Iterator[Cluster]:
    """At its end, also after an error or Ctrl-C, all pods that still run are stopped, and then the S3 server."""
    if s3 and why_not():
        sys.exit(why_not())
    with ExitStack() as stack:
        server = stack.enter_context(S3Server(directory)) if s3 else None
        if server is not None:
            server.make_bucket(BUCKET)
        yield Cluster(stack.enter_context(Kubelet(directory)), server)


class Life:
    """One life of a job: a pod for each rank, all with the same volume. `ranks=0`: one process, no ranks."""

    def __init__(self, cluster: Cluster, name: str, volume: Path, *, ranks: int, epochs: int) -> None:
        self.volume = volume
        job = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        job |= cluster.env(volume)
        places = [{**job, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)] or [job]
        (volume / "steps").mkdir(parents=True, exist_ok=True)
        log = "--steps=/ckpts/steps" if ranks else "--log=/ckpts/steps/rank-0.jsonl"
        command = ["python", HERE / ("ddp.py" if ranks else "plain.py"), f"--epochs={epochs}", log]
        command.append("--weights=/ckpts/weights.pt")
        self.pods = [
            cluster.kubelet.run(command, name=f"{name}-{rank}", env=place, volumes={"/ckpts": volume})
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
