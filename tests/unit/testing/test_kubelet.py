"""What the kubelet stand-in says before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrator.testing import Kubelet, StandInError


def test_directories_that_do_not_exist(tmp_path: Path) -> None:
    """What stands for a path of the image must be there."""
    with pytest.raises(StandInError, match=r"nowhere, which is to stand for /app, does not exist"):
        Kubelet(tmp_path, image={"/app": tmp_path / "nowhere"})


def test_the_header_says_why_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is to believe that process 1 was tested where it was not."""
    from migrator.testing import fixtures

    monkeypatch.setattr(fixtures, "isolation", lambda: "unshare: not here")

    assert fixtures.pytest_report_header() == (
        "migrator.testing: NO PID NAMESPACES HERE, so containers are not process 1: unshare: not here"
    )
