"""How fast a part is written and read back, beside torch.save, safetensors and a plain file write.

    python benchmarks/save.py [MB]

All write the same state to the same directory and make it durable (fsync of the file). "plain write" is the same
number of bytes through an ordinary buffered file. Reads are from a warm page cache into memory of their own (a mapped
file is copied). Medians of several rounds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROUNDS = 5


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.randn(1 << 20) for i in range(max(1, megabytes // 4))}


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_plain(state: dict[str, torch.Tensor], path: Path) -> None:
    size = sum(t.nbytes for t in state.values())
    block = memoryview(bytearray(os.urandom(1 << 20)) * 64)
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, len(block)):
            file.write(block[: min(len(block), size - at)])
        os.fsync(file.fileno())


def write_torch(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path)
    synced(path)


def write_safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path)
    synced(path)


def write_migrator(state: dict[str, torch.Tensor], path: Path) -> None:
    from migrator.ckpt.part_writer import write_part
    from migrator.storage.posix import PosixStorage

    storage = PosixStorage(path, "job")
    write_migrator.record = write_part(storage, "000001-000000000001/part-00000-of-00001.safetensors", state)  # type: ignore[attr-defined]


def read_migrator(state: dict[str, torch.Tensor], path: Path) -> None:
    from migrator.ckpt.tensor_file import read_part
    from migrator.storage.posix import PosixStorage

    read_part(PosixStorage(path, "job"), "000001-000000000001", write_migrator.record, state)  # type: ignore[attr-defined]


def timed(action: Callable[..., Any], *args: Any) -> float:
    start_s = time.perf_counter()
    action(*args)
    return time.perf_counter() - start_s


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    state = state_of(megabytes)
    size = sum(t.nbytes for t in state.values())
    ways: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
        "plain write": (write_plain, None),
        "migrator": (write_migrator, read_migrator),
        "safetensors": (
            write_safetensors,
            lambda _, path: {key: tensor.clone() for key, tensor in load_file(path).items()},
        ),
        "torch.save": (write_torch, lambda _, path: torch.load(path, weights_only=True)),
    }
    writes: dict[str, list[float]] = {name: [] for name in ways}
    reads: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        for _ in range(ROUNDS):
            for name, (write, read) in ways.items():
                path = Path(directory) / name.split()[0]
                writes[name].append(timed(write, state, path))
                if read is not None:
                    reads[name].append(timed(read, state, path))
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    plain_s = statistics.median(writes["plain write"])
    print(
        f"{size / 1e6:.0f} MB, {len(state)} tensors, median of {ROUNDS} rounds; every migrator read verifies every byte"
    )
    for name in ways:
        write_s = statistics.median(writes[name])
        line = f"{name:20} write {size / write_s / 1e9:5.2f} GB/s  {plain_s / write_s:5.2f} of the plain write"
        if reads[name]:
            line += f"   read (warm) {size / statistics.median(reads[name]) / 1e9:5.2f} GB/s"
        print(line)


if __name__ == "__main__":
    main()
