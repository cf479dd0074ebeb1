"""Both clients of S3 keep every promise of the storage interface, on a real server.

On stores without conditional writes as well: one that refuses them, and `rclone serve s3`, which ignores them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from migrator.storage.object_storage import Conditions, ObjectStorage
from tests.object_stores.conftest import BUCKET, CLIENTS, store_with
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


@pytest.mark.long
@pytest.mark.parametrize("conditions", ["ignored", "refused"])
class WithoutConditions(OfS3):
    """Processes share a bucket of a store that ignores conditional writes, or refuses them."""

    @pytest.fixture
    def url(self, conditions: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        with store_with(conditions, request) as env:
            for name, value in env.items():
                monkeypatch.setenv(name, value)
            yield f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


class TestSmallFilesWithoutConditions(WithoutConditions, contract.SmallFiles): ...


class TestLargeFilesWithoutConditions(WithoutConditions, contract.LargeFiles):
    def test_a_range_may_be_all_of_an_object(self, storage: ObjectStorage) -> None:
        """`rclone serve s3` answers it as if no range had been asked for."""
        contract.upload(storage, "ckpt/part", b"abc")
        buffer = bytearray(3)
        with storage.open("ckpt/part") as file:
            file.read([memoryview(buffer)], 0)
        assert buffer == b"abc"


class TestLookingWithoutConditions(WithoutConditions, contract.Looking):
    def test_a_check_finds_out_what_the_store_does(self, storage: ObjectStorage, conditions: str) -> None:
        """By trying, and the log can say it."""
        storage.check()
        assert storage.traits()["conditional_writes"] == conditions


class TestDeletingWithoutConditions(WithoutConditions, contract.Deleting): ...


class TestRacesWithoutConditions(WithoutConditions, contract.Races):
    @pytest.fixture(autouse=True)
    def _is_kept(self, conditions: str, request: pytest.FixtureRequest) -> None:
        if conditions == "ignored" and "reader_finds_all_bytes" in request.node.name:
            pytest.skip("`rclone serve s3` replaces an object byte by byte: docs/s3.md says so")
