"""What the saving thread asks of the way in which ckpts are made: by this process alone, or with the other ranks.

The thread knows when something is to be saved and what is done around a save; a strategy knows which safe point is
taken and who writes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from migrator.errors import StorageError
from migrator.leaving.leaving import Leaving, Outcome
from migrator.notice.signal_file import SignalFile
from migrator.notice.watcher import Notice
from migrator.save.attempt_factory import AttemptFactory
from migrator.save.changed_objects import ChangedObjects
from migrator.save.context import SaveContext
from migrator.save.cost import Cost
from migrator.save.memory_keeper import MemoryKeeper
from migrator.save.reply import Pod, Reply
from migrator.save.results import Saved
from migrator.save.saved_ckpts import SavedCkpts
from migrator.save.schedule import Schedule
from migrator.save.speed import Speed
from migrator.save.tickets import Ticket
from migrator.settings import Settings

TICK_S = 0.05
"""Maximum time in seconds of one wait for a safe point. Then the caller checks whether it is still wanted."""


class SaverTools:
    """What the saving thread and its strategy work with."""

    def __init__(
        self,
        context: SaveContext,
        settings: Settings,
        leaving: Leaving,
        file: SignalFile,
        *,
        pod: Pod | None = None,
        on_advance: Callable[[], None] | None = None,
    ) -> None:
        self.context = context
        self.leaving = leaving
        self.grace_s = settings.grace_s
        self.measure = settings.measure
        self.cond = threading.Condition()
        """Guards what was asked for; the saving thread waits at it. Taken before the gate's lock, never inside it."""
        self.schedule = Schedule(settings.every, keeps_time=context.rank == 0)
        self.ckpts = SavedCkpts(context, keep=settings.keep)
        self.changed_objects = ChangedObjects(context.gate)
        pod = pod or Pod()
        self.reply = Reply(settings, leaving, file, pod)
        self.speed = Speed(settings.grace_s, warns=self.reply.speaks and not context.is_warned)
        self.cost = Cost(context.gate, warns=context.rank == 0)
        self.attempts = AttemptFactory(context, leaving, self.speed, self.reply.for_hook, on_advance)
        self.memory = MemoryKeeper(context, self.attempts, pod)


class Strategy(Protocol):
    """Alone (`Solo`) or with the other ranks (`Group`)."""

    # Called by other threads.

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        """Called before the saving thread starts. `on_notice` is called with a notice that another rank passes on."""

    def ask(self) -> Ticket:
        """Save the newest safe point, or the next one; the ticket tells how it went."""

    def at_step(self, step: int, *, is_next_due: bool) -> None:
        """A safe point was reached. `is_next_due`: the schedule has a save for the next one."""

    def pass_on(self, notice: Notice) -> None:
        """This pod must leave: pass the notice on to the ranks that save with this process."""

    def close(self) -> None:
        """No further save is taken on. Called with the condition held."""

    # Called by the saving thread with the condition held.

    @property
    def is_wanted(self) -> bool:
        """There is something to save, whatever the time."""

    @property
    def is_asked(self) -> bool:
        """A caller waits for a save."""

    # A save that goes on.

    def begin(self) -> bool:
        """Choose what is saved next. False: nothing now."""

    def save(self) -> Saved:
        """Raises `GivenUp` if a notice comes first, `Postponed` or `Missed` if this safe point cannot be saved now."""

    def end(self, saved: Saved | None, failure: Exception | None) -> None:
        """Let the loop go on, and answer the callers that waited."""

    def retire(self) -> None:
        """Delete old ckpts after a commit. Only the rank that made the commit does this."""

    # The last save.

    def save_last(self, failure: StorageError | None) -> Saved:
        """Called again after an error of storage. `failure`: the one which keeps this process from writing for good.

        Raises `NothingToSave` if nothing was trained.
        """

    def leave_to_others(self, failure: StorageError) -> bool:
        """This process cannot write. True: other ranks may, so `save_last` is worth another call."""

    def end_last(self, outcome: Outcome) -> None:
        """The hook has its answer. Answer the callers that waited, and stay while another process needs this one."""
