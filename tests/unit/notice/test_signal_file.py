"""The signal file: whoever reads it sees a whole message or none, whatever lies there."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.errors import SettingsError
from migrator.notice.signal_file import (
    INIT,
    READ_AT_MOST,
    RESUME,
    SAVE,
    WORDS,
    Signal,
    SignalFile,
    open_deadline,
    parse,
    render,
)

KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)


@pytest.fixture
def file(tmp_path: Path) -> SignalFile:
    return SignalFile(tmp_path / "signal")


@given(word=st.sampled_from(WORDS), fields=st.dictionaries(KEYS, st.text(max_size=40)))
def test_what_is_rendered_is_parsed_back(word: str, fields: dict[str, str]) -> None:
    """Every value comes back, with runs of blanks and line ends made one blank."""
    back = parse(render(word, fields))

    flat = {key: " ".join(value.replace("\0", " ").split()) for key, value in fields.items()}
    assert Signal(word, flat) == back


@given(data=st.binary(max_size=300))
def test_no_bytes_are_too_strange_to_read(data: bytes, in_memory: Path) -> None:
    """Any content is read as a signal or as none, and never raises."""
    path = in_memory / "strange"
    path.write_bytes(data)

    found = SignalFile(path).read()

    assert found is None or found.word in WORDS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "\0\0\0\0",
        "sav",
        "saved",
        "SAVE",
        "save me",
        "request=7",
        "\nsave\n",
        "{}",
        "save=1",
        "sa\0ve",
    ],
)
def test_what_is_no_word_is_no_signal(text: str) -> None:
    """Empty, cut off or foreign text is not acted upon."""
    assert parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "save",
        "save\n",
        "save\r\n",
        " save \n\n",
        "save\0\0",
        "save\nnonsense\n=1\na b=c\n\n",
        "save\n\0\0\0\0",
    ],
)
def test_a_word_alone_is_a_signal(text: str) -> None:
    """What echo, or an editor on Windows, leaves there counts; lines without a key are passed over."""
    assert Signal(SAVE, {}) == parse(text)


def test_a_value_may_hold_equals_signs_and_windows_line_ends() -> None:
    """A line is cut at its first equals sign only; the last line of two with one key counts."""
    found = parse("init\r\nrequest=1-2-pod\r\nerror=a=b=c\r\nrequest=3\r\n")

    assert Signal(INIT, {"request": "3", "error": "a=b=c"}) == found


@pytest.mark.parametrize(("text", "pids"), [("7", (7,)), ("7,8", (7, 8)), (" 7 , x, -3, 0,,9", (7, 9)), ("", ())])
def test_pids_are_the_numbers_named(text: str, pids: tuple[int, ...]) -> None:
    """What is no process id is passed over."""
    assert pids == Signal(INIT, {"pids": text}).pids


def test_a_word_or_key_that_nobody_would_read_is_refused() -> None:
    """A typo in our own code is an error where it is made, not a silent request."""
    with pytest.raises(ValueError, match="found the word 'safe', expected one of init, save, resume"):
        render("safe", {})
    with pytest.raises(ValueError, match="found the key 'a b'"):
        render(SAVE, {"a b": 1})


def test_what_is_written_is_read(file: SignalFile) -> None:
    """Numbers are written as text; a field that is None is left out."""
    file.write(RESUME, request="1-2-pod", step=412, seconds=1.5, error=None)

    assert Signal(RESUME, {"request": "1-2-pod", "step": "412", "seconds": "1.5"}) == file.read()


def test_a_missing_file_says_nothing(file: SignalFile, tmp_path: Path) -> None:
    """No file, no directory and a directory that is a file are all no notice."""
    (tmp_path / "plain").write_text("")
    for path in (file.path, tmp_path / "nowhere" / "signal", tmp_path / "plain" / "signal"):
        missing = SignalFile(path)
        assert missing.read() is None
        assert missing.fingerprint() is None
        missing.remove()


def test_the_directory_is_made(tmp_path: Path) -> None:
    """A directory that is missing appears with the first write, blanks in its name and all."""
    file = SignalFile(tmp_path / "a b" / "c" / "signal")

    file.write(INIT, pids=os.getpid())

    assert (os.getpid(),) == (file.read() or Signal(SAVE)).pids


def test_nothing_stays_beside_the_file(file: SignalFile) -> None:
    """After a write there is one file, after removing it there is none, and removing twice is fine."""
    file.write(INIT)
    assert [file.path] == list(file.path.parent.iterdir())

    file.remove()
    file.remove()

    assert list(file.path.parent.iterdir()) == []


def test_a_reader_never_sees_half_a_message(file: SignalFile) -> None:
    """While two threads write long messages, each read is one of them, whole."""
    messages = {word: {"error": word[0] * 4000, "end": "yes"} for word in (INIT, SAVE)}
    file.write(INIT, **messages[INIT])
    done = threading.Event()

    def write(word: str) -> None:
        while not done.is_set():
            file.write(word, **messages[word])

    writers = [threading.Thread(target=write, args=(word,)) for word in messages]
    for writer in writers:
        writer.start()
    try:
        seen = [file.read() for _ in range(300)]
    finally:
        done.set()
        for writer in writers:
            writer.join()

    assert all(found is not None and messages[found.word] == found.fields for found in seen)


def test_a_write_that_fails_leaves_the_old_message(file: SignalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is told by name, the message before stays and nothing lies beside it."""
    file.write(INIT, pids=7)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingsError, match=r"signal cannot be written: No space left.*MIGRATOR_SIGNAL"):
        file.write(RESUME)

    assert Signal(INIT, {"pids": "7"}) == file.read()
    assert [file.path] == list(file.path.parent.iterdir())


def _under_a_file(tmp_path: Path) -> SignalFile:
    (tmp_path / "plain").write_text("")
    return SignalFile(tmp_path / "plain" / "signal")


def _a_directory(tmp_path: Path) -> SignalFile:
    (tmp_path / "signal" / "inside").mkdir(parents=True)
    return SignalFile(tmp_path / "signal")


@pytest.mark.parametrize("place", [_under_a_file, _a_directory])
def test_a_place_that_cannot_be_written_is_named(place: Callable[[Path], SignalFile], tmp_path: Path) -> None:
    """The error names the path and the variable, and nothing is left beside it."""
    file = place(tmp_path)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(SettingsError, match=rf"{file.path} cannot be written: .*MIGRATOR_SIGNAL"):
        file.write(INIT)

    assert before == sorted(tmp_path.iterdir())


def test_a_pipe_in_its_place_is_an_error_and_no_hang(file: SignalFile) -> None:
    """Opening a pipe would wait for a writer that never comes."""
    os.mkfifo(file.path)

    with pytest.raises(SettingsError, match="cannot be read: it is not a regular file"):
        file.read()


def test_only_the_beginning_of_a_huge_file_is_read(file: SignalFile) -> None:
    """A line that reading cut in two is not taken for a whole one."""
    head = "save\nrequest=1\n"
    filler = "x" * (READ_AT_MOST - len(head) - len("\ndeadline=12")) + "\n"
    file.path.write_text(head + filler + "deadline=1234567890\n" + "y" * 1_000_000)

    assert Signal(SAVE, {"request": "1"}) == file.read()


def test_a_long_error_does_not_push_other_fields_out_of_reach(file: SignalFile) -> None:
    """A value is cut long before readers stop reading."""
    file.write(INIT, error="e" * 1_000_000, request="1")

    found = file.read()

    assert found is not None
    assert found.fields["request"] == "1"


def test_each_write_has_another_fingerprint(file: SignalFile) -> None:
    """Two writes differ even if they say the same, and reading changes nothing."""
    file.write(INIT)
    first = file.fingerprint()
    file.read()
    assert first is not None
    assert first == file.fingerprint()

    stat = file.path.stat()
    file.write(SAVE)

    assert (stat.st_ino, stat.st_mtime_ns, stat.st_size) == first
    assert first != file.fingerprint()


def test_the_fingerprint_does_not_ask_for_the_name(file: SignalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that denies the name, but lists it, does not hide the file."""
    file.write(SAVE)
    real, asked = os.open, []

    def denied_once(path: str, flags: int, *more: int) -> int:
        asked.append(path)
        if len(asked) == 1:
            raise FileNotFoundError(errno.ENOENT, "as an NFS client says for 30 s")
        return real(path, flags, *more)

    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(os, "open", denied_once)

    assert file.fingerprint() is not None
    assert Signal(SAVE, {}) == file.read()


def test_a_file_replaced_while_it_is_read_is_read_again(file: SignalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle of a network file system is tried again, but not for ever."""
    file.write(SAVE)
    real, left = os.read, [2]

    def stale(fd: int, count: int) -> bytes:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, count)

    monkeypatch.setattr(os, "read", stale)
    assert Signal(SAVE, {}) == file.read()

    left[0] = 1000
    with pytest.raises(SettingsError, match="cannot be read: Stale"):
        file.read()


@pytest.mark.parametrize(
    ("signal", "deadline"),
    [
        (Signal(SAVE, {"deadline": "130"}), 130.0),
        (Signal(SAVE, {"deadline": "100.5"}), 100.5),
        (Signal(SAVE, {"deadline": "100"}), None),
        (Signal(SAVE, {"deadline": "70"}), None),
        (Signal(SAVE, {}), 110.0),
        (Signal(SAVE, {"deadline": "soon"}), 110.0),
        (Signal(SAVE, {"deadline": "inf"}), 110.0),
        (Signal(SAVE, {"deadline": "nan"}), 110.0),
        (Signal(RESUME, {"deadline": "130"}), None),
        (Signal(INIT, {"deadline": "130", "error": "disk"}), None),
        (None, None),
    ],
)
def test_a_request_is_open_until_its_deadline(signal: Signal | None, deadline: float | None) -> None:
    """Answered or past its deadline it is over; without a deadline the file's age counts."""
    assert deadline == open_deadline(signal, now=100.0, mtime=80.0, grace_s=30.0)


def test_a_request_without_deadline_grows_old() -> None:
    """A request that an earlier life left behind is over once the grace has gone by."""
    assert open_deadline(Signal(SAVE, {}), now=100.0, mtime=69.0, grace_s=30.0) is None


def test_a_request_is_not_written_over_by_a_trainer_that_begins_to_listen(tmp_path: Path) -> None:
    """While a hook holds the lock the trainer waits, and then finds what the hook wrote."""
    file = SignalFile(tmp_path / "signal", container="c-1")
    lock = tmp_path / ".signal.lock"
    lock.touch()
    found: list[float | None] = []
    trainer = threading.Thread(target=lambda: found.append(file.write_unless_asked(INIT, grace_s=30.0, pids=1)))
    trainer.start()
    file.write(SAVE, request="r-1", deadline=time.time() + 20)
    lock.unlink()
    trainer.join()

    (deadline,) = found
    assert deadline is not None
    asked = file.read()
    assert asked is not None
    assert (asked.word, asked.fields["container"]) == (SAVE, "c-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["signal"]


def test_the_lock_of_a_hook_that_was_killed_holds_nobody_back(tmp_path: Path) -> None:
    """It is waited for as long as the hooks wait for one another."""
    file = SignalFile(tmp_path / "signal")
    (tmp_path / ".signal.lock").touch()
    start_s = time.monotonic()

    assert file.write_unless_asked(INIT, grace_s=30.0, pids=1) is None

    assert 0.4 < time.monotonic() - start_s < 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["signal"]
