"""One life of the job in this process: from `listening()` to the end of the process, or to `close()`.

The session only makes the parts, hands each one what it needs, and forwards the calls of the script.
Everything a save will need is imported and made here, before any notice comes.

The order of `__init__` counts:

1. SIGTERM and the signal file are watched before anything that may wait, because a notice comes once.
2. The generation begins: alone, or as rank 0 for all ranks.
3. The parts are made. Nothing is changed in torch or in the process yet.
4. The signal file says that this process listens, and only then hooks and threads begin.
5. A notice that came meanwhile ends the process before anything is trained.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from migrator import events
from migrator.errors import UsageError
from migrator.events import log
from migrator.leaving.leaving import Leaving, Outcome
from migrator.loop.batches import Batches
from migrator.loop.epoch_counters import EpochCounters
from migrator.loop.gate import Gate
from migrator.loop.position import Place
from migrator.loop.safe_points import SafePoints
from migrator.notice import inbox
from migrator.notice.inbox import NoticeInbox
from migrator.notice.signal_file import SignalFile
from migrator.notice.signal_file_owner import SignalFileOwner
from migrator.platform import container, launcher
from migrator.platform.progress_line import ProgressLine
from migrator.ranks import joining, place, rendezvous
from migrator.save import engine
from migrator.save.context import SaveContext
from migrator.session import restore, start
from migrator.session.candidates import Candidates
from migrator.session.departure import Departure
from migrator.session.end import SessionEnd
from migrator.session.first_step import FirstStep
from migrator.session.group_restore import GroupRestore
from migrator.session.rank_group import NoticeToAnyRank, RankGroup
from migrator.session.requested_save import RequestedSave
from migrator.session.restore_plan import Loaded
from migrator.session.resume import Resume
from migrator.session.start import StartingPoint
from migrator.settings import Settings
from migrator.state.capture import Capturer
from migrator.state.registry import Registry
from migrator.storage.locate import storage_at


def begin(settings: Settings, registry: Registry) -> Session:
    """What `listening()` does. If it fails everything is as before, unless the pod has to leave anyway."""
    noticed, owner = inbox.take(), SignalFileOwner(settings.signal)
    try:
        return Session(settings, registry, noticed, owner)
    except (Exception, KeyboardInterrupt) as error:
        start.give_up(settings, noticed, owner, error)
        raise


class Session:
    """All parts of one life, and what the script calls of them."""

    def __init__(self, settings: Settings, registry: Registry, noticed: NoticeInbox, owner: SignalFileOwner) -> None:
        self._registry = registry
        self._noticed = noticed
        self._owner = owner
        self._file = SignalFile.here(settings.signal)
        self._storage = storage_at(settings.ckpt, settings.job, grace_s=settings.grace_s)
        rank, size = (0, 1) if settings.ranks == "1" else place.rank_and_size()
        if size == 1:
            start.check_is_alone(settings)
        events.rank = rank
        if size == 1:
            # Before anything says that this process listens, or that another life has begun.
            owner.take()
        self._leaving = Leaving(sigterm=noticed.sigterm, exit_code=settings.exit_code, agent=launcher.agent())
        noticed.look_at(self._file, settings.grace_s)
        noticed.end_at_deadline(self._leaving.exit_now)

        found = self._begin_alone(settings) if size == 1 else self._begin_with_others(settings)
        self._generation = found.generation
        self.settings = settings = replace(settings, every=found.every)

        self._make_parts(found, size)
        self._install()
        self._log_listening()
        self._leave_if_noticed()

    # Its beginning.

    def _begin_alone(self, settings: Settings) -> StartingPoint:
        self._group: RankGroup | None = None
        start.write_init(self._file, [os.getpid()], grace_s=settings.grace_s)
        return start.begin_generation(settings, self._storage, self._noticed, {"ranks": 1})

    def _begin_with_others(self, settings: Settings) -> StartingPoint:
        rendezvous.come_together()
        self._group = group = RankGroup(joining.join(), settings, self._registry, self._storage)
        self._noticed.pass_on(group.pass_on)
        notices = NoticeToAnyRank(self._noticed, group)
        return group.meet(partial(start.begin_generation, settings, self._storage, notices))

    def _make_parts(self, found: StartingPoint, size: int) -> None:
        settings, registry, storage = self.settings, self._registry, self._storage
        group, leaving = self._group, self._leaving
        load: Callable[[str], Loaded] = partial(restore.load, storage, registry=registry)
        if group is not None:
            load = GroupRestore(group, storage, registry).load
        self._candidates = Candidates(settings, storage, found, load)
        self._capturer = Capturer(registry)
        self.gate = Gate(self._capturer, leaving)
        context = SaveContext(
            storage, found.generation, settings.job, registry, self._capturer, self.gate, is_warned=found.is_warned
        )
        if group is None:
            self._saver = engine.alone(context, settings, leaving, self._file, self._explain_nothing)
        else:
            self.gate.agrees = True
            context = group.save_context(context)
            self._saver = engine.in_group(
                context, settings, leaving, self._file, self._explain_nothing, ranks=group.ranks, pod=group.pod
            )

        self._departure = Departure(
            leaving, self._noticed.sigterm, self.gate, self._saver, None if group is None else group.ranks
        )
        has_other_ranks = group is not None
        place, counters = Place(), EpochCounters()
        self.safe_points = SafePoints(
            registry,
            self._capturer,
            self.gate,
            place,
            counters,
            departure=self._departure,
            checks=FirstStep(settings, registry, self._candidates, self.gate, has_other_ranks=has_other_ranks),
            has_other_ranks=has_other_ranks,
        )
        self._resume = Resume(
            settings,
            registry,
            self._candidates,
            self._saver,
            gate=self.gate,
            place=place,
            counters=counters,
            safe_points=self.safe_points,
            ranks=size,
        )
        self._requested_save = RequestedSave(
            self.gate, self.safe_points, self._saver, leaving=leaving, departure=self._departure
        )
        # KubeDL looks at the log of this pod. With a master, or under torchrun, rank 0 may be in another one.
        is_worker_0 = self._speaks_for_pod and container.pod_name().endswith("-worker-0")
        self._progress_line = ProgressLine(is_shown=events.rank == 0 or is_worker_0, ranks=size)
        self._end = SessionEnd(
            settings,
            noticed=self._noticed,
            owner=self._owner,
            file=self._file,
            leaving=leaving,
            departure=self._departure,
            gate=self.gate,
            safe_points=self.safe_points,
            saver=self._saver,
            group=group,
        )

    def _explain_nothing(self) -> Outcome:
        """The answer to a notice if nothing was trained in this life: what the last one left is still there."""
        newest = self._saver.newest
        if newest is not None:
            return Outcome(True, "nothing was trained since it was loaded", newest.ckpt, newest.step, 0)
        return self._candidates.outcome()

    @property
    def _speaks_for_pod(self) -> bool:
        """This is the only rank of its pod, or the lowest."""
        return self._group is None or self._group.pod.position == 0

    def _install(self) -> None:
        group = self._group
        if self._speaks_for_pod:
            self._saver.for_hook.remove()
        if group is not None and self._speaks_for_pod:
            self._owner.take()
            start.write_init(self._file, group.pids, grace_s=self.settings.grace_s)
        self.safe_points.install()
        if group is not None:
            group.install()
        # A hook of `register_at_fork` stays for good. It must not keep a closed session, with all its tensors.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (found := forget()) and found())
        self._end.install()
        self._departure.install(self._noticed)
        self._saver.start()
        if group is not None:
            group.begin()
        self._noticed.stop_guard()

    def _forget(self) -> None:
        """In a forked child: no hook, gate or thread of this session does anything there."""
        self.safe_points.forget()

    def _log_listening(self) -> None:
        if self._speaks_for_pod:
            for warning in launcher.warnings(os.environ, grace_s=self.settings.grace_s):
                log("launcher_warning", level=logging.WARNING, means=warning)
        log(
            "listening",
            signal=self.settings.signal,
            grace_s=self.settings.grace_s,
            every=self.settings.every,
            registered=",".join(name for name, _ in self._registry),
        )

    def _leave_if_noticed(self) -> None:
        """Nothing is trained in a pod that has to go; several ranks leave together, at the end of their meeting."""
        self._noticed.catch_up()
        if self._leaving.notice is not None:
            self._departure.leave_when_decided()

    # What the script calls.

    @property
    def can_load(self) -> bool:
        """`migrator.resume`"""
        return self._candidates.can_load

    @property
    def is_leaving(self) -> bool:
        """No further step begins."""
        return self.gate.is_leaving

    def is_leaving_for_script(self) -> bool:
        """`migrator.is_leaving`"""
        return self._departure.is_leaving_for_script()

    def load(self) -> str | None:
        """`migrator.load_ckpt()`"""
        return self._resume.load()

    def restore_random(self) -> bool:
        """`migrator.restore_random()`"""
        return self._resume.restore_random()

    def batches(self, loader: Any, name: str | None) -> Batches[Any]:
        """`migrator.batches()`"""
        return self.safe_points.batches(loader, name)

    def epochs(self, total: int, *, name: str, start: int | None) -> Iterator[int]:
        """`migrator.epochs()`"""
        return self.safe_points.epochs(total, name=name, start=start)

    def progress(self, **given: Any) -> None:
        """`migrator.progress()`"""
        self._progress_line.print(**given)

    def safe_point(self) -> None:
        """`migrator.safe_point()`"""
        self.safe_points.reach_by_script()

    def save(self, *, wait: bool) -> str | None:
        """`migrator.save_ckpt()`"""
        return self._requested_save.save(wait=wait)

    def close(self) -> None:
        """`migrator.close()`"""
        if self.safe_points.loops.is_live:
            raise UsageError("close() inside a loop over batches(): leave the loop first.")
        self._end.close_and_go_on()
