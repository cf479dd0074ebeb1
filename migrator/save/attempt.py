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

import errno
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from migrator.platform import container as environment
from migrator.ckpt import codec as tree
from migrator.state.capture import Capture, Capturer
from migrator.errors import CkptCorrupt, StorageError
from migrator.events import log
from migrator.loop.gate import Gate
from migrator.state.adapters.base import LayoutChanged
from migrator.ckpt.generations import Generation, check_parts, make_durable, numbers, whole
from migrator.ckpt.manifest import LIMIT, NAME, Manifest, ckpt_name, own_name, part_name
from migrator.ckpt.tensor_file import PartRecord, digest_of, write_part
from migrator.state.registry import Registry
from migrator.ranks.shares import Exchange, Gathering, OnStorage, Plan, RankRecord
from migrator.storage.posix import LocalStorage

INLINE_BYTES = 256
"""A tensor up to this size stays in the manifest, unless it belongs to a module."""
OWN_INLINE_BYTES = 64 << 10
"""With several ranks, what is a rank's own and not larger needs no file of its own."""
OWN_BUFFER_BYTES = 1 << 20
"""A module's buffer above this size is taken to be the same on all ranks, as parameters are."""
SMALL_BYTES = 64 << 20
"""State up to this size is copied aside at once if the loop is to go on: that takes a millisecond or two."""
_ROOM_LEFT = 256 << 20
"""Memory that copies put aside never take."""


class Unclean(Exception):  # noqa: N818 - internal: try again at the next safe point
    """The state is not that of the safe point any more."""

    def __init__(self, names: list[str], why: str = "") -> None:
        super().__init__(", ".join(names))
        self.names = names
        self.why = why


class GivenUp(Exception):  # noqa: N818 - internal
    """The attempt was ended for a newer step."""


@dataclass(frozen=True)
class Saved:
    """What was committed."""

    ckpt: str
    step: int
    size: int
    took_s: float
    is_joined: bool = False
    """Another rank had committed it already."""


@dataclass(frozen=True)
class Workshop:
    """What every attempt works with."""

    storage: LocalStorage
    generation: Generation
    job: str
    registry: Registry
    capturer: Capturer
    gate: Gate
    rank: int = 0
    size: int = 1
    exchange: Exchange | None = None
    """How ranks tell each other what they wrote; on storage if nothing else is said."""
    writes: bool = True
    """This rank sees the root; else it only hands its own state to those that do."""
    tries: Counter[str] = field(default_factory=Counter)
    """How often this process has written into each ckpt."""
    origin: list[str] = field(default_factory=list)
    """The ckpt that this life went on from, once it is loaded."""


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
    """Writes one capture. Runs on the saving thread, with the gate shut by `Gate.take`.

    `share` writes what is this rank's to write, `help` what another one has not written, `commit` makes the
    ckpt exist. Each raises `Unclean`, `GivenUp` or `StorageError` if it cannot; then nothing was committed.
    """

    def __init__(
        self,
        shop: Workshop,
        capture: Capture,
        *,
        aside: Aside,
        may_open: bool,
        on_block: Callable[[int, int], None],
        members: tuple[int, ...] = (0,),
    ) -> None:
        self._shop = shop
        self._capture = capture
        self._aside = aside
        self._may_open = may_open
        self._on_block = on_block
        self._members = members
        self._tensors: dict[str, Tensor] = {}
        self._live: set[str] = set()
        self._same: dict[str, list[str]] = {}
        """Of each object the tensors that all ranks hold alike."""
        self._told: dict[str, bytes | None] = {}
        """The digests of these, as the other ranks hear of them."""
        self._is_apart = False
        """Nothing is read from live memory any more; the gate is open."""
        self._stood_still = False
        """The loop stood at the gate or in the safe point while its state was copied aside."""
        self._has_stalled = False
        self._start_s = time.monotonic()
        self._plan: Plan | None = None
        self._gathering: Gathering | None = None
        self._exchange = shop.exchange or OnStorage(shop.storage)
        self.name = ckpt_name(shop.generation.number, capture.step)

    @property
    def position(self) -> int:
        """How many members come before this rank."""
        members, rank = self._members, self._shop.rank
        return members.index(rank) if rank in members else len(members)

    def run(self) -> Saved:
        """All of it, for a job of one process."""
        standing = self.standing()
        if standing is not None:
            return standing
        self.share()
        return self.commit()

    def standing(self) -> Saved | None:
        """The ckpt of this very step, if there is one."""
        if not self._shop.writes:
            return None
        found = self._found_committed(self.name)
        return None if found is None else self._saved(found.bytes)

    def share(self) -> None:
        """Write this rank's share of what all have, and what is its own, and say so."""
        objects, extra, own = self._encoded()
        self._check_marks()
        plan = self._plan = self._planned()
        same = self._digests_of_same()
        share = plan.share_of(self._shop.rank)
        if self._shop.size > 1 and self._may_open:
            # Only what is this rank's to write is read from now on.
            self._live &= {*own, *(plan.shares[share] if share is not None else ())}
        if self._may_open and sum(self._tensors[key].nbytes for key in self._live) <= SMALL_BYTES:
            self._step_apart(is_written=False)
        mine = RankRecord(self._shop.rank, plan.at, plan.digest, same, objects, extra)
        if self._shop.size == 1:
            # One file for all: nobody else writes.
            mine = replace(mine, shares={0: self._write(part_name(0, 1), list(self._tensors))})
        elif self._shop.writes:
            self._shop.tries[self.name] += 1
            if share is not None:
                mine = replace(mine, shares={share: self._write_share(plan, share)})
            if own:
                name = own_name(self._shop.rank, self._shop.tries[self.name])
                mine = replace(mine, own=self._write(name, own))
        if self._shop.size > 1:
            self._prove({})
        self._gathering = Gathering(self._exchange, self.name, plan, mine)
        self._tell()

    def help(self) -> int | None:
        """Write the next share that nobody has written; its number, None if there is none."""
        gathering, plan = self._gathered
        missing = gathering.missing()
        if not missing:
            return None
        part = self._write_share(plan, missing[0])
        gathering.add(replace(gathering.mine, shares={**gathering.mine.shares, missing[0]: part}))
        self._tell()
        return missing[0]

    def _tell(self) -> None:
        gathering, _ = self._gathered
        if self._shop.size > 1:
            self._exchange.put(self.name, self._shop.rank, gathering.mine.to_bytes())

    @property
    def _gathered(self) -> tuple[Gathering, Plan]:
        assert self._gathering is not None
        assert self._plan is not None
        return self._gathering, self._plan

    def look(self) -> Gathering:
        """What the ranks have written so far."""
        gathering, _ = self._gathered
        gathering.look(self._shop.size)
        return gathering

    def is_committed(self) -> bool:
        return self._exchange.is_committed(self.name)

    def commit(self) -> Saved:
        """Make it exist. All shares have to be there."""
        gathering, _ = self._gathered
        manifest = gathering.manifest(
            generation=self._shop.generation.number,
            job=self._shop.job,
            ranks=self._shop.size,
            written={**_written(), "continues": self._shop.origin[0] if self._shop.origin else None},
        )
        found = self._commit(manifest)
        saved = self._saved((found or manifest).bytes)
        if found is not None:
            return replace(saved, is_joined=True)  # `joined` is said
        log(
            "committed",
            ckpt=self.name,
            step=saved.step,
            ranks=self._shop.size,
            bytes=saved.size,
            took_s=saved.took_s,
        )
        return saved

    def _saved(self, size: int) -> Saved:
        return Saved(self.name, self._capture.step, size, time.monotonic() - self._start_s)

    def _planned(self) -> Plan:
        shared = {key: self._tensors[key] for keys in self._same.values() for key in keys}
        members = self._members
        if any(tensor.device.type != "cpu" for tensor in shared.values()):
            # Whether ranks hold the same on their devices is not known, so nothing is put together.
            members = members[:1]
        return Plan.of(self._capture.at, members, {key: tensor.nbytes for key, tensor in shared.items()})

    def _digests_of_same(self) -> dict[str, str]:
        """Ranks put their shares together only if they hold the same."""
        if self._shop.size == 1:
            return {}
        found = {}
        for name, keys in self._same.items():
            self._told |= {key: _cpu_digest(self._tensors[key]) for key in keys}
            digests = [(key, (self._told[key] or b"").hex()) for key in sorted(keys)]
            found[name] = xxhash.xxh3_128(repr(digests).encode()).hexdigest()
        return found

    def _write_share(self, plan: Plan, share: int) -> PartRecord:
        tries = self._shop.tries[self.name]
        name = part_name(share, len(plan.shares), rank=self._shop.rank, attempt=tries)
        return self._write(name, plan.shares[share])

    def _write(self, name: str, keys: Iterable[str]) -> PartRecord:
        part = write_part(
            self._shop.storage,
            f"{self.name}/{name}",
            {key: self._reader(key) for key in keys},
            after_block=self._after_block,
        )
        log("part_written", ckpt=self.name, bytes=part.bytes)
        wrong = [key for key, digest in part.tensor_digests.items() if self._told.get(key) not in (None, digest)]
        if wrong:  # what was written is not what the other ranks were told of
            raise Unclean(_owners(wrong))
        self._prove(part.tensor_digests)
        return part

    def _commit(self, manifest: Manifest) -> Manifest | None:
        """Returns what is there already, if another rank was quicker."""
        storage, data, place = self._shop.storage, manifest.to_bytes(), f"{manifest.ckpt}/{NAME}"

        def check() -> None:
            """A later life that thinks this one dead may have swept the parts, and another rank begun anew."""
            try:
                check_parts(storage, manifest)
            except CkptCorrupt as error:
                later = max(numbers(storage), default=0)
                why = "No later life of the job has begun; see who deletes on the volume."
                if later > manifest.generation:
                    why = f"A later life of the job (generation {later}) has begun, and sweeps; end one of them."
                raise StorageError(f"cannot commit {manifest.ckpt}: {error}. {why}", errno=errno.ENOENT) from error

        try:
            storage.put(place, data, exclusive=True, check=check)
        except StorageError:
            # It may have appeared all the same: a lost reply, or a sync of its name that failed once.
            if self._found_committed(manifest.ckpt) is None:
                raise
        except FileExistsError:
            found = self._found_committed(manifest.ckpt)
            if found is None:
                # Where there are no links a rank that died may have claimed the name and not used it. If it is only
                # slow, its manifest and this one are as good: both name parts that are whole.
                storage.put(place, data, exclusive=False, check=check)
            elif storage.get(place, limit=LIMIT) != data:
                return found
        return None

    def _found_committed(self, name: str) -> Manifest | None:
        """The ckpt of this very step, if an attempt that failed at the last moment did make it, now durable."""
        if NAME not in self._shop.storage.list(name):
            return None
        found = whole(self._shop.storage, name)
        make_durable(self._shop.storage, name)
        log("joined", ckpt=name, step=found.step)
        return found

    def _encoded(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """The trees of everything registered, those of everything else, and which tensors are this rank's own."""
        objects, extra = self._objects(own_inline=False)
        same = {key for keys in self._same.values() for key in keys}
        own = [key for key in self._tensors if key not in same]
        size = sum(self._tensors[key].nbytes for key in own)
        if self._shop.size > 1 and (size <= OWN_INLINE_BYTES or not self._shop.writes):
            objects, extra = self._objects(own_inline=True)
            own = []
        return objects, extra, own

    def _objects(self, *, own_inline: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees; large tensors go to parts."""
        self._tensors, self._live, self._same = {}, set(), {}
        objects = {}
        known: dict[tuple[Any, ...], str | None] = {}
        for name, kind in self._shop.registry:
            try:
                value = kind.frozen(self._capture.values[name])
            except (LayoutChanged, RuntimeError, KeyError) as error:
                # The script is changing the object's structure at this moment.
                raise Unclean([name], f"it has not the tensors of the safe point: {error}") from error
            marked = self._capture.marks[name].addresses
            # What is looked up while other weights are swapped in would be written in their stead,
            # though the marks find the right ones back in place a moment later.
            if any(tensor.data_ptr() not in marked for tensor in kind.standing(value)):
                raise Unclean([name])
            put = self._putter(name, kind.kind, marked, known, own_inline)
            if kind.may_lack:
                node = self._shop.registry.storable.encode(name, value, put)
            else:
                node = tree.encode(value, put=put, path=name)
            objects[name] = {"kind": kind.kind, "tree": node}
        extra = {}
        for key, value in (("random", self._capture.random), ("loop", self._capture.loop)):
            put = self._putter(key, "", frozenset(), known, own_inline)
            extra[key] = tree.encode(value, put=put, path=key)
        return objects, extra

    def _putter(
        self,
        name: str,
        kind: str,
        marked: frozenset[int],
        known: dict[tuple[Any, ...], str | None],
        own_inline: bool,
    ) -> Callable[[Tensor, str], str | None]:
        is_all_own = name in self._shop.registry.own

        def put(tensor: Tensor, path: str) -> str | None:
            if tensor.nbytes <= INLINE_BYTES and kind != "module":
                return None
            # Tied weights are one tensor under two names: stored once.
            kind_of = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
            same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *kind_of)
            if tensor.data_ptr() and same in known:
                return known[same]
            is_live = tensor.data_ptr() in marked
            is_own = is_all_own or not (is_live or (kind == "module" and tensor.nbytes > OWN_BUFFER_BYTES))
            if is_own and own_inline:
                return None
            stored = _stored_name(name, path)
            if is_own and self._shop.rank:
                stored = f"!{self._shop.rank}/{stored}"
            while stored in self._tensors:
                stored += "'"
            # A second handle: the script may exchange `.data` while this one is being written.
            self._tensors[stored] = tensor.detach()
            known[same] = stored
            if is_live:
                self._live.add(stored)
            if not is_own:
                self._same.setdefault(name, []).append(stored)
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
        self._check_equal({key: self._tensors[key] for key in self._live & digests.keys()}, digests)
        if not self._is_apart:
            self._check_marks()
        changed = self._shop.gate.found_changed(self._capture)
        if changed and not self._stood_still:
            raise Unclean(changed)

    def _check_equal(self, tensors: dict[str, Tensor], digests: Mapping[str, bytes | None]) -> None:
        wrong = [key for key, tensor in tensors.items() if _cpu_digest(tensor) not in (None, digests[key])]
        if wrong:
            raise Unclean(_owners(wrong))


def _owners(stored: Iterable[str]) -> list[str]:
    """The registered names that these tensors belong to. What is rank 1's own is stored as `!1/...`."""
    return sorted({key.split("/")[1 if key.startswith("!") else 0] for key in stored})


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
