"""Tells how far a long save or load is: a bar on a terminal, otherwise a log line now and then.

Nothing is shown for what takes less than a second.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from migrator.events import log

QUIET_S = 1.0
LINE_EVERY_S = 5.0


class Progress:
    """Called with the bytes done and the bytes there are."""

    def __init__(self, event: str, *, grace_end_s: float | None = None) -> None:
        self._event = event
        self._grace_end_s = grace_end_s
        self._start_s = time.monotonic()
        self._next_line_s = self._start_s + QUIET_S
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_line_s:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(done, total)
            return
        self._next_line_s = now_s + LINE_EVERY_S
        passed_s = now_s - self._start_s
        fields: dict[str, Any] = {
            "percent": round(100 * done / max(1, total)),
            "bytes": done,
            "mb_per_s": round(done / passed_s / 1e6),
        }
        if self._grace_end_s is not None:
            fields["grace_left_s"] = round(self._grace_end_s - now_s, 1)
        log(self._event, **fields)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"migrator {self._event}", leave=False)
        if self._grace_end_s is not None:
            self._bar.set_postfix_str(f"grace left {self._grace_end_s - time.monotonic():.0f} s", refresh=False)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away; another one comes if there is more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
