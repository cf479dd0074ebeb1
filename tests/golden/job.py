"""The job whose ckpts are kept as samples of a format, and which goes on with them.

KIND says what it trains. At the top of the step behind AT it writes what it holds, to the last bit, and at its end what
came of it, into the directory OUT. So a life that resumes writes what a life writes that nobody stopped. STOP is the
step behind which it stops itself. With SMALL, limits of size are low, and the small state here takes the ways of a
large one.

What a KIND registers and trains stays as it is: ckpts of earlier versions hold it. What is new is a new KIND.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from migrator import ElasticSampler, migrator
from migrator.ckpt import codec
from migrator.ranks import shares
from migrator.save import frozen_state

AT, EPOCHS, SAMPLES, BATCH = 7, 3, 20, 4
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DIGEST_ABOVE = 128
"""Of more bytes than this only the digest is written."""

NOISE = {"layers.0.bias"} if os.environ.get("KIND") in ("one", "two-ranks") else set()
"""A bias before a BatchNorm has a gradient of rounding errors only. AdamW makes whole steps of them, and they differ
from one kind of processor to the next."""


def told(value: Any) -> Any:
    """A value as JSON that is the same for values that are the same in every bit, and in their types."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), list(value.stride()), _bytes(data)]
    if isinstance(value, (np.ndarray, np.generic)):
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        return [f"numpy {value.dtype.str}", list(value.shape), order, _bytes(value.tobytes())]
    if isinstance(value, dict):
        return {type(value).__name__: {_key(key): told(item) for key, item in value.items()}}
    if isinstance(value, (set, frozenset)):
        return {type(value).__name__: sorted(map(_key, value))}
    if isinstance(value, (list, tuple, deque)):
        if len(value) > DIGEST_ABOVE:
            return [type(value).__name__, len(value), _bytes(json.dumps(list(map(told, value))).encode())]
        return {f"{type(value).__name__} {getattr(value, 'maxlen', '')}".strip(): list(map(told, value))}
    if isinstance(value, bytes):
        return ["bytes", _bytes(value)]
    return [type(value).__name__, float.hex(value) if isinstance(value, float) else str(value)]


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(told(value))


def _bytes(data: bytes) -> str:
    return data.hex() if len(data) <= DIGEST_ABOVE else f"sha256 {hashlib.sha256(data).hexdigest()}"


class Tied(nn.Module):
    """Tied weights, a buffer, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SAMPLES, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, SAMPLES, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.frozen(self.norm(self.embedding(ids) + x))).square().mean()  # type: ignore[no-any-return]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        images = x.reshape(-1, 2, 2, 1).expand(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.layers(images).square().mean()  # type: ignore[no-any-return]


class Counted:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.counts = {"steps": 0, "by": (0, 0.0)}

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state


def every_node() -> dict[str, Any]:
    """One of each that the typed tree knows."""
    return {
        "plain": [None, True, 1, -1.5, "größe\ud800"],
        "float": [math.nan, math.inf, -math.inf, -0.0, 5e-324],
        "int": [1 << 70, -(1 << 70), (1 << 63) - 1],
        "bytes": b"\0\xff",
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "tuple": (1, (), ("a", [2])),
        "dict": {1: "a", (1, "b"): None, "!": 1, None: 2, False: 3, 0.5: 4, b"c": 5},
        "odict": OrderedDict(b=1, a=2),
        "set": {1, "b", (2, 3)},
        "frozenset": frozenset({"x", "y"}),
        "deque": [deque([1, 2], maxlen=3), deque("ab")],
        "scalar": [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("ä"), np.datetime64("2026-11-19", "D")],
        "array": [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
            np.array(["a", "bc"]),
            np.array(["2026-11-19"], dtype="M8[s]"),
            np.zeros((0, 3), dtype=np.complex64),
        ],
        "large arrays": [
            np.arange(200.0, dtype=np.float32).reshape(10, 20),
            np.asfortranarray(np.arange(200, dtype=np.int64).reshape(10, 20)),
            np.array([f"word {i}" for i in range(30)]),
        ],
        "tensor": [torch.arange(3.0), torch.tensor(2.5), torch.zeros(0, 2), torch.arange(6.0).reshape(2, 3).t()],
        "large tensors": [torch.arange(100.0), torch.arange(120.0).reshape(10, 12).t()],
        "dtypes": {
            name: torch.tensor([True, False])
            if dtype == torch.bool
            else torch.arange(1, 1 + 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
            for name, dtype in codec.DTYPES.items()
            if name != "float8_e8m0fnu"  # torch has it since 2.7 only
        },
        "empty": {},
    }


def made(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is registered, and of it what each rank has for itself."""
    model: nn.Module = {"everything": Tied, "channels-last": Images}.get(kind, Plain)()
    if kind == "channels-last":
        model = model.to(memory_format=torch.channels_last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.01, amsgrad=kind == "channels-last")
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "state": {"step": 0, "losses": []}}
    objects["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    own: dict[str, Any] = {}
    if kind == "everything":
        low = nn.Linear(4, 4).to(torch.bfloat16)
        low.register_buffer("scales", torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn))
        objects |= {
            "low": low,
            "low optimizer": torch.optim.SGD(low.parameters(), lr=0.1, momentum=0.9),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3),
            "nodes": every_node(),
            "list": [1, [2.5], {"a": (3,)}],
            "set": {1, 2},
            "deque": deque([1, 2, 3], maxlen=4),
            "tensor": torch.zeros(4),
            "array": np.zeros(4),
            "large array": np.zeros((12, 12)),
            "torch draws": torch.Generator().manual_seed(1),
            "numpy draws": np.random.default_rng(2),
            "older numpy draws": np.random.RandomState(3),
            "python draws": random.Random(4),
            "counted": Counted(),
        }
    if kind == "two-ranks":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        model = objects["model"] = DistributedDataParallel(model)
        powersgd = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(powersgd, powerSGD_hook)
        objects |= {"powersgd": powersgd, "seen": {"ids": [], "rank": RANK}}
        own = {"replay": torch.zeros(40), "memory": {"last": [RANK] * 3}}
    return objects, own


def step_on(objects: dict[str, Any], own: dict[str, Any], x: torch.Tensor, ids: torch.Tensor) -> float:
    x = x + 0.01 * torch.rand(()) + 0.01 * random.random() + 0.01 * np.random.rand()
    loss = objects["model"](x.float(), ids)
    scaler = objects.get("scaler")
    objects["optimizer"].zero_grad()
    if scaler is None:
        loss.backward()
        objects["optimizer"].step()
    else:
        scaler.scale(loss).backward()
        scaler.step(objects["optimizer"])
        scaler.update()
    objects["schedule"].step()
    state = objects["state"]
    state["step"] += 1
    state["losses"].append(loss.item())
    if "low" in objects:
        low = objects["low optimizer"]
        low.zero_grad()
        objects["low"](x[:1].to(torch.bfloat16)).float().square().sum().backward()
        low.step()
        objects["plateau"].step(loss.item())
        objects["tensor"] += x[0].detach()
        objects["array"] += 1 / state["step"]
        objects["large array"] += 1 / state["step"]
        objects["list"].append(state["step"])
        objects["set"].add(state["step"])
        objects["deque"].append(state["step"])
        objects["counted"].counts = {"steps": state["step"], "by": (state["step"], loss.item())}
        torch.rand(1, generator=objects["torch draws"])
        objects["numpy draws"].random(), objects["older numpy draws"].rand(), objects["python draws"].random()
    if own:
        objects["seen"]["ids"] += ids.tolist()
        own["replay"][:4] = x[0].detach()
        own["memory"]["last"] = ids.tolist()
    return float(loss.item())


def held(objects: dict[str, Any]) -> dict[str, Any]:
    """The state of all objects, and the random states of the process."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        if isinstance(value, torch.Generator):
            found[name] = told(value.get_state())
        elif isinstance(value, np.random.Generator):
            found[name] = told(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            found[name] = told(value.get_state(legacy=False))
        elif isinstance(value, random.Random):
            found[name] = told(value.getstate())
        elif hasattr(value, "state_dict"):
            found[name] = told(dict(value.state_dict()))
        elif hasattr(value, "error_dict"):
            # Behind a load they lie in the order in which DDP packs its buckets at first.
            memories = {key: getattr(value, key).values() for key in ("error_dict", "p_memory_dict", "q_memory_dict")}
            in_order = {key: [memory.reshape(-1).sort().values for memory in memories[key]] for key in memories}
            found[name] = told({"iter": value.iter, **in_order})
        else:
            found[name] = told(value)
        if isinstance(value, nn.Module):
            found[f"{name}, trained"] = [key for key, p in value.named_parameters() if p.requires_grad]
    draws = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    return {"objects": found, "random": told(draws)}


def write(name: str, found: Any) -> None:
    path = Path(os.environ["OUT"]) / f"{name}-{RANK}.json"
    path.write_text(json.dumps(found) + "\n")


def main() -> dict[str, Any]:
    kind = os.environ["KIND"]
    if "SMALL" in os.environ:
        shares.SHARE_BYTES, frozen_state.OWN_INLINE_BYTES, codec.LARGE_ARRAY = 200, 64, 512
    if SIZE > 1:
        distributed.init_process_group("gloo")
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
    objects, own = made(kind)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(6 + RANK)
    if kind == "one":
        # A loader as most scripts have it, with a generator that nobody registers.
        sampler = None
        loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))
    else:
        sampler = ElasticSampler(data, seed=8)
        loader = DataLoader(data, BATCH // SIZE, sampler=sampler)
    for name, value in objects.items():
        migrator.register(name, value)
    for name, value in own.items():
        migrator.register(name, value, own=True)
    if sampler is not None:
        migrator.register("sampler", sampler)
    meter = migrator.meter("loss")
    migrator.listening(every="off")
    if migrator.resume:
        migrator.load_ckpt()
    everything = {**objects, **own, "meter": meter, **({} if sampler is None else {"sampler": sampler})}
    trained: list[Any] = []
    for epoch in migrator.epochs(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, ids in migrator.batches(loader, name="training"):
            if objects["state"]["step"] == AT:
                write("at", held(everything))
                trained.clear()
            loss = step_on(objects, own, x, ids)
            meter.add(loss, len(ids))
            trained.append([epoch, objects["state"]["step"], ids.tolist()])
            if objects["state"]["step"] == int(os.environ.get("STOP", "0")) and RANK == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                while not migrator.is_leaving:
                    time.sleep(0.001)
    named = [(name, p) for name, p in objects["model"].named_parameters() if name.removeprefix("module.") not in NOISE]
    weights = [number for _, p in named for number in p.detach().reshape(-1).tolist()]
    write("after", {"trained": trained, "weights": weights, "loss": meter.mean})
    if SIZE > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return objects


if __name__ == "__main__":
    # Freed before the end of the process, DDP with a communication hook can wait for ever for threads of gloo's that
    # wait for the GIL.
    kept = main()
