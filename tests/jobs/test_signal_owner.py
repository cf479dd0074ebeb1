"""One process owns the signal file: a second one is told so at once, and disturbs neither trainer nor hook."""

from __future__ import annotations

import os
import signal

import pytest

from migrator.notice.signal_file import SAVE, SignalFile
from tests.support.harness import ROOT, Job, Process

TRAINS = """
import time
import torch
from migrator import migrator

weights = torch.zeros(3)
migrator.register("weights", weights)
migrator.register("state", {"step": 0})
migrator.listening()
print("listens", flush=True)
if migrator.resume:
    migrator.load_ckpt()
for _ in range(10**9):
    weights += 1
    migrator.safe_point()
    time.sleep(0.002)
"""


RANKED = ROOT / "tests" / "support" / "scripts" / "ranked.py"


@pytest.fixture
def trainer(job: Job) -> Process:
    run = job.write(TRAINS).run()
    run.wait_for("^listens")
    return run


def test_a_second_process_is_told_and_disturbs_nobody(job: Job, trainer: Process) -> None:
    """An evaluation in the trainer's container, by the same lines: the hook is still answered by the trainer."""
    before = job.signal.read_text()
    second = job.run()

    assert second.wait() == 1, second.text
    assert f"SettingsError: listening(): process {trainer.pid} (" in second.text
    assert "MIGRATOR_SIGNAL" in second.text
    assert str(job.signal) in second.text
    assert job.signal.read_text() == before
    assert {path.name for path in job.root.glob("*/generations/*")} == {"000001.json", "000001.from"}

    SignalFile(job.signal).write(SAVE, request="r", pids=trainer.pid)
    assert trainer.wait() == 143, trainer.text
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert answer.fields["ckpt"] == job.ckpts()[0]


@pytest.mark.parametrize("watches", [False, True], ids=["listens", "watches"])
def test_a_second_process_does_not_answer_the_hook(job: Job, trainer: Process, watches: bool) -> None:
    """It comes while a request is open: what it would say, nothing was trained, is not the trainer's word."""
    if watches:
        job.write(TRAINS.replace("import migrator\n", "import migrator\nmigrator.watch()\n"))
    trainer.kill(signal.SIGSTOP)
    SignalFile(job.signal).write(SAVE, request="r", pids=trainer.pid)
    asked = job.signal.read_text()
    second = job.run()

    assert second.wait() == (143 if watches else 1), second.text
    assert job.signal.read_text() == asked
    trainer.kill(signal.SIGCONT)
    assert trainer.wait() == 143, trainer.text


def test_ranks_are_all_told(job: Job, trainer: Process) -> None:
    """A job of two ranks that is begun beside the trainer ends on both, and has begun no life."""
    gang = job.use(RANKED).gang(2)

    assert gang.wait() == [1, 1], gang.text
    assert gang.text.count(f"process {trainer.pid} (") == 2
    assert {path.name for path in job.root.glob("*/generations/*")} == {"000001.json", "000001.from"}


def test_the_next_life_listens_at_once_behind_a_killed_one(job: Job, trainer: Process) -> None:
    """The lock ends with the process, whatever is left in the files."""
    trainer.kill(signal.SIGKILL)
    trainer.wait()
    run = job.run(MIGRATOR_RESUME="never")
    run.wait_for("^listens")

    assert f"pids={run.pid}" in job.signal.read_text()


def test_the_file_of_another_process_is_not_removed(job: Job) -> None:
    """Where nothing can be locked a second process is not noticed. It takes only its own file away."""
    run = job.write(TRAINS.replace("10**9", "50").replace("time.sleep(0.002)", "time.sleep(0.01)")).run()
    run.wait_for("^listens")
    SignalFile(job.signal).write("init", pids=os.getpid())

    assert run.wait() == 0, run.text
    assert job.signal.exists()


def test_a_process_that_forks_stays_the_owner(job: Job) -> None:
    """Its children are not, and none of them gives up what is the parent's when it ends."""
    run = job.write(
        TRAINS.replace(
            'print("listens", flush=True)',
            "import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\nprint('listens', flush=True)",
        )
    ).run()
    run.wait_for("^listens")
    second = job.run()

    assert second.wait() == 1, second.text


def test_the_ends_of_an_earlier_life_are_forgotten(job: Job) -> None:
    """Process ids are given again: one that is noted and trains would be taken for one that has finished."""
    job.signal.parent.mkdir()
    ended = job.signal.with_name("signal.ended")
    ended.write_text("1\n")
    run = job.write(TRAINS.replace("10**9", "50").replace("time.sleep(0.002)", "time.sleep(0.01)")).run()
    run.wait_for("^listens")
    assert not ended.exists()

    assert run.wait() == 0, run.text
    assert ended.read_text() == f"{run.pid}\n"
    assert not job.signal.exists()
