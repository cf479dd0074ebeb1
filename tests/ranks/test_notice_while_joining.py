"""SIGTERM to one rank while the ranks of a job come together: all leave, or the others hear soon that it is gone."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from tests.jobs.test_early_notice import hears_sigterm
from tests.support.harness import Job, until
from tests.support.rank_processes import Gang

# HOLD names a place where a rank waits until the file `go` is there: `init`, `listen`.
SCRIPT = """
import os
import time
from datetime import timedelta
import migrator

def hold(place):
    print("comes to", place)
    while os.environ.get("HOLD") == place and not os.path.exists("go"):
        time.sleep(0.005)

if "WATCH" in os.environ:
    migrator.watch()
import torch
from torch import distributed
from migrator import migrator

hold("init")
distributed.init_process_group("gloo", timeout=timedelta(seconds=50))
state, model = {"step": 0}, torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for name, value in {"state": state, "model": model, "optimizer": optimizer}.items():
    migrator.register(name, value)
hold("listen")
migrator.listening(every="off")
if migrator.resume:
    migrator.load_ckpt()
while state["step"] < int(os.environ.get("STEPS", 10**9)):
    state["step"] += 1
    model(torch.ones(4)).sum().backward()
    distributed.all_reduce(model.weight.grad)
    optimizer.step()
    migrator.safe_point()
    print("trained", state["step"])
    time.sleep(0.005)
distributed.barrier()
"""
SOON_S = 8.0
"""A rank that is lost was missed after a minute. On a busy machine processes need seconds to end."""


@pytest.fixture
def meeting(job: Job) -> Job:
    return job.write(SCRIPT)


def go(job: Job) -> None:
    (job.directory / "go").touch()


def assert_left(gang: Gang) -> None:
    """All of them with the exit code, before a step, and without a generation."""
    assert gang.wait() == [143] * len(gang), gang.text
    assert not re.search(r"^trained ", gang.text, re.MULTILINE), gang.text
    assert "generation_claimed" not in gang.text


@pytest.mark.parametrize("told", [0, 1])
def test_told_before_the_process_group_is_there(meeting: Job, told: int) -> None:
    """Kept by `watch()`, it is known to all as soon as they meet."""
    gang: Gang = meeting.gang(3, pods=3, each={2: {"HOLD": "init"}}, WATCH="1")
    gang.wait_for("^comes to init$")
    gang.kill(ranks=[told])
    gang.wait_for("signal_early", ranks=[told])
    go(meeting)

    assert_left(gang)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_told_in_listening_while_another_has_still_to_come(meeting: Job, told: int) -> None:
    """Two of three wait there. The one that is told stays with them until the third has come."""
    late = (told + 1) % 3
    gang: Gang = meeting.gang(3, pods=3, each={late: {"HOLD": "listen"}})
    gang.wait_for("^comes to listen$")
    until(lambda: hears_sigterm(gang[told]), "the handler")
    gang.kill(ranks=[told])
    gang.wait_for("signal_early", ranks=[told])
    go(meeting)

    assert_left(gang)


@pytest.mark.parametrize("told", [0, 1])
def test_told_while_rank_0_waits_for_a_life_that_leaves(meeting: Job, told: int) -> None:
    """It may wait for that life's whole grace, and a rank that is told ends the wait for all."""
    go(meeting)
    first: Gang = meeting.gang(2, pods=2)
    first.wait_for("^trained 5$")
    first.kill(ranks=[0])
    assert first.wait() == [143, 143], first.text
    (meeting.root / "default" / "generations" / "000001.leaving").write_text(json.dumps({"grace_s": 600}))
    gang: Gang = meeting.gang(2, pods=2)
    gang.wait_for("waiting_for_leaving", ranks=[0])
    gang.kill(ranks=[told])
    start_s = time.monotonic()

    assert gang.wait() == [143, 143], gang.text
    assert time.monotonic() - start_s < SOON_S
    assert not re.search(r"^trained ", gang.text, re.MULTILINE), gang.text


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_ranks_that_wait_for_one_that_died_hear_of_it_soon(meeting: Job, dead: int) -> None:
    """SIGTERM before listening(), without `watch()`, ends a rank. Nobody waits a minute for it."""
    gang: Gang = meeting.gang(3, pods=3, each={dead: {"HOLD": "listen"}})
    gang.wait_for("^comes to listen$")
    for rank in {0, 1, 2} - {dead}:
        until(lambda rank=rank: hears_sigterm(gang[rank]), "the handler")
    gang.kill(ranks=[dead])
    start_s = time.monotonic()

    codes = gang.wait()

    assert time.monotonic() - start_s < SOON_S, gang.text
    assert codes[dead] == -signal.SIGTERM
    for rank in {0, 1, 2} - {dead}:
        assert codes[rank] == 1, gang.text
        assert "RanksError: listening(): another rank has ended" in gang[rank].text, gang.text
        assert "migrator.watch()" in gang[rank].text


def test_ranks_that_come_when_one_has_died_hear_of_it_soon(meeting: Job) -> None:
    """The one that was told waited for them to the end of its grace."""
    gang: Gang = meeting.gang(3, pods=3, each={2: {"HOLD": "listen"}}, MIGRATOR_GRACE_S="1")
    gang.wait_for("^comes to listen$")
    until(lambda: hears_sigterm(gang[1]), "the handler")
    gang.kill(ranks=[1])
    assert gang[1].wait() == 143, gang.text
    start_s = time.monotonic()
    go(meeting)

    assert gang.wait() == [1, 143, 1], gang.text
    assert time.monotonic() - start_s < SOON_S, gang.text
    for rank in (0, 2):
        assert "RanksError: listening(): another rank has ended" in gang[rank].text, gang.text
