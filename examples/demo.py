"""The promise, shown: train, be stopped in mid-epoch, go on, and compare bit by bit.

    make demo

Runs examples/plain.py three times as kubelet would see it: once undisturbed; once stopped by the pod's
own preStop hook, followed by SIGTERM; once more, stopped by SIGTERM alone; and then to its end. Prints
what was saved and lost, and draws both loss curves over each other.
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

import torch

HERE = Path(__file__).resolve().parent
OUT = Path("demo-out").resolve()
EPOCHS = 6
SAMPLES = 1500
GRACE_S = 30
DEADLINE_S = 300.0


class Pod:
    """One container: a training process, a signal file of its own, and hooks."""

    def __init__(self, name: str, volume: Path) -> None:
        self.directory = OUT / name
        self.directory.mkdir(parents=True)
        self.volume = volume
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MIGRATOR", "MIGRATION"))},
            "MIGRATOR_CKPT": str(volume),
            "MIGRATOR_SIGNAL": str(self.directory / "signal"),
            "MIGRATOR_GRACE_S": str(GRACE_S),
            "OMP_NUM_THREADS": "1",
        }
        self.output = self.directory / "output.txt"

    def start(self) -> None:
        command = [sys.executable, str(HERE / "plain.py"), "--epochs", str(EPOCHS)]
        command += ["--log", str(self.volume / "steps.jsonl"), "--weights", str(self.volume / "weights.pt")]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, env=self.env, stdout=output, stderr=output)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def wait_for_step(self, step: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while len(steps(self.volume)) < step:
            if self.process.poll() is not None or time.monotonic() > end_s:
                sys.exit(f"the trainer did not reach step {step}:\n{self.output.read_text()}")
            time.sleep(0.002)

    def delete(self, *, hook: bool) -> float:
        """As kubelet does it: preStop inside the grace, then SIGTERM. Milliseconds until it was done."""
        start_s = time.monotonic()
        if hook:
            subprocess.run(["sh", str(HERE.parent / "hooks" / "preStop.sh")], env=self.env, check=True, timeout=GRACE_S)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        if not hook:
            self.process.wait(GRACE_S)
        return 1000 * (time.monotonic() - start_s)

    def event(self, name: str) -> dict[str, str]:
        """The fields of the newest log line of this name."""
        line = next(line for line in reversed(self.output.read_text().splitlines()) if f": {name} " in line)
        return dict(word.split("=", 1) for word in line.split(f": {name} ")[1].split() if "=" in word)


def steps(volume: Path) -> list[dict]:
    try:
        lines = (volume / "steps.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def wrong_samples(volume: Path) -> tuple[int, int]:
    """Samples that were missed and samples that were repeated, over all epochs."""
    seen = [Counter() for _ in range(EPOCHS)]
    for step in steps(volume):
        seen[step["epoch"]].update(step["ids"])
    missed = sum(SAMPLES - len(epoch) for epoch in seen)
    return missed, sum(count - 1 for epoch in seen for count in epoch.values())


def same_weights(one: Path, other: Path) -> bool:
    first, second = (torch.load(volume / "weights.pt", weights_only=True) for volume in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def draw(undisturbed: Path, stopped: Path, stops: list[int]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    for volume, style in ((undisturbed, {"lw": 4, "alpha": 0.35}), (stopped, {"lw": 1, "color": "black"})):
        found = steps(volume)
        axes.plot([s["step"] for s in found], [s["loss"] for s in found], label=volume.name, **style)
    for stop in stops:
        axes.axvline(stop, ls="--", lw=1, color="red", label="stopped and resumed" if stop == stops[0] else None)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="One run was stopped twice in mid-epoch. Which one?")
    axes.legend()
    path = OUT / "loss.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    whole, stopped = OUT / "undisturbed", OUT / "stopped"
    for volume in (whole, stopped):
        volume.mkdir(parents=True)

    print("training without a stop ...", flush=True)
    pod = Pod("pod-0", whole)
    pod.start()
    if pod.wait() != 0:
        sys.exit(pod.output.read_text())

    rows = []
    stops = []
    plan = ((70, True, "preStop.sh, then SIGTERM"), (170, False, "SIGTERM"))
    for number, (at_step, hook, how) in enumerate(plan, 1):
        print(f"training, to be stopped in mid-epoch by {how} ...", flush=True)
        pod = Pod(f"pod-{number}", stopped)
        pod.start()
        pod.wait_for_step(at_step)
        took_ms = pod.delete(hook=hook)
        code = pod.wait()
        last, leaving = steps(stopped)[-1]["step"], pod.event("leaving")
        saved = int(leaving["step"])
        stops.append(saved)
        rows.append(
            (
                how,
                saved,
                f"{1000 * float(leaving['since_signal_s']):.0f}",
                f"{took_ms:.0f}",
                leaving["bytes"],
                last - saved,
                code,
            )
        )
    print("training to the end ...", flush=True)
    pod = Pod("pod-3", stopped)
    pod.start()
    if pod.wait() != 0:
        sys.exit(pod.output.read_text())

    header = ("stopped by", "saved step", "news to commit, ms", "until done, ms", "bytes", "steps lost", "exit code")
    table = [header, *rows]
    widths = [max(len(str(row[i])) for row in table) for i in range(len(header))]
    print()
    for row in table:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    missed, repeated = wrong_samples(stopped)
    equal = same_weights(whole, stopped)
    losses_equal = [s["loss"] for s in steps(whole)] == [s["loss"] for s in steps(stopped)]
    print(f"\nsamples missed or repeated                       {missed + repeated}")
    print(f"weights equal to the run that was never stopped  {'yes' if equal else 'NO'}")
    print(f"every loss equal                                 {'yes' if losses_equal else 'NO'}")
    print(f"picture of both loss curves                      {draw(whole, stopped, stops).relative_to(Path.cwd())}")
    steps_lost = sum(row[5] for row in rows)
    codes = [row[6] for row in rows]
    if missed or repeated or steps_lost or not equal or not losses_equal or codes != [143, 143]:
        sys.exit("the promise was not kept")


if __name__ == "__main__":
    main()
