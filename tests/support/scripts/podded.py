"""A training job for pods, of one rank or several, whose progress must not show where it was stopped.

Each step takes STEP_S until the file `go` lies beside the ckpts, so a test finds it in the middle of its training
for as long as it likes, and the life that is to come to the end needs no time. HOLD is a place where it waits for that
file: `import`, before torch is imported; `listen`, before `listening()`; `load`, after the ckpt is loaded; `write`,
before a part is written.

With BIND each pod sees a directory of its own where its signal file lies, as where the paths are the same in all
containers of a node.

KEEP_PACE makes it train the step after one that is due to be saved only when that one is: as in a job whose steps take
longer than its saves. MB_PER_S is how fast the storage is, BIG_MB what is to be saved besides.

Each line is written in one piece. They can be compared with those of a job that was never stopped.
"""

import ctypes
import hashlib
import os
import time
from pathlib import Path

from migrator.storage import posix_calls

LONG_S = 60
"""Longer than any test waits: whoever sits this out fails."""
ROOT = Path(os.environ["MIGRATOR_CKPT"])
EVERY = os.environ.get("MIGRATOR_EVERY", "off")


def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def go():
    return (ROOT / "go").exists()


def wait_until(condition):
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def hold(place):
    if os.environ.get("HOLD") == place:
        tell("holds", place)
        wait_until(go)


def bind():
    own, there = Path.home() / "bound", Path(os.environ["MIGRATOR_SIGNAL"]).parent
    own.mkdir()
    bound = ctypes.CDLL(None, use_errno=True).mount(bytes(own), bytes(there), None, 0x1000, None)
    assert bound == 0, os.strerror(ctypes.get_errno())


if "BIND" in os.environ:
    bind()
hold("import")

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from migrator import ElasticSampler, migrator  # noqa: E402
from migrator.save import attempt  # noqa: E402
from migrator.storage import posix  # noqa: E402

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
EPOCHS, SAMPLES, BATCH = 3, 160, 4


def keep_pace(step):
    """The step before this one was due to be saved."""
    if "KEEP_PACE" in os.environ and step > 1 and (step - 1) % int(EVERY) == 0:
        wait_until(lambda: any(ROOT.glob(f"*/*-{step - 1:012d}/manifest.json")))


write_part, write_all = attempt.write_part, posix_calls.write_all


def write_part_late(*args, **named):
    hold("write")
    return write_part(*args, **named)


def write_slowly(self, buffers, **how):
    """A twentieth of a second's worth at a time."""
    piece = int(float(os.environ["MB_PER_S"]) * 1e6 / 20)
    for buffer in buffers:
        for start in range(0, len(buffer), piece):
            self.bytes = write_all(self._fd, [buffer[start : start + piece]], self.bytes)
            time.sleep(0.05)


attempt.write_part = write_part_late
if "MB_PER_S" in os.environ:
    posix.PosixUpload.write = write_slowly


def digest(*values):
    return hashlib.sha256(repr(values).encode()).hexdigest()


def state_of(target):
    """All of a model's or an optimizer's state, as text to the last bit."""
    moments = getattr(target, "state", None)
    pairs = moments.values() if moments is not None else [target.state_dict()]
    return [(key, value.tolist()) for pair in pairs for key, value in pair.items()]


torch.set_num_threads(1)
if SIZE > 1:
    distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)), torch.arange(SAMPLES))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
sampler = ElasticSampler(data, seed=0)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
state, metrics = {"step": 0}, {"loss": 0.0}
torch.manual_seed(10 + RANK)

for name, value in {
    "model": model,
    "optimizer": optimizer,
    "schedule": schedule,
    "sampler": sampler,
    "state": state,
    "metrics": metrics,
}.items():
    migrator.register(name, value)
if "BIG_MB" in os.environ:
    migrator.register("big", torch.ones(int(os.environ["BIG_MB"]) * 250_000))
hold("listen")
tell("begins to listen")
migrator.listening(every=EVERY)
if migrator.resume:
    migrator.load_ckpt()
tell("resumed", state["step"])
hold("load")

for epoch in range(sampler.epoch, EPOCHS):
    sampler.set_epoch(epoch)
    for x, y, ids in migrator.batches(loader):
        if not go():
            time.sleep(float(os.environ.get("STEP_S", "0.05")))
        keep_pace(state["step"] + 1)
        drawn = torch.rand(()).item().hex()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if SIZE > 1:
            for param in model.parameters():
                distributed.all_reduce(param.grad)
        optimizer.step()
        state["step"] += 1
        metrics["loss"] = 0.9 * metrics["loss"] + 0.1 * loss.item()
        rate = optimizer.param_groups[0]["lr"]
        numbers = [1000 * epoch + i for i in ids.tolist()]
        tell("trained", state["step"], epoch, loss.item().hex(), rate, drawn, "ids", *numbers)
    schedule.step()

tell("weights", digest(state_of(model), state_of(optimizer)))
drawn = torch.rand(()).item()
tell("final", digest(state_of(model), state_of(optimizer), schedule.state_dict(), state, metrics, drawn))
if SIZE > 1:
    distributed.barrier()
    distributed.destroy_process_group()
