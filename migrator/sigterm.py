"""How SIGTERM becomes news, and how the main thread is called back after the commit.

Three ways to hear a signal were weighed. A Python handler alone is not enough: it
runs in the main thread between bytecodes, and a main thread that hangs in a
collective or in a long C call never gets there. `signalfd` needs the signal
blocked in every thread, also in those of libraries. So: the wakeup fd. The
interpreter's own C handler writes the number into a pipe at once, whatever the
main thread does, and the watcher reads it.

A Python handler is there all the same, because without one PID 1 ignores SIGTERM
and everybody else dies of it. Before the commit it notes the news and does
nothing else; after the commit it raises `Migrated`.

Old handlers are kept, called and put back. Forked children get none of this:
their SIGTERM is not our news.

A rank that multiprocessing started hears of its parent's end by SIGINT (torch's
`mp.spawn` asks the kernel for it). With the parent gone that is the same news;
while the parent lives SIGINT stays what it was.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import stat
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from migrator.events import log

_installed: weakref.WeakSet[Sigterm] = weakref.WeakSet()
_fork = threading.local()
_at_fork_is_set = False


class Sigterm:
    """The pipe, the handler, and what was there before them."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.raise_now: Callable[[], BaseException] | None = None
        """Set after the commit: what the handler raises in the main thread."""
        self.is_heard = False
        """A SIGTERM came; the news of it may be a moment behind."""
        self.was_raised = threading.Event()
        self.is_exiting = False
        """The interpreter is on its way out: nothing is raised any more."""
        self._handler = self._handle
        self._previous: Any = None
        self._passed_on_to: tuple[int, tuple[int, int]] | None = None
        self._main: int | None = None
        self._interrupt_handler = self._handle_interrupt
        self._previous_interrupt: Any = None
        self._parent: int | None = None
        """Who started this process by multiprocessing."""

    def install(self) -> None:
        """Main thread only."""
        global _at_fork_is_set
        self._main = threading.get_ident()
        self._previous = signal.signal(signal.SIGTERM, self._handler)
        if multiprocessing.parent_process() is not None:
            self._parent = os.getppid()
            self._previous_interrupt = signal.signal(signal.SIGINT, self._interrupt_handler)
        self._remember(signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False))
        _installed.add(self)
        if not _at_fork_is_set:
            os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _at_fork_is_set = True

    def take_back(self) -> None:
        """At a safe point: somebody (asyncio does) may have put a pipe or handler of their own in place."""
        fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if fd != self._write_fd:
            self._remember(fd)
            log("wakeup_fd_taken", level=logging.DEBUG, fd=fd)
        if signal.getsignal(signal.SIGTERM) is not self._handler:
            self._previous = signal.signal(signal.SIGTERM, self._handler)

    def _remember(self, fd: int) -> None:
        self._passed_on_to = None if fd < 0 else (fd, _identity(fd))

    def drain(self) -> bool:
        """Read what arrived; True if this process must end by it. Other signals are somebody else's."""
        try:
            data = os.read(self.read_fd, 4096)
        except BlockingIOError:
            return False
        self._pass_on(data)
        return signal.SIGTERM in data or (signal.SIGINT in data and self._is_orphan())

    def _is_orphan(self) -> bool:
        """Multiprocessing started this process, and its parent has ended."""
        return self._parent is not None and os.getppid() != self._parent

    def _pass_on(self, data: bytes) -> None:
        # The former owner of the wakeup fd goes on hearing, as long as the fd is still that very pipe.
        if self._passed_on_to is None:
            return
        fd, identity = self._passed_on_to
        try:
            if _identity(fd) == identity:
                os.write(fd, data)
        except OSError:
            self._passed_on_to = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raise_now is not None and not self.is_exiting:
            # Once only: the next one would break into the script's own clean-up. And not in a
            # finalizer, where an exception is printed and forgotten.
            if not self.was_raised.is_set() and not _is_in_finalizer(frame):
                raise self.raise_now()
            return
        self.is_heard = True
        quieten_sigchld()
        try:
            os.write(self._write_fd, bytes([signal.SIGTERM]))
        except OSError:
            pass  # the pipe is full: of news
        self._call_previous(number, frame)

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_orphan():
            self._handle(signal.SIGTERM, frame)
        elif callable(self._previous_interrupt):
            self._previous_interrupt(number, frame)

    def _call_previous(self, number: int, frame: FrameType | None) -> None:
        if not callable(self._previous):
            return
        try:
            self._previous(number, frame)
        except BaseException as error:  # it must not end the process before the save
            log("handler_held_back", level=logging.WARNING, wanted=repr(error))

    def call_main(self) -> None:
        """Interrupt whatever the main thread does, and run the handler there."""
        if self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)

    def close(self) -> None:
        """Main thread, at exit."""
        self.is_exiting = True
        _installed.discard(self)
        if threading.get_ident() == self._main:
            # The interpreter puts Python handlers back to the default while it ends, and a SIGTERM that
            # comes then would turn a finished run into a killed one. It leaves an ignored signal alone.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._put_interrupt_back()
            self._put_wakeup_fd_back()

    def put_back(self) -> None:
        """Main thread, of a process that goes on without us: as it was before."""
        _installed.discard(self)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        self._put_interrupt_back()
        self._put_wakeup_fd_back()

    def forget(self) -> None:
        """In a forked child."""
        self.is_exiting = True
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        self._put_interrupt_back()

    def _put_wakeup_fd_back(self) -> None:
        fd = signal.set_wakeup_fd(-1)
        if fd != self._write_fd:
            signal.set_wakeup_fd(fd)
        elif self._passed_on_to is not None and _identity(self._passed_on_to[0]) == self._passed_on_to[1]:
            signal.set_wakeup_fd(self._passed_on_to[0], warn_on_full_buffer=False)

    def _put_interrupt_back(self) -> None:
        if self._parent is not None and signal.getsignal(signal.SIGINT) is self._interrupt_handler:
            signal.signal(signal.SIGINT, self._previous_interrupt)


def _identity(fd: int) -> tuple[int, int]:
    try:
        found = os.fstat(fd)
    except OSError:
        return (-1, -1)
    return (found.st_dev, found.st_ino) if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode) else (-1, -1)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def quieten_sigchld() -> None:
    """Loader workers die with the process group; torch's handler would raise in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        signal.signal(signal.SIGCHLD, lambda number, frame: None)


def _before_fork() -> None:
    # A SIGTERM between fork and the child's first lines would reach our pipe as if it were ours.
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if len(_installed) else None


def _after_in_parent() -> None:
    mask = getattr(_fork, "mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_in_child() -> None:
    for installed in list(_installed):
        installed.forget()
    _installed.clear()
    _after_in_parent()
