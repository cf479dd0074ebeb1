"""The pytest side: `pytest_plugins = ["migrator.testing.fixtures"]` in your test file or conftest.py.

    def test_my_script_survives(kubelet):
        pod = kubelet.run(["python", "train.py"])

If a test fails, its report contains the output of its pods and how they ended.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from migrator.testing.container import isolation
from migrator.testing.kubelet import Kubelet

_LINES = 200
"""Maximum number of lines of a pod's output in a report."""


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    """A stand-in kubelet with its own volumes; all that it starts ends with the test."""
    with Kubelet(tmp_path / "kubelet") as made:
        yield made


def pytest_report_header() -> str:
    why = isolation()
    if why is None:
        return "migrator.testing: containers run as process 1 of a PID namespace"
    return f"migrator.testing: NO PID NAMESPACES HERE, so containers are not process 1: {why}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    made = getattr(item, "funcargs", {}).get("kubelet")
    if report.failed and isinstance(made, Kubelet):
        for pod in made.pods:
            text = "\n".join([*map(str, pod.stops), *pod.log.splitlines()[-_LINES:]])
            report.sections.append((f"pod {pod.name}", text))
    return report
