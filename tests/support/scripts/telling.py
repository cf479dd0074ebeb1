"""A training job in which every tensor, buffer, group and number tells the step: a torn ckpt shows at once.

24 parameters of 0.5 MB, each full of one value, as is all state that the optimizer makes
of them. At the end of a step the job writes down what each tensor holds now, in
`metrics`; between a safe point and the next step it spoils everything that a capture
should have copied. KIND is the optimizer, ASK the saves that a thread of its own asks
for at random instants (SEED); then it ends. With ASK=0 it trains until it is stopped.
"""

import os
import random
import threading
import time
import warnings

import torch
from torch import nn

from migrator import migrator

KIND, ASK, SEED = os.environ["KIND"], int(os.environ["ASK"]), int(os.environ["SEED"])
ELEMENTS = 1 << 17
# LBFGS keeps all parameters in one vector, which then tells one value only if they all have the same.
APART = 0 if KIND == "lbfgs" else 1

torch.set_num_threads(1)
warnings.filterwarnings("error", message="Dynamo does not know")


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((ELEMENTS,), float(i * APART))) for i in range(24)])
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))

    def forward(self, step):
        self.seen.fill_(step)
        return self.norm(torch.linspace(0, step, 4)[:, None].expand(4, 8).contiguous())


def made(kind, params):
    if kind == "lbfgs":
        return torch.optim.LBFGS(params, lr=0.5, max_iter=2, history_size=1)
    if kind.startswith("adamw"):
        way = {kind.removeprefix("adamw "): True}
        return torch.optim.AdamW(params, lr=0.1, betas=(0.5, 0.7), **way)
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def tells(value):
    """All numbers of a state, of a tensor its first: that the others are the same is for the reader to see."""
    if isinstance(value, torch.Tensor):
        return [value.view(-1)[0].item()]
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in tells(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


def state():
    return {
        "model": tells(model.state_dict()),
        "optimizers": [
            tells([optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]) for optimizer in optimizers
        ],
        "groups": [optimizer.param_groups[0]["told"] for optimizer in optimizers],
    }


model = Telling()
weights = list(model.weights)
if KIND == "two":
    optimizers = [made("adamw foreach", weights[::2]), made("sgd", weights[1::2])]
else:
    optimizers = [made(KIND, weights)]
metrics = {"step": 0, "tells": {}}
for p in weights:
    p.grad = torch.zeros_like(p)
for optimizer in optimizers:
    optimizer.param_groups[0]["told"] = 0

migrator.register("model", model)
for i, optimizer in enumerate(optimizers):
    migrator.register(f"optimizer{i}", optimizer)
migrator.register("metrics", metrics)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
    assert state() == metrics["tells"], "what was loaded is not what was told"
    assert all(p.eq(p[0]).all() for p in weights), "something else was loaded"
    print("loaded", metrics["step"], flush=True)


def change(optimizer, step):
    if KIND == "lbfgs":

        def closure():
            for i, p in enumerate(weights):
                torch.sub(p.detach(), step + i * APART, out=p.grad)
            return torch.stack([p.grad.square().sum() for p in weights]).sum() / ELEMENTS

        optimizer.step(closure)
        return
    for i, p in enumerate(weights):
        p.grad.fill_(step % 7 + i)
    step_of[optimizer]()


step_of = {optimizer: optimizer.step for optimizer in optimizers}
if KIND == "compiled":
    step_of = {o: torch.compile(lambda o=o: o.step(), backend=os.environ["BACKEND"]) for o in optimizers}


def ask():
    pause = random.Random(SEED)
    while not metrics["tells"]:
        time.sleep(0.01)
    for _ in range(ASK):
        time.sleep(pause.uniform(0, 0.04))
        print("saved", migrator.save_ckpt(), flush=True)
    over.set()


over = threading.Event()
if ASK:
    threading.Thread(target=ask).start()
loader = list(range(100_000))
for _ in migrator.batches(loader):
    step = metrics["step"] + 1
    # None of this belongs to the safe point that was just made.
    metrics["step"] = -1
    for optimizer in optimizers:
        optimizer.param_groups[0]["told"] = -1
    model(step)
    for _ in range(3 if KIND == "several" else 1):
        for optimizer in optimizers:
            change(optimizer, step)
            assert migrator._session.gate.phase.name == "DIRTY", "the gate did not see this step"
    for optimizer in optimizers:
        optimizer.param_groups[0]["told"] = step
    metrics["tells"] = state()
    metrics["step"] = step
    if ASK == 0:
        print("step", step, flush=True)
    if over.is_set():
        break
print("done", metrics["step"], flush=True)
