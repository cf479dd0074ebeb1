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
import threading
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
        r"migrator/(storage|ckpt|save|compat)/|migrator/state/last_storable\.py"
        r"|migrator/session/(restore|restore_plan|group_restore|candidates|resume)\.py"
        r"|migrator/platform/process_identity\.py|migrator/testing/s3_server\.py|tests/object_stores/"
        r"|tests/support/(disk|crashes|kernel|tracer|damaged_ckpt|hostile|volume|scripts/swept)\.py"
        r"|tests/sweeps/test_(crashes|kernel_calls|flipped_bits|hostile_files)\.py|tests/unit/ckpt/test_retention\.py",
        (
            *("sweeps/test_kernel_calls", "sweeps/test_crashes", "sweeps/test_flipped_bits"),
            *("sweeps/test_hostile_files", "unit/ckpt/test_retention", "jobs/test_as_never_stopped"),
            *("object_stores/test_faults", "object_stores/test_stops", "object_stores/test_contract"),
            "object_stores/test_fsspec",
        ),
        states=30_000,
    ),
    Area(
        "protocol of the ranks",
        r"migrator/(ranks|nodecheck)/|migrator/save/group/"
        r"|migrator/session/(rank_group|group_restore)\.py"
        r"|migrator/loop/(gate|safe_points|uneven_inputs)\.py|migrator/state/capture\.py"
        r"|tests/support/(model|rank_processes|rank_history|rank_threads|torchruns)\.py"
        r"|tests/support/scripts/(ranked|losing|eventful|agent|worker)\.py"
        r"|tests/(ranks|unit/ranks)/|tests/sweeps/test_events\.py",
        (
            *("unit/ranks/test_protocol", "sweeps/test_events", "ranks/test_stop", "ranks/test_load"),
            *(
                "ranks/test_lost_ranks",
                "ranks/test_idle",
                "ranks/test_nodecheck",
                "ranks/test_torchrun",
                "ranks/test_epoch_end",
            ),
            *("ranks/test_broken_connections", "ranks/test_waiting", "unit/ranks/test_many_ranks"),
            "unit/ranks/test_shared_log",
        ),
    ),
    Area(
        "hooks, notices and leaving",
        r"hooks/|yamls/|migrator/(notice|leaving|session)/|migrator/platform/(process_identity|launcher)\.py"
        r"|migrator/save/(progress|reply|leaving_mark_keeper)\.py|migrator/ckpt/leaving_mark\.py"
        r"|migrator/loop/(batches|followed_loop|safe_points)\.py|migrator/state/change_detector\.py"
        r"|migrator/(testing|hooks)/|tests/support/scripts/(podded|shim)\.py"
        r"|tests/pods/|tests/jobs/test_undisturbed_runs\.py",
        (
            *("pods/test_hooks", "jobs/test_undisturbed_runs", "pods/test_apply_and_delete"),
            *("ranks/test_lost_ranks", "sweeps/test_events"),
        ),
    ),
    Area(
        "what is registered, and the loop",
        r"migrator/(data|state|loop|platform)/|migrator/(settings|roots)\.py"
        r"|tests/support/scripts/(everything|ground|telling)\.py"
        r"|tests/jobs/test_(one_step_throughout|as_never_stopped|loops)\.py",
        ("jobs/test_as_never_stopped", "ranks/test_load", "jobs/test_one_step_throughout"),
    ),
    Area(
        "what runs all others",
        r"tests/conftest\.py|tests/support/(harness|forkserver|forked_script|warm_pods|chance|guardian|job_history)\.py"
        r"|Makefile|\.ci/|constraints\.txt|pyproject\.toml",
        (
            *("sweeps/test_events", "jobs/test_undisturbed_runs", "sweeps/test_kernel_calls", "ranks/test_stop"),
            "pods/test_apply_and_delete",
        ),
    ),
]


FAILURE = re.compile(r"(FAILED|ERROR) |=*\s*[0-9]+ (failed|error)")
"""The beginning of pytest's lines about them."""


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
    files = dict.fromkeys(f"tests/{name}.py" for area in areas for name in area.tests)
    if files:
        options = ["-x", "-q", "-n", "4", "--dist", "worksteal", "-m", "not sweep", "--whole"]
        found.append([PYTHON, "-m", "pytest", *options, *files])
    return found


def run(command: list[str], left_s: float) -> int | None:
    """The exit code; None: it was ended, since the time was up, and nothing had failed."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    failed: list[str] = []
    # What is interrupted exits as if it had not failed.
    reader = threading.Thread(target=_pass_on, args=(process, failed), daemon=True)
    reader.start()
    for sent in (signal.SIGINT, signal.SIGKILL):
        try:
            code = process.wait(left_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, sent)
            left_s = END_S
        else:
            reader.join(END_S)
            if sent == signal.SIGINT:
                return code
            return 1 if failed else None
    process.wait()
    reader.join(END_S)
    return 1 if failed else None


def _pass_on(process: subprocess.Popen[str], failed: list[str]) -> None:
    """Print what it prints, and note the lines that tell of failures."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            print(line, end="", flush=True)
            if FAILURE.match(line):
                failed.append(line)


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
