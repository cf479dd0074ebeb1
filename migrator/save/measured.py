"""How many bytes a save would write, for `python -m migrator.grace train.py`: measured behind the first step.

The script runs as always, on a root of its own, until each rank knows what a save of it writes: an optimizer has no
state before its first step. Then the process ends, and nothing was saved.

The price: what the script itself does until then (its own files, a tracker of experiments) it does for good.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from migrator.save.results import Unclean

if TYPE_CHECKING:
    from migrator.save.context import SaveContext
    from migrator.save.frozen_state import FrozenState

_OTHERS_S = 30.0
"""Seconds to wait for the other ranks. The first one that ends may end them all."""


def note_and_end(file: Path, context: SaveContext) -> None:
    """Write the size into `<file>.<rank>`, wait for the other ranks, and end the process."""
    state = _state(context)
    # What all ranks have alike is counted once.
    keys = state.tensors if context.rank == 0 else state.own
    trees = len(json.dumps([state.objects, state.extra], default=str))
    size = sum(state.tensors[key].nbytes for key in keys) + trees
    mine, aside = _of(file, context.rank), file.with_name(f".{file.name}.{context.rank}")
    aside.write_text(json.dumps({"bytes": size, "ranks": context.size}))
    aside.replace(mine)
    end_s = time.monotonic() + _OTHERS_S
    while time.monotonic() < end_s and not all(_of(file, rank).exists() for rank in range(context.size)):
        time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)


def _state(context: SaveContext) -> FrozenState:
    """What would be written. The loop goes on, so a safe point may be over before it was looked at."""
    # Not above: the command, which calls `found`, needs no torch.
    from migrator.save.frozen_state import FrozenState

    end_s = time.monotonic() + _OTHERS_S
    while True:
        try:
            assert context.gate.capture is not None
            return FrozenState(context, context.gate.capture)
        except Unclean:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


def _of(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.{rank}")


def found(file: Path) -> tuple[int, int] | None:
    """Bytes and ranks, as soon as all ranks have written theirs."""
    try:
        first = json.loads(_of(file, 0).read_text())
        sizes = [json.loads(_of(file, rank).read_text())["bytes"] for rank in range(first["ranks"])]
    except FileNotFoundError:
        return None
    return sum(sizes), first["ranks"]
