"""Every crash of the save, commit, retention and recovery protocols: a search through all disks they may leave.

    stories -> calls -> crash images -> recovery -> calls -> crash images -> recovery ...

A story is told by the product's own code on the disk of `tests.support.disk`. Before each of its calls all that a
crash may leave is taken, of the whole machine or of the processes alone, together with what had been promised by
then. On each state that was not seen before a new life begins: it claims its generation, waits for who is still
leaving, loads, trains a step, saves, deletes what is superfluous; and what it found and left is held against the
promises. Its own calls are crash points in their turn.

To a story the storage is a `Machine` with a `migrator.storage.base.Storage`. There are two: `tests.support.disk`,
on which the product's own code for directories runs, and `tests.support.object_store`. On an object store each story
is also told with one request that fails, in each way it may (`Fault`), and then with a crash behind that.

    python -m tests.support.crashes --states 1000000
    python -m tests.support.crashes --states 1000000 --only "a request fails"

The price: ranks are threads that are let go one call at a time, in an order that a seed decides. So of the orders
of calls of several writers there are samples here, not all; those of their words are all looked at in
`tests.support.model`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from migrator.ckpt import catalog, generations, leaving_mark, names, retention
from migrator.ckpt.generations import Generation
from migrator.ckpt.names import MANIFEST, ckpt_name, parse_ckpt_name
from migrator.errors import CkptCorrupt, NoUsableCkpt, SaveFailed, StorageError
from migrator.loop.gate import Gate
from migrator.save.attempt import Attempt
from migrator.save.context import SaveContext
from migrator.save.staging import StagingBuffer
from migrator.session import restore
from migrator.session.restore_plan import Loaded
from migrator.state.capture import Capturer
from migrator.state.registry import Registry
from migrator.storage.base import Storage
from migrator.storage.object_storage import Conditions
from tests.support.disk import Cut, Disk, instead_of_os
from tests.support.object_store import Fault, Half, ObjectStore, Time, faults
from tests.support.volume import mark_leaving

GRACE_S = 2.0
LONG_GRACE_S = 300.0
_RANDOM = {"torch": torch.zeros(8, dtype=torch.uint8)}
JOB = "job"


class Broken(AssertionError):  # noqa: N818 - reads better in a report
    """A promise was not kept."""


@dataclass(frozen=True)
class Promised:
    """What somebody was told, and what happened to the volume since that no protocol can undo."""

    safe: tuple[str, ...] = ()
    """The ckpts that were reported as saved, or as loaded, in order."""
    rotten: frozenset[str] = frozenset()
    """Those whose bytes were changed on the volume afterwards."""

    def kept(self, name: str) -> Promised:
        return self if name in self.safe else replace(self, safe=tuple(sorted({*self.safe, name}, key=_reach)))

    def least(self, keep: int) -> str | None:
        """The ckpt that a load has to find, or one that has come further."""
        there = [name for name in self.safe[-keep:] if name not in self.rotten]
        return there[-1] if there else None


def _age(name: str) -> tuple[int, int]:
    found = parse_ckpt_name(name)
    assert found is not None
    return found


def _reach(name: str) -> tuple[int, int]:
    """How far it was trained: the later life's, if two have come as far."""
    generation, step = _age(name)
    return step, generation


def value_of(name: str) -> float:
    """What all tensors of a ckpt hold, and its metrics say."""
    generation, step = _age(name)
    return float(generation * 1000 + step)


class Toy:
    """What is registered: large tensors that all ranks hold, and something of each rank's own."""

    def __init__(self, rank: int = 0) -> None:
        self.model = nn.Module()
        for i in range(4):
            self.model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(80), requires_grad=False))
        self.metrics: dict[str, Any] = {"value": 0.0, "rank": rank}
        self.registry = Registry()
        self.registry.add("model", self.model)
        self.registry.add("metrics", self.metrics)

    def set(self, value: float) -> None:
        for tensor in self.model.parameters():
            tensor.fill_(value)
        self.metrics["value"] = value

    def values(self) -> set[float]:
        return {value for tensor in self.model.parameters() for value in tensor.tolist()} | {self.metrics["value"]}


class Told:
    """Where a story writes down what it has promised; the disk's images are taken with it.

    What a crash may leave before a call is among what it may leave before the next one, unless the call makes
    something durable or changes the bytes of a file: every change but these only adds to what may be lost. So
    images are taken before those calls, and where more has been promised; `takes_all` shows that nothing is missed.
    """

    takes_all = False

    def __init__(self, promised: Promised, take: Callable[[Promised, bool], None], *, first_life: int = 0) -> None:
        self.promised = promised
        self.lives = itertools.count(first_life)
        self.calls = 0
        self._take = take
        self._taken: Promised | None = None
        self._claimed: set[int] = set()

    def before(self, call: str, path: str) -> None:
        self.calls += 1
        has_more = call in ("sync", "write") or self.promised != self._taken or self.takes_all
        self._taken = self.promised
        self._take(self.promised, has_more)

    def end(self) -> None:
        """As after the last call."""
        self._take(self.promised, True)

    def claimed(self, number: int) -> None:
        if number in self._claimed:
            raise Broken(f"two lives have the number {number}")
        self._claimed.add(number)

    def safe(self, name: str) -> None:
        self.promised = self.promised.kept(name)


class Machine(Protocol):
    """A storage that can crash: what processes do to it, and what may be left."""

    now_s: float
    sampled: int
    has_links: bool

    def storage(self, job: str) -> Storage:
        """What a process works with."""

    def mount(self, before: Callable[[str, str], None]) -> None:
        """From now on this thread is a process there. `before` is called before each call that has an effect."""

    def sleep(self, seconds: float) -> None:
        """A process waits; a crash may come, and others go on."""

    def images(self) -> Iterator[Machine]:
        """Every state that a crash of the storage at this moment may leave, each with nothing pending."""

    def killed(self) -> Machine:
        """The state that is left if only its processes die: what is pending may still be lost later."""

    def key(self) -> int:
        """The same for states that no recovery can tell apart."""

    def pending_key(self) -> int:
        """The same for states that besides may lose the same."""

    def files(self) -> dict[str, bytes]:
        """All there is, by path, hidden files too."""

    def with_changed_byte(self, path: str) -> Machine:
        """The same with one bit of a file changed."""


Answer = TypeVar("Answer")


def _again(machine: Machine, act: Callable[[], Answer]) -> Answer:
    """What fails because a request failed is done once more, as the product or a new pod does."""
    try:
        return act()
    except (StorageError, SaveFailed):
        if not _forgives(machine):
            raise
    return act()


def _forgives(machine: Machine) -> bool:
    return isinstance(machine, ObjectStore) and machine.forgives()


class Life:
    """One life of the job, as far as the volume sees it. Of several ranks this is one."""

    def __init__(
        self,
        machine: Machine,
        told: Told,
        *,
        keep: int,
        rank: int = 0,
        size: int = 1,
        toy: Toy | None = None,
        poll_s: float = 2.0,
    ) -> None:
        self.storage = machine.storage(JOB)
        self._machine = machine
        self._poll_s = poll_s
        self._told = told
        self._keep = keep
        self._rank = rank
        self._size = size
        self.toy = toy or Toy(rank)
        self.bad: frozenset[str] = frozenset()
        self.step = 0
        self.loaded: str | None = None

    def begin(self) -> Generation:
        """What `listening()` and `load_ckpt()` do."""
        return _again(self._machine, self._begin)

    def _begin(self) -> Generation:
        self.storage.check()
        # No two records are equal: they name the process, and the time.
        generation = generations.claim(self.storage, fresh=False, about={"life": next(self._told.lives)})
        self._told.claimed(generation.number)
        leaving_mark.wait_for_leaving(
            self.storage,
            generation.lineage,
            clock=lambda: self._machine.now_s,
            sleep=self._machine.sleep,
            poll_s=self._poll_s,
        )
        names = catalog.furthest_first(self.storage, generation)
        self.work_in(generation)
        if names:
            self._load(names)
        return generation

    def _load(self, names: list[str]) -> None:
        self.toy.set(float("nan"))

        def note(name: str) -> None:
            self.bad |= {name}

        def load(name: str) -> Loaded:
            return restore.load(self.storage, name, self.toy.registry, rank=self._rank, size=self._size)

        loaded = restore.newest_usable(names, load, where="the volume", on_bad=note)
        self.loaded, self.step = loaded.ckpt, loaded.step
        self.context.origin[:] = [loaded.ckpt]
        if self.toy.values() != {value_of(loaded.ckpt)}:
            raise Broken(f"{loaded.ckpt} was loaded as {self.toy.values()}")
        self._told.safe(loaded.ckpt)

    def work_in(self, generation: Generation) -> None:
        """All that a save needs."""
        self.generation = generation
        self.capturer = Capturer(self.toy.registry)
        self.gate = Gate(self.capturer)
        self.context = SaveContext(
            self.storage,
            generation,
            JOB,
            self.toy.registry,
            self.capturer,
            self.gate,
            rank=self._rank,
            size=self._size,
        )

    def attempt(self, members: Sequence[int] = (0,)) -> Attempt:
        """One step is trained; this is its save."""
        self.step += 1
        self.toy.set(value_of(ckpt_name(self.generation.number, self.step)))
        # Random states are large, and the same in every ckpt here.
        self.gate.publish(replace(self.capturer.take(self.step, None, full=True), random=_RANDOM))
        self.gate.announce()
        capture = self.gate.take(0)
        assert capture is not None
        attempt = Attempt(
            self.context,
            capture,
            staging=StagingBuffer(),
            may_open=False,
            on_block=lambda done, total: None,
            members=tuple(members),
        )
        self.gate.open()
        self.gate.unpin(capture)
        return attempt

    def save(self, *, is_leaving: bool = False) -> str:
        """A whole save by one rank, and what comes with it."""
        if is_leaving:
            self.mark(GRACE_S)
        name = self.write(again_at=self.step if is_leaving else self.step + 1)
        if is_leaving:
            self.unmark()
        self.retire()
        return name

    def write(self, again_at: int) -> str:
        """A save alone. One that fails is made again `again_at` a step."""
        steps = iter([self.step, again_at])

        def write() -> str:
            self.step = next(steps)
            return self.attempt().run().ckpt

        name = _again(self._machine, write)
        # Its last look came behind its last request. A directory has a sync there, and a sweep may come first.
        if isinstance(self._machine, ObjectStore) and name in _torn(self._machine):
            raise Broken(f"{name} was reported as saved, without its parts")
        self._told.safe(name)
        return name

    def mark(self, grace_s: float) -> None:
        _again(self._machine, lambda: mark_leaving(self.storage, self.generation.number, grace_s))

    def unmark(self) -> None:
        _again(self._machine, lambda: leaving_mark.unmark_leaving(self.storage, self.generation.number))

    def give_up(self) -> None:
        """A save that is ended before its commit, for a newer step."""
        try:
            self.attempt().share()
        except StorageError:
            if not _forgives(self._machine):
                raise

    def retire(self, *, sweeps: bool = True) -> None:
        retention.retire(self.storage, self.generation, keep=self._keep, bad=self.bad, sweeps=sweeps)


class Crew:
    """Processes that are let go one call at a time, in an order that a seed decides; some die on the way."""

    def __init__(
        self,
        machine: Machine,
        told: Told,
        *,
        seed: int,
        dies: Mapping[int, int] = MappingProxyType({}),
        watch: Callable[[int, str, str], None] = lambda me, call, path: None,
    ) -> None:
        self._machine = machine
        self._told = told
        self._watch = watch
        self.dice = random.Random(seed)
        self._dies = dies
        self._calls: Counter[int] = Counter()
        self._turn = threading.Condition()
        self._runnable: list[int] = []
        self._now = -1
        self.failures: list[BaseException] = []

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        self._runnable = list(range(len(bodies)))
        threads = [threading.Thread(target=self._live, args=item) for item in enumerate(bodies)]
        for thread in threads:
            thread.start()
        with self._turn:
            self._next()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a process of the story hangs"
        if self.failures:
            raise self.failures[0]

    def _live(self, me: int, body: Callable[[], None]) -> None:
        self._machine.mount(lambda call, path: self._before(me, call, path))
        try:
            self._await(me)
            body()
        except Cut:
            pass
        except BaseException as error:
            self.failures.append(error)
        with self._turn:
            self._runnable.remove(me)
            self._next()

    def pause(self, me: int) -> None:
        """Let others go first."""
        with self._turn:
            self._next()
        self._await(me)

    def _before(self, me: int, call: str, path: str) -> None:
        self.pause(me)
        if self._calls[me] == self._dies.get(me, -1):
            raise Cut(call)
        self._calls[me] += 1
        self._watch(me, call, path)
        self._told.before(call, path)

    def _next(self) -> None:
        if self._runnable:
            self._now = self.dice.choice(self._runnable)
        self._turn.notify_all()

    def _await(self, me: int) -> None:
        with self._turn:
            while self._now != me:
                if not self._turn.wait(60):
                    raise AssertionError("nobody lets this process go on")


# Stories.

Story = Callable[["Machine", Told, "Setting", int], None]


@dataclass(frozen=True)
class Setting:
    """One search."""

    story: Story
    keep: int = 2
    ranks: int = 1
    rots: bool = False
    """Each image is also looked at with a changed bit in its newest ckpt."""
    seeds: int = 1
    machine: Callable[[], Machine] = Disk
    fails: bool = False
    """Each story is told once more for each request and each way in which it may fail."""

    @property
    def name(self) -> str:
        more = [f"keep {self.keep}"]
        more += [f"{self.ranks} writers"] if self.ranks > 1 else []
        more += ["rot"] if self.rots else []
        more += [] if self.machine is Disk else [self.machine.__name__.replace("_", " ")]
        more += ["a request fails"] if self.fails else []
        return f"{self.story.__name__.replace('_', ' ')}, {', '.join(more)}"


def without_links() -> Disk:
    disk = Disk()
    disk.has_links = False
    return disk


def object_store() -> ObjectStore:
    return ObjectStore()


def ignores_conditions() -> ObjectStore:
    return ObjectStore(Conditions.IGNORED)


def refuses_conditions() -> ObjectStore:
    return ObjectStore(Conditions.REFUSED)


def that_does_not_sync() -> Disk:
    disk = Disk()
    disk.obeys = False
    return disk


def one_after_the_other(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """Periodic saves, one given up, a last one; then a second life with the same."""
    machine.mount(told.before)
    for _ in range(2):
        life = Life(machine, told, keep=setting.keep)
        life.begin()
        life.save()
        life.save()
        life.give_up()
        life.save()
        life.save(is_leaving=True)


def saved_once(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """The very first start, and the first save."""
    machine.mount(told.before)
    life = Life(machine, told, keep=setting.keep)
    life.begin()
    life.save()


def killed_while_leaving(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """A life dies in its last save; the next one waits for it, goes on, and is stopped as well."""
    machine.mount(told.before)
    life = Life(machine, told, keep=setting.keep)
    life.begin()
    life.save()
    life.mark(GRACE_S)
    life.give_up()
    for _ in range(2):
        life = Life(machine, told, keep=setting.keep)
        life.begin()
        life.save(is_leaving=True)


def together(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """Ranks put one ckpt together, twice, then a last one; a rank that sees it complete commits it; one may die."""
    machine.mount(told.before)
    first = Life(machine, told, keep=setting.keep)
    generation = first.begin()
    dice = random.Random(seed)
    ranks = [
        Life(machine, told, keep=setting.keep, rank=rank, size=setting.ranks, toy=Toy(rank))
        for rank in range(setting.ranks)
    ]
    for rank in ranks:
        rank.work_in(generation)
        rank.step = first.step
    alive = set(range(setting.ranks))
    for number in range(3):
        alive = _save_together(machine, told, ranks, alive, dice, is_leaving=number == 2)
    machine.mount(told.before)
    first.unmark()


def _save_together(
    machine: Machine, told: Told, ranks: list[Life], alive: set[int], dice: random.Random, *, is_leaving: bool
) -> set[int]:
    """One save by those who are alive; returns who still is."""
    dies = {dice.choice(sorted(alive)): dice.randrange(1, 40)} if dice.random() < 0.7 and len(alive) > 1 else {}
    crew = Crew(machine, told, seed=dice.randrange(1 << 30), dies=dies)
    done: set[int] = set()

    def save(me: int) -> None:
        if me not in alive:
            return
        if me == 0 and is_leaving:
            ranks[me].mark(GRACE_S)
        try:
            _finish(ranks[me].attempt(sorted(alive)), crew, me, told)
        except (StorageError, SaveFailed):
            if not _forgives(machine):
                raise
            return  # it ends
        done.add(me)

    crew.run([partial(save, me) for me in range(len(ranks))])
    machine.mount(told.before)
    if done:
        ranks[min(done)].retire(sweeps=not is_leaving)
    return done


def _finish(attempt: Attempt, crew: Crew, me: int, told: Told, gives_up: Callable[[], bool] = lambda: False) -> None:
    """As ranks do it; but when one helps or commits is not told by clocks: each may at any time."""
    try:
        attempt.share()
    except SaveFailed:
        pass  # committed by others meanwhile
    while True:
        if attempt.is_committed():
            standing = attempt.standing()
            assert standing is not None
            told.safe(attempt.name)
            return
        missing = attempt.look().missing()
        if not missing:
            if crew.dice.random() < 0.5:
                told.safe(attempt.commit().ckpt)
                return
        elif crew.dice.random() < 0.3:
            try:
                attempt.help()
            except SaveFailed:
                continue  # committed by others meanwhile
        if gives_up():
            return
        crew.pause(me)


def overlapping(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """A life that is thought dead saves and deletes on while the next one begins, loads, saves and deletes."""
    machine.mount(told.before)
    old = Life(machine, told, keep=setting.keep)
    old.begin()
    old.save()
    old.save()
    new = Life(machine, told, keep=setting.keep, toy=Toy())
    fence = Fence(machine, old.generation.number)
    crew = Crew(machine, told, seed=seed, watch=lambda me, call, path: fence.look(call, path) if me == 0 else None)

    def go_on() -> None:
        try:
            for _ in range(2):
                old.save()
            old.save(is_leaving=True)
        except (StorageError, SaveFailed):
            pass  # its files were swept: it is told so, and promises nothing

    def begin() -> None:
        new.begin()
        new.save()
        new.save()

    crew.run([go_on, begin])


def overlapping_ranks(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """Two ranks that are thought dead put one more ckpt together while the next life sweeps."""
    machine.mount(told.before)
    first = Life(machine, told, keep=setting.keep)
    generation = first.begin()
    ranks = [Life(machine, told, keep=setting.keep, rank=rank, size=2, toy=Toy(rank)) for rank in range(2)]
    for rank in ranks:
        rank.work_in(generation)
    new = Life(machine, told, keep=setting.keep, toy=Toy())
    crew = Crew(machine, told, seed=seed)
    ended: set[int] = set()

    def go_on(me: int) -> None:
        try:
            _finish(ranks[me].attempt((0, 1)), crew, me, told, gives_up=lambda: bool(ended))
        except (StorageError, SaveFailed, CkptCorrupt):
            pass  # its files were swept: it is told so, and promises nothing
        ended.add(me)

    def begin() -> None:
        new.begin()
        new.save()
        new.save()

    crew.run([partial(go_on, 0), partial(go_on, 1), begin])


def replaced_while_leaving(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """The pod that is to replace another one begins while that one still saves."""
    machine.mount(told.before)
    old = Life(machine, told, keep=setting.keep)
    old.begin()
    old.save()
    old.mark(LONG_GRACE_S)
    new = Life(machine, told, keep=setting.keep, toy=Toy())
    crew = Crew(machine, told, seed=seed)

    def leave() -> None:
        old.write(again_at=old.step)
        old.unmark()
        old.retire()

    def begin() -> None:
        new.begin()
        if new.loaded is None or new.step < old.step:
            raise Broken(f"{new.loaded} was loaded, and nobody waited for step {old.step}")
        new.save()

    crew.run([leave, begin])


def begun_twice(machine: Machine, told: Told, setting: Setting, seed: int) -> None:
    """Two lives begin at the same moment, each thinks that it is the only one, and both save."""
    machine.mount(told.before)
    first = Life(machine, told, keep=setting.keep)
    first.begin()
    first.save()
    lives = [Life(machine, told, keep=setting.keep, toy=Toy()) for _ in range(2)]

    def live(me: int) -> None:
        life = lives[me]
        try:
            life.begin()
            life.save()
            life.save()
        except (StorageError, SaveFailed):
            pass  # what it wrote was swept by the later one: it is told so, and promises nothing

    Crew(machine, told, seed=seed).run([partial(live, me) for me in range(2)])


class Fence:
    """What a life may still do when there is a later one: write what is its own, and end the deletion it is in."""

    def __init__(self, machine: Machine, generation: int) -> None:
        self._machine = machine
        self._generation = generation
        self._in_hand: str | None = None
        self._is_up = False

    def look(self, call: str, path: str) -> None:
        if call == "rename" and path.endswith(f"/{MANIFEST}") and path.strip("/") in self._machine.files():
            raise Broken(f"{path} is written over")
        # A ckpt ends with its manifest, what is none by being moved aside.
        found = _ENDED.fullmatch(path) if call == "unlink" else _MOVED.fullmatch(path) if call == "rename" else None
        if found is None:
            return
        numbers = [int(record[1]) for record in map(_RECORD.fullmatch, self._machine.files()) if record]
        was_up, self._is_up = self._is_up, max(numbers) > self._generation
        # Between a look at the fence and the deletion it may have come up: of one ckpt, never of a second one.
        if was_up and found[1] != self._in_hand:
            raise Broken(f"{path} is deleted by a life that is fenced")
        self._in_hand = found[1]


_ENDED = re.compile(rf"/{JOB}/([0-9-]+)/{re.escape(MANIFEST)}")
_MOVED = re.compile(rf"/{JOB}/\.([0-9-]+)\.[0-9a-f]+\.tmp")
_RECORD = re.compile(rf"{JOB}/{names.GENERATIONS}/([0-9]+)\.json")


# The search.


@dataclass
class Seen:
    """What a search has visited."""

    states: int = 0
    levels: Counter[int] = field(default_factory=Counter)
    """How many of them behind which crash in a row."""
    calls: int = 0
    """The calls that a crash came before."""
    recoveries: int = 0
    walked_back: int = 0
    sampled: int = 0
    """How often there were too many combinations of names for all of them."""
    told: int = 0
    """How often a story was told."""
    untold: int = 0
    """Requests that were to fail, and did not, as there were enough states."""
    took_s: float = 0.0

    def __add__(self, other: Seen) -> Seen:
        mine, others = vars(self), vars(other)
        return Seen(**{key: mine[key] + others[key] for key in mine})


class Search:
    """All crash images of one setting, and of the recoveries on them, up to a number of states."""

    def __init__(
        self, setting: Setting, *, states: int, depth: int = 2, at_most: int | None = None, seed: int = 0
    ) -> None:
        self._setting = setting
        self._seed = seed
        """Of the order in which states are recovered from, and so of those that a short search gets to."""
        self._states = states
        self._depth = depth
        self._at_most = at_most
        """Recoveries; a sample then stands for all."""
        self._keys: set[int] = set()
        self._toy = Toy()
        self.seen = Seen()

    def run(self) -> Seen:
        start_s = time.monotonic()
        with quick():
            self._explore(self._tell(), 0)
        self.seen.took_s = time.monotonic() - start_s
        return self.seen

    def _explore(self, found: list[tuple[Machine, Promised]], level: int) -> None:
        """Recoveries on all of these, and on what crashes of these recoveries leave, while there is room for more."""
        # Not in the story's order: a search that ends early has looked at all of it.
        random.Random(self._seed).shuffle(found)
        for number, (machine, promised) in enumerate(found):
            if self._at_most is not None and self.seen.recoveries >= self._at_most:
                return
            has_room = len(self._keys) < self._states or (level == 0 and number < 2)
            after: list[tuple[Machine, Promised]] | None = [] if has_room and level + 1 < self._depth else None
            self._recover(machine, promised, level, after)
            self._explore(after or [], level + 1)

    def images(self) -> list[Machine]:
        """Those of the story alone."""
        with quick():
            return [machine for machine, _ in self._tell()]

    def _tell(self) -> list[tuple[Machine, Promised]]:
        found: list[tuple[Machine, Promised]] = []
        ways: list[tuple[int, Fault]] = []
        dice = random.Random(self._seed)
        for seed in range(self._setting.seeds):
            machine = self._tell_one(seed, None, found)
            if isinstance(machine, ObjectStore) and self._setting.fails:
                ways += [(seed, fault) for fault in faults(machine.requests, dice)]
        dice.shuffle(ways)
        without = len(self._keys)
        for number, (seed, fault) in enumerate(ways):
            if len(self._keys) - without >= self._states:
                self.seen.untold = len(ways) - number
                break
            try:
                self._tell_one(seed, fault, found)
            except BaseException as error:
                _note(error, f"story {seed}: {fault}")
                raise
        return found

    def _tell_one(self, seed: int, fault: Fault | None, found: list[tuple[Machine, Promised]]) -> Machine:
        machine = self._setting.machine()
        if isinstance(machine, ObjectStore):
            machine.fault = fault
            machine.told_as = f"story {seed}: {fault}"
        told = Told(Promised(), partial(self._take, machine, 0, found))
        self._setting.story(machine, told, self._setting, seed)
        told.end()
        self.seen.told += 1
        self.seen.calls += told.calls
        self.seen.sampled += machine.sampled
        return machine

    def _take(
        self,
        machine: Machine,
        level: int,
        found: list[tuple[Machine, Promised]],
        promised: Promised,
        takes_images: bool,
    ) -> None:
        """The state behind a kill, and those behind a crash of the machine."""
        if isinstance(machine, ObjectStore) and machine.fault is not None and not machine.has_failed:
            return  # as when nothing fails
        if self._is_new(machine.pending_key(), promised, level):
            found.append((machine.killed(), promised))
        for image in machine.images() if takes_images else ():
            if self._is_new(image.key(), promised, level):
                found.append((image, promised))
            newest = _newest_part(image) if self._setting.rots and level == 0 else None
            if newest is not None:
                changed = image.with_changed_byte(newest)
                less = replace(promised, rotten=promised.rotten | {newest.split("/")[1]})
                if self._is_new(changed.key(), less, level):
                    found.append((changed, less))

    def _is_new(self, key: int, promised: Promised, level: int) -> bool:
        key = hash((key, promised))
        if key in self._keys:
            return False
        self._keys.add(key)
        self.seen.states += 1
        self.seen.levels[level] += 1
        return True

    def _recover(
        self, machine: Machine, promised: Promised, level: int, after: list[tuple[Machine, Promised]] | None
    ) -> None:
        """A new life on what the crash left."""
        take = partial(self._take, machine, level + 1, after) if after is not None else lambda promised, takes: None
        told = Told(promised, take, first_life=100 * (level + 1))
        machine.mount(told.before)
        self.seen.recoveries += 1
        try:
            _check_ckpts_are_whole(machine, promised, self._setting.keep)
            life = self._live(machine, told)
            if life is not None and isinstance(machine, ObjectStore) and machine.settle():
                # What acts behind the back of a life is found by the next one.
                _check_ckpts_are_whole(machine, told.promised, self._setting.keep)
                life = self._live(machine, told)
            if life is None:
                return
            told.end()
            _check_nothing_is_left(machine, life, self._setting.keep)
        except BaseException as error:
            if isinstance(machine, ObjectStore):
                _note(error, f"{machine.told_as}; behind crash {level + 1}")
            raise
        finally:
            if after is not None:
                self.seen.calls += told.calls

    def _live(self, machine: Machine, told: Told) -> Life | None:
        life = self._begin(machine, told)
        if life is None:
            return None
        self.seen.walked_back += bool(life.bad)
        life.save()
        if any(name.endswith(".leaving") for name in machine.files()):
            # The life that set the mark counts as dead only when the mark is much older than its grace.
            machine.now_s += leaving_mark.STALE * LONG_GRACE_S
            life.save()
        return life

    def _begin(self, machine: Machine, told: Told) -> Life | None:
        """It starts from what was promised, or newer; None if there is nothing left to start from, and it says so."""
        promised, keep = told.promised, self._setting.keep
        least = promised.least(keep)
        # Nobody else goes on meanwhile: it need not look often.
        life = Life(machine, told, keep=keep, toy=self._toy, poll_s=LONG_GRACE_S / 3)
        try:
            life.begin()
        except NoUsableCkpt as error:
            if least is not None or not promised.rotten:
                raise Broken(f"{least} was safe, and now: {error}") from error
            return None
        except (StorageError, CkptCorrupt) as error:
            raise Broken(f"a new life could not begin: {error}") from error
        # What lies behind a hole in the records may be none of ours: there the later life comes first.
        order = _reach if least is None or _age(least)[0] in life.generation.proven else _age
        if least is not None and (life.loaded is None or order(life.loaded) < order(least)):
            raise Broken(f"{least} was safe, and {life.loaded} was loaded")
        return life


@contextmanager
def quick() -> Iterator[None]:
    """The model's own kernel, one thread a process, small shares, random states that are none.

    Nothing that differs from run to run is written.
    """
    logger = logging.getLogger("migrator")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with (
        instead_of_os(),
        patch("migrator.ckpt.tensor_file._in_threads", _at_once),
        patch("migrator.ranks.shares.SHARE_BYTES", 1),
        patch("migrator.save.attempt._written", lambda start_s: {}),
        patch("migrator.session.restore_plan._check_random", lambda name, states: None),
        patch("migrator.state.random_state.derived", lambda state, rank: state),
        patch("migrator.storage.object_storage.time", Time),
        patch("migrator.storage.object_storage.random", Half),
    ):
        try:
            yield
        finally:
            logger.setLevel(level)


def _at_once(call: Callable[[int], int], count: int, threads: int) -> Iterator[int]:
    """Stands for the threads that read: the model disk knows one thread a process."""
    yield from map(call, range(count))


def _newest_part(machine: Machine) -> str | None:
    """A part of the newest ckpt."""
    files = machine.files()
    names = sorted(path.split("/")[1] for path in files if path.endswith(f"/{MANIFEST}"))
    parts = [path for path in files if names and path.startswith(f"{JOB}/{names[-1]}/part-")]
    return parts[0] if parts else None


def _check_ckpts_are_whole(machine: Machine, promised: Promised, keep: int) -> None:
    """What has a manifest has all that it names."""
    for name, error in _torn(machine).items():
        if name not in promised.rotten and not _may_be_torn(machine, name, promised.least(keep)):
            raise Broken(f"a ckpt that is none: {error}") from error


def _torn(machine: Machine) -> dict[str, CkptCorrupt]:
    """What has a manifest, and not all that it names."""
    storage = machine.storage(JOB)
    found = {}
    for name in catalog.ckpts(storage, frozenset(generations.numbers(storage))):
        try:
            catalog.whole(storage, name)
        except CkptCorrupt as error:
            found[name] = error
    return found


def _may_be_torn(machine: Machine, name: str, least: str | None) -> bool:
    """Nothing is atomic over two objects. So the last request of a writer may leave a manifest without its parts:

    of a life that is fenced, while a later one sweeps; or of a request that was given up and acts late. That is never
    the ckpt which a load has to find. Each load finds out, and takes the one before it.
    """
    if not isinstance(machine, ObjectStore) or name == least:
        return False
    return _age(name)[0] < max(generations.numbers(machine.storage(JOB))) or machine.has_acted_late


def _check_nothing_is_left(machine: Machine, life: Life, keep: int) -> None:
    """Records of generations, and of at most `keep` ckpts the manifests and the parts they name."""
    # A ckpt that was found bad stays as it is, to be looked at, until enough newer ones are whole.
    bad = life.bad
    if isinstance(machine, ObjectStore):
        bad = bad.union(name for name in _torn(machine) if _may_be_torn(machine, name, None))
    files = {path for path in machine.files() if path.split("/")[1] not in bad}
    expected = {path for path in files if path.startswith(f"{JOB}/{names.GENERATIONS}/") and path.endswith(".json")}
    kept = [name for name in catalog.ckpts(life.storage, life.generation.lineage) if name not in bad]
    for name in kept:
        expected.add(f"{JOB}/{name}/{MANIFEST}")
        expected |= {f"{JOB}/{name}/{part.name}" for part in catalog.whole(life.storage, name).parts}
    if not machine.has_links:
        # Who dies between claiming a number and using it leaves a hole; behind it nothing is known to be ours.
        kept = [name for name in kept if _age(name)[0] in life.generation.proven]
        files = {path for path in files if _generation_of(path) in {None, *life.generation.proven}} | expected
    # A directory that had come further may be committed by a life that was thought dead. It goes once it is passed.
    furthest = max(map(_reach, kept))
    further = {name for name in catalog.uncommitted(life.storage, life.generation.proven) if _reach(name) > furthest}
    files = {path for path in files if path.split("/")[1] not in further}
    if files != expected:
        raise Broken(f"left behind: {sorted(files ^ expected)}")
    if len(kept) > keep:
        raise Broken(f"{kept} are kept")


def _generation_of(path: str) -> int | None:
    found = re.match(rf"{JOB}/(?:{names.GENERATIONS}/)?\.?([0-9]{{6}})[-.]", path)
    return int(found[1]) if found else None


SETTINGS = [
    Setting(saved_once),
    *(Setting(one_after_the_other, keep=keep) for keep in (1, 2, 3)),
    *(Setting(one_after_the_other, keep=keep, rots=True) for keep in (1, 2, 3)),
    *(Setting(killed_while_leaving, keep=keep) for keep in (1, 2)),
    Setting(killed_while_leaving, rots=True),
    *(Setting(replaced_while_leaving, keep=keep, seeds=8) for keep in (1, 2)),
    *(Setting(begun_twice, keep=keep, seeds=8) for keep in (1, 2)),
    *(Setting(overlapping, keep=keep, seeds=8) for keep in (1, 2, 3)),
    Setting(overlapping_ranks, keep=1, ranks=2, seeds=24),
    *(Setting(together, keep=keep, ranks=2, seeds=4) for keep in (1, 2)),
    *(Setting(together, keep=keep, ranks=4, seeds=2) for keep in (1, 3)),
    Setting(together, ranks=2, rots=True, seeds=2),
    *(Setting(story, machine=without_links) for story in (one_after_the_other, killed_while_leaving, overlapping)),
    Setting(together, ranks=2, machine=without_links, seeds=2),
    Setting(one_after_the_other, machine=object_store, rots=True),
    Setting(killed_while_leaving, machine=object_store),
    *(Setting(story, machine=object_store, seeds=8) for story in (replaced_while_leaving, begun_twice, overlapping)),
    Setting(together, ranks=2, machine=object_store, seeds=4),
    *(
        Setting(story, machine=machine, seeds=seeds, fails=True)
        for machine in (object_store, ignores_conditions, refuses_conditions)
        for story, seeds in (
            (one_after_the_other, 1),
            (killed_while_leaving, 1),
            (replaced_while_leaving, 8),
            (begun_twice, 8),
            (overlapping, 8),
        )
    ),
    Setting(overlapping, keep=1, machine=object_store, seeds=8, fails=True),
    *(
        Setting(together, ranks=2, machine=machine, seeds=4, fails=True)
        for machine in (object_store, ignores_conditions)
    ),
]


def visit(setting: Setting, states: int, depth: int, seed: int = 0) -> Seen:
    """So many states at least: where there are not so many behind `depth` crashes in a row, behind one more."""
    torch.set_num_threads(1)
    try:
        seen = Search(setting, states=states, depth=depth, seed=seed).run()
        return seen if seen.states >= states else visit(setting, states, depth + 1, seed)
    except BaseException as error:
        _note(error, f"in the search {setting.name!r}, --seed {seed}")
        raise


def _note(error: BaseException, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)


def _end_with_parent() -> None:
    """The kernel ends this process with the one that started it, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=100_000, help="so many distinct states at least (100,000)")
    parser.add_argument(
        "--depth", type=int, default=2, help="crashes in a row (2); more where there are too few states"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which states are looked at (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="searches at the same time")
    parser.add_argument("--only", default="", help="the searches whose names have this in them (all)")
    arguments = parser.parse_args()
    settings = [setting for setting in SETTINGS if arguments.only in setting.name]
    if not settings:
        parser.error(f"no search has {arguments.only!r} in its name")
    each = -(-arguments.states // len(settings))
    start_s = time.monotonic()
    total = Seen()
    print(f"{'search':70} {'states':>9} {'crashes':>9} {'recoveries':>10} {'walked back':>11} {'seconds':>7}")
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), initializer=_end_with_parent) as pool:
        for setting, seen in zip(
            settings,
            pool.map(visit, settings, repeat(each), repeat(arguments.depth), repeat(arguments.seed)),
            strict=True,
        ):
            total += seen
            print(_line(setting.name, seen), flush=True)
    print(_line("all", total))
    took_s = time.monotonic() - start_s
    print(f"behind crash 1, 2, ...: {', '.join(str(total.levels[level]) for level in sorted(total.levels))} states")
    print(f"stories told {total.told} times; {total.untold} requests that may fail were left out")
    print(f"names sampled before {total.sampled} calls; {took_s:.0f} s; no promise broken")
    return 0 if total.states >= arguments.states else 1


def _line(name: str, seen: Seen) -> str:
    return f"{name:70} {seen.states:9} {seen.calls:9} {seen.recoveries:10} {seen.walked_back:11} {seen.took_s:7.0f}"


if __name__ == "__main__":
    sys.exit(main())
