"""`python -m migrator.grace`: which terminationGracePeriodSeconds a job needs, with the parts it is made of.

    python -m migrator.grace 3GB --ckpt /ckpts                how long 3 GB take to this place
    python -m migrator.grace --ckpt s3://bucket/prefix        the newest ckpt of the job there
    python -m migrator.grace --ckpt /ckpts train.py --lr 0.1  as much as this script would save

The time from the notice to the commit is the sum of what happens one after another: the notice is seen, the loop comes
to a safe point, the ranks agree, the bytes are written, the ckpt is committed. How fast the place takes bytes is
measured there, with files like those of a save. Everything else is given, or a figure that is named in the output.

Nothing of the job is touched: what is written lies in a directory of its own under the root, and is deleted. A script
is run until its first step is over, on a root of its own.

The price: a place that is slower at the moment of the stop than now is covered by the margin alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from migrator import settings
from migrator.ckpt import catalog, generations
from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest
from migrator.ckpt.names import GENERATIONS, MANIFEST, manifest_name
from migrator.errors import MigratorError, NoUsableCkpt, SettingsError, UsageError
from migrator.events import without_epoch
from migrator.ranks.timing import Timing
from migrator.save import measured
from migrator.storage import bandwidth
from migrator.storage.base import Storage
from migrator.storage.locate import storage_at

NOTICE_S = 0.25
"""Seconds until the notice is seen: where inotify does not work the signal file is looked at every 0.2 s."""
STEP_S = 1.0
"""Seconds of the longest step, unless the caller knows it."""
SMALL_FILES = 4
"""Small files that are written one after another in a last save: mark, record of a rank, manifest, answer."""
MARGIN = 1.5
"""A save should take no more than 0.7 of the time it has (`save_too_long`): 1 / 0.7, and a little."""
END_S = 2.0
"""Seconds that the process may take to end behind the commit, before it is ended by force."""
LEAST_S = 5
"""A shorter grace is not worth it: starting a hook or a late turn of the processor takes a part of a second."""
PROBE_MB = 256
"""MB of a file that is written to measure, at most."""
PROBES = 3
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_END_OF_SCRIPT_S = 40.0
"""Seconds that a script has to end when it is not waited for any more: torchrun gives its ranks 30 s."""


@dataclass(frozen=True)
class State:
    """What has to be saved."""

    size: int
    ranks: int
    how: str
    """How the size is known."""
    took_s: float | None = None
    """Seconds that a save of it took."""


@dataclass(frozen=True)
class Part:
    """One of the times that follow one another."""

    name: str
    seconds: float
    why: str


@dataclass(frozen=True)
class Plan:
    """The answer."""

    state: State
    ranks: int
    bytes_per_s: float
    bandwidth: str
    parts: tuple[Part, ...]
    margin: float

    @property
    def sum_s(self) -> float:
        """From the notice to the commit."""
        return sum(part.seconds for part in self.parts)

    @property
    def grace_s(self) -> int:
        """The number for the yaml."""
        return max(LEAST_S, math.ceil(self.margin * self.sum_s + END_S))

    def to_json(self) -> dict[str, Any]:
        return {
            "terminationGracePeriodSeconds": self.grace_s,
            "bytes": self.state.size,
            "ranks": self.ranks,
            "bytes_per_s": round(self.bytes_per_s),
            "parts_s": {part.name: round(part.seconds, 3) for part in self.parts},
            "sum_s": round(self.sum_s, 3),
            "margin": self.margin,
            "end_s": END_S,
        }

    def to_text(self) -> str:
        rows = [("", "seconds", ""), *((part.name, f"{part.seconds:.2f}", part.why) for part in self.parts)]
        rows += [
            ("notice to commit", f"{self.sum_s:.2f}", ""),
            ("with the margin", f"{self.margin * self.sum_s:.2f}", f"times {self.margin:g}"),
            ("end of the process", f"{END_S:.2f}", ""),
            ("grace", f"{self.grace_s}", "rounded up" if self.grace_s > LEAST_S else f"at least {LEAST_S}"),
        ]
        table = "\n".join(f"{name:<20}{number:>9}  {why}".rstrip() for name, number, why in rows)
        return (
            f"state      {_shown(self.state.size)}, {self.state.how}\n"
            f"bandwidth  {_shown(self.bytes_per_s)}/s, {self.bandwidth}\n\n{table}\n\n{self.to_yaml()}"
        )

    def to_yaml(self) -> str:
        """Lines for the pod's spec."""
        return (
            f"terminationGracePeriodSeconds: {self.grace_s}\n"
            "containers:\n"
            "  - env:\n"
            f'      - {{name: MIGRATOR_GRACE_S, value: "{self.grace_s}"}}\n'
            f'      - {{name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "{self.grace_s}"}} # only torchrun reads it'
        )


def plan(state: State, speed: bandwidth.Bandwidth, *, step_s: float, is_given: bool, ranks: int, margin: float) -> Plan:
    """The sum, part by part. `is_given`: the caller knows the longest step."""
    rates = {f"slowest of {len(speed.each_s)} files of {_shown(speed.size)}": speed.bytes_per_s}
    if state.took_s:
        rates[f"of that save, which took {state.took_s:.2f} s"] = state.size / state.took_s
    how, rate = min(rates.items(), key=lambda item: item[1])
    parts = (
        Part("notice is seen", NOTICE_S, "by listing the signal file's directory"),
        Part("safe point", step_s, "the longest step" if is_given else "the longest step: assumed, see --step-s"),
        Part("ranks agree", Timing(ranks).agree_s, f"{ranks} rank" + ("s" if ranks > 1 else "")),
        Part("write", state.size / rate, "state / bandwidth"),
        Part("commit", SMALL_FILES * speed.small_s, f"{SMALL_FILES} small files"),
    )
    return Plan(state, ranks, rate, how, parts, margin)


# The size of the state.


def parse_bytes(text: str) -> int | None:
    """`3GB`, `1.5 GiB`, `250000000`; None if it is no number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]?i?b)?", text.strip(), flags=re.IGNORECASE)
    if match is None or (unit := (match[2] or "").lower()) not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[unit])


def newest(storage: Storage) -> State:
    """The newest ckpt of the job."""
    names = catalog.ckpts(storage, frozenset(generations.numbers(storage)))
    if not names:
        raise NoUsableCkpt(
            f"there is no ckpt in {storage.where()}, so nobody knows how large one is. Give the size "
            "(python -m migrator.grace 3GB), or a script to measure it (python -m migrator.grace train.py)"
        )
    data = storage.get(manifest_name(names[0]), limit=MANIFEST_LIMIT)
    manifest = Manifest.from_bytes(data)
    how = f"that of the newest ckpt, {manifest.ckpt}"
    return State(manifest.bytes + len(data), manifest.ranks, how, manifest.took_s)


def of_script(command: list[str], timeout_s: float) -> State:
    """Run it until its first step is over, with everything of ours in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="migrator-grace-") as directory:
        file = Path(directory) / "size"
        env = {
            **os.environ,
            settings.MEASURE: str(file),
            # For what reads them before `listening()`, and if the script finds an older version of the package.
            "MIGRATOR_CKPT": str(file.with_name("ckpts")),
            "MIGRATOR_RESUME": "never",
            "MIGRATOR_SIGNAL": str(file.with_name("signal")),
            settings.TERMINATION_LOG: str(file.with_name("termination-log")),
        }
        try:
            # Its output goes to stderr: stdout has the answer alone.
            process = subprocess.Popen(command, env=env, stdout=2, start_new_session=True)
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
        why = f"was not there after {timeout_s:g} s (--timeout-s)"
        end_s = time.monotonic() + timeout_s
        try:
            while time.monotonic() < end_s:
                if process.poll() is not None:
                    why = f"ended with exit code {process.returncode} before it was there"
                    break
                time.sleep(0.05)
            sizes = measured.found(file)
        finally:
            _end(process)
    if sizes is None:
        raise UsageError(
            f"{' '.join(command)} {why}: the end of its first training step behind listening(), where its state is "
            "measured. Its output is above. Does it run by itself? Give the size instead: python -m migrator.grace 3GB"
        )
    size, ranks = sizes
    return State(size, ranks, f"what {command[-1] if len(command) == 1 else ' '.join(command[1:])} has registered")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It is over, with all that it has started."""
    if process.poll() is None:
        # torchrun's ranks are in sessions of their own: only torchrun ends them, and not if it is killed.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_OF_SCRIPT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The bandwidth.


def measured_at(root: Path | str, size: int, *, count: int, grace_s: float) -> bandwidth.Bandwidth:
    """Written into a directory of its own under the root, which is gone afterwards."""
    job = f"grace-{uuid.uuid4().hex[:12]}"
    storage = storage_at(root, job, grace_s=grace_s)
    try:
        storage.check()
        return bandwidth.measure(storage, size, count=count)
    finally:
        if isinstance(root, Path):
            with contextlib.suppress(OSError):
                (root / job).rmdir()


# The command.


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m migrator.grace",
        description="Which terminationGracePeriodSeconds does this job need?",
        allow_abbrev=False,  # the options of a script may begin like ours
    )
    parser.add_argument("--ckpt", metavar="ROOT", help="where the ckpts go (MIGRATOR_CKPT, else ./ckpts)")
    parser.add_argument("--job", help="whose newest ckpt shows the size (MIGRATOR_JOB, else default)")
    parser.add_argument("--ranks", type=_whole, metavar="N", help="ranks of the job (those of the ckpt or script)")
    parser.add_argument("--step-s", type=_positive, metavar="S", help=f"the longest step, in seconds ({STEP_S:g})")
    parser.add_argument("--margin", type=_positive, default=MARGIN, metavar="F", help=f"safety factor ({MARGIN:g})")
    parser.add_argument("--probes", type=_whole, default=PROBES, metavar="N", help=f"files to measure by ({PROBES})")
    parser.add_argument("--probe-mb", type=_whole, default=PROBE_MB, metavar="MB", help=f"their size ({PROBE_MB})")
    parser.add_argument(
        "--timeout-s", type=_positive, default=600.0, metavar="S", help="of a script's first step (600)"
    )
    parser.add_argument("--json", action="store_true", help="the parts as JSON")
    parser.add_argument(
        "state", nargs="?", help="bytes (3GB), a script or a command to measure it, or a root; none: the newest ckpt"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args(given)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return value


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with the reason on stderr."""
    given = _arguments(arguments)
    try:
        found = _plan(given)
    except MigratorError as error:
        print(f"migrator.grace: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.to_json(), indent=2) if given.json else without_epoch(found.to_text()))
    return 0


def _plan(given: argparse.Namespace) -> Plan:
    size, place = None, (given.ckpt, given.job)
    if given.state is not None:
        size = parse_bytes(given.state)
        if size is None and (Path(given.state).is_dir() or "://" in given.state):
            place, given.state = _place_of(given.state, given), None
    if size is not None and given.arguments:
        raise UsageError(f"behind a number of bytes is more: {' '.join(given.arguments)}. Options come first")
    read = settings.read({"ckpt": place[0], "job": place[1]}, os.environ)
    if isinstance(read.ckpt, str) and read.ckpt.startswith("memory://"):
        raise SettingsError(f"{read.ckpt} is the memory of this process: name the root of the job (--ckpt)")
    if isinstance(read.ckpt, Path) and not read.ckpt.is_dir():
        raise SettingsError(f"{read.ckpt} is no directory: mount the volume, or name the root of the ckpts (--ckpt)")
    if size is not None:
        state = State(size, 1, "as given")
    elif given.state is not None:
        state = of_script(_command(given.state, given.arguments), given.timeout_s)
    else:
        state = newest(storage_at(read.ckpt, read.job, grace_s=read.grace_s))
    probe = min(max(state.size, 1), given.probe_mb * 10**6)
    speed = measured_at(read.ckpt, probe, count=given.probes, grace_s=read.grace_s)
    ranks = given.ranks or state.ranks
    step_s = STEP_S if given.step_s is None else given.step_s
    return plan(state, speed, step_s=step_s, is_given=given.step_s is not None, ranks=ranks, margin=given.margin)


def _place_of(text: str, given: argparse.Namespace) -> tuple[str, str | None]:
    """Root and job: of a root, of the directory of a job, or of one of its ckpts."""
    if given.ckpt is not None:
        raise UsageError(f"two roots: {text} and --ckpt {given.ckpt}")
    path = Path(text).absolute()
    if (path / MANIFEST).is_file():
        path = path.parent
    if "://" not in text and (path / GENERATIONS).is_dir():
        return str(path.parent), path.name
    return text, given.job


def _command(program: str, arguments: list[str]) -> list[str]:
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise UsageError(f"there is no script {program}")
        return [sys.executable, program, *arguments]
    if shutil.which(program) is None:
        raise UsageError(
            f"{program!r} is neither a number of bytes (3GB, 250MiB) nor a script, a command or a directory that exists"
        )
    return [program, *arguments]


def _shown(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


if __name__ == "__main__":
    sys.exit(main())
