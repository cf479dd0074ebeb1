"""SIGTERM in jobs whose scripts have handlers of their own."""

from __future__ import annotations

import re

from tests.support.harness import Job

CHAINED = """
import faulthandler
import os
import signal
import sys
import torch
from migrator import migrator

def a_handler(name):
    def handler(number, frame):
        print("ran", name, flush=True)
        if callable(found):
            found(number, frame)
        if name == "impatient":
            sys.exit(5)
    found = signal.signal(signal.SIGTERM, handler)

weights = torch.zeros(3)
migrator.register("weights", weights)
migrator.register("state", {"step": 0})
a_handler("early")
migrator.listening()
a_handler("late")
for step in range(10**9):
    weights += 1
    migrator.safe_point()
    if step == 10:
        a_handler("impatient")
    if step == 5:
        if os.fork() == 0:  # a loader worker: what it hears is no notice of ours
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.wait()
    if step == 15:
        print("goes on", flush=True)
"""


def test_a_script_with_handlers_of_its_own_is_saved(job: Job) -> None:
    """Handlers that call on, one that wants to end the process, and a child that inherits all of them."""
    run = job.write(CHAINED).run()
    run.wait_for("^goes on")
    assert not run.events("signal")
    run.kill()

    assert run.wait() == 143, run.text
    before, _, after = run.text.partition("goes on")
    assert re.findall("^ran (.*)", before, re.MULTILINE) == ["late", "early"]
    assert re.findall("^ran (.*)", after, re.MULTILINE) == ["impatient", "late", "early"]
    assert len(run.events("handler_held_back")) == len(run.events("committed")) == 1
    assert "RecursionError" not in run.text


def test_a_script_that_dumps_its_traceback_at_sigterm_is_saved(job: Job) -> None:
    """The watcher looks by itself, in a long step or evaluation as well."""
    run = job.write(
        """
        import faulthandler
        import signal
        import time
        import torch
        from migrator import migrator

        migrator.register("weights", torch.zeros(3))
        migrator.listening()
        migrator.safe_point()
        faulthandler.register(signal.SIGTERM)
        time.sleep(60)
        """
    ).run()
    run.wait_for("sigterm_silenced")
    run.kill()

    assert run.wait() == 143, run.text
    assert len(run.events("committed")) == 1
