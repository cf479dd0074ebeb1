"""What the signal file may say and when, how often a job may be stopped, and what is saved without any notice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from itertools import pairwise

import pytest

from migrator.notice.signal_file import Signal, SignalFile
from tests.support.harness import Job, Process, until

COUNT = """
import glob
import os
import sys
import time
import torch
from migrator import migrator

state, weights = {"step": 0, "sum": 0.0}, torch.zeros(1000)
migrator.register("state", state)
migrator.register("weights", weights)

if os.environ.get("HOLD_COMMIT"):  # storage that takes its time for the last step of a commit
    from migrator.storage.posix import PosixStorage
    put = PosixStorage.put
    def held(self, name, data, **how):
        if name.endswith("manifest.json"):
            print("holds the commit\\n", end="")
            while not os.path.exists("go"):
                time.sleep(0.002)
        put(self, name, data, **how)
    PosixStorage.put = held

migrator.listening()
print("listens, file:", *open(os.environ["MIGRATOR_SIGNAL"]).read().split())
if "slow start" in sys.argv:
    time.sleep(60)
if migrator.resume:
    print("loaded", migrator.load_ckpt(), "at", state["step"])
try:
    while state["step"] < int(os.environ.get("STEPS", 10**9)):
        state["step"] += 1
        state["sum"] += 0.1 * state["step"]
        weights += state["step"] / 3
        migrator.safe_point()
        print(f"step {state['step']}\\n", end="")
        time.sleep(0.002)
        if "wait for saves" in sys.argv and state["step"] % 10 == 0:
            while not glob.glob(f"{os.environ['MIGRATOR_CKPT']}/*/*-{state['step']:012d}/manifest.json"):
                time.sleep(0.002)
finally:
    if "clean up" in sys.argv:
        print("cleans up\\n", end="")
        while not os.path.exists("clean"):
            time.sleep(0.002)
print("result", state["sum"].hex(), float(weights.sum()).hex())
"""


@pytest.fixture
def counting(job: Job) -> Job:
    """A job that counts; its numbers tell whether a step was lost, repeated or mixed."""
    return job.write(COUNT)


def ask(job: Job, text: str) -> None:
    """What a person with a shell does: not aside, not renamed."""
    job.signal.write_text(text)


def request(job: Job, name: str, *, within_s: float = 20.0) -> None:
    """What a hook does."""
    SignalFile(job.signal).write("save", request=name, deadline=f"{time.time() + within_s:.1f}", pod="here")


def answer(job: Job) -> Signal:
    """What the signal file says in the end."""
    found = SignalFile(job.signal).read()
    assert found is not None, job.signal.read_text()
    return found


def last_step(run: Process) -> int:
    """The last one that was told; the loop may be one further."""
    return max(map(int, re.findall(r"^step (\d+)$", run.text, re.MULTILINE)), default=0)


def saved_step(run: Process) -> int:
    """Where a life that left was saved."""
    (event,) = run.events("leaving")
    return int(event["step"])


def stopped(job: Job, *argv: str, after: int, **env: str) -> Process:
    """A life that was stopped by SIGTERM after this step, and left with its state safe."""
    run = job.run(*argv, **env)
    run.wait_for(f"^step {after}$")
    run.kill()
    assert run.wait() == 143, run.text
    return run


# Notice that is none.

EXPIRED = "save\nrequest=old\ndeadline=1000000000\n"

NO_NOTICE = {
    "init": "init\n",
    "init, no newline": "init",
    "init with pids of an earlier life": "init\npids=1,2\n",
    "resume": "resume\n",
    "answered": "resume\nrequest=old\nckpt=000001-000000000009\nstep=9\n",
    "answered, not saved": "init\nrequest=old\nerror=the disk is full\n",
    "expired": EXPIRED,
    "empty": "",
    "blank": " \n\n",
    "garbage": "\0\x01\x02\n\nsave\n",
    "not quite save": "saved\n",
    "capitals": "SAVE\n",
    "two words": "save now\n",
    "second line": "hello\nsave\n",
}


@pytest.mark.parametrize("text", [None, *NO_NOTICE.values()], ids=["missing", *NO_NOTICE])
def test_a_stale_file_does_not_disturb_a_start(counting: Job, text: str | None) -> None:
    """Whatever an earlier life or its hooks left there, a new life says `init` with its pid and trains."""
    if text is not None:
        counting.signal.parent.mkdir()
        counting.signal.write_text(text)
    run = counting.run(STEPS="20")

    assert run.wait() == 0, run.text
    assert f"listens, file: init pids={run.pid}" in run.text
    assert not run.events("signal")
    assert not counting.signal.exists()


def test_a_running_job_is_not_disturbed_by_what_is_no_request(counting: Job) -> None:
    """Answers, garbage, expired requests, the file's removal: it trains on, and still hears the next real request."""
    run = counting.run()
    run.wait_for("^listens")
    for text in NO_NOTICE.values():
        ask(counting, text)
        run.wait_for(f"^step {last_step(run) + 5}$")
    counting.signal.unlink()
    # That the watcher has looked at the last of them is told.
    ask(counting, EXPIRED)
    run.wait_for("signal_ignored .*a request whose deadline is over")
    assert not run.events("signal")

    ask(counting, "save")
    assert run.wait() == 143, run.text
    assert len(run.events("signal")) == 1
    assert len(counting.ckpts()) == 1


def test_a_signal_file_in_a_directory_that_vanishes_and_comes_back(counting: Job) -> None:
    """An emptied /tmp does not make a trainer deaf, nor does it end the training."""
    run = counting.run()
    run.wait_for("^listens")
    shutil.rmtree(counting.signal.parent)
    run.wait_for(f"^step {last_step(run) + 20}$")
    counting.signal.parent.mkdir()
    request(counting, "again")

    assert run.wait() == 143, run.text
    assert answer(counting).fields["request"] == "again"


# Requests at the start.


def test_an_open_request_at_start_is_answered_truthfully_when_nothing_was_trained(counting: Job) -> None:
    """A process started again inside a dying pod leaves at once: it has nothing, and says so."""
    counting.signal.parent.mkdir()
    request(counting, "r1")
    run = counting.run("slow start")

    assert run.wait() == 143, run.text
    said = answer(counting)
    assert (said.word, said.fields["request"]) == ("init", "r1")
    assert said.fields["error"] == "nothing to save: nothing was trained yet"
    assert counting.ckpts() == []


def test_an_open_request_at_start_is_answered_with_the_ckpt_that_is_there(counting: Job) -> None:
    """Nothing was loaded yet, so nothing may be saved over it; it is safe, and the hook is told which one."""
    stopped(counting, after=10)
    (ckpt,) = counting.ckpts()
    request(counting, "r2")
    run = counting.run("slow start")

    assert run.wait() == 143, run.text
    assert (answer(counting).word, answer(counting).fields["ckpt"]) == ("resume", ckpt)
    assert counting.ckpts() == [ckpt]


def test_an_open_request_at_start_of_a_training_job_is_answered_with_the_newest_state(counting: Job) -> None:
    """It loaded, and perhaps made a few steps before it heard: what is answered is what the next life finds."""
    first = stopped(counting, after=10)
    request(counting, "r3")
    run = counting.run()

    assert run.wait() == 143, run.text
    said = answer(counting)
    assert (said.word, said.fields["request"], said.fields["ckpt"]) == ("resume", "r3", counting.ckpts()[-1])
    assert int(said.fields["step"]) == saved_step(run) >= saved_step(first)
    assert counting.run(STEPS="1").wait_for(r"^loaded (\S+) ")[1] == said.fields["ckpt"]


def test_an_unmarked_save_left_by_hand_is_open_while_its_grace_runs(counting: Job) -> None:
    """Without a deadline the file's age stands in for it: just written it is a request, old it is history."""
    counting.signal.parent.mkdir()
    ask(counting, "save\n")
    assert counting.run("slow start").wait() == 143

    ask(counting, "save\n")
    at_s = time.time() - 25  # the grace is 20
    os.utime(counting.signal, (at_s, at_s))
    run = counting.run(STEPS="5")
    assert run.wait() == 0, run.text


# Answers.


def test_a_request_is_answered_once_with_all_that_a_hook_wants_to_know(counting: Job) -> None:
    """Its id, what was saved and how long it took; the file then says nothing else."""
    run = counting.run()
    run.wait_for("^step 10$")
    request(counting, "17-1700000000-pod")

    assert run.wait() == 143, run.text
    said = answer(counting)
    (ckpt,) = counting.ckpts()
    assert said.word == "resume"
    assert list(said.fields) == ["ckpt", "step", "bytes", "seconds", "request", "container"]
    assert (said.fields["request"], said.fields["ckpt"]) == ("17-1700000000-pod", ckpt)
    assert int(said.fields["step"]) == int(ckpt.split("-")[1]) >= 10
    part = counting.root / "default" / ckpt / "part-00000-of-00001.safetensors"
    assert int(said.fields["bytes"]) == part.stat().st_size
    assert 0 < float(said.fields["seconds"]) < 20
    (event,) = run.events("leaving")
    assert (event["ckpt"], event["step"]) == (ckpt, said.fields["step"])


def test_without_a_request_the_answer_names_none(counting: Job) -> None:
    """SIGTERM alone is answered as well: a hook that comes late finds that all is done."""
    stopped(counting, after=10)

    said = answer(counting)
    assert said.word == "resume"
    assert "request" not in said.fields


def test_a_request_that_comes_while_saving_for_sigterm_is_answered(counting: Job) -> None:
    """The notice came another way, but the hook waits for its own id."""
    run = counting.run(HOLD_COMMIT="1")
    run.wait_for("^step 10$")
    run.kill()
    run.wait_for("^holds the commit$")
    request(counting, "late")
    (counting.directory / "go").touch()

    assert run.wait() == 143, run.text
    assert answer(counting).fields["request"] == "late"
    assert len(run.events("signal")) == len(run.events("committed")) == 1


def test_a_second_request_after_the_answer_is_answered_too(counting: Job) -> None:
    """Kubernetes may call the hook twice; while the script still cleans up, the second gets the same ckpt."""
    run = counting.run("clean up")
    run.wait_for("^step 10$")
    request(counting, "first")
    run.wait_for("^cleans up$")
    assert answer(counting).fields["request"] == "first"
    ckpt = answer(counting).fields["ckpt"]

    request(counting, "second")
    until(lambda: answer(counting).word == "resume", "the second answer", context=lambda: run.text)
    assert (answer(counting).fields["request"], answer(counting).fields["ckpt"]) == ("second", ckpt)
    (counting.directory / "clean").touch()
    assert run.wait() == 143, run.text
    assert counting.ckpts() == [ckpt]


def test_a_second_sigterm_does_not_break_into_the_clean_up(counting: Job) -> None:
    """`finally` blocks run to their end, however often the pod is told to go."""
    run = counting.run("clean up")
    run.wait_for("^step 10$")
    run.kill()
    run.wait_for("^cleans up$")
    for _ in range(5):
        run.kill()
        time.sleep(0.01)
    (counting.directory / "clean").touch()

    assert run.wait() == 143, run.text
    assert "Traceback" not in run.text
    assert len(run.events("committed")) == 1


# Stopped again and again.


def test_a_job_may_be_stopped_any_number_of_times(counting: Job) -> None:
    """After three stops, by SIGTERM and by the signal file, the result is that of a run that was never stopped."""
    first = stopped(counting, after=10)
    second = counting.run()
    second.wait_for("^step 25$")
    request(counting, "second")
    assert second.wait() == 143, second.text
    third = stopped(counting, after=saved_step(second) + 5)
    steps = str(saved_step(third) + 10)
    last = counting.run(STEPS=steps)
    assert last.wait() == 0, last.text
    whole = counting.run(STEPS=steps, MIGRATOR_JOB="whole")
    assert whole.wait() == 0, whole.text

    for before, after in ((first, second), (second, third), (third, last)):
        assert f"at {saved_step(before)}" in after.text
        assert f"\nstep {saved_step(before) + 1}\n" in after.text
        assert f"\nstep {saved_step(before)}\n" not in after.text
    assert last.wait_for("^result .*")[0] == whole.wait_for("^result .*")[0]


def test_a_crash_after_a_resume_goes_on_from_the_last_ckpt(counting: Job) -> None:
    """SIGKILL, no save: the life after it starts where the killed one started, not at 0, and so does the next."""
    first = stopped(counting, after=10)
    for _ in range(2):
        killed = counting.run()
        killed.wait_for(f"^step {saved_step(first) + 5}$")
        killed.kill(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
    last = counting.run(STEPS=str(saved_step(first) + 10))

    assert last.wait() == 0, last.text
    assert f"loaded {counting.ckpts()[0]} at {saved_step(first)}" in last.text
    assert "result" in last.text


def test_a_ckpt_that_is_not_loaded_is_an_error_even_without_an_optimizer(job: Job) -> None:
    """Whatever trains: the first safe point of a life that could have gone on and did not is refused."""
    job.write(COUNT.replace("if migrator.resume:", "if False:"))
    stopped(job, after=10)
    run = job.run()

    assert run.wait() == 1
    assert "ResumeIgnored: there is a ckpt to go on from" in run.text
    assert len(job.ckpts()) == 1
    stopped(job, after=10, MIGRATOR_RESUME="never")
    assert len(job.ckpts()) == 2


# One life leaves while the next begins.


def another_pod(job: Job) -> str:
    """The volume is the same, the signal file is not."""
    return str(job.directory / "another pod" / "signal")


def test_a_new_life_waits_for_the_save_of_the_old_one(counting: Job) -> None:
    """Kubernetes starts the replacement while the old pod still saves: it goes on from that very save."""
    stopped(counting, after=10)
    old = counting.run(HOLD_COMMIT="1")
    old.wait_for("^step 40$")
    old.kill()
    old.wait_for("^holds the commit$")
    new = counting.run(STEPS="10", MIGRATOR_SIGNAL=another_pod(counting))
    new.wait_for("waiting_for_leaving generation=2 at_most_s=1")
    assert "listening" not in new.text
    (counting.directory / "go").touch()

    assert old.wait() == 143, old.text
    assert new.wait() == 0, new.text
    assert f"at {saved_step(old)}" in new.text
    assert saved_step(old) >= 40


def test_a_doomed_pod_with_the_higher_number_does_not_win(counting: Job) -> None:
    """Two lives go on from one ckpt; the one that trained further counts, whichever listened last, and it is said."""
    first = stopped(counting, after=5)
    real = counting.run(MIGRATOR_SIGNAL=str(counting.directory / "real" / "signal"))
    real.wait_for(f"^step {saved_step(first) + 2}$")
    doomed = stopped(counting, after=saved_step(first) + 1)
    assert doomed.events("loaded")[0]["ckpt"] == real.events("loaded")[0]["ckpt"]
    real.wait_for(f"^step {saved_step(doomed) + 5}$")
    real.kill()
    assert real.wait() == 143, real.text
    assert saved_step(real) > saved_step(doomed)

    last = counting.run(STEPS=str(saved_step(real) + 3))

    assert last.wait() == 0, last.text
    (loaded,) = last.events("loaded")
    assert loaded["ckpt"] == real.events("leaving")[0]["ckpt"]
    (fork,) = last.events("fork")
    assert (fork["furthest"], fork["beside"]) == (loaded["ckpt"], doomed.events("leaving")[0]["ckpt"])
    whole = counting.run(STEPS=str(saved_step(real) + 3), MIGRATOR_RESUME="never")
    assert whole.wait() == 0, whole.text
    assert whole.text.splitlines()[-1] == last.text.splitlines()[-1]


def test_a_new_life_does_not_wait_for_ever(counting: Job) -> None:
    """One that was killed on another node: until its grace is over at most. Then the ckpt before is taken."""
    first = stopped(counting, after=10)
    old = counting.run(HOLD_COMMIT="1")
    old.wait_for("^step 40$")
    request(counting, "r", within_s=1.3)
    old.wait_for("^holds the commit$")
    old.kill(signal.SIGKILL)
    old.wait()
    new = counting.run(STEPS="10", MIGRATOR_SIGNAL=another_pod(counting), HOSTNAME="another")

    assert new.wait() == 0, new.text
    assert float(new.events("waiting_for_leaving")[0]["at_most_s"]) <= 1.0
    assert f"at {saved_step(first)}" in new.text


# What is set.


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_can_be_set(counting: Job, code: int) -> None:
    """Some controllers want another one than 143."""
    run = counting.run(MIGRATOR_EXIT_CODE=str(code))
    run.wait_for("^step 5$")
    run.kill()

    assert run.wait() == code, run.text
    assert len(counting.ckpts()) == 1


def committed(run: Process) -> list[int]:
    return [int(fields["step"]) for fields in run.events("committed")]


def test_a_save_is_made_every_so_many_steps(counting: Job) -> None:
    """At each multiple, while the training goes on; the numbers go on over a restart."""
    env = {"MIGRATOR_EVERY": "10", "MIGRATOR_KEEP": "100"}
    run = counting.run("wait for saves", STEPS="45", env=env)
    assert run.wait() == 0, run.text
    assert committed(run) == [10, 20, 30, 40]

    again = counting.run("wait for saves", STEPS="65", env=env)
    assert again.wait() == 0, again.text
    assert " at 40\n" in again.text
    assert committed(again) == [50, 60]


def test_a_save_is_made_every_so_many_seconds(counting: Job) -> None:
    """By the clock, whatever the steps take; nothing is saved twice while no step is made."""
    run = counting.run(MIGRATOR_EVERY="0.2s", MIGRATOR_KEEP="100")
    until(lambda: len(committed(run)) >= 4, "four saves", context=lambda: run.text)
    run.kill(signal.SIGKILL)
    run.wait()

    assert committed(run) == sorted(set(committed(run)))
    at_s = [
        int(minute) * 60 + float(second.replace(",", "."))
        for minute, second in re.findall(r":(\d\d):(\d\d,\d+) migrator rank 0: committed", run.text)
    ]
    assert len(at_s) >= 4
    assert all((after - before) % 3600 > 0.199 for before, after in pairwise(at_s))


def test_off_means_no_save_without_notice(counting: Job) -> None:
    """Only the last one is made."""
    run = stopped(counting, after=600, MIGRATOR_EVERY="off")

    assert committed(run) == [saved_step(run)] == [int(counting.ckpts()[0].split("-")[1])]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_ckpts_are_kept(counting: Job, keep: int) -> None:
    """As many as set, of all lives of the lineage together, and none is gone before its successor is there."""
    first = counting.run("wait for saves", STEPS="52", env={"MIGRATOR_EVERY": "10", "MIGRATOR_KEEP": str(keep)})
    assert first.wait() == 0, first.text
    made = [f"000001-{step:012d}" for step in range(10, 60, 10)]
    assert counting.ckpts() == made[-keep:]

    second = stopped(counting, after=53, MIGRATOR_EVERY="off", MIGRATOR_KEEP=str(keep))
    made += [f"000002-{step:012d}" for step in committed(second)]
    assert counting.ckpts() == made[-keep:]
    assert not list(counting.root.rglob("*.tmp"))
