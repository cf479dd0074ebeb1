"""The examples as the manifests run them: a user without root, a root file system that cannot be written.

In a mount namespace of its own, where everything is read-only but the paths at which
the manifest mounts a volume. That takes root on this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_yamls import read, variables, words
from tests.support.harness import ROOT, until

pytestmark = [pytest.mark.processes, pytest.mark.long]

CLAIM = "/mnt"
"""Where the claim is: a directory that exists everywhere. In a pod it is /ckpts, which the container runtime makes."""


@pytest.fixture(autouse=True)
def can_remount() -> None:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("LOUD: a read-only root takes root, unshare and setpriv")
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False, timeout=10)
    if probe.returncode != 0:
        pytest.skip("LOUD: no mount namespaces here")


@pytest.fixture
def volume() -> Iterator[Path]:
    """Not below pytest's own directory, which other users cannot enter."""
    path = Path("/var/tmp") / f"claim-of-{os.getpid()}"
    path.mkdir()
    os.chown(path, 0, 1000)
    path.chmod(0o2775)  # as `fsGroup: 1000` leaves a volume
    yield path
    shutil.rmtree(path)


def jailed(name: str, volume: Path, *, drop: str = "") -> list[str]:
    """The command of the manifest's container, and around it what the pod's specification says of users and mounts."""
    (where,) = list(read(name).containers)[:1]
    _, pod, container = where
    user = pod["securityContext"]
    empty = {one["name"] for one in pod["volumes"] if "emptyDir" in one}
    writable = [
        one["mountPath"] for one in container["volumeMounts"] if one["name"] in empty and one["mountPath"] != drop
    ]
    # /run/migrator does not exist here: its parent stands for it, and the container runtime's mkdir follows.
    mounts = [f"mount -t tmpfs -o mode=1777 tmpfs {'/run' if path.startswith('/run/') else path}" for path in writable]
    made = [f"mkdir -m 1777 -p {path}" for path in writable if path.startswith("/run/")]
    env = {key: value.replace("/ckpts", CLAIM) for key, value in variables(container).items() if value}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"PYTHONPATH": str(ROOT), "MIGRATOR_TERMINATION_LOG": f"{CLAIM}/termination-log"}
    command = [
        word.replace("/app/", f"{ROOT}/examples/").replace("$(MIGRATOR_CKPT)", CLAIM) for word in words(container)
    ]
    limits = [f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={user['fsGroup']}"]
    # It may read anything, as in an image: here python may be in root's home. It may write no more than its user may.
    limits += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    run = [
        "setpriv",
        *limits,
        "--no-new-privs",
        "env",
        "-i",
        *(f"{key}={value}" for key, value in env.items()),
        *command,
    ]
    script = [
        "set -e",
        "mount --make-rprivate /",
        f"mount --bind {volume} {CLAIM}",
        "mount -o remount,ro,bind /",
        *mounts,
        *made,
        f"exec {shlex.join(run)}",
    ]
    return ["unshare", "--mount", "sh", "-c", "\n".join(script)]


def started(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd="/")


@pytest.mark.timeout(240)
def test_the_job_saves_and_resumes_without_root_and_without_a_writable_root(volume: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle, 143, a ckpt of that user on the volume; the next life ends with the weights there."""
    out = [tmp_path / "first.txt", tmp_path / "second.txt"]
    command = jailed("job.yaml", volume)
    command[-1] = command[-1].replace("--epochs=30", "--epochs=6")

    first = started(command, out[0])
    until(lambda: first.poll() is not None or "epoch 0" in out[0].read_text(), "the first epoch", timeout_s=100)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 143, out[0].read_text()
    ckpt = re.findall(r"leaving ckpt=(\S+)", out[0].read_text())[-1]
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in (volume / "train").rglob("*")}
    assert owners == {(1000, 1000)}

    second = started(command, out[1])
    assert second.wait(100) == 0, out[1].read_text()
    assert f"loaded ckpt={ckpt} " in out[1].read_text()
    assert (volume / "train.pt").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("drop", "said"),
    [("/tmp", "No usable temporary directory"), ("/run/migrator", "the signal file .* cannot be written")],
)
def test_each_of_the_small_volumes_is_needed(volume: Path, tmp_path: Path, drop: str, said: str) -> None:
    """Without it the trainer ends at its start, with an error that names what it could not write."""
    out = tmp_path / "out.txt"

    process = started(jailed("job.yaml", volume, drop=drop), out)

    assert process.wait(100) == 1
    assert re.search(said, out.read_text()), out.read_text()


@pytest.mark.timeout(120)
def test_a_volume_that_belongs_to_root_is_named_with_what_to_do(volume: Path, tmp_path: Path) -> None:
    """A claim without `fsGroup`."""
    volume.chmod(0o755)
    os.chown(volume, 0, 0)
    out = tmp_path / "out.txt"

    process = started(jailed("job.yaml", volume), out)

    assert process.wait(100) == 1
    text: Any = out.read_text()
    assert "Permission denied" in text
    assert "securityContext.fsGroup" in text
