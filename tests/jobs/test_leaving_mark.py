"""The next life waits for one that still saves, and not for one that is dead."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from migrator.platform import process_identity as identity
from migrator.ckpt import generations as lineage
from migrator.save.mark_keeper import Heartbeat
from migrator.ckpt.generations import LeavingMark, put_mark, unmark_leaving
from migrator.storage.posix import LocalStorage
from tests.support.harness import Job, until
from tests.unit.ckpt.test_generations import Clock, mark
from tests.jobs.test_notices import COUNT, request, saved_step, stopped

GRACE_S = 600.0


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root", "job")


def beating(storage: LocalStorage, clock: Clock, *, until_s: float, every_s: float = 1.0) -> None:
    """Generation 1 leaves, and shows that it lives up to a moment of the test's clock."""
    put_mark(storage, 1, LeavingMark(GRACE_S, beat=0))
    beats = range(1, int(until_s / every_s) + 1)
    clock.events += [
        (number * every_s, lambda number=number: lineage.beat(storage, 1, LeavingMark(GRACE_S, beat=number)))
        for number in beats
    ]


# By its heartbeat.


def test_the_wait_ends_soon_after_the_last_sign_of_life(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL after four seconds of a grace of ten minutes: not ten minutes, and it is said why."""
    clock = Clock()
    beating(storage, clock, until_s=4)
    with caplog.at_level(logging.INFO, "migrator"):
        waited_s = clock.wait(storage, (2, 1))

    assert 4 + lineage.SILENT_S <= waited_s <= 4 + lineage.SILENT_S + 1
    assert 'not_waiting generation=1 why="no sign of life for' in caplog.text


def test_a_life_that_goes_on_saving_is_waited_for(storage: LocalStorage) -> None:
    """However long it takes, and though its beats come late on a full node."""
    clock = Clock()
    beating(storage, clock, until_s=90, every_s=0.7 * lineage.SILENT_S)
    clock.events.append((93.0, lambda: unmark_leaving(storage, 1)))

    assert clock.wait(storage, (2, 1)) == pytest.approx(93.0, abs=0.3)


@pytest.mark.parametrize("ahead_s", [-86400.0, 86400.0])
def test_neither_clock_nor_age_counts(storage: LocalStorage, ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume's clock may be a day away from ours, either way: only changes that were seen count."""
    clock = Clock()
    beating(storage, clock, until_s=30)
    for number, (at_s, act) in enumerate(clock.events):
        clock.events[number] = at_s, lambda act=act: (act(), os.utime(mark(storage, 1), (since, since)))
    monkeypatch.setattr(LocalStorage, "now", lambda self: time.time() + ahead_s)
    since = time.time() + ahead_s
    os.utime(mark(storage, 1), (since, since))
    clock.events.append((31.0, lambda: unmark_leaving(storage, 1)))

    assert clock.wait(storage, (2, 1)) == pytest.approx(31.0, abs=0.3)


def test_a_volume_that_hangs_is_no_sign_of_death(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is away for a minute holds back our looks and the other side's beats alike."""
    clock = Clock()
    put_mark(storage, 1, LeavingMark(GRACE_S, beat=0))
    looks = 0
    get = LocalStorage.get

    def hanging(self: LocalStorage, name: str, **how: Any) -> bytes:
        nonlocal looks
        if name.endswith(".leaving"):
            looks += 1
            clock.now += 60.0 if looks == 5 else 0.0
        return get(self, name, **how)

    monkeypatch.setattr(LocalStorage, "get", hanging)
    clock.events = [(62.0, lambda: lineage.beat(storage, 1, LeavingMark(GRACE_S, beat=1)))]
    clock.events += [(65.0, lambda: unmark_leaving(storage, 1))]

    assert clock.wait(storage, (2, 1)) == pytest.approx(65.0, abs=0.5)


def test_two_dead_lives_are_given_up_at_the_same_time(storage: LocalStorage) -> None:
    """Not one after the other."""
    for generation in (1, 2):
        put_mark(storage, generation, LeavingMark(GRACE_S, beat=0))

    assert Clock().wait(storage, (3, 2, 1)) <= lineage.SILENT_S + 1


def test_a_heartbeat_brings_no_mark_back(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the mark that is there, in place; when the mark has gone, so has the thread."""
    monkeypatch.setattr(lineage, "BEAT_S", 0.005)
    leaving = LeavingMark(30.0, identity.mine(), beat=0)
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


# By who it was.


@pytest.mark.processes
def test_a_process_that_has_ended_here_is_not_waited_for(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """Started again in the same container: nobody else is left to save."""
    process = subprocess.Popen(["sleep", "60"])
    of_process = {**identity.mine(), "pid": process.pid, "started": identity._started(Path("/proc"), process.pid)}
    put_mark(storage, 1, LeavingMark(5.0, of_process))
    assert Clock().wait(storage, (2, 1)) == pytest.approx(5.0)
    process.kill()
    # A zombie saves nothing either.
    until(lambda: identity.has_ended(of_process), "its end")
    assert Clock().wait(storage, (2, 1)) == 0
    process.wait()

    assert Clock().wait(storage, (2, 1)) == 0
    assert 'not_waiting generation=1 why="its process has ended"' in caplog.text


def test_another_process_with_the_same_number_is_another_process() -> None:
    """The start time tells them apart."""
    assert not identity.has_ended(identity.mine())
    assert identity.has_ended({**identity.mine(), "started": "1"})


@pytest.mark.parametrize("key", ["host", "boot", "namespace"])
def test_a_process_of_elsewhere_may_live(key: str) -> None:
    """Another pod, node or PID namespace: what has this number here says nothing."""
    assert not identity.has_ended({**identity.mine(), "started": "1", key: "another"})


@pytest.mark.parametrize("said", [{}, {"pid": "x"}, {"pid": 1}, {"host": 1, "boot": None}, {"pid": 10**30}])
def test_who_says_nothing_of_himself_may_live(said: dict[str, Any]) -> None:
    """Or says it in a way that nobody of ours does."""
    assert not identity.has_ended(said)


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
    before = identity.mine(proc=pods_proc(tmp_path, instance="00000001"))

    assert identity.has_ended(before, proc=here)
    assert not identity.has_ended(identity.mine(proc=pods_proc(tmp_path, instance="a", pod="9999")), proc=here)
    assert not identity.has_ended(identity.mine(proc=pods_proc(tmp_path, instance="b", container="x")), proc=here)


# Whole lives.


def test_a_killed_life_is_not_waited_for_in_its_own_container(job: Job) -> None:
    """It was killed while it saved, and its grace is long: the next one starts at once from the ckpt before."""
    first = stopped(job.write(COUNT), after=10)
    old = job.run(HOLD_COMMIT="1", MIGRATOR_GRACE_S="600")
    old.wait_for("^step 40$")
    old.kill()
    old.wait_for("^holds the commit$")
    old.kill(signal.SIGKILL)
    old.wait()
    new = job.run(STEPS="10")

    assert new.wait() == 0, new.text
    assert new.events("not_waiting")
    assert not new.events("waiting_for_leaving")
    assert f"at {saved_step(first)}" in new.text


def test_a_life_that_saves_shows_that_it_lives(job: Job) -> None:
    """Its mark changes while storage takes its time, and goes with the answer."""
    old = job.write("from migrator import lineage\nlineage.BEAT_S = 0.02\n" + COUNT).run(HOLD_COMMIT="1")
    old.wait_for("^step 10$")
    request(job, "r")
    old.wait_for("^holds the commit$")
    place = job.root / "default" / "generations" / "000001.leaving"
    seen = {place.read_bytes()}
    until(lambda: seen.add(place.read_bytes()) or len(seen) > 3, "beats")
    (job.directory / "go").touch()

    assert old.wait() == 143, old.text
    assert not place.exists()
