"""What a test does to a volume with its own hands, in this process: lives, ckpts, marks, and the system calls seen.

Nothing here trains or starts a process. A ckpt is one small part with its manifest, as a committed one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from migrator.ckpt.generations import Generation, claim
from migrator.ckpt.leaving_mark import LeavingMark, put_mark, wait_for_leaving
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import MANIFEST, ckpt_name, part_name, record_name
from migrator.ckpt.part_writer import write_part
from migrator.storage.base import Storage
from migrator.storage.posix import PosixStorage, kind_of

ABOUT = {"script": "train.py", "argv": ["--lr", "0.1"], "host": "pod-0"}
ASIDE = ".part.000000000000.tmp"
"""The name of a file that is being written."""


# Lives.


def live(storage: PosixStorage, *, fresh: bool = False) -> Generation:
    return claim(storage, fresh=fresh, about=ABOUT)


def record(storage: PosixStorage, number: int) -> Path:
    return storage.directory / "generations" / f"{number:06d}.json"


def mark(storage: PosixStorage, number: int) -> Path:
    return storage.directory / "generations" / f"{number:06d}.leaving"


def mark_leaving(storage: Storage, generation: int, grace_s: float) -> None:
    """Put a mark that does not change."""
    put_mark(storage, generation, LeavingMark(grace_s))


class Clock:
    """Time that passes only while somebody sleeps; what happens meanwhile is up to the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[float, Any]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        while self.events and self.events[0][0] <= self.now - 100.0 + 1e-9:
            self.events.pop(0)[1]()

    def wait(self, storage: PosixStorage, lineage: tuple[int, ...]) -> float:
        return wait_for_leaving(storage, lineage, clock=self, sleep=self.sleep)


# Ckpts.


def written(storage: PosixStorage, generation: int, step: int, **said: Any) -> Manifest:
    """The part of a ckpt that is not committed yet."""
    name = ckpt_name(generation, step)
    part = write_part(storage, f"{name}/{part_name(0, 1)}", {"w": torch.full((3,), float(step))})
    return Manifest(generation, step, "job", 1, (part,), {}, written=said)


def save(storage: PosixStorage, generation: int, step: int, **said: Any) -> str:
    """The name of a ckpt that was committed; `said` is what its writer says of itself."""
    manifest = written(storage, generation, step, **said)
    storage.put(f"{manifest.ckpt}/{MANIFEST}", manifest.to_bytes(), exclusive=True)
    return manifest.ckpt


# Files.


def names_in(directory: Path) -> list[str]:
    """All of them, hidden ones too."""
    return sorted(path.name for path in directory.iterdir())


def stamped(storage: PosixStorage, name: str, *, later_than: int, by_s: float) -> Path:
    """A file or directory that was written so many seconds after a life had begun, by the storage's clock."""
    path = storage.directory / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.touch()
    began = storage.modified(record_name(later_than))
    assert began is not None
    os.utime(path, (began + by_s, began + by_s))
    return path


# Calls.


def failing(code: int) -> Any:
    """A verb of a storage that fails with this error of the system."""

    def call(*_: Any, **__: Any) -> Any:
        raise kind_of(code)("it fails", errno=code)

    return call


class Calls:
    """What the kernel was asked for, in order; and what it is to answer with an error."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        self.fail: dict[tuple[str, str], int] = {}
        for name in ("fsync", "link", "rename", "mkdir", "unlink", "rmdir", "pwritev"):
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            shown = self._shown(self._path(arguments[1 if name in ("link", "rename") else 0]))
            self.made.append((name, shown))
            code = self.fail.get((name, shown))
            if code is not None:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **more)

        return call

    @staticmethod
    def _path(argument: Any) -> Path:
        return Path(f"/proc/self/fd/{argument}").readlink() if isinstance(argument, int) else Path(argument)

    @staticmethod
    def _shown(path: Path) -> str:
        return "aside" if path.name.startswith(".") else path.name
