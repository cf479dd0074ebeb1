"""`load_ckpt()`: everything registered, the place in the loops and the random states come back."""

from __future__ import annotations

import time
from typing import Any

from migrator.compat import pytorchjob_migration
from migrator.errors import UsageError
from migrator.events import log
from migrator.loop.epoch_counters import EpochCounters
from migrator.loop.gate import Gate, Phase
from migrator.loop.generators import restore_generators, state_of
from migrator.loop.position import Place
from migrator.loop.safe_points import SafePoints
from migrator.save.engine import Saver
from migrator.save.results import Saved
from migrator.session.candidates import Candidates
from migrator.session.restore_plan import Loaded
from migrator.settings import Settings
from migrator.state import random_state
from migrator.state.registry import Registry


class Resume:
    """Gives what was loaded to all parts of the session that need it."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        candidates: Candidates,
        saver: Saver,
        *,
        gate: Gate,
        place: Place,
        counters: EpochCounters,
        safe_points: SafePoints,
        ranks: int,
    ) -> None:
        """`ranks`: how many there are in this life."""
        self._settings = settings
        self._registry = registry
        self._candidates = candidates
        self._saver = saver
        self._gate = gate
        self._place = place
        self._counters = counters
        self._safe_points = safe_points
        self._ranks = ranks
        self._random_loaded: tuple[dict[str, Any], dict[str, Any]] | None = None

    def load(self) -> str | None:
        """The newest ckpt that is whole; its name, or None if there is nothing to load."""
        if self._gate.phase not in (Phase.FRESH, Phase.LOADED):
            raise UsageError(
                "load_ckpt() after the first optimizer step: the training done so far would be lost. "
                "Call it right after listening()."
            )
        if not self._candidates.can_load:
            return None
        start_s = time.monotonic()
        if self._candidates.legacy is not None:
            pytorchjob_migration.load(self._candidates.legacy, self._registry)
            self._counters.load({})
            self._safe_points.loaded(self._safe_points.step)
            log("loaded_legacy", file=self._candidates.legacy)
            return str(self._candidates.legacy)
        try:
            loaded = self._candidates.load_newest()
        finally:
            self._saver.bad |= self._candidates.bad
        self._saver.newest = Saved(loaded.ckpt, loaded.step, loaded.size, 0.0)
        self._saver.went_on_from(loaded.ckpt)
        self._go_on_from(loaded)
        log("loaded", ckpt=loaded.ckpt, step=loaded.step, bytes=loaded.size, took_s=time.monotonic() - start_s)
        return loaded.ckpt

    def _go_on_from(self, loaded: Loaded) -> None:
        self._place.ranks_changed = loaded.ranks != self._ranks
        generators = {n: state_of(k.target) for n, k in self._registry if random_state.is_generator(k.target)}
        self._random_loaded = (loaded.random, generators)
        if loaded.loop is not None:
            self._place.load(loaded.loop, loaded.random, generators, anew=self._settings.loops == "anew")
        self._counters.load((loaded.loop or {}).get("epochs", {}))
        if loaded.random:
            random_state.restore(loaded.random)
        self._safe_points.loaded(loaded.step)

    def restore_random(self) -> bool:
        """`migrator.restore_random()`"""
        if self._random_loaded is None:
            return False
        random, generators = self._random_loaded
        if random:
            random_state.restore(random)
        restore_generators({name: kind.target for name, kind in self._registry}, generators)
        return True
