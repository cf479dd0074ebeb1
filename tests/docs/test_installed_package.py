"""What who installs the package gets: names, types, and every file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import migrator
from tests.support.harness import ROOT
from tests.unit.test_package import FILES, PACKAGE

pytestmark = pytest.mark.processes


def test_what_a_bare_import_shows_is_public() -> None:
    """Nothing else lies around in the package's namespace but its own submodules and what typing needs."""
    code = (
        "import migrator, types; from migrator import ElasticSampler, Migrated, migrator as m;"
        "print(*(n for n, v in vars(migrator).items() if n[0] != '_' and not isinstance(v, types.ModuleType)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert set(shown.split()) - set(migrator.__all__) <= {"annotations", "Any", "TYPE_CHECKING"}


def test_the_package_ships_its_types(tmp_path: Path) -> None:
    """`py.typed` and every module are in the wheel, and nothing else is."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "migrator", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "hooks", source / "hooks")
    shutil.copy(ROOT / "pyproject.toml", source)
    for name in ("README.md", "LICENSE"):
        (source / name).touch()
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True, timeout=100)

    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    scripts = {f"migrator/hooks/{path.name}" for path in (ROOT / "hooks").glob("*.sh")}
    assert held == {str(path.relative_to(ROOT)) for path in FILES.values()} | {"migrator/py.typed"} | scripts


def test_the_typed_usage_file_passes_mypy_strict() -> None:
    """What a user writes is accepted by `mypy --strict`, and what is wrong is refused."""
    command = [sys.executable, "-m", "mypy", "--strict", "tests/docs/typed_usage.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)

    assert done.returncode == 0, done.stdout + done.stderr
