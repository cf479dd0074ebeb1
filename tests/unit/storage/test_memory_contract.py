"""The storage in memory keeps every promise of the interface."""

from __future__ import annotations

import pytest

from migrator.storage.memory import Bucket, MemoryStorage
from tests.unit.storage import contract


class OfMemory(contract.Contract):
    """Processes share a bucket."""

    @pytest.fixture
    def connect(self) -> contract.Connect:
        bucket = Bucket()
        return lambda job: MemoryStorage(bucket, job)


class TestNames(OfMemory, contract.Names): ...


class TestSmallFiles(OfMemory, contract.SmallFiles): ...


class TestLargeFiles(OfMemory, contract.LargeFiles): ...


class TestLooking(OfMemory, contract.Looking): ...


class TestDeleting(OfMemory, contract.Deleting): ...


class TestRaces(OfMemory, contract.Races): ...
