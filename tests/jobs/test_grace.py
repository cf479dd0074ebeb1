"""What a start says of a grace that is too short, and `python -m migrator.grace` on real scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from migrator.save import measured
from tests.support.harness import ROOT, Job, Process, processes_with

# SLOW_S is what a commit takes.
SCRIPT = """
import os
import time
import torch
from migrator import migrator
from migrator.save import attempt as saving

commit = saving.Attempt.commit

def commits(self):
    time.sleep(float(os.environ.get("SLOW_S", "0")))
    return commit(self)

saving.Attempt.commit = commits
state, model = {"step": 0}, torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
migrator.register("state", state)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening(**eval(os.environ.get("ARGUMENTS", "{}")))
if migrator.resume:
    migrator.load_ckpt()
steps = int(os.environ.get("STEPS", "4"))
while state["step"] < steps:
    state["step"] += 1
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    migrator.safe_point()
print("steps", state["step"])
"""


# The warning of a start.


def lives(job: Job, *, slow_s: float, **second: str) -> tuple[Process, Process]:
    job.write(SCRIPT)
    first = job.run(MIGRATOR_EVERY="2", SLOW_S=str(slow_s), MIGRATOR_GRACE_S="1")
    assert first.wait() == 0, first.text
    later = job.run(**{"MIGRATOR_EVERY": "2", "STEPS": "8", "MIGRATOR_GRACE_S": "1", **second})
    assert later.wait() == 0, later.text
    return first, later


def test_a_life_is_warned_by_the_save_of_the_one_before(job: Job) -> None:
    """Before it loads and trains anything; its own saves take no less, and it is not said twice."""
    first, later = lives(job, slow_s=0.8)
    again = job.run(MIGRATOR_EVERY="2", STEPS="12", SLOW_S="0.8", MIGRATOR_GRACE_S="1")
    assert again.wait() == 0, again.text

    assert not first.events("grace_too_short"), "nothing was known"
    assert len(first.events("save_too_long")) == 1
    (fields,) = later.events("grace_too_short")
    assert 0.8 < float(fields["took_s"]) < 10
    assert fields["left_s"] == "1.000"
    assert fields["ckpt"] == later.events("loaded")[0]["ckpt"]
    assert "terminationGracePeriodSeconds" in fields["means"]
    assert later.text.index(" grace_too_short ") < later.text.index(" listening ")
    assert not again.events("grace_too_short"), "its own saves were quick"
    assert len(again.events("save_too_long")) == 1


def test_what_a_start_has_said_is_not_said_after_a_save(job: Job) -> None:
    """Once in a life."""
    _, later = lives(job, slow_s=0.8, SLOW_S="0.8")

    assert len(later.events("grace_too_short")) == 1
    assert len(later.events("committed")) >= 1
    assert not later.events("save_too_long")


@pytest.mark.parametrize("second", [{"MIGRATOR_GRACE_S": "30"}, {"MIGRATOR_RESUME": "never"}])
def test_a_start_says_nothing_if_the_grace_is_long_enough_or_nothing_is_known(job: Job, second: dict[str, str]) -> None:
    """A new lineage goes on from no save."""
    _, later = lives(job, slow_s=0.8, **second)

    assert not later.events("grace_too_short")


# The command.


def asked(job: Job, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MIGRAT", "KUBERNETES"))}
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    return subprocess.run(
        [sys.executable, "-m", "migrator.grace", "--probes=1", "--probe-mb=1", "--json", *map(str, arguments)],
        cwd=job.directory,
        env={**base, **more, "MIGRATOR_CKPT": str(job.root), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def saved_bytes(job: Job) -> int:
    """Of a real ckpt of the job, with its manifest."""
    life = job.run(MIGRATOR_EVERY="2", STEPS="2")
    assert life.wait() == 0, life.text
    return sum(path.stat().st_size for path in (job.root / "default" / job.ckpts()[-1]).iterdir())


def test_a_script_is_measured_as_it_would_be_saved(job: Job) -> None:
    """With the state of its optimizer behind the first step; the job's ckpts are not touched, whatever it asks."""
    job.write(SCRIPT)
    size = saved_bytes(job)
    before = sorted(str(path) for path in job.root.rglob("*"))
    arguments = repr({"ckpt": str(job.root), "job": "default", "every": 1, "resume": "require"})

    done = asked(job, "train.py", STEPS="1000000", ARGUMENTS=arguments)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0.99 * size < found["bytes"] < 1.01 * size
    assert sorted(str(path) for path in job.root.rglob("*")) == before
    assert not processes_with(job.directory)


GROUP = "from torch import distributed\ndistributed.init_process_group('gloo')\n"
OWN = 'migrator.register("own", {"x": torch.zeros(500_000)}, own=True)\nmigrator.listening('
OF_RANKS = GROUP + SCRIPT.replace("migrator.listening(", OWN)


def test_what_all_ranks_have_alike_counts_once(job: Job) -> None:
    """What each has for itself counts for each."""
    size = saved_bytes(job.write(SCRIPT))
    file = job.directory / "size"
    gang = job.write(OF_RANKS).gang(2, STEPS="1000000", MIGRATOR_MEASURE=str(file))

    assert gang.wait() == [0, 0], gang.text
    found = measured.found(file)
    assert found is not None
    assert found[1] == 2
    assert 0.97 * (size + 4_000_000) < found[0] < 1.03 * (size + 4_000_000)
    assert len(job.ckpts()) == 1, "that of the first job"


@pytest.mark.long
def test_the_ranks_of_a_torchrun_are_measured(job: Job) -> None:
    """A command with its own options, whose ranks are in sessions of their own."""
    job.write(OF_RANKS).root.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = asked(job, *torchrun, "train.py", STEPS="1000000", GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["parts_s"]["ranks agree"] > 2
    assert found["bytes"] > 4_000_000
    assert not processes_with(job.directory)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise SystemExit(7)", "ended with exit code 7 before it was there"),
        ("print('nothing')", "ended with exit code 0 before it was there"),
        ("import time\ntime.sleep(600)", r"was not there after 0.5 s (--timeout-s)"),
    ],
)
def test_a_script_that_reaches_no_step_is_an_error(job: Job, body: str, why: str) -> None:
    """And it is gone when the command ends."""
    job.write(body).root.mkdir()
    done = asked(job, "--timeout-s=0.5", "train.py")

    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert why in done.stderr
    assert not processes_with(job.directory)


def test_a_command_that_is_interrupted_leaves_nothing(job: Job) -> None:
    """Ctrl-C while the script runs."""
    job.write("import time\nprint('begun', flush=True)\ntime.sleep(600)").root.mkdir()
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MIGRAT", "KUBERNETES"))}
    command = [sys.executable, "-m", "migrator.grace", "--ckpt", str(job.root), str(job.script)]
    env = {**base, "PYTHONPATH": str(ROOT)}
    # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        assert process.stderr.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        process.stderr.read()

    assert process.returncode != 0
    assert not processes_with(job.directory)


def test_a_number_of_bytes_needs_no_torch(job: Job) -> None:
    """In an image for looking at volumes there is none, and people do not wait for it."""
    job.root.mkdir()
    code = "import sys; from migrator import grace; grace.main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", "--probes=1", "--ckpt", str(job.root), "1MB"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.endswith("}\nFalse\n"), done.stdout
