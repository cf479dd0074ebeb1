"""Which ckpts a life may go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from migrator import settings
from migrator.ckpt import generations
from migrator.session.candidates import Candidates
from migrator.session.start import StartingPoint
from migrator.storage.posix import PosixStorage

CKPT = "000001-000000000010"


def never(name: str) -> Any:
    raise AssertionError(f"{name} was to be loaded")


@pytest.mark.parametrize("has_ckpts", [False, True])
@pytest.mark.parametrize("has_legacy", [False, True])
@pytest.mark.parametrize("resume", ["auto", "never", "require"])
def test_what_there_is_can_be_loaded_unless_a_fresh_start_is_meant(
    tmp_path: Path, has_ckpts: bool, has_legacy: bool, resume: str
) -> None:
    """A ckpt, or the file of the predecessor where there is none."""
    storage = PosixStorage(tmp_path / "ckpts", "job")
    legacy = tmp_path / "migration.pth"
    if has_legacy:
        legacy.touch()
    found = settings.read({"resume": resume}, {"MIGRATION_CKPT_PATH": str(legacy)})
    generation = generations.not_claimed(storage, fresh=resume == "never")
    start = StartingPoint(generation, (CKPT,) if has_ckpts else (), found.every)

    candidates = Candidates(found, storage, start, never)

    assert candidates.can_load == (resume != "never" and (has_ckpts or has_legacy))
    assert candidates.legacy == (legacy if has_legacy and not has_ckpts and resume != "never" else None)
