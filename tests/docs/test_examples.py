"""Each example runs, is stopped, resumes, and keeps what its docstring says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from migrator.testing.s3_server import sockets, why_not
from tests.support.harness import ROOT, Job, processes_with, until

pytestmark = pytest.mark.processes

PLAIN = ROOT / "examples" / "plain.py"
EPOCHS = ROOT / "examples" / "epochs.py"
DDP = ROOT / "examples" / "ddp.py"
ELASTIC = ROOT / "examples" / "elastic.py"
SERVERS = ROOT / "examples" / "parameter_server.py"
DEMO = ROOT / "examples" / "demo.py"
needs_s3 = pytest.mark.skipif(why_not() is not None, reason=f"LOUD: {why_not()}")


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.long
def test_the_plain_example_goes_on_within_its_epoch_as_if_nothing_had_happened(job: Job) -> None:
    """Stopped twice in mid-epoch, it ends with the weights of the run that was never stopped, every sample once."""
    job.use(PLAIN)
    other_pod = job.directory / "other-pod"
    elsewhere = {"MIGRATOR_CKPT": str(other_pod / "ckpts"), "MIGRATOR_SIGNAL": str(other_pod / "signal")}
    whole = job.run("--epochs", "3", "--weights", "whole.pt", **elsewhere)
    log = job.directory / "steps.jsonl"
    for step in (20, 70):
        life = job.run("--epochs", "3", "--log", str(log))
        until(lambda step=step: lines(log) >= step, f"step {step}", context=lambda life=life: life.text)
        life.kill()
        assert life.wait() == 143, life.text
    last = job.run("--epochs", "3", "--log", str(log), "--weights", "stopped.pt")
    assert last.wait() == 0, last.text
    assert whole.wait() == 0, whole.text

    one, other = (torch.load(job.directory / name, weights_only=True) for name in ("whole.pt", "stopped.pt"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    for epoch in range(3):
        assert sorted(i for s in steps if s["epoch"] == epoch for i in s["ids"]) == list(range(1500))


def test_the_epochs_example_repeats_the_epoch_it_was_stopped_in_and_no_other(job: Job) -> None:
    """The predecessor's four lines: nothing torn, no finished epoch again, the interrupted one from its start."""
    job.use(EPOCHS)
    life = job.run("--epochs", "200")
    life.wait_for("^epoch 3:")
    life.kill()
    assert life.wait() == 143, life.text
    done = life.text.count("\nepoch ")
    second = job.run("--epochs", str(done + 2))
    assert second.wait() == 0, second.text
    assert f"goes on after epoch {done - 1}" in second.text
    assert f"\nepoch {done}: " in second.text
    assert f"\nepoch {done - 1}: " not in second.text


@pytest.mark.long
def test_the_ddp_example_goes_on_within_its_epoch_as_if_nothing_had_happened(job: Job) -> None:
    """Only rank 1 hears that it must leave. Resumed on as many ranks: the same weights, every sample once."""
    job.use(DDP)
    apart = {"MIGRATOR_CKPT": str(job.directory / "whole"), "MIGRATOR_SIGNAL": str(job.directory / "whole-signal")}
    whole = job.gang(2, "--epochs", "3", "--weights", "whole.pt", **apart)
    assert whole.wait() == [0, 0], whole.text

    log = job.directory / "steps"
    arguments = ("--epochs", "3", "--steps", str(log), "--weights", "stopped.pt")
    gang = job.gang(2, *arguments, pods=2)
    until(lambda: lines(log / "rank-1.jsonl") >= 32, "step 32", context=lambda: gang.text)
    gang.kill(ranks=[1])
    assert gang.wait() == [143, 143], gang.text
    assert 32 <= lines(log / "rank-0.jsonl") == lines(log / "rank-1.jsonl") < 50, "it was stopped in epoch 1"
    last = job.gang(2, *arguments, pods=2)
    assert last.wait() == [0, 0], last.text

    one, other = (torch.load(job.directory / name, weights_only=True) for name in ("whole.pt", "stopped.pt"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    steps = [json.loads(line) for rank in range(2) for line in (log / f"rank-{rank}.jsonl").read_text().splitlines()]
    for epoch in range(3):
        assert sorted(i for s in steps if s["epoch"] == epoch for i in s["ids"]) == list(range(1500))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_elastic_example_trains_every_sample_once_on_two_three_and_one_ranks(tmp_path: Path) -> None:
    """By real torchruns, the first two of them stopped by SIGTERM."""
    elastic = subprocess.run(
        [sys.executable, ELASTIC], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert elastic.returncode == 0, elastic.stdout + elastic.stderr
    assert re.search(r"^ranks 2: stopped at step \d+, epoch 0$", elastic.stdout, re.MULTILINE), elastic.stdout
    assert re.search(r"^ranks 3: stopped at step \d+, epoch 1$", elastic.stdout, re.MULTILINE), elastic.stdout
    assert re.search(r"^ranks 1: ended at step \d+, epoch 2$", elastic.stdout, re.MULTILINE), elastic.stdout
    for epoch in range(3):
        assert f"\nepoch {epoch}: 1500 samples trained 1x\n" in elastic.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [pytest.param([], id="volume"), pytest.param(["--s3"], id="s3", marks=needs_s3)])
def test_the_demo_keeps_the_promise(tmp_path: Path, options: list[str]) -> None:
    """`make demo`: stopped by the real hook and by SIGTERM, nothing lost, nothing repeated, every bit equal."""
    demo = subprocess.run([sys.executable, DEMO, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert re.search(r"^1, 1, 1 +0 +yes +yes$", demo.stdout, re.MULTILINE), demo.stdout
    assert re.search(r"^2, 2 +0 +yes +yes$", demo.stdout, re.MULTILINE), demo.stdout
    assert re.search(r"^2, 3, 1 +0 +- +-$", demo.stdout, re.MULTILINE), demo.stdout
    assert (tmp_path / "demo-out" / "loss.png").stat().st_size > 10_000
    ckpts = re.findall(r"^(\S+)/default/00000[12]-\d+$", demo.stdout, re.MULTILINE)
    names = ["stopped-ranks-2-3-1"] * 2 + ["stopped-ranks"] + ["stopped"] * 2
    assert ckpts == [f"{'s3://demo' if options else 'demo-out'}/{name}" for name in names]
    assert bool(options) != any(tmp_path.rglob("manifest.json"))
    assert processes_with(tmp_path) == []


@pytest.mark.long
@needs_s3
def test_the_demo_on_s3_leaves_nothing_behind_when_it_is_interrupted(tmp_path: Path) -> None:
    """By Ctrl-C while a pod trains: the pod, the server, its data and its sockets are gone."""
    with subprocess.Popen([sys.executable, DEMO, "--s3"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as demo:
        out = tmp_path / "demo-out"
        until(lambda: any(map(lines, out.glob("*/steps/*.jsonl"))), "a pod that trains")
        port = int(re.findall(r"-s3.port=(\d+)", " ".join(processes_with(out)))[0])
        assert any(path.exists() for path in sockets(port))
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=60)

    assert said.endswith("KeyboardInterrupt\n"), said
    assert demo.returncode != 0
    assert processes_with(tmp_path) == []
    assert not (out / "seaweedfs").exists()
    assert not any(path.exists() for path in sockets(port))


# Parameter servers: each rank has state of its own.


def trained_by(directory: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    """What each rank of the parameter servers' example has written at its end."""
    return [torch.load(directory / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def assert_equal_weights(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> None:
    assert [weights.keys() for weights in one] == [weights.keys() for weights in other]
    for here, there in zip(one, other, strict=True):
        assert all(torch.equal(here[key], there[key]) for key in here)


@pytest.fixture
def servers(job: Job) -> Job:
    return job.use(SERVERS)


WHOLE = ("--servers", "2", "--epochs", "4", "--weights", "whole")
BY_RANKS = 4
STEPS = 400
"""Of four epochs: 6000 samples, 30 for each of two workers in a round."""


def whole(job: Job) -> list[dict[str, torch.Tensor]]:
    """What a run that was never stopped ends with."""
    apart = {"MIGRATOR_CKPT": str(job.directory / "apart"), "MIGRATOR_SIGNAL": str(job.directory / "apart-signal")}
    gang = job.gang(BY_RANKS, *WHOLE, **apart)
    assert gang.wait() == [0] * BY_RANKS, gang.text
    return trained_by(job.directory / "whole", BY_RANKS)


def steps_of(log: Path, rank: int) -> list[int]:
    file = log / f"rank-{rank}.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().split("\n")[:-1]] if file.exists() else []


@pytest.mark.parametrize(
    "told", [pytest.param(0, id="a server"), pytest.param(3, id="a worker", marks=pytest.mark.long)]
)
def test_parameter_servers_that_are_stopped_go_on_as_if_nothing_had_happened(servers: Job, told: int) -> None:
    """One process hears that it must leave. Resumed, each rank has its own rows or layers, bit for bit."""
    log = servers.directory / "steps"
    arguments = (*WHOLE[:-1], "stopped", "--steps", str(log))
    gang = servers.gang(BY_RANKS, *arguments, pods=BY_RANKS)
    until(lambda: len(steps_of(log, told)) >= 120, "step 120", context=lambda: gang.text)
    gang.kill(ranks=[told])
    assert gang.wait() == [143] * BY_RANKS, gang.text
    last = servers.gang(BY_RANKS, *arguments, pods=BY_RANKS)
    assert last.wait() == [0] * BY_RANKS, last.text

    assert_equal_weights(trained_by(servers.directory / "stopped", BY_RANKS), whole(servers))
    assert all(steps_of(log, rank) == list(range(1, STEPS + 1)) for rank in range(BY_RANKS))
    assert not last.events("own_of_another_rank")
    assert not gang.events("ranks_differ")


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", [1, 2], ids=["a server", "a worker"])
def test_a_parameter_server_or_worker_that_is_killed_costs_the_interval(servers: Job, lost: int) -> None:
    """torchrun starts all of them again, from the last periodic ckpt; none was made without the rows of that server."""
    log = servers.directory / "steps"
    run = servers.torchrun(
        *(*WHOLE[:-1], "killed", "--steps", str(log)),
        nproc=BY_RANKS,
        max_restarts=1,
        env={"MIGRATOR_EVERY": str(EVERY)},
    )
    until(lambda: max(ckpts_at(servers), default=0) >= 4 * EVERY, "some periodic ckpts", context=lambda: run.text)
    worker = run.lives[0][lost]
    os.kill(worker.pid, signal.SIGKILL)
    assert run.wait() == 0, run.text

    (resumed,) = {int(fields["step"]) for _, fields in run.events("loaded")}
    assert resumed % EVERY == 0, "it went on from a periodic ckpt"
    for rank in range(BY_RANKS):
        steps = steps_of(log, rank)
        reached = len(steps) - (STEPS - resumed)
        assert steps == [*range(1, reached + 1), *range(resumed + 1, STEPS + 1)]
        assert 0 <= reached - resumed <= 2 * EVERY, "the interval, and a save that was under way"
    assert not run.events("own_of_another_rank"), run.text
    assert_equal_weights(trained_by(servers.directory / "killed", BY_RANKS), whole(servers))


EVERY = 25
"""Steps from one periodic save to the next."""


def ckpts_at(job: Job) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in job.ckpts()]


@pytest.mark.parametrize(
    ("ranks", "count"), [(3, "2"), (3, "1"), (4, "1")], ids=["fewer workers", "fewer servers", "other roles"]
)
def test_parameter_servers_refuse_another_layout(servers: Job, ranks: int, count: str) -> None:
    """Nobody can tell which rows belong to which of other servers: nothing is trained with the wrong ones."""
    log = servers.directory / "steps"
    gang = servers.gang(BY_RANKS, "--servers", "2", "--steps", str(log), pods=BY_RANKS)
    until(lambda: len(steps_of(log, 0)) >= 5, "step 5", context=lambda: gang.text)
    gang.kill(ranks=[0])
    assert gang.wait() == [143] * BY_RANKS, gang.text
    before = [steps_of(log, rank) for rank in range(BY_RANKS)]

    other = servers.gang(ranks, "--servers", count, "--steps", str(log), pods=ranks)
    assert all(other.wait()), other.text
    assert all("CkptMismatch" in text for text in other.texts), other.text
    assert [steps_of(log, rank) for rank in range(BY_RANKS)] == before
