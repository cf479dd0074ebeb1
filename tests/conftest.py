from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ForkServer, Job


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take longest begins first; else one worker would still be busy with it when the others are done."""
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("forkserver"))
    yield server
    server.close()


@pytest.fixture
def job(fork_server: ForkServer, tmp_path: Path) -> Iterator[Job]:
    """A training job with its own volume and signal file; nothing of it outlives the test."""
    made = Job(fork_server, tmp_path)
    yield made
    made.end()
