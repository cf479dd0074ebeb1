"""The node check with real processes, one of which is slow, dies, stands still, or has a broken network.

Four ranks, each in a pod of its own; a pod has a file for the termination message. What each rank says, the exit codes
and the messages have to name exactly the one pod that is meant.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migrator.nodecheck.check import EXIT_AT_FAULT
from tests.support.harness import ROOT, Job, Process, events_in
from tests.support.rank_processes import LOOPBACK, Gang, free_port
from tests.support.torchruns import Torchrun

SCRIPT = ROOT / "tests" / "support" / "scripts" / "nodechecked.py"
SIZE = 4
ROUND_S = 4
"""Deadline of a round where a rank is silent: that long the others wait for it, in each round."""
LONG_S = 40
"""Deadline of a round where nobody is silent."""
REPEAT = 1
AGAIN = 143
"""Exit code of the ranks that are good, and cannot train without the others."""
SLOW_REPEAT = 2
"""More work, where times are compared."""
RUNS_S, STOPPED_S = 0.005, 0.15
"""How long, in seconds, a slowed process runs and stands still in turns. On a busy machine it runs for longer."""

IN_SCRIPT = f"""
import atexit
import sys
from datetime import timedelta
import torch
from torch import distributed
from migrator import migrator

atexit.register(print, "ended softly")
distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
verdict = migrator.check_nodes(timeout_s=float(sys.argv[1]), repeat={REPEAT})
ones = torch.ones(1)
distributed.all_reduce(ones)
print("goes on with", int(ones), "ranks")
distributed.destroy_process_group()
"""

FOLLOWS = """
import os
import signal
import socket
import sys
import time

print("follows as", os.getpid(), *sys.argv[1:])
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        for _ in range(3):
            server.accept()[0].sendall(b"hello")
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    print("heard", connection.recv(5))
"""

STOPS_ITSELF = """
import logging
import os
import signal
import sys
from migrator.nodecheck.__main__ import main

def stop(record):
    if os.environ["RANK"] == "1" and record.migrator_fields.get("round") == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return True

logging.getLogger("migrator").addFilter(stop)
sys.exit(main(sys.argv[1:]))
"""
"""The command; rank 1 stands still as soon as it begins round 1."""


@contextlib.contextmanager
def slowed(process: Process) -> Iterator[None]:
    """Let the process run for a small part of the time only."""
    end = threading.Event()

    def stop_and_go() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not end.is_set():
                process.kill(signal.SIGSTOP)
                end.wait(STOPPED_S)
                process.kill(signal.SIGCONT)
                end.wait(RUNS_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def messages(job: Job) -> dict[int, dict[str, str]]:
    """A file for the termination message of each pod, as kubelet makes it."""
    found = {}
    for rank in range(SIZE):
        path = job.directory / f"termination-{rank}.txt"
        path.touch()
        found[rank] = {"MIGRATOR_TERMINATION_LOG": str(path)}
    return found


def message(job: Job, rank: int) -> str:
    return (job.directory / f"termination-{rank}.txt").read_text()


def four(job: Job, *argv: str, each: dict[int, dict[str, str]] | None = None, **more: Any) -> Gang:
    """Four ranks that check their nodes, by plain `env://`."""
    env = {rank: {**variables, **(each or {}).get(rank, {})} for rank, variables in messages(job).items()}
    gang: Gang = job.gang(SIZE, *argv, pods=SIZE, each=env, **more)
    return gang


def command(job: Job, *argv: str, timeout_s: float = ROUND_S, **more: Any) -> Gang:
    """The same by `python -m migrator.nodecheck`."""
    return four(job.use(SCRIPT), f"--timeout={timeout_s}", f"--repeat={REPEAT}", *argv, **more)


def in_script(job: Job, timeout_s: float = ROUND_S, **more: Any) -> Gang:
    """The same by `migrator.check_nodes()`."""
    return four(job.write(IN_SCRIPT), str(timeout_s), **more)


def wait_for_round(gang: Gang, number: int, ranks: list[int] | None = None) -> None:
    gang.wait_for(rf"node_round round={number}\b", ranks)


def faults(gang: Gang, rank: int) -> list[str]:
    """The nodes at fault, as this rank says it."""
    return [fields["node"].strip('"') for fields in gang[rank].events("node_fault")]


def assert_all_name(gang: Gang, job: Job, lost: int, *, survivors: list[int]) -> None:
    """Each of these ranks names that one and nobody else, in its log and in its pod's message."""
    for rank in survivors:
        (named,) = faults(gang, rank)
        assert named.startswith(f"rank {lost}"), gang.text
        assert re.fullmatch(
            rf"migrator: node check: replace the pod of rank {lost}\b.*The other pods have to start again\n",
            message(job, rank),
        ), message(job, rank)


# Good nodes.


@pytest.mark.parametrize("way", [command, in_script])
def test_good_nodes_go_on(job: Job, way: Any) -> None:
    """No rank is at fault; the table has a row for each rank, with both rounds, and stands in one log."""
    gang = way(job, timeout_s=LONG_S)

    assert gang.wait() == [0] * SIZE, gang.text
    assert [rank for rank, _ in gang.events("nodes_good")] == [*range(SIZE)]
    assert gang.events("node_fault") == []
    table = gang.events("node_times")
    assert [rank for rank, _ in table] == [0] * SIZE
    for number, (_, row) in enumerate(table):
        assert (row["of"], row["host"]) == (str(number), f"pod-{number}")
        assert row["met_1"].strip('"') == f"rank {number ^ 1}"
        assert row["met_2"] not in (row["met_1"], f'"rank {number}"')
        for played in "12":
            seconds = [float(row[f"{part}_{played}_s"]) for part in ("matmul", "allreduce", "round")]
            assert all(time_s > 0 for time_s in seconds)
            assert abs(seconds[0] + seconds[1] - seconds[2]) < 0.002
    assert [message(job, rank) for rank in range(SIZE)] == [""] * SIZE
    if way is in_script:
        assert gang.text.count("goes on with 4 ranks") == SIZE


def test_the_command_takes_over(job: Job) -> None:
    """In the same process, with its arguments. Its own server can have the port, and nobody meets the old one there."""
    follows = job.directory / "follows.py"
    follows.write_text(FOLLOWS)

    gang = command(job, "--", str(follows), "--lr", "0.1", timeout_s=LONG_S)

    assert gang.wait() == [0] * SIZE, gang.text
    for pid, text in zip(gang.pids, gang.texts, strict=True):
        assert f"follows as {pid} --lr 0.1\n" in text
    assert [text.count("heard b'hello'\n") for text in gang.texts] == [0, 1, 1, 1]


def test_a_command_that_is_not_there_is_an_error(job: Job) -> None:
    """With its name. One process needs no other variables."""
    run = job.use(SCRIPT).run("--repeat=1", "--", "no-such-program")

    assert run.wait() == 1
    assert "the nodes are good, but no-such-program cannot be run: No such file or directory" in run.text


def test_a_port_that_is_taken_is_no_fault_of_the_node(job: Job) -> None:
    """A new pod would not help: the error says what to set, and the exit code is final."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        address = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = job.use(SCRIPT).run(env={**messages(job)[0], **address})
        assert run.wait() == 1, run.text

    assert f"migrator.nodecheck: rank 0 cannot serve the store of the node check at port {port}" in run.text
    assert message(job, 0).startswith(
        f"migrator: RanksError: rank 0 cannot serve the store of the node check at port {port}"
    )


# A slow one.


@pytest.mark.long  # its times are those of a machine that does little else
@pytest.mark.parametrize("excluded", [False, True], ids=["reported", "excluded"])
def test_a_slow_node_is_named(job: Job, excluded: bool) -> None:
    """By all ranks. The training goes on, unless it was excluded: then it ends like one at fault."""
    more = ["--exclude-stragglers"] if excluded else []
    gang = command(job, f"--repeat={SLOW_REPEAT}", *more, timeout_s=LONG_S)
    gang[3].kill(signal.SIGSTOP)  # so that nothing is measured before rank 2 is slow
    gang.wait_for("node_check", [2])
    with slowed(gang[2]):
        gang[3].kill(signal.SIGCONT)
        gang.wait_for("node_slow")

    assert gang.wait() == ([AGAIN, AGAIN, EXIT_AT_FAULT, AGAIN] if excluded else [0] * SIZE), gang.text
    slow = [(rank, fields["node"]) for rank, fields in gang.events("node_slow")]
    assert slow == [(rank, '"rank 2 (pod-2)"') for rank in range(SIZE)], gang.text
    assert gang.events("node_fault") == []
    for rank in range(SIZE):
        assert ("replace the pod of rank 2 (pod-2): its better round took" in message(job, rank)) is excluded


# One that dies or stands still.


LONG_IN_SCRIPT = pytest.param(in_script, marks=pytest.mark.long)


@pytest.mark.parametrize("way", [command, LONG_IN_SCRIPT])
def test_a_rank_that_dies_in_mid_round_is_named(job: Job, way: Any) -> None:
    """The others come to an end, all with the same verdict, and ask to be started again."""
    gang = way(job)
    wait_for_round(gang, 1)
    gang.kill(signal.SIGKILL, [2])

    assert gang.wait() == [AGAIN, AGAIN, -signal.SIGKILL, AGAIN], gang.text
    assert_all_name(gang, job, 2, survivors=[0, 1, 3])
    assert "goes on" not in gang.text
    assert gang.text.count("ended softly") == (3 if way is in_script else 0)


def test_a_rank_that_stands_still_is_named(job: Job) -> None:
    """By the others, in time; and by itself, when it runs again."""
    gang = command(job)
    wait_for_round(gang, 1)
    gang.freeze(1)
    for rank in (0, 2, 3):
        assert gang[rank].wait() == AGAIN, gang.text
    assert_all_name(gang, job, 1, survivors=[0, 2, 3])

    gang.thaw(1)

    assert gang[1].wait() == EXIT_AT_FAULT, gang.text
    assert_all_name(gang, job, 1, survivors=[1])


@pytest.mark.long
def test_a_rank_that_stood_still_in_round_1_only_is_not_at_fault(job: Job) -> None:
    """It runs again, and passes round 2."""
    job.write(STOPS_ITSELF)
    gang = four(job, f"--timeout={ROUND_S}", f"--repeat={REPEAT}")
    wait_for_round(gang, 2, [0, 2, 3])
    gang.thaw(1)

    assert gang.wait() == [0] * SIZE, gang.text
    (row,) = [row for _, row in gang.events("node_times") if row["of"] == "1"]
    assert (row["round_1"], float(row["round_2_s"]) > 0) == ("silent", True)


@pytest.mark.long
def test_a_rank_that_dies_after_a_good_round_is_named(job: Job) -> None:
    """It failed only once, but it is not there any more."""
    gang = command(job)
    wait_for_round(gang, 2)
    gang.kill(signal.SIGKILL, [3])

    assert gang.wait() == [AGAIN, AGAIN, AGAIN, -signal.SIGKILL], gang.text
    assert_all_name(gang, job, 3, survivors=[0, 1, 2])
    assert "gave no report in round 2: round 1: passed; round 2: no report of rank 3" in gang.texts[0]


@pytest.mark.parametrize("way", [command, in_script])
def test_rank_0_with_the_store_dies(job: Job, way: Any) -> None:
    """No store, no minutes: each rank says so by itself, at once."""
    gang = way(job)
    wait_for_round(gang, 1)
    gang.kill(signal.SIGKILL, [0])

    assert gang.wait() == [-signal.SIGKILL, AGAIN, AGAIN, AGAIN], gang.text
    assert_all_name(gang, job, 0, survivors=[1, 2, 3])


@pytest.mark.long
@pytest.mark.parametrize("way", [command, in_script])
def test_rank_0_with_the_store_stands_still(job: Job, way: Any) -> None:
    """A call to its store never ends. The others end hard, and rank 0 blames itself when it runs again."""
    gang = way(job)
    wait_for_round(gang, 1)
    gang.freeze(0)
    for rank in (1, 2, 3):
        assert gang[rank].wait() == AGAIN, gang.text
    assert_all_name(gang, job, 0, survivors=[1, 2, 3])
    assert "ended softly" not in gang.text

    gang.thaw(0)

    assert gang[0].wait() == EXIT_AT_FAULT, gang.text
    assert_all_name(gang, job, 0, survivors=[0])


def test_a_rank_that_never_comes_is_named(job: Job) -> None:
    """Nothing is measured without it."""
    gang = command(job, "--arrive=3", each={3: {"WORLD_SIZE": "1"}})

    assert gang.wait() == [AGAIN, AGAIN, AGAIN, 2], gang.text
    assert_all_name(gang, job, 3, survivors=[0, 1, 2])
    assert "did not come to the check within 3 s" in gang.texts[1]


# One whose network is broken.


def test_a_node_that_reaches_no_other_is_named_and_not_those_it_met(job: Job) -> None:
    """It is alive and reports, as they do. It failed twice, they failed once."""
    gang = command(job, each={1: {"GLOO_SOCKET_IFNAME": "none0"}})

    assert gang.wait() == [AGAIN, EXIT_AT_FAULT, AGAIN, AGAIN], gang.text
    assert_all_name(gang, job, 1, survivors=[*range(SIZE)])
    assert "failed in both rounds: round 1: connect to rank 0: " in gang.texts[3]
    # Two were proven in round 1, and the third met one of them in round 2.
    (row,) = [row for _, row in gang.events("node_times") if row["of"] == "0"]
    assert row["round_1"].startswith('"failed: connect to rank 1')
    assert float(row["round_2_s"]) > 0


# Stopped meanwhile.


def test_sigterm_ends_the_check(job: Job) -> None:
    """With the code that asks for another start, although process 1 of a container ignores SIGTERM by default."""
    gang = command(job, "--arrive=60", each={3: {"WORLD_SIZE": "1"}})
    gang.wait_for("node_check", [0, 1, 2])

    gang.kill(signal.SIGTERM, [0, 1, 2])

    assert gang.wait() == [AGAIN, AGAIN, AGAIN, 2], gang.text


# Under torchrun.


def agents(job: Job, *argv: str, count: int, nproc: int, **more: Any) -> list[Torchrun]:
    """An agent for each node, as a pod of its own."""
    job.use(SCRIPT)
    found: list[Torchrun] = []
    for pod in range(count):
        rdzv = found[0].rdzv if found else None
        found.append(job.torchrun(*argv, nproc=nproc, nnodes=str(count), rdzv=rdzv, pod=pod, **more))
    return found


def texts(found: list[Torchrun]) -> str:
    return "\n".join(agent.text for agent in found)


@pytest.mark.parametrize("shares_store", [True, False], ids=["store of the agent", "store of rank 0"])
def test_a_node_is_what_an_agent_started(job: Job, shares_store: bool) -> None:
    """Two agents with two ranks each: both ranks of the one meet both ranks of the other, in both rounds."""
    found = agents(job, f"--timeout={LONG_S}", f"--repeat={REPEAT}", count=2, nproc=2, shares_store=shares_store)

    assert [agent.wait() for agent in found] == [0, 0], texts(found)
    ((_, good), *_) = found[0].events("nodes_good")
    assert good["nodes"] == "2"
    rows = events_in(texts(found), "node_times")
    assert [row["met_1"].strip('"') for row in rows] == [row["met_2"].strip('"') for row in rows]
    assert {(row["node"], row["met_1"].strip('"')) for row in rows} == {("0", "ranks 2-3"), ("1", "ranks 0-1")}


def test_a_rank_of_torchrun_dies(job: Job) -> None:
    """Four agents with one rank each. The ranks of the other three come to one verdict, and name the node."""
    found = agents(job, f"--timeout={ROUND_S}", f"--repeat={REPEAT}", count=SIZE, nproc=1, shares_store=True)
    workers = {worker.rank: worker for agent in found for worker in agent.wait_for("node_round round=1")}
    # Not a rank of the first agent, which serves the store and ends with its rank.
    host = found[0].lives[0][0].rank
    lost = next(rank for rank in (2, 1) if rank != host)
    os.kill(workers[lost].pid, signal.SIGKILL)

    assert [agent.wait() for agent in found] == [1] * SIZE, texts(found)
    for rank, worker in workers.items():
        if rank != lost:
            (fields,) = events_in(worker.text, "node_fault")
            assert fields["node"].startswith(f'"node {lost} (rank {lost}, pod-'), worker.text


@pytest.mark.long
def test_the_agent_of_a_node_at_fault_is_ended(job: Job) -> None:
    """With restarts left it would start the rank again on the same node; the others' agents do that, and wait."""
    job.use(SCRIPT)
    argv = [f"--timeout={ROUND_S}", f"--repeat={REPEAT}"]
    first = job.torchrun(*argv, nproc=1, nnodes="3", max_restarts=1, shares_store=False)
    others = [
        job.torchrun(*argv, nproc=1, nnodes="3", max_restarts=1, rdzv=first.rdzv, pod=pod, shares_store=False, **more)
        for pod, more in ((1, {}), (2, {"env": {"GLOO_SOCKET_IFNAME": "none0"}}))
    ]

    assert others[1].wait() != 0
    (life,) = others[1].lives
    (fields,) = events_in(life[0].text, "node_fault")
    assert fields["node"].startswith(f'"node {life[0].rank} '), texts([first, *others])


@pytest.mark.cold
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """`torchrun -m migrator.nodecheck -- train.py`, in fresh interpreters: the script makes its group and trains."""
    train = tmp_path / "train.py"
    train.write_text(
        "import sys, torch\nfrom torch import distributed\n"
        'distributed.init_process_group("gloo")\nones = torch.ones(1)\ndistributed.all_reduce(ones)\n'
        'sys.stdout.write(f"trains with {int(ones)} ranks, {sys.argv[1]}\\n")\ndistributed.destroy_process_group()\n'
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    words = [
        *launch,
        f"--master-port={free_port()}",
        "-m",
        "migrator.nodecheck",
        "--repeat=1",
        "--",
        str(train),
        "--lr=1",
    ]

    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, **LOOPBACK, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trains with 2 ranks, --lr=1\n") == 2
    assert len(events_in(done.stderr, "nodes_good")) == 2
