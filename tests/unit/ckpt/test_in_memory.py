"""The room of ckpts on storage without directories: what works here works on an object store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from migrator.ckpt import catalog, continuation, leaving_mark
from migrator.ckpt.generations import Generation, claim
from migrator.ckpt.leaving_mark import Heartbeat, LeavingMark
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import MANIFEST, ckpt_name, file_in, manifest_name, mark_name, part_name, record_name
from migrator.ckpt.part_writer import write_part
from migrator.ckpt.retention import retire
from migrator.ckpt.tensor_file import read_part
from migrator.errors import CkptCorrupt, SaveFailed, StorageExistsError, StorageNotFoundError
from migrator.storage.base import Storage
from migrator.storage.memory import Bucket, MemoryStorage
from migrator.storage.posix import PosixStorage


class Clock:
    """The storage's own clock: only the test lets time pass."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bucket(clock: Clock) -> Bucket:
    return Bucket(clock)


@pytest.fixture
def storage(bucket: Bucket) -> Storage:
    made = MemoryStorage(bucket, "job")
    made.check()
    return made


def life(storage: Storage) -> Generation:
    return claim(storage, fresh=False, about={})


def parts_of(storage: Storage, generation: int, step: int) -> Manifest:
    ckpt = ckpt_name(generation, step)
    tensors = {"w": torch.full((3, 5), float(step)), "empty": torch.zeros(0)}
    part = write_part(storage, file_in(ckpt, part_name(0, 1)), tensors)
    return Manifest(generation, step, "job", 1, (part,), {})


def save(storage: Storage, generation: int, step: int) -> str:
    manifest = parts_of(storage, generation, step)
    storage.put(manifest_name(manifest.ckpt), manifest.to_bytes(), exclusive=True)
    return manifest.ckpt


def value_of(storage: Storage, ckpt: str) -> set[float]:
    (part,) = catalog.whole(storage, ckpt).parts
    home = torch.zeros(3, 5)
    tensors = read_part(storage, ckpt, part, {"w": home})
    assert tensors["w"] is home
    return set(home.flatten().tolist())


def test_a_ckpt_exists_from_its_manifest_on(storage: Storage) -> None:
    """Parts alone are no ckpt; behind the commit every byte comes back, in the tensors' own memory."""
    ours = life(storage)
    manifest = parts_of(storage, 1, 10)
    assert catalog.ckpts(storage, ours.lineage) == []
    assert catalog.uncommitted(storage, ours.lineage) == [manifest.ckpt]

    storage.put(manifest_name(manifest.ckpt), manifest.to_bytes(), exclusive=True)
    catalog.make_durable(storage, manifest.ckpt)

    assert catalog.ckpts(storage, ours.lineage) == [manifest.ckpt]
    assert value_of(storage, manifest.ckpt) == {10.0}
    with pytest.raises(StorageExistsError):
        storage.put(manifest_name(manifest.ckpt), b"another rank's", exclusive=True)
    with pytest.raises(SaveFailed, match="is committed"):
        parts_of(storage, 1, 10)


def test_a_ckpt_that_is_not_whole_is_walked_past(storage: Storage) -> None:
    """A part that is missing, one that is cut off, one with a flipped bit: the ckpt before it is whole."""
    ours = life(storage)
    names = [save(storage, 1, step) for step in (10, 20, 30, 40)]
    storage.delete(file_in(names[3], part_name(0, 1)))
    part = file_in(names[2], part_name(0, 1))
    storage.put(part, storage.get(part)[:-1], exclusive=False)
    part = file_in(names[1], part_name(0, 1))
    data = bytearray(storage.get(part))
    data[-3] ^= 4
    storage.put(part, bytes(data), exclusive=False)

    found = catalog.furthest_first(storage, ours)
    assert found == names[::-1]
    with pytest.raises(CkptCorrupt, match="is missing"):
        catalog.whole(storage, found[0])
    with pytest.raises(CkptCorrupt, match="were committed"):
        catalog.whole(storage, found[1])
    with pytest.raises(CkptCorrupt, match="block 1 of 1"):
        value_of(storage, found[2])
    assert value_of(storage, found[3]) == {10.0}


def test_two_lives_follow_each_other(bucket: Bucket, storage: Storage) -> None:
    """The second one continues the first, finds its ckpts, and its first commit retires them."""
    first = life(storage)
    save(storage, 1, 10)
    last = save(storage, 1, 20)
    other = MemoryStorage(bucket, "job")
    second = life(other)
    assert (second.number, second.continues, second.lineage) == (2, first.number, (2, 1))
    found = continuation.go_on(other, 2, lambda: catalog.furthest_first(other, second))
    assert found[0] == last
    assert continuation.gone_on_without(storage, 1, last) is None
    newer = save(other, 2, 30)
    assert retire(other, second, keep=1) == [ckpt_name(1, 10), last]
    assert catalog.ckpts(other, second.lineage) == [newer]
    late = save(storage, 1, 40)
    assert "does not have it" in str(continuation.gone_on_without(storage, 1, late))
    assert retire(storage, first, keep=1) == [], "fenced by the later life"


def test_a_number_is_claimed_once(bucket: Bucket) -> None:
    """The second one takes the next number, and continues the first."""

    class Late(MemoryStorage):
        """Does not see a record before it has tried to write its own."""

        is_late = True

        def list(self, directory: str = "") -> list[str]:
            return [] if self.is_late else super().list(directory)

        def put(self, name: str, data: bytes, **how: object) -> None:
            self.is_late = False
            super().put(name, data, **how)  # type: ignore[arg-type]

    assert life(MemoryStorage(bucket, "job")).number == 1
    second = life(Late(bucket, "job"))
    assert (second.number, second.continues) == (2, 1)


def test_retention_keeps_the_newest_and_sweeps_what_dead_writers_left(storage: Storage, clock: Clock) -> None:
    """Ckpts that are too many, parts without a manifest, and uploads that nobody will finish."""
    storage.upload(record_name(9))
    clock.now_s += 1
    ours = life(storage)
    storage.upload(file_in(ckpt_name(1, 5), part_name(0, 1)))
    parts_of(storage, 1, 15)
    names = [save(storage, 1, step) for step in (10, 20, 30)]
    dead = storage.upload(file_in(names[1], part_name(1, 2)))
    assert storage.leftovers("generations")

    assert retire(storage, ours, keep=2) == [ckpt_name(1, 5), names[0], ckpt_name(1, 15)]

    assert storage.list() == [*names[1:], "generations"]
    assert storage.leftovers("generations") == storage.leftovers(names[1]) == []
    with pytest.raises(StorageNotFoundError):
        dead.finish()
    assert storage.list(names[2]) == [MANIFEST, part_name(0, 1)]


def test_a_life_that_leaves_is_waited_for(storage: Storage, clock: Clock) -> None:
    """At most for its grace, and no longer than until its ckpt is there."""
    life(storage)
    leaving_mark.put_mark(storage, 1, LeavingMark(30.0))
    assert leaving_mark.is_leaving(storage, 1)
    second = life(storage)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now_s += seconds
        if len(slept) == 3:
            save(storage, 1, 10)

    waited_s = leaving_mark.wait_for_leaving(storage, second.lineage, clock=clock, sleep=sleep)
    assert waited_s == pytest.approx(sum(slept))
    assert len(slept) == 3
    leaving_mark.unmark_leaving(storage, 1)
    assert not leaving_mark.is_leaving(storage, 1)


def test_a_sign_of_life_changes_a_mark_and_brings_none_back(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends by itself when the mark was taken away."""
    monkeypatch.setattr(leaving_mark, "BEAT_S", 0.001)
    mark = LeavingMark(30.0, beat=0)
    leaving_mark.put_mark(storage, 1, mark)
    heartbeat = Heartbeat(storage, 1, mark)
    heartbeat.start()
    while storage.get(mark_name(1)) == mark.to_bytes():
        heartbeat.join(0.001)
    leaving_mark.unmark_leaving(storage, 1)
    heartbeat.join(30)
    assert not heartbeat.is_alive()
    assert storage.list("generations") == []


def test_a_directory_and_a_bucket_hold_the_same(storage: Storage, tmp_path: Path) -> None:
    """The same names with the same bytes, so one can be copied to the other."""
    posix = PosixStorage(tmp_path, "job")
    for place in (storage, posix):
        life(place)
        save(place, 1, 10)
        save(place, 1, 20)
    assert storage.list() == posix.list()
    for directory in storage.list():
        assert storage.list(directory) == posix.list(directory)
        for name in storage.list(directory):
            assert storage.get(file_in(directory, name)) == posix.get(file_in(directory, name))
