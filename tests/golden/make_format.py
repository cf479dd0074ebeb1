"""Makes the golden ckpts of the present format, which every later version has to load.

    python -m tests.golden.make_format tests/golden/format-2

Each kind of job (`job.py`) runs once to its end, which says what every value is at step AT and what comes of it, and
once to step AT, where it is stopped as by a pod that goes; some on their way there as well. What is kept is the volume
as it was left, with the records of lives and ranks, and what the first run wrote.

To be run once for each format, from the top of the repository. What it made is kept for good, and made anew only as
long as no version of the package was released that writes it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = {"one": 1, "channels-last": 1, "everything": 1, "two-ranks": 2}
"""How many each kind has."""
STOPS = {"one": ["4", "7"]}
"""Where its lives are stopped, if there is more than one."""
LARGE = ("everything", "two-ranks")
"""Of these a ckpt has all that only large state has: parts of ranks' own, several shares, arrays in parts."""
SCRIPT = "tests/golden/job.py"  # without the place of the repository: records keep it


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(kind: str, size: int, directory: Path, **env: str) -> list[int]:
    """One life; the exit codes of its ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    place = {name: value for name, value in os.environ.items() if not name.startswith("MIGRAT")}
    place |= {"MIGRATOR_CKPT": str(directory), "HOSTNAME": "trainer", "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    place |= {"KIND": kind, "OUT": str(directory), **({"SMALL": "1"} if kind in LARGE else {}), **env}
    if size > 1:
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    ranks = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
        signal = {"MIGRATOR_SIGNAL": str(directory / f"pod-{rank}" / "signal")}
        ranks.append(subprocess.Popen([sys.executable, SCRIPT], env={**place, **own, **signal}))
    try:
        return [process.wait(120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def main(target: Path) -> None:
    for kind, size in RANKS.items():
        with tempfile.TemporaryDirectory() as name:
            unstopped, stopped = Path(name) / "unstopped", Path(name) / "stopped"
            assert run(kind, size, unstopped) == [0] * size
            for step in STOPS.get(kind, ["7"]):
                assert run(kind, size, stopped, STOP=step) == [143] * size
            shutil.rmtree(target / kind, ignore_errors=True)
            shutil.copytree(stopped / "default", target / kind / "default")
            for path in sorted(unstopped.glob("*.json")):
                shutil.copy(path, target / kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
