"""The line that kubelet shows as the container's last message: how it is written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from migrator import settings
from migrator.errors import SettingsError
from migrator.notice.termination_message import TerminationMessage, write
from migrator.settings import Settings


@pytest.mark.parametrize(
    "message", ["x" * 9000, "\u00fc" * 9000, "\u2026" * 4095, "\U0001f600" * 2000, "\udc80" * 9000, "a\nb\r\n" * 3000]
)
def test_a_long_message_is_cut_where_kubelet_cuts_it(tmp_path: Path, message: str) -> None:
    """Kubelet takes the end of what is too long, which would be less of use; and no character is cut in two."""
    place = tmp_path / "log"
    place.touch()
    write(message, place)

    assert 4000 < len(place.read_bytes()) <= 4096
    assert place.read_bytes().decode().endswith("\n")
    assert len(place.read_text().splitlines()) == 1


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    """Some name a pipe of a side container's."""
    os.mkfifo(tmp_path / "log")

    write("saved", tmp_path / "log")


def test_where_it_is_can_be_said(caplog: pytest.LogCaptureFixture) -> None:
    """By the pod, not by the script; what is no file is named with all else that is wrong."""
    with caplog.at_level(logging.INFO, "migrator"):
        found = settings.read({}, {"MIGRATOR_TERMINATION_LOG": "/dev/my-log"})

    assert found.termination_log == Path("/dev/my-log")
    assert settings.read({}, {}).termination_log == Settings.termination_log == Path("/dev/termination-log")
    assert "setting_unknown" not in caplog.text
    with pytest.raises(SettingsError, match=r"MIGRATOR_TERMINATION_LOG is '/dev/'; allowed: the path of a file"):
        settings.read({}, {"MIGRATOR_TERMINATION_LOG": "/dev/"})
    with pytest.raises(SettingsError, match="there is no such setting"):
        settings.read({"termination_log": "/dev/my-log"}, {})


def test_the_first_message_never_takes_the_place_of_the_last(tmp_path: Path) -> None:
    """The watcher's thread may come to it behind the whole save."""
    (tmp_path / "log").touch()
    word = TerminationMessage(tmp_path / "log")
    word.begin("told to leave")
    assert (tmp_path / "log").read_text() == "migrator: told to leave\n"
    word.say("saved")
    word.begin("told to leave")

    assert (tmp_path / "log").read_text() == "migrator: saved\n"
