"""How a process leaves when its state is saved, or cannot be saved any more.

Before the commit nothing may end the process; after it there is nothing to lose.
`Migrated` is then raised in the main thread, wherever it is, so that its `finally`
blocks run. `os._exit` is used only if the main thread cannot be interrupted (it
hangs in C code), or if its clean-up takes longer than the deadline.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from migrator.errors import Migrated
from migrator.events import log
from migrator.leaving.script_end import ScriptEnd, end_with
from migrator.leaving.staying import wait_for_agent
from migrator.notice.sigterm import Sigterm, quieten_sigchld
from migrator.notice.watcher import EXIT_MARGIN_S, Notice
from migrator.platform.launcher import Agent

CALL_BACK_S = 2.0
"""Maximum time, in seconds, to wait for the main thread to return from C code and raise `Migrated`."""
HOOK_READS_S = 2.0
"""Maximum time, in seconds, that the exit waits for the hook to read the answer: the container may end with this
process."""
STUCK_S = 5.0
"""After the deadline, a save is given up if it has made no progress for this time, in seconds."""


@dataclass(frozen=True)
class Outcome:
    """The result of the last save."""

    is_safe: bool
    why: str
    ckpt: str | None = None
    step: int | None = None
    size: int = 0
    late: str | None = None
    """A later life that goes on without this ckpt, although the ckpt is safe."""


class Leaving:
    """The state of this process from the notice to its end."""

    def __init__(self, *, sigterm: Sigterm, exit_code: int, agent: Agent | None = None) -> None:
        self._sigterm = sigterm
        self._exit_code = exit_code
        self._agent = agent
        self._exits_once = threading.RLock()
        self.notice: Notice | None = None
        self.outcome: Outcome | None = None
        self._is_given_up = False
        """The process ends while its last save still waits for the storage, and that was said."""
        self.is_decided = threading.Event()
        self.main_is_out = threading.Event()
        self.hook: int | None = None
        """The pid of the hook that waits for the answer, if the request names it."""
        self.advanced_s = time.monotonic()
        """When the save last made progress, on the monotonic clock."""
        self.pod_is_dying = False
        """The notice is for this pod, not only for another pod of the job."""
        self.is_terminated = False
        """SIGTERM has arrived, as the first notice or later."""
        self.is_again = False
        """The pod has saved already, and its agent has started the ranks again."""
        self.marks_safe_points = False
        """The script calls `batches()` or `safe_point()`."""
        self.script_end = ScriptEnd()
        self.script_knows = False
        """The script has received the notice itself, on this rank or another one, and may end early because of it."""

    def begin(self, notice: Notice) -> bool:
        """Take a notice. True if it is the first one. A later one counts only if its deadline is earlier."""
        if self.notice is not None:
            if notice.deadline_s < self.notice.deadline_s and self.outcome is None:
                # For example an agent's SIGTERM after the hook's request: the agent has a shorter timeout of its own.
                since_s = self.notice.deadline_s - self.notice.grace_s
                self.notice = replace(self.notice, deadline_s=notice.deadline_s, grace_s=notice.deadline_s - since_s)
            return False
        self.notice = notice
        self.advanced_s = time.monotonic()
        return True

    @property
    def left_s(self) -> float:
        """Seconds until the process has to begin its exit."""
        assert self.notice is not None
        return self.notice.deadline_s - time.monotonic() - EXIT_MARGIN_S

    def hear(self, notice: Notice) -> None:
        """Note what a notice says, the first one or a later one."""
        self.pod_is_dying |= notice.is_local
        self.is_terminated |= notice.source == "SIGTERM"
        self.is_again |= notice.is_again

    def stay_for_agent(self, *, speaks: bool, pod_is_asked: bool = False) -> None:
        """Wait for the agent's SIGTERM: it would start a rank that leaves earlier again, inside the dying pod.

        `pod_is_asked`: the signal file says that the pod must leave, whoever brought the notice.
        """
        self.pod_is_dying |= pod_is_asked
        if self._agent is None or not self.pod_is_dying:
            return
        assert self.notice is not None
        if self.is_again and speaks and not self.is_terminated and self._agent.end():
            log(
                "agent_ended",
                level=logging.WARNING,
                agent=self._agent.pid,
                means="it started ranks in a pod that has saved and is about to end, and would start them again: the "
                "groups of other pods would break each time. SIGTERM was sent to it, as kubelet is about to do",
            )
        wait_for_agent(self._agent, is_terminated=lambda: self.is_terminated, deadline_s=self.notice.deadline_s)

    def decide(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.is_decided.set()

    @property
    def why_no_safe_point(self) -> str:
        """Why no safe point was reached before the deadline, and what the user can do about it."""
        if self.marks_safe_points:
            return (
                "no safe point was reached within the grace: one step, or other work between two safe points, took "
                "longer than that; make the grace longer, or the time between two safe points shorter"
            )
        return (
            "no safe point was reached within the grace: wrap the training loader in migrator.batches(), "
            "or call migrator.safe_point() after each step"
        )

    def note_script_knows(self) -> None:
        """The script has received the notice: from now on note with which code it ends."""
        self.script_knows = True
        self.script_end.watch()

    def migrated(self) -> Migrated:
        """Make the exception that ends the thread in which it is raised."""
        # A side thread of the script may raise it too, in the gate. The main thread is then still to be interrupted.
        if threading.current_thread() is threading.main_thread():
            self._sigterm.was_raised.set()
            self.script_end.watch()  # the script may catch the exception
            quieten_sigchld()  # a dying loader worker must not interrupt the script's clean-up
        outcome = self.outcome
        if outcome is None and not self._is_given_up:
            self._is_given_up = True
            stuck_s = time.monotonic() - self.advanced_s
            why = f"the save has made no progress for {stuck_s:.0f} s, and the deadline is over: see the storage"
            log("save_failed", level=logging.ERROR, why=why)
        return Migrated(
            self._exit_code,
            ckpt=outcome.ckpt if outcome else None,
            step=outcome.step if outcome else None,
        )

    def may_leave(self) -> bool:
        """The outcome is known, or the deadline is over and the save makes no progress."""
        if self.is_decided.is_set():
            return True
        stuck_s = time.monotonic() - self.advanced_s
        return self.notice is not None and self.left_s < 0 and stuck_s > STUCK_S

    def leave(self) -> NoReturn:
        """Raise `Migrated`."""
        raise self.migrated()

    def see_off(self) -> None:
        """Side thread, after the outcome: end the main thread, by `os._exit` if necessary."""
        assert self.notice is not None
        self._sigterm.raise_now = self.migrated
        end_s = time.monotonic() + CALL_BACK_S
        while not (self._sigterm.was_raised.is_set() or self.main_is_out.is_set()):
            # A handler of the script may be saving something, too. It may use the whole grace for that.
            if time.monotonic() > (max(end_s, self.notice.deadline_s) if self._sigterm.is_in_handler else end_s):
                self.exit_now("the main thread did not come back")
            self._sigterm.interrupt_main()
            self._sigterm.was_raised.wait(0.1)
        while not self.main_is_out.wait(0.05):
            if time.monotonic() > max(end_s, self.notice.deadline_s):
                self.exit_now("cleaning up took longer than the grace")

    @property
    def ends_unfinished(self) -> bool:
        """The script is about to end with 0, although it was interrupted or may have stopped early."""
        return (self.script_knows or self._sigterm.was_raised.is_set()) and self.script_end.is_zero

    def end_with_exit_code(self) -> None:
        """At exit: end the process in the normal way, but with the exit code that requests a restart."""
        log(
            "exit_code_changed",
            level=logging.WARNING,
            exit_code=self._exit_code,
            means="the script ended with 0 while this process was leaving, after it had received the notice or caught "
            "the exit: it may have stopped early",
        )
        if not end_with(self._exit_code):
            self.exit_now("the exit code can be changed in no other way here")

    def exit_now(self, why: str) -> None:
        """End the process at once, without running more code of the script."""
        # Two deadlines may end at the same moment. The second thread waits here for the end of the process.
        with self._exits_once:
            log("left_hard", level=logging.WARNING, why=why, exit_code=self._exit_code)
            flusher = threading.Thread(target=_flush, daemon=True)
            flusher.start()
            flusher.join(0.3)  # with a limit: a hung thread may hold the lock of a stream
            os._exit(self._exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
