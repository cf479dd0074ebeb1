"""What people see of a long save or load: a bar in a terminal, lines in a log."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tests.support.harness import ROOT

SCRIPT = """
import sys, time
from migrator import events
from migrator.save import progress
events.ensure_visible()
progress.QUIET_S = float(sys.argv[1])
with progress.Progress("saving", grace_end_s=time.monotonic() + 20) as told:
    for done in range(0, 101, 25):
        told(done << 20, 100 << 20)
        time.sleep(float(sys.argv[2]))  # a bar is drawn anew ten times a second at most
"""


def run(quiet_s: float, *, terminal: bool, pause_s: float = 0) -> str:
    """What the script shows on standard error."""
    command = [sys.executable, "-c", SCRIPT, str(quiet_s), str(pause_s)]
    if not terminal:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        return done.stderr.decode()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen(command, cwd=ROOT, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while more := os.read(ours, 4096):
                shown += more
        except OSError:
            pass  # how a terminal says that nobody writes any more
        os.close(ours)
        assert process.wait(60) == 0
    return shown.decode()


def test_a_terminal_gets_a_bar() -> None:
    """What is being done, how far it is, and how much of the grace is left."""
    shown = run(0, terminal=True, pause_s=0.15)
    assert "migrator saving" in shown
    assert "grace left" in shown
    assert "75%" in shown
    assert "percent=" not in shown


def test_a_log_gets_a_line_now_and_then() -> None:
    """Percent, bytes, rate and the grace that is left; not a line for every block."""
    shown = run(0, terminal=False)
    assert shown.count(" saving percent=") == 1
    assert "bytes=0 mb_per_s=0 grace_left_s=" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_less_than_a_second_shows_nothing(terminal: bool) -> None:
    """Most saves are over before anybody could read a bar."""
    assert run(60.0, terminal=terminal) == ""
