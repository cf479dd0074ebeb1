"""A training job on one or two ranks that can bring about nearly every event, and strikes itself at one of them.

DIE_AT (`committed:2`) names a line of our log by event and occurrence, DIE_BY the signal this process sends itself as
soon as that line is written: SIGKILL, or SIGSTOP. What has been logged as done has to last from there on.

STOP is the step behind which the notice comes, on STOP_RANK, by STOP_HOW (`sigterm`, `file`). ODD lists, in words, what
else happens in this life; see `is_odd`. ODD_RANK is the rank that is odd where only one is. LOADER says how batches
are drawn (`elastic`, `plain`, `wrapped`), LOOP whether by `batches()` or by the loader alone (`bare`). AWAIT is an
event, by name and number, that has to have come before the notice; with AWAIT_CKPT some ckpt has to be there before the
last step. DRAWS=no is a model of one process as several ranks train it.

Each line it prints can be compared with that of the same rank in a job that nobody disturbed. All ranks hold the same
weights, and no weight depends on what a rank has for itself: a rank that is lost takes nothing along but its draws and
its metrics, which stand in lines of their own (`drew`, `own`).
"""

import ctypes
import errno
import faulthandler
import hashlib
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from migrator import ElasticSampler, SaveFailed, migrator
from migrator.ckpt import leaving_mark, retention
from migrator.errors import StorageFullError, StorageTransientError
from migrator.leaving import leaving
from migrator.ranks import shares
from migrator.save import attempt, progress

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
EPOCHS, SAMPLES, TOGETHER = 3, 24, 4
STOP = int(os.environ.get("STOP", "-1"))
LONG_S = 30
"""Longer than anything takes here: whoever sits this out fails."""
ODD = os.environ.get("ODD", "").split(",")
shares.SHARE_BYTES = 300
leaving.CALL_BACK_S = 0.3 if "hangs" in ODD else leaving.CALL_BACK_S


class Striking(logging.StreamHandler):
    """Writes our lines as they are written without it, and behind one of them strikes this process.

    Before and behind the line are two moments for the log only; behind it the line is a promise already.
    """

    def __init__(self):
        super().__init__()
        self.seen = Counter()
        self.setFormatter(logging.Formatter(f"%(asctime)s migrator rank {RANK}: %(message)s"))

    def emit(self, record):
        super().emit(record)
        event = record.migrator_event
        self.seen[event] += 1
        if os.environ.get("DIE_AT") == f"{event}:{self.seen[event]}":
            # To this thread: a signal to the process may be taken by another one, while this one goes on for a while.
            signal.pthread_kill(threading.get_ident(), signal.Signals[os.environ["DIE_BY"]])


striking = Striking()
logging.getLogger("migrator").addHandler(striking)
logging.getLogger("migrator").setLevel(logging.DEBUG)
logging.getLogger("migrator").propagate = False


def is_odd(what):
    """Whether this life is to bring about what these words name; `one rank: ...` on a single rank only."""
    return what in ODD or (f"one rank: {what}" in ODD and os.environ.get("ODD_RANK", "0") == str(RANK))


def is_leaving():
    life = migrator._session
    return life is not None and life.is_leaving


def wait_until(condition, *, at_most_s=LONG_S):
    end_s = time.monotonic() + at_most_s
    while not condition():
        if time.monotonic() > end_s:
            assert at_most_s < LONG_S, "waited in vain"
            return
        time.sleep(0.001)


def has_logged(event, times=1):
    return lambda: striking.seen[event] >= times


def has_ckpt():
    return any("manifest.json" in names for _, _, names in os.walk(os.environ["MIGRATOR_CKPT"]))


def ask():
    """What the hook of this pod does."""
    file = Path(os.environ["MIGRATOR_SIGNAL"])
    aside = file.with_name("aside")
    aside.write_text(f"save\nrequest=r-1\ndeadline={time.time() + float(os.environ['MIGRATOR_GRACE_S'])}\n")
    aside.rename(file)


def stop():
    """The a notice comes. It goes on as soon as no further step can begin."""
    if os.environ.get("STOP_HOW") == "file":
        ask()
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    wait_until(is_leaving)


def hang():
    """As code in C that never comes back to Python: no signal ends a wait for this lock."""
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


class Faults:
    """What goes wrong in the save that comes next."""

    def __init__(self):
        self.in_part = []
        self.in_mark = 1 if is_odd("no mark") else 0
        self.in_delete = 1 if is_odd("nothing deleted") else 0
        self.holds_part = is_odd("slow part")
        self.is_held = False

    def install(self):
        write_part, mark, delete = attempt.write_part, leaving_mark.put_mark, retention._delete

        def write(storage, path, *args, **named):
            if self.holds_part:
                self.holds_part, self.is_held = False, True
                wait_until(is_leaving)
            if self.in_part:
                raise self.in_part.pop()(f"cannot write {path}")
            return write_part(storage, path, *args, **named)

        def put_mark(*args):
            if self.in_mark:
                self.in_mark -= 1
                raise StorageTransientError("cannot write the mark")
            return mark(*args)

        def _delete(*args):
            if self.in_delete:
                self.in_delete -= 1
                raise StorageTransientError("cannot delete")
            return delete(*args)

        attempt.write_part, leaving_mark.put_mark, retention._delete = write, put_mark, _delete


def hexed(value):
    return float(value).hex()


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def tell(*words):
    """In one piece: once all is saved the pod leaves at any place, between two words of a line as well."""
    print(" ".join(map(str, words)))


if is_odd("alias"):
    os.environ["MIGRATION_SIGNAL_PATH"] = os.environ.pop("MIGRATOR_SIGNAL")
if is_odd("no inotify"):
    import watchdog.observers

    def schedule(*args, **named):
        raise OSError(errno.EMFILE, "no inotify instances left")

    watchdog.observers.Observer.schedule = schedule
if is_odd("told at once"):
    progress.QUIET_S = -1.0  # a second has passed from the start
if is_odd("handler of its own"):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
faults = Faults()
faults.install()

if SIZE > 1:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))


class Data(Dataset):
    """As what it wraps, but a look at it may fail once the notice has come."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if is_odd("failing loader") and state["step"] == STOP:
            stop()
            raise RuntimeError("the loader's workers are gone")
        return self.data[i]


class Costly:
    """Copying it takes long, if this life is to be slow."""

    def state_dict(self):
        if is_odd("costly"):
            time.sleep(0.002)
        return {"value": 1}

    def load_state_dict(self, state):
        assert state == {"value": 1}


class Unlike(nn.Module):
    """Not trained. The ranks should hold it alike."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((100,), float(RANK if is_odd("unlike") else 0)))


torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)), torch.arange(SAMPLES))
# Of several ranks each has its own buffers and draws; the weights are not to depend on them.
has_draws = SIZE == 1 and os.environ.get("DRAWS") != "no"
with_draws = [nn.BatchNorm1d(16), nn.Dropout(0.3)] if has_draws else []
model = nn.Sequential(nn.Linear(8, 16), *with_draws, nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
per_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
sampler = ElasticSampler(data, seed=0)
kind = os.environ.get("LOADER", "elastic")
loader = {
    "elastic": lambda: DataLoader(Data(data), batch_size=TOGETHER // SIZE, sampler=sampler),
    "plain": lambda: DataLoader(data, batch_size=TOGETHER),
    "wrapped": lambda: DataLoader(Data(data), batch_size=TOGETHER),
}[kind]()
state, metrics = {"epoch": 0, "step": 0}, {"losses": []}
generator = torch.Generator().manual_seed(100 + RANK)
random.seed(20 + RANK)
torch.manual_seed(10 + RANK)
objects = {
    "model": model,
    "optimizer": optimizer,
    "per_epoch": per_epoch,
    "sampler": sampler,
    "state": state,
    "metrics": metrics,
    "generator": generator,
    "costly": Costly(),
    "unlike": Unlike(),
}
if os.environ.get("LEGACY"):
    # The predecessor's only file. It stands at the very beginning, so what follows can be compared.
    root = Path(os.environ.pop("MIGRATOR_CKPT"))
    file = root / "migration.pth"
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        values = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in objects.items()}
        torch.save({**values, "generator": generator.get_state()}, file)
    os.environ["MIGRATION_CKPT_PATH"] = str(file)
for name, value in objects.items():
    migrator.register(name, value)
migrator.listening()
if migrator.resume:
    print("has", migrator.load_ckpt())
print("resumed", state["step"])
if is_odd("silenced"):
    faulthandler.register(signal.SIGTERM)
    wait_until(has_logged("sigterm_silenced"))
if is_odd("looks first"):
    for _ in migrator.batches([1, 2, 3]):  # nothing is done with them, and the model is in training mode
        pass


def swap():
    """Other weights in the place of the model's; the same call takes them back."""
    for param, other in zip(model.parameters(), others, strict=True):
        param.data, other.data = other.data, param.data


others = [torch.zeros_like(param) for param in model.parameters()]


def before(step):
    """What is odd between the batch and the step, from behind which it can still be saved."""
    if step == STOP and "AWAIT_CKPT" in os.environ:
        wait_until(has_ckpt)
    if is_odd("lost") and step == STOP + 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if is_odd("loses the other") and step == STOP + 1:
        wait_until(has_logged("store_lost") if RANK else lambda: False, at_most_s=5 if RANK else 0.5)
        stop()
    if is_odd("swapped when told") and step == STOP + 1:
        swap()
        stop()
        wait_until(has_logged("agreed_anew"), at_most_s=5)
        swap()
    if is_odd("hangs") and step == STOP + 1:
        stop()
        hang()
    if is_odd("fd taken") and step == 7:
        signal.set_wakeup_fd(-1)
    if is_odd("replaced already") and step == 5:
        later = migrator._session._generation.number + 1
        Path(os.environ["MIGRATOR_CKPT"], "default", "generations", f"{later:06d}.from").write_text('{"from": null}')
    if is_odd("nonsense") and step == 7:
        Path(os.environ.get("MIGRATION_SIGNAL_PATH", os.environ.get("MIGRATOR_SIGNAL"))).write_text("nonsense\n")
        wait_until(has_logged("signal_ignored"))
    if is_odd("swapped when saved") and step == 8:
        swap()
        migrator.save_ckpt(wait=False)
        wait_until(has_logged("changed_outside_step", 1))
        swap()
    if is_odd("swapped when saved") and step == 9:
        swap()
        print("too late", migrator.save_ckpt())
        swap()


def behind(step):
    """What is odd between the step and the safe point that follows it."""
    if is_odd("another optimizer") and step == 7:
        another = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(202):
            another.step()
    if is_odd("asks") and step == 10:
        print("saved", migrator.save_ckpt())
        print("saved", migrator.save_ckpt())
    if is_odd("failing part") and step == 11:
        faults.in_part.append(StorageFullError)
        try:
            print("saved", migrator.save_ckpt())
        except SaveFailed as error:
            print("not saved", error)
    if step == STOP:
        at_last()


def at_last():
    """The last step has been made. What is under way is let come to where it is wanted."""
    if is_odd("slow part"):
        wait_until(lambda: faults.is_held, at_most_s=5)
    if "AWAIT" in os.environ:
        event, _, times = os.environ["AWAIT"].partition(":")
        wait_until(has_logged(event, int(times)), at_most_s=5)
    if is_odd("failing last part"):
        faults.in_part.append(StorageTransientError)
    if is_odd("no directory"):
        place = Path(os.environ.get("MIGRATION_SIGNAL_PATH", os.environ.get("MIGRATOR_SIGNAL"))).parent
        shutil.rmtree(place)
        place.write_text("")
    others_stop = {"failing loader", "lost", "loses the other", "swapped when told", "hangs"}
    if others_stop.isdisjoint(what.removeprefix("one rank: ") for what in ODD) and is_me("STOP_RANK"):
        stop()


def is_me(name):
    return os.environ.get(name, "0") == str(RANK)


def added_up(grads):
    """Over all ranks, in one go."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    distributed.all_reduce(flat)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def train(x, y, ids):
    before(state["step"] + 1)
    draws = [hexed(torch.rand(())), hexed(random.random()), hexed(torch.rand((), generator=generator))]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if SIZE > 1:
        added_up([param.grad for param in model.parameters()])
    optimizer.step()
    state["step"] += 1
    metrics["losses"].append(loss.item())
    rate = hexed(optimizer.param_groups[0]["lr"])
    tell("trained", state["step"], state["epoch"], hexed(loss.item()), rate, "ids", *ids.tolist())
    tell("drew", state["step"], *draws)
    behind(state["step"])


model.train()
while state["epoch"] < EPOCHS:
    if not is_odd("no set_epoch"):
        sampler.set_epoch(state["epoch"])
    for batch in loader if os.environ.get("LOOP") == "bare" else migrator.batches(loader):
        train(*batch)
    per_epoch.step()
    state["epoch"] += 1

moments = [[(key, value.tolist()) for key, value in entry.items()] for entry in optimizer.state.values()]
weights = [param.tolist() for param in model.parameters()]
tell("final", digest((weights, moments, per_epoch.state_dict(), sampler.state_dict(), state)))
own = [buffer.tolist() for buffer in model.buffers()]
tell("own", digest((own, metrics, generator.get_state().tolist(), torch.rand(2).tolist(), random.random())))
if SIZE > 1:
    # Without it torch may hang: it joins gloo's thread while that one still lets go of the last tensor that was summed.
    distributed.barrier()
    distributed.destroy_process_group()
