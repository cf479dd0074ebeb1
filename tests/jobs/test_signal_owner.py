"""One process owns the signal file: a second one is told so at once, and disturbs neither trainer nor hook."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from migrator.notice.signal_file import SAVE, SignalFile
from migrator.notice.signal_file_owner import SignalOwner
from migrator.session.group import Team
from tests.support.harness import Job, Process

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

RANKED = Path(__file__).parent / "jobs" / "ranked.py"


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


def test_whoever_only_looks_leaves_no_owner(tmp_path: Path) -> None:
    """Ranks look at the same time, before the lowest of them takes it."""
    file = tmp_path / "pod" / "signal"
    assert [SignalOwner(file).other() for _ in range(3)] == [None] * 3

    owner = SignalOwner(file)
    owner.take()
    assert file.with_name(".signal.owner").read_text().startswith(f"{os.getpid()} (")
    owner.release()
    owner.release()
    assert list(file.parent.iterdir()) == []


def test_where_no_lock_can_be_had_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is no reason not to train."""
    (tmp_path / ".signal.owner").mkdir()
    SignalOwner(tmp_path / "signal").take()

    assert 'watch_weak way="the signal file\'s owner"' in caplog.text


def test_a_file_that_its_owner_takes_away_just_now_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would each hold a lock, on two files."""
    file = tmp_path / "signal"
    before, owner = SignalOwner(file), SignalOwner(file)
    before.take()
    lockf = fcntl.lockf
    ended: list[None] = []

    def locked_too_late(fd: int, how: int) -> None:
        if not ended:
            ended.append(before.release())
        lockf(fd, how)

    monkeypatch.setattr(fcntl, "lockf", locked_too_late)
    owner.take()

    assert os.path.samestat(os.fstat(owner._fd), file.with_name(".signal.owner").stat())
    owner.release()


# The end.


def pod_of(pids: list[int]) -> Team:
    """What a rank knows of its pod, when the others have not said `bye` where it has looked."""
    team = object.__new__(Team)
    team.pids = pids
    team.ranks = SimpleNamespace(lines=lambda what: [], size=len(pids))  # type: ignore[assignment]
    return team


def test_of_ranks_that_end_at_the_same_moment_one_takes_the_file_away(tmp_path: Path) -> None:
    """Each notes its end before it looks whether the others have: so not both leave it to the other."""
    file, other = SignalFile(tmp_path / "signal"), os.getppid()
    pod = pod_of([os.getpid(), other])
    file.note_end()
    assert not pod.is_last_of_pod(file.ended())

    (tmp_path / "signal.ended").write_text(f"{other}\n{os.getpid()}\n")
    assert pod.is_last_of_pod(file.ended())
    file.forget_ends()
    assert file.ended() == set()


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
