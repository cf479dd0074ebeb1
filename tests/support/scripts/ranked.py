"""A training job of any number of ranks whose progress must not show where it was stopped.

DDP around Linear, BatchNorm and Dropout, AdamW, a scheduler per epoch, an evaluation each epoch whose
result all ranks add up; and what each rank has for itself: metrics, a generator, the global random states.

SAMPLES, EPOCHS and WORKERS say how much there is to do and by how many loader workers. AT names the moment
at which it is stopped (`0:3:backward`: epoch 0, batch 3, after its backward pass), AT_RANK on which rank
(0; `all`: on each), HOW the way: `sigterm` or `file`. It then goes on as if nothing had happened.
SLOW_RANK sleeps SLOW_S in each step. RAISE_RANK raises in the body of step RAISE_STEP. SAVE_RANK saves by
`save_ckpt()` after each of SAVE_STEPS. START_DELAY_S makes `listening()` late. BUCKETS=rebuilt leaves DDP as it
is by default. STAYS names a moment which no rank gets over: it waits there to be killed.

Each line it prints can be compared with that of the same rank in a job that was never stopped.
"""

import hashlib
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from migrator import ElasticSampler, migrator

LONG_S = 60
"""Longer than any test waits: whoever sits this out fails."""
EPOCHS, SAMPLES, BATCH = int(os.environ.get("EPOCHS", "3")), int(os.environ.get("SAMPLES", "48")), 4
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_me(name, default=""):
    return os.environ.get(name, default) in (str(RANK), "all")


def moment(name):
    """A place where the pod may be taken away."""
    print("moment", name)
    if os.environ.get("STAYS") == name:
        time.sleep(LONG_S)
    if os.environ.get("AT") != name or not is_me("AT_RANK", "0"):
        return
    if os.environ.get("HOW", "sigterm") == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        file = Path(os.environ["MIGRATOR_SIGNAL"])
        aside = file.with_name(f"aside-{RANK}")
        aside.write_text(f"save\nrequest=r-1\ndeadline={time.time() + 20}\n")
        aside.rename(file)
    end_s = time.monotonic() + LONG_S
    while not migrator._session.is_leaving:  # from then on no step begins but one that others have begun
        assert time.monotonic() < end_s
        time.sleep(0.0005)


def summed(number):
    """Over all ranks."""
    total = torch.tensor(number)
    if SIZE > 1:
        distributed.all_reduce(total)
    return total.item()


def tell(*words):
    """In one piece: once all is saved the pod leaves at any place, between two words of a line as well."""
    print(" ".join(map(str, words)))


def hexed(value):
    return float(value).hex()


def draws():
    """What each random source gives now."""
    own = torch.rand((), generator=generator)
    return [hexed(torch.rand(())), hexed(random.random()), hexed(np.random.rand()), hexed(own)]


def digest(*values):
    found = hashlib.sha256()
    for value in values:
        found.update(repr(value).encode())
    return found.hexdigest()


def state_of(target):
    """All of a model's or an optimizer's state, as text to the last bit."""
    moments = getattr(target, "state", None)
    pairs = moments.values() if moments is not None else [target.state_dict()]
    return [
        (key, value.tolist() if isinstance(value, torch.Tensor) else value) for p in pairs for key, value in p.items()
    ]


if SIZE > 1:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))
torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)), torch.arange(SAMPLES))
held_out = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
# Each rank has an equal share of it, so that all come equally often to the collective.
evaluated = DataLoader(Subset(held_out, range(RANK, 24 - 24 % SIZE, SIZE)), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
# After its first step DDP packs the gradients into its buckets anew, and the place of a number in its bucket decides in
# which order three or more ranks add it up: a resumed job's first step would differ in the last bits. With
# `find_unused_parameters` they stay as they are.
keep = os.environ.get("BUCKETS", "kept") == "kept"
wrapped = DistributedDataParallel(model, find_unused_parameters=keep) if SIZE > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
per_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
sampler = ElasticSampler(data, seed=0)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0")))
# The same on all ranks: how far they are. Of each rank's own: what it saw and draws.
state = {"batch": 0, "step": 0}
metrics = {"loss": 0.0, "right": []}
generator = torch.Generator().manual_seed(100 + RANK)
torch.manual_seed(10 + RANK)
random.seed(20 + RANK)
np.random.seed(30 + RANK)

for name, value in {
    "model": wrapped,
    "optimizer": optimizer,
    "per_epoch": per_epoch,
    "sampler": sampler,
    "state": state,
    "metrics": metrics,
    "generator": generator,
}.items():
    migrator.register(name, value)
time.sleep(float(os.environ.get("START_DELAY_S", "0")))
migrator.listening(every=os.environ.get("MIGRATOR_EVERY", "off"))
if migrator.resume:
    migrator.load_ckpt()
print("resumed", state["step"])

for epoch in range(sampler.epoch, EPOCHS):
    moment(f"{epoch}:start")
    sampler.set_epoch(epoch)
    wrapped.train()
    for x, y, ids in migrator.batches(loader):
        batch = state["batch"] = state["batch"] + 1
        moment(f"{epoch}:{batch}:drawn")
        if is_me("SLOW_RANK"):
            time.sleep(float(os.environ["SLOW_S"]))
        if is_me("RAISE_RANK") and state["step"] + 1 == int(os.environ["RAISE_STEP"]):
            raise RuntimeError("the script was asked to raise")
        drawn = draws()
        if len(x) == 1:  # an epoch's last one, on some numbers of ranks; BatchNorm wants two
            x, y = x.repeat(2, 1), y.repeat(2)  # noqa: PLW2901
        loss = nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        moment(f"{epoch}:{batch}:backward")
        optimizer.step()
        moment(f"{epoch}:{batch}:stepped")
        optimizer.zero_grad()
        state["step"] += 1
        metrics["loss"] = 0.9 * metrics["loss"] + 0.1 * loss.item()
        numbers = [1000 * epoch + i for i in ids.tolist()]
        rate = hexed(optimizer.param_groups[0]["lr"])
        print("trained", state["step"], epoch, hexed(loss), rate, *drawn, "ids", *numbers)
        if is_me("SAVE_RANK") and str(state["step"]) in os.environ["SAVE_STEPS"].split():
            print("saved", migrator.save_ckpt())
        moment(f"{epoch}:{batch}:done")
    moment(f"{epoch}:over")
    per_epoch.step()
    state["batch"] = 0
    wrapped.eval()
    right = 0
    for i, (x, y) in enumerate(evaluated):
        moment(f"{epoch}:evaluation {i}")
        with torch.no_grad():
            # Wrapped here too: its buffers are those of rank 0 only after a forward pass through DDP.
            right += (wrapped(x).argmax(1) == y).sum().item()
    total = summed(right)
    metrics["right"].append((right, total))
    tell("evaluated", epoch, total, right, *draws())

print("weights", digest(state_of(model), state_of(optimizer)))
print("final", digest(state_of(model), state_of(optimizer), per_epoch.state_dict(), state, metrics, draws()))
if SIZE > 1:
    # Without it torch may hang: it joins gloo's thread while that one still lets go of the last tensor that was summed.
    distributed.barrier()
    distributed.destroy_process_group()
