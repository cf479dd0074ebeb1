"""The file through which the hooks and the trainer talk.

The hook runs in the trainer's container but is no child of it, knows neither
its signals nor its sockets, and has only a shell: a small text file is what
both can read and write. The first line is the state in one word (`init`,
`save`, `resume`), each further line is `key=value`. Whoever writes does so
aside in the same directory, synced, then renamed, so nobody ever reads half a
request; whoever reads takes anything else, an empty file or a megabyte of
garbage, for no news at all.

    init       pids                           a trainer listens
    save       request pod deadline hook pids a hook asks, until the deadline
    save       request pod deadline           the same; nobody listened, so the hook went without an answer
    resume     request ckpt step ...          it is saved
    init       request error                  it could not be saved

All of it also says in which `container` it was written: a volume may outlive the
container, and a request to one is nothing to the next.

An answer under an agent (torchrun) says as well until when the request it answers
is in force, and for which agent: `deadline`, `agent`. The ranks that this agent may
start again until then are in a pod that goes.

The price: the last writer wins. Hooks that ask, and a trainer that begins to
listen, agree through a lock file; an answer is written without it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from migrator.platform import container as environment
from migrator.platform import launcher
from migrator.errors import SettingsError

INIT, SAVE, RESUME = "init", "save", "resume"
WORDS = (INIT, SAVE, RESUME)

READ_AT_MOST = 64 * 1024
# Every value is cut so that a long traceback in `error=` cannot push the fields after it out of reach.
_VALUE_AT_MOST = 4096
DEADLINE_AT_MOST_S = 86400.0
"""No request is open for longer, whatever it says: what waits for a deadline must come to an end."""
AGENT_MARGIN_S = 1.0
"""Ranks that have saved stay for their agent's SIGTERM, but leave so long before the deadline."""
LOCKED_S = 0.5
"""A lock that is held longer is that of a process that was killed. The hooks wait as long."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLANK = " \t\r\0"


@dataclass(frozen=True)
class Signal:
    """What the signal file says: a word and its fields."""

    word: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that listen, as far as the file names them."""
        named = (pid.strip() for pid in self.fields.get("pids", "").split(","))
        return tuple(int(pid) for pid in named if re.fullmatch(r"[0-9]{1,10}", pid) and int(pid) > 0)


def parse(text: str) -> Signal | None:
    """What `text` says, or None if it is no signal. Lines that are not `key=value` are passed over."""
    first, *rest = text.split("\n")
    word = first.strip(_BLANK)
    if word not in WORDS:
        return None
    fields = {}
    for line in rest:
        key, equals, value = line.partition("=")
        if equals and _KEY.fullmatch(key.strip(_BLANK)):
            fields[key.strip(_BLANK)] = value.strip(_BLANK)[:_VALUE_AT_MOST]
    return Signal(word, fields)


def render(word: str, fields: Mapping[str, object]) -> str:
    """The text that `parse` reads back. A value is kept on one line; one that is None is left out."""
    if word not in WORDS:
        raise ValueError(f"found the word {word!r}, expected one of {', '.join(WORDS)}")
    lines = [word]
    for key, value in fields.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"found the key {key!r}, expected letters, digits and underscores")
        if value is not None:
            lines.append(f"{key}={' '.join(str(value).replace(chr(0), ' ').split())[:_VALUE_AT_MOST]}")
    return "\n".join(lines) + "\n"


def is_open(signal: Signal | None, *, now: float, mtime: float, grace_s: float, container: str = "") -> float | None:
    """The deadline of a request that is not over yet, else None.

    A request is over when it is answered or past its deadline, not when it is
    older than this process: a rank that is started again inside a dying pod
    must see it, and one that begins to listen only now. But a container that is
    started again in place is told nothing by a request to the one before it.
    Without a readable deadline the file's age stands in for it.
    """
    if signal is None or signal.word != SAVE or not _is_of(container, signal):
        return None
    deadline = _finite(signal.fields.get("deadline"))
    if deadline is None:
        deadline = mtime + grace_s
    return min(deadline, now + DEADLINE_AT_MOST_S) if deadline > now else None


def in_force(signal: Signal | None, *, now: float, container: str, agent: str) -> float | None:
    """The deadline of a request that was answered by ranks of this agent's, if it is not over yet.

    Whether they could save or not: the pod goes in any case. Another agent in the same container was started by a
    person, who knows that nobody takes the container away.
    """
    if signal is None or signal.word == SAVE or not agent or signal.fields.get("agent") != agent:
        return None
    deadline = _finite(signal.fields.get("deadline"))
    if deadline is None or not _is_of(container, signal):
        return None
    # Ranks whose agent was not stopped leave so long before the deadline. Started again then, they may train.
    deadline -= AGENT_MARGIN_S
    return min(deadline, now + DEADLINE_AT_MOST_S) if deadline > now else None


def _is_of(container: str, signal: Signal) -> bool:
    """Written in this container, as far as both are known."""
    said = signal.fields.get("container", "")
    return not said or not container or said == container


def _finite(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class SignalFile:
    """The signal file at one path. Every failure is a `SettingsError` that names it."""

    def __init__(self, path: str | os.PathLike[str], *, container: str = "", agent: str = "") -> None:
        self.path = Path(path)
        self._ended = self.path.with_name(f"{self.path.name}.ended")
        self.container = container
        """Said in all that is written (`environment.container_life`)."""
        self.agent = agent
        """Which agent has started this process (`launcher.Agent.life`); empty: none."""

    @staticmethod
    def here(path: Path) -> SignalFile:
        """As a process in this container has it."""
        agent = launcher.agent()
        return SignalFile(path, container=environment.container_life(), agent=agent.life if agent else "")

    def __repr__(self) -> str:
        return f"SignalFile({str(self.path)!r})"

    def read(self) -> Signal | None:
        """What the file says now; None if it is missing or says nothing we know."""
        try:
            data = self._bytes()
            # On NFS a name that was once looked for in vain may seem missing for 30 s; the listing
            # tells the truth and makes the client look again.
            if data is None and self.fingerprint() is not None:
                data = self._bytes()
        except OSError as error:
            raise self._error("read", error) from error
        if data is None:
            return None
        if len(data) > READ_AT_MOST:
            # The last line may be cut in the middle of a number.
            data = data[:READ_AT_MOST].rpartition(b"\n")[0]
        return parse(data.decode("utf-8", errors="replace"))

    def write(self, word: str, /, **fields: object) -> None:
        """Replace the file in one act; its directory is made if it is missing."""
        fields = {**fields, "container": self.container} if self.container else fields
        data = render(word, fields).encode("utf-8", errors="backslashreplace")
        # Threads of one process must not share the file they write aside.
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # Whatever lies there is not ours; written into, a pipe would hold us for ever.
                aside.unlink(missing_ok=True)
                _write_synced(aside, data)
                aside.replace(self.path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._error("written", error) from error

    def open_request(self, grace_s: float) -> float | None:
        """The deadline of a request to this container that is not over yet, else None."""
        fingerprint = self.fingerprint()
        mtime = fingerprint[1] / 1e9 if fingerprint else 0.0
        return is_open(self.read(), now=time.time(), mtime=mtime, grace_s=grace_s, container=self.container)

    def in_force(self) -> float | None:
        """The deadline of a request that was answered, but by ranks which this one's agent has started again."""
        return in_force(self.read(), now=time.time(), container=self.container, agent=self.agent)

    def write_unless_asked(self, word: str, /, *, grace_s: float, **fields: object) -> float | None:
        """Replace the file, but not a request that is open or still in force: its deadline is returned then."""
        with self._locked():
            deadline = self.open_request(grace_s) or self.in_force()
            if deadline is None:
                self.write(word, **fields)
            return deadline

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock of the hooks: none of them writes between our look and our writing. It is not waited for long."""
        lock, end_s = self.path.with_name(f".{self.path.name}.lock"), time.monotonic() + LOCKED_S
        fd = None
        while fd is None and time.monotonic() < end_s:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                time.sleep(0.01)
            except OSError:
                break  # nothing can be written here, as the writing will say
        try:
            yield
        finally:
            if fd is not None:
                os.close(fd)
            # One that was waited for in vain is of a hook that was killed.
            with contextlib.suppress(OSError):
                lock.unlink()

    def remove(self) -> None:
        """Take the file away; that it is gone already is fine."""
        try:
            self.path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error("removed", error) from error

    def note_end(self) -> None:
        """Say beside the file that this process came to its end: a hook may look behind the last process of the pod."""
        try:
            fd = os.open(self._ended, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            try:
                # Of several that append at the same time each line is there when its call has returned.
                os.write(fd, f"{os.getpid()}\n".encode("ascii"))
            finally:
                os.close(fd)
        except OSError:
            return  # a hook then takes the end for a crash; nothing depends on it

    def ended(self) -> set[int]:
        """The processes that said so."""
        try:
            with self._ended.open("rb") as file:
                return {int(line) for line in file.read(READ_AT_MOST).split() if line.isdigit() and len(line) < 10}
        except OSError:
            return set()

    def forget_ends(self) -> None:
        """Those of an earlier life: their numbers are given again."""
        with contextlib.suppress(OSError):
            self._ended.unlink()

    def fingerprint(self) -> tuple[int, int, int] | None:
        """(inode, mtime in ns, size), another one after each write; None if there is no file.

        By listing the directory: asking for the name itself may be answered
        from an NFS client's cache, "no such file", for 30 s.
        """
        try:
            with os.scandir(self.path.parent) as entries:
                for entry in entries:
                    if entry.name == self.path.name:
                        found = entry.stat()
                        return found.st_ino, found.st_mtime_ns, found.st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._error("looked for", error) from error
        return None

    def _bytes(self) -> bytes | None:
        """At most one byte more than we read, or None if the file is missing."""
        for last_try in (False, False, True):
            try:
                # Not to wait for ever if somebody put a pipe there.
                fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    if not stat.S_ISREG(os.fstat(fd).st_mode):
                        raise OSError(errno.EINVAL, "it is not a regular file")
                    return _read_up_to(fd, READ_AT_MOST + 1)
                finally:
                    os.close(fd)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                # On NFS the file was replaced between open and read.
                if error.errno != errno.ESTALE or last_try:
                    raise
        raise AssertionError("unreachable")

    def _error(self, what: str, error: OSError) -> SettingsError:
        return SettingsError(
            f"the signal file {self.path} cannot be {what}: {error.strerror or error}. "
            "Name a file in a directory that this process and the hooks can write, "
            "the same for both: MIGRATOR_SIGNAL=/tmp/migrator/signal is the default."
        )


def _read_up_to(fd: int, count: int) -> bytes:
    pieces: list[bytes] = []
    while count > 0 and (piece := os.read(fd, count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
