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

A script or a framework may set a handler of its own later, and nearly all of them
call the one they found: ours. So ours is not one function. Each time it is put
back it is a new function that calls the handler which it replaced, and that one
calls the function it found, which is an older one of ours and calls what came
before *it*. Each handler of the chain runs once. A framework that puts back what
it found puts back an older function of ours, with nothing of the framework in it.

A rank that multiprocessing started hears of its parent's end by SIGINT (torch's
`mp.spawn` asks the kernel for it). With the parent gone that is the same news;
while the parent lives SIGINT stays what it was.
"""

from __future__ import annotations

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

from migrator.platform import script_frames as frames
from migrator.notice import sigaction
from migrator.events import log

Handler = Callable[[int, "FrameType | None"], None]

_installed: weakref.WeakSet[Sigterm] = weakref.WeakSet()
_fork = threading.local()
_TRIES = 5
_at_fork_is_set = False


class _Link:
    """What one of our handler functions replaced."""

    def __init__(self, replaced: Any) -> None:
        self.replaced = replaced
        self.is_calling = False


class Sigterm:
    """The pipe, the handler, and what was there before them."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.raise_now: Callable[[], BaseException] | None = None
        """Set after the commit: what the handler raises in the main thread."""
        self.is_heard = False
        """A SIGTERM came; the news of it may be a moment behind."""
        self.script_heard = False
        """A handler of the script's own gets a SIGTERM as well: the script may end early because of it."""
        self.behind_script: Callable[[], object] = lambda: None
        """Called when a handler of the script's has run, before the script goes on."""
        self.was_raised = threading.Event()
        self.is_exiting = False
        """The interpreter is on its way out: nothing is raised any more."""
        self._pid = os.getpid()
        self._links: weakref.WeakKeyDictionary[Handler, _Link] = weakref.WeakKeyDictionary()
        """Our handler functions that somebody still holds."""
        self._handler: Handler | None = None
        """The newest of them."""
        self._calling = 0
        self._action: sigaction.Action | None = None
        """What the kernel is to do at SIGTERM: run the interpreter's own C function."""
        self._taken_by: set[int] = set()
        self._to_put_back: Any = None
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
        self._put_in_place(signal.getsignal(signal.SIGTERM))
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
        present = signal.getsignal(signal.SIGTERM)
        if present is not self._handler and self._link_of(present) is None:
            self._put_in_place(present)

    def _put_in_place(self, present: Any) -> None:
        link = _Link(present)

        # A plain function: there are frameworks that call no other kind of handler.
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

    def keep_heard(self) -> None:
        """The watcher's thread, now and then: C code may have taken SIGTERM away from the interpreter."""
        found = sigaction.read(signal.SIGTERM)
        if self._action is None or found is None or self.is_exiting:
            return
        # The default and "ignored" are set by way of Python, which `take_back` sees.
        if found.function in (self._action.function, 0, 1) or found.calls_on:
            return
        sigaction.write(signal.SIGTERM, self._action)
        if found.function not in self._taken_by:
            self._taken_by.add(found.function)
            log(
                "sigterm_silenced",
                level=logging.WARNING,
                means="C code had taken SIGTERM, so that this process would not have heard it; it was taken back. "
                "faulthandler.register(signal.SIGTERM) does that: give it chain=True, and both are called",
            )

    def _link_of(self, handler: Any) -> _Link | None:
        """None: it is none of ours."""
        return next((link for ours, link in self._links.items() if ours is handler), None)

    def _remember(self, fd: int) -> None:
        self._passed_on_to = None if fd < 0 else (fd, _identity(fd))

    def drain(self) -> bool:
        """Read what arrived; True if this process must end by it. Other signals are somebody else's."""
        try:
            data = os.read(self.read_fd, 4096)
        except BlockingIOError:
            return False
        self._pass_on(data)
        if signal.SIGTERM in data:
            self._note_who_hears()
            return True
        return signal.SIGINT in data and self._is_orphan()

    def _note_who_hears(self) -> None:
        # After the commit ours calls nobody.
        is_ours = self._link_of(signal.getsignal(signal.SIGTERM)) is not None
        if not (is_ours and self.raise_now is not None):
            self.script_heard |= callable(self._of_others()) and not self.is_exiting

    def _of_others(self) -> Any:
        """The handler that is there, or the first in its chain that is none of ours."""
        found = signal.getsignal(signal.SIGTERM)
        while (link := self._link_of(found)) is not None:
            found = link.replaced
        return found

    @property
    def is_pending(self) -> bool:
        """A signal was delivered that nobody has read of yet."""
        return bool(select.select([self.read_fd], [], [], 0)[0])

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

    @property
    def is_in_handler(self) -> bool:
        """A handler of the script's is running now."""
        return self._calling > 0

    def _handle(self, number: int, frame: FrameType | None, link: _Link) -> None:
        if os.getpid() != self._pid:
            # A forked child, where a handler of the script calls this one: the pipe is the parent's.
            if callable(link.replaced):
                link.replaced(number, frame)
            return
        if self.raise_now is not None and not self.is_exiting:
            self._raise_once(frame)
            return
        quieten_sigchld()
        self.is_heard = True
        with contextlib.suppress(OSError):  # the pipe is full: of news
            os.write(self._write_fd, bytes([signal.SIGTERM]))
        if callable(link.replaced):
            self._call_replaced(number, frame, link)
            self.behind_script()
        if self.raise_now is not None and not self.is_exiting:
            # The state became safe while the script's handler ran.
            self._raise_once(frame)

    def _raise_once(self, frame: FrameType | None) -> None:
        # Once only: the next one would break into the script's own clean-up. And not in a finalizer, where an
        # exception is printed and forgotten, nor in a handler of the script's, whose end comes first.
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
        # A handler may look up the present one, which is ours, and call that.
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
            self._to_put_back = self._of_others()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._put_interrupt_back()
            self._put_wakeup_fd_back()

    def put_back(self) -> None:
        """Main thread, of a process that goes on without us: SIGTERM does again what it did before."""
        if not self.is_exiting or self in _installed:
            self.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._to_put_back is None else self._to_put_back)
        # A handler that was put over ours may still call it.
        read_fd, write_fd, self.read_fd, self._write_fd = self.read_fd, self._write_fd, -1, -1
        os.close(read_fd)
        os.close(write_fd)

    def forget(self) -> None:
        """In a forked child."""
        self.is_exiting = True
        signal.set_wakeup_fd(-1)
        link = self._link_of(signal.getsignal(signal.SIGTERM))
        if link is not None:
            signal.signal(signal.SIGTERM, link.replaced if link.replaced is not None else signal.SIG_DFL)
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
        if frame.f_code.co_name == "__del__" or frames.is_let_go(frame):
            return True
        frame = frame.f_back
    return False


def quieten_sigchld() -> None:
    """Loader workers die with the process group; torch's handler would raise in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        signal.signal(signal.SIGCHLD, lambda number, frame: None)


def _is_of_dying_worker(error: RuntimeError) -> bool:
    """Torch's handler of SIGCHLD broke in before it was replaced: a loader worker died of the same signal."""
    return str(error).startswith("DataLoader worker")


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
