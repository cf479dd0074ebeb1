"""What a save in the middle of training costs the training.

    python benchmarks/stall.py [--mb 250,1000] [--step-ms 100] [--rounds 5] [--short] [--only "ROW;..."]

A training loop: each step waits `--step-ms` for a device, and then AdamW changes the whole state, which is in the
memory of this host. After some quiet steps it saves and goes on. Quiet steps of the same life say what a step takes.

- stall: the longest extra time of one step from the call until the save is durable.
- slowdown: the extra time of all these steps together. It is what the training loses.
- durable after: from the call until the library says that it is done; for ours the log event `committed`.

"no saves" is the same loop, and in its place of a save there is nothing for `NOTHING_S`: what it shows is noise. "with
migrator, no saves" has the safe points as well.

All peers save the same tensors, keep what they can keep from one save to the next, and have saved once before:

- torch.save in the loop: without CRC-32, file and directory synced. Training waits.
- DCP `async_save`: one `DefaultStager`, kept, which copies in a thread of its own; the loop waits for the copy only
  before the optimizer's next step. `FileSystemWriter` syncs its files.
- torchsnapshot `async_take`: returns when the state is copied. It does not sync its files, and nothing was added.
- DLRover flash checkpoint: copies into shared memory, from where its agent writes. The agent is a process of its own,
  as under `dlrover-run`. The file of the state is not synced; nothing was added.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import suite
from suite import Life, Memory, Result, Servers, Table, Tell, Training, number, synced

SHORT_MEGABYTES: tuple[int, ...] = (250,)
MEGABYTES: tuple[int, ...] = (250, 1000)
SAVES = 3
"""Saves of one life that count."""
QUIET_STEPS = 8
"""Steps before each save, at least; the first ones follow the deletion of the save before."""
SETTLE_STEPS = 3
NOTHING_S = 1.0
DURABLE_S = 120.0
"""Seconds until a save has to be durable, at most."""
QUIET, QUIET_OURS = "no saves", "with migrator, no saves"


def dlrover_places(pid: int) -> list[Path]:
    """What DLRover makes outside of its directory: the copy of the state, and sockets."""
    return [Path(f"/dev/shm/bench-{pid}_ckpt_shm_0"), Path(f"/tmp/ckpt_sock/bench-{pid}")]


class Way:
    """One row, in its life."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training = training
        self.directory = directory
        self.durable_s = 0.0
        """When the last save was durable, by `perf_counter`; 0: it is not."""

    @classmethod
    def before_training(cls) -> None:
        """Before there is a state: what a process is forked for must not hold a copy of it."""

    def begin(self) -> None:
        """Before the first step."""

    def save(self, path: Path) -> None:
        """Begin to save; sets `durable_s` now or later. Each way has its own."""
        raise NotImplementedError

    def before_update(self) -> None:
        """The last moment at which the state is still that of the save."""

    def step_ends(self) -> None: ...

    def look(self) -> None:
        """Once a step, outside of what is timed: whether the save is durable."""


class NoSaves(Way):
    def save(self, path: Path) -> None:
        self._end_s = time.perf_counter() + NOTHING_S

    def look(self) -> None:
        if time.perf_counter() >= self._end_s:
            self.durable_s = time.perf_counter()


class Migrator(Way):
    def begin(self) -> None:
        def note(event: str, _: float) -> None:
            if event == "committed":
                self.durable_s = time.perf_counter()

        self._migrator = suite.begin_ours(self.training, self.directory, note)

    def save(self, path: Path) -> None:
        self._migrator.save_ckpt(wait=False)

    def step_ends(self) -> None:
        self._migrator.safe_point()


class MigratorNoSaves(Migrator):
    save = NoSaves.save
    look = NoSaves.look


class TorchSave(Way):
    def begin(self) -> None:
        import torch

        torch.serialization.set_crc32_options(False)

    def save(self, path: Path) -> None:
        import torch

        torch.save(self.training.state(), path)
        synced(path)
        synced(path.parent)
        self.durable_s = time.perf_counter()


class DcpAsync(Way):
    def begin(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Pinned memory and copies that do not block take an accelerator; shared memory is for a process that writes.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._save: Any = None

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path)
        self._save = dcp.async_save(
            self.training.state(), storage_writer=writer, async_stager=self._stager, no_dist=True
        )
        self._save.upload_completion.add_done_callback(self._is_done)

    def _is_done(self, future: Any) -> None:
        future.result()
        self.durable_s = time.perf_counter()

    def before_update(self) -> None:
        if self._save is not None:
            self._save.staging_completion.result()


class Torchsnapshot(Way):
    def begin(self) -> None:
        self._pending: Any = None

    def save(self, path: Path) -> None:
        from torchsnapshot import Snapshot

        state = {"model": self.training.model, "optimizer": self.training.optimizer}
        self._pending = Snapshot.async_take(str(path), state)

    def look(self) -> None:
        if self._pending.done():
            self._pending.wait()
            self.durable_s = time.perf_counter()


class DlRover(Way):
    @classmethod
    def before_training(cls) -> None:
        # What the launcher sets.
        one = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "NODE_NUM")
        os.environ.update(dict.fromkeys(one, "1") | dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"))
        os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}"
        os.environ["ROLE_NAME"] = "dlrover-trainer"  # else a copy of this process, with its state, becomes the agent
        from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

        # It ends with this process.
        if os.fork() == 0:
            suite.end_with_parent()
            AsyncCheckpointSaver.start_async_saving_ckpt()
            time.sleep(suite.LIFE_S)
            os._exit(0)

    def begin(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._checkpointer = DdpCheckpointer(str(self.directory))
        self._count = 0

    def save(self, path: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import StorageType

        self._count += 1
        self._checkpointer.save_checkpoint(self._count, self.training.state(), str(path), StorageType.DISK)

    def look(self) -> None:
        newest = self.directory / "dlrover_latest.txt"
        if newest.exists() and newest.read_text().strip() == str(self._count):
            self.durable_s = time.perf_counter()


ROWS: dict[str, tuple[type[Way], str | None]] = {
    QUIET: (NoSaves, None),
    QUIET_OURS: (MigratorNoSaves, None),
    "migrator": (Migrator, None),
    "torch.save + fsync in the loop": (TorchSave, None),
    "DCP async_save": (DcpAsync, None),
    "torchsnapshot async_take, no fsync": (Torchsnapshot, "torchsnapshot"),
    "DLRover flash checkpoint, no fsync": (DlRover, "dlrover[k8s]"),
}
"""How each row saves, and the package that it takes."""


class Loop:
    """The steps of one life, and how long each took."""

    def __init__(self, way: Way, step_s: float) -> None:
        self._way = way
        self._step_s = step_s

    def step(self, save: Path | None = None) -> float:
        way = self._way
        start_s = time.perf_counter()
        time.sleep(self._step_s)
        way.before_update()
        way.training.step()
        way.step_ends()
        if save is not None:
            way.save(save)
        return time.perf_counter() - start_s

    def save(self, path: Path) -> dict[str, Any]:
        """All steps of one save, from the one that ends with the call."""
        way = self._way
        way.durable_s = 0.0
        began_s = time.perf_counter()
        took_s = [self.step(path)]
        # The step before the call is no part of the save.
        called_s = began_s + self._step_s
        way.look()
        while not way.durable_s:
            took_s.append(self.step())
            way.look()
            if time.perf_counter() - began_s > DURABLE_S:
                raise TimeoutError(f"the save was not durable within {DURABLE_S:.0f} s")
        return {"steps_s": took_s, "durable_s": way.durable_s - called_s}


def body(job: dict[str, Any], directory: Path) -> Callable[[Tell], None]:
    row, step_s = job["row"], job["step_s"]

    def live(tell: Tell) -> None:
        ROWS[row][0].before_training()
        training = Training(job["megabytes"])
        place = directory / "saved"
        place.mkdir()
        way = ROWS[row][0](training, place)
        way.begin()
        loop, memory = Loop(way, step_s), None
        quiet_s, saves = [], []
        for count in range(1 + job["saves"]):
            steps_s: list[float] = []
            quiet_end_s = time.perf_counter() + job["pause_s"]
            while len(steps_s) < QUIET_STEPS or time.perf_counter() < quiet_end_s:
                steps_s.append(loop.step())
            memory = memory or Memory()
            save = loop.save(place / f"save{count}")
            if count:
                quiet_s += steps_s[SETTLE_STEPS:]
                saves.append(save)
            loop.step()
            _delete_saves(place)
        tell("done", quiet_s=quiet_s, saves=saves, extra_mb=memory.extra_mb() if memory else 0.0, bytes=training.bytes)

    return live


def _delete_saves(place: Path) -> None:
    for path in [*place.glob("save*"), *place.glob("default/0*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """One life, in a server."""
    directory = Path(job["directory"])
    directory.mkdir()
    with Life(body(job, directory), directory / "log") as life:
        try:
            found = life.wait_for("done")
        finally:
            life.end()
            for path in dlrover_places(life.pid):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    step_s = suite.median(found["quiet_s"])
    found["step_s"] = step_s
    found["stall_s"] = [max(s - step_s for s in save["steps_s"]) for save in found["saves"]]
    found["slowdown_s"] = [sum(s - step_s for s in save["steps_s"]) for save in found["saves"]]
    found["durable_s"] = [save["durable_s"] for save in found["saves"]]
    return found


def measure(
    result: Result, servers: Servers, names: list[str], megabytes: int, *, rounds: int, saves: int, directory: Path
) -> Table:
    """All rows for one size."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    step_s = result.options["step_ms"] / 1000
    for turn, row in suite.turns(names, rounds):
        place = directory / "life"
        job = {"row": row, "megabytes": megabytes, "step_s": step_s, "saves": saves, "directory": str(place)}
        job["pause_s"] = result.options["pause_s"]
        one = servers.ask(job, ROWS[row][1])
        suite.emptied(place)
        if "error" in one:
            result.skip(f"{row}, {suite.size_name(megabytes)}", one["error"])
            continue
        found[row].append(one)
        result.values.append({**one, "row": row, "megabytes": megabytes, "round": turn})
    return _table(found, megabytes, step_s)


def _table(found: dict[str, list[dict[str, Any]]], megabytes: int, step_s: float) -> Table:
    def ms(name: str, what: str) -> float:
        return 1000 * suite.median([s for one in found.get(name, []) for s in one[what]])

    table = Table(
        f"stall.{megabytes}",
        f"One save, {suite.size_name(megabytes)}, a device's step of {1000 * step_s:.0f} ms",
        ["", "a quiet step, ms", "stall, ms", "slowdown, ms", "times ours", "durable after, s", "MB beyond the state"],
        unit="ms",
    )
    for name, lives in found.items():
        if not lives:
            continue
        quiet_ms = 1000 * suite.median([one["step_s"] for one in lives])
        cells = [number(quiet_ms), number(ms(name, "stall_s")), number(ms(name, "slowdown_s"))]
        is_save = name not in (QUIET, QUIET_OURS)
        cells.append(number(ms(name, "slowdown_s") / ms("migrator", "slowdown_s")) if is_save else "-")
        cells.append(number(ms(name, "durable_s") / 1000) if is_save else "-")
        table.rows.append([name, *cells, f"{max(0.0, suite.median([one['extra_mb'] for one in lives])):.0f}"])
        table.bars.append((name, ms(name, "slowdown_s")))
    return table


def main() -> None:
    usage = suite.parser(__doc__, "stall")
    usage.add_argument("--mb", help="megabytes of the states, separated by commas (250,1000)")
    usage.add_argument("--step-ms", type=float, default=100.0, help="what a step waits for a device (100)")
    options = usage.parse_args()
    if options.serve:
        suite.serve(handle)
        return
    sizes = SHORT_MEGABYTES if options.short else MEGABYTES
    if options.mb:
        sizes = tuple(int(one) for one in options.mb.split(","))
    rounds = options.rounds or (1 if options.short else 5)
    names = suite.chosen(ROWS, options.only, usage)
    suite.say_how_idle()
    said = {"mb": list(sizes), "rounds": rounds, "step_ms": options.step_ms, "pause_s": suite.pause_s(options)}
    result = Result("stall", suite.machine(options.dir), said)
    saves = 1 if options.short else SAVES
    with suite.scratch(options.dir) as directory, Servers(__file__) as servers:
        for megabytes in sizes:
            result.tables.append(
                measure(result, servers, names, megabytes, rounds=rounds, saves=saves, directory=directory)
            )
    result.finish(options.json)


if __name__ == "__main__":
    main()
