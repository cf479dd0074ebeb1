"""What the watcher takes for a notice, and what it does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from migrator.notice.signal_file import SignalFile
from migrator.notice.sigterm import Sigterm
from migrator.notice.watcher import Notice, Watcher
from tests.jobs.test_notices import NO_NOTICE


def looked_at(path: Path, *, grace_s: float = 30.0) -> list[Notice]:
    """What a watcher makes of the file as it is."""
    notice: list[Notice] = []
    sigterm = Sigterm()
    watcher = Watcher(sigterm=sigterm, file=SignalFile(path), grace_s=grace_s, on_notice=notice.append)
    try:
        watcher._look()
        watcher._look()
    finally:
        watcher.close()
        for fd in (sigterm.read_fd, sigterm._write_fd):
            os.close(fd)
    return notice


@pytest.mark.parametrize("text", NO_NOTICE.values(), ids=list(NO_NOTICE))
def test_what_is_no_request_is_no_notice(tmp_path: Path, text: str) -> None:
    """Only a line that says `save`, before its deadline, makes a trainer leave."""
    path = tmp_path / "signal"
    path.write_text(text)

    assert looked_at(path) == []


@pytest.mark.parametrize(
    "text", ["save", "save\n", "save\r\n", "save\npod=here", "save\ndeadline=soon\n", "save \n\n\n"]
)
def test_a_bare_save_is_a_request(tmp_path: Path, text: str) -> None:
    """With or without newline, and with nothing else in it: then the grace runs from the file's age."""
    path = tmp_path / "signal"
    path.write_text(text)
    at_s = time.time() - 10
    os.utime(path, (at_s, at_s))
    (notice,) = looked_at(path)

    assert notice.source == "signal file"
    assert 15 < notice.grace_s < 20.5
    assert looked_at(path, grace_s=9.0) == []
