"""`batches()`: the training loop's own line, where safe points come from.

Each time the loop asks for the next batch, the one before is finished. If an
optimizer stepped since the last safe point, that moment is one: everything the
loop would need to start again there is whole. So batches between two steps
(accumulation) belong together without a word from the script, and the cursor moves
by what the loop was handed, never by what loader workers have fetched ahead.

A loop that is left by `break` is over. One that is left by an exception is not,
and the iteration it was in is no safe point.

Only the outermost `batches()` makes safe points; one inside it (an evaluation)
hands its batches through.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import nn

from migrator.errors import UsageError
from migrator.events import log
from migrator.loop.followed_loop import FollowedLoop, Training
from migrator.loop.position import Place
from migrator.loop.wrapping_iterators import SIDE_BY_SIDE, Between
from migrator.platform import script_frames

Batch = TypeVar("Batch")
_NO_SECOND_START = (
    "batches(...) was given a {}, which can be iterated only once, so it could not be started again on resume. "
    "Give it the loader itself: enumerate(migrator.batches(loader))."
)
_SIDE_THREAD = (
    "batches(loader) is iterated in the thread {!r}. A finished batch is a safe point only where it is trained: "
    "iterate it in the main thread, and fetch ahead inside the loader (num_workers, prefetch_factor)."
)


class Batches(Generic[Batch]):
    """What `batches(loader)` returns: iterates as the loader does, and `len()` is the whole epoch."""

    def __init__(self, loader: Any, loops: Loops, called: tuple[str | None, tuple[str, str]]) -> None:
        self._loader = loader
        self._loops = loops
        self._called = called
        self.done = 0
        """How many batches of the epoch are finished; inside the loop, the index of the present batch."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        held: list[Any] = []
        iterator = self._loops.iterate(self._loader, self, self._called, held)
        held.append(weakref.ref(iterator))
        return iterator

    def __getattr__(self, name: str) -> Any:
        # Scripts read the loader's `dataset`, `sampler`, `batch_size` and other attributes here.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)


class Loops:
    """All `batches()` of a session; at most one of them makes safe points at a time."""

    def __init__(self, training: Training, place: Place, registered: Mapping[str, Any]) -> None:
        self._training = training
        self._place = place
        self.registered = registered
        self._live: FollowedLoop | None = None
        self._has_warned = False
        self._looked_around: set[str] = set()
        self._start_late: set[str] = set()
        """Loops inside an `enumerate` that does not begin at 0; it may begin at another number each time."""
        self._call_script: set[str] = set()
        """Loops inside a `map` or `filter`, which call functions of the script."""
        self.is_fetching = False
        """The live loop is asking its loader for an iterator or a batch."""

    def batches(self, loader: Any, name: str | None) -> Batches[Any]:
        return Batches(loader, self, (name, script_frames.place_in_script(sys._getframe())))

    def iterate(
        self, loader: Any, batches: Batches[Any], called: tuple[str | None, tuple[str, str]], held: list[Any]
    ) -> Iterator[Any]:
        """The generator behind one `for`.

        `called`: the name given to `batches()`, and the place of the call. `held`: a weak reference to this generator.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(_SIDE_THREAD.format(threading.current_thread().name))
        if self._live is not None:
            yield from self._inner(self._live, loader, batches)
            return
        if _is_one_shot(loader):
            raise UsageError(_NO_SECOND_START.format(type(loader).__name__))
        loop = self._live = FollowedLoop(loader, self._training, self._place, self.registered, called)
        # Until this block ends, in whatever way, the loop is the live one.
        try:
            yield from self._run(loop, batches, held)
        finally:
            self._live = None
            loop.end(may_end_workers=self._training.is_decided)

    def _inner(self, outer: FollowedLoop, loader: Any, batches: Batches[Any]) -> Iterator[Any]:
        """A loop inside another one, for example an evaluation, is not followed."""
        before = outer.batches_handed
        for done, batch in enumerate(loader):
            if outer.batches_handed != before and self._live is outer:
                raise UsageError(SIDE_BY_SIDE)
            batches.done = done
            yield batch

    @property
    def is_live(self) -> bool:
        """A loop that makes safe points is under way."""
        return self._live is not None

    def _run(self, loop: FollowedLoop, batches: Batches[Any], held: list[Any]) -> Iterator[Any]:
        training = self._training
        at = script_frames.loop_in_script(sys._getframe())
        with self._fetching():
            loop.start(at)
        self._look_around(loop, held[0]())
        mark, unused = training.body_mark(), 0
        while True:
            if training.is_leaving:
                training.park()
            try:
                with self._fetching():
                    batch = next(loop.iterator)
            except StopIteration:
                loop.over()
                batches.done = loop.batches_done
                return
            except Exception as error:
                # Loader workers die with the process group when the pod is stopped: that is not an error of the run.
                if not training.has_notice:
                    raise
                log("loader_error_swallowed", level=logging.WARNING, error=error)
                training.park_for_good()
            batches.done = loop.batches_done
            loop.handed()
            training.handing_out()
            took = script_frames.takers(sys._getframe())
            try:
                yield batch
            except GeneratorExit:
                may_end = loop.label.text not in self._call_script
                at_will = script_frames.is_left_at_will(sys._getframe(), took=took, may_end=may_end)
                loop.left(is_over=training.left_early(at_will=at_will))
                raise
            training.boundary()
            now = training.body_mark()
            unused += now == mark
            if unused and not self._has_warned and (loop.has_stepped or self._trains()):
                self._warn_unused()
            mark = now

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        self.is_fetching = True
        try:
            yield
        finally:
            self.is_fetching = False

    def _look_around(self, loop: FollowedLoop, iterator: Any) -> None:
        """Check the iterators between this one and the script's loop, and make those that count go on at our place."""
        label = loop.label.text
        if label in self._looked_around and not loop.batches_done and label not in self._start_late:
            return
        self._looked_around.add(label)
        between = Between(iterator, sys._getframe())
        if any(between.starts):
            self._start_late.add(label)
        if between.calls_script:
            self._call_script.add(label)
        between.check()
        if loop.batches_done:
            between.go_on_at(loop.batches_done, loop.starts)
        else:
            loop.starts = between.starts

    def count_current(self) -> None:
        """At a safe point: all batches handed out are trained."""
        if self._live is not None:
            self._live.count()

    @property
    def has_trained(self) -> bool:
        """The live loop has made a safe point."""
        return self._live is not None and self._live.has_stepped

    def leave_live(self) -> None:
        """The live loop was left by `break`: it is over."""
        if self._live is not None:
            self._live.leave()

    def _trains(self) -> bool:
        return any(isinstance(target, nn.Module) and target.training for target in self.registered.values())

    def _warn_unused(self) -> None:
        self._has_warned = True
        log(
            "batch_unused",
            level=logging.WARNING,
            means="two batches were taken from migrator.batches() with neither a backward pass nor a step in between; "
            "if the loop looks ahead, the batch it holds back counts as trained and would be missing after a resume: "
            "train each batch before taking the next",
        )


def _is_one_shot(loader: Any) -> bool:
    """A plain iterator, which can be gone over only once; classes of the script are taken to be more than that."""
    makers = ("builtins", "itertools", "torch.utils.data.dataloader")
    return hasattr(loader, "__next__") and type(loader).__module__ in makers
