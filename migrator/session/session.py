"""One life of the job: from `listening()` to the end of the process.

Puts the parts together and decides where safe points are. Everything a save will
need is imported and made here, before there is anything to be in a hurry about.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.nn.modules.module import register_module_forward_pre_hook

from migrator import events
from migrator.state.adapters import comm_hooks
from migrator.loop import epoch_counters as counters
from migrator.platform import container as environment
from migrator.platform import launcher
from migrator.compat import pytorchjob_migration as legacy
from migrator.ckpt import generations as lineage
from migrator.session import restore_plan as loading
from migrator.notice import inbox as lookout
from migrator.ranks import rendezvous as meeting
from migrator.state import random_state as randomness
from migrator.ranks import peers as ranks
from migrator.notice import signal_file
from migrator.ranks.protocol import Line
from migrator.state.change_detector import Contents
from migrator.state.capture import Capturer
from migrator.loop.epoch_counters import EpochCounters
from migrator.errors import (
    CkptCorrupt,
    CkptMismatch,
    Migrated,
    MigratorError,
    NoUsableCkpt,
    ResumeIgnored,
    SaveFailed,
    StorageError,
    UsageError,
)
from migrator.events import log
from migrator.loop.gate import Gate, Phase
from migrator.loop.iteration import Iteration
from migrator.save.group.group import JointSaver
from migrator.leaving.leaving import HOOK_READS_S, Leaving, Outcome
from migrator.notice.inbox import BEHIND_S, Lookout
from migrator.loop.followed_loop import Batches, Loops
from migrator.ckpt.manifest import parse_ckpt_name
from migrator.loop.position import Place
from migrator.ranks.peers import Once
from migrator.state.registry import Registry
from migrator.ranks.process_groups import Regroup
from migrator.loop.loader_state import WorkersSeededApart, restore_generators, state_of
from migrator.save.engine import Saver
from migrator.save.attempt import Saved, Workshop
from migrator.settings import Settings
from migrator.notice.signal_file import SignalFile
from migrator.notice.signal_file_owner import SignalOwner
from migrator.storage.posix import LocalStorage
from migrator.session.group import Team, Welcome
from migrator.loop.uneven_inputs import UnevenInputs
from migrator.loop.unfollowed_loaders import UnfollowedLoaders
from migrator.notice.watcher import News

EXIT_WAIT_S = 600.0
"""An exit waits so long at most for a save under way that nobody set a deadline for."""
_SAID_S = 0.5
"""So long a script that has heard of the notice is held until the other ranks can know that."""
MANY_STEPS = 200
"""So many steps of an optimizer without a safe point are worth a line in the log."""


class _Told(Exception):  # noqa: N818 - internal
    """The news came while `listening()` waited."""


def begin(settings: Settings, registry: Registry) -> Life:
    """What `listening()` does. Where it fails everything is as before, unless the pod has to leave anyway."""
    noticed, owner = lookout.take(), SignalOwner(settings.signal)
    try:
        return Life(settings, registry, noticed, owner)
    except (Exception, KeyboardInterrupt) as error:
        owner.release()
        file = SignalFile.here(settings.signal)
        is_told = noticed.is_told and isinstance(error, Exception)
        with contextlib.suppress(MigratorError):
            _withdraw(file, error, is_told=is_told, grace_s=settings.grace_s)
        if is_told:
            why = f"nothing was trained yet, and listening() failed: {type(error).__name__}: {error}"
            log("leaving", level=logging.ERROR, why=why)
            if launcher.agent() is not None:
                noticed.stay()  # it would start this rank again inside the dying pod
        noticed.give_up()
        if not is_told:
            raise
        # The pod goes in any case, and an error would tell the cluster not to start it again.
        raise Migrated(settings.exit_code) from error


def _withdraw(file: SignalFile, error: BaseException, *, is_told: bool, grace_s: float) -> None:
    """In the signal file: answer the hook, or take back that this process listens."""
    found = file.read()
    if found is None or (found.pids and os.getpid() not in found.pids):
        return  # another process listens, and answers
    if is_told and file.open_request(grace_s) is not None:
        why = f"nothing was trained yet, and listening() failed: {error}"
        fields = {"deadline": found.fields.get("deadline"), "agent": file.agent} if file.agent else {}
        file.write(signal_file.INIT, request=found.fields.get("request"), error=why, **fields)
    elif found.word == signal_file.INIT and found.pids == (os.getpid(),):
        file.remove()


class Life:
    """What `listening()` starts and the end of the process closes."""

    def __init__(self, settings: Settings, registry: Registry, noticed: Lookout, owner: SignalOwner) -> None:
        self.settings = settings
        self._registry = registry
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._nothing_trained_yet()
        self._file = SignalFile.here(settings.signal)
        self._owner = owner
        self._storage = LocalStorage(settings.ckpt, settings.job)
        rank, size = ranks.place()
        if size == 1 and settings.ranks == "auto" and not _group_size():
            several = launcher.one_of_several(os.environ)
            if several is not None:
                raise UsageError(several.refusal)
        events.rank = rank
        if size == 1:
            # Before anything says that this process listens, or that another life has begun.
            self._owner.take()
        # Before anything that may wait: a notice comes once.
        self._noticed = noticed
        self._sigterm = noticed.sigterm
        self._leaving = Leaving(sigterm=self._sigterm, exit_code=settings.exit_code, agent=launcher.agent())
        noticed.look_at(self._file, settings.grace_s)
        noticed.end_at_deadline(self._leaving.exit_now)
        self._team = None
        if size == 1:
            self._file.forget_ends()
            self._say_init([os.getpid()])
            self._begin_generation({"ranks": 1})
        else:
            meeting.come_together()
            self._team = Team(ranks.join(), settings, registry, self._storage)
            noticed.pass_on(self._team.pass_on)
            self._team.meet(self._begin_generation_for_all)
            self._take_over(self._team.welcome)
        self._legacy = self._find_legacy()
        self._capturer = Capturer(registry)
        self.gate = Gate(self._capturer)
        self._turn = 0
        shop = Workshop(self._storage, self._generation, settings.job, registry, self._capturer, self.gate)
        if self._team is None:
            self._saver = Saver(shop, self.settings, self._leaving, self._file)
        else:
            self.gate.agrees = True
            shop = self._team.workshop(shop)
            self._saver = JointSaver(
                shop, self.settings, self._leaving, self._file, ranks=self._team.ranks, pod=self._team.pod
            )
        self._saver.explain_nothing = self._explain_nothing
        self._place = Place()
        self._random_loaded: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._counters = EpochCounters()
        self.loops = Loops(self, self._place, {name: kind.target for name, kind in registry})
        self._start()
        self._leave_if_told()

    def _nothing_trained_yet(self) -> None:
        """What is known of the training: its steps, and what speaks for and against safe points."""
        self.step = 0
        self.is_loaded = False
        self._is_at_exit = True
        """`close()` is called by the end of the interpreter, so that the exit code is known."""
        self._finished_before: frozenset[int] | None = None
        self._finished: set[int] = set()
        self._iteration = Iteration()
        self._by_hand: dict[str, Contents] | None = None
        """What tells that tensors change although no optimizer has stepped."""
        self._steps = 0
        self._postponed: Exception | None = None
        """What went wrong where no exception gets through."""
        self._known_optimizers: set[int] = {id(o) for o in self._registry.optimizers()}
        self._unproven: dict[int, str] = {}
        """Optimizers that are not registered, and what they change; that their state is saved is not shown yet."""
        self._is_explicit = False
        """The script marks its safe points, by `batches()` or `safe_point()`."""
        self._unsaved_steps = 0
        self._has_checked_comm_hooks = False
        self._is_said = threading.Event()
        """The other ranks can know that the script has heard of the notice."""
        self._gradients_at_safe_point: list[object] = [None] * len(self._registry.optimizers())
        self._roots = {id(module) for module in self._registry.modules()}
        self._forward_hook: Any = None
        self._uneven: UnevenInputs | None = None
        self._changes_in_torch: list[UnfollowedLoaders | WorkersSeededApart | UnevenInputs | Regroup] = []

    # Beginning.

    def _begin_generation(self, about: dict[str, Any]) -> None:
        """Claim this life's number, and wait for a life before it that is still saving."""
        storage = self._storage
        storage.check()
        fresh = self.settings.resume == "never"
        if self._is_told():
            self._generation = lineage.not_claimed(storage, fresh=fresh)
        else:
            self._generation = lineage.claim(storage, fresh=fresh, about={**_about(), **about})
            self._say_where()
            with contextlib.suppress(_Told):
                lineage.wait_for_leaving(storage, self._generation.lineage, sleep=self._sleep_unless_told)
        self._candidates = self._find_candidates()
        self._name_forks()
        self._legacy = self._find_legacy()
        if not self._is_told():
            self._check_required()

    def _find_candidates(self) -> list[str]:
        def find() -> list[str]:
            return lineage.furthest_first(self._storage, self._generation)

        return find() if self._is_told() else lineage.go_on(self._storage, self._generation.number, find)

    def _name_forks(self) -> None:
        branches = lineage.beside(self._storage, self._candidates)
        if branches:
            log(
                "fork",
                level=logging.WARNING,
                furthest=self._candidates[0],
                beside=",".join(branches),
                means="two lives went on from the same ckpt; the one that trained further counts, what the other one "
                "trained is not used",
            )

    def _is_told(self) -> bool:
        """This pod must leave, or that of another rank."""
        return self._noticed.is_told or (self._team is not None and self._team.is_told)

    def _sleep_unless_told(self, seconds: float) -> None:
        if self._noticed.wait(seconds) or self._is_told():
            raise _Told

    def _begin_generation_for_all(self, about: dict[str, Any]) -> Welcome:
        """Rank 0."""
        self._begin_generation(about)
        return Welcome(self._generation, tuple(self._candidates), self.settings.every)

    def _take_over(self, welcome: Welcome) -> None:
        """What rank 0 found holds for all ranks."""
        self._generation, self._candidates = welcome.generation, list(welcome.ckpts)
        self.settings = replace(self.settings, every=welcome.every)

    def _say_where(self) -> None:
        log(
            "generation_claimed",
            generation=self._generation.number,
            continues=self._generation.continues,
            root=self._storage.root,
            job=self.settings.job,
        )
        for what, (there, here) in self._generation.differs.items():
            log("other_script", level=logging.WARNING, what=what, there=there, here=here)
        strangers = lineage.others(self._storage, self._generation.lineage)
        if strangers:
            log("other_lineage", level=logging.WARNING, ckpts=",".join(strangers))
        if environment.in_kubernetes(os.environ) and environment.is_on_container_filesystem(self.settings.ckpt):
            log(
                "storage_warning",
                level=logging.WARNING,
                why=f"{self.settings.ckpt} is on the container's own file system and dies with the pod; "
                "mount a volume there, or set MIGRATOR_CKPT to one",
            )

    def _find_legacy(self) -> Any:
        file = self.settings.legacy_file
        if self._candidates or self.settings.resume == "never" or file is None or not file.is_file():
            return None
        return file

    def _check_required(self) -> None:
        if self.settings.resume == "require" and not self.can_load:
            raise NoUsableCkpt(
                f"MIGRATOR_RESUME=require, but there is no ckpt of job {self.settings.job!r} "
                f"under {self._storage.root}. Is the volume mounted, and are MIGRATOR_CKPT and MIGRATOR_JOB "
                "those of the run to be continued?"
            )

    def _start(self) -> None:
        if self._team is None or self._team.pod.position == 0:
            self._saver.for_hook.remove()
        if self._team is not None and self._team.pod.position == 0:
            self._owner.take()
            self._file.forget_ends()
            self._say_init(self._team.pids)
        self.gate.before_step = self._before_step
        self.gate.after_step = self._after_step
        self.gate.is_trained_by_hand = self._is_trained_by_hand
        self.gate.may_leave = self._leaving.may_leave
        self.gate.leave = self._leaving.leave
        self.gate.install()
        self._unfollowed = UnfollowedLoaders(self.loops.registered, lambda: self.loops.is_fetching)
        self._changes_in_torch = [WorkersSeededApart(), self._unfollowed]
        if self._team is not None:
            self._uneven = UnevenInputs(lambda params: self._registry.owner_of(params) is not None)
            ranks = self._team.ranks
            self._changes_in_torch += [self._uneven, Regroup(ranks.nonce, ranks.rank, ranks.size)]
        # Such a hook stays for good, and is not to keep a life that is closed, with all its tensors.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (found := forget()) and found())
        atexit.register(self.close)
        # Children of multiprocessing end by os._exit and run no atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)
        self._sigterm.take_back()
        self._noticed.pass_on(self._hear)
        if self._team is not None:
            # Behind its handler the script may tell the others, and they may end before they can read that it knows.
            self._sigterm.behind_script = lambda: self._is_said.wait(_SAID_S)
        self._saver.start()
        if self._team is not None:
            self._team.begin()
        self._noticed.hand_over()
        if self._team is None or self._team.pod.position == 0:
            for warning in launcher.warnings(os.environ, grace_s=self.settings.grace_s):
                log("launcher_warning", level=logging.WARNING, means=warning)
        log(
            "listening",
            signal=self.settings.signal,
            grace_s=self.settings.grace_s,
            every=self.settings.every,
            registered=",".join(name for name, _ in self._registry),
        )

    def _hear(self, news: News) -> None:
        """Watcher: this pod must leave."""
        if self._sigterm.script_heard:
            # First: on other ranks it has to be known when this rank's news are acted on.
            self._note_script_knows()
        self._saver.tell(news)

    def _note_script_knows(self) -> None:
        if self._leaving.script_knows:
            return
        self._leaving.note_script_knows()
        if self._team is not None:
            # Ranks often pass a flag of their own around, so all of them may end early.
            line = Line("heard", self._team.ranks.rank)
            said = Once(line, "heard", lambda lines: any(other.what == "heard" for other in lines))
            self._team.ranks.post(said, timeout_s=_SAID_S)
            self._is_said.set()

    def is_leaving_for_script(self) -> bool:
        """`migrator.is_leaving`."""
        if self.has_news:
            self._note_script_knows()
        return self.has_news

    def _say_init(self, pids: list[int]) -> None:
        """An open request stays for the watcher to find; anything else in the file is history."""
        self._file.write_unless_asked(signal_file.INIT, grace_s=self.settings.grace_s, pids=",".join(map(str, pids)))

    def _leave_if_told(self) -> None:
        """Nothing is trained in a pod that has to go; several ranks leave together, at the end of their meeting."""
        self._noticed.catch_up()
        if self._leaving.news is None:
            return
        while not self._leaving.may_leave():
            self._leaving.is_decided.wait(0.05)
        self._leaving.leave()

    # Loading.

    @property
    def can_load(self) -> bool:
        if self.settings.resume == "never":
            return False
        return bool(self._candidates) or self._legacy is not None

    def load(self) -> str | None:
        """The newest ckpt that is whole, into everything registered."""
        if self.gate.phase not in (Phase.FRESH, Phase.LOADED):
            raise UsageError(
                "load_ckpt() after the first optimizer step: the training done so far would be lost. "
                "Call it right after listening()."
            )
        if not self.can_load:
            return None
        start_s = time.monotonic()
        if self._legacy is not None:
            legacy.load(self._legacy, self._registry)
            self._counters.load({})
            self._after_load()
            log("loaded_legacy", file=self._legacy)
            return str(self._legacy)
        loaded = self._newest_usable()
        self.step = loaded.step
        self._place.ranks_changed = loaded.ranks != (1 if self._team is None else self._team.ranks.size)
        self._saver.newest = Saved(loaded.ckpt, loaded.step, loaded.size, 0.0)
        self._saver.went_on_from(loaded.ckpt)
        generators = {n: state_of(k.target) for n, k in self._registry if randomness.is_generator(k.target)}
        self._random_loaded = (loaded.random, generators)
        if loaded.loop is not None:
            self._place.load(loaded.loop, loaded.random, generators, anew=self.settings.loops == "anew")
        self._counters.load((loaded.loop or {}).get("epochs", {}))
        if loaded.random:
            randomness.restore(loaded.random)
        self._after_load()
        log("loaded", ckpt=loaded.ckpt, step=loaded.step, bytes=loaded.size, took_s=time.monotonic() - start_s)
        return loaded.ckpt

    def restore_random(self) -> bool:
        """`migrator.restore_random()`"""
        if self._random_loaded is None:
            return False
        random, generators = self._random_loaded
        if random:
            randomness.restore(random)
        restore_generators({name: kind.target for name, kind in self._registry}, generators)
        return True

    def _newest_usable(self) -> loading.Loaded:
        def load(name: str) -> loading.Loaded:
            if self._team is not None:
                return self._team.load(name)
            return loading.load(self._storage, name, self._registry)

        def note(name: str) -> None:
            self._saver.bad |= {name}

        try:
            return loading.newest_usable(self._candidates, load, where=self._storage.root, on_bad=note)
        except NoUsableCkpt as error:
            later = max(lineage.numbers(self._storage), default=0)
            if later <= self._generation.number:
                raise
            raise NoUsableCkpt(
                f"a later life of the job (generation {later}) has begun since this one (generation "
                f"{self._generation.number}) looked for ckpts, and has deleted them since. The later one goes on; "
                f"end this one. It found: {error}"
            ) from error

    def _after_load(self) -> None:
        self.is_loaded = True
        self.gate.loaded(self.step)

    # Training: where safe points are.

    @property
    def is_leaving(self) -> bool:
        return self.gate.is_leaving

    @property
    def has_news(self) -> bool:
        return self.gate.is_leaving or self._sigterm.is_heard

    @property
    def epoch(self) -> object:
        return self._counters.now

    @property
    def has_unsaved(self) -> bool:
        return self.gate.phase is Phase.DIRTY or self._is_trained_by_hand()

    @property
    def is_decided(self) -> bool:
        return self._leaving.is_decided.is_set()

    def batches(self, loader: Any, name: str | None) -> Batches[Any]:
        self.mark_explicit()
        return self.loops.batches(loader, name)

    def mark_explicit(self) -> None:
        """From now on only what the script marks is a safe point."""
        if not self._is_explicit:
            self._is_explicit = self._leaving.marks_safe_points = True
            self._stop_waiting_for_forward()

    def handing_out(self) -> None:
        self._iteration.begins()
        if not self._steps and self._by_hand is None:
            self._by_hand = self._capturer.contents()

    def epochs(self, total: int, *, name: str, start: int | None) -> Iterator[int]:
        """`migrator.epochs()`."""
        count = self._counters.begin(name, start, is_stopped=self.has_news)
        return counters.run(count, total, self._next_epoch)

    def _next_epoch(self) -> None:
        # Where `batches()` marks the place in the epoch, it says as well when the next one begins.
        if not self._place.noted:
            self.entered(is_new_round=True)

    def boundary(self) -> None:
        if self._is_trained_by_hand():
            self._follow_hand()
            self.safe_point()
        elif self.gate.phase is Phase.DIRTY:
            self.safe_point()

    def entered(self, *, is_new_round: bool) -> None:
        self.raise_postponed()
        if self.gate.phase is Phase.DIRTY:
            # What an exception left behind is whole again when the script has trained a batch to its end.
            if not self._iteration.is_broken_off:
                self.safe_point()
        elif self.gate.phase is Phase.CLEAN and is_new_round and not self._has_gradients_to_lose():
            # Before a second loop of the same epoch the last safe point stays: from here a resumed script
            # would do again what lies between the two, a scheduler's step for one.
            self.gate.pass_on()
            self._turn += 1
            self._capture()

    def _has_gradients_to_lose(self) -> bool:
        """Something was accumulated since the last safe point, which no ckpt holds."""
        return any(
            now is not None and now != before
            for now, before in zip(self._gradients(), self._gradients_at_safe_point, strict=True)
        )

    def left_early(self, *, at_will: bool | None) -> bool:
        """Called while the loop's iterator goes: an exception would be printed and forgotten, so it is kept."""
        try:
            return self._left_early(at_will=at_will)
        except Exception as error:
            self._postponed = error
            return False

    def raise_postponed(self) -> None:
        error, self._postponed = self._postponed, None
        if error is not None:
            raise error

    def _left_early(self, *, at_will: bool | None) -> bool:
        """A loop that was left by `break` is over, and that is a safe point if the step is complete.

        Not over if the script may have left it because it heard of the notice: then it is only interrupted.
        """
        if self._leaving.main_is_out.is_set():
            return False  # a loop that nobody ended, at the end of the interpreter
        if not at_will:
            if at_will is False:
                self._iteration.is_broken_off |= self.gate.phase is Phase.DIRTY
            return False
        is_over = not self._may_have_made_script_leave()
        expected = self._finished_before
        if expected is None:
            expected = frozenset(id(o) for o in self._registry.optimizers())
        is_by_hand = self._is_trained_by_hand()
        if is_by_hand:
            self._follow_hand()
        if self.gate.phase is Phase.DIRTY or is_by_hand:
            if is_by_hand or self._finished == expected:
                if is_over:
                    self.loops.leave_live()
                self.safe_point(may_stay=False)
        elif is_over and self.loops.has_trained and not self._has_gradients_to_lose():
            self.loops.leave_live()
            if self.gate.phase is Phase.CLEAN and self.gate.may_pass_on():
                self._turn += 1
                self._capture(may_stay=False)
        return is_over

    def _may_have_made_script_leave(self) -> bool:
        """The notice: a handler of the script's heard it, here or on another rank."""
        self._wait_for_watcher()
        if self._leaving.script_knows or self._sigterm.script_heard:
            return True
        if self._team is None:
            return False
        board = self._team.ranks
        board.call(lambda _: True, timeout_s=BEHIND_S)
        return bool(board.lines("heard"))

    def _wait_for_watcher(self) -> None:
        """A signal that was delivered is known of when this returns."""
        end_s = time.monotonic() + BEHIND_S
        while self._sigterm.is_pending and time.monotonic() < end_s:
            time.sleep(0.001)

    def _is_trained_by_hand(self) -> bool:
        """Registered tensors changed in this batch, and no optimizer has ever stepped: a script that does it itself."""
        return (
            self._steps == 0
            and self._by_hand is not None
            and self.loops.is_live
            and self._capturer.have_changed(self._by_hand)
        )

    def _follow_hand(self) -> None:
        self._by_hand = self._capturer.contents()
        if not self.gate.holds_main:
            # Nothing holds such a step back while a save reads.
            self.gate.holds_main = True
            log("trained_by_hand", means="no optimizer steps: each batch in which registered tensors change is a step")

    def _why_not_whole(self) -> str | None:
        return self._iteration.why_not_whole() if self.gate.phase is Phase.DIRTY else None

    def safe_point_of_script(self) -> None:
        """`safe_point()`"""
        self.mark_explicit()
        if (why := self._why_not_whole()) is not None:
            raise UsageError(
                f"safe_point(): {why}. What is half done must not be saved: train a whole iteration first."
            )
        self.safe_point()

    def safe_point(self, *, may_stay: bool = True) -> None:
        """The loop could start again here."""
        if self.gate.phase is Phase.FRESH:
            self._check_resume_was_not_ignored()  # not everything that trains does it by an optimizer
        if self.gate.phase in (Phase.FRESH, Phase.LOADED):
            self._check_no_group_was_made()
        self.step += 1
        self._turn = 0
        self._unsaved_steps = 0
        self._iteration.is_whole()
        self._finished_before, self._finished = frozenset(self._finished), set()
        if not self.loops.is_live:
            self._place.begin_anew()
        self.loops.count_current()
        if self._is_explicit:
            self._unfollowed.look()
        self._gradients_at_safe_point = self._gradients()
        self._saver.at_step(self.step)
        self._sigterm.take_back()
        self._capture(may_stay=may_stay)

    def _capture(self, *, may_stay: bool = True) -> None:
        loop = {**self._place.state(), "epochs": self._counters.state()}
        capture = self._capturer.take(self.step, loop, full=self.gate.is_due, turn=self._turn)
        self.gate.publish(capture, may_stay=may_stay)

    def park(self) -> None:
        self.gate.park()

    def park_for_good(self) -> NoReturn:
        """There will be no further batch: wait for the outcome, whatever it is."""
        before = self.gate.capture
        if before is not None and self.gate.is_unsavable:
            # The loop still stands at that safe point; only its loader may have drawn random numbers since.
            again = self._capturer.take(self.step, before.loop, full=True, turn=self._turn)
            self.gate.publish(replace(again, random=before.random), may_stay=False)
        self.gate.close()
        while not self._leaving.may_leave():
            self._leaving.is_decided.wait(0.05)
        self._leaving.leave()

    def body_mark(self) -> object:
        """Changes with every step and every backward pass; without optimizers nobody can tell."""
        if not self._steps and not self._registry.optimizers():
            return object()
        # A step that a scaler skips leaves no gradients and is none; the scaler was updated all the same.
        scales = [getattr(scaler, "_scale", None) for scaler in self._registry.scalers()]
        updates = [None if scale is None else (id(scale), scale._version) for scale in scales]
        return self._steps, self._gradients(), updates

    def _gradients(self) -> list[object]:
        """What tells the gradients apart that the last parameter of each optimizer has had."""
        marks: list[object] = []
        for optimizer in self._registry.optimizers():
            params = optimizer.param_groups[-1]["params"]
            grad = params[-1].grad if params else None
            marks.append(None if grad is None else (id(grad), grad._version))
        return marks

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.raise_postponed()
        if self._uneven is not None:
            self._uneven.check()
        self._iteration.stepping.add(id(optimizer))
        if self.gate.phase is Phase.FRESH:
            self._check_resume_was_not_ignored()
        if self.gate.phase in (Phase.FRESH, Phase.LOADED):
            self._check_no_group_was_made()
            self._check_comm_hooks()
        if self.gate.phase is Phase.LOADED:
            self._registry.first_step()
        if id(optimizer) not in self._known_optimizers:
            self._meet(optimizer)
        if not self._is_explicit and self.gate.phase is Phase.DIRTY and id(optimizer) in self._finished:
            self._imply()
        if self._is_explicit and id(optimizer) in self._finished:
            self._unsaved_steps += 1
            if self._unsaved_steps == MANY_STEPS:
                self._say_that_no_safe_point_comes()

    def _say_that_no_safe_point_comes(self) -> None:
        log(
            "no_safe_point",
            level=logging.WARNING,
            steps=self._unsaved_steps,
            means="so many steps since the last safe point: nothing newer can be saved. The loop has to take each "
            "batch from migrator.batches() (an iteration begun earlier and still held makes the safe points of all), "
            "or to call migrator.safe_point()",
        )

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += 1
        self._iteration.stepping.discard(id(optimizer))
        self._finished.add(id(optimizer))
        if not self._is_explicit:
            self._wait_for_forward()
        if id(optimizer) in self._unproven:
            self._look_for_state_of(optimizer, self._unproven.pop(id(optimizer)))

    def _check_resume_was_not_ignored(self) -> None:
        if self.can_load and not self.is_loaded and not self.gate.is_leaving:
            newest = self._legacy or self._candidates[0]
            raise ResumeIgnored(
                f"there is a ckpt to go on from ({newest} under {self._storage.root}), but the script did not load it "
                "and is about to train from the start. After listening(), add:\n"
                "    if migrator.resume:\n        migrator.load_ckpt()\n"
                "Or start over knowingly: MIGRATOR_RESUME=never."
            )

    def _check_no_group_was_made(self) -> None:
        if self._team is not None or self.settings.ranks != "auto" or self.gate.is_leaving:
            return
        if (size := _group_size()) > 1:
            raise UsageError(
                f"a process group of {size} ranks was made after listening(): this rank would save and load as a job "
                "by itself, beside the others. Call torch.distributed.init_process_group() before listening(). If "
                "each rank is a job by itself, say so: MIGRATOR_RANKS=1."
            )

    def _check_comm_hooks(self) -> None:
        """DDP modules are often made behind `register()`, and their hooks later still."""
        if self._team is None or self._has_checked_comm_hooks:
            return
        self._has_checked_comm_hooks = True
        for found in comm_hooks.in_use():
            name = self._registry.named(found.state)
            if name is None:
                log(
                    "comm_hook_not_saved",
                    level=logging.WARNING,
                    hook=found.hook,
                    state=type(found.state).__name__,
                    means="this communication hook of DDP's keeps a state that is not registered, and begins anew "
                    'after a resume: call migrator.register("comm_hook", state)',
                )
            elif isinstance(kind := self._registry[name], comm_hooks.HookState):
                kind.met(found.module)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is not registered: its momentum will not be in the ckpt."""
        self._known_optimizers.add(id(optimizer))
        params = (param for group in optimizer.param_groups for param in group["params"])
        owner = self._registry.owner_of(params)
        if owner is not None:
            self._unproven[id(optimizer)] = owner

    def _look_for_state_of(self, optimizer: torch.optim.Optimizer, changes: str) -> None:
        """After its first step, which makes its state: a wrapper that is registered may save it."""
        if not self._registry.saves_state_of(optimizer):
            log(
                "unregistered_optimizer",
                level=logging.WARNING,
                optimizer=type(optimizer).__name__,
                changes=changes,
                means="its own state is not saved: register it as well",
            )

    # Safe points that nobody wrote: the four lines of the predecessor.

    def _wait_for_forward(self) -> None:
        """From a step to the next forward pass all modules are listened to; in between, and in other scripts, none.

        A hook on the script's own module would be copied and pickled with it, and `torch.jit.script` would compile it.
        """
        if self._forward_hook is None and self._roots:
            # Said whenever a compiled module is called; this hook looks for that call, and does nothing twice.
            warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
            self._forward_hook = register_module_forward_pre_hook(self._before_forward)

    def _stop_waiting_for_forward(self) -> None:
        hook, self._forward_hook = self._forward_hook, None
        if hook is not None:
            hook.remove()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._is_explicit:
            return
        root = getattr(module, "_orig_mod", module)
        if root.training and id(root) in self._roots and threading.get_ident() == self._thread:
            # At once: code that was compiled without a hook would be compiled again.
            self._stop_waiting_for_forward()
            if self.gate.phase is Phase.DIRTY and self._finished:
                self._imply()

    def _imply(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if len(self._registry.optimizers()) == 1:
            if self._finished_before is None:
                log(
                    "implied_safe_points",
                    level=logging.WARNING,
                    means="an interrupted epoch is repeated from its start; "
                    "for batch in migrator.batches(loader) goes on within it",
                )
            self.safe_point()
            return
        self._unsaved_steps += 1
        if self._unsaved_steps == 3:
            log(
                "no_safe_point",
                level=logging.WARNING,
                optimizers=len(self._registry.optimizers()),
                means="with several optimizers (or none registered) it cannot be told where a step is whole: "
                "wrap the loader in migrator.batches(), or call migrator.safe_point(); until then nothing can be saved",
            )

    # Saving when asked.

    def save(self, *, wait: bool) -> str | None:
        """`save_ckpt()`: the newest safe point made durable."""
        self.raise_postponed()
        newest = self._saver.newest
        if self.gate.phase in (Phase.FRESH, Phase.LOADED):
            return newest.ckpt if newest else None
        in_main = threading.get_ident() == self._thread
        if in_main and (why := self._why_not_whole()) is not None:
            at = "there is no ckpt" if newest is None else f"the newest ckpt is {newest.ckpt}, of step {newest.step}"
            raise SaveFailed(f"save_ckpt(): {why}. What is half done is not saved; {at}.")
        ticket = self._saver.ask()
        if in_main and self.gate.phase is Phase.DIRTY:
            # Whoever asks for a save here says that the state is whole here.
            self.mark_explicit()
            self.safe_point()
        if not wait:
            return None
        while not ticket.done.wait(0.05):
            if in_main and self.gate.is_unsavable:
                log(
                    "save_late",
                    level=logging.WARNING,
                    means="what is registered changed since the last safe point; it is saved at the next one",
                )
                return None
            if self._leaving.may_leave():
                self._leaving.leave()
        if ticket.error is not None and self._leaving.news is not None:
            # What was asked for is overtaken: the newest step is being saved, and then the process leaves.
            while not self._leaving.may_leave():
                self._leaving.is_decided.wait(0.05)
            self._leaving.leave()
        if ticket.error is not None:
            raise SaveFailed(f"the save was not made: {ticket.error}") from ticket.error
        return ticket.saved.ckpt if ticket.saved else None

    # Ending.

    def _explain_nothing(self) -> Outcome:
        """Nothing was trained in this life; what the last one left is still there."""
        if self._saver.newest is not None:
            newest = self._saver.newest
            return Outcome(True, "nothing was trained since it was loaded", newest.ckpt, newest.step, 0)
        for name in self._candidates if self.can_load else ():
            if name not in self._saver.bad and (outcome := self._explain_candidate(name)) is not None:
                return outcome
        return Outcome(False, "nothing to save: nothing was trained yet")

    def _explain_candidate(self, name: str) -> Outcome | None:
        """What a ckpt that was not loaded yet is worth; None: nothing, as far as can be seen without reading it."""
        step = (parse_ckpt_name(name) or (0, 0))[1]
        try:
            lineage.whole(self._storage, name)
            lineage.make_durable(self._storage, name)
        except CkptCorrupt:
            return None
        except CkptMismatch:
            pass  # of a newer version of the package: not ours to judge
        except StorageError as error:
            return Outcome(False, f"nothing was trained yet, and {error}", name, step)
        return Outcome(True, "nothing was trained yet; this ckpt was about to be loaded", name, step)

    def end(self) -> None:
        """`migrator.close()`: this life is over, and the process goes on."""
        if self.loops.is_live:
            raise UsageError("close() inside a loop over batches(): leave the loop first.")
        self._is_at_exit = False
        self.close()
        if self._leaving.news is not None:
            self._leaving.leave()
        if self._team is not None:
            self._team.ranks.let_go()
        atexit.unregister(self.close)
        self._finalizer.cancel()
        self._noticed.give_up()

    def close(self) -> None:
        """At exit: let a running save end, stop all threads, take the signal file away. May be called twice."""
        if os.getpid() != self._pid or self._leaving.main_is_out.is_set():
            return
        self._sigterm.is_exiting = True
        self.gate.close()
        end_s = time.monotonic() + BEHIND_S
        # Where a handler of the script's own took the place of ours, only the watcher knows of a SIGTERM. And another
        # rank says that its script has heard of the notice before it passes the notice on.
        while self._leaving.news is None and time.monotonic() < end_s:
            if not (self._sigterm.is_heard or self._sigterm.is_pending or self._leaving.script_knows):
                break
            time.sleep(0.002)
        if self._leaving.news is not None:
            while not self._leaving.may_leave():
                self._leaving.is_decided.wait(0.05)
        if self._team is not None and self._leaving.news is None:
            self._team.say_bye()
        self._leaving.main_is_out.set()
        self._saver.close(EXIT_WAIT_S if self._leaving.news is None else 5.0)
        self._noticed.close()
        if self._team is not None:
            self._team.close()
        self.gate.remove()
        for change in self._changes_in_torch:
            change.remove()
        self._stop_waiting_for_forward()
        if self._leaving.news is None:
            self._file.note_end()
            if self._team is None or self._team.is_last_of_pod(self._file.ended()):
                self._remove_signal_file()
            self._owner.release()
            return
        self._wait_for_hook()
        self._owner.release()
        if getattr(sys, "last_value", None) is not None:
            # An exception ended the script while it was leaving. The code must still say: start me again.
            self._leaving.exit_now("an exception came while leaving")
        # An exit that was asked for and swallowed is no end of the script's own choice.
        is_kept = self.settings.keep_exit_code and not self._sigterm.was_raised.is_set()
        if self._is_at_exit and self._leaving.ends_unfinished and not is_kept:
            self._leaving.end_with_exit_code()
        self._leaving.script_end.close()

    def _remove_signal_file(self) -> None:
        """Only if it is this process' own: where files cannot be locked another one may have written it since."""
        try:
            found = self._file.read()
        except MigratorError:
            return  # nothing that a trainer has written
        if found is None or not found.pids or os.getpid() in found.pids:
            self._file.remove()

    def _wait_for_hook(self) -> None:
        """The container may end with this process, and the hook with it, before it has read its answer."""
        hook, end_s = self._leaving.hook, time.monotonic() + HOOK_READS_S
        while hook is not None and environment.is_alive(hook) and time.monotonic() < end_s:
            time.sleep(0.02)

    def _forget(self) -> None:
        """In a forked child: no instance, no gate, no threads."""
        self.gate.before_step = self.gate.after_step = lambda _: None
        self.gate.phase = Phase.DIRTY  # a thread between step and safe point never waits
        self._is_explicit = True


def _group_size() -> int:
    """How many ranks the process group has; 0: there is none."""
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 0


def _about() -> dict[str, Any]:
    return {
        "host": environment.pod_name(),
        "pid": os.getpid(),
        "time": time.time(),
        "script": sys.argv[0] if sys.argv else "",
        "argv": sys.argv[1:],
    }
