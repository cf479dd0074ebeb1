"""The mark of a life that is still saving, and the wait of the next one for it.

Kubernetes may start a new life while the old one is still saving. So a life that
leaves puts a mark beside its record, and the next life waits for its ckpt, at most for
the time that the mark names, by its own clock. The leaving process keeps changing its
mark while it lives. The clocks of two nodes differ, so only changes count: a mark that
has not changed for a while belongs to a dead process.

A thread of its own changes the mark, so that neither a long sync nor a busy interpreter
looks like the end of the process. It uses `Storage.change`: that is quick on a busy
volume, and a late beat never brings back a mark that was deleted.

The price: after a kill in the middle of a leaving save, the next life waits some seconds
for nothing if it starts on another node.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from migrator.ckpt.catalog import ckpts
from migrator.ckpt.generations import RECORD_LIMIT
from migrator.ckpt.names import manifest_name, mark_name, parse_ckpt_name
from migrator.errors import StorageError, StorageForeignError, StorageNotFoundError
from migrator.events import log
from migrator.platform import process_identity
from migrator.storage.base import Storage

STALE = 10
"""A mark that is older than this many times its grace is ignored."""

BEAT_S = 1.0
"""Seconds between two changes of a mark."""
SILENT_S = 10.0
"""Seconds after which a mark that has not changed counts as that of a dead process.

A wrong guess loses the save of a living process, a longer wait only time. A busy node or a slow volume can delay a beat
by half of this."""

_GRACE_IF_UNREADABLE_S = 30.0
"""The grace that a damaged mark counts for: the default of Kubernetes."""
_GRACE_MAX_S = 3600.0
"""Maximum wait for a mark, in seconds, whatever grace it names."""


@dataclass(frozen=True)
class LeavingMark:
    """Says that a save is under way which the next life should wait for, at most `grace_s`."""

    grace_s: float
    by: Mapping[str, Any] | None = None
    """The process that makes the save, if it is the only one (`process_identity.mine`)."""
    beat: int | None = None
    """Counts up while that process lives; None: the mark does not change."""

    def to_bytes(self) -> bytes:
        """The same number of bytes in each beat."""
        fields: dict[str, Any] = {"grace_s": float(self.grace_s)}
        fields |= {} if self.by is None else {"by": dict(self.by)}
        fields |= {} if self.beat is None else {"beat": f"{self.beat:09d}"}
        return json.dumps(fields).encode("ascii")


def put_mark(storage: Storage, generation: int, mark: LeavingMark) -> None:
    """Make the mark durable."""
    storage.put(mark_name(generation), mark.to_bytes(), exclusive=False)


def change_mark(storage: Storage, generation: int, mark: LeavingMark) -> None:
    """Change a mark that is there, without making that durable: a sync takes long on a busy volume."""
    storage.change(mark_name(generation), mark.to_bytes())


def unmark_leaving(storage: Storage, generation: int) -> None:
    """Delete the mark: the save is done, or given up."""
    storage.delete(mark_name(generation))


def is_leaving(storage: Storage, generation: int) -> bool:
    """Whether a generation may still be saving, judged by the storage's own clock."""
    mark = _read_mark(storage, generation)
    return mark is not None and storage.now() - mark.since < STALE * mark.grace_s


def wait_for_leaving(
    storage: Storage,
    lineage: tuple[int, ...],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Any] = time.sleep,
    poll_s: float = 0.2,
) -> float:
    """Wait for the saves of earlier lives that are still leaving; returns the seconds waited.

    Each wait ends when the mark is gone, when a ckpt was committed after it, when the process that made it has shown
    no sign of life for `SILENT_S`, or when the grace that it names has passed by our clock.
    """
    begin = clock()
    awaited: dict[int, tuple[_Mark, _Pulse]] = {}
    for generation in sorted(lineage[1:], reverse=True):
        mark = _read_mark(storage, generation)
        if mark is not None and is_leaving(storage, generation):
            awaited[generation] = mark, _Pulse(clock)
    logged: set[int] = set()
    while awaited:
        pause_s = poll_s
        for generation, (first, pulse) in list(awaited.items()):
            mark = _read_mark(storage, generation)
            left_s = 0.0 if mark is None else begin + mark.grace_s - clock()
            if mark is None or left_s <= 0 or _is_superseded(storage, lineage, generation, first.since):
                del awaited[generation]
                continue
            why = pulse.why_dead(mark, at_most_s=2 * poll_s)
            if why is not None:
                log("not_waiting", level=logging.WARNING, generation=generation, why=why)
                del awaited[generation]
                continue
            if generation not in logged:
                logged.add(generation)
                log("waiting_for_leaving", generation=generation, at_most_s=left_s)
            pause_s = min(pause_s, left_s)
        if awaited:
            sleep(pause_s)
    return clock() - begin


class _Pulse:
    """Decides from repeated looks at a mark whether the process that made it is dead."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._text: bytes | None = None
        self._looked_s = clock()
        self._silent_s = 0.0

    def why_dead(self, mark: _Mark, *, at_most_s: float) -> str | None:
        """The reason to take it for dead; None if it may live.

        Each look adds the time since the last one, but at most `at_most_s`: a volume that does not answer delays our
        looks as it delays the beats.
        """
        now_s = self._clock()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._silent_s = 0.0 if mark.text != self._text else self._silent_s + min(passed_s, at_most_s)
        self._text = mark.text
        if mark.by is not None and process_identity.has_ended(mark.by):
            return "its process has ended"
        if mark.beats and self._silent_s > SILENT_S:
            return f"no sign of life for {self._silent_s:.0f} s"
        return None


@dataclass(frozen=True)
class _Mark:
    grace_s: float
    since: float
    """By the storage's clock."""
    text: bytes
    by: Mapping[str, Any] | None
    beats: bool
    """Whether the process promises to change it."""


def _is_superseded(storage: Storage, lineage: tuple[int, ...], generation: int, since: float) -> bool:
    """Whether a wait is pointless: the save is committed, or a later life has a ckpt that is loaded first."""
    for name in ckpts(storage, lineage)[:1]:
        newest = parse_ckpt_name(name)
        if newest is not None and newest[0] > generation:
            return True
    for name in ckpts(storage, (generation,)):
        committed = storage.modified(manifest_name(name))
        if committed is not None and committed >= since:
            return True
    return False


def _read_mark(storage: Storage, generation: int) -> _Mark | None:
    try:
        since = storage.modified(mark_name(generation))
    except StorageNotFoundError:
        return None  # a link: we never write one
    if since is None:
        return None
    text, found = b"", {}
    try:
        text = storage.get(mark_name(generation), limit=RECORD_LIMIT)
        found = json.loads(text)
        grace_s = float(found["grace_s"])
    except StorageForeignError:
        grace_s = _GRACE_IF_UNREADABLE_S
    except StorageNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        grace_s = _GRACE_IF_UNREADABLE_S
    # Also for nan: no mark makes the next life wait without end.
    grace_s = min(grace_s, _GRACE_MAX_S) if grace_s >= 0 else _GRACE_IF_UNREADABLE_S
    about = found if isinstance(found, dict) else {}
    by = about.get("by")
    return _Mark(grace_s, since, text, by if isinstance(by, dict) else None, "beat" in about)


class Heartbeat(threading.Thread):
    """The thread that changes a mark every `BEAT_S` until it is closed or the mark is deleted."""

    def __init__(self, storage: Storage, generation: int, mark: LeavingMark) -> None:
        super().__init__(name="migrator-heartbeat", daemon=True)
        self._storage = storage
        self._generation = generation
        self._mark = mark
        self._is_closed = threading.Event()

    def run(self) -> None:
        beat, has_warned = 0, False
        while not self._is_closed.wait(BEAT_S):
            beat += 1
            try:
                change_mark(self._storage, self._generation, replace(self._mark, beat=beat))
            except StorageNotFoundError:
                return  # the mark was deleted
            except StorageError as error:
                # The next beat may succeed. Without beats a life that waits would take this one for dead.
                if not has_warned:
                    log("storage_warning", level=logging.WARNING, why=error)
                has_warned = True

    def close(self) -> None:
        """Stop the beats. May be called twice. Does not wait for the thread: the storage may hang."""
        self._is_closed.set()
