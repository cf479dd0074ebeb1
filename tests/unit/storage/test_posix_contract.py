"""A directory keeps every promise of the interface, with links and where there are none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from migrator.storage.posix import PosixStorage
from tests.unit.storage import contract


def _no_link(source: Any, target: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


class OfPosix(contract.Contract):
    """Processes share a root."""

    @pytest.fixture(params=["links", "no links"])
    def connect(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> contract.Connect:
        if request.param == "no links":
            monkeypatch.setattr(os, "link", _no_link)
        return lambda job: PosixStorage(tmp_path / "root", job)


class TestNames(OfPosix, contract.Names): ...


class TestSmallFiles(OfPosix, contract.SmallFiles): ...


class TestLargeFiles(OfPosix, contract.LargeFiles): ...


class TestLooking(OfPosix, contract.Looking): ...


class TestDeleting(OfPosix, contract.Deleting): ...


class TestRaces(OfPosix, contract.Races): ...
