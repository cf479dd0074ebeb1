"""How the checkpoints of several libraries stand flipped bits, cut files, SIGKILL and a full disk: one table.

    python benchmarks/peers.py [--only "NAME;..."] [--stride N] [--cuts N] [--kills N]

Each library saves the same 100 KB (a model and its AdamW), as its documentation has it for safety; what it does not do
by itself is done with the same care for all (`peers_libraries.py`). Then, each time in a process of its own:

- one bit of every STRIDE bytes of each file is flipped, and each file is cut to CUTS lengths; a new life loads;
- a second life, which loads and saves again, is killed before each of its calls that change a file (every KILLS-th); a
  new life loads;
- the same with a disk that is full from that call on;
- the calls of the second save tell which files and names were not synced when success was reported.

Libraries that are not part of the development environment get one of their own, `.venv-peers`, which sees the torch of
this one. What cannot be installed, or does not run, is named in the table.

The price: minutes; and kills are between calls, so what a power cut leaves of a call in mid-flight is not tried.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIBRARIES = {
    "torch.save, in place": "as many scripts have it; it shows that these sweeps do see what is lost",
    "torch.save, no fsync": "file aside, `os.replace`",
    "torch.save": "file aside, fsync, `os.replace`, fsync of the directory; `weights_only=True`",
    "safetensors": "the same; param_groups in the header's metadata",
    "DCP": "`sync_files=True`, a new directory for each step; a pointer replaced as above",
    "torchsnapshot": "`Snapshot.take`, a new directory for each step; a pointer replaced as above",
    "Lightning": '`ModelCheckpoint(save_last=True)`, `ckpt_path="last"`, TMPDIR on the same volume',
    "migrator": "`register`, `listening`, `save_ckpt`, `load_ckpt`",
}
FOREIGN = {"torchsnapshot": "torchsnapshot", "Lightning": "lightning"}
"""Which of them need an environment of their own, and the package's name."""
AT_ONCE = 2
WORKER_S = 900.0

_OUTCOMES = ["found", "wrong without a word", "harmless"]
HEADER = [
    *("library", "version"),
    *("bits flipped", *_OUTCOMES),
    *("files cut", *_OUTCOMES),
    *("kills", "old or new state", "torn", "nothing to load"),
    *("full disks", "told, old state there"),
    *("files synced", "names synced"),
]


@dataclass(frozen=True)
class Size:
    """How fine the sweeps are."""

    stride: int
    cuts: int
    kills: int


def environment(names: list[str]) -> tuple[str, dict[str, str]]:
    """The interpreter for libraries that are not in the development environment, and which of them it lacks and why."""
    place = ROOT / ".venv-peers"
    python = place / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True, text=True)
            (place / ".gitignore").write_text("*\n")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # What this environment has is there too and is not installed again: torch above all, so all have the same.
        (place / "lib" / version / "site-packages" / "development.pth").write_text(sysconfig.get_path("purelib") + "\n")
    except (OSError, subprocess.CalledProcessError) as error:
        return sys.executable, dict.fromkeys(names, f"no environment for it: {error}")
    lacks = {}
    for name in names:
        package = FOREIGN[name]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*install, "-c", str(ROOT / "constraints.txt"), package], check=False, capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
            lacks[name] = f"cannot be installed: {lines[-1]}"
    return str(python), lacks


def sweep_all(names: list[str], size: Size) -> dict[str, dict[str, Any]]:
    """What each library's worker found, some at a time."""
    foreign = [name for name in names if name in FOREIGN]
    python, lacks = environment(foreign) if foreign else (sys.executable, {})
    found: dict[str, dict[str, Any]] = {name: {"error": why} for name, why in lacks.items()}
    todo = [name for name in names if name not in lacks]
    running: dict[str, tuple[subprocess.Popen[str], Path]] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        end_s = time.monotonic() + WORKER_S
        try:
            while todo or running:
                if todo and len(running) < AT_ONCE:
                    name = todo.pop(0)
                    # Each has a directory of its own length, so that no path is in anybody's way.
                    directory = Path(scratch) / f"{len(found) + len(running)}-{name.split()[0]}"
                    directory.mkdir()
                    running[name] = _started(python if name in FOREIGN else sys.executable, name, directory, size)
                    continue
                for name, (process, log) in list(running.items()):
                    if process.poll() is not None:
                        found[name] = _result(process, log)
                        del running[name]
                if time.monotonic() > end_s:
                    raise TimeoutError(f"after {WORKER_S:.0f} s these still run: {', '.join(running)}")
                time.sleep(0.02)
        finally:
            for process, _ in running.values():
                process.kill()
                process.wait()
    return {name: found[name] for name in names}


def _started(python: str, name: str, directory: Path, size: Size) -> tuple[subprocess.Popen[str], Path]:
    log = directory / "log"
    arguments = [name, str(directory), *map(str, (size.stride, size.cuts, size.kills))]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, str(HERE / "peers_sweeps.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    return process, log


def _result(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    with process.stdout:
        lines = process.stdout.read().splitlines()
    if process.returncode or not lines:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        return {"error": f"its process ended with {process.returncode}: {last}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def row(name: str, found: dict[str, Any]) -> list[str]:
    """The cells of one library."""
    if "error" in found:
        why = " ".join(found["error"].split()).replace("|", "/")
        return [name, found.get("version", "-"), f"does not run: {why:.200}", *["-"] * (len(HEADER) - 3)]
    cells = [name, found["version"]]
    for kind in ("flips", "cuts"):
        counts = found[kind]
        cells += [str(sum(counts.values())), *(str(counts.get(what, 0)) for what in ("found", "silent", "harmless"))]
    if "kills" not in found:
        return [*cells, *["-"] * (len(HEADER) - len(cells))]
    kills, full = found["kills"]["outcomes"], found["full"]
    cells += [
        str(sum(kills.values())),
        str(kills.get("old", 0) + kills.get("new", 0)),
        str(kills.get("neither", 0)),
        str(kills.get("error", 0) + kills.get("died", 0)),
        str(sum(full.values())),
        str(full.get("told, old", 0)),
    ]
    for kind in ("files_not_synced", "names_not_synced"):
        cells.append("yes" if not found["kills"][kind] else f"no ({len(found['kills'][kind])} not)")
    return cells


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    rows = [HEADER, ["---"] * len(HEADER), *(row(name, each) for name, each in found.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def notes(found: dict[str, dict[str, Any]], size: Size, took_s: float) -> str:
    """How it was made, and what the numbers do not say."""
    every = "" if size.kills == 1 else f"{size.kills}. "
    lines = [
        f"One bit of every {size.stride} bytes, {size.cuts} lengths of each file, every {every}call of a save.",
        "None of the other libraries promises to find flipped bits; `found` is what they find all the same.",
        "`wrong without a word`: the load returned, and the state is not the one that was saved; `harmless`: it is.",
        "`files synced`, `names synced`: whether a power cut behind the reported success can take bytes, or names.",
        f"Python {platform.python_version()}; {took_s:.0f} s.",
        "",
        *(f"- {name}: {LIBRARIES[name]}" for name in found),
    ]
    for name, each in found.items():
        others = {what: count for what, count in each.get("full", {}).items() if what != "told, old"}
        if others:
            lines.append(f"- {name}, full disk: " + "; ".join(f"{what}: {count}" for what, count in others.items()))
        if "skipped" in each:
            lines.append(f"- {name}: {each['skipped']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of libraries, separated by semicolons")
    parser.add_argument("--stride", type=int, default=127, help="one bit of so many bytes is flipped (127)")
    parser.add_argument("--cuts", type=int, default=24, help="each file is cut to so many lengths (24)")
    parser.add_argument("--kills", type=int, default=1, help="every so many calls one is killed, 0: none (1)")
    arguments = parser.parse_args()
    names = arguments.only.split(";") if arguments.only else list(LIBRARIES)
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown or arguments.stride < 1:
        parser.error(f"unknown: {unknown}; there are {'; '.join(LIBRARIES)}" if unknown else "--stride is at least 1")
    size = Size(arguments.stride, arguments.cuts, arguments.kills)
    start_s = time.monotonic()
    found = sweep_all(names, size)
    print(table(found))
    print()
    print(notes(found, size, time.monotonic() - start_s))
    # Ours has to stand all of it: this is a benchmark of the others, and a check of ours.
    mine = found.get("migrator", {})
    lost = [kind for kind in ("flips", "cuts") if mine.get(kind, {}).get("silent")]
    if "error" in mine or lost:
        sys.exit(f"migrator: {mine.get('error') or 'wrong without a word: ' + ', '.join(lost)}")


if __name__ == "__main__":
    main()
