"""What several ranks cost while nothing happens, and how soon all of them are saved when something does.

    python benchmarks/ranks.py

Real processes and real gloo groups over loopback. Idle: the same DDP loop by itself, with migrator, and with the
all-reduce of one flag per step that libraries use which decide in the loop. Leaving: from the notice on one rank to the
commit for all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 800
STOPS = 5
WARM_UP = 100


def train(way: str, steps: int) -> None:
    """One rank. Prints microseconds per step and of the thread that watches the board."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    from migrator import migrator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if way == "migrator":
        migrator.register("model", wrapped)
        migrator.register("optimizer", optimizer)
        migrator.listening(every="off")
    x, y, flag = torch.randn(64, 784), torch.randint(0, 10, (64,)), torch.zeros(1)
    start_s, cpu_s = 0.0, 0.0
    for step in range(steps):
        if step == WARM_UP:
            start_s, cpu_s = time.perf_counter(), board_cpu_s()
            print("trains", flush=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        if way == "migrator":
            migrator.safe_point()
        elif way == "flag":
            distributed.all_reduce(flag)
    took_s = time.perf_counter() - start_s
    print(json.dumps({"us": 1e6 * took_s / (steps - WARM_UP), "board": (board_cpu_s() - cpu_s) / took_s}), flush=True)
    distributed.destroy_process_group()


def board_cpu_s() -> float:
    """CPU seconds of the thread that asks the store."""
    import threading

    for thread in threading.enumerate():
        if thread.name == "migrator-ranks":
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def start(size: int, way: str, steps: int, directory: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "MIGRATOR_CKPT": str(directory), "OMP_NUM_THREADS": "1"}
        env |= {"MIGRATOR_SIGNAL": str(directory / f"pod-{rank}" / "signal"), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, way, str(steps)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return ranks


def wait_for_training(rank: subprocess.Popen[str]) -> None:
    assert rank.stdout is not None
    for line in rank.stdout:
        if line == "trains\n":
            return
    raise SystemExit("a rank ended before it trained")


def idle(size: int) -> None:
    told: dict[str, list[dict[str, Any]]] = {"alone": [], "migrator": [], "flag": []}
    for _ in range(3):
        for way, found in told.items():
            with tempfile.TemporaryDirectory() as directory:
                texts = [rank.communicate()[0] for rank in start(size, way, STEPS, Path(directory))]
                found.append(json.loads(texts[0].splitlines()[-1]))
    us = {way: statistics.median(one["us"] for one in found) for way, found in told.items()}
    board = statistics.median(one["board"] for one in told["migrator"])
    print(
        f"{size} ranks, per step: alone {us['alone']:.0f} us, with migrator {us['migrator']:.0f} us "
        f"({us['migrator'] / us['alone']:.3f} x), with a flag's all-reduce {us['flag']:.0f} us "
        f"({us['flag'] / us['alone']:.3f} x); the board's thread: {100 * board:.2f} % of a core"
    )


def leave(size: int) -> None:
    took_ms = []
    for _ in range(STOPS):
        with tempfile.TemporaryDirectory() as directory:
            ranks = start(size, "migrator", 10_000_000, Path(directory))
            for rank in ranks:
                wait_for_training(rank)
            ranks[-1].send_signal(signal.SIGTERM)
            texts = [rank.communicate()[0] for rank in ranks]
            assert all(rank.returncode == 143 for rank in ranks), texts
            took_ms.append(1000 * max(float(re.findall(r"since_signal_s=(\S+)", text)[0]) for text in texts))
    print(
        f"{size} ranks, notice on one of them to the answer on all: {statistics.median(took_ms):.0f} ms "
        f"(of {STOPS}: {min(took_ms):.0f} to {max(took_ms):.0f})"
    )


def main() -> None:
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
        return
    for size in (2, 4, 8):
        leave(size)
    idle(2)


if __name__ == "__main__":
    main()
