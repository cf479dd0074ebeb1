"""The sweeps of `peers.py` over one library, in a process of its own; the counts go to stdout as JSON.

    python benchmarks/peers_sweeps.py LIBRARY DIRECTORY STRIDE CUTS KILLS

Every load and every save happens in a forked process with a state of its own. STRIDE: one bit of every so many
bytes is flipped. CUTS: to so many lengths each file is cut. KILLS: every so many calls one is killed, 0 for none.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers_tracer
import torch
from peers_libraries import LIBRARIES, Library, Training, digest_of_step
from peers_tracer import Event, Trace

LOAD_S = 20
"""A load that takes longer is ended, and counts as an error."""
LOADS_EACH = 25
"""So many loads are made by one process: a fork costs more than most loads, threads left behind cost in the end."""
_MODULES = {
    "safetensors": ["safetensors.torch"],
    "DCP": ["torch.distributed.checkpoint.state_dict"],
    "torchsnapshot": ["torchsnapshot"],
    "Lightning": ["lightning.pytorch.callbacks"],
    "migrator": ["migrator.api"],
}
MORE_MEMORY = 4 << 30
"""A load that asks for more, for a length that was flipped, is refused."""


class Sweeps:
    """One library, its directory, and the states it may load."""

    def __init__(self, library: Library, base: Path) -> None:
        self._library = library
        self._base = base
        self._old, self._new = digest_of_step(1), digest_of_step(2)
        self._first = base / "first"
        """A volume on which one save was made and reported."""

    def begin(self) -> None:
        """The first save, as a life of its own."""
        volume = self._volume("first")
        trace = peers_tracer.run(lambda: self._library.save(volume, Training()), self._base)
        if not trace.has_saved:
            raise RuntimeError("the first save failed")
        found = self._outcomes([self._volume("damaged", like=self._first)])
        if found != ["old"]:
            raise RuntimeError(f"what was saved first is not loaded: {found}")

    def flips(self, stride: int) -> dict[str, int]:
        """One bit of every `stride` bytes of each file."""

        def broken() -> Iterator[Callable[[Path], None]]:
            for name in self._files():
                size = (self._first / "volume" / name).stat().st_size
                for i, offset in enumerate(range(0, size, stride)):
                    yield lambda volume, n=name, o=offset, b=i % 8: _flip(volume / n, o, b)  # type: ignore[misc]

        return self._damage(broken())

    def cuts(self, count: int) -> dict[str, int]:
        """Each file cut to `count` lengths, from nothing to all but one byte."""

        def broken() -> Iterator[Callable[[Path], None]]:
            for name in self._files():
                size = (self._first / "volume" / name).stat().st_size
                for length in sorted({i * (size - 1) // max(1, count - 1) for i in range(count)} if size else set()):
                    yield lambda volume, n=name, s=length: os.truncate(volume / n, s)  # type: ignore[misc]

        return self._damage(broken())

    def kills(self, every: int) -> dict[str, Any]:
        """The second life, killed before each of its calls that change a file."""
        whole = self._second()
        if not whole.has_saved:
            raise RuntimeError("the second save failed")
        if self._outcomes([self._base / "second" / "volume"]) != ["new"]:
            raise RuntimeError("what was saved second is not loaded")
        outcomes: Counter[str] = Counter()
        number = 0
        while True:
            trace = self._second(kill_at=number)
            if not trace.was_stopped:
                break
            (found,) = self._outcomes([self._base / "second" / "volume"])
            outcomes[found] += 1
            number += every
        return {"outcomes": dict(outcomes), "calls": len(whole.events), **durability(whole.events, self._base)}

    def full(self, every: int) -> dict[str, int]:
        """The second life on a disk that is full from some call on: is it told, and is the first save still there?"""
        outcomes: Counter[str] = Counter()
        number = 0
        while True:
            trace = self._second(full_from=number)
            if not trace.was_stopped:
                return dict(outcomes)
            (found,) = self._outcomes([self._base / "second" / "volume"])
            outcomes[f"{'told' if not trace.has_saved else 'not told'}, {found}"] += 1
            number += every

    def _second(self, **faults: int) -> Trace:
        volume = self._volume("second", like=self._first)
        return peers_tracer.run(lambda: self._library.save(volume, Training()), self._base, **faults)

    def _volume(self, name: str, *, like: Path | None = None) -> Path:
        """A directory for a life: its volume, and what else it may write to on the same file system."""
        place = self._base / name
        shutil.rmtree(place, ignore_errors=True)
        if like is None:
            (place / "volume").mkdir(parents=True)
            (place / "tmp").mkdir()
        else:
            shutil.copytree(like, place)
        # On the same file system, so that what is written there can be renamed to the volume.
        tempfile.tempdir = str(place / "tmp")
        return place / "volume"

    def _files(self) -> list[str]:
        volume = self._first / "volume"
        return sorted(str(path.relative_to(volume)) for path in volume.rglob("*") if path.is_file())

    def _damage(self, broken: Iterator[Callable[[Path], None]]) -> dict[str, int]:
        outcomes: Counter[str] = Counter()
        todo = list(broken)
        while todo:
            batch, todo = todo[:LOADS_EACH], todo[LOADS_EACH:]
            found = self._loaded(batch)
            outcomes.update(found)
            todo = batch[len(found) :] + todo
        return dict(outcomes)

    def _loaded(self, batch: list[Callable[[Path], None]]) -> list[str]:
        """What comes of loading each damaged volume; fewer than asked for if the process died of the last one."""

        def volumes() -> Iterator[Path]:
            for damage in batch:
                volume = self._volume("damaged", like=self._first)
                damage(volume)
                yield volume

        names = {"old": "harmless", "error": "found", "died": "found", "neither": "silent"}
        return [names.get(found, "silent") for found in self._outcomes(volumes())]

    def _outcomes(self, volumes: Any) -> list[str]:
        """old, new, neither, error, or died for each volume, as a new life loads it."""
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(parent)
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MORE_MEMORY,) * 2)
            for volume in volumes:
                signal.alarm(LOAD_S)
                os.write(writing, self._outcome(volume).encode() + b"\n")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            found = lines.read().split()
        _, status = os.waitpid(pid, 0)
        return found if status == 0 else [*found, "died"]

    def _outcome(self, volume: Path) -> str:
        training = Training(seed=7)
        try:
            self._library.load(volume, training)
            digest = training.digest()
        except BaseException:  # a library may end the process itself
            return "error"
        finally:
            close = getattr(self._library, "close", None)
            if close is not None:
                close()
        return {self._old: "old", self._new: "new"}.get(digest, "neither")


def durability(events: list[Event], base: Path) -> dict[str, Any]:
    """Which files and names were not synced when success was reported, of what is on the volume."""
    volume = str(base / "second" / "volume")
    data: set[str] = set()
    names: set[str] = set()
    for event in events:
        call, path, other = event.call, event.path, event.other
        if call in ("fsync", "fdatasync"):
            data.discard(path)
            names = {name for name in names if os.path.dirname(name) != path}  # noqa: PTH120 - a hot loop of strings
        elif call.startswith("rename"):
            data = {other if name == path else name for name in data - {other}}
            names = names - {path} | {other}
        elif call.startswith("link"):
            data |= {other} if path in data else set()
            names.add(other)
        elif call.startswith(("unlink", "rmdir")):
            data.discard(path)
            names.discard(path)
        elif call.startswith(("mkdir", "symlink")):
            names.add(path)
        elif call.startswith(("open", "creat")):
            data.add(path)
            names.add(path)
        else:
            data.add(path)
    relative = {
        kind: sorted(name.removeprefix(volume) for name in found if name.startswith(volume + "/"))
        for kind, found in (("data", data), ("names", names))
    }
    return {"files_not_synced": relative["data"], "names_not_synced": relative["names"]}


def _flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def end_with(parent: int) -> None:
    """The kernel ends this process with its parent, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def warm(name: str) -> None:
    """Import what a fork would otherwise import each time."""
    for module in ("torch._dynamo", *_MODULES.get(name, ())):
        importlib.import_module(module)
    Training().train()


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    stride, cuts, kills = map(int, sys.argv[3:])
    end_with(os.getppid())
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    library, package = LIBRARIES[name]
    found: dict[str, Any] = {"version": importlib.metadata.version(package)}
    try:
        warm(name)
        sweeps = Sweeps(library, directory)
        sweeps.begin()
        found["flips"], found["cuts"] = sweeps.flips(stride), sweeps.cuts(cuts)
        found["skipped"] = peers_tracer.can_trace() if kills else "no process was killed"
        if not found["skipped"]:
            del found["skipped"]
            found["kills"], found["full"] = sweeps.kills(kills), sweeps.full(kills)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
