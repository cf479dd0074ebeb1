"""A tiny training job that waits where one of its phases begins: a tracer can then take hold of the thread that works.

PHASE names the phase (`listening`, `load`, `read`, `periodic`, `asked`, `leaving`), FIFO the pipe that it waits at,
until somebody has opened it for writing and closed it again. SAVE_AT is the step after which the job saves, STEPS its
last one. What stands behind a step is a digest of all that makes up the training. NAMES, if set, makes the names of
temporary files the same in every life that has the same.
"""

import atexit
import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, SaveFailed, migrator
from migrator.storage import posix_calls

PHASE = os.environ.get("PHASE", "")
SAVE_AT = int(os.environ.get("SAVE_AT", "0"))
STEPS = int(os.environ.get("STEPS", "6"))
OF_THE_SAVER = ("periodic", "asked", "leaving")
"""Phases in which the saving thread works on the job's directory; in the others it is the thread that says so."""
PR_SET_PTRACER = 0x59616D61

torch.manual_seed(0)
data = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
metrics = {"step": 0, "losses": []}
sampler = ElasticSampler(data, seed=0)
loader = DataLoader(data, batch_size=2, sampler=sampler)


class Numbered(threading.local):
    """Of each thread its own: stands for the module `uuid`."""

    count = 0

    def uuid4(self):
        self.count += 1
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{os.environ['NAMES']} {threading.current_thread().name} {self.count}")


if "NAMES" in os.environ:
    posix_calls.uuid = Numbered()


def begins(name):
    """Here the phase begins: say which thread works in it, and wait for its tracer."""
    if name != PHASE:
        return
    # The tracer is no ancestor of this process, and some kernels let only those.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    worker = threading.get_native_id()
    if name in OF_THE_SAVER:
        worker = next(thread.native_id for thread in threading.enumerate() if thread.name == "migrator-saver")
    print("at", name, worker, flush=True)
    Path(os.environ["FIFO"]).read_bytes()


def ends(name):
    """Here the phase of the main thread ends. The tracer sees this call; there is no such file."""
    if name == PHASE:
        os.access(f"/end of {name}", os.F_OK)


def digest():
    """Of weights, momentum, numbers and random states: one bit makes another one."""
    momentum = [optimizer.state[p].get("momentum_buffer") for p in model.parameters() if p in optimizer.state]
    text = repr([[tensor.tolist() for tensor in [*model.parameters(), *momentum]], metrics])
    return hashlib.sha256(text.encode() + torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def save():
    begins("asked")
    try:
        print("saved", migrator.save_ckpt(), flush=True)
    except SaveFailed as error:
        print("not saved:", error, flush=True)


def leave():
    begins("leaving")
    os.kill(os.getpid(), signal.SIGTERM)
    while not migrator._session.is_leaving:  # the watcher has it: no step begins any more
        time.sleep(0.0005)


def be_saved():
    """A tracer makes the saving thread slow: it might be late for this safe point, and save the next one."""
    while migrator._session.gate.is_due:
        time.sleep(0.0005)


def step(x, y):
    if PHASE == "periodic" and metrics["step"] == SAVE_AT:
        be_saved()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    metrics["step"] += 1
    metrics["losses"].append(loss.item())
    print("step", metrics["step"], digest(), flush=True)


def main():
    for name, value in {"model": model, "optimizer": optimizer, "metrics": metrics, "sampler": sampler}.items():
        migrator.register(name, value)
    begins("listening")
    migrator.listening()
    ends("listening")
    if migrator.resume:
        begins("load")
        print("loaded", migrator.load_ckpt(), flush=True)
        ends("load")
    print("begins at", metrics["step"], digest(), flush=True)
    while metrics["step"] < STEPS:
        sampler.set_epoch(metrics["step"] // 4)
        for x, y in migrator.batches(loader):
            if metrics["step"] == SAVE_AT - 2:  # the saving thread hears of a periodic save one step before
                begins("periodic")
            step(x, y)
            if metrics["step"] == SAVE_AT and PHASE != "periodic":
                leave() if PHASE == "leaving" else save()
            if metrics["step"] == STEPS:
                break
    print("ended", flush=True)


def wait_in_readers():
    """Threads that read a part are made when there is one to be read: they wait at their own beginning."""
    run = threading.Thread.run

    def run_later(thread):
        if thread.name.startswith("migrator-read"):
            begins("read")
        run(thread)

    threading.Thread.run = run_later


def end(code):
    """As the interpreter ends, without taking itself apart: that takes four times as long as all the rest."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    wait_in_readers()
    try:
        main()
    except SystemExit as left:
        end(left.code)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        end(1)
    end(0)
