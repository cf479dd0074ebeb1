"""How fast this job's saves are, and whether one fits the time that is left."""

from __future__ import annotations

import logging

from migrator.events import log
from migrator.platform import launcher
from migrator.save.results import Saved

_OF_GRACE = 0.7
"""The part of the time between SIGTERM and SIGKILL that a save may take. A longer one may be killed in the middle."""
_ASSUMED_BYTES_PER_S = 50e6
"""Bytes per second, assumed as long as no save was measured."""


class Speed:
    """Measured at each save that goes on."""

    def __init__(self, grace_s: float, *, warns: bool) -> None:
        self._grace_s = grace_s
        self._warns = warns
        self._bytes_per_s = 0.0

    def note(self, saved: Saved) -> None:
        if saved.size:
            self._bytes_per_s = saved.size / max(saved.took_s, 1e-6)

    def takes_s(self, size: int) -> float:
        """Seconds that a save of `size` bytes will take."""
        return size / (self._bytes_per_s or _ASSUMED_BYTES_PER_S)

    def fits(self, size: int, left_s: float) -> bool:
        """A new save of `size` bytes would be done in time."""
        return self.takes_s(size) < _OF_GRACE * left_s

    def warn_if_too_long(self, saved: Saved) -> None:
        """Once: the last save, in a pod that goes, will not take less time than this one did."""
        agent = launcher.agent()
        left_s = launcher.sigterm_grace_s(self._grace_s, agent)
        if not self._warns or saved.took_s < _OF_GRACE * left_s:
            return
        self._warns = False
        instead = "make terminationGracePeriodSeconds and MIGRATOR_GRACE_S longer"
        if agent is not None and left_s < self._grace_s:
            instead = "give torchrun a longer --shutdown-timeout (TORCH_ELASTIC_SHUTDOWN_TIMEOUT in the pod)"
        log(
            "save_too_long",
            level=logging.WARNING,
            ckpt=saved.ckpt,
            bytes=saved.size,
            took_s=saved.took_s,
            left_s=left_s,
            means=f"a save takes about as long as a pod has from SIGTERM to SIGKILL, or longer: {instead}",
        )
