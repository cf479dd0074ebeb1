"""How fast this job's saves are, and whether one fits the time that is left."""

from __future__ import annotations

import logging

from migrator.events import log
from migrator.platform import launcher
from migrator.save.results import Saved

OF_GRACE = 0.7
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
        return self.takes_s(size) < OF_GRACE * left_s

    def warn_if_too_long(self, saved: Saved) -> None:
        """Once: the last save, in a pod that goes, will not take less time than this one did."""
        left_s, instead = _left(self._grace_s)
        if not self._warns or saved.took_s < OF_GRACE * left_s:
            return
        self._warns = False
        log(
            "save_too_long",
            level=logging.WARNING,
            ckpt=saved.ckpt,
            bytes=saved.size,
            took_s=saved.took_s,
            left_s=left_s,
            means=f"a save takes about as long as a pod has from SIGTERM to SIGKILL, or longer: {instead}",
        )


def warn_before(ckpt: str, size: int, took_s: float, *, grace_s: float) -> bool:
    """For `listening()`: whether the save that an earlier life made, and this one goes on from, took too long.

    Nothing else is known there. A speed that is assumed would warn on quick disks and be silent on slow ones; one that
    is measured would let every start wait for a write. Before the first save `python -m migrator.grace` measures it.
    """
    left_s, instead = _left(grace_s)
    if took_s < OF_GRACE * left_s:
        return False
    log(
        "grace_too_short",
        level=logging.WARNING,
        ckpt=ckpt,
        bytes=size,
        took_s=took_s,
        left_s=left_s,
        means="the save that this life goes on from took about as long as a pod has from SIGTERM to SIGKILL, or "
        f"longer: {instead}; `python -m migrator.grace` shows how long",
    )
    return True


def _left(grace_s: float) -> tuple[float, str]:
    """Seconds from SIGTERM to SIGKILL, and what makes them more."""
    agent = launcher.agent()
    left_s = launcher.sigterm_grace_s(grace_s, agent)
    if agent is not None and left_s < grace_s:
        return left_s, "give torchrun a longer --shutdown-timeout (TORCH_ELASTIC_SHUTDOWN_TIMEOUT in the pod)"
    return left_s, "make terminationGracePeriodSeconds and MIGRATOR_GRACE_S longer"
