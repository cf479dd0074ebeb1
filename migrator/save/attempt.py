"""One attempt at a save: from a safe point to a committed ckpt.

Large tensors are read from where they are, while the training loop goes on towards
its next step. Three things make that right: the gate holds the next step back, the
change detector compares the tensors with the marks of the safe point, and every tensor
must still have the digest it was written with (`piece_digests`).
If any of them says no, the attempt is thrown away: nothing was committed, nothing
is lost but time.

A training loop that arrives at the gate while a save that is not the last one is
being written is let through as soon as everything not yet written and proven has been
copied to the staging buffer; without memory for that it waits. When all is proven the
gate opens: the sync and the commit need no tensor.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.names import ckpt_name, file_in, own_name, part_name
from migrator.ckpt.part_writer import write_part
from migrator.ckpt.piece_digests import StandStill, TensorsChanged
from migrator.ckpt.rank_record import RankRecord
from migrator.ckpt.tensor_file import digest_of
from migrator.errors import SaveFailed
from migrator.events import log
from migrator.platform import container
from migrator.ranks.shares import Gathering, OnStorage, Plan
from migrator.save.commit import commit, found_committed
from migrator.save.context import SaveContext
from migrator.save.frozen_state import FrozenState, owners
from migrator.save.results import Saved, Unclean
from migrator.save.staging import StagingBuffer
from migrator.state.capture import Capture

SMALL_BYTES = 64 << 20
"""Maximum size in bytes of state that is copied before it is written if the loop is to go on: 1 to 2 ms."""
LONG_STALL_S = 1.0
"""Seconds: where nothing is copied on purpose, a longer wait of the loop is logged."""


class Attempt:
    """Writes one capture. Runs on the saving thread, with the gate shut by `Gate.take`.

    `share` writes the share and the own state of this rank, `help` writes a share that another rank has not written,
    and `commit` makes the ckpt exist. Each raises `Unclean`, `GivenUp` or `StorageError` if it fails. Then this attempt
    has committed nothing.
    """

    def __init__(
        self,
        context: SaveContext,
        capture: Capture,
        *,
        staging: StagingBuffer,
        may_open: bool,
        on_block: Callable[[int, int], None],
        members: tuple[int, ...] = (0,),
    ) -> None:
        self._context = context
        self._capture = capture
        self._staging = staging
        self._may_open = may_open
        self._on_block = on_block
        self._members = members
        self._same: dict[str, list[str]] = {}
        """Of each object the replicated tensors."""
        self._tensors: dict[str, Tensor] = {}
        """What is written: the script's own tensors, or copies of them."""
        self._live: set[str] = set()
        """Those that are read from the script's memory."""
        self._announced: dict[str, bytes | None] = {}
        """The digests of the replicated tensors, as this rank's record gives them to the other ranks."""
        self._is_apart = False
        """Nothing is read from live memory any more; the gate is open."""
        self._stood_still = False
        """The loop stood at the gate or in the safe point while its state was copied aside."""
        self._has_stalled = False
        self._stalls_since_s = math.inf
        """When the loop came to the gate, if it has to wait there for the end of the writing."""
        self._proven: set[str] = set()
        """What is written and was still the same behind that: it is not read any more."""
        self._reading = threading.Lock()
        """Held while a tensor is read beside this thread."""
        self._start_s = time.monotonic()
        self._plan: Plan | None = None
        self._gathering: Gathering | None = None
        self._exchange = context.exchange or OnStorage(context.storage)
        self.name = ckpt_name(context.generation.number, capture.step)

    @property
    def position(self) -> int:
        """How many members come before this rank."""
        members, rank = self._members, self._context.rank
        return members.index(rank) if rank in members else len(members)

    def run(self) -> Saved:
        """All of it, for a job of one process."""
        standing = self.standing()
        if standing is not None:
            return standing
        try:
            self.share()
        except SaveFailed:
            # The commit of a try before, which was given up, may have acted meanwhile.
            standing = self.standing()
            if standing is None:
                raise
            return standing
        return self.commit()

    def standing(self) -> Saved | None:
        """The ckpt of this very step, if there is one."""
        if not self._context.writes:
            return None
        found = found_committed(self._context.storage, self.name)
        return None if found is None else self._saved(found.bytes)

    def share(self) -> None:
        """Write this rank's share of what all have, and what is its own, and say so."""
        state = FrozenState(self._context, self._capture)
        self._tensors, self._live, self._same = state.tensors, state.live, state.same
        self._check_marks()
        plan = self._plan = self._planned()
        same = self._digests_of_same()
        share = plan.share_of(self._context.rank)
        if self._context.size > 1 and self._may_open:
            # Only what is this rank's to write is read from now on.
            self._live &= {*state.own, *(plan.shares[share] if share is not None else ())}
        is_small = sum(self._tensors[key].nbytes for key in self._live) <= SMALL_BYTES
        if self._may_open and is_small and not self._context.gate.loop_waits:
            self._step_apart()
        mine = RankRecord(self._context.rank, plan.at, plan.digest, same, state.objects, state.extra)
        if self._context.size == 1:
            # One file for all: no other rank writes.
            self._context.tries[self.name] += 1
            tries = self._context.tries[self.name]
            # Else what a try before has begun could act on the name later.
            is_new = tries > 1 and self._context.storage.acts_late
            name = part_name(0, 1, rank=0, attempt=tries) if is_new else part_name(0, 1)
            mine = replace(mine, shares={0: self._write(name, list(self._tensors))})
        elif self._context.writes:
            self._context.tries[self.name] += 1
            if share is not None:
                mine = replace(mine, shares={share: self._write_share(plan, share)})
            if state.own:
                name = own_name(self._context.rank, self._context.tries[self.name])
                mine = replace(mine, own=self._write(name, state.own))
        if self._context.size > 1:
            self._check_still()
        self._gathering = Gathering(self._exchange, self.name, plan, mine)
        self._tell()

    def help(self) -> int | None:
        """Write the next share that no rank has written; its number, None if there is none."""
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
        if self._context.size > 1:
            self._exchange.put(self.name, self._context.rank, gathering.mine.to_bytes())

    @property
    def _gathered(self) -> tuple[Gathering, Plan]:
        assert self._gathering is not None
        assert self._plan is not None
        return self._gathering, self._plan

    def look(self) -> Gathering:
        """What the ranks have written so far."""
        gathering, _ = self._gathered
        gathering.look(self._context.size)
        return gathering

    def is_committed(self) -> bool:
        return self._exchange.is_committed(self.name)

    def commit(self) -> Saved:
        """Make it exist. All shares have to be there, and what ranks have registered as their own."""
        gathering, _ = self._gathered
        self._check_own(gathering)
        manifest = gathering.manifest(
            generation=self._context.generation.number,
            job=self._context.job,
            ranks=self._context.size,
            written={
                **_written(self._start_s),
                "continues": self._context.origin[0] if self._context.origin else None,
                **({} if self._may_open else {"leaving": True}),
            },
        )
        found = commit(self._context.storage, manifest)
        saved = self._saved((found or manifest).bytes)
        if found is not None:
            return replace(saved, is_joined=True)  # `joined` is said
        log(
            "committed",
            ckpt=self.name,
            step=saved.step,
            ranks=self._context.size,
            bytes=saved.size,
            took_s=saved.took_s,
        )
        return saved

    def _check_own(self, gathering: Gathering) -> None:
        """A rank that lost what it registered as its own could only be given another rank's, in the next life."""
        own = self._context.registry.own_by_script
        lost = sorted(set(range(self._context.size)) - gathering.records.keys()) if own else []
        if lost:
            raise SaveFailed(
                f"rank {', '.join(map(str, lost))} is lost, and with it what only it had: {', '.join(sorted(own))} "
                "(own=True). A ckpt without that would not be whole, so there is none of this step"
            )

    def _saved(self, size: int) -> Saved:
        return Saved(self.name, self._capture.step, size, time.monotonic() - self._start_s)

    def _planned(self) -> Plan:
        shared = {key: self._tensors[key] for keys in self._same.values() for key in keys}
        members = self._members
        if any(tensor.device.type != "cpu" for tensor in shared.values()):
            # Whether ranks hold the same on their devices is not known, so nothing is divided among them.
            members = members[:1]
        return Plan.of(self._capture.at, members, {key: tensor.nbytes for key, tensor in shared.items()})

    def _digests_of_same(self) -> dict[str, str]:
        """Ranks put their shares together only if they hold the same."""
        if self._context.size == 1:
            return {}
        found = {}
        for name, keys in self._same.items():
            self._announced |= {key: _cpu_digest(self._tensors[key]) for key in keys}
            digests = [(key, (self._announced[key] or b"").hex()) for key in sorted(keys)]
            found[name] = xxhash.xxh3_128(repr(digests).encode()).hexdigest()
        return found

    def _write_share(self, plan: Plan, share: int) -> PartRecord:
        tries = self._context.tries[self.name]
        name = part_name(share, len(plan.shares), rank=self._context.rank, attempt=tries)
        return self._write(name, plan.shares[share])

    def _write(self, name: str, keys: Iterable[str]) -> PartRecord:
        sources = {key: self._reader(key) for key in keys}
        # On a device only the marks show a change.
        live = set() if self._is_apart else self._live & sources.keys()
        read = (key for key in live if self._tensors[key].device.type == "cpu")
        still = StandStill(
            frozenset(read), self._reading, self._check_at_that_moment, self._proven.add, lambda: self._let_go(sources)
        )
        try:
            part = write_part(
                self._context.storage,
                file_in(self.name, name),
                sources,
                after_block=self._after_block,
                # What the script may still change must have been taken by then: the loop when it is let through, and an
                # evaluation that the notice met, which may put other weights in for a while.
                hold=lambda: self._is_apart or (not self._may_open and self._context.gate.someone_waits),
                still=still,
                of_tensors=bool(self._announced),
            )
        except TensorsChanged as error:
            raise Unclean(owners(error.names)) from error
        log("part_written", ckpt=self.name, bytes=part.bytes)
        wrong = [key for key, digest in part.tensor_digests.items() if self._announced.get(key) not in (None, digest)]
        if wrong:  # what was written is not what this rank's record gave to the others
            raise Unclean(owners(wrong))
        self._check_still()
        return part

    def _reader(self, key: str) -> Callable[[], Tensor]:
        return lambda: self._tensors[key]

    def _after_block(self, done: int, total: int) -> None:
        self._on_block(done, total)
        # What is written is proven a moment later: then the loop needs no copies.
        if self._may_open and not self._is_apart and self._context.gate.someone_waits and done < total:
            self._step_apart()

    def _step_apart(self) -> None:
        """The loop waits: copy what it is about to change, and let it go on."""
        start_s = time.monotonic()
        live = {key: self._tensors[key] for key in self._live - self._proven}
        stood_still = self._context.gate.someone_waits
        copies = self._staging.copies(live)
        if copies is None:
            if self._staging.is_off:
                self._stalls_since_s = min(self._stalls_since_s, start_s)
            elif not self._has_stalled:
                self._has_stalled = True
                log("gate_stall", level=logging.WARNING, why="no memory for a copy", step=self._capture.step)
            return
        # The copies hold the state of the safe point if the tensors held it before and after the copying, and if no
        # tensor was swapped out and in again meanwhile. A loop that stands at the gate swaps nothing.
        if not stood_still:
            self._check_equal(live, {key: _cpu_digest(copy) for key, copy in copies.items()})
        self._check_marks()
        with self._reading:
            self._tensors.update(copies)
            self._is_apart, self._stood_still = True, stood_still
        self._context.gate.open()
        log("gate_stall", level=logging.DEBUG, took_s=time.monotonic() - start_s, step=self._capture.step)

    def _let_go(self, keys: Iterable[str]) -> None:
        """A part is proven. If nothing else is to be read, the loop need not wait for the sync and the commit."""
        self._proven.update(keys)
        if self._may_open and not self._is_apart and self._live <= self._proven:
            # A loop that stands still changes nothing. If it does when it is let go, that is nothing to this save.
            stood_still = self._context.gate.someone_waits
            self._check_still()
            self._is_apart, self._stood_still = True, stood_still
            self._context.gate.open()
            stalled_s = time.monotonic() - self._stalls_since_s
            if stalled_s > LONG_STALL_S:
                why = "nothing was copied, because the loop had stepped rarely"
                log("gate_stall", level=logging.WARNING, why=why, took_s=stalled_s, step=self._capture.step)

    def _check_at_that_moment(self) -> None:
        """The moment whose bytes are written is that of the safe point.

        An evaluation may have put other weights in the places of those that are written: then these stand still.
        """
        with self._reading:
            if self._is_apart:
                return
            changed = self._context.capturer.changed(self._capture)
            if changed and not self._context.capturer.have_only_moved(self._capture, changed):
                raise Unclean(changed)

    def _check_marks(self) -> None:
        changed = self._context.capturer.changed(self._capture)
        if changed:
            raise Unclean(changed)

    def _check_still(self) -> None:
        """What is in memory now is what the safe point had."""
        if not self._is_apart:
            self._check_marks()
        changed = self._context.gate.found_changed(self._capture)
        if changed and not self._stood_still:
            raise Unclean(changed)

    def _check_equal(self, tensors: dict[str, Tensor], digests: Mapping[str, bytes | None]) -> None:
        wrong = [key for key, tensor in tensors.items() if _cpu_digest(tensor) not in (None, digests[key])]
        if wrong:
            raise Unclean(owners(wrong))


def _cpu_digest(tensor: Tensor) -> bytes | None:
    """None for a tensor on a device: there only the marks show a change."""
    return digest_of(tensor) if tensor.device.type == "cpu" else None


def _written(start_s: float) -> dict[str, Any]:
    from migrator import __version__

    return {
        "time": time.time(),
        "host": container.pod_name(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "migrator": __version__,
        "took_s": round(time.monotonic() - start_s, 3),
    }
