"""A real S3 server for all tests of one worker, and jobs whose root is in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from migrator.storage.obstore_client import ObstoreClient
from migrator.storage.s3_client import S3Client
from migrator.testing.s3_server import S3Server, why_not
from tests.support import chance, rclone_server
from tests.support.harness import Job
from tests.support.rclone_server import RcloneServer
from tests.support.tcp_faults import FaultyProxy

BUCKET = "migrator-tests"
CONDITIONS = ("honoured", "ignored", "refused")
"""What stores do with a PUT that has a condition."""
CLIENTS = {"obstore": ObstoreClient, "s3fs": S3Client}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One of the clients in each run, both with `--whole`. This file may be imported before the run has its seed."""
    if "client" in metafunc.fixturenames:
        metafunc.parametrize("client", chance.some("client", sorted(CLIENTS), 0.5), indirect=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[S3Server]:
    if (missing := why_not()) is not None:
        pytest.skip(f"LOUD: {missing}")
    made = S3Server(tmp_path_factory.mktemp("s3")).start()
    made.make_bucket(BUCKET)
    yield made
    made.close()


@pytest.fixture(scope="session")
def ignoring(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[RcloneServer]:
    if (missing := rclone_server.why_not()) is not None:
        pytest.skip(missing)
    made = RcloneServer(tmp_path_factory.mktemp("rclone")).start()
    made.make_bucket(BUCKET)
    yield made
    made.close()


@contextmanager
def store_with(conditions: str, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The environment of a job on a store that does this with conditions."""
    if conditions == "ignored":
        yield request.getfixturevalue("ignoring").env()
        return
    server: S3Server = request.getfixturevalue("server")
    if conditions == "honoured":
        yield server.env()
        return
    proxy = FaultyProxy(server.port)
    try:
        proxy.refuse_conditions()
        yield server.env(endpoint=proxy.endpoint)
    finally:
        proxy.close()


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that no other test uses; this process finds the server by its environment."""
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def client(request: pytest.FixtureRequest) -> str:
    """The library that a job uses: obstore if it is there, else s3fs."""
    return str(request.param)


@pytest.fixture
def stored(job: Job, url: str, server: S3Server) -> Job:
    """A job whose ckpts go to the server."""
    job.url = url
    job.env |= server.env()
    return job


def without_obstore(script: str) -> str:
    """The script on a machine that has no obstore."""
    return f'import sys\nsys.modules["obstore"] = None\n{script}'
