"""Both clients of S3 keep every promise of the storage interface, on a real server."""

from __future__ import annotations

import pytest

from migrator.storage.object_storage import Conditions, ObjectStorage
from tests.object_stores.conftest import BUCKET, CLIENTS
from tests.unit.storage import contract


class OfS3(contract.Contract):
    """Processes share a bucket and a prefix."""

    @pytest.fixture
    def connect(self, url: str, client: str) -> contract.Connect:
        made = CLIENTS[client](BUCKET)
        return lambda job: ObjectStorage(made, url.partition(f"{BUCKET}/")[2], job)


class TestNames(OfS3, contract.Names): ...


class TestSmallFiles(OfS3, contract.SmallFiles): ...


class TestLargeFiles(OfS3, contract.LargeFiles): ...


class TestLooking(OfS3, contract.Looking):
    def test_a_check_finds_out_that_conditions_are_honoured(self, storage: ObjectStorage) -> None:
        """By trying: the second PUT of the same name with a condition is refused."""
        storage.check()
        assert storage.conditions is Conditions.HONOURED


class TestDeleting(OfS3, contract.Deleting): ...


class TestRaces(OfS3, contract.Races): ...
