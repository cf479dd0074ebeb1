"""What pauses between the writes of periodic saves gain for a loop that reads its data from the same disk.

    python benchmarks/pace.py [--mb 1000] [--rounds 3] [--json FILE]

The loop takes a batch that threads read ahead, past the page cache, waits `STEP_S` for a device, and makes the step of
a real AdamW. It trains for `LIFE_S`, without saves, with saves every `EVERY_S` at full speed, and with saves as they
are; the three take turns. Only the second half of each life counts: in the first one, the package finds out that the
saves slow the loop, and slows them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WAYS = ("no saves", "at full speed", "as it is")
BATCH = 32 << 20
AHEAD = 4
STEP_S = 0.02
EVERY_S = 4.0
LIFE_S = 64.0
DATA = 2 << 30
"""Bytes of the file of the batches, which are read again and again."""


def read_ahead(path: Path, batches: queue.Queue[int], is_over: threading.Event) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, BATCH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = 0
    while not is_over.is_set():
        os.preadv(fd, [memory], at)
        at = (at + BATCH) % DATA
        while not is_over.is_set():
            try:
                batches.put(at, timeout=0.1)
                break
            except queue.Full:
                continue
    os.close(fd)


def live(way: str, megabytes: int, directory: Path) -> None:
    import torch
    from suite import Training

    from migrator import migrator
    from migrator.save import pace

    torch.set_num_threads(1)
    training = Training(megabytes)
    if way == "at full speed":
        pace.STRIKES = 1 << 30
    migrator.register("model", training.model)
    migrator.register("optimizer", training.optimizer)
    every = "off" if way == "no saves" else f"{EVERY_S:.0f}s"
    migrator.listening(ckpt=str(directory / "ckpts"), signal=str(directory / "signal"), every=every, keep=2)
    batches: queue.Queue[int] = queue.Queue(AHEAD)
    is_over = threading.Event()
    reader = threading.Thread(target=read_ahead, args=(directory / "data", batches, is_over))
    reader.start()
    steps_s: list[float] = []
    begin_s = last_s = time.perf_counter()
    while last_s - begin_s < LIFE_S:
        batches.get()
        time.sleep(STEP_S)
        training.step()
        migrator.safe_point()
        now_s = time.perf_counter()
        steps_s.append(now_s - last_s)
        last_s = now_s
    is_over.set()
    reader.join()
    half = steps_s[len(steps_s) // 2 :]
    print(json.dumps({"mean_s": statistics.mean(half), "median_s": statistics.median(half)}), flush=True)
    os._exit(0)  # what a process does at its end is not measured


def main() -> None:
    if sys.argv[1:2] == ["--life"]:
        live(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(chosen.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="pace-", dir=Path.cwd()) as made:
                data = Path(made) / "data"
                with data.open("wb") as file:
                    for _ in range(DATA // BATCH):
                        file.write(os.urandom(1 << 20) * (BATCH >> 20))
                    os.fsync(file.fileno())
                command = [sys.executable, __file__, "--life", way, str(chosen.mb), made]
                ended = subprocess.run(command, capture_output=True, text=True, check=False)
                if ended.returncode:
                    raise SystemExit(ended.stderr)
                found[way].append(json.loads(ended.stdout.splitlines()[-1]))
    result: dict[str, Any] = {}
    for way in WAYS:
        step_s = statistics.median(one["mean_s"] for one in found[way])
        result[way] = {"step_s": step_s, "all": found[way]}
        loss = step_s / result["no saves"]["step_s"] - 1
        print(f"{way:14} a step takes {1e3 * step_s:6.1f} ms in the mean: {100 * loss:5.2f} % more than without saves")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
