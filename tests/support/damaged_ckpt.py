"""A real job on a volume, small enough to be damaged at every single place, and the way back as a life takes it.

Its ckpts are made by the save that every job makes, of one rank or of several, and they are loaded by
`load_ckpt()` itself: the newest one that is whole, with the one before it behind it. Only what a life does besides
(threads, hooks, a generation of its own) is left out, so that this can be done thousands of times in one process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from migrator import ElasticSampler
from migrator.ckpt import catalog, codec
from migrator.ckpt import generations as lineage
from migrator.ckpt.names import MANIFEST
from migrator.ckpt.sealed import seal
from migrator.loop.epoch_counters import EpochCounters
from migrator.loop.gate import Gate
from migrator.loop.position import Place
from migrator.loop.safe_points import SafePoints
from migrator.ranks import shares
from migrator.save import frozen_state
from migrator.save.attempt import Attempt
from migrator.save.context import SaveContext
from migrator.save.staging import StagingBuffer
from migrator.session import restore
from migrator.session.candidates import Candidates
from migrator.session.restore_plan import Loaded
from migrator.session.resume import Resume
from migrator.session.start import StartingPoint
from migrator.settings import Every
from migrator.state.capture import Capturer
from migrator.state.registry import Registry
from migrator.storage.posix import PosixStorage

LOOP = {"loops": {"DataLoader TensorDataset[40] RandomSampler 0": {"handed": 3, "epoch": 1}}}


def objects(seed: int, *, width: int = 16, ballast: int = 0) -> dict[str, Any]:
    """A model, its optimizer, metrics and a sampler, after two steps; all of it follows from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (1 + seed % 7))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().sum().backward()
            optimizer.step()
        sampler = ElasticSampler(40, seed=seed)
        sampler.advance(seed % 40)
        metrics = {"epoch": 1, "losses": [seed / 3, seed / 7], "of ranks": torch.rand(80, dtype=torch.float64)}
        made = {"model": model, "optimizer": optimizer, "metrics": metrics, "sampler": sampler}
        return {**made, "ballast": torch.rand(ballast)} if ballast else made


def registered(found: dict[str, Any]) -> Registry:
    registry = Registry()
    for name, value in found.items():
        registry.add(name, value)
    return registry


def state_of(found: dict[str, Any]) -> str:
    """Every bit of the objects, as one text."""
    values = {name: kind.frozen(kind.capture()) for name, kind in registered(found).__iter__()}
    return json.dumps(codec.encode(values, put=lambda tensor, path: None, path=""))


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def restore_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@dataclass
class Ckpts:
    """Two ckpts of one lineage, the newest of a second life, and what is in them for each rank."""

    storage: PosixStorage
    older: str
    newest: str
    lineage: tuple[int, ...]
    states: dict[tuple[str, int], str]
    size: int
    width: int
    ballast: int

    def path(self, name: str = "", file: str = "") -> Path:
        return self.storage.directory / name / file

    def files(self, name: str | None = None) -> list[Path]:
        """Of a ckpt (the newest) all that counts: the manifest and the parts."""
        found = self.path(name or self.newest).iterdir()
        return sorted(path for path in found if path.name == MANIFEST or path.suffix == ".safetensors")

    def parts(self, name: str | None = None) -> list[Path]:
        return [path for path in self.files(name) if path.name != MANIFEST]

    def life(self, *, rank: int = 0) -> Return:
        return Return(self, rank)


SETTINGS: Any = SimpleNamespace(resume="auto", loops="continue", legacy_file=None)


class Return:
    """A life that does nothing but `load_ckpt()`, into objects that hold something else before."""

    def __init__(self, ckpts: Ckpts, rank: int = 0, *, into: dict[str, Any] | None = None) -> None:
        self._ckpts, self._rank = ckpts, rank
        self.objects = into or objects(1000 + rank, width=ckpts.width, ballast=ckpts.ballast)
        self._registry = registered(self.objects)
        self.again()

    def again(self) -> Return:
        """The same objects, in another life."""
        self._saver: Any = SimpleNamespace(bad=frozenset(), newest=None, went_on_from=lambda ckpt: None)
        self._capturer = Capturer(self._registry)
        self._gate = Gate(self._capturer)
        self._place = Place()
        return self

    def _load_one(self, name: str) -> Loaded:
        return restore.load(self._ckpts.storage, name, self._registry, rank=self._rank, size=self._ckpts.size)

    def candidates(self) -> Candidates:
        """The ckpts that are there now."""
        generation: Any = SimpleNamespace(number=self._ckpts.lineage[0])
        names = tuple(catalog.ckpts(self._ckpts.storage, self._ckpts.lineage))
        return Candidates(SETTINGS, self._ckpts.storage, StartingPoint(generation, names, Every()), self._load_one)

    def _resume(self) -> Resume:
        counters = EpochCounters()
        nobody: Any = None  # nothing is trained
        safe_points = SafePoints(
            self._registry,
            self._capturer,
            self._gate,
            self._place,
            counters,
            departure=nobody,
            checks=nobody,
            has_other_ranks=False,
        )
        return Resume(
            SETTINGS,
            self._registry,
            self.candidates(),
            self._saver,
            gate=self._gate,
            place=self._place,
            counters=counters,
            safe_points=safe_points,
            ranks=self._ckpts.size,
        )

    def load(self) -> str | None:
        """As after a start: the candidates are looked for first. This process draws on as before."""
        resume = self._resume()
        before = random_states()
        try:
            return resume.load()
        finally:
            self.drawn = random_states()
            restore_random_states(before)

    @property
    def bad(self) -> set[str]:
        """The ckpts that were found not to be what was committed."""
        return set(self._saver.bad)

    @property
    def state(self) -> str:
        """What has come back: the objects, the random states, the place in the loop."""
        rest = {"random": list(self.drawn), "loop": self._place.state()}
        return state_of(self.objects) + json.dumps(codec.encode(rest, put=lambda tensor, path: None, path=""))


def save(
    storage: PosixStorage, generation: lineage.Generation, step: int, ranks: list[dict[str, Any]], job: str = "job"
) -> str:
    """One ckpt of these objects, by the save of a job of so many ranks."""
    attempts = []
    for rank, found in enumerate(ranks):
        registry = registered(found)
        capturer = Capturer(registry)
        gate = Gate(capturer)
        gate.publish(capturer.take(step, LOOP, full=True))
        gate.announce()
        capture = gate.take(1.0)
        assert capture is not None
        context = SaveContext(storage, generation, job, registry, capturer, gate, rank=rank, size=len(ranks))
        attempts.append(
            Attempt(
                context,
                capture,
                staging=StagingBuffer(),
                may_open=False,
                on_block=lambda done, total: None,
                members=tuple(range(len(ranks))),
            )
        )
        attempts[-1].share()
    assert attempts[0].look().missing() == []
    return attempts[0].commit().ckpt


def two_ckpts(
    root: Path, *, size: int = 1, seed: int = 1, width: int = 16, ballast: int = 0, job: str = "job"
) -> Ckpts:
    """A job of two lives with a ckpt each. With several ranks there are several shares, and parts of a rank's own."""
    storage = PosixStorage(root, job)
    names, states = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "SHARE_BYTES", 1 << 10)
        patch.setattr(frozen_state, "OWN_INLINE_BYTES", 0)
        for life in range(2):
            generation = lineage.claim(storage, fresh=False, about={"script": "train.py", "argv": ["--fast"]})
            ranks = []
            for rank in range(size):
                found = objects(seed + life, width=width, ballast=ballast)
                # What ranks have for themselves: metrics, and the running statistics of their share of the data.
                found["metrics"]["of ranks"] += rank
                found["model"][1].running_mean += rank
                ranks.append(found)
            names.append(save(storage, generation, 5 + life, ranks, job))
    ckpts = Ckpts(storage, names[0], names[1], generation.lineage, states, size, width, ballast)
    for rank in range(size):
        life_of_rank = ckpts.life(rank=rank)
        assert life_of_rank.load() == ckpts.newest
        states[ckpts.newest, rank] = life_of_rank.state
        with aside(ckpts.path(ckpts.newest, MANIFEST)):
            assert life_of_rank.again().load() == ckpts.older
        states[ckpts.older, rank] = life_of_rank.state
        assert states[ckpts.newest, rank] != states[ckpts.older, rank]
    assert len(set(states.values())) == 2 * size
    return ckpts


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Something put out of the way for a while; whatever takes its place is removed afterwards."""
    away = path.with_name(f"{path.name}.away")
    path.rename(away)
    try:
        yield away
    finally:
        remove(path)
        away.rename(path)


def remove(path: Path) -> None:
    """Whatever it is; nothing there is fine."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        path.unlink()
        return
    for inside in path.iterdir():
        remove(inside)
    path.rmdir()


def on_disk(directory: Path) -> dict[str, Any]:
    """Everything there is below a directory: kinds, targets of links, bytes."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        mode = os.lstat(path).st_mode
        what: Any = stat.S_IFMT(mode)
        if stat.S_ISREG(mode):
            what = path.read_bytes()
        elif stat.S_ISLNK(mode):
            what = f"-> {path.readlink()}"
        found[str(path.relative_to(directory))] = what
    return found


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The end of a hang, as a failure of this test and not of the whole run."""

    def over(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hangs: not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def resealed(path: Path, change: Callable[[dict[str, Any]], Any], kind: str = "manifest") -> bytes:
    """What a sealed file would hold after a change, by somebody who can compute digests too."""
    payload = json.loads(path.read_bytes())[kind]
    change(payload)
    return seal(kind, payload)
