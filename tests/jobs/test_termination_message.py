"""The line that kubelet shows as the container's last message: what whole jobs leave there."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.jobs.test_notices import COUNT
from tests.support.harness import ROOT, Job, Process

SMALL = ROOT / "tests" / "support" / "scripts" / "small.py"
RANKED = ROOT / "tests" / "support" / "scripts" / "ranked.py"
BEFORE = "of the life before, " * 50
FAILS = """
import os, runpy, sys
from migrator.errors import StorageError
from migrator.storage.posix import PosixStorage
put = PosixStorage.put
def fail(self, name, data, **how):
    if name.endswith("manifest.json"):
        raise StorageError(os.environ["WHY"], errno=30)
    put(self, name, data, **how)
PosixStorage.put = fail
sys.argv = [os.environ["SCRIPT"]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def place(job: Job) -> Path:
    """Where this container says that its last message is. As kubelet does, the file is made before."""
    made = job.directory / "termination-log"
    made.write_text(BEFORE)
    job.env["MIGRATOR_TERMINATION_LOG"] = str(made)
    return made


def stopped(job: Job, **env: str) -> Process:
    life = job.use(SMALL).run(STOP_AT="10", **env)
    assert life.wait() == 143, life.text
    return life


def test_what_was_saved(job: Job, place: Path) -> None:
    """Ckpt, step, bytes and seconds, in one line."""
    life = stopped(job)

    (left,) = life.events("leaving")
    took_s = float(left["since_signal_s"])
    said = re.fullmatch(
        rf"migrator: saved: ckpt {job.ckpts()[0]}, step 10, {left['bytes']} bytes, (\d+\.\d\d) s after the signal\n",
        place.read_text(),
    )
    assert said is not None, place.read_text()
    # The log rounds for itself.
    assert abs(float(said[1]) - took_s) < 0.011
    assert int(left["bytes"]) > 0


def test_why_nothing_was_saved(job: Job, place: Path) -> None:
    """The reason and the ckpt before, which both fit in what kubelet shows, however long the reason is."""
    stopped(job)
    (before,) = job.ckpts()
    why = "a volume\nthat wants to tell a lot, " + "for example \u00fc\u2026, " * 1000
    life = job.write(FAILS).run(SCRIPT=str(SMALL), WHY=why, STOP_AT="20")
    assert life.wait() == 143, life.text

    said = place.read_bytes()
    assert said.startswith(b"migrator: not saved: a volume that wants to tell a lot, for example")
    assert said.endswith(f"(the ckpt before is untouched: {before})\n".encode())
    assert said.count(b"\n") == 1
    assert len(said) <= 4096


def test_nothing_to_save(job: Job, place: Path) -> None:
    """A pod that goes in its warm-up says so."""
    life = job.write(
        """
        import time
        from migrator import migrator
        migrator.register("state", {"step": 0})
        migrator.listening()
        print("listens")
        time.sleep(60)
        """
    ).run()
    life.wait_for("^listens")
    life.kill()
    assert life.wait() == 143, life.text

    assert place.read_text() == "migrator: not saved: nothing to save: nothing was trained yet\n"


def test_a_script_that_ends_by_itself_says_nothing(job: Job, place: Path) -> None:
    """The message is the script's own then."""
    assert job.use(SMALL).run(STEPS="3").wait() == 0

    assert place.read_text() == BEFORE


def test_a_file_that_kubelet_did_not_make_is_not_made(job: Job, place: Path) -> None:
    """Nor does a place that cannot be written keep anybody from leaving."""
    place.unlink()
    stopped(job)
    assert not place.exists()

    place.mkdir()
    life = job.run(STOP_AT="20")
    assert life.wait() == 143, life.text
    assert len(job.ckpts()) == 2


def test_one_rank_of_a_pod_leaves_it(job: Job, place: Path) -> None:
    """The one that answers the hook."""
    other = job.directory / "of rank 1"
    other.touch()
    gang = job.use(RANKED).gang(2, AT="0:3:done", each={1: {"MIGRATOR_TERMINATION_LOG": str(other)}})

    assert gang.wait() == [143, 143], gang.text
    assert place.read_text().startswith(f"migrator: saved: ckpt {job.ckpts()[0]}, step ")
    assert other.read_text() == ""


def test_ranks_of_several_pods_leave_one_each(job: Job, place: Path) -> None:
    """Each container has its own."""
    other = job.directory / "of rank 1"
    other.touch()
    gang = job.use(RANKED).gang(2, pods=2, AT="0:3:done", each={1: {"MIGRATOR_TERMINATION_LOG": str(other)}})

    assert gang.wait() == [143, 143], gang.text
    for found in (place, other):
        assert found.read_text().startswith(f"migrator: saved: ckpt {job.ckpts()[0]}, step ")


def test_a_killed_process_leaves_more_than_nothing(job: Job, place: Path) -> None:
    """What it was told, when, and which ckpt is there."""
    stopped(job)
    (before,) = job.ckpts()
    life = job.write(COUNT).run(HOLD_COMMIT="1", MIGRATOR_JOB="another")
    life.wait_for("^step 10$")
    life.kill()
    life.wait_for("^holds the commit$")
    life.kill(signal.SIGKILL)
    life.wait()
    assert re.fullmatch(
        r"migrator: told to leave by SIGTERM, 20 s before the end of the grace, and .* \(the ckpt before: none\)\n",
        place.read_text(),
    )

    life = job.write(FAILS.replace("raise StorageError", "os.kill(os.getpid(), 9)\n        raise StorageError")).run(
        SCRIPT=str(SMALL), STOP_AT="20", WHY=""
    )
    life.wait()
    assert place.read_text().endswith(f"(the ckpt before: {before})\n")


UNUSABLE = """
from migrator import migrator
migrator.register("state", {})
migrator.listening(**{})
migrator.load_ckpt()
"""


def test_an_error_of_ours_at_the_start(job: Job, place: Path) -> None:
    """A setting, a place that cannot be written, an object that cannot be saved."""
    life = job.write(UNUSABLE).run(MIGRATOR_KEEP="two", MIGRATOR_GRACE_S="-1")
    assert life.wait() == 1
    assert place.read_text().startswith("migrator: SettingsError: settings that cannot be used: MIGRATOR_GRACE_S is")
    assert "MIGRATOR_KEEP is 'two'" in place.read_text()

    (job.directory / "file").touch()
    life = job.run(MIGRATOR_CKPT=str(job.directory / "file"))
    assert life.wait() == 1
    assert place.read_text().startswith("migrator: StorageForeignError: cannot make the directory")

    life = job.write(UNUSABLE.replace("{})", "{1: print})")).run()
    assert life.wait() == 1
    assert place.read_text().startswith("migrator: RegistrationError: ")


@pytest.mark.parametrize("error", ["raise ValueError('of the script')", "raise SystemExit(3)"])
def test_an_error_of_the_script_is_its_own(job: Job, place: Path, error: str) -> None:
    """What is in the file, or nothing: kubelet may be told to show the log's end then."""
    job.write(UNUSABLE + error).run().wait()

    assert place.read_text() == BEFORE


def test_an_error_that_the_script_takes_is_no_message(job: Job, place: Path) -> None:
    """It went on without us."""
    body = UNUSABLE.replace("**{}", "keep='two'").replace("migrator.load_ckpt()", "")
    job.write("try:\n" + body.replace("\n", "\n    ") + "\nexcept Exception:\n    pass").run().wait()

    assert place.read_text() == BEFORE


def test_a_second_process_does_not_speak_for_the_container(job: Job, place: Path) -> None:
    """An evaluation that is refused, or has settings that are wrong, while the trainer trains."""
    life = job.write(COUNT).run()
    life.wait_for("^listens")
    for wrong in ({}, {"MIGRATOR_KEEP": "two"}):
        assert job.run(env=wrong).wait() == 1

    assert place.read_text() == BEFORE
