"""What the load of a group tells the storage; the loads themselves are tried with real ranks (`tests/ranks`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.session.group_restore import GroupRestore
from migrator.state.registry import Registry
from migrator.storage.posix import PosixStorage


@pytest.mark.parametrize("shares_root", [True, False])
def test_ranks_with_one_root_read_through_the_page_cache(tmp_path: Path, *, shares_root: bool) -> None:
    """It reads once for all of a node. Where each has its own root, rank 0 reads alone."""
    storage = PosixStorage(tmp_path, "job")
    group: Any = SimpleNamespace(shares_root=shares_root, ranks=SimpleNamespace(rank=0, size=2))
    GroupRestore(group, storage, Registry())
    assert storage._reads_alone is not shares_root
