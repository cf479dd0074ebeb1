"""What saves cost the training loop: the time for which it stands at the gate."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from migrator.events import log
from migrator.loop.gate import Gate

SHARE = 0.01
"""The part of the time from one save to the next that the loop may stand."""
LEAST_S = 0.1
"""Seconds at a save below which nothing is said, however short the interval is."""
IN_A_ROW = 3
"""So many saves in a row must have cost more: a single one may have met a slow moment of the storage."""


class Cost:
    """Says once if fewer saves would cost less.

    It changes nothing by itself. The interval is what a crash may lose, which is for the user to decide. And a save
    that writes more slowly takes no less from the loop: it keeps the loop's memory, or the loop itself, for longer.
    """

    def __init__(self, gate: Gate, *, warns: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._warns = warns
        self._clock = clock
        self._began: tuple[float, float] | None = None
        """When the last save began, and how long the loop had stood until then."""
        self._dear = 0
        """How many saves in a row cost too much."""

    def begin(self) -> None:
        """A save begins. What the one before cost is known now."""
        now_s, stood_s = self._clock(), self._gate.stood_s
        if self._began is not None:
            self._judge(passed_s=now_s - self._began[0], stood_s=stood_s - self._began[1])
        self._began = now_s, stood_s

    def _judge(self, *, passed_s: float, stood_s: float) -> None:
        self._dear = self._dear + 1 if stood_s > max(SHARE * passed_s, LEAST_S) else 0
        if self._dear < IN_A_ROW or not self._warns:
            return
        self._warns = False
        log(
            "saves_slow_training",
            level=logging.WARNING,
            share_percent=100 * stood_s / passed_s,
            stood_s=stood_s,
            means="saves hold the training loop up for more than 1 % of its time; with one in "
            f"{math.ceil(stood_s / SHARE)} s at most it would be less (MIGRATOR_EVERY, save_ckpt())",
        )
