"""Which lives of the job continue one another, and so which ckpts are ours.

Each life claims a number of its own, once, by the exclusive appearance of a record
that says which life it continues. The ckpts of the lineage are those of this life,
of the one it continues, and so on.

Two lives may go on from the same ckpt: one that was thought dead and is not, or one
in a pod that is to go while its replacement runs already. That is a fork. Both
branches are right, and the number of a life says nothing about which one is worth
more: a doomed pod that starts slowly has the higher one. So the next life takes
the ckpt with the highest step, and names the branch that it leaves behind.

Kubernetes may start a new life while the old one is still saving. So a life that
leaves says so by a mark beside its record, and the next one waits for its ckpt,
at most for the time the mark names, by its own clock. As long as the leaving process
lives it changes its mark. Clocks of two nodes differ, so only changes count: a mark
that has not changed for a while belongs to a process that is dead.

The price: after a kill in the middle of a leaving save the next life, if it starts
elsewhere, waits some seconds in vain.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from migrator.platform import process_identity as identity
from migrator.errors import CkptCorrupt, CkptMismatch, StorageError
from migrator.events import log
from migrator.ckpt.manifest import LIMIT, NAME, Manifest, ckpt_name, parse_ckpt_name, seal, unseal
from migrator.storage.posix import LocalStorage

DIRECTORY = "generations"
STALE = 10
"""A mark this many times older than the grace it names is over, whatever the clocks say."""

BEAT_S = 1.0
"""How often a process that leaves changes its mark."""
SILENT_S = 10.0
"""A mark that has not changed for this long is that of a dead process. A wrong guess costs the save of a living one,
a long wait only seconds: a full node or a slow volume may well hold a beat back for half of this."""

NOT_A_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.EFBIG})
"""What reading says where there is no file, or something that is none of ours: damage, not a failing volume."""

_FROM_THE_START = "from the start"
_RECORD = re.compile(r"([0-9]{6,18})\.json", re.ASCII)
_NOTE = re.compile(r"([0-9]{6,18})\.from", re.ASCII)
_RECORD_LIMIT = 1 << 20
_LOOKS_S = 2.0
"""A life that looks once more for ckpts is waited for so long, to know what it goes on from."""
_GRACE_IF_UNREADABLE_S = 30.0
_GRACE_MAX_S = 3600.0


@dataclass(frozen=True)
class Generation:
    """This life's place among all lives of the job."""

    number: int
    continues: int | None
    lineage: tuple[int, ...]
    """The generations whose ckpts can be loaded, this one first."""
    proven: frozenset[int]
    """Those known without guessing past an unreadable record: only there anything is deleted."""
    differs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """What of script and arguments is (there, here) in the life continued and in this one."""
    is_claimed: bool = True
    """False: this life leaves before it trains, and nothing on the volume tells of it."""


def not_claimed(storage: LocalStorage, *, fresh: bool) -> Generation:
    """For a life that leaves at once. A number of its own would keep the life that goes on from deleting anything."""
    taken = numbers(storage)
    number = max(taken, default=0) + 1
    continues = None if fresh else max(taken, default=None)
    lineage, proven = _lineage(storage, number, continues, taken)
    return Generation(number, continues, lineage, proven, is_claimed=False)


def claim(storage: LocalStorage, *, fresh: bool, about: Mapping[str, Any]) -> Generation:
    """Take the next number, for good. `fresh` begins a new lineage."""
    storage.make_directory(DIRECTORY)
    taken: set[int] = set()
    while True:
        taken |= numbers(storage)
        number = max(taken, default=0) + 1
        continues = None if fresh else max(taken, default=None)
        record = {"generation": number, "continues": continues, "about": dict(about)}
        # A crash must not leave this record without the one it continues, whose maker may have died before the sync.
        storage.sync_directory(DIRECTORY)
        try:
            storage.put(record_name(number), seal("generation", record), exclusive=True)
        except FileExistsError:
            # Another life was quicker, and so it is the one to continue.
            taken.add(number)
            continue
        break
    lineage, proven = _lineage(storage, number, continues, taken)
    differs = {} if continues is None else _differences(read_about(storage, continues), about)
    return Generation(number, continues, lineage, proven, differs)


def numbers(storage: LocalStorage) -> set[int]:
    """All generations that left a trace: a record or a ckpt."""
    records = {int(match[1]) for name in storage.list(DIRECTORY) if (match := _RECORD.fullmatch(name))}
    return records | {generation for generation, _ in _directories(storage)}


def ckpts(storage: LocalStorage, lineage: tuple[int, ...] | frozenset[int]) -> list[str]:
    """The committed saves of a lineage by name, newest first."""
    found = [place for place in _directories(storage) if place[0] in lineage]
    names = [ckpt_name(*place) for place in sorted(found, reverse=True)]
    # By listing: asked for the name alone, NFS may say no for a while.
    return [name for name in names if _is_committed(storage, name)]


def furthest_first(storage: LocalStorage, generation: Generation) -> list[str]:
    """The ckpts that a life may load, in the order in which it tries them.

    What lies behind an unreadable record may belong to a lineage that was given up on purpose, with steps as high as
    it likes. It comes last, and there the later life comes first.
    """

    def worth(name: str) -> tuple[bool, int, int]:
        number, step = parse_ckpt_name(name) or (0, 0)
        return (True, step, number) if number in generation.proven else (False, number, step)

    return sorted(ckpts(storage, generation.lineage), key=worth, reverse=True)


def beside(storage: LocalStorage, names: list[str]) -> list[str]:
    """Those of these ckpts that did not lead to the first one: another life went on from before them.

    Each manifest says which ckpt its life went on from. Numbers fall along the way back, so a life that was jumped
    over is not on it. What is below the last life that is known may be, and is not named.
    """
    origins: dict[int, str | None] = {}
    for name in names:
        number, _ = parse_ckpt_name(name) or (0, 0)
        if number not in origins:
            origins[number] = _origin(storage, name)
    left_at: dict[int, int] = {}
    """Of each life on the way: the step from which the next one went on."""
    lowest = names[0] if names else ""
    while (place := parse_ckpt_name(lowest)) is not None and place[0] < min(left_at, default=place[0] + 1):
        left_at[place[0]] = place[1]
        lowest = origins.get(place[0]) or ""
    from_the_start = lowest == _FROM_THE_START

    def is_beside(name: str) -> bool:
        number, step = parse_ckpt_name(name) or (0, 0)
        if number in left_at:
            return step > left_at[number]
        return from_the_start or number > min(left_at)

    return [name for name in names if is_beside(name)]


def _origin(storage: LocalStorage, name: str) -> str | None:
    """The ckpt that the life which saved this one went on from; None if it does not say."""
    try:
        written = whole(storage, name).written
    except (CkptCorrupt, CkptMismatch, StorageError):
        return None  # why it cannot be read is said when it is to be loaded
    if "continues" not in written:
        return None
    return _FROM_THE_START if written["continues"] is None else str(written["continues"])


def uncommitted(storage: LocalStorage, lineage: tuple[int, ...] | frozenset[int]) -> list[str]:
    """What saves that never were committed left behind, or are writing."""
    found = [place for place in _directories(storage) if place[0] in lineage]
    return [name for name in (ckpt_name(*place) for place in sorted(found)) if not _is_committed(storage, name)]


def _is_committed(storage: LocalStorage, name: str) -> bool:
    try:
        return NAME in storage.list(name)
    except StorageError as error:
        if error.errno != errno.ELOOP:
            raise
        return True  # a link is not followed; `whole` says so by name, and the ckpt before it is taken


def others(storage: LocalStorage, lineage: tuple[int, ...]) -> list[str]:
    """The committed saves of all other lineages, newest first: to be named, never to be touched."""
    return ckpts(storage, frozenset(numbers(storage) - set(lineage)))


def whole(storage: LocalStorage, name: str) -> Manifest:
    """The manifest of a ckpt whose parts are all there with the right sizes; else `CkptCorrupt`."""
    try:
        manifest = Manifest.from_bytes(storage.get(f"{name}/{NAME}", limit=LIMIT))
        if manifest.ckpt != name:
            raise CkptCorrupt(f"its manifest is that of {manifest.ckpt}")
        check_parts(storage, manifest)
    except CkptCorrupt as error:
        raise CkptCorrupt(f"{name}: {error}") from error
    except StorageError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise CkptCorrupt(f"{name}: {error}") from error
    return manifest


def check_parts(storage: LocalStorage, manifest: Manifest) -> None:
    """`CkptCorrupt` unless the parts that a manifest names are all there with the right sizes."""
    for part in manifest.parts:
        size = storage.size(f"{manifest.ckpt}/{part.name}")
        if size != part.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CkptCorrupt(f"{part.name} {found}; {part.bytes} bytes were committed")


def make_durable(storage: LocalStorage, name: str) -> None:
    """What can be listed may be lost in a crash all the same: whoever made the name can have died before the sync."""
    storage.sync_directory(name)
    storage.sync_directory()


@dataclass(frozen=True)
class LeavingMark:
    """Says that a save is under way which the next life should wait for, at most `grace_s`."""

    grace_s: float
    by: Mapping[str, Any] | None = None
    """The only process that makes the save, if there is only one (`identity`)."""
    beat: int | None = None
    """Changes as long as that process lives; None: it does not promise that."""

    def to_bytes(self) -> bytes:
        """As many in each beat."""
        fields: dict[str, Any] = {"grace_s": float(self.grace_s)}
        fields |= {} if self.by is None else {"by": dict(self.by)}
        fields |= {} if self.beat is None else {"beat": f"{self.beat:09d}"}
        return json.dumps(fields).encode("ascii")


def go_on(storage: LocalStorage, generation: int, find: Callable[[], list[str]]) -> list[str]:
    """What this life may load, best first, and a note of what it goes on from.

    A life before it that commits later reads the note, and says that this one does not have its ckpt. Without the
    second look a ckpt could come behind the first one, and its maker look before the note is there. Until that look is
    over the note says so: it may still be found that the ckpt is there.
    """
    found = find()
    while True:
        note = {"from": found[0] if found else None}
        storage.put(_note(generation), json.dumps({**note, "looks": True}).encode("ascii"), exclusive=False)
        again = find()
        if again[:1] == found[:1]:
            storage.put(_note(generation), json.dumps(note).encode("ascii"), exclusive=False)
            return again
        found = again


def gone_on_without(storage: LocalStorage, generation: int, ckpt: str) -> str | None:
    """The later life, in words, that has begun and does not have this ckpt; None if there is none.

    One without a note is still looking, and will find it. One whose note says that it looks again is waited for.
    """
    end_s = time.monotonic() + _LOOKS_S
    while True:
        later, note = _latest_note(storage, generation)
        if later is None or note.get("from", "") == ckpt:
            return None
        if note.get("looks") is not True or time.monotonic() > end_s:
            break
        time.sleep(0.02)
    origin = note.get("from", "a ckpt that is not known")
    begun = "began anew" if origin is None else f"went on from {origin!s:.80}"
    return f"a later life of the job (generation {later}) {begun} and does not have it"


def _latest_note(storage: LocalStorage, generation: int) -> tuple[int | None, dict[str, Any]]:
    """Of the latest life behind this one that has looked for ckpts; empty if it cannot be read."""
    noted = {int(match[1]) for name in storage.list(DIRECTORY) if (match := _NOTE.fullmatch(name))}
    later = max((number for number in noted if number > generation), default=None)
    if later is None:
        return None, {}
    try:
        note = json.loads(storage.get(_note(later), limit=_RECORD_LIMIT))
    except (StorageError, ValueError, RecursionError):
        note = {}
    return later, note if isinstance(note, dict) else {}


def mark_leaving(storage: LocalStorage, generation: int, grace_s: float) -> None:
    """Put a mark of a process that will not change it."""
    put_mark(storage, generation, LeavingMark(grace_s))


def put_mark(storage: LocalStorage, generation: int, mark: LeavingMark) -> None:
    """Make the mark durable."""
    storage.put(_mark(generation), mark.to_bytes(), exclusive=False)


def beat(storage: LocalStorage, generation: int, mark: LeavingMark) -> None:
    """Change a mark that is there, without a sync: that would take its time on a busy volume."""
    storage.overwrite(_mark(generation), mark.to_bytes())


def unmark_leaving(storage: LocalStorage, generation: int) -> None:
    """Say that this save is done, or given up."""
    storage.delete(_mark(generation))


def is_leaving(storage: LocalStorage, generation: int) -> bool:
    """Whether a generation may still be saving, as far as the storage's own clock can tell."""
    mark = _read_mark(storage, generation)
    return mark is not None and storage.now() - mark.since < STALE * mark.grace_s


def wait_for_leaving(
    storage: LocalStorage,
    lineage: tuple[int, ...],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Any] = time.sleep,
    poll_s: float = 0.2,
) -> float:
    """Wait for the saves of earlier lives that are still leaving; returns the seconds waited.

    Each wait is over when the mark is gone, when a ckpt was committed after it, when the process
    that made it shows no sign of life any more, or when the grace it names has passed by our clock.
    """
    begin = clock()
    awaited: dict[int, tuple[_Mark, _Pulse]] = {}
    for generation in sorted(lineage[1:], reverse=True):
        mark = _read_mark(storage, generation)
        if mark is not None and is_leaving(storage, generation):
            awaited[generation] = mark, _Pulse(clock)
    told: set[int] = set()
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
            if generation not in told:
                told.add(generation)
                log("waiting_for_leaving", generation=generation, at_most_s=left_s)
            pause_s = min(pause_s, left_s)
        if awaited:
            sleep(pause_s)
    return clock() - begin


class _Pulse:
    """Tells from the looks at a mark whether the process that made it is dead."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._text: bytes | None = None
        self._looked_s = clock()
        self._silent_s = 0.0

    def why_dead(self, mark: _Mark, *, at_most_s: float) -> str | None:
        """None: it may live. Each look adds what has passed since the last one, but not the time in which our own side
        of the volume did not answer: a server that hangs holds back beats and looks alike."""
        now_s = self._clock()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._silent_s = 0.0 if mark.text != self._text else self._silent_s + min(passed_s, at_most_s)
        self._text = mark.text
        if mark.by is not None and identity.has_ended(mark.by):
            return "its process has ended"
        if mark.beats and self._silent_s > SILENT_S:
            return f"no sign of life for {self._silent_s:.0f} s"
        return None


@dataclass(frozen=True)
class _Mark:
    grace_s: float
    since: float
    """By the storage's clock."""
    text: bytes = b""
    by: Mapping[str, Any] | None = None
    beats: bool = False


def _is_superseded(storage: LocalStorage, lineage: tuple[int, ...], generation: int, since: float) -> bool:
    """Whether waiting gains nothing: the save is committed, or a later life has a ckpt that comes first."""
    for name in ckpts(storage, lineage)[:1]:
        newest = parse_ckpt_name(name)
        if newest is not None and newest[0] > generation:
            return True
    for name in ckpts(storage, (generation,)):
        committed = storage.modified(f"{name}/{NAME}")
        if committed is not None and committed >= since:
            return True
    return False


def _read_mark(storage: LocalStorage, generation: int) -> _Mark | None:
    try:
        since = storage.modified(_mark(generation))
    except StorageError as error:
        if error.errno not in NOT_A_FILE:
            raise
        return None  # a link: no life of ours makes one
    if since is None:
        return None
    text, found = b"", {}
    try:
        text = storage.get(_mark(generation), limit=_RECORD_LIMIT)
        found = json.loads(text)
        grace_s = float(found["grace_s"])
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno not in NOT_A_FILE:
            raise
        grace_s = _GRACE_IF_UNREADABLE_S
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        grace_s = _GRACE_IF_UNREADABLE_S
    # Also for nan: a mark never makes the next life wait without end.
    grace_s = min(grace_s, _GRACE_MAX_S) if grace_s >= 0 else _GRACE_IF_UNREADABLE_S
    about = found if isinstance(found, dict) else {}
    by = about.get("by")
    return _Mark(grace_s, since, text, by if isinstance(by, dict) else None, "beat" in about)


def _lineage(
    storage: LocalStorage, number: int, continues: int | None, taken: set[int]
) -> tuple[tuple[int, ...], frozenset[int]]:
    lineage, proven, is_proven = [number], {number}, True
    while continues is not None:
        lineage.append(continues)
        if is_proven:
            proven.add(continues)
        try:
            continues = _read_continues(storage, continues)
        except CkptCorrupt as error:
            # Too many reachable ckpts do no harm, the newest wins. Too few would let work be lost.
            log("generation_unreadable", level=logging.WARNING, generation=continues, error=error)
            continues = max((n for n in taken if n < lineage[-1]), default=None)
            is_proven = False
    return tuple(lineage), frozenset(proven)


def _read_continues(storage: LocalStorage, number: int) -> int | None:
    record = _read_record(storage, number)
    continues = record["continues"]
    if continues is None or (type(continues) is int and 0 < continues < number):
        return continues
    raise CkptCorrupt(f"generation {number} claims to continue {continues!r:.80}")


def _read_record(storage: LocalStorage, number: int) -> dict[str, Any]:
    try:
        record = unseal("generation", storage.get(record_name(number), limit=_RECORD_LIMIT))
    except StorageError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise CkptCorrupt(str(error)) from error
    if record.keys() != {"generation", "continues", "about"} or record["generation"] != number:
        raise CkptCorrupt(f"the record of generation {number} is not its own")
    return record


def read_about(storage: LocalStorage, number: int) -> dict[str, Any]:
    """What a life said of itself when it began; empty if that cannot be read."""
    try:
        about = _read_record(storage, number)["about"]
    except CkptCorrupt:
        return {}
    return about if isinstance(about, dict) else {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    # As JSON, so that a tuple here is not another thing than a list there.
    return {
        key: (there[key], here[key])
        for key in ("script", "argv")
        if key in there and key in here and json.dumps(there[key]) != json.dumps(here[key])
    }


def _directories(storage: LocalStorage) -> list[tuple[int, int]]:
    return [place for name in storage.list() if (place := parse_ckpt_name(name)) is not None]


def record_name(number: int) -> str:
    """The file by which a life has its number."""
    return f"{DIRECTORY}/{number:06d}.json"


def _mark(number: int) -> str:
    return f"{DIRECTORY}/{number:06d}.leaving"


def _note(number: int) -> str:
    return f"{DIRECTORY}/{number:06d}.from"
