"""What a hostile file must not bring about, watched while it is read: code, other files, memory beyond its size.

The interpreter itself tells what is done, by its audit events: whatever compiles, imports, starts or opens something
passes there, in every thread, whoever asked for it. Memory is counted where Python and torch hand it out.
"""

from __future__ import annotations

import builtins
import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from migrator.ckpt import tensor_file

CODE = (
    *("exec", "compile", "import", "code.__new__", "function.__new__", "marshal.loads", "pickle.find_class"),
    *(
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "os.startfile",
    ),
    *("ctypes.dlopen", "ctypes.dlsym", "socket.connect", "socket.bind", "builtins.input", "cpython.run_command"),
)
PATHS = {
    **dict.fromkeys(("open", "os.listdir", "os.scandir", "os.chdir"), 1),
    **dict.fromkeys(("os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.chmod", "os.chown", "os.utime"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copyfile"), 2),
}
"""Events that name files, and how many of their arguments do."""
LOOKS = ("open", "os.listdir", "os.scandir", "os.chdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class Witness:
    """What was done that a file must not bring about."""

    root: Path
    may_write: bool
    code: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CODE:
            self.code.append(f"{event} {str(arguments)[:200]}")
        elif event in PATHS:
            for path in arguments[: PATHS[event]]:
                if isinstance(path, (str, bytes, os.PathLike)):
                    self._see_path(event, os.fsdecode(path), arguments)

    def _see_path(self, event: str, path: str, arguments: tuple[Any, ...]) -> None:
        # Where it leads to in the end, whatever links there are on the way; what is taken away is the link itself.
        directory, name = os.path.split(path)
        real = os.path.realpath(path) if event in LOOKS else f"{os.path.realpath(directory)}/{name}"
        if real != str(self.root) and not real.startswith(f"{self.root}/"):
            self.outside.append(f"{event} {path} -> {real}")
        mode = arguments[1] if event == "open" and isinstance(arguments[1], str) else "r"
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if event not in LOOKS or set(mode) & set("wax+") or flags & WRITING:
            self.written.append(f"{event} {path}")

    def check(self) -> None:
        assert not self.code, f"code ran: {self.code}"
        assert not self.outside, f"files outside of {self.root} were opened: {self.outside}"
        assert self.may_write or not self.written, f"files were written: {self.written}"


_witness: Witness | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # Once there, a hook stays until the end of the process; so it has to cost little when nobody watches.
    global _witness
    witness = _witness
    if witness is None:
        return
    # What the witness itself does is nobody's business.
    _witness = None
    try:
        witness.see(event, arguments)
    finally:
        _witness = witness


sys.addaudithook(_hook)


@contextmanager
def watched(root: Path, *, may_write: bool = False) -> Iterator[Witness]:
    """No code, nothing outside of `root`, and nothing written unless it may be."""
    global _witness
    witness = _witness = Witness(Path(os.path.realpath(root)), may_write)
    try:
        yield witness
    finally:
        # Also if it ends in an error: one that is ours says nothing of what was done before.
        _witness = None
        witness.check()


@dataclass
class Meter:
    """Bytes asked for at the same time at most by Python and numpy, and altogether by torch and for reading."""

    python: int = 0
    asked: int = 0

    @property
    def bytes(self) -> int:
        return self.python + self.asked


@contextmanager
def measured(at_most: int, *, closely: bool = True) -> Iterator[Meter]:
    """Counts what is asked for, whether it is granted or not: a claim of 2^60 bytes must not even be tried.

    `closely`: also what Python and numpy take, which makes all of it several times slower.
    """
    meter = Meter()
    empty = torch.empty

    def counted_empty(*size: Any, **more: Any) -> torch.Tensor:
        lengths = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
        count = (more.get("dtype") or torch.float32).itemsize
        for length in lengths:
            count *= int(length)
        meter.asked += count
        return empty(*size, **more)

    def counted_bytearray(*arguments: Any) -> bytearray:
        if arguments and isinstance(arguments[0], int):
            meter.asked += arguments[0]
        return builtins.bytearray(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted_empty)
        patch.setattr(tensor_file, "bytearray", counted_bytearray, raising=False)
        if closely:
            tracemalloc.start()
        try:
            yield meter
        finally:
            if closely:
                meter.python = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert meter.bytes <= at_most, f"{meter} for at most {at_most}"
