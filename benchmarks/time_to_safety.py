"""How long a training is in danger: until a save has returned, and from the notice to the commit.

    python benchmarks/time_to_safety.py [--mb 16,250,1000,4000] [--rounds 5] [--short] [--only "ROW;..."]

All rows save the same model and AdamW, as tensors in memory, to the same disk, and return when the bytes are durable.

- Save: the call after a training step, until it returns. Ours computes a digest of every byte and commits; the others
  do not. Each life saves a few times; the first save, in which memory is touched for the first time, has a column of
  its own.
- Notice: the same process trains and gets SIGTERM. Ours: until the log event `committed`. The others have no notice of
  their own: a handler sets a flag, the loop looks at it after each step, and saves. A step takes `STEP_S`, of which the
  optimizer's part is real and the rest is a wait for a device.
- Memory: the peak of all of that beyond the training itself.

The peers, each in its fastest configuration that is durable:

- torch.save: without the CRC-32 of each record; file and directory are synced.
- safetensors: `save_file`, param_groups as JSON in the metadata; file and directory are synced.
- DCP: `dcp.save(no_dist=True)`, state dicts taken directly, one thread, and two with a file each (four are slower
  here). It syncs its files by itself (`sync_files`), and not the directory; nothing was added.
- raw disk: the limit. O_DIRECT in blocks of 4 MiB by four threads from one buffer of huge pages, file and directory
  synced. Its time from the notice is the write alone.

Old files are deleted between the saves, outside of the time, ours too; `suite.PAUSE_S` says why a pause follows.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import suite
from suite import Life, Memory, RawDisk, Result, Servers, Table, Tell, Training, number, synced

MEGABYTES: tuple[int, ...] = (16, 250, 1000, 4000)
SHORT_MEGABYTES: tuple[int, ...] = (16, 250)
SAVES = 3
"""Saves of one life that count."""
STEP_S = 0.05
"""Seconds that a step waits for a device, besides the optimizer's work."""
OURS, LIMIT = "migrator", "raw disk"


class Way(ABC):
    """One row, in its life. `save` returns when the state is durable in `path`, which does not exist before."""

    def __init__(self, training: Training, directory: Path, tell: Tell) -> None:
        self.training = training
        self.directory = directory
        self.tell = tell
        self.is_told = False

    def begin(self) -> None:
        """Before the first step: also what answers SIGTERM."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, _: object) -> None:
        self.is_told = True

    @abstractmethod
    def save(self, path: Path) -> None: ...

    def step_ends(self) -> None:
        """In the loop that gets the notice: the last line of a step."""
        if self.is_told:
            self.save(self.directory / "last")
            self.tell("committed")
            raise SystemExit(143)


class Migrator(Way):
    def begin(self) -> None:
        def note(event: str, created_s: float) -> None:
            if event in ("signal", "committed"):
                self.tell(event, created=created_s)

        self._migrator = suite.begin_ours(self.training, self.directory, note)

    def save(self, path: Path) -> None:
        self._migrator.save_ckpt()

    def step_ends(self) -> None:
        self._migrator.safe_point()


class TorchSave(Way):
    def begin(self) -> None:
        import torch

        super().begin()
        torch.serialization.set_crc32_options(False)

    def save(self, path: Path) -> None:
        import torch

        torch.save(self.training.state(), path)
        synced(path)
        synced(path.parent)


class Safetensors(Way):
    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        groups = self.training.optimizer.state_dict()["param_groups"]
        save_file(self.training.tensors(), path, metadata={"groups": json.dumps(groups)})
        synced(path)
        synced(path.parent)


class Dcp(Way):
    threads = 1

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=self.threads)
        dcp.save(self.training.state(), storage_writer=writer, no_dist=True)


class DcpTwoThreads(Dcp):
    threads = 2


class Limit(Way):
    def begin(self) -> None:
        super().begin()
        self._disk = RawDisk()

    def save(self, path: Path) -> None:
        self._disk.write(path, self.training.bytes)


ROWS: dict[str, type[Way]] = {
    OURS: Migrator,
    "torch.save + fsync": TorchSave,
    "safetensors + fsync": Safetensors,
    "DCP": Dcp,
    "DCP, 2 threads": DcpTwoThreads,
    LIMIT: Limit,
}


def body(row: str, megabytes: int, saves: int, pause_s: float, directory: Path) -> Callable[[Tell], None]:
    """What a life does."""

    def live(tell: Tell) -> None:
        training = Training(megabytes)
        place = directory / "saved"
        place.mkdir()
        way = ROWS[row](training, place, tell)
        way.begin()
        for _ in range(2):
            training.step()
            way.step_ends()
        memory, took_s = Memory(), []
        for count in range(1 + saves):
            training.step()
            way.step_ends()
            start_s = time.perf_counter()
            way.save(place / f"save{count}")
            took_s.append(time.perf_counter() - start_s)
            _delete_saves(place)
            time.sleep(pause_s)
        tell("saved", took_s=took_s, extra_mb=memory.extra_mb(), bytes=training.bytes)
        if row == LIMIT:
            return
        while True:
            training.step()
            time.sleep(STEP_S)
            way.step_ends()

    return live


def _delete_saves(place: Path) -> None:
    for path in [*place.glob("save*"), *place.glob("default/0*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """One life, in a server."""
    directory = Path(job["directory"])
    directory.mkdir()
    row, draws = job["row"], random.Random(job["seed"])
    with Life(body(row, job["megabytes"], job["saves"], job["pause_s"], directory), directory / "log") as life:
        found = life.wait_for("saved")
        if row == LIMIT:
            return found
        time.sleep(0.2 + draws.uniform(0.0, 2 * STEP_S))  # anywhere in a step
        sent = life.send(signal.SIGTERM)
        done = life.wait_for("committed")
        found["notice_s"] = done.get("created", done["at"]) - sent
        life.end(10.0)
    return found


def measure(
    result: Result, servers: Servers, names: list[str], megabytes: int, *, rounds: int, saves: int, directory: Path
) -> None:
    """All rows for one size."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn, row in suite.turns(names, rounds):
        place = directory / "life"
        job = {"row": row, "megabytes": megabytes, "saves": saves, "directory": str(place)}
        job |= {"seed": turn, "pause_s": result.options["pause_s"]}
        one = servers.ask(job)
        suite.emptied(place)
        if "error" in one:
            result.skip(f"{row}, {suite.size_name(megabytes)}", one["error"])
            continue
        found[row].append(one)
        took_s = ", ".join(f"{s:.2f}" for s in one["took_s"])
        print(f"{suite.size_name(megabytes)}, round {turn + 1}, {row}: {took_s} s", flush=True)
        result.values.append({**one, "row": row, "megabytes": megabytes, "round": turn})
    result.tables += [_table(found, megabytes, "save"), _table(found, megabytes, "notice")]


def _table(found: dict[str, list[dict[str, Any]]], megabytes: int, what: str) -> Table:
    def of(name: str) -> float:
        if what == "notice" and name != LIMIT:
            return suite.median([one["notice_s"] for one in found.get(name, [])])
        return suite.median([s for one in found.get(name, []) for s in one["took_s"][1:]])

    size = suite.size_name(megabytes)
    title = f"Until save_ckpt() returns, {size}" if what == "save" else f"From SIGTERM to the commit, {size}"
    first = ["first save"] if what == "save" else []
    table = Table(
        f"time_to_safety.{what}.{megabytes}",
        title,
        ["", "seconds", "GB/s", "times ours", "times the limit", *first, "MB beyond the state"],
        unit="s",
    )
    for name, lives in found.items():
        if not lives:
            continue
        took_s = of(name)
        cells = [number(took_s), number(lives[0]["bytes"] / 1e9 / took_s)]
        cells += [number(took_s / of(OURS)), number(took_s / of(LIMIT))]
        if first:
            cells.append(number(suite.median([one["took_s"][0] for one in lives])))
        table.rows.append([name, *cells, f"{max(0.0, suite.median([one['extra_mb'] for one in lives])):.0f}"])
        table.bars.append((name, took_s))
    return table


def main() -> None:
    usage = suite.parser(__doc__, "time_to_safety")
    usage.add_argument("--mb", help="megabytes of the states, separated by commas (16,250,1000,4000)")
    options = usage.parse_args()
    if options.serve:
        suite.serve(handle)
        return
    sizes = SHORT_MEGABYTES if options.short else MEGABYTES
    if options.mb:
        sizes = tuple(int(one) for one in options.mb.split(","))
    options.rounds = options.rounds or (1 if options.short else 5)
    saves = 1 if options.short else SAVES
    pause_s = suite.pause_s(options)
    names = suite.chosen(ROWS, options.only, usage)
    suite.say_how_idle()
    result = Result(
        "time_to_safety", suite.machine(options.dir), {"mb": list(sizes), "rounds": options.rounds, "pause_s": pause_s}
    )
    with suite.scratch(options.dir) as directory, Servers(__file__) as servers:
        for megabytes in sizes:
            measure(result, servers, names, megabytes, rounds=options.rounds, saves=saves, directory=directory)
    result.finish(options.json)


if __name__ == "__main__":
    main()
