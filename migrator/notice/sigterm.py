"""How SIGTERM becomes a notice, and how the main thread is interrupted after the commit.

There are three ways to receive a signal. A Python handler alone is not enough: it
runs in the main thread between bytecodes, and a main thread that hangs in a
collective or in a long C call never runs it. `signalfd` requires that the signal
is blocked in every thread, also in those of libraries. So this module uses the
wakeup fd: the interpreter's C handler writes the signal number into a pipe at
once, no matter what the main thread does, and the watcher reads the pipe.

A Python handler is needed as well, because without one process 1 ignores SIGTERM
and any other process is killed by it. Before the commit the handler only notes the
notice; after the commit it raises `Migrated`.

Previous handlers are kept, called and restored. Forked children get none of this:
a SIGTERM for them is not a notice.

A script or a framework may set its own handler later, and most of these call the
handler that they replaced, which is ours. So our handler is not one function. Each
time it is installed again it is a new function, which calls the handler that it
replaced; that handler calls an older function of ours, which calls the handler
that was there before *it*. Each handler of the chain runs once. A framework that
restores the handler that it found restores an older function of ours, which does
not call the framework.

If the parent of a rank started by multiprocessing ends, the rank gets SIGINT
(torch's `mp.spawn` requests this from the kernel). If the parent has ended, SIGINT
is a notice, too. While the parent lives, SIGINT keeps its previous meaning.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython and PyPy
import contextlib
import logging
import multiprocessing
import os
import select
import signal
import stat
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from migrator.events import log
from migrator.notice import sigaction
from migrator.platform import script_frames

Handler = Callable[[int, "FrameType | None"], None]

_installed: weakref.WeakSet[Sigterm] = weakref.WeakSet()
_fork = threading.local()
_TRIES = 5
"""Maximum number of runs of the handler when errors of torch's SIGCHLD handler interrupt it."""
_at_fork_is_set = False


class _Link:
    """The handler that one of our handler functions replaced."""

    def __init__(self, replaced: Any) -> None:
        self.replaced = replaced
        self.is_calling = False


class Sigterm:
    """The pipe, the handler, and the handlers that were there before."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.raise_now: Callable[[], BaseException] | None = None
        """Set after the commit: makes the exception that the handler raises in the main thread."""
        self.is_heard = False
        """A SIGTERM has arrived. The watcher may deliver the notice a moment later."""
        self.script_heard = False
        """A handler of the script's own gets a SIGTERM as well: the script may end early because of it."""
        self._hold_script: Callable[[], object] = lambda: None
        self.was_raised = threading.Event()
        self.is_exiting = False
        """The interpreter is ending: from now on nothing is raised."""
        self._pid = os.getpid()
        self._links: weakref.WeakKeyDictionary[Handler, _Link] = weakref.WeakKeyDictionary()
        """Our handler functions that are still referenced."""
        self._handler: Handler | None = None
        """The newest of them."""
        self._calling = 0
        self._action: sigaction.Action | None = None
        """The action that the kernel should have for SIGTERM: the interpreter's C handler."""
        self._taken_by: set[int] = set()
        self._previous: Any = None
        self._passed_on_to: tuple[int, tuple[int, int]] | None = None
        self._main: int | None = None
        self._interrupt_handler = self._handle_interrupt
        self._previous_interrupt: Any = None
        self._parent: int | None = None
        """The pid of the parent that started this process by multiprocessing."""

    def install(self) -> None:
        """Main thread only."""
        global _at_fork_is_set
        self._main = threading.get_ident()
        self._replace(signal.getsignal(signal.SIGTERM))
        if multiprocessing.parent_process() is not None:
            self._parent = os.getppid()
            self._previous_interrupt = signal.signal(signal.SIGINT, self._interrupt_handler)
        self._remember(signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False))
        _installed.add(self)
        if not _at_fork_is_set:
            os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _at_fork_is_set = True

    def hold_script(self, until: threading.Event, *, at_most_s: float) -> None:
        """When a handler of the script's own has run, wait for `until` before the script goes on."""
        self._hold_script = lambda: until.wait(at_most_s)

    def reinstall(self) -> None:
        """At a safe point: somebody (asyncio does) may have put a pipe or handler of their own in place."""
        fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if fd != self._write_fd:
            self._remember(fd)
            log("wakeup_fd_taken", level=logging.DEBUG, fd=fd)
        # Not that of `signal`, which looks for an enum: that would take longer than the rest of many a safe point.
        if _signal.getsignal(signal.SIGTERM) is self._handler:
            return
        present = signal.getsignal(signal.SIGTERM)
        if self._link_of(present) is None:
            self._replace(present)

    def _replace(self, present: Any) -> None:
        link = _Link(present)

        # A plain function, because some frameworks call no other kind of handler.
        def handle(number: int, frame: FrameType | None) -> None:
            for _ in range(_TRIES):
                try:
                    self._handle(number, frame, link)
                    return
                except RuntimeError as error:
                    if not _is_of_dying_worker(error):
                        raise

        self._links[handle] = link
        self._handler = handle
        signal.signal(signal.SIGTERM, handle)
        self._action = sigaction.read(signal.SIGTERM)

    def reinstall_in_kernel(self) -> None:
        """Watcher's thread: restore the interpreter's C handler if C code has replaced it."""
        found = sigaction.read(signal.SIGTERM)
        if self._action is None or found is None or self.is_exiting:
            return
        # The default and "ignored" are set through Python, and `reinstall` sees that.
        if found.function in (self._action.function, 0, 1) or found.calls_on:
            return
        sigaction.write(signal.SIGTERM, self._action)
        if found.function not in self._taken_by:
            self._taken_by.add(found.function)
            log(
                "sigterm_silenced",
                level=logging.WARNING,
                means="C code had replaced the handler of SIGTERM, so this process would not have received it; the "
                "handler was restored. faulthandler.register(signal.SIGTERM) does that: give it chain=True, and both "
                "handlers are called",
            )

    def _link_of(self, handler: Any) -> _Link | None:
        """None: the handler is not one of our functions."""
        return next((link for ours, link in self._links.items() if ours is handler), None)

    def _remember(self, fd: int) -> None:
        self._passed_on_to = None if fd < 0 else (fd, _identity(fd))

    def drain(self) -> bool:
        """Read the signals that have arrived. True if one of them is a notice; the others are passed on."""
        try:
            data = os.read(self.read_fd, 4096)
        except BlockingIOError:
            return False
        self._pass_on(data)
        if signal.SIGTERM in data:
            self._note_script_handler()
            return True
        return signal.SIGINT in data and self._is_orphan()

    def _note_script_handler(self) -> None:
        # After the commit our handler calls no other handler.
        is_ours = self._link_of(signal.getsignal(signal.SIGTERM)) is not None
        if not (is_ours and self.raise_now is not None):
            self.script_heard |= callable(self._of_others()) and not self.is_exiting

    def _of_others(self) -> Any:
        """The first handler of the present chain that is not one of our functions."""
        found = signal.getsignal(signal.SIGTERM)
        while (link := self._link_of(found)) is not None:
            found = link.replaced
        return found

    @property
    def is_pending(self) -> bool:
        """A signal has arrived that was not read from the pipe yet."""
        return bool(select.select([self.read_fd], [], [], 0)[0])

    def _is_orphan(self) -> bool:
        """Multiprocessing started this process, and the parent has ended."""
        return self._parent is not None and os.getppid() != self._parent

    def _pass_on(self, data: bytes) -> None:
        # The previous owner of the wakeup fd still gets the signals, as long as the fd is the same pipe.
        if self._passed_on_to is None:
            return
        fd, identity = self._passed_on_to
        try:
            if _identity(fd) == identity:
                os.write(fd, data)
        except OSError:
            self._passed_on_to = None

    @property
    def is_in_handler(self) -> bool:
        """A handler of the script is running now."""
        return self._calling > 0

    def _handle(self, number: int, frame: FrameType | None, link: _Link) -> None:
        if os.getpid() != self._pid:
            # In a forked child a handler of the script may call this one. The pipe belongs to the parent.
            if callable(link.replaced):
                link.replaced(number, frame)
            return
        if self.raise_now is not None and not self.is_exiting:
            self._raise_once(frame)
            return
        quieten_sigchld()
        self.is_heard = True
        with contextlib.suppress(OSError):  # the pipe is full, so the watcher is about to read
            os.write(self._write_fd, bytes([signal.SIGTERM]))
        if callable(link.replaced):
            self._call_replaced(number, frame, link)
            self._hold_script()
        if self.raise_now is not None and not self.is_exiting:
            # The ckpt was committed while the script's handler ran.
            self._raise_once(frame)

    def _raise_once(self, frame: FrameType | None) -> None:
        # Once only: a second exception would interrupt the script's clean-up. Not in a finalizer, where an exception
        # is printed and ignored. Not in a handler of the script, which may run to its end first.
        if self.raise_now is None or self.was_raised.is_set() or self.is_in_handler or _is_in_finalizer(frame):
            return
        raise self.raise_now()

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_orphan():
            present = signal.getsignal(signal.SIGTERM)
            self._handle(signal.SIGTERM, frame, self._link_of(present) or _Link(present))
        elif callable(self._previous_interrupt):
            self._previous_interrupt(number, frame)

    def _call_replaced(self, number: int, frame: FrameType | None, link: _Link) -> None:
        # A handler may look up the present handler, which is ours, and call it: this would recurse.
        if not callable(link.replaced) or link.is_calling:
            return
        link.is_calling = True
        self._calling += 1
        try:
            link.replaced(number, frame)
        except BaseException as error:  # it must not end the process before the save
            log("handler_held_back", level=logging.WARNING, wanted=repr(error))
        finally:
            self._calling -= 1
            link.is_calling = False

    def interrupt_main(self) -> None:
        """Interrupt the main thread, and run the handler there."""
        if self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)

    def close(self) -> None:
        """Main thread, at exit."""
        self.is_exiting = True
        _installed.discard(self)
        if threading.get_ident() == self._main:
            # While it ends, the interpreter resets Python handlers to the default, so a SIGTERM at that time would
            # kill a process that has finished its run. It does not reset a signal that is ignored.
            self._previous = self._of_others()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._restore_interrupt()
            self._restore_wakeup_fd()

    def uninstall(self) -> None:
        """Main thread, in a process that goes on: restore the handler of SIGTERM that was there before."""
        if not self.is_exiting or self in _installed:
            self.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        # -1 first: another handler may still call ours.
        read_fd, write_fd, self.read_fd, self._write_fd = self.read_fd, self._write_fd, -1, -1
        os.close(read_fd)
        os.close(write_fd)

    def forget(self) -> None:
        """In a forked child: restore the previous handlers."""
        self.is_exiting = True
        signal.set_wakeup_fd(-1)
        link = self._link_of(signal.getsignal(signal.SIGTERM))
        if link is not None:
            signal.signal(signal.SIGTERM, link.replaced if link.replaced is not None else signal.SIG_DFL)
        self._restore_interrupt()

    def _restore_wakeup_fd(self) -> None:
        fd = signal.set_wakeup_fd(-1)
        if fd != self._write_fd:
            signal.set_wakeup_fd(fd)
        elif self._passed_on_to is not None and _identity(self._passed_on_to[0]) == self._passed_on_to[1]:
            signal.set_wakeup_fd(self._passed_on_to[0], warn_on_full_buffer=False)

    def _restore_interrupt(self) -> None:
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
        if frame.f_code.co_name == "__del__" or script_frames.is_finalized(frame):
            return True
        frame = frame.f_back
    return False


def quieten_sigchld() -> None:
    """Ignore SIGCHLD: loader workers end with the process group, and torch's handler would raise inside a step."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        signal.signal(signal.SIGCHLD, lambda number, frame: None)


def _is_of_dying_worker(error: RuntimeError) -> bool:
    """Torch's SIGCHLD handler has raised this before it was replaced: the same signal has ended a loader worker."""
    return str(error).startswith("DataLoader worker")


def _before_fork() -> None:
    # A SIGTERM for the child, between the fork and its first lines, would be written into our pipe.
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
