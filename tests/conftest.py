from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import ForkServer, Job, Tally


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take longest begins first; else one worker would still be busy with it when the others are done."""
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was counted, of all workers together."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    counts: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "call":
            counts.update({what: number for what, number in report.user_properties if isinstance(number, int)})
    for what, number in sorted(counts.items()):
        terminalreporter.write_line(f"counted: {number:,} {what}")


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """For the numbers in the docs: the end of a test run shows the sum of each."""
    return record_property


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
