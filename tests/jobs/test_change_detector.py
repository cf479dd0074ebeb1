"""State of whole jobs that changes outside of a step: seen, named, and never saved wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ckpt_reader import read
from tests.support.harness import Job, Process
from tests.unit.state.test_change_detector import flattened

SWAPPED = """
import sys, threading
import torch
from migrator.state.change_detector import Mark

sys.setswitchinterval(1e-6)
marked, over = threading.Event(), False

def swap():
    while not over:
        if marked.wait(1):
            marked.clear()
            for param in params:
                param.data = torch.ones(1)  # the marked memory goes back to the system

params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(8)]
thread = threading.Thread(target=swap)
thread.start()
found = set()
for _ in range(250):
    for param in params:
        param.data = torch.zeros(1 << 18)
    mark = Mark(params)
    marked.set()
    while marked.is_set():
        found.add(mark.differs(params))
    found.add(mark.differs(params))
over = True
thread.join()
print("found", sorted(found))
"""


def test_data_swapped_while_it_is_being_compared_breaks_nothing(job: Job) -> None:
    """The training thread may exchange a `.data`, and free the old one, at any moment of the comparison."""
    job.write(SWAPPED)

    process = job.run()

    assert process.wait() == 0, process.text
    process.wait_for(r"^found \[False, True\]$")


PRELUDE = """
import os, signal, threading, time
import torch, xxhash
from torch import nn
from migrator import migrator

torch.manual_seed(0)
torch.set_num_threads(1)
LEAVE_AT, SAVE_AT = (set(map(int, os.environ.get(name, "").split())) for name in ("LEAVE_AT", "SAVE_AT"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))
metrics = {"step": 0, "epoch": 0, "digest": ""}
registered = {}

def listen(**named):
    registered.update(named)
    for name, value in named.items():
        migrator.register(name, value)
    migrator.register("metrics", metrics)
    migrator.listening()
    if migrator.resume:
        print("loaded", migrator.load_ckpt(), metrics["step"], flush=True)
        assert metrics["digest"] == digest(), "other state was loaded than was told"

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()["state"]
    return [t for v in value.values() for t in tensors(v)] if isinstance(value, dict) else []

def digest():
    total = xxhash.xxh3_128()
    for value in registered.values():
        for tensor in tensors(value):
            total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()

def told():
    # The end of a step: the state is whole here, and from now on metrics says what it is.
    metrics["step"] += 1
    metrics["digest"] = digest()
    print("step", metrics["step"], flush=True)

asked = set()

def notice(moment):
    # At most once each: notice that comes just now, while the state is not that of the safe point.
    if moment in asked or moment not in LEAVE_AT | SAVE_AT:
        return
    asked.add(moment)
    life = migrator._session
    while life._saver.is_busy and not life.gate._takers:  # with the notice before
        time.sleep(0.001)
    before = life._saver.newest
    if moment in SAVE_AT:
        migrator.save_ckpt(wait=False)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
        while not life.is_leaving:
            time.sleep(0.001)
    end = time.monotonic() + 10
    while time.monotonic() < end:  # until it was tried
        is_thrown_away = life.gate.capture.spoiled or life.gate.holds_main
        if life._saver.newest is not before or (is_thrown_away and life.gate._takers):
            print("tried", moment, flush=True)
            return
        time.sleep(0.001)
    print("was not tried", moment, flush=True)
"""


def named(process: Process, event: str) -> list[str]:
    return [fields["object"] for fields in process.events(event)]


def check(job: Job) -> list[int]:
    """Every ckpt holds exactly what the script said of its step; the steps."""
    steps = []
    for name in job.ckpts():
        step, values = read(job.root / "default" / name)
        metrics = values.pop("metrics")
        assert digest(values) == metrics["digest"], f"{name} holds other state than that of step {metrics['step']}"
        steps.append(step)
    return steps


def digest(values: dict[str, Any]) -> str:
    import xxhash

    total = xxhash.xxh3_128()
    for value in values.values():
        state = value["state"] if isinstance(value, dict) and "state" in value else value
        for tensor in flattened(state):
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


EMA = """
model = nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80), nn.Linear(80, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
listen(model=model, optimizer=optimizer)
ema = [torch.full_like(p, 7) for p in model.parameters()]
loader = torch.ones(4, 8, 80).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        model(x * (1 + metrics["step"])).square().mean().backward()
        optimizer.step()
        told()
    own = [p.detach().clone() for p in model.parameters()]
    for p, e in zip(model.parameters(), ema):
        p.data.copy_(e)
    notice(metrics["epoch"])
    for p, o in zip(model.parameters(), own):
        p.data.copy_(o)
    metrics["epoch"] += 1
print("done", digest())
"""


def done(process: Process) -> str:
    assert process.wait() == 0, process.text
    return process.wait_for(r"^done (\w+)$").group(1)


def test_notice_while_averaged_weights_are_swapped_in_for_an_evaluation(job: Job) -> None:
    """EMA weights copied in through `.data`: named, saved at the next safe point, and the resumed run ends the same."""
    job.write(PRELUDE + EMA)
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", LEAVE_AT="0")

    assert stopped.wait() == 143, stopped.text
    stopped.wait_for("^tried 0$")
    assert named(stopped, "changed_outside_step") == ["model"]
    assert check(job) == [4]
    assert done(job.run()) == end


def test_an_object_that_changes_again_and_again_is_saved_while_the_loop_stands(job: Job) -> None:
    """Seen twice, it is named once more; from then on every save asked for is made at a safe point, none skipped."""
    job.write(PRELUDE + EMA)

    process = job.run(SAVE_AT="0 1 2 3 4", EPOCHS="6", MIGRATOR_KEEP="10")

    assert process.wait() == 0, process.text
    assert named(process, "changed_outside_step") == ["model", "model"]
    assert named(process, "main_thread_only") == ["model"]
    assert check(job) == [4, 8, 12, 16, 20]


SWA = """
model = nn.Linear(80, 80, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa = torch.optim.swa_utils.AveragedModel(model)
listen(model=model, swa=swa, optimizer=optimizer)
loader = torch.ones(3, 2, 80).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        told()
    notice(2 * metrics["epoch"])
    swa.update_parameters(model)
    notice(2 * metrics["epoch"] + 1)
    metrics["epoch"] += 1
    metrics["digest"] = digest()
print("done", digest())
"""


def test_notice_around_the_epochs_end_averages_the_weights_once(job: Job) -> None:
    """SWA at the end of an epoch: stopped just before or just after its update, the run ends as if never stopped."""
    job.write(PRELUDE + SWA)
    end = done(job.run(MIGRATOR_RESUME="never"))

    for moment, changed in (("2", []), ("3", ["swa"])):
        stopped = job.run(MIGRATOR_RESUME="never", LEAVE_AT=moment)

        assert stopped.wait() == 143, stopped.text
        assert check(job)[-1] == 6
        assert named(stopped, "changed_outside_step") == changed
        assert done(job.run()) == end


TARGET = """
model, target = nn.Linear(80, 80), nn.Linear(80, 80)
optimizer = torch.optim.Adam(model.parameters())
listen(model=model, target=target, optimizer=optimizer)
for step in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 80) * step).square().mean().backward()
    optimizer.step()
    if EARLY:
        told()
        migrator.safe_point()
        notice(step)
    for t, p in zip(target.parameters(), model.parameters()):
        t.data.lerp_(p.data, 0.1)
    if EARLY:
        notice(100 + step)
    else:
        told()
        migrator.safe_point()
        notice(step)
"""


def test_a_target_network_updated_after_the_step_is_part_of_the_step(job: Job) -> None:
    """Updated between the step and the safe point, it is nothing out of the ordinary."""
    job.write(PRELUDE + "EARLY = False\n" + TARGET)

    process = job.run(SAVE_AT="3 4 5 6 20", MIGRATOR_KEEP="10")

    assert process.wait() == 0, process.text
    assert process.events("changed_outside_step") == []
    assert check(job) == [4, 5, 6, 7, 21]


def test_a_target_network_updated_after_the_safe_point_is_named(job: Job) -> None:
    """A safe point said too early: what changes behind it is never mixed with what was there."""
    job.write(PRELUDE + "EARLY = True\n" + TARGET)

    process = job.run(SAVE_AT="3 106 110 120", MIGRATOR_KEEP="10")

    assert process.wait() == 0, process.text
    assert set(named(process, "changed_outside_step")) == {"target"}
    assert named(process, "main_thread_only") == ["target"]
    steps = check(job)
    # Right behind the safe point nothing has changed yet; in the end the loop is held there.
    assert (steps[0], steps[-1]) == (4, 22)
    assert any(8 <= step <= 12 for step in steps)


FORWARD = """
class Momentum(nn.Module):
    # The second encoder follows the first in every training forward.
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(80, 80), nn.Linear(80, 80).requires_grad_(False)

    def forward(self, x):
        for k, q in zip(self.key.parameters(), self.query.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1 if SWAPS else k.data.mul_(0.9).add_(q.data, alpha=0.1)
        return self.query(x) - self.key(x)

class Words(nn.Module):
    # Rows that are too long are shortened when they are looked up.
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(100, 80, max_norm=1.0)

    def forward(self, x):
        return self.rows(torch.arange(metrics["step"] % 9, 99)).sum(0) * x

SWAPS = os.environ["MODEL"] == "swaps"
model = Words() if os.environ["MODEL"] == "words" else Momentum()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
listen(model=model, optimizer=optimizer)
loader = torch.ones(6, 2, 80).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        y = model(x)
        notice(metrics["step"])
        y.square().mean().backward()
        optimizer.step()
        told()
    metrics["epoch"] += 1
print("done", digest())
"""


@pytest.mark.parametrize("model", ["momentum", "swaps", "words"])
def test_weights_that_change_in_forward_are_saved_as_they_were_at_a_safe_point(job: Job, model: str) -> None:
    """A momentum encoder, `Embedding(max_norm)`: named, then saved while the loop stands, also when leaving."""
    job.write(PRELUDE + FORWARD)
    job.env["MODEL"] = model
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", SAVE_AT="3 7 9", LEAVE_AT="12", MIGRATOR_KEEP="10")

    assert stopped.wait() == 143, stopped.text
    assert set(named(stopped, "changed_outside_step")) == {"model"}
    assert named(stopped, "main_thread_only") == ["model"]
    first, *_, last, left = check(job)
    # The second try goes beside the loop as well, whose next forward may come too soon; the third holds it.
    assert 4 <= first <= 8
    assert (last, left) == (10, 13)
    assert done(job.run()) == end


MEMORY = """
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memory = {"seen": torch.zeros(100, 100), "count": 0}
listen(model=model, optimizer=optimizer, memory=memory)
loader = torch.ones(4, 2, 8).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        told()
    seen = memory["seen"]
    if os.environ["WAY"] == "version":
        seen[metrics["epoch"], 3] += 1
    elif os.environ["WAY"] == "data":
        seen.data.add_(1)
    else:
        memory["seen"] = seen + 1
    memory["count"] += 1
    notice(metrics["epoch"])
    metrics["epoch"] += 1
    metrics["digest"] = digest()
print("done", digest())
"""


@pytest.mark.parametrize("way", ["version", "data"])
def test_a_large_tensor_in_a_registered_dict_that_changes_in_an_evaluation_is_named(job: Job, way: str) -> None:
    """What is too large to copy at each safe point must not be saved half new."""
    job.write(PRELUDE + MEMORY)
    job.env["WAY"] = way
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", SAVE_AT="0", LEAVE_AT="1", MIGRATOR_KEEP="10")

    assert stopped.wait() == 143, stopped.text
    assert named(stopped, "changed_outside_step") == ["memory", "memory"]
    assert check(job) == [4, 8]
    assert done(job.run()) == end


def test_a_large_tensor_in_a_registered_dict_may_be_exchanged(job: Job) -> None:
    """Another tensor under the same key leaves the safe point's own untouched: it is saved at once."""
    job.write(PRELUDE + MEMORY)
    job.env["WAY"] = "exchanged"
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", LEAVE_AT="1")

    assert stopped.wait() == 143, stopped.text
    assert stopped.events("changed_outside_step") == []
    assert check(job) == [8]
    assert done(job.run()) == end


UNREGISTERED = """
model = nn.Linear(700, 700)
known = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
unknown = torch.optim.SGD([model.weight], lr=0.1)
listen(model=model, known=known)
over = threading.Event()

def ask():
    pause = torch.Generator().manual_seed(1)
    for _ in range(25):
        time.sleep(0.01 * torch.rand((), generator=pause).item())
        migrator.save_ckpt()
    over.set()

threading.Thread(target=ask).start()
loader = torch.ones(6, 2, 700).unbind()
while not over.is_set():
    for x in migrator.batches(loader):
        for optimizer in (unknown, known):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            model(x)
        metrics["step"] += 1
        metrics["digest"] = digest()
"""


def test_an_optimizer_that_is_not_registered_changes_registered_weights_behind_the_gate(job: Job) -> None:
    """Its steps wait for a save as all others do, and it is named, since its own state is not saved."""
    job.write(PRELUDE + UNREGISTERED)

    process = job.run(MIGRATOR_KEEP="50")

    assert process.wait() == 0, process.text
    assert len(check(job)) >= 5
    assert [fields["changes"] for fields in process.events("unregistered_optimizer")] == ["model"]
    assert process.events("changed_outside_step") == []


LOADER_DIES = """
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = [0.0] * 300_000
listen(model=model, optimizer=optimizer)

class Loader:
    def __len__(self):
        return 40

    def __iter__(self):
        for batch in range(40):
            if batch == 30:
                os.kill(os.getpid(), signal.SIGTERM)
                while not migrator._session.is_leaving:
                    time.sleep(0.001)
                raise RuntimeError("the workers died with the process group")
            yield torch.ones(2, 8)

for x in migrator.batches(Loader()):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    told()
"""


@pytest.mark.parametrize("why", ["costly", "held"])
def test_a_loader_that_dies_with_the_pod_leaves_a_safe_point_that_can_be_saved(job: Job, why: str) -> None:
    """With no next batch the loop stands at its last safe point, though a capture is costly or has to be held."""
    body = LOADER_DIES
    if why == "costly":
        body = body.replace("listen(model", 'metrics["losses"] = losses\nlisten(model')
    else:
        body = body.replace("for x in", "migrator._session.gate.holds_main = True\nfor x in")
    job.write(PRELUDE + body)

    process = job.run()

    assert process.wait() == 143, process.text
    if why == "costly":
        assert process.events("capture_costly") != []
    assert check(job) == [30]


FEATURES = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from migrator import ElasticSampler, migrator

torch.manual_seed(0)
data = torch.randn(24, 8)
model = nn.Module()
model.body, model.head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), nn.Linear(16, 2)
model.forward = lambda x: model.head(model.body(x))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
sampler = ElasticSampler(data, seed=1)
for name, value in (("model", model), ("optimizer", optimizer), ("sampler", sampler)):
    migrator.register(name, value)
migrator.listening(every="off")
if migrator.resume:
    print("took", migrator.load_ckpt())
for epoch in range(sampler.epoch, 3):
    sampler.set_epoch(epoch)
    for x in migrator.batches(DataLoader(data, 4, sampler=sampler)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    head, model.head = model.head, nn.Identity()
    if os.environ.get("AT") == str(epoch):
        os.kill(os.getpid(), signal.SIGTERM)
        end_s = time.monotonic() + 0.5  # the saving thread looks, and finds that the head is missing
        while time.monotonic() < end_s:
            model(data)
    model.head = head
print("final", [p.sum().item().hex() for p in model.parameters()])
"""


def test_a_notice_while_a_part_of_the_model_is_taken_out_costs_no_weights(job: Job) -> None:
    """An evaluation by features puts an `Identity` in the place of the head. What is saved has the head."""
    job.write(FEATURES)
    whole = job.run(MIGRATOR_JOB="whole", MIGRATOR_SIGNAL=str(job.directory / "other" / "signal"))
    assert whole.wait() == 0, whole.text
    expected = whole.wait_for("^final (.*)$").group(1)

    life = job.run(AT="0")
    assert life.wait() == 143, life.text
    assert [event["why"] for event in life.events("leaving")] == ["saved"], life.text
    last = job.run()
    assert last.wait() == 0, last.text
    assert last.wait_for("^took (.*)$").group(1) == life.events("leaving")[0]["ckpt"]
    assert last.wait_for("^final (.*)$").group(1) == expected
