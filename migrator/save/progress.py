"""Shows how far a long save or load is: a bar on a terminal, otherwise a log line now and then.

Nothing is shown for what takes less than a second. The last save is shown to the hook as well,
in a file of its own; the hook logs it in preStop.log.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from migrator.events import log

QUIET_S = 1.0
"""Seconds from the beginning in which nothing is shown."""
LINE_EVERY_S = 5.0
"""Seconds between two log lines of one save or load."""
HOOK_EVERY_S = 1.0
"""Minimum time in seconds between two writes of the file for the hook."""
_COST = 100
"""Writing the file for the hook takes at most 1/100 of the time."""


class Progress:
    """Called with the bytes done and the bytes there are. `for_hook` hears of it as well."""

    def __init__(self, event: str, *, grace_end_s: float | None = None, for_hook: ForHook | None = None) -> None:
        self._event = event
        self._grace_end_s = grace_end_s
        self._for_hook = for_hook
        self._start_s = time.monotonic()
        self._next_line_s = self._start_s + QUIET_S
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        self._show(done, total)
        if self._for_hook is not None:
            self._for_hook(done, total)
        if done == total:
            # What follows, a sync above all, is no progress.
            self.close()

    def _show(self, done: int, total: int) -> None:
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


class ForHook:
    """Called like `Progress`: puts `<MB written> <MB there are>` into a small file beside the signal file.

    It must not slow the save down. A second later it is out of date, so it is not synced; a failure is not
    logged; and where the writing itself is slow it is written less often.
    """

    def __init__(self, signal: Path) -> None:
        self._path = signal.with_name(f"{signal.name}.progress")
        self._staging = signal.with_name(f".{signal.name}.progress.{os.getpid()}.tmp")
        self._next_s = math.inf

    def begin(self) -> None:
        """The pod must leave: from now on a hook may be waiting. Before that nothing is written."""
        self._next_s = time.monotonic() + QUIET_S

    def __call__(self, done: int, total: int) -> None:
        start_s = time.monotonic()
        if start_s < self._next_s:
            return
        self._write(done, total)
        end_s = time.monotonic()
        self._next_s = end_s + max(HOOK_EVERY_S, _COST * (end_s - start_s))

    def _write(self, done: int, total: int) -> None:
        # In MB, so that every shell can calculate with them.
        total_mb = max(1, round(total / 1e6))
        text = f"{total_mb * done // max(1, total)} {total_mb}\n"
        try:
            # Whatever lies there is not opened: a pipe would hold the save up.
            self._staging.unlink(missing_ok=True)
            fd = os.open(self._staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
            self._staging.replace(self._path)
        except OSError:
            return  # the log has it too

    def remove(self) -> None:
        """The save is over, or was before this process began. May be called twice."""
        self._next_s = math.inf
        for path in (self._path, self._staging):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue
