"""How a process leaves once its state is safe, or cannot be made safe any more.

Before the commit nothing may end the process; after it nothing is left to lose.
So the main thread is called back with `Migrated`, wherever it is, that its
`finally` blocks run. Only a main thread that cannot be called back (hung in C)
is ended by `os._exit`, and so is one whose clean-up outlives the deadline.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from migrator.leaving.exit_code import ScriptEnd, end_with
from migrator.errors import Migrated
from migrator.events import log
from migrator.platform.launcher import Agent
from migrator.notice.signal_file import AGENT_MARGIN_S
from migrator.notice.sigterm import Sigterm, quieten_sigchld
from migrator.notice.watcher import News

CALL_BACK_S = 2.0
"""So long may the main thread take to come back from C code."""
HOOK_READS_S = 2.0
"""So long an exit waits for the hook to have read its answer: the container may end with this process."""
STUCK_S = 5.0
"""Past the deadline, a save that has not advanced for so long is waited for no more."""


@dataclass(frozen=True)
class Outcome:
    """What became of the news."""

    is_safe: bool
    why: str
    ckpt: str | None = None
    step: int | None = None
    size: int = 0
    late: str | None = None
    """Who goes on without this ckpt, though it is safe."""


class Leaving:
    """From the news to the end of the process."""

    def __init__(self, *, sigterm: Sigterm, exit_code: int, agent: Agent | None = None) -> None:
        self._sigterm = sigterm
        self._exit_code = exit_code
        self._agent = agent
        self.news: News | None = None
        self.outcome: Outcome | None = None
        self.is_decided = threading.Event()
        self.main_is_out = threading.Event()
        self.hook: int | None = None
        """The process that waits for the answer, if it said so."""
        self.advanced_s = time.monotonic()
        """When the save last wrote something."""
        self.pod_is_dying = False
        """The news came to this pod, not only to another rank's."""
        self.is_terminated = False
        """SIGTERM came, first or later."""
        self.is_again = False
        """The pod has saved already, and its agent has started the ranks again."""
        self.marks_safe_points = False
        """The script has `batches()` or `safe_point()`."""
        self.script_end = ScriptEnd()
        self.script_knows = False
        """The script heard of the notice itself, or one on another rank did: it may end early because of it."""

    def begin(self, news: News) -> bool:
        """Take the first news; of later ones the earliest deadline counts, and a request wants its answer too."""
        if self.news is not None:
            if news.deadline_s < self.news.deadline_s and self.outcome is None:
                # An agent's SIGTERM behind the hook's request: it counts a time of its own from then on.
                since_s = self.news.deadline_s - self.news.grace_s
                self.news = replace(self.news, deadline_s=news.deadline_s, grace_s=news.deadline_s - since_s)
            return False
        self.news = news
        self.advanced_s = time.monotonic()
        return True

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, less what answering and exiting take."""
        assert self.news is not None
        return self.news.deadline_s - time.monotonic() - 0.5

    def hear(self, news: News) -> None:
        """What each news says, the first or a later one."""
        self.pod_is_dying |= news.is_local
        self.is_terminated |= news.source == "SIGTERM"
        self.is_again |= news.is_again

    def stay_for_agent(self, *, speaks: bool) -> None:
        """An agent would start a rank that leaves by itself again, inside the dying pod: so not before its SIGTERM."""
        if self._agent is None or not self.pod_is_dying:
            return
        assert self.news is not None
        if self.is_again and speaks and not self.is_terminated and self._agent.end():
            log(
                "agent_ended",
                level=logging.WARNING,
                agent=self._agent.pid,
                means="it started ranks in a pod that has saved and goes, and would again: other pods' groups would "
                "break each time. SIGTERM was sent to it, as kubelet is about to do",
            )
        while not self.is_terminated and time.monotonic() < self.news.deadline_s - AGENT_MARGIN_S:
            time.sleep(0.01)

    def decide(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.is_decided.set()

    @property
    def why_no_safe_point(self) -> str:
        """Why none was reached before the deadline, and what the script can do about it."""
        if self.marks_safe_points:
            return (
                "no safe point was reached within the grace: one step, or whatever the script does between two safe "
                "points, took longer than that; make the grace longer, or the time between two safe points shorter"
            )
        return (
            "no safe point was reached within the grace: wrap the training loader in migrator.batches(), "
            "or call migrator.safe_point() after each step"
        )

    def note_script_knows(self) -> None:
        """From now on it matters with which code the script ends."""
        self.script_knows = True
        self.script_end.watch()

    def migrated(self) -> Migrated:
        """The exception that ends the thread it is raised in."""
        # A side thread of the script may leave the gate this way too; the main thread is still to be called.
        if threading.current_thread() is threading.main_thread():
            self._sigterm.was_raised.set()
            self.script_end.watch()  # somebody may catch the exception
            quieten_sigchld()  # a dying loader worker must not break into the script's clean-up either
        outcome = self.outcome
        return Migrated(
            self._exit_code,
            ckpt=outcome.ckpt if outcome else None,
            step=outcome.step if outcome else None,
        )

    def may_leave(self) -> bool:
        """The outcome is known, or nothing moves any more although the deadline is over."""
        if self.is_decided.is_set():
            return True
        stuck_s = time.monotonic() - self.advanced_s
        return self.news is not None and self.left_s < 0 and stuck_s > STUCK_S

    def leave(self) -> NoReturn:
        """Out, with the exit code of a clean SIGTERM death."""
        raise self.migrated()

    def see_off(self) -> None:
        """Side thread, after the outcome: get the main thread out, by force if need be."""
        assert self.news is not None
        self._sigterm.raise_now = self.migrated
        end_s = time.monotonic() + CALL_BACK_S
        while not (self._sigterm.was_raised.is_set() or self.main_is_out.is_set()):
            # The script's own handler may be saving something, too. It has the whole grace for that.
            if time.monotonic() > (max(end_s, self.news.deadline_s) if self._sigterm.is_in_handler else end_s):
                self.exit_now("the main thread did not come back")
            self._sigterm.call_main()
            self._sigterm.was_raised.wait(0.1)
        while not self.main_is_out.wait(0.05):
            if time.monotonic() > max(end_s, self.news.deadline_s):
                self.exit_now("cleaning up took longer than the grace")

    @property
    def ends_unfinished(self) -> bool:
        """The script is about to end with 0, although it was interrupted or may have left early."""
        return (self.script_knows or self._sigterm.was_raised.is_set()) and self.script_end.is_zero

    def end_with_exit_code(self) -> None:
        """At exit: the process ends as it would, but with the exit code that means: start me again."""
        log(
            "exit_code_changed",
            level=logging.WARNING,
            exit_code=self._exit_code,
            means="the script ended with 0 while this process was leaving, and heard of the notice or caught the exit: "
            "it may have stopped early",
        )
        if not end_with(self._exit_code):
            self.exit_now("the exit code can be changed in no other way here")

    def exit_now(self, why: str) -> None:
        """End the process without another line of the script's code."""
        log("left_hard", level=logging.WARNING, why=why, exit_code=self._exit_code)
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(0.3)  # a stream whose lock the hung thread holds must not hold us
        os._exit(self._exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
