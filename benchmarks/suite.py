"""What `time_to_safety.py`, `stall.py` and `notice.py` share: lives that are measured, a state, tables.

A life is a process of its own for one row and one round, so no row pays for the memory or the threads of another one.
It is a fork of a server, an interpreter that has imported torch and has computed nothing yet: 50 ms instead of 3 s.
Each package that is not in the development environment has a server in `.venv-peers`. Rows take turns, in another order
each round, so what the machine does meanwhile hits all of them.

Everything ends with the script: servers and lives are killed by the kernel when their parent ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import math
import mmap
import os
import platform
import random
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
LIFE_S = 300.0
"""Seconds until a life has to say what is waited for, at most."""
BLOCK = 64 << 20
"""Bytes of random data that fill a state or a file of the limit, repeated."""
RAW_BLOCK, RAW_THREADS = 4 << 20, 4
"""Bytes that one call of the limit writes, and how many calls are under way. Of 1 to 64 MiB and 1 to 8 threads nothing
was quicker."""
PAUSE_S = 3.0
"""Seconds between the deletion of a save and the next save. A host may take back the free memory of a virtual machine,
within about two seconds. A save that comes at once fills the memory of the file that was just deleted, which is up to
ten times quicker; in a real job minutes are in between."""
LAYERS = 12
PR_SET_PDEATHSIG = 1

Tell = Callable[..., None]


# Lives.


class Life:
    """A forked process. `body(tell)` runs in it; what it tells arrives here, with the time."""

    def __init__(self, body: Callable[[Tell], None], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._said: list[dict[str, Any]] = []
        self._rest = b""
        self._read_fd, write_fd = os.pipe()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._read_fd)
                code = _live(body, log, env or {}, write_fd)
            finally:
                os._exit(code)
        os.close(write_fd)

    def wait_for(self, name: str, timeout_s: float = LIFE_S) -> dict[str, Any]:
        """The next thing of this name that the life tells."""
        end_s = time.monotonic() + timeout_s
        while True:
            for i, said in enumerate(self._said):
                if said["name"] in (name, "failed"):
                    if said["name"] == "failed":
                        raise LifeError(said["error"])
                    del self._said[: i + 1]
                    return said
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read_fd], [], [], left_s)[0]:
                raise LifeError(f"it did not tell {name!r} within {timeout_s:.0f} s: {self._last_line()}")
            data = os.read(self._read_fd, 1 << 16)
            if not data:
                raise LifeError(f"it ended before it told {name!r}: {self._last_line()}")
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._said += map(json.loads, lines)

    def send(self, number: int) -> float:
        """Send a signal; when that was, on the clock of all processes."""
        at = time.time()
        os.kill(self.pid, number)
        return at

    def end(self, wait_s: float = 0.0) -> int | None:
        """The exit code; a life that has not ended by itself after so many seconds is killed."""
        end_s = time.monotonic() + wait_s
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end_s:
                os.kill(self.pid, signal.SIGKILL)
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            else:
                time.sleep(0.002)
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1
        return self.code

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else "nothing was logged"
        return "nothing was logged"


class LifeError(Exception):
    """A life did not do what it was made for."""


def _live(body: Callable[[Tell], None], log: Path, env: Mapping[str, str], write_fd: int) -> int:
    end_with_parent()
    # The script's own handlers belong to the server.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for theirs in (1, 2):
        os.dup2(fd, theirs)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for name in [name for name in os.environ if name.startswith(("MIGRATOR_", "MIGRATION_"))]:
        del os.environ[name]
    os.environ.update(env)

    def tell(name: str, **fields: Any) -> None:
        # One write of less than a page arrives in one piece, whichever thread makes it.
        os.write(write_fd, (json.dumps({"name": name, "at": time.time(), **fields}) + "\n").encode())

    try:
        body(tell)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        tell("failed", error=f"{type(error).__name__}: {error}"[:400])
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# Servers, in the interpreter of each row.


class Server:
    """The script once more, with `--serve`, in an interpreter that has what its rows need."""

    def __init__(self, script: str, python: str) -> None:
        # One thread for each core is torch's own default, but not under every launcher.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        self._process = subprocess.Popen(
            [python, script, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What the life of this job found; `{"error": ...}` if it went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            return {"error": f"its server is gone: {error}"}
        found: dict[str, Any] = json.loads(line) if line else {"error": "its server ended; see above"}
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            if file is not None:
                with suppress(OSError):
                    file.close()


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The main function of a server. Nothing may compute here: threads of OpenMP do not survive a fork."""
    end_with_parent()
    import torch
    import torch.distributed.checkpoint  # noqa: F401 - as soon as the others

    import migrator  # noqa: F401

    for line in sys.stdin:
        try:
            found = handle(json.loads(line))
        except (LifeError, OSError, ImportError) as error:
            found = {"error": f"{error}"}
        print(json.dumps(found), flush=True)


class Servers:
    """A server for each package, started when it is first asked."""

    def __init__(self, script: str) -> None:
        self._script = script
        self._servers: dict[str, Server] = {}

    def ask(self, job: Mapping[str, Any], package: str | None = None) -> dict[str, Any]:
        python = sys.executable
        if package is not None:
            found, lacks = environment(package)
            if found is None:
                return {"error": f"{package} {lacks}"}
            python = found
        if python not in self._servers:
            self._servers[python] = Server(self._script, python)
        return self._servers[python].ask(job)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()


_ENVIRONMENTS: dict[str, tuple[str | None, str]] = {}
INSTALL_S = 300.0
"""Seconds for the extras of a package, at most."""


def environment(package: str) -> tuple[str | None, str]:
    """The interpreter that has this package, or why there is none. Installed into `.venv-peers`, as for `s3.py`. A
    package may name extras: `dlrover[k8s]`."""
    if package not in _ENVIRONMENTS:
        from s3 import environments

        name = package.partition("[")[0]
        interpreters, lacks = environments([name])
        found, why = interpreters.get(name), lacks.get(name, "")
        if found is not None and name != package:
            install = [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            try:
                subprocess.run(
                    [*install, "-c", str(ROOT / "constraints.txt"), package],
                    check=True,
                    capture_output=True,
                    timeout=INSTALL_S,
                )
            except (OSError, subprocess.SubprocessError) as error:
                found, why = None, f"cannot be installed: {error}"
        _ENVIRONMENTS[package] = (found, why)
    return _ENVIRONMENTS[package]


# A state, and what it costs.


class Training:
    """A GPT-like model and its AdamW in float32, so many MB in all and several hundred tensors. Gradients are fixed: a
    step is the optimizer's alone."""

    def __init__(self, megabytes: int) -> None:
        import torch
        from torch import nn

        parameters = megabytes * 1_000_000 // 12
        width = max(8, int(math.sqrt(0.8 * parameters / (12 * LAYERS))) // 8 * 8)

        def block() -> nn.Module:
            parts = {"ln_1": nn.LayerNorm(width), "attention": nn.Linear(width, 3 * width)}
            parts |= {"projection": nn.Linear(width, width), "ln_2": nn.LayerNorm(width)}
            parts |= {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
            return nn.ModuleDict(parts)

        with torch.device("meta"):
            model = nn.ModuleDict({f"block{i}": block() for i in range(LAYERS)})
            used = sum(p.numel() for p in model.parameters())
            model["embedding"] = nn.Embedding(max(1, (parameters - used) // width), width)
        self.model = model.to_empty(device="cpu")
        data = torch.empty(BLOCK // 4).normal_(generator=torch.Generator().manual_seed(0))
        for parameter in self.model.parameters():
            _fill(parameter.detach().view(-1), data)
            parameter.grad = torch.empty_like(parameter)
            _fill(parameter.grad.view(-1), data)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step()
        self.bytes = sum(tensor.nbytes for tensor in self.tensors().values())

    def step(self) -> None:
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, Any]:
        """All of the state that is a tensor, by one name each."""
        state = self.state()
        found = {f"model/{name}": tensor for name, tensor in state["model"].items()}
        for index, slots in state["optimizer"]["state"].items():
            found |= {f"optimizer/{index}/{name}": tensor for name, tensor in slots.items()}
        return found


def _fill(flat: Any, data: Any) -> None:
    for at in range(0, len(flat), len(data)):
        flat[at : at + len(data)].copy_(data[: len(flat) - at])


class Memory:
    """The most that this process has in memory, beyond what it had when this was made."""

    def __init__(self) -> None:
        import gc

        gc.collect()
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before_kb = _memory_kb("VmRSS")

    def extra_mb(self) -> float:
        return (_memory_kb("VmHWM") - self._before_kb) * 1024 / 1e6


def _memory_kb(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, name
    return int(found[1])


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def begin_ours(training: Training, directory: Path, on_event: Callable[[str, float], None]) -> Any:
    """Our package, listening. `on_event` is called with each event and when it was logged; warnings are printed."""
    from migrator import migrator

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            on_event(getattr(record, "migrator_event", ""), record.created)
            if record.levelno >= logging.WARNING:
                print(record.getMessage(), flush=True)

    logging.getLogger("migrator").addHandler(Handler())
    logging.getLogger("migrator").propagate = False
    migrator.register("model", training.model)
    migrator.register("optimizer", training.optimizer)
    # None is deleted by ours while others are measured; the script deletes them between the saves.
    migrator.listening(ckpt=str(directory), signal=str(directory / "signal"), every="off", keep=1000)
    return migrator


class RawDisk:
    """The limit: as many bytes, past the page cache, from one aligned buffer that is in memory already."""

    def __init__(self) -> None:
        # Private: shared memory has no huge pages here, and then the disk is half as quick.
        self._buffer = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, BLOCK, 1 << 20):
            self._buffer[at : at + (1 << 20)] = os.urandom(1 << 20)

    def write(self, path: Path, size: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
        try:
            # Quicker with the place on the disk known before: the journal is written once.
            os.posix_fallocate(fd, 0, -(-size // 4096) * 4096)
            with ThreadPoolExecutor(RAW_THREADS) as pool:  # one alone leaves the disk idle between two writes
                list(pool.map(lambda at: self._write_block(fd, at, size), range(0, size, RAW_BLOCK)))
            os.fsync(fd)
        finally:
            os.close(fd)
        synced(path.parent)

    def _write_block(self, fd: int, at: int, size: int) -> None:
        # Whole pages: the last one may be longer than what is left.
        end = min(at + RAW_BLOCK, -(-size // 4096) * 4096)
        start = at % len(self._buffer)
        with memoryview(self._buffer)[start : start + end - at] as view:
            while at < end:
                at += os.pwrite(fd, view[at - end :], at)


# Rounds, numbers, tables.


def turns(rows: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """All rows in each round, in another order."""
    for turn in range(rounds):
        for row in random.Random(turn).sample(list(rows), len(rows)):
            yield turn, row


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def size_name(megabytes: float) -> str:
    return f"{megabytes / 1000:g} GB" if megabytes >= 250 else f"{megabytes:g} MB"


def number(value: float) -> str:
    """Three digits that say something."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass
class Table:
    """One question and its answer. `bars`: what a picture shows, a label and a number each."""

    id: str
    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    unit: str = ""
    bars: list[tuple[str, float]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def machine(directory: Path) -> dict[str, Any]:
    """What a reader has to know to compare; no names, no paths."""
    import importlib.metadata

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 1e9),
        "kernel": ".".join(platform.release().split("-")[0].split(".")[:2]),
        "architecture": platform.machine(),
        "filesystem": _filesystem(directory),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_before": os.getloadavg()[0],
    }


def _filesystem(directory: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if directory.resolve().is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


@dataclass
class Result:
    """What one script found. `skipped`: rows that did not run, and why."""

    name: str
    machine: dict[str, Any]
    options: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def skip(self, row: str, why: str) -> None:
        """Loudly, and once."""
        if row not in self.skipped:
            self.skipped[row] = why
            print(f"SKIPPED {row}: {why}", file=sys.stderr, flush=True)

    def finish(self, path: Path | None) -> None:
        """Print all of it, and write the numbers into this file."""
        for table in self.tables:
            print(f"\n**{table.title}**\n\n{table.markdown()}")
        for row, why in self.skipped.items():
            print(f"\nSKIPPED {row}: {why}")
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent == RESULTS:
            (RESULTS / ".gitignore").write_text("*\n")
        data = {**vars(self), "tables": [vars(table) for table in self.tables]}
        path.write_text(json.dumps(data, indent=1))


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options that all three scripts have."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--short", action="store_true", help="small states, few rounds: does it still work?")
    found.add_argument("--rounds", type=int, help="how often each row runs")
    found.add_argument("--pause", type=float, help=f"seconds between a deletion and the next save ({PAUSE_S:.0f})")
    found.add_argument("--only", help="names of rows, separated by semicolons")
    found.add_argument("--dir", type=Path, default=ROOT, help="on the disk to be measured (the checkout)")
    found.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where the numbers go as well")
    found.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return found


def pause_s(options: argparse.Namespace) -> float:
    found: float | None = options.pause
    return found if found is not None else 0.0 if options.short else PAUSE_S


def chosen(rows: Mapping[str, Any], only: str | None, usage: argparse.ArgumentParser) -> list[str]:
    names = only.split(";") if only else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        usage.error(f"unknown: {unknown}; there are {'; '.join(rows)}")
    return names


@contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """A directory on the disk to be measured. It is deleted at the end, also at the end by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place) as directory:
        yield Path(directory)


def emptied(directory: Path) -> None:
    """What a life has left is not written back, and not deleted, while the next one is measured."""
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()


def say_how_idle() -> None:
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before it began" + (": NOT IDLE" if load > 0.5 else ""), flush=True)
