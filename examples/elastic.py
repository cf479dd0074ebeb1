"""One training on 2, then 3, then 1 ranks: stopped in mid-epoch twice, and every sample is trained once per epoch.

    python examples/elastic.py

Each life is an ordinary `torchrun` of examples/ddp.py on this machine. SIGTERM to torchrun is what it gets when
its pod is taken away. No option tells the next life how many ranks the previous one had.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

EPOCHS = 3
SAMPLES = 1500
OUT = Path("elastic-out").resolve()
STEPS = OUT / "steps"

environment = {
    **os.environ,
    "MIGRATOR_CKPT": str(OUT / "ckpts"),
    "MIGRATOR_SIGNAL": str(OUT / "signal"),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def torchrun(ranks: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", str(Path(__file__).with_name("ddp.py")), f"--epochs={EPOCHS}"]
    command += [f"--steps={STEPS}", f"--weights={OUT / 'weights.pt'}"]
    return subprocess.Popen(command, env=environment, stderr=(OUT / f"on-{ranks}-ranks.txt").open("w"))


def trained() -> list[dict]:
    """The lines that all ranks of all lives wrote: epoch, step, ids."""
    return [json.loads(line) for file in STEPS.glob("*.jsonl") for line in file.read_text().split("\n")[:-1]]


def wait_until_trained(samples: int, life: subprocess.Popen) -> None:
    while sum(len(step["ids"]) for step in trained()) < samples:
        if life.poll() is not None:
            sys.exit(f"torchrun ended with {life.returncode}, see {OUT}")
        time.sleep(0.005)


shutil.rmtree(OUT, ignore_errors=True)
OUT.mkdir()
for ranks, stop_after in ((2, 500), (3, 2500), (1, None)):
    life = torchrun(ranks)
    if stop_after:
        wait_until_trained(stop_after, life)
        life.send_signal(signal.SIGTERM)
    code = life.wait()
    last = max(trained(), key=lambda step: step["step"])
    print(f"ranks {ranks}: {'stopped' if code else 'ended'} at step {last['step']}, epoch {last['epoch']}", flush=True)

for epoch in range(EPOCHS):
    times = Counter(sample for step in trained() if step["epoch"] == epoch for sample in step["ids"])
    often = Counter(times[sample] for sample in range(SAMPLES))
    print(f"epoch {epoch}: " + ", ".join(f"{often[count]} samples trained {count}x" for count in sorted(often)))
