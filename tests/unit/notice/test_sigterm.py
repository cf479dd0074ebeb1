"""SIGTERM handlers of scripts and frameworks, set before and after ours: each runs once, and no stop is lost."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from migrator.errors import Migrated
from migrator.leaving.leaving import Leaving
from migrator.notice import sigterm as sigterm_module
from migrator.notice.sigterm import Sigterm
from migrator.notice.watcher import Notice
from tests.support.harness import until


@pytest.fixture
def ran() -> list[str]:
    """Which handlers ran, in order."""
    return []


@pytest.fixture
def ours(ran: list[str]) -> Iterator[Sigterm]:
    """Our handler, put in place over one that the process had before."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: ran.append("before listening()"))
    wakeup_fd = signal.set_wakeup_fd(-1)
    sigterm = Sigterm()
    sigterm.install()
    yield sigterm
    sigterm.close()
    signal.signal(signal.SIGTERM, before)
    signal.set_wakeup_fd(wakeup_fd)
    for fd in (sigterm.read_fd, sigterm._write_fd):
        os.close(fd)


def set_one(ran: list[str], name: str, *, calls_on: bool = True) -> Any:
    """A handler as scripts have them, which calls the one it found. Returns what it found."""
    found: Any = None

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append(name)
        if calls_on and callable(found):
            found(number, frame)

    found = signal.signal(signal.SIGTERM, handler)
    return found


def tell_to_leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_that_calls_the_one_before_it_does_not_recurse(ours: Sigterm, ran: list[str]) -> None:
    """Set after listening(), it calls ours, and ours, back in place at a safe point, calls it: once."""
    set_one(ran, "the script's")
    ours.reinstall()
    tell_to_leave()

    assert ran == ["the script's", "before listening()"]
    assert ours.is_heard
    assert ours.drain()


def test_the_script_is_held_behind_its_handler_until_the_others_can_know(ours: Sigterm, ran: list[str]) -> None:
    """Its handler has run, and the script goes on when it is said so, or after the time given."""
    is_said = threading.Event()

    def say() -> None:
        until(lambda: bool(ran), "the script's handler")
        ran.append("said")
        is_said.set()

    thread = threading.Thread(target=say)
    thread.start()
    ours.hold_script(is_said, at_most_s=60.0)
    tell_to_leave()
    ran.append("goes on")
    thread.join()
    assert ran == ["before listening()", "said", "goes on"]

    ours.hold_script(threading.Event(), at_most_s=0.0)
    tell_to_leave()
    assert ran[3:] == ["before listening()"]


def test_handlers_set_one_after_the_other_run_once_each(ours: Sigterm, ran: list[str]) -> None:
    """The newest first, as it would be without us; however often ours was put back between them."""
    for name in ("first", "second", "third"):
        set_one(ran, name)
        ours.reinstall()
        ours.reinstall()
    tell_to_leave()

    assert ran == ["third", "second", "first", "before listening()"]


def test_a_handler_that_calls_no_other_ends_the_chain(ours: Sigterm, ran: list[str]) -> None:
    """What it has left out stays out; the stop is heard all the same."""
    set_one(ran, "first")
    ours.reinstall()
    set_one(ran, "second", calls_on=False)
    ours.reinstall()
    tell_to_leave()

    assert ran == ["second"]
    assert ours.is_heard


def test_a_handler_that_calls_the_present_one_does_not_recurse(ours: Sigterm, ran: list[str]) -> None:
    """It looks up who is in place, which is ours, and calls that."""

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append("the script's")
        present = signal.getsignal(signal.SIGTERM)
        if callable(present) and present is not handler:
            present(number, frame)

    signal.signal(signal.SIGTERM, handler)
    ours.reinstall()
    tell_to_leave()

    assert ran == ["the script's"]
    assert ours.is_heard


def test_a_framework_that_puts_back_what_it_found_is_out(ours: Sigterm, ran: list[str]) -> None:
    """A trainer's handler is not called any more when its `fit()` is over."""
    found = set_one(ran, "the framework's")
    ours.reinstall()
    signal.signal(signal.SIGTERM, found)
    ours.reinstall()
    tell_to_leave()

    assert ran == ["before listening()"]
    assert ours.is_heard


def test_the_same_handler_set_again_and_again_runs_once(ours: Sigterm, ran: list[str]) -> None:
    """Some scripts set theirs in each epoch; nothing grows."""

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append("the script's")

    for _ in range(50):
        signal.signal(signal.SIGTERM, handler)
        ours.reinstall()
    tell_to_leave()

    assert ran == ["the script's"]
    assert len(ours._links) == 1


def test_state_that_becomes_safe_in_a_handler_ends_the_process_behind_it(ours: Sigterm, ran: list[str]) -> None:
    """The script's handler comes to its end first, and its `except` does not take our exception."""

    def handler(number: int, frame: FrameType | None) -> None:
        ours.raise_now = lambda: Migrated(143)
        try:
            ours.interrupt_main()
            found(number, frame)
        except BaseException as error:
            ran.append(repr(error))
        ran.append("the script's, to its end")

    found: Callable[[int, FrameType | None], None] = signal.signal(signal.SIGTERM, handler)  # type: ignore[assignment]
    ours.reinstall()
    with pytest.raises(Migrated):
        tell_to_leave()

    assert ran == ["the script's, to its end"]


def test_a_handler_that_saves_something_has_the_grace_for_it(ours: Sigterm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread that is in a handler of the script's is not taken for one that hangs."""
    ended: list[str] = []
    leaving = Leaving(sigterm=ours, exit_code=143)
    monkeypatch.setattr("migrator.leaving.leaving.CALL_BACK_S", 0.02)
    monkeypatch.setattr(leaving, "exit_now", ended.append)
    leaving.begin(Notice("SIGTERM", time.monotonic() + 20, 20))

    def handler(number: int, frame: FrameType | None) -> None:
        seeing_off.start()
        seeing_off.join(0.3)  # longer than the main thread may take otherwise

    seeing_off = threading.Thread(target=leaving.see_off)
    signal.signal(signal.SIGTERM, handler)
    ours.reinstall()
    with pytest.raises(Migrated):
        tell_to_leave()
    leaving.main_is_out.set()
    seeing_off.join()

    assert ended == []


def test_c_code_that_takes_sigterm_is_noticed(
    ours: Sigterm, ran: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python still names our handler, and nobody would call it. It is taken back, and said once."""
    with (tmp_path / "dump").open("w") as dump:
        for _ in range(2):
            faulthandler.register(signal.SIGTERM, file=dump)
            try:
                ours.reinstall_in_kernel()
                tell_to_leave()
            finally:
                faulthandler.unregister(signal.SIGTERM)

    assert ran == ["before listening()"] * 2
    assert caplog.text.count("sigterm_silenced") == 1
    assert "chain=True" in caplog.text


def test_c_code_that_calls_on_is_left_alone(ours: Sigterm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With chain=True there is a traceback, and the notice."""
    with (tmp_path / "dump").open("w") as dump:
        faulthandler.register(signal.SIGTERM, file=dump, chain=True)
        try:
            ours.reinstall_in_kernel()
            tell_to_leave()
        finally:
            faulthandler.unregister(signal.SIGTERM)

    assert ours.is_heard
    assert "tell_to_leave" in (tmp_path / "dump").read_text()
    assert "sigterm_silenced" not in caplog.text


@pytest.mark.parametrize("how", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_a_script_sets_by_python_is_not_taken_for_c_code(
    ours: Sigterm, how: signal.Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """The next safe point sees it."""
    signal.signal(signal.SIGTERM, how)
    ours.reinstall_in_kernel()
    assert signal.getsignal(signal.SIGTERM) is how
    ours.reinstall()
    tell_to_leave()

    assert ours.is_heard
    assert "sigterm_silenced" not in caplog.text


def test_a_loader_worker_that_dies_while_its_signal_is_silenced_does_no_harm(
    ours: Sigterm, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group that is stopped: SIGCHLD comes in the very moment in which our handler replaces its handler."""

    def torchs(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    getsignal = signal.getsignal
    worker_died: list[bool] = []

    def getsignal_when_it_dies(number: int) -> Any:
        if number == signal.SIGCHLD and not worker_died:
            worker_died.append(True)
            signal.raise_signal(signal.SIGCHLD)
        return getsignal(number)

    before = signal.signal(signal.SIGCHLD, torchs)
    monkeypatch.setattr(signal, "getsignal", getsignal_when_it_dies)
    try:
        signal.raise_signal(signal.SIGTERM)

        assert worker_died
        assert ours.is_heard
        assert ran == ["before listening()"]
        signal.raise_signal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_loader_worker_that_dies_of_the_same_signal_does_not_break_into_the_handler(
    ours: Sigterm, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's SIGTERM ends the workers too, and torch raises in the main thread, inside our handler as well."""

    def torchs(number: int, frame: FrameType | None) -> None:
        ran.append("torch's")
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    before = signal.signal(signal.SIGCHLD, torchs)
    quieten = sigterm_module.quieten_sigchld

    def as_a_worker_dies() -> None:
        if not ran:
            os.kill(os.getpid(), signal.SIGCHLD)
        quieten()

    monkeypatch.setattr(sigterm_module, "quieten_sigchld", as_a_worker_dies)
    try:
        tell_to_leave()
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert ran == ["torch's", "before listening()"]
    assert ours.is_heard
