"""The preStop and postStart scripts of the pod, and a command that copies them into an image.

The scripts need only a shell, but they must have the same version as the trainer.
So they are part of the package, and a line in a Dockerfile copies them from what pip
installed: `RUN python -m migrator.hooks /hooks`. This does not import torch.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from migrator.errors import SettingsError

SCRIPTS = ("preStop.sh", "postStart.sh")


def copy_to(directory: str | os.PathLike[str]) -> list[Path]:
    """Copy the scripts into `directory`, which is made if it is missing, and return their paths."""
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
    # A shell reads its script while it runs, so a script must be replaced as a whole and not rewritten.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(text)
    aside.chmod(0o755)
    return aside.replace(path)
