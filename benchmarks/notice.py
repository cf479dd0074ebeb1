"""How soon after the notice the first byte is written.

    python benchmarks/notice.py [--rounds 100] [--short] [--only "ROW;..."]

From the moment of the notice until the first write to a file of the ckpt has ended. The notice is SIGTERM, or the
rename of the signal file, which is the last thing that the hook does before it waits; the file is made here, so that no
shell is started in between. Each notice ends its process, so each is a life of its own; one life at a time.

A row is a combination of

- notice: `SIGTERM`; `file` (inotify); `file, listed` (inotify is refused when the watcher asks for it, as where no
  instances are left: only the listing of the directory every 0.2 s finds the file, as on a network volume);
- main thread: `idle` (`time.sleep`), `python` (a loop in the interpreter, which holds the GIL), `matrices` (products in
  torch, which do not); safe points are `SPAN_S` apart;
- ranks: 1, or 4 with gloo over loopback, of which only one gets the notice. The first byte is that of the first rank
  that writes: before, all of them have to agree on a step.

The first byte is seen from outside, by inotify on the job's directory: the first write to a file of which the name says
that it is a part. All lives save a model with AdamW of 16 MB; torch has one thread in each.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import random
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import suite
from suite import Life, LifeError, Result, Servers, Table, Tell, number

LIVES, SHORT_LIVES = 100, 2
SPAN_S = 0.2
"""Seconds between two safe points."""
GRACE_S = 30
BYTE_S = 20.0
"""Seconds until the first byte has to be there, at most."""
CKPT = re.compile(r"\d{6}-\d{12}")
PART = re.compile(r"\.?(?:part-|own-of-)")


@dataclass(frozen=True)
class Row:
    notice: str
    thread: str
    ranks: int


ROWS = {
    f"{notice}, {thread}, {ranks} rank{'s' if ranks > 1 else ''}": Row(notice, thread, ranks)
    for ranks in (1, 4)
    for notice in ("SIGTERM", "file", "file, listed")
    for thread in ("idle", "python", "matrices")
}


def spend(thread: str) -> None:
    """What the main thread does from one safe point to the next."""
    import torch

    if thread == "idle":
        time.sleep(SPAN_S)
        return
    end_s, matrix, count = time.perf_counter() + SPAN_S, torch.ones(384, 384), 0
    while time.perf_counter() < end_s:
        if thread == "matrices":
            torch.mm(matrix, matrix)
        else:
            for _ in range(10_000):
                count += 1


def body(row: Row, rank: int, directory: Path) -> Callable[[Tell], None]:
    def live(tell: Tell) -> None:
        import torch
        from torch import distributed, nn
        from torch.nn.parallel import DistributedDataParallel

        if row.notice == "file, listed":
            without_inotify()
        from migrator import migrator

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512))
        if row.ranks > 1:
            distributed.init_process_group("gloo")
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        migrator.register("model", model)
        migrator.register("optimizer", optimizer)
        signal_file = directory / f"pod-{rank}" / "signal"
        migrator.listening(ckpt=str(directory / "ckpts"), signal=str(signal_file), every="off", grace_s=GRACE_S)
        x, steps = torch.randn(8, 784), 0
        try:
            while True:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                migrator.safe_point()
                spend(row.thread)
                steps += 1
                if steps == 2:
                    tell("ready", modules=sorted(sys.modules))
        except RuntimeError:
            # The collective of a rank that is not at its end yet, while others have left. A script's end waits for the
            # save; that of a fork does not.
            if row.ranks == 1:
                raise
            time.sleep(GRACE_S)

    return live


def without_inotify() -> None:
    """As where a container has no inotify instances left: the library then lists the directory, and warns."""
    from watchdog.observers import Observer

    def schedule(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no inotify instances left")

    Observer.schedule = schedule  # type: ignore[method-assign,unused-ignore]


class FirstByte:
    """Waits for the first write to a part, in any ckpt of the job."""

    _CREATE, _MODIFY, _MOVED_TO = 0x100, 0x2, 0x80
    _EVENT = struct.Struct("iIII")

    def __init__(self, job: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._places: dict[int, Path] = {}
        self._watch(job)

    def _watch(self, place: Path) -> None:
        mask = self._CREATE | self._MODIFY | self._MOVED_TO
        found = self._libc.inotify_add_watch(self._fd, os.fsencode(place), mask)
        if found < 0:
            raise OSError(ctypes.get_errno(), "inotify cannot watch it", str(place))
        self._places[found] = place

    def wait(self) -> float:
        """When it was, on the clock of all processes."""
        end_s = time.monotonic() + BYTE_S
        while (left_s := end_s - time.monotonic()) > 0:
            if not select.select([self._fd], [], [], left_s)[0]:
                break
            at = time.time()
            if self._is_there(os.read(self._fd, 1 << 16)):
                return at
        raise LifeError(f"no byte of a part was written within {BYTE_S:.0f} s")

    def _is_there(self, events: bytes) -> bool:
        at = 0
        while at < len(events):
            watch, mask, _, length = self._EVENT.unpack_from(events, at)
            at += self._EVENT.size
            name = events[at : at + length].rstrip(b"\0").decode()
            at += length
            if mask & self._MODIFY and PART.match(name) and _has_data(self._places[watch] / name):
                return True
            if mask & (self._CREATE | self._MOVED_TO) and CKPT.fullmatch(name):
                place = self._places[watch] / name
                self._watch(place)
                # Before the directory was watched it may have been written already.
                if any(PART.match(file.name) and _has_data(file) for file in place.iterdir()):
                    return True
        return False

    def close(self) -> None:
        os.close(self._fd)


def _has_data(file: Path) -> bool:
    """Whether anything was written, and not only the place for it taken."""
    try:
        with file.open("rb") as opened:
            return os.lseek(opened.fileno(), 0, os.SEEK_DATA) >= 0
    except OSError:  # a hole only, or it has another name by now
        return False


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """The life of one row, in a server: of one process, or of several ranks."""
    row, directory, draws = ROWS[job["row"]], Path(job["directory"]), random.Random(job["seed"])
    directory.mkdir()
    env = {"OMP_NUM_THREADS": "1"}
    if row.ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        env |= {"WORLD_SIZE": str(row.ranks), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        lives = []
        for rank in range(row.ranks):
            own = {"RANK": str(rank)} if row.ranks > 1 else {}
            life = Life(body(row, rank, directory), directory / f"log-{rank}", env | own)
            lives.append(stack.enter_context(life))
        for life in lives:
            learn(life.wait_for("ready")["modules"])
        time.sleep(draws.uniform(0.0, 2 * SPAN_S))  # anywhere between two safe points, and between two listings
        first = FirstByte(directory / "ckpts" / "default")
        stack.callback(first.close)
        sent = notify(row, lives[-1], directory / f"pod-{row.ranks - 1}" / "signal")
        seen = first.wait()
        codes = [life.end(GRACE_S) for life in lives]
    if set(codes) != {143}:
        return {"error": f"the exit codes are {codes}, expected 143"}
    return {"byte_s": seen - sent}


def learn(modules: list[str]) -> None:
    """Import what a life has imported before its notice, so that the next one is ready sooner. What is imported only
    then stays part of what is measured."""
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):  # some names are not those of modules
                importlib.import_module(name)


def notify(row: Row, life: Life, file: Path) -> float:
    """Send the notice; when that was."""
    if row.notice == "SIGTERM":
        return life.send(signal.SIGTERM)
    # As hooks/preStop.sh does it.
    aside = file.with_name(".signal.bench.tmp")
    aside.write_text(f"save\nrequest=bench\npod=bench\ndeadline={time.time() + GRACE_S:.2f}\n")
    at = time.time()
    aside.replace(file)
    return at


def main() -> None:
    usage = suite.parser(__doc__, "notice")
    options = usage.parse_args()
    if options.serve:
        suite.serve(handle)
        return
    lives = options.rounds or (SHORT_LIVES if options.short else LIVES)
    names = suite.chosen(ROWS, options.only, usage)
    suite.say_how_idle()
    result = Result("notice", suite.machine(options.dir), {"lives": lives})
    found: dict[str, list[float]] = {name: [] for name in names}
    with suite.scratch(options.dir) as directory, Servers(__file__) as servers:
        for turn, name in suite.turns(names, lives):
            place = directory / "life"
            one = servers.ask({"row": name, "directory": str(place), "seed": turn})
            suite.emptied(place)
            if "error" in one:
                result.skip(f"{name}, life {turn}", one["error"])
                continue
            found[name].append(one["byte_s"])
            result.values.append({**one, "row": name, "round": turn})
    for ranks in (1, 4):
        table = Table(
            f"notice.{ranks}",
            f"From the notice to the first byte, {ranks} rank{'s' if ranks > 1 else ''}",
            ["notice", "main thread", "p50, ms", "p99, ms", "worst, ms", "lives"],
            unit="ms",
        )
        for name in (name for name in names if ROWS[name].ranks == ranks and found[name]):
            ms = [1000 * s for s in found[name]]
            p50, p99 = suite.percentile(ms, 50), suite.percentile(ms, 99)
            cells = [number(p50), number(p99), number(max(ms)), str(len(ms))]
            table.rows.append([ROWS[name].notice, ROWS[name].thread, *cells])
            table.bars.append((f"{ROWS[name].notice}, {ROWS[name].thread}", p50))
        if table.rows:
            result.tables.append(table)
    result.finish(options.json)


if __name__ == "__main__":
    main()
