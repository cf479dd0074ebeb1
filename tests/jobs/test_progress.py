"""How a long save or load tells how far it is."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from migrator.save import progress
from migrator.save.progress import ForHook
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


@pytest.mark.processes
def test_a_terminal_gets_a_bar() -> None:
    """What is being done, how far it is, and how much of the grace is left."""
    shown = run(0, terminal=True, pause_s=0.15)
    assert "migrator saving" in shown
    assert "grace left" in shown
    assert "75%" in shown
    assert "percent=" not in shown


@pytest.mark.processes
def test_a_log_gets_a_line_now_and_then() -> None:
    """Percent, bytes, rate and the grace that is left; not a line for every block."""
    shown = run(0, terminal=False)
    assert shown.count(" saving percent=") == 1
    assert "bytes=0 mb_per_s=0 grace_left_s=" in shown


@pytest.mark.processes
@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_less_than_a_second_shows_nothing(terminal: bool) -> None:
    """Most saves are over before anybody could read a bar."""
    assert run(60.0, terminal=terminal) == ""


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (1_200_000_000, 4_000_000_000, "1200 4000"),
        (0, 300_000, "0 1"),
        (300_000, 300_000, "1 1"),
        (5_999_999, 6_000_001, "5 6"),
        (12 * 10**12, 24 * 10**12, "12000000 24000000"),
        (0, 0, "0 1"),
    ],
)
def test_the_hook_is_told_in_mb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, total: int, text: str
) -> None:
    """Whole numbers that a shell can divide, all of it only when it is all; and nothing before or after the save."""
    for name in ("QUIET_S", "HOOK_EVERY_S", "_COST"):
        monkeypatch.setattr(progress, name, 0.0)
    for_hook = ForHook(tmp_path / "signal")
    for_hook(done, total)
    assert list(tmp_path.iterdir()) == []

    for_hook.begin()
    for_hook(done, total)
    assert [(tmp_path / "signal.progress").read_text()] == [text + "\n"]
    assert len(list(tmp_path.iterdir())) == 1

    for_hook.remove()
    for_hook(done, total)
    assert list(tmp_path.iterdir()) == []


def test_telling_the_hook_takes_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the signal file lies on a slow volume, the save does not wait for it once a second."""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "HOOK_EVERY_S", 0.0)
    times_s: list[float] = []
    now_s = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Slow(ForHook):
        def _write(self, done: int, total: int) -> None:
            nonlocal now_s
            times_s.append(now_s)
            now_s += 0.005

    for_hook = Slow(tmp_path / "signal")
    for_hook.begin()
    while now_s < 101.2:
        for_hook(1, 2)
        now_s += 0.001

    assert len(times_s) == 3
    assert times_s[1] - times_s[0] > 0.5
