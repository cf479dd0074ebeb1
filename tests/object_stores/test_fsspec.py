"""The client of fsspec's filesystems on a real server: s3fs as fsspec offers it, against SeaweedFS."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from migrator.storage import fsspec_client
from migrator.storage.fsspec_client import FsspecClient
from migrator.storage.object_storage import Conditions, ObjectStorage
from tests.object_stores.test_stops import SAMPLES, SCRIPTS, apart
from tests.support import chance
from tests.support.harness import ROOT, Job
from tests.support.job_history import assert_as_if_nothing_had_happened, assert_each_sample_once, stopped, unstopped
from tests.unit.storage import contract

WAYS = [Conditions.HONOURED, Conditions.REFUSED]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One of the ways in each run, both with `--whole`."""
    if "conditions" in metafunc.fixturenames:
        ways = chance.some("conditions", WAYS, 0.5)
        metafunc.parametrize("conditions", ways, ids=[way.name.lower() for way in ways], indirect=True)


@pytest.fixture
def conditions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Conditions:
    """With `mode="create"`, which is one PUT with If-None-Match, and without, as with a store that has none."""
    kind = replace(fsspec_client._KINDS["s3"], creates=request.param is Conditions.HONOURED)
    monkeypatch.setitem(fsspec_client._KINDS, "s3", kind)
    assert isinstance(request.param, Conditions)
    return request.param


class OfS3(contract.Contract):
    """Each process has a client of its own."""

    @pytest.fixture
    def connect(self, url: str, conditions: Conditions) -> contract.Connect:
        root = url.removeprefix("s3://")
        return lambda job: ObjectStorage(FsspecClient("s3", root, aside=f"{job}/"), "", job)


@pytest.mark.long
class TestNames(OfS3, contract.Names): ...


class TestSmallFiles(OfS3, contract.SmallFiles): ...


class TestLargeFiles(OfS3, contract.LargeFiles): ...


@pytest.mark.long
class TestLooking(OfS3, contract.Looking):
    def test_a_check_finds_out_what_becomes_of_conditions(self, storage: ObjectStorage, conditions: Conditions) -> None:
        """By trying."""
        storage.check()
        assert storage.conditions is conditions


@pytest.mark.long
class TestDeleting(OfS3, contract.Deleting): ...


class TestRaces(OfS3, contract.Races): ...


# Whole jobs.

ANOTHER_STORE = """
from dataclasses import replace
from migrator import roots
from migrator.storage import fsspec_client
roots.STORES["gs"] = ("s3fs", "s3fs")
fsspec_client._KINDS["gs"] = replace(fsspec_client._KINDS["s3"], creates={creates})
"""
"""In front of a script: `gs://` is s3fs, so that settings, client and storage are those of any other store."""


@pytest.mark.long
def test_a_job_that_is_stopped_three_times_ends_as_if_nothing_had_happened(stored: Job, conditions: Conditions) -> None:
    """Everything that can be registered, bit for bit; the log says what was found out about the store."""
    script = (SCRIPTS / "everything.py").read_text()
    stored.write(ANOTHER_STORE.format(creates=conditions is Conditions.HONOURED) + script)
    stored.url = stored.url.replace("s3://", "gs://")
    reference = unstopped(stored)

    story = stopped(stored, apart(reference.moments, 3))

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=3, samples=SAMPLES)
    for life in story.lives:
        (found,) = life.events("storage")
        assert (found["client"], found["conditional_writes"]) == ("s3fs", conditions.value)


def test_a_job_in_memory_says_that_its_ckpts_die_with_it(job: Job) -> None:
    """Once in each life. It saves and leaves as any other; the next life finds nothing."""
    job.use(SCRIPTS / "everything.py")
    job.url = "memory://trial"
    life = job.run(AT="1:3:drawn", HOW="sigterm")
    assert life.wait() == 143, life.text
    (warning,) = life.events("storage_warning")
    assert "every ckpt is lost when the process ends" in warning["why"]
    assert len(life.events("committed")) == 1

    again = job.run(AT="0:2:drawn", HOW="sigterm")
    assert again.wait() == 143, again.text
    assert again.events("loaded") == []
    (claimed,) = again.events("generation_claimed")
    assert str(claimed["continues"]) == "None"


def test_settings_and_the_package_import_no_filesystem() -> None:
    """Each takes a second or more, and a setting that is wrong is to be reported at once."""
    code = (
        "import sys, migrator\n"
        "from migrator.settings import read\n"
        "from migrator.storage import locate\n"
        "read({}, {'MIGRATOR_CKPT': 'memory://trial'})\n"
        "print(sorted({'fsspec', 's3fs', 'gcsfs', 'adlfs', 'asyncio'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
