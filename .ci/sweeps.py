#!/usr/bin/env python3
"""The whole sweeps that a change deserves, by the files it changes, as far as they fit the time.

`make test` takes a sample of every sweep in each run. Here the tests of an area that a change touches run as a whole:
with their long variants, and nothing left out (`--whole`).

The base of the change is CI_BASE; else where this branch left `origin/main`; else the newest commit that is older than
four hours; else the commit before this one. CI_SWEEPS_S is the time in seconds. A sweep starts if a minute is left,
and is ended when the time is up. That is printed, and is no failure: it stops at its first failure by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SHORT_S = 60
"""With less time left, no sweep is started."""
END_S = 20
"""How long a sweep that is ended may take to end what it has started."""


@dataclass(frozen=True)
class Area:
    """Files of one kind, and what runs where one of them changed."""

    name: str
    files: str
    """A regular expression of paths."""
    tests: tuple[str, ...]
    """The tests that run as a whole."""
    states: int = 0
    """Of the crash search."""


AREAS = [
    Area(
        "storage and ckpt",
        r"migrator/(storage|blocks|parts|manifest|lineage|retention|saving|saver|loading|tree|legacy)\.py"
        r"|migrator/(storable|heartbeat|identity)\.py"
        r"|tests/(disk|crashes|kernel|tracer|bits|hostile)\.py|tests/jobs/swept\.py"
        r"|tests/test_(crashes|kernel_sweep|bits|hostile|retention)\.py",
        ("kernel_sweep", "crashes", "bits", "hostile", "retention", "as_if_nothing"),
        states=30_000,
    ),
    Area(
        "protocol of the ranks",
        r"migrator/(agreement|ranks|team|together|joint|sharing|gate|capture)\.py"
        r"|migrator/(pace|shared_log|bell|large_values|meeting|regroup|uneven)\.py"
        r"|tests/(model|gang|rank_story|torchruns)\.py|tests/jobs/(ranked|losing|eventful|agent|worker)\.py"
        r"|tests/test_(agreement|event_sweep|ranks_\w+|torchrun|gang)\.py",
        (
            *("agreement", "event_sweep", "ranks_stop", "ranks_load", "ranks_lost", "ranks_idle", "torchrun"),
            *("ranks_turns", "ranks_wire", "ranks_patience", "crowd", "shared_log"),
        ),
    ),
    Area(
        "hooks, notices and leaving",
        r"hooks/|yamls/|migrator/(signal_file|sigterm|watcher|leaving|life|loop|progress|canary)\.py"
        r"|migrator/(signal_owner|sigaction|lookout|ending|last_word|heartbeat|identity|launcher)\.py"
        r"|migrator/(testing|hooks)/|tests/jobs/(podded|shim)\.py"
        r"|tests/test_(hooks|hook_situations|kubelet|pods|healthy|story|yamls)\.py",
        ("hooks", "healthy", "story", "ranks_lost", "event_sweep"),
    ),
    Area(
        "what is registered, and the loop",
        r"migrator/(kinds|registry|randomness|sampler|permutation|loop|settings|environment|canary|capture)\.py"
        r"|migrator/(storable|place|between|replay|unfollowed|frames|iteration|counters|buckets|comm_hooks)\.py"
        r"|tests/jobs/(everything|ground|telling)\.py|tests/test_(no_tear|as_if_nothing|loops)\.py",
        ("as_if_nothing", "ranks_load", "no_tear"),
    ),
    Area(
        "what runs all others",
        r"tests/(conftest|harness|forkserver|script|warm|chance|guardian|story)\.py"
        r"|Makefile|\.ci/|constraints\.txt|pyproject\.toml",
        ("event_sweep", "healthy", "kernel_sweep", "ranks_stop", "story"),
    ),
]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def first(*ways: tuple[str, ...]) -> str:
    """The first of these commits that there is."""
    for words in ways:
        with contextlib.suppress(subprocess.CalledProcessError):
            found = git(*words)
            if found and found != git("rev-parse", "HEAD"):
                return found
    # No commit is left to compare with: everything counts as changed.
    return git("hash-object", "-t", "tree", os.devnull)


def base() -> str:
    if os.environ.get("CI_BASE"):
        return git("rev-parse", "--verify", f"{os.environ['CI_BASE']}^{{commit}}")
    return first(
        ("merge-base", "origin/main", "HEAD"),
        ("rev-list", "-1", "--before=4 hours ago", "HEAD"),
        ("rev-parse", "--verify", "HEAD~1"),
    )


def areas_of(changed: list[str]) -> list[Area]:
    return [area for area in AREAS if any(re.match(area.files, path) for path in changed)]


def commands(areas: list[Area]) -> list[list[str]]:
    """Each test file once, whatever number of areas asks for it."""
    found = []
    states = max((area.states for area in areas), default=0)
    if states:
        found.append([PYTHON, "-m", "tests.support.crashes", f"--states={states}", f"--seed={os.getpid()}"])
    files = dict.fromkeys(f"tests/test_{name}.py" for area in areas for name in area.tests)
    if files:
        options = ["-x", "-q", "-n", "4", "--dist", "worksteal", "-m", "not sweep", "--whole"]
        found.append([PYTHON, "-m", "pytest", *options, *files])
    return found


def run(command: list[str], left_s: float) -> int | None:
    """The exit code; None: it was ended, since the time was up."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    for sent in (signal.SIGINT, signal.SIGKILL):
        try:
            code = process.wait(left_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, sent)
            left_s = END_S
        else:
            return code if sent == signal.SIGINT else None
    process.wait()
    return None


def main() -> int:
    end_s = time.monotonic() + float(os.environ.get("CI_SWEEPS_S", "600"))
    since = base()
    changed = git("diff", "--name-only", since, "HEAD").splitlines()
    areas = areas_of(changed)
    print(f"sweeps: {len(changed)} files changed since {since[:12]}: {', '.join(a.name for a in areas) or 'no area'}")
    for command in commands(areas):
        shown, left_s = " ".join(command[2:]), end_s - time.monotonic()
        if left_s < SHORT_S:
            print(f"sweeps: NOT RUN, no time left: {shown}", flush=True)
            continue
        print(f"sweeps: {shown}", flush=True)
        start_s, code = time.monotonic(), run(command, left_s)
        if code is None:
            print(f"sweeps: ENDED after {time.monotonic() - start_s:.0f} s without a failure: {shown}", flush=True)
        elif code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
