"""The kernel at a process' every call: a tracer takes hold of one thread of a real process and spoils one call.

It kills the process before the call acts, lets the call fail, or reports success for a call that was never made.

It counts the calls of one name on one path in one thread. It attaches to that thread while it stands still where a
phase begins. An undisturbed run says which number a call has there, and the log of each spoiled run says whether it was
that call that was spoiled. For this the names of temporary files have to be the same in both.

The price: the thread stops at each of its calls, and what lies between them takes as long as it takes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import tracer
from tests.support.harness import DEADLINE_S, until


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHANGING = _words(
    "write pwrite64 writev pwritev pwritev2 fsync fdatasync sync_file_range syncfs link linkat symlink "
    "symlinkat rename renameat renameat2 unlink unlinkat rmdir mkdir mkdirat mknod mknodat creat truncate "
    "ftruncate fallocate copy_file_range sendfile chmod fchmod fchmodat utimensat setxattr fsetxattr"
)
"""Calls that change a volume. Besides them an `openat` that may make a file does."""
READING = _words(
    "openat read pread64 readv preadv preadv2 getdents64 stat lstat newfstatat statx statfs fstatfs access "
    "faccessat faccessat2 readlink readlinkat close"
)
HARMLESS = _words("lseek ioctl fcntl fadvise64 fstat flock")
"""Neither do they change a volume, nor can they tell anything wrong about it."""

Entry = tuple[int, str, tuple[str, ...], str, str]
_FD_PATH = re.compile(r"\d+<([^>]*)>", re.ASCII)
_TEXT = re.compile(r'"([^"]+)"')


@dataclass(frozen=True)
class Call:
    """One call as the tracer saw it."""

    thread: int
    name: str
    number: int
    """Of the calls of this name on the first of these paths in this thread, from when the tracer took hold of it."""
    paths: tuple[str, ...]
    arguments: str
    result: str
    """`?`: the process was killed before the call acted."""

    @property
    def is_changing(self) -> bool:
        return self.name in CHANGING or (self.name == "openat" and "O_CREAT" in self.arguments)

    @property
    def is_known(self) -> bool:
        return self.name in CHANGING | READING | HARMLESS

    @property
    def is_spoiled(self) -> bool:
        return self.result == "?" or self.result.endswith("(INJECTED)")

    @property
    def has_failed(self) -> bool:
        return self.result.startswith("-1 ")

    def below(self, directory: Path) -> bool:
        """It is about this directory or something in it."""
        return any(path == str(directory) or path.startswith(f"{directory}/") for path in self.paths)

    def place(self, directory: Path) -> str:
        """What is called with what, the same in every run: relative to the directory."""
        return " ".join([self.name, *(os.path.relpath(path, directory) for path in self.paths)])


@functools.cache
def missing() -> str | None:
    """Why no call can be spoiled here; None if it can."""
    why = tracer.missing()
    if why is not None and shutil.which("strace") is not None:
        return None
    if why is None:
        sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        with tempfile.TemporaryDirectory() as directory:
            try:
                Trace(sleeper.pid, Path(directory) / "calls").end()
            except AssertionError as error:
                why = str(error)
            finally:
                sleeper.kill()
                sleeper.wait()
    return None if why is None else f"LOUD: no call to the kernel is spoiled: {why}"


class Trace:
    """A thread whose calls are seen, and one of them spoiled; or all threads of its process, if none is.

    It ends with what it traces. By the tracer of these tests; `Strace` does the same by strace.
    """

    def __init__(self, thread: int, log: Path, *, inject: str | None = None, path: Path | None = None) -> None:
        self._log = log
        self._thread = thread
        self._said = log.with_suffix(".said")
        with self._said.open("w") as said:
            self._process = subprocess.Popen(self._command(inject, path), stdout=said, stderr=said)
        try:
            until(self._is_attached, "the tracer to attach", context=self._said.read_text)
        except BaseException:
            self.end()
            raise

    def _command(self, inject: str | None, path: Path | None) -> list[str]:
        options = ["--inject", inject] if inject is not None else []
        options += ["--path", str(path)] if path is not None else []
        return [sys.executable, "-I", "-S", tracer.__file__, str(self._thread), str(self._log), *options]

    def _is_attached(self) -> bool:
        """From then on the thread cannot make a call unseen."""
        said = self._said.read_text()
        if self._process.poll() is not None:
            raise AssertionError(f"the tracer ended: {said}")
        return "attached" in said

    def calls(self) -> list[Call]:
        """All calls, once what is traced has ended."""
        self._process.wait(DEADLINE_S)
        return list(_numbered(self._entries(self._log.read_text(errors="replace"))))

    def _entries(self, text: str) -> Iterator[Entry]:
        """Thread, name, paths, arguments and result of each call."""
        for line in text.splitlines():
            said = json.loads(line)
            yield said["thread"], said["name"], tuple(said["paths"]), said["arguments"], said["result"]

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Strace(Trace):
    """By strace, which the tracer of these tests is compared with."""

    def _command(self, inject: str | None, path: Path | None) -> list[str]:
        names = ",".join(sorted(CHANGING | READING | HARMLESS))
        # Undisturbed, everything is looked at that could concern a file: nobody would miss a call that is not shown.
        what = ["-f", "-e", "trace=%file,%desc"]
        if inject is not None:
            what = ["-e", f"trace={names}", "-e", f"inject={inject}", *([] if path is None else ["-P", str(path)])]
        return ["strace", "-y", "-s", "0", "-o", str(self._log), *what, "-p", str(self._thread)]

    def _entries(self, text: str) -> Iterator[Entry]:
        """The log's calls; those that another thread's broke in two are put together again."""
        begun: dict[int, str] = {}
        for line in text.splitlines():
            found = re.match(r"(?:(\d+) +)?(.*)", line)
            assert found is not None
            who, what = int(found[1] or self._thread), found[2]
            if what.endswith("<unfinished ...>"):
                begun[who] = what.removesuffix("<unfinished ...>")
                continue
            resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", what)
            if resumed is not None:
                what = begun.pop(who) + resumed[1]
            call = re.match(r"(\w+)\((.*)", what, re.ASCII)
            if call is None:  # a signal or an end
                continue
            arguments, _, result = call[2].rpartition(" = ")
            yield who, call[1], _paths(arguments), arguments, result


TRACE: type[Trace] = Trace if tracer.missing() is None else Strace


def _numbered(entries: Iterable[Entry]) -> Iterator[Call]:
    counts: Counter[tuple[int, str, str]] = Counter()
    for who, name, paths, arguments, result in entries:
        for path in set(paths):
            counts[who, name, path] += 1
        yield Call(who, name, counts[who, name, paths[0]] if paths else 0, paths, arguments, result)


def _paths(arguments: str) -> tuple[str, ...]:
    by_fd = _FD_PATH.match(arguments)
    return (by_fd[1],) if by_fd is not None else tuple(_TEXT.findall(arguments))
