"""Jobs under real launchers: torchrun's agents, `mp.spawn`, and two lives on one volume.

What the launchers make of ranks that leave with 143 (torch 2.13):

    torchrun, SIGTERM to the agent            agent 1     (passed on; the ranks leave with 143), seldom -6
    torchrun, a peer's pod goes               agent goes on with the ranks of a new group, one restart used up
    torchrun, the same, no restart left       agent 1
    mp.spawn, the ranks leave by the request  parent 1    (ProcessExitedException: exit code 143)
    mp.spawn, SIGTERM to the parent           parent -15  (its ranks get SIGINT from the kernel, and leave with 143)
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from migrator.notice.signal_file import RESUME
from tests.support.harness import ROOT, Job, Process, events_in, until
from tests.support.rank_processes import LOOPBACK, Pod, free_port, is_running
from tests.support.torchruns import Torchrun, Worker

# Trains EPOCHS epochs by WORKERS loader workers, STEP_S a step. As torchrun starts it, or as the ranks of `mp.spawn`.
TRAINS = """
import os
import sys
import time
from datetime import timedelta
import torch
import torch.multiprocessing as mp
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset
from migrator import ElasticSampler, migrator

SAMPLES = int(os.environ.get("SAMPLES", "240"))

def train():
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = ElasticSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0")))
    state = {"step": 0}
    for name, value in {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state}.items():
        migrator.register(name, value)
    migrator.listening(every="off")
    if migrator.resume:
        migrator.load_ckpt()
    print("resumed", state["step"])
    for epoch in range(sampler.epoch, int(os.environ.get("EPOCHS", "1000"))):
        sampler.set_epoch(epoch)
        for x, ids in migrator.batches(loader):
            time.sleep(float(os.environ.get("STEP_S", "0.01")))
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            for param in model.parameters():
                distributed.all_reduce(param.grad)
            optimizer.step()
            state["step"] += 1
            print("trained", state["step"], epoch, "ids", *(1000 * epoch + i for i in ids.tolist()))
    print("final", state["step"], model.weight.sum().item().hex())

def run():
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        train()
    except BaseException as left:
        print("left", getattr(left, "code", type(left).__name__))
        raise
    distributed.destroy_process_group()
"""
AS_IT_IS = f"{TRAINS}\nrun()\n"


AGENT_STOPPED = (1, -signal.SIGABRT)
"""An agent's exit code after SIGTERM: 1 even when all its ranks leave with 143. Now and then (1 of 20) it aborts at its
very end, the ranks long gone: its own keep-alive thread is inside the store's C++ code when the interpreter ends."""


def steps_of(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^trained (\d+) ", text, re.MULTILINE)]


def resumed(text: str) -> int:
    found = re.search(r"^resumed (\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(found.group(1))


def saved_step(job: Job) -> int:
    return int(job.ckpts()[-1].rpartition("-")[2])


def assert_all_left_with(texts: list[str], step: int, context: str) -> None:
    """All told the script that they leave, saved, and none made a step behind the one that was saved.

    A rank in a collective, for a step that is not made any more, may hear of it by another one's end: its collective
    fails before a signal handler could run. That is an exception like any other; `finally` sees it too.
    """
    for text in texts:
        assert [fields["why"] for fields in events_in(text, "leaving")] == ["saved"], context
        left = re.findall(r"^left (.*)$", text, re.MULTILINE)
        assert left in (["143"], ["RuntimeError"]), context
        assert steps_of(text)[-1] == step, context
        if left == ["143"]:
            assert "Traceback" not in text.partition("migrator.errors.Migrated")[0], context
            assert not events_in(text, "left_hard"), context
        else:
            # Or a loader worker had died of the same signal before the rank had its own.
            is_of_gloo = "RuntimeError: [" in text and "gloo" in text
            assert is_of_gloo or "RuntimeError: DataLoader worker" in text, context
    assert any("\nleft 143\n" in text for text in texts), context


# One node.


def stop_under_torchrun(job: Job, times: int) -> None:
    for turn in range(times):
        run = job.torchrun(nproc=2, WORKERS="2", SAMPLES="4000")
        first = (saved_step(job) if turn else 0) + 1 + turn % 5
        ranks = run.wait_for(f"^trained {first} ")

        run.terminate()

        assert run.wait() in AGENT_STOPPED, run.text
        assert len(job.ckpts()) == min(turn + 1, 2), run.text
        assert_all_left_with([rank.text for rank in ranks], saved_step(job), run.text)
        assert not any(is_running(rank.pid) for rank in ranks)
        if turn:
            assert {resumed(rank.text) for rank in ranks} == {first - 1 - turn % 5}, run.text


def test_sigterm_to_the_agent_saves_each_time(job: Job) -> None:
    """It reaches the process group of each rank, so the loader workers die at once; all three stops are saved."""
    stop_under_torchrun(job.write(AS_IT_IS), 3)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_sigterm_to_the_agent_saves_twenty_times_of_twenty(job: Job) -> None:
    """The same, as often as it once failed in 5 of 5."""
    stop_under_torchrun(job.write(AS_IT_IS), 20)


def test_ranks_that_saved_by_the_request_wait_for_the_agents_sigterm(job: Job) -> None:
    """Left at once they would be started again inside the dying pod: they stay, saved, and take no further step."""
    run = job.write(AS_IT_IS).torchrun(nproc=2, max_restarts=1)
    ranks = run.wait_for("^trained 5 ")

    run.ask(grace_s=15)
    answer = run.answer()
    assert answer is not None
    assert answer.word == RESUME
    answered_s = time.monotonic()
    while time.monotonic() < answered_s + 1.5:  # kubelet comes when the hook has ended, not at once
        assert all(is_running(rank.pid) for rank in ranks), run.text
        time.sleep(0.05)
    run.terminate()

    assert run.wait() in AGENT_STOPPED
    assert len(run.lives) == 1, f"started again inside the dying pod:\n{run.text}"
    assert_all_left_with([rank.text for rank in ranks], saved_step(job), run.text)
    assert answer.fields["step"] == str(saved_step(job))


HEARS_LATE = """
import os
if os.environ["LOCAL_RANK"] == "1":
    from migrator.notice.watcher import Watcher
    look, Watcher._look = Watcher._look, lambda self: None if self.is_alive() else look(self)
"""
"""The watcher of one rank reads the signal file when it starts and never again: slower than any machine."""


@pytest.mark.parametrize("script", [AS_IT_IS, HEARS_LATE + AS_IT_IS], ids=["as_it_is", "one_watcher_is_late"])
def test_ranks_whose_agent_never_sends_sigterm_leave_at_their_deadline(job: Job, script: str) -> None:
    """A request that kubelet does not follow up: they stay to just before its deadline, and no longer.

    So does a rank that hears of it from its neighbour, which has answered before this one's watcher looks.
    """
    run = job.write(script).torchrun(nproc=2)
    ranks = run.wait_for("^trained 5 ")

    asked_s = time.monotonic()
    run.ask(grace_s=4)

    assert run.wait() == 1, run.text
    took_s = time.monotonic() - asked_s
    assert 2.5 < took_s < 8, run.text
    assert_all_left_with([rank.text for rank in ranks], saved_step(job), run.text)


# Two nodes.


def two_nodes(job: Job, *, max_restarts: int, **more: str) -> tuple[Torchrun, Torchrun]:
    first = job.torchrun(nproc=1, nnodes="1:2", max_restarts=max_restarts, **more)
    second = job.torchrun(nproc=1, nnodes="1:2", max_restarts=max_restarts, rdzv=first.rdzv, pod=1, **more)
    until(lambda: any("of-2" in w.out.name for w in workers_of(second)), "a group of two", context=lambda: first.text)
    second.wait_for("^trained 3 ", life=len(second.lives) - 1)
    return first, second


def workers_of(run: Torchrun) -> list[Worker]:
    return [worker for life in run.lives for worker in life]


def test_the_surviving_node_goes_on_from_the_step_both_saved(job: Job) -> None:
    """A pod goes by hook and SIGTERM: its peer saves the same step, leaves, is started anew alone, and finishes."""
    job.write(AS_IT_IS)
    first, second = two_nodes(job, max_restarts=3, EPOCHS="2", SAMPLES="300", STEP_S="0.01")
    life = len(first.lives) - 1
    survivor, dying = first.lives[life][0], second.lives[-1][0]

    second.ask(grace_s=20)
    answer = second.answer()
    assert answer is not None, second.text
    assert answer.word == RESUME, second.text
    second.terminate()

    step = int(answer.fields["step"])
    assert second.wait() in AGENT_STOPPED
    context = f"{first.text}\n{second.text}"
    assert steps_of(survivor.text)[-1] == steps_of(dying.text)[-1] == step, context
    assert first.wait() == 0, context
    assert "failed (exitcode: 143)" in first.agent.text, "one of its restarts is used up"
    last = first.lives[-1]
    assert [(worker.rank, worker.size) for worker in last] == [(0, 1)], context
    assert resumed(last[0].text) == step, context
    assert "final" in last[0].text
    ids = [int(i) for line in re.findall(r" ids (.*)$", last[0].text, re.MULTILINE) for i in line.split()]
    assert len(ids) == len(set(ids))


def test_without_a_restart_left_the_survivors_agent_ends_as_it_was_warned(job: Job) -> None:
    """Saved all the same; the agent's exit code is 1, which no operator takes for a reason to go on."""
    job.write(AS_IT_IS)
    # Both at once: a node that joins later has its peer start again, but uses up no restart.
    first, second = two_nodes(job, max_restarts=0)
    assert "launcher_warning" in first.text
    assert "raise --max-restarts" in first.text

    second.ask(grace_s=20)
    assert second.answer() is not None
    second.terminate()

    assert second.wait() in AGENT_STOPPED
    assert first.wait() == 1, first.text
    step = saved_step(job)
    assert steps_of(first.lives[-1][0].text)[-1] == step


# mp.spawn.

SPAWNS = (
    TRAINS
    + """
def start(rank):
    os.environ["RANK"] = str(rank)
    out = os.open(f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    print("pid", os.getpid())
    run()

if __name__ == "__main__":
    mp.start_processes(start, nprocs=2, start_method=os.environ["METHOD"])
"""
)


class Spawned:
    """A job of two ranks that `mp.spawn` started."""

    def __init__(self, job: Job, method: str) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        more = {**LOOPBACK, "PYTHONPATH": str(ROOT)}
        self.parent: Process = job.write(SPAWNS).run(env={**place, **more, "METHOD": method})
        self._outs = [job.directory / f"rank-{rank}.txt" for rank in (0, 1)]

    @property
    def texts(self) -> list[str]:
        return [out.read_text() if out.exists() else "" for out in self._outs]

    @property
    def text(self) -> str:
        return "\n---\n".join([self.parent.text, *self.texts])

    def wait_for(self, pattern: str) -> list[int]:
        """Until a line of each rank matches; their pids."""

        def found() -> bool:
            return all(re.search(pattern, text, re.MULTILINE) for text in self.texts)

        until(found, f"{pattern!r} of both ranks", context=lambda: self.text)
        return [int(text.split()[1]) for text in self.texts]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_spawned_ranks_leave_by_the_request(job: Job, method: str) -> None:
    """143 in each of them; `mp.spawn` takes that for a failure, and its exit code is 1."""
    run = Spawned(job, method)
    pids = run.wait_for("^trained 5 ")

    pod = Pod(job, 0)
    pod.ask(grace_s=15)

    answer = pod.answer()
    assert answer is not None
    assert answer.word == RESUME
    assert run.parent.wait() == 1, run.text
    assert "exit code 143" in run.parent.text, run.text
    assert_all_left_with(run.texts, saved_step(job), run.text)
    assert not any(map(is_running, pids))
    assert "started by multiprocessing" in run.texts[0]
    assert "launcher_warning" not in run.texts[1]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_spawned_ranks_whose_parent_is_stopped_save(job: Job, method: str) -> None:
    """SIGTERM ends the parent, and the kernel tells its ranks by SIGINT: notice like any other."""
    run = Spawned(job, method)
    pids = run.wait_for("^trained 5 ")

    run.parent.kill(signal.SIGTERM)

    assert run.parent.wait() == -signal.SIGTERM
    until(lambda: not any(map(is_running, pids)), "the ranks to end", context=lambda: run.text)
    assert_all_left_with(run.texts, saved_step(job), run.text)
    assert all(events_in(text, "signal") for text in run.texts), run.text


def test_ctrl_c_to_spawned_ranks_is_what_it_was(job: Job) -> None:
    """SIGINT while the parent lives: KeyboardInterrupt, and nothing is saved."""
    run = Spawned(job, "fork")
    pids = run.wait_for("^trained 5 ")

    for pid in pids:
        os.kill(pid, signal.SIGINT)

    run.parent.wait()
    until(lambda: not any(map(is_running, pids)), "the ranks to end", context=lambda: run.text)
    assert not any(events_in(text, "signal") for text in run.texts), run.text
    assert job.ckpts() == []


# Two lives on one volume.

SLOW_SAVE = """
if os.environ.get("SAVE_S"):
    from migrator.save import attempt as saving
    commit = saving.Attempt.commit

    def commits(self):
        time.sleep(float(os.environ["SAVE_S"]))
        return commit(self)

    saving.Attempt.commit = commits
"""


def test_a_replacement_waits_for_the_save_of_the_life_before_it(job: Job) -> None:
    """Kubernetes starts it while the old ranks still save: it resumes from what they save, and nobody loses a ckpt."""
    job.write(f"{TRAINS}\n{SLOW_SAVE}\nrun()\n")
    old = job.gang(2, SAVE_S="2.5")
    old.wait_for("^trained 5 ")
    old.kill(ranks=[1])
    until(lambda: list(job.root.glob("*/generations/*.leaving")), "the mark of a save", context=lambda: old.text)

    new = job.gang(2, pods=[1, 1], EPOCHS="1")

    assert old.wait() == [143, 143], old.text
    step = saved_step(job)
    assert job.ckpts()[-1].startswith("000001-")
    assert new.wait() == [0, 0], new.text
    assert [resumed(text) for text in new.texts] == [step, step], new.text
    assert [rank for rank, _ in new.events("waiting_for_leaving")] == [0]
    assert [steps_of(text)[-1] for text in old.texts] == [step, step]


# What the launcher is warned of.
