"""The client of fsspec's filesystems keeps every promise of the storage interface, in this process's memory."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from migrator.storage import fsspec_client
from migrator.storage.fsspec_client import FsspecClient
from migrator.storage.object_storage import Conditions, ObjectStorage
from tests.unit.storage import contract


@pytest.fixture(params=[Conditions.HONOURED, Conditions.REFUSED], ids=["creates", "claims"], autouse=True)
def conditions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Conditions:
    """With `mode="create"`, and without, as with a filesystem that only looks before it writes."""
    kind = replace(fsspec_client._KINDS["memory"], creates=request.param is Conditions.HONOURED)
    monkeypatch.setitem(fsspec_client._KINDS, "memory", kind)
    assert isinstance(request.param, Conditions)
    return request.param


class OfFsspec(contract.Contract):
    """Each process has a client of its own; what they share is the memory."""

    @pytest.fixture
    def connect(self) -> contract.Connect:
        root = f"{uuid.uuid4().hex[:12]}/jobs"
        return lambda job: ObjectStorage(FsspecClient("memory", root, aside=f"{job}/"), "", job)


class TestNames(OfFsspec, contract.Names): ...


class TestSmallFiles(OfFsspec, contract.SmallFiles): ...


class TestLargeFiles(OfFsspec, contract.LargeFiles): ...


class TestLooking(OfFsspec, contract.Looking):
    def test_a_check_finds_out_what_becomes_of_conditions(self, storage: ObjectStorage, conditions: Conditions) -> None:
        """By trying."""
        storage.check()
        assert storage.conditions is conditions


class TestDeleting(OfFsspec, contract.Deleting): ...


class TestRaces(OfFsspec, contract.Races): ...
