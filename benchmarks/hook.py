"""What the preStop hook adds on top of the save, in each shell that is here.

    python benchmarks/hook.py [RUNS]

The trainer is a stub. It answers at once, and what is left is the hook alone; or after a time that is another one in
each run, and that is taken off: then the answer falls anywhere between two looks of the hook. Each run is set against
what no hook that waits with `sleep` can be quicker than, measured beside it: the start of the shell, and one sleep of
50 ms.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SHELLS = ("dash", "busybox sh", "bash")
HOOK = Path(__file__).resolve().parent.parent / "hooks" / "preStop.sh"
CLAIM_MS = 100.0


class Trainer(threading.Thread):
    """Answers each request after `saves_s`."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        from migrator.notice.signal_file import SignalFile

        self._file = SignalFile(path)
        self.saves_s = 0.0
        self.took_s = 0.0
        """From seeing the last request to its answer."""

    def listen(self) -> None:
        self._file.write("init", pids=os.getpid())

    def run(self) -> None:
        while True:
            found = self._file.read()
            if found is None or found.word != "save":
                time.sleep(0.0005)
                continue
            start_s = time.perf_counter()
            time.sleep(self.saves_s)
            request = found.fields["request"]
            self._file.write("resume", request=request, ckpt="000001-000000000001", step=1)
            self.took_s = time.perf_counter() - start_s


def timed_ms(command: list[str], **env: str) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, env={"PATH": os.environ["PATH"], **env}, check=True)
    return 1000 * (time.perf_counter() - start_s)


def measure(shell: list[str], runs: int, directory: Path) -> None:
    signal = directory / "signal"
    trainer = Trainer(signal)
    trainer.listen()
    trainer.start()
    draws = random.Random(0)
    limit, at_once, later = [], [], []
    for _ in range(runs):
        limit.append(timed_ms([*shell, "-c", "sleep 0.05"]))
        for saves_s, found in ((0.0, at_once), (draws.uniform(0.1, 0.2), later)):
            trainer.saves_s = saves_s
            trainer.listen()
            took_ms = timed_ms([*shell, str(HOOK)], MIGRATOR_SIGNAL=str(signal))
            found.append(took_ms - 1000 * (trainer.took_s if saves_s else 0.0))
    floor_ms = statistics.median(limit)
    for what, found in (("answered at once", at_once), ("in mid-wait", later)):
        median_ms, worst_ms = statistics.median(found), max(found)
        print(
            f"{' '.join(shell):10}  {what:16}  adds {median_ms:5.1f} ms, at worst {worst_ms:5.1f} ms; "
            f"a shell and one sleep take {floor_ms:4.1f} ms: {median_ms / floor_ms:4.2f} x; "
            f"under {CLAIM_MS:.0f} ms: {'yes' if worst_ms < CLAIM_MS else 'NO'}"
        )


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print(f"median and worst of {runs} runs each")
    for shell in SHELLS:
        if shutil.which(shell.split()[0]) is None:
            print(f"{shell:10}  is not here")
            continue
        with tempfile.TemporaryDirectory() as directory:
            measure(shell.split(), runs, Path(directory))


if __name__ == "__main__":
    main()
