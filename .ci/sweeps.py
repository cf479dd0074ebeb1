#!/usr/bin/env python3
"""The whole sweeps that a change deserves, by the files it changes, as far as they fit the time.

`make test` takes a sample of every sweep in each run. Here an area that a change touches is swept as a whole: all long
variants of its tests, nothing left out (`--whole`). The base is CI_BASE; else the branch `origin/main` where this one
is ahead of it; else the newest commit that is older than four hours.

A sweep that would not end in time is not begun, or cut off, and that is said. What was cut off found nothing wrong so
far. The time left is CI_SWEEPS_S seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SHORT_S = 60
"""What is left is not worth beginning with."""


@dataclass(frozen=True)
class Area:
    """Files of one kind, and what is to be swept where one of them changed."""

    name: str
    files: str
    """A regular expression of paths."""
    tests: tuple[str, ...]
    """Files whose long variants are run."""
    states: int = 0
    """Of the crash search."""

    def commands(self) -> list[list[str]]:
        found = []
        if self.states:
            found.append([PYTHON, "-m", "tests.crashes", f"--states={self.states}", f"--seed={os.getpid()}"])
        files = [f"tests/test_{name}.py" for name in self.tests]
        if files:
            options = ["-q", "-n", "4", "--dist", "worksteal", "-m", "long", "--whole"]
            found.append([PYTHON, "-m", "pytest", *options, *files])
        return found


AREAS = [
    Area(
        "storage and ckpt",
        r"migrator/(storage|blocks|parts|manifest|lineage|retention|saving|saver|loading|tree|legacy)\.py"
        r"|tests/(disk|crashes|kernel|bits|hostile)\.py|tests/test_(crashes|kernel_sweep|bits|hostile)\.py",
        ("kernel_sweep", "bits", "hostile", "as_if_nothing"),
        states=30_000,
    ),
    Area(
        "protocol of the ranks",
        r"migrator/(agreement|ranks|team|together|joint|sharing|gate|capture)\.py"
        r"|tests/(model|gang|rank_story|torchruns)\.py|tests/test_(agreement|ranks_\w+|torchrun)\.py",
        ("agreement", "event_sweep", "ranks_stop", "ranks_load", "ranks_lost", "ranks_idle", "torchrun"),
    ),
    Area(
        "hooks, news and leaving",
        r"hooks/|migrator/(signal_file|sigterm|watcher|leaving|life|loop|progress|canary)\.py|migrator/(testing|hooks)/"
        r"|tests/test_(hooks|hook_situations|kubelet|pods|healthy)\.py",
        ("hooks", "healthy", "ranks_lost", "event_sweep"),
    ),
    Area(
        "what is registered, and the loop",
        r"migrator/(kinds|registry|randomness|sampler|permutation|loop|settings|environment|canary|capture)\.py",
        ("as_if_nothing", "ranks_load"),
    ),
    Area(
        "what runs all others",
        r"tests/(conftest|harness|forkserver|script|warm|chance|guardian|story)\.py|Makefile|\.ci/|constraints\.txt",
        (),
        states=10_000,
    ),
]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def base() -> str:
    """The commit that the change is compared with; the empty tree if there is none."""
    given = os.environ.get("CI_BASE")
    if given:
        return given
    if git("rev-list", "origin/main..HEAD"):
        return git("merge-base", "origin/main", "HEAD")
    return git("rev-list", "-1", "--before=4 hours ago", "HEAD") or git("hash-object", "-t", "tree", os.devnull)


def deserved(changed: list[str]) -> list[Area]:
    return [area for area in AREAS if any(re.match(area.files, path) for path in changed)]


def run(command: list[str], left_s: float) -> int | None:
    """The exit code; None: it was cut off."""
    try:
        return subprocess.run(command, cwd=ROOT, check=False, timeout=left_s, stdin=subprocess.DEVNULL).returncode
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    end_s = time.monotonic() + float(os.environ.get("CI_SWEEPS_S", "600"))
    since = base()
    changed = git("diff", "--name-only", since, "HEAD").splitlines()
    areas = deserved(changed)
    print(f"sweeps: {len(changed)} files changed since {since[:12]}: {', '.join(a.name for a in areas) or 'none'}")
    for area in areas:
        for command in area.commands():
            shown, left_s = " ".join(command[2:]), end_s - time.monotonic()
            if left_s < SHORT_S:
                print(f"sweeps: NOT RUN, no time left ({area.name}): {shown}", flush=True)
                continue
            print(f"sweeps: {area.name}: {shown}", flush=True)
            start_s, code = time.monotonic(), run(command, left_s)
            took_s = time.monotonic() - start_s
            if code is None:
                print(f"sweeps: CUT OFF after {took_s:.0f} s without a failure ({area.name}): {shown}", flush=True)
            elif code not in (0, 5):  # 5: none of these files has a long variant
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
