"""The copy of the small state at a safe point, so that a save can start at any later time.

A capture contains everything that may change before the next optimizer step: random
states, param_groups, schedulers, registered dicts and lists, module buffers, the
position in the loop. It does not contain large tensors; marks show whether these are
still the same as at the safe point.

An object whose capture would slow down the loop by more than one percent is captured
only when a save is due, so the save has to wait for the next safe point. This is
logged once per object.
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

from migrator.events import log
from migrator.state import random_state
from migrator.state.adapters import base
from migrator.state.change_detector import Contents, Mark
from migrator.state.registry import Registry

COSTLY_SHARE = 0.01
"""Maximum share of the time of a step that the capture of one object may take."""
_TRIES = 20
"""Maximum number of attempts to copy an object that another thread changes; then this safe point lacks it."""
STRIKES = 8
"""Number of costly captures in a row after which an object counts as costly."""
_FLOOR_S = {"module": 150e-6, "optimizer": 150e-6}
_FLOOR_OTHERS_S = 20e-6
"""A capture that takes less time than this, in seconds, never counts as costly: by kind of object, and for all
others."""


_NOTHING = Mark([])
"""The mark of an object without tensors that must not change."""


@dataclass
class Capture:
    """The state of one safe point."""

    step: int
    random: dict[str, Any]
    values: dict[str, Any]
    marks: dict[str, Mark]
    loop: dict[str, Any] | None
    missing: frozenset[str] = frozenset()
    """Objects that were not captured, because this is too costly or failed. Such a capture cannot be saved."""
    spoiled: bool = False
    """A tensor has changed outside a step, so this safe point cannot be saved any more."""
    changed: list[str] = field(default_factory=list, repr=False)
    """Objects whose tensors the training thread found changed while a save was reading them."""
    pins: int = field(default=0, repr=False)
    turn: int = 0
    """How many rounds of loops were entered since the last step."""

    @property
    def at(self) -> tuple[int, int]:
        return self.step, self.turn

    @property
    def place(self) -> str:
        """A digest of the position in the script's loops, comparable between ranks. Empty directly after a step.

        A rank may enter loops that other ranks do not enter, so the same turn need not be the same position.
        """
        if not self.turn:
            return ""
        loop = self.loop or {}
        # Without the description of the loader: each rank may have its own data.
        loops = [
            (label.partition(" | ")[0], state.get("handed"), state.get("is_over"))
            for label, state in loop.get("loops", {}).items()
        ]
        return xxhash.xxh3_64(repr((loops, loop.get("epochs"))).encode()).hexdigest()


class _Restless(Exception):  # noqa: N818 - internal
    """Another thread changes the object while it is copied."""


class Capturer:
    """Makes captures and measures their cost."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._deferred: set[str] = set()
        self._strikes: dict[str, int] = {}
        self._last_s = 0.0
        self._marks: dict[str, Mark] = {}
        self.restless: set[str] = set()
        """Objects that the last capture could not copy, because another thread changed them in each attempt."""
        self._named: set[str] = set()

    def take(self, step: int, loop: dict[str, Any] | None, *, full: bool, turn: int = 0) -> Capture:
        """Capture all registered objects; the costly ones only if `full`."""
        start_s = perf_counter()
        interval_s, self._last_s = start_s - self._last_s, start_s
        values: dict[str, Any] = {}
        marks: dict[str, Mark] = {}
        # Random states first: a state_dict() of the script may draw random numbers.
        random = random_state.capture()
        restless: set[str] = set()
        for name, adapter in self._registry:
            if not full and name in self._deferred:
                continue
            before_s = perf_counter()
            try:
                value = values[name] = self._copied(name, adapter)
            except _Restless:
                restless.add(name)
                continue
            tensors = adapter.watched(value)
            # Most objects (a scheduler, metrics) have no tensors, and their marks are all the same.
            marks[name] = Mark(tensors, self._marks.get(name)) if tensors else _NOTHING
            self._weigh(name, adapter, perf_counter() - before_s, interval_s)
        self._marks = marks
        # Set at once: a save that fails meanwhile reads this to say why no safe point could be copied.
        self.restless = restless
        missing = frozenset(restless) if full else frozenset(self._deferred | restless)
        return Capture(step, random, values, marks, loop, missing, turn=turn)

    def contents(self) -> dict[str, Contents]:
        """The present contents of all registered tensors, except module buffers, which a forward pass may change as
        well."""
        return {name: Contents(_tensors(adapter.target)) for name, adapter in self._registry}

    def have_changed(self, before: dict[str, Contents]) -> bool:
        return any(contents.differ(_tensors(self._registry[name].target)) for name, contents in before.items())

    def _copied(self, name: str, adapter: base.Adapter) -> Any:
        """The capture of one object. If another thread of the script changes the object meanwhile, try again."""
        error: RuntimeError
        for _ in range(_TRIES):
            try:
                return adapter.capture()
            except RuntimeError as caught:
                # The messages of dict, OrderedDict, set and deque end like this: "changed size during iteration".
                if "during iteration" not in str(caught):
                    raise
                error = caught
            sleep(0)  # lets the other thread run
        if name not in self._named:
            self._named.add(name)
            log(
                "changed_while_copied",
                level=logging.WARNING,
                object=name,
                why=error,
                means="another thread keeps changing it, so this safe point cannot be saved and the next one is tried; "
                "let that thread change a copy, or hold a lock that state_dict() takes, too",
            )
        raise _Restless

    def _weigh(self, name: str, adapter: base.Adapter, cost_s: float, interval_s: float) -> None:
        if cost_s < _FLOOR_S.get(adapter.kind, _FLOOR_OTHERS_S) or cost_s < COSTLY_SHARE * interval_s:
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
                "make it smaller, or do not register it, to be able to save at any moment",
            )

    def release(self, capture: Capture) -> None:
        """Release the copies of a capture that is no longer needed, so that they can be reused."""
        for name, value in capture.values.items():
            self._registry[name].release(value)

    def live(self, capture: Capture) -> list[Tensor]:
        """The large tensors that a save of this capture reads; none while the script changes its modules."""
        try:
            return [tensor for name in capture.marks for tensor in self._watched(name, capture)]
        except (RuntimeError, KeyError):
            return []

    def changed(self, capture: Capture) -> list[str]:
        """Names of the objects whose large tensors have changed since the safe point."""
        found = []
        for name, mark in capture.marks.items():
            try:
                if mark.differs(self._watched(name, capture)):
                    found.append(name)
            except (RuntimeError, KeyError):  # the script is adding modules or parameters at this moment
                found.append(name)
        return found

    def have_only_moved(self, capture: Capture, names: list[str]) -> bool:
        """Whether there are only other tensors in the places of those of the safe point, which somebody keeps."""
        try:
            return all(capture.marks[name].has_only_moved(self._watched(name, capture)) for name in names)
        except (RuntimeError, KeyError):
            return False

    def _watched(self, name: str, capture: Capture) -> list[Tensor]:
        return self._registry[name].watched(capture.values[name])


def _tensors(target: Any) -> list[Tensor]:
    if isinstance(target, nn.Module):
        return list(target.parameters())
    values = target.values() if isinstance(target, dict) else target if isinstance(target, list) else [target]
    found = [torch.from_numpy(v) if type(v) is np.ndarray and v.dtype.kind in "biufc" else v for v in values]
    return [value for value in found if isinstance(value, Tensor)]
