"""What all attempts of one life share: the staging buffer, the progress, and when an attempt is given up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from migrator.events import log
from migrator.leaving.leaving import Leaving
from migrator.loop.gate import Phase
from migrator.save.attempt import SMALL_BYTES, Attempt
from migrator.save.context import SaveContext
from migrator.save.progress import ForHook, Progress
from migrator.save.results import GivenUp
from migrator.save.speed import Speed
from migrator.save.staging import StagingBuffer, needed_for
from migrator.state.capture import Capture

_MARGIN = 2.0
"""If the loop steps less often than this many saves take, it hardly ever comes to the gate while one is written."""

INTERVALS = 8
"""So many are looked at: behind an evaluation one of them is long."""


class AttemptFactory:
    """Makes them."""

    def __init__(
        self,
        context: SaveContext,
        leaving: Leaving,
        speed: Speed,
        for_hook: ForHook,
        on_advance: Callable[[], None] | None,
    ) -> None:
        self._context = context
        self._leaving = leaving
        self._speed = speed
        self._for_hook = for_hook
        self._on_advance = on_advance
        self._staging = StagingBuffer()
        self._progress = Progress("saving")
        self._intervals_s: deque[float] = deque(maxlen=INTERVALS)
        """Seconds between safe points, the last ones."""
        self._stepped_s: float | None = None
        self.copy_bytes = 0
        """What a save that goes on needs for its copies; 0: no such save is known yet."""

    @property
    def copied_bytes(self) -> int:
        """What copies have taken at most."""
        return self._staging.most

    def expect_copies(self, tensors: Iterable[Tensor]) -> None:
        """Saves that go on will come, of these tensors."""
        self.copy_bytes = needed_for(tensors)

    def prepare(self) -> None:
        """Take the memory for copies before the loop stands at the gate, unless it will not, or not for long."""
        capture = self._context.gate.capture
        if capture is None:
            return
        tensors = self._context.capturer.live(capture)
        self.expect_copies(tensors)
        size = sum(tensor.nbytes for tensor in tensors)
        is_soon_written = size > SMALL_BYTES and _MARGIN * self._speed.takes_s(size) < min(
            self._intervals_s, default=0.0
        )
        self._staging.is_off = is_soon_written
        if not (is_soon_written or self._context.gate.loop_waits):
            self._staging.prepare(tensors)

    def at_step(self) -> None:
        """A safe point was reached."""
        now_s = time.monotonic()
        if self._stepped_s is not None:
            self._intervals_s.append(now_s - self._stepped_s)
        self._stepped_s = now_s

    def make(self, capture: Capture, *, is_leaving: bool, members: tuple[int, ...] = (0,)) -> Attempt:
        """`is_leaving`: the loop is not to go on, and nothing newer will be saved."""
        notice = self._leaving.notice
        self._progress.close()
        grace_end_s = notice.deadline_s if is_leaving and notice is not None else None
        progress = self._progress = Progress("saving", grace_end_s=grace_end_s, for_hook=self._for_hook)

        def on_block(done: int, total: int) -> None:
            self._leaving.advanced_s = time.monotonic()
            if self._on_advance is not None:
                self._on_advance()
            progress(done, total)
            if not is_leaving and self._leaving.notice is not None:
                self._weigh(done, total, capture.step)

        return Attempt(
            self._context, capture, staging=self._staging, may_open=not is_leaving, on_block=on_block, members=members
        )

    def end(self) -> None:
        """The save is over, for better or worse."""
        self._progress.close()
        self._staging.free()

    def _weigh(self, done: int, total: int, step: int) -> None:
        """A notice came in the middle of a save: go on with it, or give it up for the newest step?"""
        newest = self._context.gate.capture
        if newest is not None and newest.step == step and self._context.gate.phase is Phase.CLEAN:
            return  # it is the newest
        if self._speed.fits(total, self._leaving.left_s):
            log("save_given_up", step=step, written=done, bytes=total, means="the newest step is saved instead")
            raise GivenUp
