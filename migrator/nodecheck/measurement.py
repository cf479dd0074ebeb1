"""What one rank does in one round: matmul by itself, then all-reduce with its group, both timed.

The group is a process group of its own, made for this round and thrown away after it:
a group in which a rank has died or hangs cannot be used again. All its waits have the
deadline of the round. The ranks meet before each timed part, so a rank is not charged
for the time that it waits for another one.

With a GPU the matmul runs there, and the all-reduce goes through NCCL. This part has
not run on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

_SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices."""
_ELEMENTS = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Elements, of 4 bytes each, of the tensor that is reduced."""
_PASSES = {"cpu": 1, "cuda": 10}
"""Repetitions on this device for each one that is asked for: a GPU is done with one too soon to tell."""
_LOOK_S = 0.0005
"""Time, in seconds, between two looks whether a GPU is done."""


class Failed(Exception):  # noqa: N818 - the name says what happened
    """The round failed for this rank; the message says in which part."""


@dataclass(frozen=True)
class Times:
    """Seconds."""

    matmul_s: float
    allreduce_s: float
    """0 if the rank was alone."""

    @property
    def elapsed_s(self) -> float:
        return self.matmul_s + self.allreduce_s


class Measurement:
    """One round of one rank."""

    def __init__(self, store: Callable[[], Any], rank: int, group: Sequence[int], *, repeat: int, end_s: float) -> None:
        self._store = store
        self._rank = rank
        self._group = [*group]
        self._repeat = repeat
        self._end_s = end_s
        self.doing = "begin"
        """What the rank does now: part of the message if it hangs there."""

    def run(self) -> Times:
        """Measure; `Failed` if the group did not work, or not in time."""
        try:
            return self._run()
        except (RuntimeError, OSError, ValueError) as error:
            found = (str(error) or repr(error)).splitlines()[0]
            raise Failed(f"{self.doing}: {found}") from error

    def _run(self) -> Times:
        device = _device()
        kind = device.type
        self.doing = "prepare the matmul"
        left, right = (torch.randn(_SIDE[kind], _SIDE[kind], device=device) for _ in range(2))
        _done(torch.matmul(left, right), self._left_s)
        group: Any = None
        if len(self._group) > 1:
            others = [rank for rank in self._group if rank != self._rank]
            self.doing = f"connect to {named(others)}"
            group = self._new_group(device)
            self.doing = f"meet {named(others)} before the matmul"
            self._reduce(group, torch.ones(1, device=device))

        self.doing = "matmul"
        matmul_s = 0.0
        for _ in range(self._repeat):
            begin_s = time.perf_counter()
            for _ in range(_PASSES[kind]):
                product = torch.matmul(left, right)
            _done(product, self._left_s)
            matmul_s += time.perf_counter() - begin_s
        if group is None:
            return Times(matmul_s, 0.0)

        self.doing = f"meet {named(others)} before the all-reduce"
        self._reduce(group, torch.ones(1, device=device))
        self.doing = f"all-reduce with {named(others)}"
        allreduce_s, sum_of_ranks = 0.0, float(sum(self._group))
        data = torch.empty(_ELEMENTS[kind], device=device)
        for _ in range(self._repeat):
            data.fill_(self._rank)
            begin_s = time.perf_counter()
            self._reduce(group, data)
            allreduce_s += time.perf_counter() - begin_s
            if not torch.all(data == sum_of_ranks):
                raise Failed(f"{self.doing}: the sum is wrong; expected {sum_of_ranks:g} in each element")
        return Times(matmul_s, allreduce_s)

    def _new_group(self, device: torch.device) -> Any:
        # Of the module, as these classes are not in every build of torch.
        made = vars(distributed)
        rank, size, store = self._group.index(self._rank), len(self._group), self._store()
        timeout = timedelta(seconds=self._left_s())
        if device.type == "cuda":
            options = made["ProcessGroupNCCL"].Options()
            options._timeout = timeout
            with _errors_do_not_end_the_process():
                return made["ProcessGroupNCCL"](store, rank, size, options)
        return made["ProcessGroupGloo"](store, rank, size, timeout)

    def _reduce(self, group: Any, data: torch.Tensor) -> None:
        """Sum the tensor over the group, in place."""
        options = distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=self._left_s())
        work = group.allreduce([data], options)
        if data.device.type == "cpu":
            work.wait(timedelta(seconds=self._left_s()))
            return
        # This only lets the stream wait for NCCL; who waits for the stream would hang with it.
        work.wait()
        try:
            _done(data, self._left_s)
        except Failed:
            group.abort()
            raise

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise Failed(f"{self.doing}: no end before the deadline of the round")
        return left_s


def named(ranks: Sequence[int]) -> str:
    """Ranks, for a message: `rank 3`, `ranks 0-3,6`."""
    if not ranks:
        return "nobody"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = (str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(shown)}"


def _device() -> torch.device:
    if torch.cuda.is_available() and distributed.is_nccl_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _done(data: torch.Tensor, left_s: Callable[[], float]) -> None:
    """Return when the device has computed this tensor; the CPU has."""
    if data.device.type == "cpu":
        left_s()
        return
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    while not done.query():
        left_s()
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _errors_do_not_end_the_process() -> Iterator[None]:
    """NCCL's watchdog would end the process at the first error of a group, before it could report."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
