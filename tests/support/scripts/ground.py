"""What small scripts in the tests begin with: a model, its data, and ways to be stopped.

AT names the moment at which the job is stopped (`step 3`: right after that step, or one of the
script's own), HOW the way: `sigterm` or `file`. It then goes on as if nothing had happened.

    from tests.support.scripts.ground import *
    begin()
    for epoch in epochs(2):
        for x, ids in migrator.batches(loader):
            train(x, ids)
    finish()
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator

LONG_S = 60
"""Longer than any test waits: whoever sits this out fails."""
SAMPLES = 24

torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler = ElasticSampler(data, seed=0)
loader = DataLoader(data, batch_size=4, sampler=sampler)
state = {"epoch": 0, "step": 0}


def begin(**more):
    """The lines that every script has; what is given is registered too, None leaves a name out."""
    known = {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state}
    for name, value in {**known, **more}.items():
        if value is not None:
            migrator.register(name, value)
    migrator.listening(every="off")
    if migrator.resume:
        migrator.load_ckpt()
    print("resumed", state["step"])


def epochs(count):
    """`range(count)` from where the job stands, for any loader."""
    while state["epoch"] < count:
        sampler.set_epoch(state["epoch"])
        yield state["epoch"]
        state["epoch"] += 1


def train(x, ids):
    """One step, and a line that tells which samples were trained in it."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    trained(ids, loss.detach())


def trained(ids, loss=0.0):
    state["step"] += 1
    numbers = [1000 * state["epoch"] + i for i in torch.as_tensor(ids).reshape(-1).tolist()]
    print("trained", state["step"], float(loss).hex(), "ids", *numbers)
    moment(f"step {state['step']}")


def finish():
    """What is to be compared: state, weights, momentum, and what a draw gives now."""
    tensors = [*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    print("final", state, [float(t.double().sum()).hex() for t in tensors], torch.rand(2).tolist())


def moment(name):
    """A place where the pod may be taken away."""
    print("moment", name)
    if os.environ.get("AT") == name:
        (stop if os.environ.get("HOW", "sigterm") == "sigterm" else stop_by_file)()


def ask(deadline_s=20.0, request="r-1"):
    """Do what the hook does, as far as the trainer sees it."""
    file = Path(os.environ["MIGRATOR_SIGNAL"])
    aside = file.with_name("aside")
    aside.write_text(f"save\nrequest={request}\ndeadline={time.time() + deadline_s}\n")
    aside.rename(file)


def stop():
    """SIGTERM, here and now; goes on as soon as no further step can begin."""
    os.kill(os.getpid(), signal.SIGTERM)
    await_notice()


def stop_by_file():
    ask()
    await_notice()


def await_notice():
    end_s = time.monotonic() + LONG_S
    while not migrator._session.is_leaving:
        assert time.monotonic() < end_s
        time.sleep(0.0005)
