"""The signal file, through which the hooks and the trainer exchange messages.

The hook runs in the trainer's container, but it is not a child of the trainer and
has only a shell. A small text file is something that both can read and write. The
first line is the state in one word (`init`, `save`, `resume`); each further line is
`key=value`. A writer writes another file in the same directory, syncs it and renames
it, so nobody reads half a request. A reader ignores any other content, such as an
empty file or a megabyte of garbage.

    init       pids                           a trainer listens
    save       request pod deadline hook pids a hook requests a save and waits until the deadline
    save       request pod deadline           the same, but no trainer listened, so the hook did not wait
    resume     request ckpt step ...          the state is saved
    init       request error                  the state could not be saved

Each message names the `container` in which it was written: a volume may outlive the
container, and a request to one container does not concern the next one.

Under an agent (torchrun), an answer also contains the deadline of its request and the
agent: `deadline`, `agent`. Ranks that this agent starts again before the deadline are
in a pod that is about to end.

The price: the last writer wins. Hooks that write a request and a trainer that begins
to listen use a lock file; an answer is written without it.
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

from migrator.errors import SettingsError
from migrator.platform import container as environment
from migrator.platform import launcher

INIT, SAVE, RESUME = "init", "save", "resume"
WORDS = (INIT, SAVE, RESUME)

READ_AT_MOST = 64 * 1024
"""Maximum number of bytes that are read."""
_VALUE_AT_MOST = 4096
"""Maximum length of a value, in characters, so that a long traceback in `error=` does not push other fields behind the
end of what is read."""
DEADLINE_AT_MOST_S = 86400.0
"""Maximum time, in seconds, that a request is open, so that each wait for its deadline ends."""
AGENT_MARGIN_S = 1.0
"""Time, in seconds, before the deadline at which ranks that wait for their agent's SIGTERM leave without it."""
LOCKED_S = 0.5
"""Maximum time, in seconds, that a process holds the lock. An older lock is left from a killed process. The hooks use
the same time."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLANK = " \t\r\0"


@dataclass(frozen=True)
class Signal:
    """The content of the signal file: a word and its fields."""

    word: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that listen, if the file names them."""
        named = (pid.strip() for pid in self.fields.get("pids", "").split(","))
        return tuple(int(pid) for pid in named if re.fullmatch(r"[0-9]{1,10}", pid) and int(pid) > 0)


def parse(text: str) -> Signal | None:
    """Parse the content; None if it does not begin with a known word. Lines that are not `key=value` are ignored."""
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
    """The text that `parse` reads. Line ends in a value become blanks; a value of None is left out."""
    if word not in WORDS:
        raise ValueError(f"found the word {word!r}, expected one of {', '.join(WORDS)}")
    lines = [word]
    for key, value in fields.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"found the key {key!r}, expected letters, digits and underscores")
        if value is not None:
            lines.append(f"{key}={' '.join(str(value).replace(chr(0), ' ').split())[:_VALUE_AT_MOST]}")
    return "\n".join(lines) + "\n"


def open_deadline(
    signal: Signal | None, *, now: float, mtime: float, grace_s: float, container: str = ""
) -> float | None:
    """The deadline of an open request, else None.

    A request is open until it is answered or its deadline is over. It may be older
    than this process: a rank that is started again inside a dying pod must see it,
    and so must a rank that begins to listen only now. But a request to an earlier
    container does not concern one that was started again in place. Without a
    readable deadline it is computed from the time of the file.
    """
    if signal is None or signal.word != SAVE or not _is_of(container, signal):
        return None
    deadline = _finite(signal.fields.get("deadline"))
    if deadline is None:
        deadline = mtime + grace_s
    return min(deadline, now + DEADLINE_AT_MOST_S) if deadline > now else None


def answered_deadline(signal: Signal | None, *, now: float, container: str, agent: str) -> float | None:
    """The deadline of a request that ranks of this agent have answered, if it is not over yet.

    It does not matter whether they could save: the pod ends in any case. Another agent in the same container was
    started by a person, who knows that the container stays.
    """
    if signal is None or signal.word == SAVE or not agent or signal.fields.get("agent") != agent:
        return None
    deadline = _finite(signal.fields.get("deadline"))
    if deadline is None or not _is_of(container, signal):
        return None
    # Ranks whose agent was not stopped leave at this time. If they are started again after it, they may train.
    deadline -= AGENT_MARGIN_S
    return min(deadline, now + DEADLINE_AT_MOST_S) if deadline > now else None


def _is_of(container: str, signal: Signal) -> bool:
    """The message was written in this container, or one of the two containers is not known."""
    said = signal.fields.get("container", "")
    return not said or not container or said == container


def _finite(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class SignalFile:
    """The signal file at one path. Each failure is a `SettingsError` that names the path."""

    def __init__(self, path: str | os.PathLike[str], *, container: str = "", agent: str = "") -> None:
        self.path = Path(path)
        self._ended = self.path.with_name(f"{self.path.name}.ended")
        self.container = container
        """Added to each message (`environment.container_life`)."""
        self.agent = agent
        """The agent that has started this process (`launcher.Agent.life`); empty: none."""

    @staticmethod
    def here(path: Path) -> SignalFile:
        """The signal file as a process in this container sees it."""
        agent = launcher.agent()
        return SignalFile(path, container=environment.container_life(), agent=agent.life if agent else "")

    def __repr__(self) -> str:
        return f"SignalFile({str(self.path)!r})"

    def read(self) -> Signal | None:
        """The present content; None if the file is missing or does not begin with a known word."""
        try:
            data = self._bytes()
            # After a failed lookup an NFS client may report the name as missing for 30 s. A listing is correct, and
            # makes the client look again.
            if data is None and self.fingerprint() is not None:
                data = self._bytes()
        except OSError as error:
            raise self._error("read", error) from error
        if data is None:
            return None
        if len(data) > READ_AT_MOST:
            # The last line may be cut within a number.
            data = data[:READ_AT_MOST].rpartition(b"\n")[0]
        return parse(data.decode("utf-8", errors="replace"))

    def write(self, word: str, /, **fields: object) -> None:
        """Replace the file in one act; its directory is made if it is missing."""
        fields = {**fields, "container": self.container} if self.container else fields
        data = render(word, fields).encode("utf-8", errors="backslashreplace")
        # Threads of one process must not share the temporary file.
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # Another file with this name is not ours. If it is a pipe, writing to it would block for ever.
                aside.unlink(missing_ok=True)
                _write_synced(aside, data)
                aside.replace(self.path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._error("written", error) from error

    def open_deadline(self, grace_s: float) -> float | None:
        """The deadline of an open request to this container, else None."""
        fingerprint = self.fingerprint()
        mtime = fingerprint[1] / 1e9 if fingerprint else 0.0
        return open_deadline(self.read(), now=time.time(), mtime=mtime, grace_s=grace_s, container=self.container)

    def answered_deadline(self) -> float | None:
        """The deadline of an answered request, if the agent of this rank has started the ranks again since."""
        return answered_deadline(self.read(), now=time.time(), container=self.container, agent=self.agent)

    def write_unless_asked(self, word: str, /, *, grace_s: float, **fields: object) -> float | None:
        """Replace the file, unless it holds an open request or a recent answer: then return that deadline."""
        with self._locked():
            deadline = self.open_deadline(grace_s) or self.answered_deadline()
            if deadline is None:
                self.write(word, **fields)
            return deadline

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the hooks, so that none of them writes between our read and our write. Waits at most
        `LOCKED_S`."""
        lock, end_s = self.path.with_name(f".{self.path.name}.lock"), time.monotonic() + LOCKED_S
        fd = None
        while fd is None and time.monotonic() < end_s:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                time.sleep(0.01)
            except OSError:
                break  # nothing can be written here, and the write below raises that
        try:
            yield
        finally:
            if fd is not None:
                os.close(fd)
            # Also a lock that we did not get: it is left from a hook that was killed.
            with contextlib.suppress(OSError):
                lock.unlink()

    def remove(self) -> None:
        """Remove the file, if it exists."""
        try:
            self.path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error("removed", error) from error

    def note_end(self) -> None:
        """Note beside the file that this process has reached its end, for a hook that runs after the last process."""
        try:
            fd = os.open(self._ended, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            try:
                # O_APPEND: if several processes write at the same time, no line is lost.
                os.write(fd, f"{os.getpid()}\n".encode("ascii"))
            finally:
                os.close(fd)
        except OSError:
            return  # a hook then reports the end as a crash; nothing else depends on this

    def ended(self) -> set[int]:
        """The processes that have noted their end."""
        try:
            with self._ended.open("rb") as file:
                return {int(line) for line in file.read(READ_AT_MOST).split() if line.isdigit() and len(line) < 10}
        except OSError:
            return set()

    def forget_ends(self) -> None:
        """Remove the notes of an earlier life, because pids are reused."""
        with contextlib.suppress(OSError):
            self._ended.unlink()

    def fingerprint(self) -> tuple[int, int, int] | None:
        """(inode, mtime in ns, size), different after each write; None if there is no file.

        Read by listing the directory: an NFS client may answer a lookup of the name
        from its cache, "no such file", for 30 s.
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
        """The content, at most one byte more than `READ_AT_MOST`; None if the file is missing."""
        for last_try in (False, False, True):
            try:
                # O_NONBLOCK: opening a pipe would block for ever.
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
