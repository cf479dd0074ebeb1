"""Ends what a test run leaves behind, however the run itself ended.

A run that is killed runs no clean-up, and what it started has started others: ranks whose parent was lost before it
could be asked for a signal at its death, loader workers, agents. Whatever sessions and parents they have, they have
inherited one variable of their environment. This process waits for the end of the run, which it sees at the end of its
standard input; then it ends all that carry the mark, and deletes their directories for temporary files.

Run as `python -I -S tests/support/guardian.py MARK DIRECTORY ...`, with an environment that has no mark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

VARIABLE = "TESTS_MARK"
SWEEP_S = 10.0
"""A process that the kernel cannot end (hung storage) is given up after so long."""
LOOKS = 3
"""So often nothing may be found in a row: a process that becomes another program shows no environment meanwhile."""


def marked(mark: str) -> list[int]:
    """All processes that carry it, or were forked from one that does."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - without pathlib it starts in a few milliseconds
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                if f"{VARIABLE}={mark}".encode() in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def sweep(mark: str) -> bool:
    """Whether all of them have ended."""
    end_s, empty = time.monotonic() + SWEEP_S, 0
    while empty < LOOKS and time.monotonic() < end_s:
        pids = marked(mark)
        empty = 0 if pids else empty + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return empty == LOOKS


def main() -> None:
    mark, *directories = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    is_done = sweep(mark)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(not is_done)


if __name__ == "__main__":
    main()
