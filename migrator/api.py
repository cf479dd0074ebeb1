"""The one object a training script talks to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Protocol, TypeVar

from migrator import events, settings
from migrator.notice import termination_message as last_word
from migrator.session import session as life
from migrator.notice import inbox as lookout
from migrator.loop.epoch_counters import Meter
from migrator.errors import UsageError
from migrator.session.session import Life
from migrator.loop.followed_loop import Batches
from migrator.state.registry import Registry

Batch_co = TypeVar("Batch_co", covariant=True)
Batch = TypeVar("Batch")


class Loader(Sized, Iterable[Batch_co], Protocol[Batch_co]):
    """What `batches()` takes: anything that can be iterated again and knows its length."""


class Migrator:
    """Registers what makes up the training, listens for the signal, saves, and loads.

    One instance is made with the package (`from migrator import migrator`). Another
    one is only of use in tests: a process listens once.
    """

    def __init__(self) -> None:
        self._registry = Registry()
        self._life: Life | None = None
        self._closed: set[tuple[Path, str]] = set()
        """Root and job of the lives that were closed."""

    def register(self, name: str, value: Any, *, own: bool = False) -> None:
        """Make `value` part of every ckpt, under `name`, and let `load_ckpt()` restore it in place.

        Takes modules, optimizers, schedulers, GradScalers, samplers, dicts, lists, sets, tensors,
        arrays, random generators, the states of DDP's communication hooks (PowerSGD, post-local SGD), and whatever has
        `state_dict()` and `load_state_dict()`.

        `own=True`: each rank has its own, large tensors too (a replay buffer, a batch fetched ahead), and each
        gets its own back. Without it large tensors are taken to be the same on all ranks, and saved once.
        """
        last_word.explain_errors()
        if self._life is not None:
            raise UsageError(
                f"register({name!r}, ...) after listening(): it would be missing in saves made meanwhile "
                "and in what was loaded. Register everything first."
            )
        self._registry.add(name, value, own=own)

    def watch(self) -> None:
        """Notice SIGTERM and the hook's request from now on; `listening()` then leaves before a step is trained.

        For the top of a script that takes long to come to `listening()`. `import migrator; migrator.watch()` does
        it without importing torch. Calling it twice, or after `listening()`, does nothing.
        """
        if self._life is None:
            lookout.watch()

    def listening(
        self,
        *,
        ckpt: str | None = None,
        job: str | None = None,
        signal: str | None = None,
        grace_s: float | None = None,
        every: str | int | None = None,
        keep: int | None = None,
        exit_code: int | None = None,
        keep_exit_code: bool | None = None,
        resume: str | None = None,
        loops: str | None = None,
        ranks: str | int | None = None,
    ) -> None:
        """Begin: read the settings, find the ckpts, watch for the signal. Main thread, once, after all `register()`.

        An argument beats its environment variable (`MIGRATOR_CKPT`, `MIGRATOR_JOB`, ...).
        """
        import threading

        last_word.explain_errors(signal=signal)
        if self._life is not None:
            raise UsageError("listening() was called already: once is enough.")
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "listening() was called in a side thread, where Python delivers no signals. Call it in the main thread."
            )
        if not len(self._registry):
            raise UsageError(
                "listening() before any register(): there would be nothing to save. "
                'Call migrator.register("model", model) and so on first.'
            )
        events.ensure_visible()
        given = {
            "ckpt": ckpt,
            "job": job,
            "signal": signal,
            "grace_s": grace_s,
            "every": every,
            "keep": keep,
            "exit_code": exit_code,
            "keep_exit_code": keep_exit_code,
            "resume": resume,
            "loops": loops,
            "ranks": ranks,
        }
        import os

        found = settings.read(given, os.environ)
        if (found.ckpt, found.job) in self._closed and resume is None:
            raise UsageError(
                f"listening() again for the job {found.job!r}, which this process has closed: its ckpts would be "
                "loaded into what is registered now. For another training give it a name of its own: "
                'listening(job="fold-2"). To go on with the same one: listening(resume="auto").'
            )
        self._life = life.begin(found, self._registry)

    @property
    def resume(self) -> bool:
        """There is a ckpt to go on from. Known after `listening()`."""
        return self._listening("resume").can_load

    @property
    def is_leaving(self) -> bool:
        """A notice came: the state is being saved, and this process will be ended.

        Not needed for saving. It is for what should not be begun any more, a long evaluation for example. Ranks
        hear of a notice at different moments, so it decides nothing that all ranks have to do alike.
        """
        return self._life is not None and self._life.is_leaving_for_script()

    def load_ckpt(self, map_location: Any = None) -> str | None:
        """Restore everything registered from the newest whole ckpt; its name, or None if there is none.

        `map_location` is accepted as the predecessor did and means nothing: what is
        loaded goes to where the registered objects are.
        """
        return self._listening("load_ckpt()").load()

    def batches(self, loader: Loader[Batch], name: str | None = None) -> Batches[Batch]:
        """Wrap the training loader: `for batch in migrator.batches(loader)`. Every finished batch is a safe point.

        What it returns has the attributes of the loader as well: `dataset`, `sampler`, `batch_size`. `name` tells apart
        loops that cannot be told apart otherwise: loaders that look alike, gone over at one place of the script.
        """
        return self._listening("batches()").batches(loader, name)

    def epochs(self, total: int, *, name: str = "epochs", start: int | None = None) -> Iterator[int]:
        """`for epoch in migrator.epochs(10)`: count as `range(10)` does, from the epoch in which the ckpt stands.

        Several such loops in one script need a `name` each. When a second one begins, the first one is over, also if
        it was left by `break`.
        `start` is where to begin if there is a ckpt and it does not say: it was made by a script without `epochs()`.
        """
        for what, number in (("total", total), ("start", 0 if start is None else start)):
            if type(number) is not int or number < 0:
                raise UsageError(f"epochs(...): {what} is {number!r}, expected a whole number from 0")
        return self._listening("epochs()").epochs(total, name=name, start=start)

    def meter(self, name: str) -> Meter:
        """A sum and a count that a resume continues, registered under `name`; for the mean loss of an epoch.

        Before `listening()`, as `register()`. With several ranks each has its own.
        """
        meter = Meter()
        self.register(name, meter)
        return meter

    def safe_point(self) -> None:
        """Say that the loop could start again right here. Not needed with `batches()`."""
        self._listening("safe_point()").safe_point_of_script()

    def restore_random(self) -> bool:
        """Put all random states back to those of the ckpt that was loaded; False if none was.

        For frameworks that skip the batches of a resumed epoch by themselves and draw random numbers while they do:
        call it when they are through. `batches()` needs no such call.
        """
        return self._listening("restore_random()").restore_random()

    def save_ckpt(self, wait: bool = True) -> str | None:
        """Save now; with `wait` it returns the name when the ckpt is durable, without it training goes on at once.

        After a step this is a safe point; elsewhere the last safe point is saved.
        """
        return self._listening("save_ckpt()").save(wait=wait)

    def close(self) -> None:
        """End this life, so that the process can register other objects and call `listening()` again.

        For notebooks and for several trainings in one process (folds). Waits for a save under way; it saves nothing
        by itself. A script that trains once needs no `close()`.
        """
        import threading

        if threading.current_thread() is not threading.main_thread():
            raise UsageError("close() was called in a side thread. Call it in the main thread.")
        if self._life is not None:
            self._life.end()
            self._closed.add((self._life.settings.ckpt, self._life.settings.job))
        self._life, self._registry = None, Registry()

    def _listening(self, what: str) -> Life:
        if self._life is None:
            raise UsageError(
                f"{what} before listening(): call register() for each object, then listening(), then this."
            )
        return self._life
