"""The lines of the page "Test that your script survives", run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from migrator.testing.s3_server import why_not
from tests.support import chance
from tests.support.harness import ROOT

pytestmark = pytest.mark.processes

PAGE = (ROOT / "docs" / "testing.md").read_text()
FIRST, SECOND, IN_S3 = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
FROM_THE_PAGE_BEFORE = f"""
import json
from pathlib import Path

EXAMPLES = Path({str(ROOT / "examples")!r})
pytest_plugins = ["migrator.testing.fixtures"]


"""


def run(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    """By pytest, from the repository's top, with a configuration of its own."""
    test = directory / "test_mine.py"
    test.write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", f"--rootdir={directory}"]
    how = [f"--basetemp={directory / 'temp'}", "-q", str(test)]
    return subprocess.run([*command, *how], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def test_it_is_ten_lines() -> None:
    """As the page says, blank ones included; and the first page shows the same."""
    assert len(FIRST.splitlines()) == 10
    assert f"```python\n{FIRST}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "page", [*chance.some("lines", ["yaml", "arguments"], 0.5), pytest.param("s3", marks=pytest.mark.long)]
)
def test_the_lines_of_the_page_pass(tmp_path: Path, page: str) -> None:
    """As they stand, with the yaml and the script of this repository."""
    texts = {"yaml": FIRST, "arguments": FROM_THE_PAGE_BEFORE + SECOND, "s3": FROM_THE_PAGE_BEFORE + IN_S3}
    if page == "s3" and (why := why_not()):
        pytest.skip(f"LOUD: {why}")

    done = run(tmp_path, texts[page])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_they_fail_if_the_script_does_not_survive(tmp_path: Path) -> None:
    """A test that cannot fail is none: this script trains, saves nothing, and leaves on SIGTERM as many do."""
    script = tmp_path / "app" / "plain.py"
    script.parent.mkdir()
    text = (ROOT / "examples" / "plain.py").read_text()
    deaf = re.sub(r"migrator\.batches\((\w+)\)", r"\1", text)
    deaf = deaf.replace("migrator.listening()", "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(143))")
    deaf = deaf.replace("if migrator.resume:", "if False:")
    assert "listening" not in deaf
    assert "batches" not in deaf
    script.write_text(deaf)
    done = run(tmp_path, FIRST.replace('"examples"', repr(str(script.parent))))

    assert done.returncode == 1, done.stdout + done.stderr
    assert "assert (143, 3) == (143, 0)" in done.stdout
    assert "pod train-" in done.stdout
