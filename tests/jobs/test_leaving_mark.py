"""The next life waits for one that still saves: processes that end, are killed, and live."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from migrator.ckpt.leaving_mark import LeavingMark, put_mark
from migrator.platform import process_identity
from migrator.storage.posix import PosixStorage
from tests.jobs.test_notices import COUNT, request, saved_step, stopped
from tests.support.harness import Job, until
from tests.support.volume import Clock


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path / "root", "job")


def test_a_process_that_has_ended_here_is_not_waited_for(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """Started again in the same container: nobody else is left to save."""
    process = subprocess.Popen(["sleep", "60"])
    of_process = {
        **process_identity.mine(),
        "pid": process.pid,
        "started": process_identity._started(Path("/proc"), process.pid),
    }
    put_mark(storage, 1, LeavingMark(5.0, of_process))
    assert Clock().wait(storage, (2, 1)) == pytest.approx(5.0)
    process.kill()
    # A zombie saves nothing either.
    until(lambda: process_identity.has_ended(of_process), "its end")
    assert Clock().wait(storage, (2, 1)) == 0
    process.wait()

    assert Clock().wait(storage, (2, 1)) == 0
    assert 'not_waiting generation=1 why="its process has ended"' in caplog.text


def test_a_killed_life_is_not_waited_for_in_its_own_container(job: Job) -> None:
    """It was killed while it saved, and its grace is long: the next one starts at once from the ckpt before."""
    first = stopped(job.write(COUNT), after=10)
    old = job.run(HOLD_COMMIT="1", MIGRATOR_GRACE_S="600")
    old.wait_for("^step 40$")
    old.kill()
    old.wait_for("^holds the commit$")
    old.kill(signal.SIGKILL)
    old.wait()
    new = job.run(STEPS="10")

    assert new.wait() == 0, new.text
    assert new.events("not_waiting")
    assert not new.events("waiting_for_leaving")
    assert f"at {saved_step(first)}" in new.text


def test_a_life_that_saves_shows_that_it_lives(job: Job) -> None:
    """Its mark changes while storage takes its time, and goes with the answer."""
    old = job.write("from migrator.ckpt import leaving_mark\nleaving_mark.BEAT_S = 0.02\n" + COUNT).run(HOLD_COMMIT="1")
    old.wait_for("^step 10$")
    request(job, "r")
    old.wait_for("^holds the commit$")
    place = job.root / "default" / "generations" / "000001.leaving"
    seen = {place.read_bytes()}
    until(lambda: seen.add(place.read_bytes()) or len(seen) > 3, "beats")
    (job.directory / "go").touch()

    assert old.wait() == 143, old.text
    assert not place.exists()
