"""torchrun ends its ranks by SIGKILL a time of its own after SIGTERM, whatever the pod's grace is."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.ranks.test_torchrun import AGENT_STOPPED
from tests.support.harness import Job
from tests.support.torchruns import Torchrun

TIMEOUT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}

# Behind the third step nothing can be saved for STUCK_S: no safe point comes. SAVE_S is what a commit takes.
SCRIPT = """
import os
import time
import torch
from torch import distributed
from migrator import migrator
from migrator.save import attempt as saving

commit = saving.Attempt.commit

def commits(self):
    time.sleep(float(os.environ.get("SAVE_S", "0")))
    return commit(self)

saving.Attempt.commit = commits
if "TORCHELASTIC_RUN_ID" in os.environ:
    distributed.init_process_group("gloo")
state, model = {"step": 0}, torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
migrator.register("state", state)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening(every=os.environ.get("EVERY", "off"))
if migrator.resume:
    migrator.load_ckpt()
while state["step"] < int(os.environ.get("STEPS", 10**9)):
    state["step"] += 1
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    if state["step"] == 3:
        print("in step 3")
        time.sleep(float(os.environ.get("STUCK_S", "0")))
    migrator.safe_point()
    time.sleep(0.002)
"""


def started(job: Job, **more: str) -> Torchrun:
    run = job.write(SCRIPT).torchrun(nproc=1, **TIMEOUT, **more)
    run.wait_for("^in step 3$")
    return run


# The deadline.


def test_a_rank_is_through_before_the_agent_kills_it(job: Job) -> None:
    """The grace is 20 s, torchrun's time 3 s: what cannot be saved in that time is told, by a rank that still lives."""
    run = started(job, STUCK_S="30")

    run.terminate()

    assert run.wait() in AGENT_STOPPED, run.text
    (rank,) = run.lives[0]
    assert [float(fields["grace_left_s"]) < 3 for _, fields in run.events("signal")] == [True], run.text
    assert "no safe point was reached within the grace" in rank.text, run.text
    assert [fields["why"][:10] for _, fields in run.events("leaving")] == ['"no safe p'], run.text
    assert "via 15, forcefully exiting via 9" not in run.agent.text, run.text


def test_after_a_request_of_the_hook_there_is_the_whole_grace(job: Job) -> None:
    """The agent counts from its SIGTERM on, and that comes only when the hook has ended."""
    run = started(job, STUCK_S="4")

    run.ask(grace_s=15)
    answer = run.answer()

    assert answer is not None
    assert answer.fields.get("step") == "3", run.text
    run.terminate()
    assert run.wait() in AGENT_STOPPED, run.text


def test_sigterm_behind_an_unanswered_request_shortens_what_is_left(job: Job) -> None:
    """The hook was killed, or the agent wants to start the ranks anew: it counts from now on."""
    run = started(job, STUCK_S="30")

    run.ask(grace_s=15)
    (rank,) = run.wait_for("signal source=")
    run.terminate()

    assert run.wait() in AGENT_STOPPED, run.text
    assert "no safe point was reached within the grace" in rank.text, run.text
    answer = run.answer()
    assert answer is not None
    assert "no safe point" in answer.fields["error"]


@pytest.mark.processes
def test_a_real_torchruns_command_line_is_read(job: Job) -> None:
    """An agent out of a fresh interpreter; the others' command line is that of the interpreter they are forked from."""
    import subprocess
    import sys

    job.write("from migrator.platform import launcher\nprint('found', launcher.agent())\n")
    options = ["--standalone", "--nproc-per-node=1", "--shutdown-timeout", "77"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(job.script)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)

    assert re.search(r"found Agent\(pid=\d+, life='\d+/\d+', shutdown_s=77.0\)", done.stdout), done.stdout + done.stderr


# What is told of it.


def test_a_grace_that_the_agent_cuts_short_is_warned_of(job: Job) -> None:
    """When the job starts, with what to set."""
    run = started(job, STEPS="4")

    assert run.wait() == 0, run.text
    (warning,) = [fields["means"] for _, fields in run.events("launcher_warning")]
    assert "3 s after SIGTERM" in warning
    assert "--shutdown-timeout=20" in warning
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=20" in warning


def test_a_save_that_would_not_fit_is_warned_of_once(job: Job) -> None:
    """As soon as one was made: not in the pod's last seconds."""
    run = started(job, EVERY="3", STEPS="9", SAVE_S="2.2")

    assert run.wait() == 0, run.text
    ((_, fields),) = run.events("save_too_long")
    assert float(fields["took_s"]) > 2.2
    assert fields["left_s"] == "2.700"
    assert "--shutdown-timeout" in fields["means"]


def test_a_save_that_would_not_fit_into_the_grace_is_warned_of(job: Job) -> None:
    """Without an agent it is the grace that is too short."""
    life = job.write(SCRIPT).run(EVERY="3", STEPS="3", SAVE_S="1", MIGRATOR_GRACE_S="1")

    assert life.wait() == 0, life.text
    (fields,) = life.events("save_too_long")
    assert fields["left_s"] == "1.000"
    assert "terminationGracePeriodSeconds" in fields["means"]


def test_a_save_that_fits_is_not_spoken_of(job: Job) -> None:
    """By default nobody is told anything."""
    life = job.write(SCRIPT).run(EVERY="3", STEPS="9")

    assert life.wait() == 0, life.text
    assert not life.events("save_too_long")


def test_sigterm_of_a_rank_without_an_agent_leaves_the_whole_grace(job: Job) -> None:
    """The variable alone, without torchrun, means nothing."""
    life = job.write(SCRIPT).run(**TIMEOUT, STUCK_S="1")
    life.wait_for("^in step 3$")
    asked_s = time.monotonic()
    life.kill(signal.SIGTERM)

    assert life.wait() == 143, life.text
    assert time.monotonic() - asked_s < 10
    (fields,) = life.events("signal")
    assert float(fields["grace_left_s"]) > 15
