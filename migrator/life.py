"""One life of the job: from `listening()` to the end of the process.

Puts the parts together and decides where safe points are. Everything a save will
need is imported and made here, before there is anything to be in a hurry about.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch

from migrator import counters, environment, events, legacy, lineage, loading, randomness, ranks, signal_file
from migrator.agreement import Line
from migrator.capture import Capturer
from migrator.counters import EpochCounters
from migrator.errors import (
    CkptCorrupt,
    CkptMismatch,
    NoUsableCkpt,
    ResumeIgnored,
    SaveFailed,
    StorageError,
    UsageError,
)
from migrator.events import log
from migrator.gate import Gate, Phase
from migrator.joint import JointSaver
from migrator.leaving import HOOK_READS_S, Leaving, Outcome
from migrator.loop import Batches, Loops, Place
from migrator.manifest import parse_ckpt_name
from migrator.registry import Registry
from migrator.saver import Saver
from migrator.saving import Saved, Workshop
from migrator.settings import Settings
from migrator.signal_file import SignalFile
from migrator.sigterm import Sigterm
from migrator.storage import LocalStorage
from migrator.team import Team, Welcome
from migrator.watcher import News, Watcher

EXIT_WAIT_S = 600.0
"""An exit waits so long at most for a save under way that nobody set a deadline for."""
MANY_STEPS = 200
"""So many steps of an optimizer without a safe point are worth a line in the log."""
NEWS_BEHIND_S = 1.0
"""So long may the watcher take to read of a SIGTERM that the main thread has seen."""


class Life:
    """What `listening()` starts and the end of the process closes."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.settings = settings
        self._registry = registry
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self.step = 0
        self.is_loaded = False
        self._finished_before: frozenset[int] | None = None
        self._finished: set[int] = set()
        self._steps = 0
        self._known_optimizers: set[int] = {id(o) for o in registry.optimizers()}
        self._unproven: dict[int, str] = {}
        """Optimizers that are not registered, and what they change; that their state is saved is not shown yet."""
        self._is_explicit = False
        """The script marks its safe points, by `batches()` or `safe_point()`."""
        self._unsaved_steps = 0
        self._gradients_at_safe_point: list[object] = [None] * len(registry.optimizers())
        self._forward_hooks: list[Any] = []

        self._file = SignalFile(settings.signal)
        self._storage = LocalStorage(settings.ckpt, settings.job)
        rank, size = ranks.place()
        events.rank = rank
        self._team = None if size == 1 else Team(ranks.join(), settings, registry, self._storage)
        if self._team is None:
            self._begin_generation({"ranks": 1})
        else:
            self._team.meet(self._begin_generation_for_all)
            self._take_over(self._team.welcome)
        self._legacy = self._find_legacy()
        self._capturer = Capturer(registry)
        self.gate = Gate(self._capturer)
        self._sigterm = Sigterm()
        self._leaving = Leaving(sigterm=self._sigterm, exit_code=settings.exit_code)
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
        self._counters = EpochCounters()
        self.loops = Loops(self, self._place, [kind.target for _, kind in registry])
        self._watcher = Watcher(sigterm=self._sigterm, file=self._file, grace_s=settings.grace_s, on_news=self._hear)
        self._start()

    # Beginning.

    def _begin_generation(self, about: dict[str, Any]) -> None:
        """Claim this life's number, and wait for a life before it that is still saving."""
        storage = self._storage
        storage.check()
        fresh = self.settings.resume == "never"
        self._generation = lineage.claim(storage, fresh=fresh, about={**_about(), **about})
        self._say_where()
        lineage.wait_for_leaving(storage, self._generation.lineage)
        self._candidates = lineage.ckpts(storage, self._generation.lineage)
        self._legacy = self._find_legacy()
        self._check_required()

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
        self._leave_by_open_request_or_say_init()
        self.gate.before_step = self._before_step
        self.gate.after_step = self._after_step
        self.gate.may_leave = self._leaving.may_leave
        self.gate.leave = self._leaving.leave
        self.gate.install()
        for module in self._registry.modules():
            self._forward_hooks.append(module.register_forward_pre_hook(self._before_forward))
        # Such a hook stays for good, and is not to keep a life that is closed, with all its tensors.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (found := forget()) and found())
        atexit.register(self.close)
        # Children of multiprocessing end by os._exit and run no atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)
        self._sigterm.install()
        self._watcher.start()
        self._saver.start()
        if self._team is not None:
            self._team.begin()
        if self._team is None or self._team.pod.position == 0:
            for warning in environment.launcher_warnings(os.environ):
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
            self._team.ranks.post(Line("heard", self._team.ranks.rank), timeout_s=0)

    def is_leaving_for_script(self) -> bool:
        """`migrator.is_leaving`."""
        if self.has_news:
            self._note_script_knows()
        return self.has_news

    def _leave_by_open_request_or_say_init(self) -> None:
        """An open request stays for the watcher to find; anything else in the file is history."""
        fingerprint = self._file.fingerprint()
        mtime = fingerprint[1] / 1e9 if fingerprint else 0.0
        found = self._file.read()
        deadline = signal_file.is_open(found, now=time.time(), mtime=mtime, grace_s=self.settings.grace_s)
        if self._team is not None and self._team.pod.position != 0:
            return
        self._saver.for_hook.remove()
        if deadline is None:
            pids = [os.getpid()] if self._team is None else self._team.pids
            self._file.write(signal_file.INIT, pids=",".join(map(str, pids)))

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
        if loaded.loop is not None:
            self._place.load(loaded.loop, loaded.random)
        self._counters.load((loaded.loop or {}).get("epochs", {}))
        if loaded.random:
            randomness.restore(loaded.random)
        self._after_load()
        log("loaded", ckpt=loaded.ckpt, step=loaded.step, bytes=loaded.size, took_s=time.monotonic() - start_s)
        return loaded.ckpt

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
    def is_decided(self) -> bool:
        return self._leaving.is_decided.is_set()

    def batches(self, loader: Any) -> Batches[Any]:
        return Batches(loader, self.iterate)

    def iterate(self, loader: Any) -> Any:
        self.mark_explicit()
        return self.loops.iterate(loader)

    def mark_explicit(self) -> None:
        """From now on only what the script marks is a safe point."""
        if not self._is_explicit:
            self._is_explicit = self._leaving.marks_safe_points = True
            for hook in self._forward_hooks:
                hook.remove()
            self._forward_hooks.clear()

    def epochs(self, total: int, *, name: str, start: int | None) -> Iterator[int]:
        """`migrator.epochs()`."""
        count = self._counters.begin(name, start, is_stopped=self.has_news)
        return counters.run(count, total, self._next_epoch)

    def _next_epoch(self) -> None:
        # Where `batches()` marks the place in the epoch, it says as well when the next one begins.
        if not self._place.noted:
            self.entered(is_new_round=True)

    def boundary(self) -> None:
        if self.gate.phase is Phase.DIRTY:
            self.safe_point()

    def entered(self, *, is_new_round: bool) -> None:
        if self.gate.phase is Phase.DIRTY:
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

    def left_early(self) -> None:
        """A `break` and an exception look the same from here; what tells them apart is whether the step is complete."""
        if self._leaving.main_is_out.is_set():
            return  # a loop that nobody ended, at the end of the interpreter
        expected = self._finished_before
        if expected is None:
            expected = frozenset(id(o) for o in self._registry.optimizers())
        if self.gate.phase is Phase.DIRTY and self._finished and self._finished == expected:
            self.safe_point(may_stay=False)

    def safe_point(self, *, may_stay: bool = True) -> None:
        """The loop could start again here."""
        if self.gate.phase is Phase.FRESH:
            self._check_resume_was_not_ignored()  # not everything that trains does it by an optimizer
        self.step += 1
        self._turn = 0
        self._unsaved_steps = 0
        self._finished_before, self._finished = frozenset(self._finished), set()
        if not self.loops.is_live:
            self._place.begin_anew()
        self.loops.count_current()
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
        """Changes with every step and every backward pass."""
        return self._steps, self._gradients()

    def _gradients(self) -> list[object]:
        """What tells the gradients apart that the last parameter of each optimizer has had."""
        marks: list[object] = []
        for optimizer in self._registry.optimizers():
            params = optimizer.param_groups[-1]["params"]
            grad = params[-1].grad if params else None
            marks.append(None if grad is None else (id(grad), grad._version))
        return marks

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gate.phase is Phase.FRESH:
            self._check_resume_was_not_ignored()
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
        self._finished.add(id(optimizer))
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

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is not registered: its momentum will not be in the ckpt."""
        self._known_optimizers.add(id(optimizer))
        for group in optimizer.param_groups:
            for param in group["params"]:
                owner = self._registry.owner_of(param)
                if owner is not None:
                    self._unproven[id(optimizer)] = owner
                    return

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

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module.training and self.gate.phase is Phase.DIRTY and self._finished and not self._is_explicit:
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
        newest = self._saver.newest
        if self.gate.phase in (Phase.FRESH, Phase.LOADED):
            return newest.ckpt if newest else None
        in_main = threading.get_ident() == self._thread
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
        self.close()
        if self._leaving.news is not None:
            self._leaving.leave()
        atexit.unregister(self.close)
        self._finalizer.cancel()
        self._sigterm.put_back()

    def close(self) -> None:
        """At exit: let a running save end, stop all threads, take the signal file away. May be called twice."""
        if os.getpid() != self._pid or self._leaving.main_is_out.is_set():
            return
        self._sigterm.is_exiting = True
        self.gate.close()
        end_s = time.monotonic() + NEWS_BEHIND_S
        # Where a handler of the script's own took the place of ours, only the watcher knows of a SIGTERM.
        while self._leaving.news is None and time.monotonic() < end_s:
            if not (self._sigterm.is_heard or self._sigterm.is_pending):
                break
            time.sleep(0.002)
        if self._leaving.news is not None:
            while not self._leaving.may_leave():
                self._leaving.is_decided.wait(0.05)
        if self._team is not None and self._leaving.news is None:
            self._team.say_bye()
        self._leaving.main_is_out.set()
        self._saver.close(EXIT_WAIT_S if self._leaving.news is None else 5.0)
        self._watcher.close()
        if self._team is not None:
            self._team.close()
        self.gate.remove()
        for hook in self._forward_hooks:
            hook.remove()
        self._sigterm.close()
        if self._leaving.news is None:
            if self._team is None or self._team.is_last_of_pod():
                self._file.remove()
            return
        self._wait_for_hook()
        if getattr(sys, "last_value", None) is not None:
            # An exception ended the script while it was leaving. The code must still say: start me again.
            self._leaving.exit_now("an exception came while leaving")
        if self._leaving.ends_unfinished and not self.settings.keep_exit_code:
            self._leaving.end_with_exit_code()
        self._leaving.script_end.close()

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


def _about() -> dict[str, Any]:
    return {
        "host": environment.pod_name(),
        "pid": os.getpid(),
        "time": time.time(),
        "script": sys.argv[0] if sys.argv else "",
        "argv": sys.argv[1:],
    }
