"""The steps of examples/Dockerfile, run on this machine in a directory that stands for the image.

There is no container runtime here and no network: a package that is installed here already
counts as installed, and migrator itself is built from the copied files, as pip would.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.docs.test_yamls import JOBS, read, words
from tests.support.harness import ROOT

pytestmark = pytest.mark.processes

FILE = ROOT / "examples" / "Dockerfile"
DEADLINE_S = 100


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction and what follows it, without comments, with continued lines put together."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines()]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets this path of the repository's top directory through."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    return f"!{path.partition('/')[0]}" in lines


class Image:
    """The directory, and what has been put into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arguments: dict[str, str] = {}
        self.user = ""
        self.directory = "/"
        self.users: dict[str, str] = {}

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def take(self, instruction: str, rest: str) -> None:
        rest = re.sub(r"\$(\w+)", lambda match: self.arguments[match[1]], rest)
        getattr(self, f"_{instruction.lower()}")(rest)

    def _from(self, rest: str) -> None:
        minor = int(re.fullmatch(r"python:3\.(\d+)-slim", rest)[1])  # type: ignore[index]
        lowest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
        assert lowest is not None
        assert minor >= int(lowest[1])

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.arguments[name] = value

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert is_sent(source), f".dockerignore keeps {source} out"
            if (ROOT / source).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, self.path(target), symlinks=True, ignore=ignore)
            else:
                assert target.endswith("/"), "several files need a directory"
                self.path(target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, self.path(target))

    def _run(self, rest: str) -> None:
        command = shlex.split(rest)
        if command[:2] == ["pip", "install"]:
            self._install(command[2:])
        elif command[0] == "useradd":
            self.users[command[command.index("--uid") + 1]] = command[-1]
        elif command[:2] == ["python", "-m"]:
            self.run([sys.executable, "-m", command[2], *map(str, map(self.path, command[3:]))])
        else:
            pytest.fail(f"this test does not know how to run: {rest}")

    def _install(self, words: list[str]) -> None:
        while words and words[0].startswith("-"):
            assert words[0] in ("--no-cache-dir", "--index-url"), words
            words = words[2 if words[0] == "--index-url" else 1 :]
        for word in words:
            name, _, extra = word.rstrip("]").partition("[")
            if not name.startswith("/"):
                assert metadata.version(name)
                continue
            source = self.path(name)
            build = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
            self.run([sys.executable, "-c", build, str(self.root)], cwd=source)
            (wheel,) = self.root.glob("*.whl")
            with zipfile.ZipFile(wheel) as file:
                file.extractall(self.path("/site"))
                (described,) = [one for one in file.namelist() if one.endswith("METADATA")]
                assert f"Provides-Extra: {extra}" in file.read(described).decode()

    def _user(self, rest: str) -> None:
        self.user = rest

    def _workdir(self, rest: str) -> None:
        self.directory = rest

    def _cmd(self, rest: str) -> None:
        assert rest.startswith("["), "a shell in front would not forward SIGTERM"

    def run(self, command: list[str], *, cwd: Path | None = None) -> str:
        """With migrator from the image, whatever is installed here."""
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(self.path("/site")), "HOME": str(self.root)}
        done = subprocess.run(
            command, cwd=cwd or self.root, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    made = Image(tmp_path_factory.mktemp("image"))
    for instruction, rest in instructions(FILE.read_text()):
        made.take(instruction, rest)
    return made


def test_the_hooks_are_in_the_image(image: Image) -> None:
    """Put there by the installed package."""
    for path in (ROOT / "hooks").glob("*.sh"):
        assert image.path(f"/hooks/{path.name}").read_bytes() == path.read_bytes()


def test_each_script_that_a_manifest_runs_is_in_the_image() -> None:
    """And begins with the package from the image."""
    copied = " ".join(rest for instruction, rest in instructions(FILE.read_text()) if instruction == "COPY")
    scripts = {
        word for name in JOBS for _, _, one in read(name).containers for word in words(one) if word.endswith(".py")
    }
    assert scripts
    for script in scripts:
        assert f"examples/{Path(script).name}" in copied


@pytest.mark.long
def test_the_image_trains(image: Image, tmp_path: Path) -> None:
    """The package in it is the one that trains, and saves nothing into the image."""
    before = {path for path in image.root.rglob("*") if "__pycache__" not in path.parts}
    look = "import migrator; print(migrator.__file__)"
    assert str(image.root) in image.run([sys.executable, "-c", look])

    command = [sys.executable, str(image.path("/app/plain.py")), "--epochs=1", f"--weights={tmp_path / 'weights.pt'}"]
    said = image.run(command, cwd=tmp_path)

    assert "epoch 0: accuracy" in said
    assert (tmp_path / "weights.pt").exists()
    assert {path for path in image.root.rglob("*") if "__pycache__" not in path.parts} == before


def test_the_user_is_the_one_of_the_manifests(image: Image) -> None:
    """With a name: torch asks for it."""
    uids = {str(pod["securityContext"]["runAsUser"]) for name in JOBS for pod in read(name).pods.values()}

    assert uids == {image.user}
    assert image.users.keys() == uids
    assert image.directory == "/app"


def test_what_docker_is_not_sent_is_not_copied() -> None:
    """The environment and ckpts of a checkout stay out of the image."""
    assert not is_sent(".venv")
    assert not is_sent("ckpts")
    assert is_sent("migrator")
