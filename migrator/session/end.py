"""How a session ends: what waits for what, and with which exit code the process ends.

The order counts. If a notice has come, the end waits for its save. If none has, the other ranks read that
this one is done. Then all threads end and the hooks are taken away. The signal file goes last: without it
the hook and the next process take this one to have ended.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import time

from migrator.errors import MigratorError
from migrator.leaving.leaving import HOOK_READS_S, Leaving
from migrator.loop.gate import Gate
from migrator.loop.safe_points import SafePoints
from migrator.notice.inbox import BEHIND_S, NoticeInbox
from migrator.notice.signal_file import SignalFile
from migrator.notice.signal_file_owner import SignalFileOwner
from migrator.platform import container
from migrator.save.engine import Saver
from migrator.session.departure import Departure
from migrator.session.rank_group import RankGroup
from migrator.settings import Settings

_SAVE_S = 600.0
"""Maximum time, in seconds, that an exit without a notice waits for a save under way."""
_SAVER_S = 5.0
"""The same after a notice, when the save is over and only its thread has to end."""


class SessionEnd:
    """Closes all parts of a session, at the end of the interpreter or before."""

    def __init__(
        self,
        settings: Settings,
        *,
        noticed: NoticeInbox,
        owner: SignalFileOwner,
        file: SignalFile,
        leaving: Leaving,
        departure: Departure,
        gate: Gate,
        safe_points: SafePoints,
        saver: Saver,
        group: RankGroup | None,
    ) -> None:
        self._settings = settings
        self._noticed = noticed
        self._owner = owner
        self._file = file
        self._leaving = leaving
        self._departure = departure
        self._gate = gate
        self._safe_points = safe_points
        self._saver = saver
        self._group = group
        self._sigterm = noticed.sigterm
        self._pid = os.getpid()
        self._is_at_exit = True
        """`close()` is called by the end of the interpreter, so the exit code of the process is known."""

    def install(self) -> None:
        """Have the end of the interpreter call `close()`."""
        atexit.register(self.close)
        # Children of multiprocessing end by os._exit and run no atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    def close_and_go_on(self) -> None:
        """`migrator.close()`: the session is over, and the process goes on."""
        self._is_at_exit = False
        self.close()
        if self._leaving.notice is not None:
            self._leaving.leave()
        if self._group is not None:
            self._group.ranks.let_go()
        atexit.unregister(self.close)
        self._finalizer.cancel()
        self._noticed.give_up()

    def close(self) -> None:
        """Let a running save end, stop all threads, take the signal file away. May be called twice."""
        if os.getpid() != self._pid or self._leaving.main_is_out.is_set():
            return
        self._sigterm.is_exiting = True
        self._gate.close()
        self._wait_for_notice()
        if self._leaving.notice is not None:
            self._departure.wait_until_decided()
        if self._group is not None and self._leaving.notice is None:
            self._group.say_bye()
        self._leaving.main_is_out.set()
        self._saver.close(_SAVE_S if self._leaving.notice is None else _SAVER_S)
        self._noticed.close()
        if self._group is not None:
            self._group.close()
        self._safe_points.remove()
        if self._leaving.notice is None:
            self._file.note_end()
            if self._group is None or self._group.is_last_of_pod(self._file.ended()):
                self._remove_signal_file()
            self._owner.release()
            return
        self._wait_for_hook()
        self._owner.release()
        self._end_with_exit_code()

    def _wait_for_notice(self) -> None:
        """If a SIGTERM came, wait until the saver has the notice of it.

        If the script has replaced our handler, only the watcher knows of a SIGTERM. If another rank has reported that
        its script knows of a notice, the notice itself is still on its way to this rank.
        """
        end_s = time.monotonic() + BEHIND_S
        while self._leaving.notice is None and time.monotonic() < end_s:
            if not (self._sigterm.is_heard or self._sigterm.is_pending or self._leaving.script_knows):
                break
            time.sleep(0.002)

    def _remove_signal_file(self) -> None:
        """Only if this process wrote it: where files cannot be locked, another process may have written it since."""
        try:
            found = self._file.read()
        except MigratorError:
            return  # no trainer has written this
        if found is None or not found.pids or os.getpid() in found.pids:
            self._file.remove()

    def _wait_for_hook(self) -> None:
        """The container may end with this process, and the hook with it before it has read its answer."""
        hook, end_s = self._leaving.hook, time.monotonic() + HOOK_READS_S
        while hook is not None and container.is_alive(hook) and time.monotonic() < end_s:
            time.sleep(0.02)

    def _end_with_exit_code(self) -> None:
        """After a notice the exit code has to mean: start this job again."""
        if getattr(sys, "last_value", None) is not None:
            # An exception ended the script while it was leaving; its exit code would mean that the job failed.
            self._leaving.exit_now("an exception came while leaving")
        # If the exit was asked for and the script swallowed it, the end is not the script's own choice.
        is_kept = self._settings.keep_exit_code and not self._sigterm.was_raised.is_set()
        if self._is_at_exit and self._leaving.ends_unfinished and not is_kept:
            self._leaving.end_with_exit_code()
        self._leaving.script_end.close()
