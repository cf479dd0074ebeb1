"""How soon a job trains again after a restart, beside other ways to load the same state.

    python benchmarks/restart.py [--mb 1024] [--rounds 5] [--touched] [--json FILE]

The state is a model like GPT with AdamW, after one step. Each way loads it in a fresh process that has imported torch
and made the model and the optimizer, as any script has; then the process trains one step. Cold: the files were dropped
from the page cache before. Warm: they were read before. The ways take turns; the table has the medians of all rounds.

"import", "begin" (`listening()`), "load" and "first step" are seconds. "to a step" is their sum without the import:
what passes until the first step is done. "torch.load takes" is how many times as long it takes: for the load, and to a
step. A way that maps the file reads it in its first step. "extra" is the peak of the resident memory during the load,
beyond what was there before and the optimizer's state; mapped pages of a file count. "limit" is the same number of
bytes read from the ckpt's own file into memory that is there already, and used again for each piece.

`--touched`: a larger model with an optimizer that has no state (SGD). So the memory of every tensor is there before the
load, as it is for the model's part of any job.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LAYERS = 11
CONTEXT = 64
WORDS_PER_WIDTH = 11
"""Rows of the table of words, in widths of the model."""
TOUCHED = "BENCH_RESTART_TOUCHED"
"""Is there where the option was given, for all processes."""
TIMEOUT_S = 300.0
"""Maximum time of one process."""


def model_of(megabytes: int) -> Any:
    """A model that has, with AdamW's state, about so many MB in fp32; about 400 large tensors in all."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(self.before(x)).chunk(3, dim=-1)
            x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
            return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    class Model(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS_PER_WIDTH * width, width)
            self.places = nn.Embedding(CONTEXT, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
            self.last = nn.LayerNorm(width)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.words(words) + self.places(torch.arange(words.shape[-1]))
            for block in self.blocks:
                x = block(x)
            return self.last(x) @ self.words.weight.T

    per_square = (12 * LAYERS + WORDS_PER_WIDTH) * 4 * 3
    width = max(64, round(math.sqrt(megabytes * 1e6 / per_square) / 64) * 64)
    # Not by the random initialization of torch: it takes much longer than all that is measured here.
    with torch.device("meta"):
        model = Model(width)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.fill_(0.01 * (1 + i % 7))
    return model


def objects(megabytes: int) -> tuple[Any, Any]:
    import torch

    if TOUCHED in os.environ:
        model = model_of(3 * megabytes)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)
    model = model_of(megabytes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: Any, optimizer: Any) -> None:
    import torch

    words = torch.arange(CONTEXT // 2)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(words), words).backward()
    optimizer.step()


# --- the ways, each in a process of its own


def save_all(directory: Path, megabytes: int, ways: list[str]) -> None:
    import torch

    model, optimizer = objects(megabytes)
    migrator = _migrator(directory, model, optimizer)
    migrator.listening()
    train_step(model, optimizer)
    optimizer.zero_grad()
    migrator.safe_point()
    assert migrator.save_ckpt()
    if any(way.startswith("torch.load") for way in ways):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "torch.pt")
    if "safetensors" in ways:
        from safetensors.torch import save_file

        state = optimizer.state_dict()["state"]
        flat = {f"{i}.{key}": tensor for i, entry in state.items() for key, tensor in entry.items()}
        save_file(
            {**{f"model.{key}": t for key, t in model.state_dict().items()}, **flat}, directory / "one.safetensors"
        )
    if "DCP" in ways:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=str(directory / "dcp"), no_dist=True)
    each = 1 if TOUCHED in os.environ else 3
    print(
        json.dumps(
            {"bytes": each * sum(p.nbytes for p in model.parameters()), "tensors": each * len(list(model.parameters()))}
        )
    )


def _migrator(directory: Path, model: Any, optimizer: Any) -> Any:
    os.environ["MIGRATOR_CKPT"] = str(directory / "ckpts")
    os.environ["MIGRATOR_SIGNAL"] = str(directory / "signal")
    from migrator import migrator

    migrator.register("model", model)
    migrator.register("optimizer", optimizer)
    return migrator


def restart_migrator(directory: Path, model: Any, optimizer: Any, mark: Callable[[str], None]) -> None:
    import migrator.api

    mark("import")
    migrator = _migrator(directory, model, optimizer)
    migrator.listening()
    mark("begin")
    assert migrator.load_ckpt()
    mark("load")


def restart_torch(directory: Path, model: Any, optimizer: Any, mark: Callable[[str], None], **how: Any) -> None:
    import torch

    mark("begin")
    state = torch.load(directory / "torch.pt", weights_only=True, **how)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    mark("load")


def restart_mapped(directory: Path, model: Any, optimizer: Any, mark: Callable[[str], None]) -> None:
    restart_torch(directory, model, optimizer, mark, mmap=True)


def restart_safetensors(directory: Path, model: Any, optimizer: Any, mark: Callable[[str], None]) -> None:
    from safetensors.torch import load_file

    mark("import")
    mark("begin")
    found = load_file(directory / "one.safetensors")
    state: dict[int, dict[str, Any]] = {}
    for name in [name for name in found if not name.startswith("model.")]:
        number, key = name.split(".")
        state.setdefault(int(number), {})[key] = found.pop(name)
    model.load_state_dict({key.removeprefix("model."): tensor for key, tensor in found.items()})
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    mark("load")


def restart_dcp(directory: Path, model: Any, optimizer: Any, mark: Callable[[str], None]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mark("import")
    mark("begin")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=str(directory / "dcp"), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    mark("load")


WAYS: dict[str, Callable[..., None]] = {
    "migrator": restart_migrator,
    "torch.load": restart_torch,
    "torch.load(mmap=True)": restart_mapped,
    "safetensors": restart_safetensors,
    "DCP": restart_dcp,
}


def restart(directory: Path, megabytes: int, way: str) -> None:
    import torch

    model, optimizer = objects(megabytes)
    # Whatever torch does once only, for all ways alike: its threads, the modules that an optimizer imports.
    other = torch.nn.Linear(4, 4)
    first = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 4)).sum().backward()
    first.step()
    has_peak = _forget_peak()
    before = _resident("VmRSS")
    taken: dict[str, float] = {"import": 0.0, "begin": 0.0}
    last_s = time.perf_counter()

    def mark(phase: str) -> None:
        nonlocal last_s
        taken[phase] = time.perf_counter() - last_s
        last_s = time.perf_counter()

    WAYS[way](directory, model, optimizer, mark)
    fresh = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    extra = _resident("VmHWM") - before - fresh if has_peak else math.nan
    last_s = time.perf_counter()
    train_step(model, optimizer)
    mark("step")
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == ({2} if optimizer.state else set()), f"{way} went on from another step: {steps}"
    print(json.dumps({**taken, "extra": extra}), flush=True)
    os._exit(0)  # what a process does at its end is not measured


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    return math.nan


def limit(directory: Path) -> None:
    """Read the part into memory that is there: what is in the page cache in large calls by two threads, else around it.

    These were the fastest of all ways that were tried: of O_DIRECT, 4 MiB by four threads into huge pages.
    """
    (path,) = (directory / "ckpts").glob("*/*/*.safetensors")
    size, memory = path.stat().st_size, mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(b"\1" * len(memory))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(1)], size // 2, os.RWF_NOWAIT)
        threads, piece = 2, 64 << 20
    except BlockingIOError:
        threads, piece = 4, 4 << 20
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    room = memoryview(memory)

    def read(number: int) -> None:
        for at in range(number * piece, size, threads * piece):
            os.preadv(fd, [room[number * piece : (number + 1) * piece]], at)

    start_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    print(json.dumps({"load": time.perf_counter() - start_s}))


# --- the comparison


def child(*args: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *map(str, args)]
    # Without this variable: under it each process would compile the checkout again; an installed package is compiled.
    compiled = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=compiled)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}\n{found.stderr}")
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


def prepare(path: Path, is_cold: bool) -> None:
    """Put a file, or all files of a directory, out of the page cache or into it."""
    for place in [path, *path.rglob("*")]:
        if place.is_file():
            fd = os.open(place, os.O_RDONLY)
            if is_cold:
                os.fsync(fd)  # what was not written yet cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(fd, 16 << 20):
                    pass
            os.close(fd)


def compare(directory: Path, megabytes: int, rounds: int, ways: list[str], caches: list[str]) -> dict[str, Any]:
    about = child("save", directory, megabytes, ",".join(ways))
    found: dict[str, dict[str, list[dict[str, float]]]] = {cache: {w: [] for w in [*ways, "limit"]} for cache in caches}
    for number in range(rounds):
        for cache in caches:
            for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
                files = {"migrator": "ckpts", "torch": "torch.pt", "safetensors": "one.safetensors", "DCP": "dcp"}
                prepare(directory / files[way.partition(".")[0]], cache == "cold")
                found[cache][way].append(child("restart", directory, megabytes, way))
            prepare(directory / "ckpts", cache == "cold")
            found[cache]["limit"].append(child("limit", directory))
    medians = {
        cache: {
            way: {key: statistics.median(one[key] for one in all_rounds) for key in all_rounds[0]}
            for way, all_rounds in of_cache.items()
            if all_rounds
        }
        for cache, of_cache in found.items()
    }
    return {**about, "rounds": rounds, "medians": medians, "all": found}


def show(result: dict[str, Any]) -> None:
    size = result["bytes"]
    print(f"{size / 1e6:.0f} MB, {result['tensors']} tensors, medians of {result['rounds']} rounds")
    for cache, rows in result["medians"].items():
        print(f"\n{cache:22} import  begin   load   GB/s  first step  to a step  torch.load takes  extra MB")
        base = rows.get("torch.load")
        for way, row in rows.items():
            speed = size / row["load"] / 1e9
            if way == "limit":
                print(f"{way:22} {row['load']:21.3f} {speed:6.1f}")
                continue
            ratio = f"{base['load'] / row['load']:5.2f} {_until_step(base) / _until_step(row):5.2f}" if base else ""
            print(
                f"{way:22} {row['import']:6.3f} {row['begin']:6.3f} {row['load']:7.3f} {speed:6.1f} "
                f"{row['step']:11.3f} {_until_step(row):10.3f} {ratio:>17} {row['extra'] / 1e6:9.0f}"
            )


def _until_step(row: dict[str, float]) -> float:
    return row["begin"] + row["load"] + row["step"]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        what, directory, *rest = sys.argv[2:]
        if what == "save":
            save_all(Path(directory), int(rest[0]), rest[1].split(","))
        elif what == "restart":
            restart(Path(directory), int(rest[0]), rest[1])
        else:
            limit(Path(directory))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="MB of model and optimizer together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS), help="which ones, with commas between")
    parser.add_argument("--touched", action="store_true", help="all memory is there before the load")
    parser.add_argument("--cache", choices=("cold", "warm", "both"), default="both")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    chosen = parser.parse_args()
    if chosen.touched:
        os.environ[TOUCHED] = "1"
    caches = ["cold", "warm"] if chosen.cache == "both" else [chosen.cache]
    directory = Path(tempfile.mkdtemp(prefix="restart-", dir=Path.cwd()))
    try:
        result = compare(directory, chosen.mb, chosen.rounds, chosen.ways.split(","), caches)
    finally:
        shutil.rmtree(directory)
    show(result)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
