"""The preStop and postStart scripts of the pod, to be copied into an image.

They are shell and need nothing of this package, but they have to be of the same
version as the trainer they talk to, so they travel with it: a line in a
Dockerfile, `RUN python -m migrator.hooks /hooks`, takes them from what pip
installed. Nothing heavy is imported for that.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from migrator.errors import SettingsError

SCRIPTS = ("preStop.sh", "postStart.sh")


def copy_to(directory: str | os.PathLike[str]) -> list[Path]:
    """Put the scripts into `directory`, made if it is missing, and return where they are."""
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise SettingsError(f"{target} is a file; name a directory for the hooks, for example /hooks")
    try:
        target.mkdir(parents=True, exist_ok=True)
        return [_put(target / name, _text(name)) for name in SCRIPTS]
    except OSError as error:
        raise SettingsError(
            f"the hooks cannot be put into {target}: {error.strerror or error}. Name a directory that can be written."
        ) from error


def _text(name: str) -> bytes:
    return (resources.files(__name__) / name).read_bytes()


def _put(path: Path, text: bytes) -> Path:
    # A hook that is running reads its script as it goes: it must not be changed under it.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(text)
    aside.chmod(0o755)
    return aside.replace(path)
