"""The libraries whose checkpoints are broken by `peers.py`, each used as its own documentation has it for safety.

All save the same training: a small model and its AdamW, whose state at every step is known. So what was
loaded can be told from what was saved: the old state, the new one, or something that never was.

Each is a `Library` with one rule: `save` returns when the library reports success, `load` puts the newest
state into the training or raises. What a library does not do by itself (a pointer to the newest directory,
a temporary file) is done here with the same care for all: written aside, synced, renamed, directory synced.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Training:
    """A model and its AdamW, 100 KB in all. `torn` begins with numbers that no step ever has."""

    def __init__(self, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * (1 + seed))
        self.step = 0

    def train(self) -> None:
        """One step; its gradients depend on nothing but its number."""
        self.step += 1
        for i, parameter in enumerate(self.model.parameters()):
            wave = torch.arange(parameter.numel(), dtype=torch.float32) * (self.step + i + 1)
            parameter.grad = torch.sin(wave).reshape(parameter.shape)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def digest(self) -> str:
        """Of every bit that a resumed training would compute with."""
        digest = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
                digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(value, dict):
                for key in sorted(value, key=str):
                    digest.update(str(key).encode())
                    add(value[key])
            elif isinstance(value, list | tuple):
                for item in value:
                    add(item)
            else:
                digest.update(repr(value).encode())

        add(self.state())
        return digest.hexdigest()


def digest_of_step(step: int) -> str:
    """What a training that was never saved or loaded has after so many steps."""
    training = Training()
    for _ in range(step):
        training.train()
    return training.digest()


class Library(Protocol):
    """One life of a job after another saves and loads in `directory`."""

    def save(self, directory: Path, training: Training) -> None:
        """Train one step and save; returns when the library says that it is saved."""

    def load(self, directory: Path, training: Training) -> None:
        """The newest state, or an error."""


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(aside: Path, target: Path, *, sync: bool = True) -> None:
    """The careful way to give a file its name."""
    if sync:
        synced(aside)
    aside.replace(target)
    if sync:
        synced(target.parent)


class TorchSave:
    """`torch.save` to a file aside, renamed when it is whole; or, for comparison, over the file itself."""

    def __init__(self, *, sync: bool, in_place: bool = False) -> None:
        self._sync = sync
        self._in_place = in_place

    def save(self, directory: Path, training: Training) -> None:
        if (directory / "ckpt.pt").exists():
            self.load(directory, training)
        training.train()
        if self._in_place:
            torch.save(training.state(), directory / "ckpt.pt")
            return
        torch.save(training.state(), directory / "ckpt.pt.tmp")
        replace(directory / "ckpt.pt.tmp", directory / "ckpt.pt", sync=self._sync)

    def load(self, directory: Path, training: Training) -> None:
        training.take(torch.load(directory / "ckpt.pt", weights_only=True))
        training.step = int(training.optimizer.state_dict()["state"][0]["step"])


class Safetensors:
    """`save_file` to a file aside; what is no tensor goes into the header's metadata, as the format provides."""

    def save(self, directory: Path, training: Training) -> None:
        from safetensors.torch import save_file

        if (directory / "ckpt.safetensors").exists():
            self.load(directory, training)
        training.train()
        state = training.state()
        tensors = {f"model/{name}": tensor for name, tensor in state["model"].items()}
        for index, slots in state["optimizer"]["state"].items():
            tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in slots.items()}
        aside = directory / "ckpt.safetensors.tmp"
        save_file(tensors, aside, metadata={"groups": json.dumps(state["optimizer"]["param_groups"])})
        replace(aside, directory / "ckpt.safetensors")

    def load(self, directory: Path, training: Training) -> None:
        from safetensors import safe_open

        state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
        with safe_open(directory / "ckpt.safetensors", "pt") as file:
            state["optimizer"]["param_groups"] = json.loads(file.metadata()["groups"])
            for group in state["optimizer"]["param_groups"]:
                group["betas"] = tuple(group["betas"])
            for name in file.keys():  # noqa: SIM118 - it is no dict
                kind, *path = name.split("/")
                if kind == "model":
                    state["model"][path[0]] = file.get_tensor(name)
                else:
                    state["optimizer"]["state"].setdefault(int(path[0]), {})[path[1]] = file.get_tensor(name)
        training.take(state)
        training.step = int(state["optimizer"]["state"][0]["step"])


class _ByDirectories(ABC):
    """A new directory for each step, and a pointer to the newest that is replaced when that is whole."""

    def save(self, directory: Path, training: Training) -> None:
        if (directory / "latest").exists():
            self.load(directory, training)
        training.train()
        name = f"step-{training.step:06d}"
        self._write(directory / name, training)
        aside = directory / "latest.tmp"
        aside.write_text(name)
        replace(aside, directory / "latest")

    def load(self, directory: Path, training: Training) -> None:
        self._read(directory / (directory / "latest").read_text(), training)
        training.step = int(training.optimizer.state_dict()["state"][0]["step"])

    @abstractmethod
    def _write(self, directory: Path, training: Training) -> None:
        """All of it, into a new directory."""

    @abstractmethod
    def _read(self, directory: Path, training: Training) -> None:
        """What `_write` has put there."""


class DistributedCheckpoint(_ByDirectories):
    """torch.distributed.checkpoint, with its files synced."""

    def _write(self, directory: Path, training: Training) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(training.model, training.optimizer)
        writer = dcp.FileSystemWriter(directory, sync_files=True)
        dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer, no_dist=True)

    def _read(self, directory: Path, training: Training) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(training.model, training.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class Torchsnapshot(_ByDirectories):
    """`Snapshot.take`, whose metadata is written last."""

    def _write(self, directory: Path, training: Training) -> None:
        from torchsnapshot import Snapshot

        Snapshot.take(str(directory), {"model": training.model, "optimizer": training.optimizer})

    def _read(self, directory: Path, training: Training) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(directory)).restore({"model": training.model, "optimizer": training.optimizer})


class Lightning:
    """`Trainer` with `ModelCheckpoint`, which keeps the last state, resumed by `ckpt_path="last"`."""

    def save(self, directory: Path, training: Training) -> None:
        saved = (directory / "last.ckpt").exists()
        self._fit(directory, training, steps=2 if saved else 1, path="last" if saved else None)

    def load(self, directory: Path, training: Training) -> None:
        if not any(directory.glob("last*.ckpt")):
            raise FileNotFoundError("there is no last.ckpt")  # the Trainer itself would begin anew and say so
        self._fit(directory, training, steps=0, path="last")

    def _fit(self, directory: Path, training: Training, *, steps: int, path: str | None) -> None:
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.model = training.model

            def configure_optimizers(self) -> Any:
                return training.optimizer

            def training_step(self, batch: Any, index: int) -> None:
                training.step = self.trainer.global_step
                optimizer = self.optimizers()
                inner, training.optimizer = training.optimizer, optimizer
                try:
                    training.train()
                finally:
                    training.optimizer = inner

        class Stop(lightning.Callback):
            """For a load alone: what was loaded is there when training is about to start."""

            def on_train_start(self, trainer: Any, module: Any) -> None:
                if steps == 0:
                    trainer.should_stop = True
                    trainer.limit_train_batches = 0

        keep = ModelCheckpoint(dirpath=directory, every_n_train_steps=1, save_last=True, save_top_k=0)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps or 1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[keep, Stop()],
            default_root_dir=directory,
        )
        data = torch.utils.data.DataLoader(torch.zeros(4, 1))
        trainer.fit(Module(), data, ckpt_path=path)


class Migrator:
    """Registered, listened, saved by `save_ckpt()`; a new life loads."""

    _instance: Any = None

    def _life(self, directory: Path, training: Training) -> Any:
        from migrator.api import Migrator as Instance

        migrator = self._instance = Instance()
        migrator.register("model", training.model)
        migrator.register("optimizer", training.optimizer)
        migrator.listening(ckpt=str(directory), signal=str(directory.parent / "signal"), every="off")
        return migrator

    def save(self, directory: Path, training: Training) -> None:
        migrator = self._life(directory, training)
        if migrator.resume:
            migrator.load_ckpt()
            training.step = int(training.optimizer.state_dict()["state"][0]["step"])
        training.train()
        migrator.safe_point()
        migrator.save_ckpt()

    def load(self, directory: Path, training: Training) -> None:
        if self._life(directory, training).load_ckpt() is None:
            raise FileNotFoundError("there is no ckpt")

    def close(self) -> None:
        """What the end of the process does, for the next life in the same one."""
        if self._instance is not None and self._instance._session is not None:
            self._instance._session.close()
        self._instance = None


LIBRARIES: dict[str, tuple[Library, str]] = {
    "torch.save, in place": (TorchSave(sync=False, in_place=True), "torch"),
    "torch.save": (TorchSave(sync=True), "torch"),
    "torch.save, no fsync": (TorchSave(sync=False), "torch"),
    "safetensors": (Safetensors(), "safetensors"),
    "DCP": (DistributedCheckpoint(), "torch"),
    "torchsnapshot": (Torchsnapshot(), "torchsnapshot"),
    "Lightning": (Lightning(), "lightning"),
    "migrator": (Migrator(), "migrator"),
}
