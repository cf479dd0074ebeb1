"""A DDP job in which rank 0 alone evaluates after each epoch, while the others are in the next epoch already.

EPOCHS, SAMPLES: how much there is to do. STAYS names the epoch whose evaluation rank 0 never comes out of: it is there
when the pod is taken away. FINISHES names the one in which it stays until the ranks leave, and then comes out. WAITS
names the epoch in whose first batch all ranks wait until they leave. SAVES=yes: rank 0 calls `save_ckpt()` after each
evaluation. AVERAGES=yes: all ranks change a large tensor outside of steps, between the epoch's last step and the
evaluation; BLIND=yes: and the gate does not see it. WRAPPED=yes: the evaluation takes its batches from
`migrator.batches()` too. PLAIN=yes: with torch's own sampler, and epochs that `migrator.epochs()` counts. BREAKS names
the batch at which each epoch is left by `break`.

Each line it prints can be compared with that of the same rank in a job that was never stopped.
"""

import hashlib
import os
import time
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from migrator import ElasticSampler, migrator

LONG_S = 60
EPOCHS, SAMPLES, BATCH = int(os.environ.get("EPOCHS", "3")), int(os.environ.get("SAMPLES", "24")), 4
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def is_told(name, epoch):
    return os.environ.get(name) == str(epoch)


def tell(*words):
    print(" ".join(map(str, words)))


def stay(*, for_good):
    """Until the ranks leave; for good: a stop has to get this rank out of here."""
    end_s = time.monotonic() + LONG_S
    while for_good or not migrator._session.is_leaving:
        assert time.monotonic() < end_s
        time.sleep(0.002)


def look_away(gate, name):
    """As if what changed had left no mark: it is found only when it is read."""
    looks = getattr(gate, name)

    def blind(*arguments):
        gate._capturer.changed = lambda capture: []
        try:
            return looks(*arguments)
        finally:
            del gate._capturer.changed

    setattr(gate, name, blind)


def digest(*values):
    return hashlib.sha256(repr(values).encode()).hexdigest()


def state_of(target):
    return [(key, value.tolist()) for key, value in target.state_dict().items()]


def evaluate(epoch):
    """On rank 0. It draws random numbers, and notes what it found."""
    tell("evaluates", epoch)
    model.eval()
    right = 0
    for x, y in migrator.batches(held_out) if os.environ.get("WRAPPED") == "yes" else held_out:
        with torch.no_grad():
            right += (model(x + 0.1 * torch.randn_like(x)).argmax(1) == y).sum().item()
        if is_told("STAYS", epoch):
            stay(for_good=True)
        if is_told("FINISHES", epoch):
            stay(for_good=False)
    model.train()
    history.append((epoch, right, float(torch.rand(())).hex()))
    tell("evaluated", epoch, *history[-1])


distributed.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))
torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)), torch.arange(SAMPLES))
held_out = DataLoader(TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,))), batch_size=12)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
averaged = AveragedModel(model)
# So that DDP keeps its buckets after a resume, see `ranked.py`.
wrapped = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
per_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
is_plain = os.environ.get("PLAIN") == "yes"
sampler = DistributedSampler(data, seed=0) if is_plain else ElasticSampler(data, seed=0)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
history: list[tuple] = []
state = {"step": 0}
torch.manual_seed(10 + RANK)

for name, value in {
    "model": wrapped,
    "averaged": averaged,
    "optimizer": optimizer,
    "per_epoch": per_epoch,
    **({} if is_plain else {"sampler": sampler}),
    "history": history,
    "state": state,
}.items():
    migrator.register(name, value)
migrator.listening(every=os.environ.get("MIGRATOR_EVERY", "off"))
if os.environ.get("BLIND") == "yes":
    for name in ("_keep_earlier", "_turns"):
        look_away(migrator._session.gate, name)
if migrator.resume:
    migrator.load_ckpt()
print("resumed", state["step"])

for epoch in migrator.epochs(EPOCHS) if is_plain else range(sampler.epoch, EPOCHS):
    sampler.set_epoch(epoch)
    for number, (x, y, ids) in enumerate(migrator.batches(loader)):
        tell("drawn", epoch, number)
        if is_told("BREAKS", number):
            break
        if number == 0 and is_told("WAITS", epoch):
            stay(for_good=False)
        loss = nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        numbers = [1000 * epoch + i for i in ids.tolist()]
        tell("trained", state["step"], epoch, float(loss).hex(), float(torch.rand(())).hex(), "ids", *numbers)
    per_epoch.step()
    if os.environ.get("AVERAGES") == "yes":
        averaged.update_parameters(model)
    if RANK == 0:
        evaluate(epoch)
        if os.environ.get("SAVES") == "yes":
            print("saved", migrator.save_ckpt())

moments = [sorted((k, v.tolist()) for k, v in s.items()) for s in optimizer.state.values()]
# Of BatchNorm each rank has its own statistics at the end: only a forward pass through DDP makes them rank 0's.
print("weights", digest([p.tolist() for p in model.parameters()], [p.tolist() for p in averaged.parameters()], moments))
own = (state_of(model), state_of(averaged), history, float(torch.rand(())).hex())
tell("final", digest(*own, per_epoch.state_dict(), state))
distributed.barrier()
distributed.destroy_process_group()
