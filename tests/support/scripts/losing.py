"""A training job of several ranks on which ranks get lost.

The gradients are added up by hand, all tensors are small and yet shared out. Each rank prints `trained <step>
<digest of weights and optimizer>` after each step, `begins <step> <digest> own <own>` before the first one.

HOLD (`5:drawn`) is a place where the ranks HOLD_RANK wait until the file `go` is there: `drawn`, before the gradients
are added up; `reduced`, after that; `stepped`, behind the step; and `after`, behind the last step, which is UNTIL.
They have said `held`. RAISE and RAISE_RANK name where ranks raise, after SIGTERM if RAISE_NOTICE is set. WRITE_RANK
waits for `go` before it writes a share, WROTE_RANK for ever after its record is written. ALONE leaves the gradients
as they are. EMA_RANK evaluates with other weights from `5:drawn` on, until `go`.
"""

import hashlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator
from migrator.ranks import shares
from migrator.save import attempt

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LONG_S = 60
shares.SHARE_BYTES = 300


def is_me(name):
    return str(RANK) in os.environ.get(name, "").split()


def wait_until(condition):
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def go():
    wait_until(Path("go").exists)


def at(place):
    if os.environ.get("HOLD") == place and is_me("HOLD_RANK"):
        print("held")
        go()
    if os.environ.get("RAISE") == place and is_me("RAISE_RANK"):
        if "RAISE_NOTICE" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: migrator._session.is_leaving)
        print("raises")
        raise RuntimeError("asked to raise")
    if place == "5:drawn" and is_me("EMA_RANK"):
        others = [torch.zeros_like(param) for param in model.parameters()]
        for param, other in zip(model.parameters(), others, strict=True):
            param.data, other.data = other.data, param.data
        print("swapped")
        go()
        for param, other in zip(model.parameters(), others, strict=True):
            param.data, other.data = other.data, param.data


def digest():
    moments = [value.tolist() for entry in optimizer.state.values() for value in entry.values()]
    return hashlib.sha256(repr(([p.tolist() for p in model.parameters()], moments)).encode()).hexdigest()[:16]


write_part, put = attempt.write_part, shares.OnStorage.put


def write_part_late(storage, path, *args, **named):
    if is_me("WRITE_RANK") and "/part-" in path:
        print("writing")
        go()
    return write_part(storage, path, *args, **named)


def put_and_hang(self, ckpt, rank, data):
    put(self, ckpt, rank, data)
    if is_me("WROTE_RANK"):
        print("wrote")
        time.sleep(LONG_S)


attempt.write_part, shares.OnStorage.put = write_part_late, put_and_hang

if SIZE > 1:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 6), torch.arange(400))
model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
sampler = ElasticSampler(data, seed=3)
loader = DataLoader(data, batch_size=2, sampler=sampler)
state, own = {"step": 0}, {"seen": []}
torch.manual_seed(50 + RANK)
objects = {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state, "own": own}
for name, value in objects.items():
    migrator.register(name, value)
migrator.listening(every="off")
if migrator.resume:
    migrator.load_ckpt()
print("begins", state["step"], digest(), "own", own["seen"])

until = int(os.environ.get("UNTIL", "1000"))
for epoch in range(sampler.epoch, 10):
    sampler.set_epoch(epoch)
    for x, ids in migrator.batches(loader):
        if state["step"] == until:
            break
        step = state["step"] + 1
        print("drawn", step)
        at(f"{step}:drawn")
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            if SIZE > 1 and "ALONE" not in os.environ:
                distributed.all_reduce(param.grad)
        at(f"{step}:reduced")
        optimizer.step()
        state["step"] = step
        own["seen"] += [RANK, *ids.tolist()]
        at(f"{step}:stepped")
        print("trained", step, digest())
    if state["step"] == until:
        break
at("after")
print("ends")
