"""One attempt at a save: from a safe point to a committed ckpt.

Large tensors are read from where they are, while the training loop goes on towards
its next step. Three things make that right: the gate holds the next step back, the
canary compares the tensors with the marks of the safe point before the first byte
is read, and at the end every tensor must still have the digest it was written with.
If any of them says no, the attempt is thrown away: nothing was committed, nothing
is lost but time.

A training loop that arrives at the gate while a save that is not the last one is
being written is let through as soon as everything not yet safe has been copied
aside; without memory for that it waits.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from migrator import environment, tree
from migrator.capture import Capture, Capturer
from migrator.errors import StorageError
from migrator.events import log
from migrator.gate import Gate
from migrator.kinds import LayoutChanged
from migrator.lineage import Generation, whole
from migrator.manifest import NAME, Manifest, ckpt_name
from migrator.parts import digest_of, write_part
from migrator.registry import Registry
from migrator.storage import LocalStorage

INLINE_BYTES = 256
"""A tensor up to this size stays in the manifest, unless it belongs to a module."""
SMALL_BYTES = 64 << 20
"""State up to this size is copied aside at once if the loop is to go on: that takes a millisecond or two."""
_ROOM_LEFT = 256 << 20
"""Memory that copies put aside never take."""


class Unclean(Exception):  # noqa: N818 - internal: try again at the next safe point
    """The state is not that of the safe point any more."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class GivenUp(Exception):  # noqa: N818 - internal
    """The attempt was ended for a newer step."""


@dataclass(frozen=True)
class Saved:
    """What was committed."""

    ckpt: str
    step: int
    size: int
    took_s: float


@dataclass(frozen=True)
class Workshop:
    """What every attempt works with."""

    storage: LocalStorage
    generation: Generation
    job: str
    registry: Registry
    capturer: Capturer
    gate: Gate


class Aside:
    """Memory for copies, touched before it is needed: fresh memory is ten times slower to fill."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def prepare(self, size: int) -> None:
        """Take `size` bytes if the cgroup has them to spare."""
        self._memory = None
        if size > 0 and size + _ROOM_LEFT < environment.free_memory():
            self._memory = torch.zeros(size, dtype=torch.uint8)

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Copies of all tensors, or None if there is no memory for them."""
        if not tensors:
            return {}
        needed = sum(map(room_for, tensors.values()))
        if self._memory is None or self._memory.numel() < needed:
            # The state has grown since: the first step makes most of an optimizer's.
            self.prepare(needed)
        if self._memory is None:
            return None
        made, at = {}, 0
        for name, tensor in tensors.items():
            place = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            made[name] = place.copy_(tensor)
            at += room_for(tensor)
        return made

    def free(self) -> None:
        self._memory = None


def room_for(tensor: Tensor) -> int:
    return (tensor.nbytes + 63) // 64 * 64


class Attempt:
    """Writes one capture. Runs on the saving thread, with the gate shut by `Gate.take`."""

    def __init__(
        self,
        shop: Workshop,
        capture: Capture,
        *,
        aside: Aside,
        may_open: bool,
        on_block: Callable[[int, int], None],
    ) -> None:
        self._shop = shop
        self._capture = capture
        self._aside = aside
        self._may_open = may_open
        self._on_block = on_block
        self._tensors: dict[str, Tensor] = {}
        self._live: set[str] = set()
        self._is_apart = False
        """Nothing is read from live memory any more; the gate is open."""
        self._stood_still = False
        """The loop stood at the gate or in the safe point while its state was copied aside."""
        self._has_stalled = False

    def run(self) -> Saved:
        """Write, prove, commit. Raises `Unclean`, `GivenUp` or `StorageError`; then nothing was committed."""
        start_s = time.monotonic()
        name = ckpt_name(self._shop.generation.number, self._capture.step)
        standing = self._found_committed(name)
        if standing is not None:
            return Saved(name, self._capture.step, standing.bytes, time.monotonic() - start_s)
        objects, extra = self._objects()
        self._check_marks()
        if self._may_open and sum(self._tensors[key].nbytes for key in self._live) <= SMALL_BYTES:
            self._step_apart(is_written=False)
        part = write_part(
            self._shop.storage,
            f"{name}/part-00000-of-00001.safetensors",
            {key: self._reader(key) for key in self._tensors},
            after_block=self._after_block,
        )
        log("part_written", ckpt=name, bytes=part.bytes)
        self._prove(part.tensor_digests)
        manifest = Manifest(
            generation=self._shop.generation.number,
            step=self._capture.step,
            job=self._shop.job,
            ranks=1,
            parts=(part,),
            objects=objects,
            extra=extra,
            written=_written(),
        )
        self._commit(manifest)
        took_s = time.monotonic() - start_s
        log("committed", ckpt=name, step=self._capture.step, ranks=1, bytes=part.bytes, took_s=took_s)
        return Saved(name, self._capture.step, part.bytes, took_s)

    def _commit(self, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        try:
            self._shop.storage.put(f"{manifest.ckpt}/{NAME}", data, exclusive=True)
        except (FileExistsError, StorageError):
            # It may have appeared all the same: a lost reply, or a sync of its name that failed once.
            if self._found_committed(manifest.ckpt) is None:
                raise

    def _found_committed(self, name: str) -> Manifest | None:
        """The ckpt of this very step, if an attempt that failed at the last moment did make it, now durable."""
        if NAME not in self._shop.storage.list(name):
            return None
        found = whole(self._shop.storage, name)
        self._shop.storage.sync_directory(name)
        self._shop.storage.sync_directory()
        log("joined", ckpt=name, step=found.step)
        return found

    def _objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees of everything registered; large tensors go to the part."""
        objects = {}
        known: dict[tuple[Any, ...], str] = {}
        for name, kind in self._shop.registry:
            try:
                value = kind.frozen(self._capture.values[name])
            except (LayoutChanged, RuntimeError, KeyError) as error:
                # The script is changing the object's structure at this moment.
                raise Unclean([name]) from error
            marked = self._capture.marks[name].addresses
            # What is looked up while other weights are swapped in would be written in their stead,
            # though the marks find the right ones back in place a moment later.
            if any(tensor.data_ptr() not in marked for tensor in kind.standing(value)):
                raise Unclean([name])
            put = self._putter(name, kind.kind, marked, known)
            objects[name] = {"kind": kind.kind, "tree": tree.encode(value, put=put, path=name)}
        extra = {
            key: tree.encode(value, put=self._putter(key, "", frozenset(), known), path=key)
            for key, value in (("random", {"0": self._capture.random}), ("loop", self._capture.loop))
        }
        return objects, extra

    def _putter(
        self, name: str, kind: str, marked: frozenset[int], known: dict[tuple[Any, ...], str]
    ) -> Callable[[Tensor, str], str | None]:
        def put(tensor: Tensor, path: str) -> str | None:
            if tensor.nbytes <= INLINE_BYTES and kind != "module":
                return None
            # Tied weights are one tensor under two names: stored once.
            kind_of = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
            same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *kind_of)
            if tensor.data_ptr() and same in known:
                return known[same]
            stored = _stored_name(name, path)
            while stored in self._tensors:
                stored += "'"
            # A second handle: the script may exchange `.data` while this one is being written.
            self._tensors[stored] = tensor.detach()
            known[same] = stored
            if tensor.data_ptr() in marked:
                self._live.add(stored)
            return stored

        return put

    def _reader(self, key: str) -> Callable[[], Tensor]:
        return lambda: self._tensors[key]

    def _after_block(self, done: int, total: int) -> None:
        self._on_block(done, total)
        # Behind the last byte comes the sync, which may take long: the loop need not wait for that.
        if self._may_open and not self._is_apart and (self._shop.gate.someone_waits or done == total):
            self._step_apart(is_written=done == total)

    def _step_apart(self, *, is_written: bool) -> None:
        """The loop waits: copy what it is about to change, and let it go on."""
        start_s = time.monotonic()
        live = {key: self._tensors[key] for key in self._live}
        stood_still = self._shop.gate.someone_waits
        copies = self._aside.copies(live)
        if copies is None:
            if not self._has_stalled:
                self._has_stalled = True
                log("gate_stall", level=logging.WARNING, why="no memory for a copy", step=self._capture.step)
            return
        # The copies are those of the safe point if the tensors were, before and after, and nothing was
        # swapped out and in again meanwhile. A loop that stands at the gate swaps nothing; of what is
        # written already, the copies are compared with that in the end.
        if not (stood_still or is_written):
            self._check_equal(live, {key: _cpu_digest(copy) for key, copy in copies.items()})
        self._check_marks()
        self._tensors.update(copies)
        self._is_apart, self._stood_still = True, stood_still
        self._shop.gate.open()
        log("gate_stall", level=logging.DEBUG, took_s=time.monotonic() - start_s, step=self._capture.step)

    def _check_marks(self) -> None:
        changed = self._shop.capturer.changed(self._capture)
        if changed:
            raise Unclean(changed)

    def _prove(self, digests: Mapping[str, bytes]) -> None:
        """What was written is what is in memory now, and that is what the safe point had."""
        if not self._is_apart:
            self._check_marks()
        self._check_equal({key: self._tensors[key] for key in self._live}, digests)
        if not self._is_apart:
            self._check_marks()
        changed = self._shop.gate.found_changed(self._capture)
        if changed and not self._stood_still:
            raise Unclean(changed)

    def _check_equal(self, tensors: dict[str, Tensor], digests: Mapping[str, bytes | None]) -> None:
        wrong = [key for key, tensor in tensors.items() if _cpu_digest(tensor) not in (None, digests[key])]
        if wrong:
            raise Unclean(sorted({key.split("/")[0] for key in wrong}))


def _cpu_digest(tensor: Tensor) -> bytes | None:
    """None for what lies on a device: there a change has to be told by the marks."""
    return digest_of(tensor) if tensor.device.type == "cpu" else None


def _stored_name(name: str, path: str) -> str:
    """`model['fc.weight']` is stored as `model/fc.weight`, `optimizer.state[0]` as `optimizer/state[0]`."""
    rest = path.removeprefix(name)
    match = re.fullmatch(r"\['([^']*)'\]", rest)
    return f"{name}/{match.group(1) if match else rest.removeprefix('.')}"


def _written() -> dict[str, Any]:
    from migrator import __version__

    return {
        "time": time.time(),
        "host": environment.pod_name(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "migrator": __version__,
    }


def failed_text(error: BaseException) -> str:
    """One line for log and hook."""
    return " ".join(str(error).split()) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
