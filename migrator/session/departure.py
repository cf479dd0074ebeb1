"""What the script may know of the notice, and how its main thread leaves.

A loop that ends after the notice may have ended because of it, for example by a flag that the
script's own SIGTERM handler sets. With several ranks such flags are often passed around. So each
rank says in the shared log that its script knows of the notice, before the script can act on it.
"""

from __future__ import annotations

import threading
import time
from typing import NoReturn

from migrator.leaving.leaving import Leaving
from migrator.loop.gate import Gate
from migrator.notice.inbox import BEHIND_S, NoticeInbox
from migrator.notice.sigterm import Sigterm
from migrator.notice.watcher import Notice
from migrator.ranks.claims import Once
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line
from migrator.save.engine import Saver

_SAID_S = 0.5
"""Maximum time, in seconds, that a script that knows of the notice is held until the other ranks can know that."""


class Departure:
    """Between the notice, the script, and the save before the end."""

    def __init__(self, leaving: Leaving, sigterm: Sigterm, gate: Gate, saver: Saver, ranks: Peers | None) -> None:
        """`ranks`: None for a job of one rank."""
        self._leaving = leaving
        self._sigterm = sigterm
        self._gate = gate
        self._saver = saver
        self._ranks = ranks
        self._is_said = threading.Event()
        """The other ranks can know that the script knows of the notice."""

    def install(self, noticed: NoticeInbox) -> None:
        """From now on notices come here, and those that came before."""
        self._sigterm.reinstall()
        noticed.pass_on(self.hear)
        if self._ranks is not None:
            # After its handler the script may tell the other ranks to end, before they can read that it knows.
            self._sigterm.hold_script(self._is_said, at_most_s=_SAID_S)

    def hear(self, notice: Notice) -> None:
        """The watcher's thread: this pod must leave."""
        if self._sigterm.script_heard:
            # First: the other ranks have to know this before they act on this rank's notice.
            self._note_script_knows()
        self._saver.tell(notice)

    def is_leaving_for_script(self) -> bool:
        """`migrator.is_leaving`"""
        if self.has_notice:
            self._note_script_knows()
        return self.has_notice

    def _note_script_knows(self) -> None:
        if self._leaving.script_knows:
            return
        self._leaving.note_script_knows()
        if self._ranks is not None:
            # Ranks often pass a flag of their own around, so all of them may end early.
            line = Line("heard", self._ranks.rank)
            said = Once(line, "heard", lambda lines: any(other.what == "heard" for other in lines))
            self._ranks.post(said, timeout_s=_SAID_S)
            self._is_said.set()

    # What the loop asks.

    @property
    def has_notice(self) -> bool:
        return self._gate.is_leaving or self._sigterm.is_heard

    @property
    def is_decided(self) -> bool:
        return self._leaving.is_decided.is_set()

    @property
    def is_main_out(self) -> bool:
        return self._leaving.main_is_out.is_set()

    def may_have_stopped_script(self) -> bool:
        self._wait_for_watcher()
        if self._leaving.script_knows or self._sigterm.script_heard:
            return True
        if self._ranks is None:
            return False
        # The lines that are in the store by now are known here when a call has been answered.
        self._ranks.call(lambda _: True, timeout_s=BEHIND_S)
        return bool(self._ranks.lines("heard"))

    def _wait_for_watcher(self) -> None:
        """Wait until the watcher has read every signal that was delivered, at most `BEHIND_S`."""
        end_s = time.monotonic() + BEHIND_S
        while self._sigterm.is_pending and time.monotonic() < end_s:
            time.sleep(0.001)

    def note_marked(self) -> None:
        self._leaving.marks_safe_points = True

    def at_safe_point(self, step: int) -> None:
        self._saver.at_step(step)
        self._sigterm.reinstall()

    # The way out.

    def wait_until_decided(self) -> None:
        """Until the outcome of the last save is known, or is not worth waiting for any more."""
        while not self._leaving.may_leave():
            self._leaving.is_decided.wait(0.05)

    def leave_when_decided(self) -> NoReturn:
        self.wait_until_decided()
        self._leaving.leave()
