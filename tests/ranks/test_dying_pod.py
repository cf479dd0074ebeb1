"""Under torchrun a pod that was told to go trains nothing any more, however often its agent starts the ranks again."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from migrator.notice.signal_file import RESUME
from tests.ranks.test_torchrun import AGENT_STOPPED, AS_IT_IS, resumed, saved_step, steps_of, two_nodes, workers_of
from tests.support.harness import Job, until
from tests.support.rank_processes import is_running
from tests.support.torchruns import Torchrun


def assert_saved(run: Torchrun, *, grace_s: float = 15) -> int:
    """Asked by the hook, the pod answers with a ckpt; its step."""
    run.ask(grace_s=grace_s)
    answer = run.answer()
    assert answer is not None, run.text
    assert answer.word == RESUME, run.text
    return int(answer.fields["step"])


def generations(job: Job) -> list[str]:
    return sorted(path.name for path in job.root.glob("*/generations/*.json"))


def test_a_single_rank_that_saved_by_the_request_waits_for_the_agents_sigterm(job: Job) -> None:
    """Staying is a matter of having an agent, not of having other ranks."""
    run = job.write(AS_IT_IS).torchrun(nproc=1, max_restarts=1)
    (rank,) = run.wait_for("^trained 5 ")

    step = assert_saved(run)
    answered_s = time.monotonic()
    while time.monotonic() < answered_s + 1.0:
        assert is_running(rank.pid), run.text
        time.sleep(0.05)
    run.terminate()

    assert run.wait() in AGENT_STOPPED
    assert len(run.lives) == 1, f"started again inside the dying pod:\n{run.text}"
    assert steps_of(rank.text)[-1] == step


@pytest.mark.parametrize("nproc", [1, 2])
def test_ranks_started_again_in_a_pod_that_has_saved_train_nothing(job: Job, nproc: int) -> None:
    """Their agent started them for a reason of its own. The request was answered, and its pod goes all the same."""
    run = job.write(AS_IT_IS).torchrun(nproc=nproc, max_restarts=2)
    ranks = run.wait_for("^trained 5 ")
    step = assert_saved(run)

    os.kill(ranks[0].pid, signal.SIGKILL)  # as a crash would; the agent starts all of them again

    code = run.wait()  # nobody has to end the agent: it is told by the ranks that it has started in vain
    assert code in AGENT_STOPPED, run.text
    assert len(run.lives) == 2, run.text
    for rank in run.lives[1]:
        assert not re.search("^(resumed|trained) ", rank.text, re.MULTILINE), run.text
    assert generations(job) == ["000001.json"], run.text
    assert saved_step(job) == step
    answer = run.answer()
    assert answer is not None
    assert (answer.word, answer.fields["request"]) == (RESUME, "r-1"), "a second hook has to find its answer"


def test_another_torchrun_in_the_same_container_trains(job: Job) -> None:
    """A person asked by hand and started the job anew: no agent has started the ranks again."""
    run = job.write(AS_IT_IS).torchrun(nproc=1)
    run.wait_for("^trained 5 ")
    step = assert_saved(run)
    run.terminate()
    assert run.wait() in AGENT_STOPPED

    again = job.torchrun(nproc=1, EPOCHS="1", STEP_S="0")

    assert again.wait() == 0, again.text
    assert resumed(again.lives[0][0].text) == step


def test_a_request_that_nobody_answered_in_time_is_over(job: Job) -> None:
    """Its deadline has passed and the pod still runs: nobody has taken it away."""
    run = job.write(AS_IT_IS).torchrun(nproc=1, max_restarts=1, EPOCHS="1", SAMPLES="400")
    run.wait_for("^trained 5 ")
    asked_s = time.monotonic()
    step = assert_saved(run, grace_s=3)

    # It leaves at the deadline, and is started again when that is over.
    until(lambda: len(run.lives) == 2, "the second life", context=lambda: run.text)
    assert time.monotonic() - asked_s > 1.5
    assert run.wait() == 0, run.text
    assert resumed(run.lives[1][0].text) == step


def test_the_other_pods_go_on_while_the_dying_one_still_waits_for_its_sigterm(job: Job) -> None:
    """A hook with a pause behind it: the dying pod must neither train nor hold the others up.

    The survivor's agent forms the group anew, and the dying pod's agent joins it. Its ranks cannot train, so they
    leave and end their agent. Otherwise both would form groups that break at once, until SIGTERM comes.
    """
    job.write(AS_IT_IS)
    first, second = two_nodes(job, max_restarts=3, EPOCHS="3", SAMPLES="400", STEP_S="0.01")
    life = len(second.lives) - 1

    step = assert_saved(second, grace_s=40)

    assert second.wait(20) in AGENT_STOPPED, f"{first.text}\n{second.text}"
    context = f"{first.text}\n{second.text}"
    for worker in workers_of(second):
        if worker.life > life:
            assert not re.search("^(resumed|trained) ", worker.text, re.MULTILINE), context
    assert first.wait() == 0, context
    last = first.lives[-1]
    assert [(worker.rank, worker.size) for worker in last] == [(0, 1)], context
    assert resumed(last[0].text) == step, context
    assert first.agent.text.count("will restart worker group") <= 3, context
