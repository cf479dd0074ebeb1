"""What a leaving process says to the outside: to the hook, in the signal file, in the termination message, in the log.

Of the ranks in a pod one answers the hook: the lowest that can.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from migrator.errors import MigratorError
from migrator.events import log
from migrator.leaving.leaving import Leaving, Outcome
from migrator.notice import signal_file
from migrator.notice.signal_file import SignalFile
from migrator.notice.termination_message import TerminationMessage
from migrator.notice.watcher import Notice
from migrator.platform import container
from migrator.save.progress import ForHook
from migrator.settings import Settings

_SPEAKER_S = 1.0
"""Maximum time in seconds that a rank leaves each lower rank of its pod to answer the hook."""
_LOOK_S = 0.025
"""How often in seconds it looks meanwhile whether the answer is there."""


@dataclass(frozen=True)
class Pod:
    """What this rank's surroundings mean for the way it leaves."""

    position: int = 0
    """How many ranks of this pod are lower: the lowest answers the hook."""
    lower_pids: tuple[int, ...] = ()
    ranks: int = 1
    """How many ranks are in this pod."""
    serves_store: bool = False
    """The job's store lives in this process."""


class Reply:
    """One process's answer."""

    def __init__(self, settings: Settings, leaving: Leaving, file: SignalFile, pod: Pod) -> None:
        self._leaving = leaving
        self._file = file
        self._grace_s = settings.grace_s
        self._pod = pod
        self._message = TerminationMessage(settings.termination_log)
        self.for_hook = ForHook(file.path)

    @property
    def speaks(self) -> bool:
        """This process is the one of its pod that answers the hook."""
        return self._pod.position == 0

    @property
    def pod_is_asked(self) -> bool:
        """The signal file has a request to this pod, or the answer to it: also if the watcher has not read it yet.

        A rank that heard of the notice from another rank of this pod may be done before its own watcher is.
        """
        try:
            return (self._file.open_deadline(self._grace_s) or self._file.answered_deadline()) is not None
        except MigratorError:
            return False

    def begin(self, notice: Notice, newest: str) -> None:
        """The first notice came: what is known if this process ends before it can say more."""
        if not self.speaks:
            return
        self.for_hook.begin()
        left_s = notice.deadline_s - time.monotonic()
        self._message.begin(
            f"told to leave by {notice.source}, {left_s:.0f} s before the end of the grace, and ended before it "
            f"could say what was saved (the ckpt before: {newest})"
        )

    def answer(self, outcome: Outcome, *, has_trained: bool) -> None:
        notice = self._leaving.notice
        assert notice is not None
        took_s = time.monotonic() - notice.deadline_s + notice.grace_s
        is_well = (outcome.is_safe and outcome.late is None) or not has_trained
        log(
            "leaving",
            level=logging.INFO if is_well else logging.ERROR,
            ckpt=outcome.ckpt,
            step=outcome.step,
            bytes=outcome.size,
            since_signal_s=took_s,
            why=outcome.why,
        )
        if self.speaks or self._stands_in():
            # Before the answer: with that the container may end.
            self._message.say(_message(outcome, took_s))
            self._write(outcome, took_s)
            self.for_hook.remove()

    def answer_again(self) -> None:
        """A request that comes while there is no outcome yet is answered with the others; one after it, now."""
        if self._leaving.outcome is not None and self.speaks:
            # Another SIGTERM asks nothing, and our own to the main thread comes this way: the answer must stay.
            self._write(self._leaving.outcome, 0.0, only_if_asked=True)

    def _stands_in(self) -> bool:
        """Wait for the lower ranks of this pod to answer. True: none did, and this rank has to answer the hook."""
        end_s = time.monotonic() + _SPEAKER_S * self._pod.position
        while True:
            try:
                asked = self._file.read()
            except MigratorError:
                return False
            if asked is None or asked.word != signal_file.SAVE:
                return False
            if time.monotonic() > end_s or not any(map(container.is_alive, self._pod.lower_pids)):
                return True
            time.sleep(_LOOK_S)

    def _write(self, outcome: Outcome, took_s: float, *, only_if_asked: bool = False) -> None:
        """The request that is in the file now gets its answer, whichever brought the notice."""
        fields: dict[str, object] = {"ckpt": outcome.ckpt, "step": outcome.step}
        if outcome.is_safe:
            fields |= {"bytes": outcome.size, "seconds": f"{took_s:.3f}", "late": outcome.late}
        else:
            fields |= {"error": outcome.why}
        try:
            asked = self._file.read()
            if asked is not None and asked.word == signal_file.SAVE:
                fields["request"] = asked.fields.get("request")
                hook = asked.fields.get("hook", "")
                self._leaving.hook = int(hook) if hook.isdecimal() and len(hook) < 10 else None
                if self._file.agent:
                    # For the ranks that it may start again in this pod.
                    fields |= {"deadline": asked.fields.get("deadline"), "agent": self._file.agent}
            elif only_if_asked or self._leaving.is_again:
                return
            self._file.write(signal_file.RESUME if outcome.is_safe else signal_file.INIT, **fields)
        except MigratorError as error:
            log("answer_failed", level=logging.ERROR, why=error)


def _message(outcome: Outcome, took_s: float) -> str:
    """The text that the cluster shows for a pod that has ended."""
    if not outcome.is_safe:
        return f"not saved: {outcome.why}"
    what = f"ckpt {outcome.ckpt}, step {outcome.step}, {outcome.size} bytes, {took_s:.2f} s after the signal"
    return f"{outcome.why}: {what}"
