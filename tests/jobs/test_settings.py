"""What settings do to a life: they are read once, and bad ones leave nothing behind."""

from __future__ import annotations

from tests.support.harness import Job

SCRIPT = """
import os
import sys
import time
from migrator import migrator

state = {"step": 0}
migrator.register("state", state)
migrator.listening(**eval(sys.argv[1] if len(sys.argv) > 1 else "{}"))
os.environ["MIGRATOR_EXIT_CODE"] = "9"
while True:
    state["step"] += 1
    migrator.safe_point()
    print(f"step {state['step']}")
    time.sleep(0.01)
"""


def test_a_start_with_bad_settings_leaves_nothing_behind(job: Job) -> None:
    """It ends before anything is made: no root, no signal file; both mistakes stand in the traceback."""
    run = job.write(SCRIPT).run("{'every': 'soon'}", MIGRATOR_KEEP="0")

    assert run.wait() == 1
    assert "listening(every=...) is 'soon'; allowed:" in run.text
    assert "MIGRATOR_KEEP is '0'; allowed:" in run.text
    assert not job.root.exists()
    assert not job.signal.parent.exists()


def test_settings_are_read_once_in_listening(job: Job) -> None:
    """What the script does to its environment afterwards changes nothing; its arguments hold."""
    run = job.write(SCRIPT).run("{'job': 'mnist', 'exit_code': 42}", MIGRATOR_JOB="other")
    run.wait_for("^step 3$")
    run.kill()

    assert run.wait() == 42, run.text
    assert [path.name for path in job.root.iterdir()] == ["mnist"]
    assert len(job.ckpts()) == 1
