"""The thread that notes how much memory a life uses: when it writes, and what it leaves behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.ckpt.memory_note import MemoryNote, notes_of
from migrator.errors import StorageError
from migrator.platform import memory
from migrator.platform.memory import Memory
from migrator.save import memory_keeper
from migrator.save.memory_keeper import MemoryKeeper
from migrator.save.reply import Pod
from migrator.storage.posix import PosixStorage
from tests.support.harness import until
from tests.support.volume import live

MI = 1 << 20
GI = 1 << 30


class Counting(PosixStorage):
    """Counts what is written; `fails` says how often it cannot be."""

    writes = 0
    fails = 0

    def put(self, *arguments: Any, **more: Any) -> None:
        self._count()
        super().put(*arguments, **more)

    def change(self, *arguments: Any) -> None:
        self._count()
        super().change(*arguments)

    def _count(self) -> None:
        self.writes += 1
        if self.fails:
            self.fails -= 1
            raise StorageError("it fails")


class Life:
    """A life whose memory is what the test says."""

    def __init__(
        self, storage: Counting, *, pod: Pod | None = None, writes: bool = True, is_claimed: bool = True
    ) -> None:
        self.storage = storage
        self.memory: Memory | None = Memory(used=1 * GI, limit=4 * GI, kills=5)
        self.copies: Any = SimpleNamespace(copy_bytes=0, copied_bytes=0)
        self.looks = 0
        generation = SimpleNamespace(number=1, is_claimed=is_claimed)
        context: Any = SimpleNamespace(storage=storage, generation=generation, rank=3, writes=writes)
        self.keeper = MemoryKeeper(context, self.copies, pod or Pod(), look=self._look)
        self.keeper.start()

    def _look(self) -> Memory | None:
        self.looks += 1
        return self.memory

    def look(self) -> None:
        """Until it has looked at what is the case now, and written that if it wanted to."""
        looks = self.looks
        until(lambda: self.looks > looks + 1, "two looks")

    @property
    def note(self) -> MemoryNote | None:
        return notes_of(self.storage, 1).get(3)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast as a test; and this process has used nothing."""
    monkeypatch.setattr(memory_keeper, "FIRST_S", 0.01)
    monkeypatch.setattr(memory_keeper, "LOOK_S", 0.01)
    monkeypatch.setattr(memory_keeper, "_RETRY_AT_MOST_S", 0.02)
    monkeypatch.setattr(memory, "peak_of_process", lambda: 0)


@pytest.fixture
def storage(tmp_path: Path) -> Counting:
    storage = Counting(tmp_path / "root", "job")
    live(storage)
    storage.writes = 0
    return storage


@pytest.fixture
def life(storage: Counting) -> Iterator[Life]:
    life = Life(storage)
    yield life
    life.keeper.close()
    assert not life.keeper.is_alive()


def test_the_most_that_was_in_use_is_noted(life: Life) -> None:
    """Also when less is in use again; it is written only when that is a fiftieth of the limit more."""
    life.look()
    assert life.note is not None
    assert (life.note.peak, life.note.limit, life.note.kills, life.note.killed) == (GI, 4 * GI, 5, 0)
    for used, noted in ((2 * GI, 2 * GI), (GI, 2 * GI), (2 * GI + 80 * MI, 2 * GI), (3 * GI, 3 * GI)):
        life.memory = Memory(used=used, limit=4 * GI, kills=5)
        life.look()
        assert life.note is not None
        assert life.note.peak == noted
    assert life.storage.writes == 3


def test_a_short_rise_of_this_process_is_noted(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at the cgroup met it; but never more than the limit, of which two processes may share pages."""
    for peak, noted in ((2 * GI, 2 * GI), (9 * GI, 4 * GI)):
        monkeypatch.setattr(memory, "peak_of_process", lambda peak=peak: peak)
        life.look()
        assert life.note is not None
        assert life.note.peak == noted


def test_what_a_save_copies_is_noted(storage: Counting) -> None:
    """When it becomes known, for all ranks of the pod; and what of it is in use already."""
    life = Life(storage, pod=Pod(ranks=4))
    life.look()
    life.copies.copy_bytes = 100
    life.look()
    assert life.note is not None
    assert (life.note.copy, life.note.copied) == (400, 0)
    life.copies.copied_bytes = 100
    life.look()
    assert (life.note.copy, life.note.copied, storage.writes) == (400, 400, 3)
    life.keeper.close()


def test_a_life_that_ends_knowingly_leaves_no_note(life: Life) -> None:
    """Whoever finds one knows that nothing of ours could run."""
    life.look()
    assert life.note is not None
    life.keeper.close()

    assert life.note is None
    life.keeper.close()


def test_a_life_that_ends_knowingly_before_the_first_note_writes_none(storage: Counting) -> None:
    """It costs the storage nothing."""
    life = Life(storage)
    life.keeper.close()

    assert storage.writes <= 1
    assert life.note is None


def test_the_note_stays_if_the_kernel_killed_another_process_of_the_container(life: Life) -> None:
    """A loader worker or another rank: this one ends by an exception or by SIGTERM, and so does know of its end."""
    life.look()
    life.memory = Memory(used=3 * GI, limit=4 * GI, kills=7)
    life.look()
    life.keeper.close()

    assert life.note is not None
    assert (life.note.killed, life.note.kills) == (2, 5)


@pytest.mark.parametrize(
    "more",
    [{"pod": Pod(position=1)}, {"writes": False}, {"is_claimed": False}],
    ids=["a neighbour", "blind", "leaving"],
)
def test_only_one_process_of_a_pod_that_sees_the_root_writes(storage: Counting, more: dict[str, Any]) -> None:
    """And only one that trains."""
    life = Life(storage, **more)
    assert not life.keeper.is_alive()
    life.keeper.close()

    assert storage.writes == 0


def test_a_storage_that_fails_is_tried_again(storage: Counting) -> None:
    """Nothing is raised, in this thread or in another."""
    storage.fails = 3
    life = Life(storage)
    until(lambda: life.note, "a note")
    life.keeper.close()

    assert life.note is None


def test_without_a_cgroup_the_process_is_noted(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that shows nothing else."""
    life.memory = None
    monkeypatch.setattr(memory, "peak_of_process", lambda: 3 * GI)
    life.look()

    assert life.note is not None
    assert (life.note.peak, life.note.limit) == (3 * GI, None)


def test_a_later_life_that_took_the_note_away_does_not_get_it_back(life: Life) -> None:
    """It has begun without this one."""
    life.look()
    (life.storage.directory / "generations" / "000001.memory-00003").unlink()
    life.memory = Memory(used=3 * GI, limit=4 * GI, kills=5)
    until(lambda: not life.keeper.is_alive(), "the end of the thread")

    assert life.note is None


def test_a_storage_that_hangs_does_not_hold_the_end(storage: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean end of the script takes a moment longer, and no more."""
    monkeypatch.setattr(memory_keeper, "_END_S", 0.05)
    held = threading.Event()
    life = Life(storage)
    life.look()
    monkeypatch.setattr(storage, "delete", lambda name: held.wait(60))
    start_s = time.monotonic()
    life.keeper.close()

    assert time.monotonic() - start_s < 5
    assert life.keeper.is_alive()
    held.set()
