"""What is copied at a safe point, so that a save can begin at any later moment.

A capture holds everything that may move on before the next optimizer step: random
states, param_groups, schedulers, registered dicts and lists, module buffers, the
place in the loop. Large tensors are not in it; a mark tells whether they are
still those of the safe point.

An object whose capture would slow the loop by more than a hundredth is left out
of the ordinary captures and taken only when a save is due: such a save has to
wait for a safe point. It is named once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from migrator.state.adapters import base as kinds
from migrator.state import random_state as randomness
from migrator.state.change_detector import Contents, Mark
from migrator.events import log
from migrator.state.registry import Registry

COSTLY_SHARE = 0.01
_TRIES = 20
"""So often is an object copied that another thread changes meanwhile, before this safe point does without it."""
STRIKES = 8
"""So many costly captures in a row; a single slow one says nothing."""
_FLOOR_S = {"module": 150e-6, "optimizer": 150e-6}
_FLOOR_OTHERS_S = 20e-6


@dataclass
class Capture:
    """One safe point."""

    step: int
    random: dict[str, Any]
    values: dict[str, Any]
    marks: dict[str, Mark]
    loop: dict[str, Any] | None
    missing: frozenset[str] = frozenset()
    """Objects too costly to capture at every safe point; a capture that lacks some cannot be saved."""
    spoiled: bool = False
    """A tensor changed since, outside a step: this safe point can no longer be saved."""
    changed: list[str] = field(default_factory=list, repr=False)
    """The objects whose tensors the training thread itself found changed, while a save was reading."""
    pins: int = field(default=0, repr=False)
    turn: int = 0
    """How many rounds were entered since the step, without another one."""

    @property
    def at(self) -> tuple[int, int]:
        return self.step, self.turn

    @property
    def place(self) -> str:
        """Where in the script the loop stands, as other ranks would say it. Behind a step they all stand alike: empty.

        A rank may enter loops that the others do not, so that the same turn is not the same place.
        """
        if not self.turn:
            return ""
        loop = self.loop or {}
        # Without what the loader looks like: each rank may have data of its own.
        loops = [
            (label.partition(" | ")[0], state.get("handed"), state.get("is_over"))
            for label, state in loop.get("loops", {}).items()
        ]
        return xxhash.xxh3_64(repr((loops, loop.get("epochs"))).encode()).hexdigest()


class _Restless(Exception):  # noqa: N818 - internal
    """Another thread changes the object."""


class Capturer:
    """Takes captures and keeps an eye on their price."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._deferred: set[str] = set()
        self._strikes: dict[str, int] = {}
        self._last_s = 0.0
        self._marks: dict[str, Mark] = {}
        self.restless: set[str] = set()
        """Objects that the last capture could not copy, since another thread changed them each time."""
        self._named: set[str] = set()

    def take(self, step: int, loop: dict[str, Any] | None, *, full: bool, turn: int = 0) -> Capture:
        """Capture all registered objects; `full` takes the costly ones too."""
        start_s = perf_counter()
        interval_s, self._last_s = start_s - self._last_s, start_s
        values: dict[str, Any] = {}
        marks: dict[str, Mark] = {}
        # Random states first: nothing below draws, but a state_dict() of the script's own might.
        random = randomness.capture()
        restless: set[str] = set()
        for name, kind in self._registry:
            if not full and name in self._deferred:
                continue
            before_s = perf_counter()
            try:
                value = values[name] = self._copied(name, kind)
            except _Restless:
                restless.add(name)
                continue
            marks[name] = Mark(kind.watched(value), self._marks.get(name))
            self._weigh(name, kind, perf_counter() - before_s, interval_s)
        self._marks = marks
        # At once: a save that fails meanwhile asks why no safe point could be copied.
        self.restless = restless
        missing = frozenset(restless) if full else frozenset(self._deferred | restless)
        return Capture(step, random, values, marks, loop, missing, turn=turn)

    def contents(self) -> dict[str, Contents]:
        """What all registered tensors hold now, small ones too; buffers change by looking at data and say nothing."""
        return {name: Contents(_tensors(kind.target)) for name, kind in self._registry}

    def have_changed(self, before: dict[str, Contents]) -> bool:
        return any(contents.differ(_tensors(self._registry[name].target)) for name, contents in before.items())

    def _copied(self, name: str, kind: kinds.Kind) -> Any:
        """What the object captures. It may be in use by another thread of the script: such a copy is made again."""
        error: RuntimeError
        for _ in range(_TRIES):
            try:
                return kind.capture()
            except RuntimeError as caught:
                # Of dict, OrderedDict, set and deque alike: "changed size", "mutated", "keys changed".
                if "during iteration" not in str(caught):
                    raise
                error = caught
            sleep(0)  # the other thread gets on with it
        if name not in self._named:
            self._named.add(name)
            log(
                "changed_while_copied",
                level=logging.WARNING,
                object=name,
                why=error,
                means="another thread changes it all the time, so this safe point cannot be saved and the next one is "
                "tried; let that thread change a copy, or hold a lock that its state_dict() takes too",
            )
        raise _Restless

    def _weigh(self, name: str, kind: kinds.Kind, cost_s: float, interval_s: float) -> None:
        if cost_s < _FLOOR_S.get(kind.kind, _FLOOR_OTHERS_S) or cost_s < COSTLY_SHARE * interval_s:
            self._strikes.pop(name, None)
            return
        self._strikes[name] = self._strikes.get(name, 0) + 1
        if self._strikes[name] == STRIKES and name not in self._deferred:
            self._deferred.add(name)
            log(
                "capture_costly",
                level=logging.WARNING,
                object=name,
                cost_us=round(cost_s * 1e6),
                step_us=round(interval_s * 1e6),
                means="it is captured only when a save is due, so a save waits for the next safe point; "
                "keep it shorter or out of the registered objects to be saved at any moment",
            )

    def release(self, capture: Capture) -> None:
        """Give the copies of a capture that nobody needs any more back for reuse."""
        for name, value in capture.values.items():
            self._registry[name].release(value)

    def changed(self, capture: Capture) -> list[str]:
        """Names of the objects whose large tensors are not those of the safe point any more."""
        found = []
        for name, mark in capture.marks.items():
            try:
                if mark.differs(self._registry[name].watched(capture.values[name])):
                    found.append(name)
            except (RuntimeError, KeyError):  # the script is adding modules or parameters this very moment
                found.append(name)
        return found


def _tensors(target: Any) -> list[Tensor]:
    if isinstance(target, nn.Module):
        return list(target.parameters())
    values = target.values() if isinstance(target, dict) else target if isinstance(target, list) else [target]
    found = [torch.from_numpy(v) if type(v) is np.ndarray and v.dtype.kind in "biufc" else v for v in values]
    return [value for value in found if isinstance(value, Tensor)]
