"""The harness for jobs of several ranks, with scripts that know nothing of migrator."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrator.notice.signal_file import INIT, RESUME, SAVE, SignalFile
from tests.support.harness import ROOT, ForkServer, Job, until
from tests.support.rank_history import (
    RankStory,
    add_next_ranks,
    assert_each_sample_once_over_ranks,
    assert_ranks_agree,
    assert_ranks_as_if_nothing_had_happened,
    stopped_ranks,
    unstopped_ranks,
)
from tests.support.rank_processes import free_port, is_running, state_of

pytestmark = pytest.mark.processes

RANKED = ROOT / "tests" / "support" / "scripts" / "ranked.py"

REDUCES = """
import os
import time
from datetime import timedelta
import torch
import torch.distributed as dist

start_s = time.monotonic()
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
print("place", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOSTNAME")))
print("volume", os.environ["MIGRATOR_SIGNAL"], os.environ["MIGRATOR_CKPT"])
for step in range(int(os.environ.get("STEPS", 10**9))):
    number = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(number)
    print("step", step, "sum", number.item())
    time.sleep(0.005)
dist.destroy_process_group()
"""


@pytest.fixture
def job(fork_server: ForkServer, tmp_path: Path) -> Iterator[Job]:
    """A job of which nothing may be left, whatever the test did to it."""
    made = Job(fork_server, tmp_path).write(REDUCES)
    yield made
    made.end()
    # What the kernel ends with its parent is gone a moment later.
    until(lambda: processes_of(tmp_path) == [], "all to end", 5.0, lambda: str(processes_of(tmp_path)))


def processes_of(directory: Path) -> list[int]:
    """The running processes whose working directory this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == directory and is_running(int(entry.name)):
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def last_step(text: str) -> int:
    return text.count("\nstep ")


def test_ranks_reduce_together_and_end(job: Job):
    """Three ranks in two pods: each knows its place, its pod's signal file and the volume they share."""
    gang = job.gang(3, pods=[0, 0, 1], STEPS="3")

    assert gang.wait() == [0, 0, 0]
    places = ["place 0 3 0 2 pod-0", "place 1 3 1 2 pod-0", "place 2 3 0 1 pod-1"]
    assert [text.splitlines()[0] for text in gang.texts] == places
    files = [job.signal, job.signal, job.directory / "pod-1" / "signal"]
    assert [text.splitlines()[1] for text in gang.texts] == [f"volume {file} {job.root}" for file in files]
    assert all("step 2 sum 6" in text for text in gang.texts)


def test_pods_may_have_volumes_of_their_own(job: Job):
    """Four ranks shared evenly by two pods; the second pod's root is not the job's."""
    gang = job.gang(4, pods=2, roots="own", STEPS="1")

    assert gang.wait() == [0, 0, 0, 0]
    assert gang.pods == [0, 0, 1, 1]
    assert [text.split()[8] for text in gang.texts] == [str(job.root)] * 2 + [f"{job.root}-1"] * 2


def test_single_ranks_are_told_apart(job: Job):
    """Arguments and variables reach all ranks or one; one may start late."""
    job.write("import os, sys, time; print(sys.argv[1:], os.environ['A'], os.environ.get('B'), time.monotonic())")

    gang = job.gang(2, "--x", A="1", each={1: {"B": "2"}}, delay_s=[0.5, 0.0])

    assert gang.wait() == [0, 0]
    first, second = (text.split() for text in gang.texts)
    assert (first[:3], second[:3]) == (["['--x']", "1", "None"], ["['--x']", "1", "2"])
    assert float(first[3]) - float(second[3]) > 0.3


def test_a_signal_reaches_one_rank_or_all(job: Job):
    """The others find out through the collective that fails."""
    gang = job.gang(2)
    gang.wait_for("^step 5 ")

    gang.kill(signal.SIGKILL, ranks=[1])

    assert gang.wait() == [1, -signal.SIGKILL]
    assert "RuntimeError" in gang[0].text

    again = job.gang(2)
    again.wait_for("^step 5 ")
    # Standing still: else the second could end by its collective, in which the first is missing, before its own signal.
    for rank in (0, 1):
        again.freeze(rank)
    again.kill()
    again.kill()
    for rank in (0, 1):
        again.thaw(rank)
    assert again.wait() == [-signal.SIGTERM] * 2


def test_a_frozen_rank_holds_all_up_until_it_thaws(job: Job):
    """And a wait for ranks that hang says what every one of them wrote."""
    gang = job.gang(3)
    gang.wait_for("^step 5 ")

    gang.freeze(2)

    steps = last_step(gang[2].text)
    with pytest.raises(AssertionError, match=r"rank 0 still running.*(?s:.*)--- rank 2, pod 0\nplace 2"):
        gang.wait(0.3)
    with pytest.raises(AssertionError, match=r"waited 0.1 s for 'never' in the output of rank 1:\n--- rank 0"):
        gang.wait_for("never", ranks=[1], timeout_s=0.1)
    assert last_step(gang[2].text) == steps
    assert last_step(gang[0].text) <= steps + 2

    gang.thaw(2)
    gang.wait_for(f"^step {steps + 3} ")


def test_the_end_finds_frozen_ranks(job: Job):
    """One is frozen in a collective, the others wait for it; afterwards none is left, and ending twice is fine."""
    gang = job.gang(2)
    gang.wait_for("^step 5 ")
    gang.freeze(0)

    gang.end()
    gang.end()

    # The second one may have ended by its collective, in which the first is missing, before it was killed itself.
    assert gang.wait() in ([-signal.SIGKILL] * 2, [-signal.SIGKILL, 1])
    assert not any(map(is_running, gang.pids))


def test_the_pod_asks_as_its_hook_does(job: Job):
    """The request is in the pod's file and in no other; the answer is what stands there afterwards."""
    gang = job.gang(2, pods=2, STEPS="1")
    gang.ask(pod=1, grace_s=7.0, request="r-9")

    file = SignalFile(job.directory / "pod-1" / "signal")
    asked = file.read()
    assert asked is not None
    assert (asked.word, asked.fields["request"], asked.fields["pod"]) == (SAVE, "r-9", "pod-1")
    assert 5.0 < float(asked.fields["deadline"]) - time.time() <= 7.0
    assert not job.signal.exists()
    with pytest.raises(AssertionError, match="an answer in"):
        gang.answer(1, timeout_s=0.05)

    file.write(RESUME, request="r-9")
    answer = gang.answer(pod=1)
    assert answer is not None
    assert answer.word == RESUME
    assert gang.answer(pod=0) is None
    assert gang.wait() == [0, 0]


def test_events_are_told_by_rank(job: Job):
    """As the log lines of one process, with the rank that wrote them."""
    job.write('import os; print(f"x migrator rank {os.environ[\'RANK\']}: committed step=4 why=\\"a b\\"")')

    gang = job.gang(2)

    assert gang.wait() == [0, 0]
    assert gang.events("committed") == [(rank, {"step": "4", "why": '"a b"'}) for rank in (0, 1)]


def test_the_end_of_the_fork_server_is_the_end_of_its_children(tmp_path: Path) -> None:
    """However it ends; nothing else has to look for them."""
    server = ForkServer(tmp_path, tmp_path)
    job = Job(server, tmp_path).write("import time\nprint('runs')\ntime.sleep(60)\n")
    life = job.run()
    life.wait_for("runs")

    server._process.kill()
    server.close()

    until(lambda: not is_running(life.pid), "its child to end")
    with pytest.raises(AssertionError, match="the fork server is gone"):
        life.wait()


def test_what_a_script_prints_is_not_cut_by_what_a_thread_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A line is read whole, also on machines that set PYTHONUNBUFFERED, where Python writes word by word."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    server = ForkServer(tmp_path, tmp_path)
    job = Job(server, tmp_path)
    try:
        script = job.write(
            """
            import logging, threading
            done = threading.Event()
            def logs():
                while not done.is_set():
                    logging.warning("a line of its own")
            thread = threading.Thread(target=logs)
            thread.start()
            for number in range(300):
                print("a", "line", "of", number, "words")
            done.set()
            thread.join()
            """
        )
        process = script.run()
        assert process.wait() == 0, process.text
        lines = [line for line in process.text.split("\n") if not line.startswith("WARNING:root:")]
        assert lines == [*(f"a line of {number} words" for number in range(300)), ""]
    finally:
        job.end()
        server.close()


def test_a_free_port_is_free():
    """A port that is taken is not given."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        assert all(free_port() != taken.getsockname()[1] for _ in range(20))


def test_a_port_is_given_once(monkeypatch: pytest.MonkeyPatch):
    """Another test may draw the same number before anybody listens there."""
    first = free_port()
    drawn = iter([first, first, first + 2, first + 4])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *arguments: next(drawn))
    assert free_port() in (first + 2, first + 4)


def test_torchrun_passes_sigterm_on(job: Job):
    """Both ranks end by it, and the agent ends with 1: SIGTERM to the agent and to the ranks are told apart."""
    run = job.torchrun(nproc=2)
    ranks = run.wait_for("^step 5 ")
    assert [(rank.rank, rank.local_rank, rank.size) for rank in ranks] == [(0, 0, 2), (1, 1, 2)]
    assert sorted(run.worker_pids()) == sorted(rank.pid for rank in ranks)
    assert all(os.getpgid(rank.pid) == rank.pid for rank in ranks)

    run.terminate()

    assert run.wait() == 1
    assert run.worker_pids() == []
    assert not any(is_running(rank.pid) for rank in ranks)


def test_torchrun_starts_all_ranks_again_when_one_ends(job: Job):
    """A life for each start, and nothing of the first one is lost."""
    run = job.torchrun(nproc=2, max_restarts=1)
    before = run.wait_for("^step 5 ")

    os.kill(before[1].pid, signal.SIGKILL)

    after = run.wait_for("^step 5 ", life=1)
    assert [rank.rank for rank in after] == [0, 1]
    assert not {rank.pid for rank in before} & {rank.pid for rank in after}
    assert "step 5 " in before[0].text


def test_two_nodes_form_one_group(job: Job):
    """A second agent joins the first: the ranks start anew, in two pods, and go on as one when a node is gone."""
    first = job.torchrun(nproc=1, nnodes="1:2", max_restarts=1)
    first.wait_for("^step 5 ")

    second = job.torchrun(nproc=1, nnodes="1:2", rdzv=first.rdzv, pod=1)

    second.wait_for("^step 5 ")
    joined = first.wait_for("^step 5 ", life=1)[0]
    assert {joined.rank, second.lives[0][0].rank} == {0, 1}
    assert joined.size == 2
    assert str(job.directory / "pod-1" / "signal") in second.lives[0][0].text

    second.end()
    alone = first.wait_for("^step 5 ", life=2)[0]
    assert alone.size == 1


def test_the_end_of_an_agent_is_the_end_of_its_ranks(job: Job):
    """Frozen ranks too; and when somebody else kills the agent."""
    run = job.torchrun(nproc=2)
    pids = [rank.pid for rank in run.wait_for("^step 5 ")]
    os.kill(pids[0], signal.SIGSTOP)
    until(lambda: state_of(pids[0]) == "T", "the rank to stand still")
    run.end()
    assert not any(map(is_running, pids))

    killed = job.torchrun(nproc=1)
    pids = [rank.pid for rank in killed.wait_for("^step 5 ")]
    killed.agent.kill(signal.SIGKILL)
    until(lambda: not any(map(is_running, pids)), "the rank to end with its agent")


def test_what_is_asked_of_a_node_reaches_its_pod(job: Job):
    """As in a gang."""
    job.write("import time\nprint('runs')\ntime.sleep(60)\n")
    run = job.torchrun(nproc=1, pod=1)
    run.wait_for("runs")

    run.ask(request="r-3")

    file = SignalFile(job.directory / "pod-1" / "signal")
    asked = file.read()
    assert asked is not None
    assert asked.fields["request"] == "r-3"
    file.write(INIT, request="r-3", error="none")
    answer = run.answer()
    assert answer is not None
    assert answer.word == INIT


def life(*ranks: str) -> list[str]:
    """What the ranks of a life wrote: `2 | 3:0,2 4:4,6 | end` resumed from step 2, trained two steps and ended."""
    texts = []
    for rank in ranks:
        resumed, steps, end = (part.strip() for part in rank.split("|"))
        lines = [f"resumed {resumed}"]
        for step in steps.split():
            number, _, ids = step.partition(":")
            lines.append(f"trained {number} 0 0x1p+0 ids {ids.replace(',', ' ')}")
        lines += [f"weights {end}", f"final {end}"] if end else []
        texts.append("\n".join([*lines, ""]))
    return texts


def test_a_story_counts_up_to_where_the_next_life_resumes():
    """The global order over two lives, of two ranks and of three; what the first trained too far does not count."""
    story = RankStory()
    story.add(life("0 | 1:0,2 2:4,6 3:8,10 |", "0 | 1:1,3 2:5,7 |"))

    story.add(life("2 | 3:8,11 | w", "2 | 3:9,0 | w", "2 | 3:10,1 | w"))

    assert story.resumed == [0, 2]
    assert story.ids == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]
    assert_each_sample_once_over_ranks(story, epochs=1, samples=12, padding=2)
    assert_ranks_agree(story)
    with pytest.raises(AssertionError, match=r"repeated at its end are \[0, 1\]"):
        assert_each_sample_once_over_ranks(story, epochs=1, samples=12)


def test_a_story_finds_what_is_wrong():
    """Samples twice, ranks that resumed apart, steps behind the saved one or that a rank never trained."""
    story = RankStory()
    story.add(life("0 | 1:0,2 2:4,6 |", "0 | 1:1,3 2:5,7 |"))
    with pytest.raises(AssertionError, match="resumed from step 1, behind step 2"):
        add_next_ranks(story, life("1 | 2:4,6 | a", "1 | 2:5,6 | b"))
    with pytest.raises(AssertionError, match=r"epoch 0: twice \[6\], never \[7\]"):
        assert_each_sample_once_over_ranks(story, epochs=1, samples=8)
    with pytest.raises(AssertionError, match=r"'a'.*'b'"):
        assert_ranks_agree(story)
    with pytest.raises(AssertionError, match="ranks resumed from different steps"):
        story.add(life("2 | |", "1 | |"))

    missing = RankStory()
    missing.add(life("0 | 1:0,2 2:4,6 |", "0 | 1:1,3 |"))
    with pytest.raises(AssertionError, match=r"step 2 was trained by \[0\] only"):
        missing.add(life("2 | |", "2 | |"))
    with pytest.raises(AssertionError, match=r"no life trained \[1\]"):
        RankStory().add(life("1 | |"))


def test_a_gang_of_one_is_as_if_nothing_had_happened(job: Job):
    """The job for ranks, stopped three times, where one process is all there is."""
    job.use(RANKED)
    reference = unstopped_ranks(job, 1, WORKERS="2")

    story = stopped_ranks(job, [("0:2:backward", 0), ("1:1:done", 0), ("2:evaluation 1", 0)], [1] * 4, WORKERS="2")

    assert_ranks_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once_over_ranks(story, epochs=3, samples=48)
