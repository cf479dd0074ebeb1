"""The next life waits for one that still saves, and not for one that is dead."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.ckpt import leaving_mark
from migrator.ckpt.continuation import gone_on_without
from migrator.ckpt.leaving_mark import (
    Heartbeat,
    LeavingMark,
    is_leaving,
    put_mark,
    unmark_leaving,
    wait_for_leaving,
)
from migrator.ckpt.names import GENERATIONS, MANIFEST, ckpt_name
from migrator.errors import StorageError
from migrator.platform import process_identity
from migrator.storage.posix import PosixStorage
from tests.support.harness import until
from tests.support.volume import Clock, failing, live, mark, mark_leaving, save

GRACE_S = 600.0


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path / "root", "job")


def beating(storage: PosixStorage, clock: Clock, *, until_s: float, every_s: float = 1.0) -> None:
    """Generation 1 leaves, and shows that it lives up to a moment of the test's clock."""
    put_mark(storage, 1, LeavingMark(GRACE_S, beat=0))
    beats = range(1, int(until_s / every_s) + 1)
    clock.events += [
        (
            number * every_s,
            lambda number=number: leaving_mark.change_mark(storage, 1, LeavingMark(GRACE_S, beat=number)),
        )
        for number in beats
    ]


# By its heartbeat.


def test_the_wait_ends_soon_after_the_last_sign_of_life(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL after four seconds of a grace of ten minutes: not ten minutes, and it is said why."""
    clock = Clock()
    beating(storage, clock, until_s=4)
    with caplog.at_level(logging.INFO, "migrator"):
        waited_s = clock.wait(storage, (2, 1))

    assert 4 + leaving_mark.SILENT_S <= waited_s <= 4 + leaving_mark.SILENT_S + 1
    assert 'not_waiting generation=1 why="no sign of life for' in caplog.text


def test_a_life_that_goes_on_saving_is_waited_for(storage: PosixStorage) -> None:
    """However long it takes, and though its beats come late on a full node."""
    clock = Clock()
    beating(storage, clock, until_s=90, every_s=0.7 * leaving_mark.SILENT_S)
    clock.events.append((93.0, lambda: unmark_leaving(storage, 1)))

    assert clock.wait(storage, (2, 1)) == pytest.approx(93.0, abs=0.3)


@pytest.mark.parametrize("ahead_s", [-86400.0, 86400.0])
def test_neither_clock_nor_age_counts(storage: PosixStorage, ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume's clock may be a day away from ours, either way: only changes that were seen count."""
    clock = Clock()
    beating(storage, clock, until_s=30)
    for number, (at_s, act) in enumerate(clock.events):
        clock.events[number] = at_s, lambda act=act: (act(), os.utime(mark(storage, 1), (since, since)))
    monkeypatch.setattr(PosixStorage, "now", lambda self: time.time() + ahead_s)
    since = time.time() + ahead_s
    os.utime(mark(storage, 1), (since, since))
    clock.events.append((31.0, lambda: unmark_leaving(storage, 1)))

    assert clock.wait(storage, (2, 1)) == pytest.approx(31.0, abs=0.3)


def test_a_volume_that_hangs_is_no_sign_of_death(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is away for a minute holds back our looks and the other side's beats alike."""
    clock = Clock()
    put_mark(storage, 1, LeavingMark(GRACE_S, beat=0))
    looks = 0
    get = PosixStorage.get

    def hanging(self: PosixStorage, name: str, **how: Any) -> bytes:
        nonlocal looks
        if name.endswith(".leaving"):
            looks += 1
            clock.now += 60.0 if looks == 5 else 0.0
        return get(self, name, **how)

    monkeypatch.setattr(PosixStorage, "get", hanging)
    clock.events = [(62.0, lambda: leaving_mark.change_mark(storage, 1, LeavingMark(GRACE_S, beat=1)))]
    clock.events += [(65.0, lambda: unmark_leaving(storage, 1))]

    assert clock.wait(storage, (2, 1)) == pytest.approx(65.0, abs=0.5)


def test_two_dead_lives_are_given_up_at_the_same_time(storage: PosixStorage) -> None:
    """Not one after the other."""
    for generation in (1, 2):
        put_mark(storage, generation, LeavingMark(GRACE_S, beat=0))

    assert Clock().wait(storage, (3, 2, 1)) <= leaving_mark.SILENT_S + 1


def test_a_heartbeat_brings_no_mark_back(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the mark that is there, in place; when the mark has gone, so has the thread."""
    monkeypatch.setattr(leaving_mark, "BEAT_S", 0.005)
    leaving = LeavingMark(30.0, process_identity.mine(), beat=0)
    put_mark(storage, 1, leaving)
    before = mark(storage, 1).read_bytes()
    heartbeat = Heartbeat(storage, 1, leaving)
    heartbeat.start()
    until(lambda: mark(storage, 1).read_bytes() not in (before, b""), "a beat")
    assert len(mark(storage, 1).read_bytes()) == len(before)
    assert json.loads(mark(storage, 1).read_bytes())["grace_s"] == 30.0

    unmark_leaving(storage, 1)
    heartbeat.join(10)
    assert not heartbeat.is_alive()
    assert not mark(storage, 1).exists()


def test_a_heartbeat_that_fails_says_so_once_and_goes_on(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next beat may come through. Closing ends it, and it never keeps a process alive."""
    monkeypatch.setattr(leaving_mark, "BEAT_S", 0.005)
    tried: list[int] = []

    def fails(*_: Any) -> None:
        tried.append(1)
        raise StorageError("it fails")

    monkeypatch.setattr(leaving_mark, "change_mark", fails)
    heartbeat = Heartbeat(storage, 1, LeavingMark(30.0, beat=0))
    heartbeat.start()
    until(lambda: len(tried) > 3, "beats that fail")
    heartbeat.close()
    heartbeat.join(10)

    assert heartbeat.daemon
    assert not heartbeat.is_alive()
    assert [record.message for record in caplog.records].count('storage_warning why="it fails"') == 1, caplog.text


# By who it was.


def test_another_process_with_the_same_number_is_another_process() -> None:
    """The start time tells them apart."""
    assert not process_identity.has_ended(process_identity.mine())
    assert process_identity.has_ended({**process_identity.mine(), "started": "1"})


@pytest.mark.parametrize("key", ["host", "boot", "namespace"])
def test_a_process_of_elsewhere_may_live(key: str) -> None:
    """Another pod, node or PID namespace: what has this number here says nothing."""
    assert not process_identity.has_ended({**process_identity.mine(), "started": "1", key: "another"})


@pytest.mark.parametrize("said", [{}, {"pid": "x"}, {"pid": 1}, {"host": 1, "boot": None}, {"pid": 10**30}])
def test_who_says_nothing_of_himself_may_live(said: dict[str, Any]) -> None:
    """Or says it in a way that nobody of ours does."""
    assert not process_identity.has_ended(said)


def pods_proc(directory: Path, *, instance: str, pod: str = "0f3c", container: str = "train") -> Path:
    """What the kernel says in a container: kubelet mounts a file of each instance."""
    proc = directory / f"{pod}-{container}-{instance}"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "self/ns").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("boot\n")
    (proc / "self/ns/pid").symlink_to(f"pid:[{instance}]")
    root = f"/var/lib/kubelet/pods/{pod}/containers/{container}/{instance}"
    (proc / "self/mountinfo").write_text(
        "22 1 8:1 / / rw - overlay overlay rw\n"
        f"1531 1519 8:1 {root} /dev/termination-log rw,relatime - ext4 /dev/sda1 rw\n"
    )
    return proc


def test_an_earlier_instance_of_this_container_has_ended(tmp_path: Path) -> None:
    """Kubelet starts the next one only then. Another container, or another pod, tells nothing."""
    here = pods_proc(tmp_path, instance="00000002")
    before = process_identity.mine(proc=pods_proc(tmp_path, instance="00000001"))

    assert process_identity.has_ended(before, proc=here)
    assert not process_identity.has_ended(
        process_identity.mine(proc=pods_proc(tmp_path, instance="a", pod="9999")), proc=here
    )
    assert not process_identity.has_ended(
        process_identity.mine(proc=pods_proc(tmp_path, instance="b", container="x")), proc=here
    )


# The mark, and who waits for it.


def test_what_is_not_known_in_marks_and_notes_is_ignored(storage: PosixStorage) -> None:
    """They say what they said."""
    for _ in range(2):
        live(storage)
    mark(storage, 1).write_text(json.dumps({"why": ["drained"], "grace_s": 7.0, "format": 9}))
    clock = Clock()
    assert clock.wait(storage, (2, 1)) == pytest.approx(7.0, abs=0.3)
    note = storage.directory / "generations" / "000002.from"
    note.write_text(json.dumps({"seen": 3, "from": "000001-000000000007", "format": 9}))
    assert gone_on_without(storage, 1, "000001-000000000007") is None
    assert "went on from 000001-000000000007" in str(gone_on_without(storage, 1, "000001-000000000008"))


def test_without_a_mark_nobody_waits(storage: PosixStorage) -> None:
    """An ordinary restart loses no time; one's own mark is none of these."""
    for _ in range(2):
        live(storage)
    mark_leaving(storage, 2, 30)
    assert Clock().wait(storage, (2, 1)) == 0


def test_the_next_life_waits_until_the_mark_is_gone(storage: PosixStorage, caplog: pytest.LogCaptureFixture) -> None:
    """The save was given up, or it is done and the mark was taken away; said once."""
    mark_leaving(storage, 1, 30)
    clock = Clock()
    clock.events = [(3.0, lambda: unmark_leaving(storage, 1))]
    with caplog.at_level(logging.INFO, "migrator"):
        assert clock.wait(storage, (2, 1)) == pytest.approx(3.0, abs=0.3)
    assert caplog.text.count("waiting_for_leaving generation=1") == 1


def test_the_next_life_waits_until_the_ckpt_is_there(storage: PosixStorage) -> None:
    """A kill after the commit leaves the mark; the ckpt is what counts."""
    mark_leaving(storage, 1, 30)
    clock = Clock()
    clock.events = [(2.0, lambda: save(storage, 1, 12) and None)]
    assert clock.wait(storage, (2, 1)) == pytest.approx(2.0, abs=0.3)


def test_a_ckpt_from_before_the_mark_is_not_what_is_waited_for(storage: PosixStorage) -> None:
    """The periodic save of an hour ago is not the one that is under way."""
    save(storage, 1, 10)
    os.utime(storage.directory / ckpt_name(1, 10) / "manifest.json", (1e9, 1e9))
    mark_leaving(storage, 1, 5)
    assert Clock().wait(storage, (2, 1)) == pytest.approx(5.0)


def test_the_wait_ends_with_the_grace_by_our_own_clock(storage: PosixStorage) -> None:
    """Even if the mark's time lies in the future of the storage's clock."""
    mark_leaving(storage, 1, 30)
    os.utime(mark(storage, 1), (4e9, 4e9))
    assert Clock().wait(storage, (2, 1)) == pytest.approx(30.0)


def test_several_marks_are_waited_for_at_the_same_time(storage: PosixStorage) -> None:
    """Never longer than the longest grace."""
    mark_leaving(storage, 1, 20)
    mark_leaving(storage, 2, 30)
    mark_leaving(storage, 3, 10)
    assert Clock().wait(storage, (4, 3, 2, 1)) == pytest.approx(30.0)


def test_a_mark_of_another_lineage_is_nothing_to_us(storage: PosixStorage) -> None:
    """We would not load its ckpt."""
    mark_leaving(storage, 1, 20)
    assert Clock().wait(storage, (2,)) == 0


def test_a_mark_from_long_ago_is_over(storage: PosixStorage) -> None:
    """A crash in mid-save must not slow down every restart from then on."""
    mark_leaving(storage, 1, 30)
    assert is_leaving(storage, 1)
    since = storage.now() - 10 * 30 - 1
    os.utime(mark(storage, 1), (since, since))
    assert not is_leaving(storage, 1)
    assert Clock().wait(storage, (2, 1)) == 0


def test_a_mark_below_a_newer_ckpt_is_not_waited_for(storage: PosixStorage) -> None:
    """Generation 2 has a ckpt: whatever generation 1 may still commit comes after it."""
    mark_leaving(storage, 1, 30)
    save(storage, 2, 5)
    assert Clock().wait(storage, (3, 2, 1)) == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"grace_s":"x"}', b'{"grace_s":null}', b'{"grace_s":NaN}', b'{"grace_s":-5}']
)
def test_a_mark_that_cannot_be_read_is_given_an_ordinary_grace(storage: PosixStorage, content: bytes) -> None:
    """Somebody is leaving, only when he will be gone is not known."""
    storage.put("generations/000001.leaving", content, exclusive=True)
    assert Clock().wait(storage, (2, 1)) == pytest.approx(30.0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary(max_size=40) | st.floats().map(lambda grace: json.dumps({"grace_s": grace}).encode()))
def test_no_mark_makes_anybody_wait_without_end(new_directory: Callable[[], Path], content: bytes) -> None:
    """Whatever it says."""
    storage = PosixStorage(new_directory(), "job")
    storage.put("generations/000001.leaving", content, exclusive=True)
    clock = Clock()
    assert wait_for_leaving(storage, (2, 1), clock=clock, sleep=clock.sleep, poll_s=500) <= 3600.1


def test_unmarking_twice_is_fine(storage: PosixStorage) -> None:
    """The end of a save and the end of a life both do it."""
    mark_leaving(storage, 1, 30)
    unmark_leaving(storage, 1)
    unmark_leaving(storage, 1)
    assert not is_leaving(storage, 1)


def test_a_life_may_say_twice_that_it_is_leaving(storage: PosixStorage) -> None:
    """A first attempt failed and left its mark; what counts is the second."""
    mark_leaving(storage, 1, 5.0)
    mark_leaving(storage, 1, 30.0)
    assert b"30.0" in storage.get(f"{GENERATIONS}/000001.leaving")


def test_a_mark_counts_ten_times_its_grace_and_no_longer(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the storage's clock, to the moment."""
    mark_leaving(storage, 1, 30.0)
    since = storage.modified(f"{GENERATIONS}/000001.leaving")
    assert since is not None
    for age_s, counts in ((299.0, True), (300.0, False), (301.0, False)):
        monkeypatch.setattr(PosixStorage, "now", lambda self, age_s=age_s: since + age_s)
        assert is_leaving(storage, 1) is counts


OF_FIRST = f"{GENERATIONS}/000001.leaving"


def test_a_link_in_the_place_of_a_mark_is_none(storage: PosixStorage, tmp_path: Path) -> None:
    """No life of ours makes one, and a life that followed it would wait for something else."""
    storage.make_directory(GENERATIONS)
    (storage.directory / OF_FIRST).symlink_to(tmp_path)
    assert not is_leaving(storage, 1)


def test_a_directory_in_the_place_of_a_mark_is_one(storage: PosixStorage) -> None:
    """It cannot be read, so it is given an ordinary grace."""
    storage.make_directory(GENERATIONS)
    (storage.directory / OF_FIRST).mkdir()
    assert is_leaving(storage, 1)


def test_a_mark_that_goes_while_it_is_read_is_over(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The life before has just said that it is done."""
    mark_leaving(storage, 1, 30.0)
    monkeypatch.setattr(PosixStorage, "get", failing(errno.ENOENT))
    assert not is_leaving(storage, 1)


@pytest.mark.parametrize("verb", ["modified", "get"])
def test_a_volume_that_fails_is_not_taken_for_one_without_marks(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Who does not know whether somebody is saving neither loads nor deletes."""
    mark_leaving(storage, 1, 30.0)
    monkeypatch.setattr(PosixStorage, verb, failing(errno.EIO))
    with pytest.raises(StorageError, match="it fails"):
        is_leaving(storage, 1)


def test_a_mark_without_any_grace_is_over_at_once(storage: PosixStorage) -> None:
    """None is as good a number as any other."""
    mark_leaving(storage, 1, 0.0)
    assert not is_leaving(storage, 1)


def test_a_ckpt_of_the_moment_of_the_mark_is_what_was_waited_for(storage: PosixStorage) -> None:
    """The storage's clock may be coarse: both were written in one tick of it."""
    name = save(storage, 1, 10)
    mark_leaving(storage, 1, 30.0)
    now = int(storage.now())
    for path in (f"{name}/{MANIFEST}", OF_FIRST):
        os.utime(storage.directory / path, (now, now))
    assert leaving_mark.wait_for_leaving(storage, (2, 1), clock=lambda: 0.0, sleep=pytest.fail) == 0
