"""Whenever the notice comes, a ckpt holds one step throughout."""

from __future__ import annotations

import itertools
import operator
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from migrator.notice.signal_file import RESUME, SAVE, SignalFile
from tests.support import chance
from tests.support.ckpt_reader import read
from tests.support.harness import ROOT, Job, Process

TELLING = ROOT / "tests" / "support" / "scripts" / "telling.py"

KINDS = {
    "adamw foreach": 26,
    "adamw fused": 26,
    "sgd": 44,
    "lbfgs": 12,
    "two": 26,
    "several": 30,
    "compiled": 20,
}
"""Saves at random instants, while the training goes on."""
LEAVES = 16
"""Lives that really end; 200 notice in all."""


def tells(value: Any) -> list[float]:
    """All numbers of a state, of a tensor its one value: a second one would be that of another step."""
    if isinstance(value, Tensor):
        numbers = value.numpy().reshape(-1)  # numpy, not torch: one thread does not wait for another
        assert (numbers == numbers[0]).all(), f"a tensor holds {numbers.min()} and {numbers.max()}"
        return [float(numbers[0])]
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in tells(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


def check(ckpt: Path) -> list[float]:
    """The ckpt holds its step, and nothing of any other; what it tells."""
    step, values = read(ckpt)
    told = values["metrics"]["tells"]
    optimizers = [values[name] for name in sorted(values) if name.startswith("optimizer")]

    assert values["metrics"]["step"] == step
    assert tells(values["model"]) == told["model"]
    assert [[group["told"] for group in optimizer["groups"]] for optimizer in optimizers] == [[step]] * len(optimizers)
    assert told["groups"] == [step] * len(optimizers)
    for optimizer, expected in zip(optimizers, told["optimizers"], strict=True):
        in_order = [optimizer["state"][index] for index in sorted(optimizer["state"])]
        assert tells(in_order) == expected
    return tells(values["model"])


def compiler() -> str:
    return "inductor" if any(shutil.which(name) for name in ("c++", "g++", "clang++")) else "eager"


@pytest.mark.parametrize("kind", chance.some("kinds", KINDS, 0.25))
def test_saves_at_random_instants_hold_one_step_each(job: Job, kind: str) -> None:
    """Parameters, buffers, optimizer state, groups and metrics of every ckpt are those of one and the same step."""
    count = KINDS[kind]
    job.use(TELLING)
    process = job.run(
        KIND=kind,
        ASK=str(count),
        SEED=str(chance.dice(kind).randrange(10**6)),
        BACKEND=compiler(),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        MIGRATOR_KEEP="1000",
        MIGRATOR_EVERY="off",
    )

    assert process.wait(100) == 0, process.text
    names = job.ckpts()
    told = [check(job.root / "default" / name) for name in names]
    shutil.rmtree(job.root)
    # Every save was of a step; steps differ in all parameters, so a mixture would have shown.
    assert process.text.count("saved 000001-") == count
    assert count / 2 <= len(names) <= count
    for one, other in itertools.pairwise(told):
        assert all(map(operator.ne, one[:24], other[:24]))
    # The gate alone has kept the state still: no attempt was thrown away, none waited for memory.
    assert process.events("changed_outside_step") == []
    assert "gate_stall" not in process.text


def leave(job: Job, process: Process, by: str, pause: random.Random) -> None:
    """Notice at a random instant of a random step, and nothing else."""
    process.wait_for(r"^step \d+$")
    time.sleep(pause.uniform(0, 0.15))
    if by == "SIGTERM":
        process.kill()
    else:
        SignalFile(job.signal).write(SAVE, request="r1", deadline=time.time() + 20)


@pytest.mark.parametrize("kind", ["adamw fused", "lbfgs", "two", "several"])
def test_a_job_that_leaves_at_random_instants_goes_on_with_the_step_it_saved(job: Job, kind: str) -> None:
    """Life after life, by SIGTERM and by the signal file: the last step is the one saved, and the one gone on from."""
    job.use(TELLING)
    pause = chance.dice(kind)
    saved = 0
    for life in range(LEAVES // 4):
        by = "signal file" if life % 2 else "SIGTERM"
        process = job.run(KIND=kind, ASK="0", SEED="0")
        leave(job, process, by, pause)

        assert process.wait() == 143, process.text
        assert [int(line.split()[1]) for line in process.text.splitlines() if line.startswith("loaded")] == (
            [saved] if life else []
        )
        steps = [int(line.split()[1]) for line in process.text.splitlines() if line.startswith("step")]
        newest = job.ckpts()[-1]
        saved, _ = read(job.root / "default" / newest)
        check(job.root / "default" / newest)
        assert steps[-1] == saved, "a step after the saved one, or a step lost"
        assert process.events("changed_outside_step") == []
        if by == "signal file":
            answer = SignalFile(job.signal).read()
            assert answer is not None
            assert (answer.word, answer.fields["ckpt"], answer.fields["request"]) == (RESUME, newest, "r1")


# The gate itself.


LOOP = """
import os, signal, threading, time
import torch
from migrator import migrator

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening()
STEPS = int(os.environ["STEPS"])
if os.environ.get("HOLDS"):
    migrator._session.gate.holds_main = True
for step in migrator.batches(list(range(1, STEPS + 1))):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if os.environ.get("SAVE_AT") == str(step):
        migrator.safe_point()
        while not migrator._session.gate._takers:  # the periodic save waits for the next step
            time.sleep(0.001)
        print("saved", migrator.save_ckpt(), flush=True)
        while not migrator._session.gate._takers:  # it waits again
            time.sleep(0.001)
while os.environ.get("WAITS") and not migrator._session.gate._takers:
    time.sleep(0.001)
"""


def test_a_save_asked_for_just_before_a_periodic_one_is_made_at_once(job: Job) -> None:
    """The loop waits for its save, the periodic one for the loop's next step: one after the other is made."""
    job.write(LOOP)

    process = job.run(STEPS="25", SAVE_AT="9", MIGRATOR_EVERY="10", MIGRATOR_KEEP="10")

    assert process.wait(20) == 0, process.text
    assert [name[-2:] for name in job.ckpts()][:2] == ["09", "10"]


def test_periodic_saves_of_what_changes_outside_steps_do_not_stop_the_loop(job: Job) -> None:
    """The loop is held at the step that is due, not at the one before it."""
    job.write(LOOP)

    process = job.run(STEPS="25", HOLDS="1", MIGRATOR_EVERY="10", MIGRATOR_KEEP="10")

    assert process.wait(20) == 0, process.text
    assert [name[-2:] for name in job.ckpts()] == ["10", "20"]


def test_a_run_that_ends_just_before_a_periodic_save_has_not_failed(job: Job) -> None:
    """Nothing is said of a save that the end of the script has overtaken, and nothing waits for it."""
    job.write(LOOP)

    process = job.run(STEPS="9", WAITS="1", MIGRATOR_EVERY="10")

    assert process.wait(20) == 0, process.text
    assert job.ckpts() == []
    assert process.events("save_failed") == []


EVALUATES = """
import threading, time
import torch
from migrator import migrator

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.listening()
for step in migrator.batches([1]):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

def ask():
    while not migrator._session.is_leaving:
        time.sleep(0.0001)
    migrator.save_ckpt()  # too late: this thread leaves, and must not be taken for the one that trains

threading.Thread(target=ask).start()
torch.set_num_threads(1)
large = torch.rand(1500, 1500)
try:
    while True:
        print("evaluates", flush=True)
        large @ large  # a while in C, where no signal handler runs
finally:
    print("cleaned up", flush=True)
"""


def test_a_thread_that_waits_for_a_save_does_not_leave_in_the_place_of_the_main_thread(job: Job) -> None:
    """The main thread is called back from its evaluation all the same, long before the deadline."""
    job.write(EVALUATES)
    process = job.run(MIGRATOR_GRACE_S="40")
    process.wait_for("^evaluates$")

    process.kill()

    assert process.wait(20) == 143, process.text
    assert "cleaned up" in process.text
    assert process.events("left_hard") == []


COMPILED = """
import warnings
import torch
from migrator import migrator

warnings.filterwarnings("error", message="Dynamo does not know")
torch.set_num_threads(1)
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
one, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, second))
migrator.register("first", first)
migrator.register("one", one)
if BOTH:
    migrator.register("second", second)
    migrator.register("other", other)
migrator.listening()
gate = migrator._session.gate

@torch.compile(backend="eager")
def step():
    one.step()
    other.step()

@torch.compile(backend="eager")
def step_one():
    one.step()

for count in range(1, 31):
    for twice in range(2):
        one.zero_grad(), other.zero_grad()
        second(first(torch.ones(2, 4))).sum().backward()
        step()
        step_one()
        assert gate.phase.name == "DIRTY"
    assert migrator._session.safe_points.steps == 6 * count
    if BOTH:
        migrator.safe_point()
print("recompiled", torch._dynamo.utils.counters["recompile_limit"].total(), flush=True)
"""


@pytest.mark.parametrize("both", [True, False], ids=["said", "implied"])
def test_compiled_steps_pass_the_gate_each_time_and_are_not_traced_through_it(job: Job, both: bool) -> None:
    """The hooks are called, not compiled: no step is missed, nothing is compiled again, and no warning speaks of us."""
    job.write(COMPILED.replace("BOTH", str(both)))

    process = job.run()

    assert process.wait() == 0, process.text
    process.wait_for("^recompiled 0$")
    assert "Dynamo does not know" not in process.text
