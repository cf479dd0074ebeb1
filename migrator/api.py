"""The one object a training script talks to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, SupportsIndex, TypeVar

from migrator import events, settings
from migrator.errors import UsageError
from migrator.loop.batches import Batches
from migrator.loop.epoch_counters import Meter
from migrator.nodecheck import script
from migrator.nodecheck.check import Options, Verdict
from migrator.notice import inbox, termination_message
from migrator.session import session
from migrator.session.session import Session
from migrator.state.registry import Registry

Batch_co = TypeVar("Batch_co", covariant=True)
Batch = TypeVar("Batch")


class Loader(Sized, Iterable[Batch_co], Protocol[Batch_co]):
    """What `batches()` takes: anything that can be iterated more than once and has a length."""


class Migrator:
    """Registers what makes up the training, listens for the notice, saves, and loads.

    There is one instance in the package (`from migrator import migrator`). Other
    instances are for tests only: a process listens once.
    """

    def __init__(self) -> None:
        self._registry = Registry()
        self._session: Session | None = None
        self._closed: set[tuple[Path | str, str]] = set()
        """Root and job of the sessions that were closed."""

    def register(self, name: str, value: Any, *, own: bool = False) -> None:
        """Make `value` part of every ckpt, under `name`, and let `load_ckpt()` restore it in place.

        Takes modules, optimizers, schedulers, GradScalers, samplers, dicts, lists, sets, tensors,
        arrays, random generators, the states of DDP's communication hooks (PowerSGD, post-local SGD), and every object
        with `state_dict()` and `load_state_dict()`.

        `own=True`: each rank has a value of its own, large tensors included (a replay buffer, a batch fetched ahead),
        and gets that one back. Without it large tensors are taken to be the same on all ranks, and saved once.
        """
        termination_message.explain_errors()
        if self._session is not None:
            raise UsageError(
                f"register({name!r}, ...) after listening(): it would be missing in saves made meanwhile "
                "and in what was loaded. Register everything first."
            )
        self._registry.add(name, value, own=own)

    def watch(self) -> None:
        """Notice SIGTERM and the hook's request from now on; `listening()` then leaves before a step is trained.

        For the top of a script that takes long to reach `listening()`. `import migrator; migrator.watch()` does not
        import torch. A second call, or one after `listening()`, does nothing.
        """
        if self._session is None:
            inbox.watch()

    def check_nodes(
        self,
        *,
        timeout_s: float = 60.0,
        arrive_s: float = 600.0,
        repeat: int = 10,
        exclude_stragglers: bool = False,
    ) -> Verdict:
        """Find nodes at fault and slow nodes: call it on all ranks, after `init_process_group()`.

        If a pod has to be replaced, all ranks raise `NodeFault`, which ends the process. `timeout_s` is the deadline
        of each of the two rounds, `arrive_s` that of the slowest rank to come here. A slow node is only reported,
        unless `exclude_stragglers` is set.
        """
        return script.check_nodes(
            Options(timeout_s=timeout_s, arrive_s=arrive_s, repeat=repeat, exclude_stragglers=exclude_stragglers)
        )

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
        """Begin: read the settings, find the ckpts, watch for the notice. Main thread, once, after all `register()`.

        An argument takes precedence over its environment variable (`MIGRATOR_CKPT`, `MIGRATOR_JOB`, ...).
        """
        import threading

        termination_message.explain_errors(signal=signal)
        if self._session is not None:
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
        self._session = session.begin(found, self._registry)

    @property
    def resume(self) -> bool:
        """Whether there is a ckpt to go on from. Known after `listening()`."""
        return self._listening("resume").can_load

    @property
    def is_leaving(self) -> bool:
        """Whether a notice came: the state is being saved, and this process will end.

        Not needed for saving. Use it to skip work that should not begin any more, for example a long evaluation. It
        changes at different moments on different ranks, so never let it decide what all ranks have to do alike.
        """
        return self._session is not None and self._session.is_leaving_for_script()

    def load_ckpt(self, map_location: Any = None) -> str | None:
        """Restore everything registered from the newest whole ckpt; returns its name, or None if there is none.

        `map_location` is accepted because the predecessor did, and has no effect: the tensors go to the devices of
        the registered objects.
        """
        return self._listening("load_ckpt()").load()

    def batches(self, loader: Loader[Batch], name: str | None = None) -> Batches[Batch]:
        """Wrap the training loader: `for batch in migrator.batches(loader)`. Every finished batch is a safe point.

        The result also has the attributes of the loader: `dataset`, `sampler`, `batch_size`. `name` is needed for
        loops that cannot be told apart otherwise: loops over loaders that look alike, at one place of the script.
        """
        return self._listening("batches()").batches(loader, name)

    def epochs(self, total: int, *, name: str = "epochs", start: int | None = None) -> Iterator[int]:
        """`for epoch in migrator.epochs(10)`: count as `range(10)` does, from the epoch of the ckpt on.

        Several such loops in one script need a `name` each. When a second one begins, the first one is over, even if
        it was left by `break`.
        `start`: the first epoch if the ckpt does not hold one, because the script had no `epochs()` when it was made.
        """
        for what, number in (("total", total), ("start", 0 if start is None else start)):
            if type(number) is not int or number < 0:
                raise UsageError(f"epochs(...): {what} is {number!r}, expected a whole number from 0")
        return self._listening("epochs()").epochs(total, name=name, start=start)

    def meter(self, name: str) -> Meter:
        """A sum and a count that continue after a resume, registered under `name`. For the mean loss of an epoch.

        Call it before `listening()`, like `register()`. With several ranks each rank has its own.
        """
        meter = Meter()
        self.register(name, meter)
        return meter

    def progress(
        self,
        *,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        batches: SupportsIndex,
        latency_s: SupportsFloat,
        loss: SupportsFloat,
        accuracy: SupportsFloat,
    ) -> None:
        """Print one line to stdout, in the form that KubeDL's autoscaler reads. Only rank 0 and `<job>-worker-0` print.

        `latency_s`: the seconds of this batch; KubeDL ignores a line with more than 1. `accuracy`: in percent.
        Tensors of one element are fine. What the form cannot tell is never read as something else: see docs/api.md.
        """
        self._listening("progress()").progress(
            epoch=epoch, batch=batch, batches=batches, latency_s=latency_s, loss=loss, accuracy=accuracy
        )

    def safe_point(self) -> None:
        """Mark a place where the loop could start again. Not needed with `batches()`."""
        self._listening("safe_point()").safe_point()

    def restore_random(self) -> bool:
        """Put all random states back to those of the ckpt that was loaded; returns False if none was.

        For frameworks that skip the trained batches of an epoch themselves and draw random numbers meanwhile: call it
        when they have skipped them. `batches()` needs no such call.
        """
        return self._listening("restore_random()").restore_random()

    def save_ckpt(self, wait: bool = True) -> str | None:
        """Save now. With `wait` it returns the ckpt's name when it is durable; without it training goes on at once.

        After a step the call itself is a safe point. Elsewhere the last safe point is saved.
        """
        return self._listening("save_ckpt()").save(wait=wait)

    def close(self) -> None:
        """End this session, so that the process can register other objects and call `listening()` again.

        For notebooks and for several trainings in one process (folds). It waits for a save under way and saves nothing
        itself. A script that trains once needs no `close()`.
        """
        import threading

        if threading.current_thread() is not threading.main_thread():
            raise UsageError("close() was called in a side thread. Call it in the main thread.")
        if self._session is not None:
            self._session.close()
            self._closed.add((self._session.settings.ckpt, self._session.settings.job))
        self._session, self._registry = None, Registry()

    def _listening(self, what: str) -> Session:
        if self._session is None:
            raise UsageError(
                f"{what} before listening(): call register() for each object, then listening(), then this."
            )
        return self._session
