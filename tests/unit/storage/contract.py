"""What `migrator.storage.base` promises, as tests that every storage passes.

A storage's own test file is a fixture `connect` and an empty class for each class here:

    class TestSmallFiles(OfMine, contract.SmallFiles): ...

`connect(job)` is another process that uses the same place: each call makes a new `Storage`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from migrator.errors import (
    SettingsError,
    StorageAccessError,
    StorageError,
    StorageExistsError,
    StorageForeignError,
    StorageNotFoundError,
)
from migrator.storage.base import Storage

Connect = Callable[[str], Storage]


def views(data: bytes, *sizes: int) -> list[memoryview]:
    """The bytes cut into pieces of these sizes."""
    found, at = [], 0
    for size in sizes:
        found.append(memoryview(data)[at : at + size])
        at += size
    return found


def upload(storage: Storage, name: str, data: bytes) -> None:
    with storage.upload(name) as file:
        file.write([memoryview(data)])
        file.finish()


def read(storage: Storage, name: str, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    with storage.open(name) as file:
        file.read([memoryview(buffer)], offset)
    return bytes(buffer)


def at_once(count: int, act: Callable[[int], Any]) -> list[Any]:
    """What `count` threads return, or the error they end with, that begin at the same moment."""
    start = threading.Barrier(count)

    def run(i: int) -> Any:
        start.wait()
        try:
            return act(i)
        except StorageError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class Contract:
    """What the classes below are tested with."""

    @pytest.fixture
    def connect(self) -> Connect:
        raise NotImplementedError

    @pytest.fixture
    def storage(self, connect: Connect) -> Storage:
        return connect("job")

    @pytest.fixture
    def other(self, connect: Connect) -> Storage:
        """Another process of the same job."""
        return connect("job")


class Names(Contract):
    """What may be a name, and what it stands for."""

    @pytest.mark.parametrize("name", ["record", "directory/record", "a-b_c.json", "000001-000000000002/x"])
    def test_a_name_has_one_slash_at_most(self, storage: Storage, name: str) -> None:
        """Both kinds are written and read alike."""
        storage.put(name, b"1", exclusive=True)
        assert storage.get(name) == b"1"

    @pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "a/..", "a/b/c", "a\0b"])
    def test_any_other_name_is_refused_by_every_verb(self, storage: Storage, name: str) -> None:
        """Whatever a manifest says, nothing outside of the job is touched."""
        acts: list[Callable[[], Any]] = [
            lambda: storage.put(name, b"", exclusive=True),
            lambda: storage.change(name, b""),
            lambda: storage.get(name),
            lambda: storage.open(name).__enter__(),
            lambda: storage.upload(name),
            lambda: storage.list(name),
            lambda: storage.size(name),
            lambda: storage.modified(name),
            lambda: storage.make_durable(name),
            lambda: storage.delete(name),
            lambda: storage.delete_all(name),
            lambda: storage.leftovers(name),
        ]
        for act in acts:
            with pytest.raises(StorageAccessError, match="is not a name inside") as refusal:
                act()
            assert not refusal.value.transient

    @pytest.mark.parametrize("job", ["", "..", ".hidden", "/abs", "a/../b", "a\0b"])
    def test_a_job_that_is_none_is_refused(self, connect: Connect, job: str) -> None:
        """The error names the setting."""
        with pytest.raises(SettingsError, match="MIGRATOR_JOB"):
            connect(job)

    def test_jobs_do_not_see_each_other(self, connect: Connect) -> None:
        """Not even those whose names begin alike."""
        one, other = connect("job"), connect("job2")
        one.put("record", b"1", exclusive=True)
        assert other.list() == []
        other.put("record", b"2", exclusive=True)
        other.delete("record")
        assert one.get("record") == b"1"

    def test_where_a_name_is_can_be_said(self, storage: Storage) -> None:
        """For messages: what people look for."""
        assert storage.where("directory/record").endswith("job/directory/record")
        assert "job" in storage.where()
        assert storage.where("record").startswith(str(storage.root))


class SmallFiles(Contract):
    """put, change and get."""

    def test_what_was_put_is_there_for_everybody(self, storage: Storage, other: Storage) -> None:
        """The call has returned, so the other process finds name, bytes and size."""
        storage.put("directory/record", b"one", exclusive=True)
        assert other.get("directory/record") == b"one"
        assert other.size("directory/record") == 3
        assert other.list("directory") == ["record"]

    def test_other_bytes_replace_those_that_are_there(self, storage: Storage, other: Storage) -> None:
        """The last writer wins, also with fewer bytes."""
        storage.put("record", b"a long one", exclusive=False)
        other.put("record", b"two", exclusive=False)
        assert storage.get("record") == b"two"
        storage.put("record", b"", exclusive=False)
        assert other.get("record") == b""

    def test_an_exclusive_name_that_is_taken_keeps_its_bytes(self, storage: Storage, other: Storage) -> None:
        """It makes no difference how it was taken."""
        storage.put("a", b"first", exclusive=True)
        storage.put("b", b"first", exclusive=False)
        upload(storage, "c", b"first")
        for name in "abc":
            with pytest.raises(StorageExistsError) as refusal:
                other.put(name, b"second", exclusive=True)
            assert not refusal.value.transient
            assert storage.get(name) == b"first"
        assert storage.leftovers() == []

    def test_a_name_that_was_deleted_can_be_given_again(self, storage: Storage) -> None:
        """Exclusive means: nobody has it now."""
        storage.put("a", b"first", exclusive=True)
        storage.delete("a")
        storage.put("a", b"second", exclusive=True)
        assert storage.get("a") == b"second"

    def test_a_check_looks_before_the_name_appears(self, storage: Storage, other: Storage) -> None:
        """It sees a directory without the name."""
        storage.put("ckpt/part", b"", exclusive=True)
        seen: list[list[str]] = []

        def check() -> None:
            if not seen:  # an object store looks twice
                seen.append(other.list("ckpt"))

        storage.put("ckpt/manifest", b"{}", exclusive=True, check=check)
        assert seen == [["part"]]
        assert other.list("ckpt") == ["manifest", "part"]

    @pytest.mark.parametrize("exclusive", [True, False])
    def test_what_a_check_refuses_gets_no_name(self, storage: Storage, exclusive: bool) -> None:
        """Its own error is raised, and nothing is left behind."""

        def check() -> None:
            raise ValueError("not now")

        with pytest.raises(ValueError, match="not now"):
            storage.put("ckpt/manifest", b"{}", exclusive=exclusive, check=check)
        assert storage.list("ckpt") == storage.leftovers("ckpt") == []

    @pytest.mark.parametrize("exclusive", [True, False])
    def test_a_directory_that_goes_behind_a_check_takes_the_bytes_with_it(
        self, storage: Storage, other: Storage, exclusive: bool
    ) -> None:
        """Else a commit would appear whose parts have just been deleted."""
        storage.put("ckpt/part", b"", exclusive=True)

        def check() -> None:
            if other.size("ckpt/part") is None:
                raise StorageNotFoundError("the part is gone")
            other.delete_all("ckpt")

        with pytest.raises(StorageError):
            storage.put("ckpt/manifest", b"{}", exclusive=exclusive, check=check)
        assert storage.list("ckpt") == []

    def test_a_change_is_seen(self, storage: Storage, other: Storage) -> None:
        """Old bytes or new ones, and not earlier than it was written."""
        storage.put("mark", b"beat 1", exclusive=True)
        before = storage.modified("mark")
        storage.change("mark", b"beat 2")
        after = other.modified("mark")
        assert other.get("mark") == b"beat 2"
        assert before is not None
        assert after is not None
        assert before <= after

    def test_a_change_brings_nothing_back(self, storage: Storage, other: Storage) -> None:
        """A sign of life that comes late is no sign of life."""
        storage.put("mark", b"beat 1", exclusive=True)
        other.delete("mark")
        with pytest.raises(StorageNotFoundError):
            storage.change("mark", b"beat 2")
        assert storage.list() == []

    @pytest.mark.parametrize("name", ["record", "directory/record", "directory"])
    def test_what_is_not_there_cannot_be_read(self, storage: Storage, name: str) -> None:
        """Nor can a directory be."""
        storage.put("directory/other", b"", exclusive=True)
        with pytest.raises(StorageNotFoundError) as failure:
            storage.get(name)
        assert not failure.value.transient

    def test_reading_is_limited(self, storage: Storage) -> None:
        """A huge file under the name of a small one does not fill the memory."""
        storage.put("record", b"12345", exclusive=True)
        assert storage.get("record", limit=5) == b"12345"
        with pytest.raises(StorageForeignError, match="larger than 4"):
            storage.get("record", limit=4)


class LargeFiles(Contract):
    """upload and open."""

    def test_an_upload_appears_when_it_is_finished(self, storage: Storage, other: Storage) -> None:
        """Until then it is what a dead writer would leave."""
        with storage.upload("ckpt/part") as file:
            file.write(views(b"abcdef", 3, 3))
            file.write([memoryview(b"ghi")])
            assert file.bytes == 9
            assert other.list("ckpt") == []
            assert other.size("ckpt/part") is None
            assert len(other.leftovers("ckpt")) == 1
            file.finish()
            assert other.get("ckpt/part") == b"abcdefghi"
        assert other.list("ckpt") == ["part"]
        assert other.leftovers("ckpt") == []
        assert other.get("ckpt/part") == b"abcdefghi"

    def test_an_upload_may_be_empty(self, storage: Storage) -> None:
        """Without any bytes, or with empty buffers."""
        upload(storage, "ckpt/a", b"")
        with storage.upload("ckpt/b") as file:
            file.finish()
        assert storage.size("ckpt/a") == storage.size("ckpt/b") == 0

    def test_an_upload_that_is_not_finished_leaves_nothing(self, storage: Storage) -> None:
        """Neither by an exception nor by forgetting to finish; and closing twice is fine."""
        storage.put("ckpt/old", b"old", exclusive=True)

        def interrupted() -> memoryview:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), storage.upload("ckpt/part") as file:
            file.write([memoryview(b"abc"), interrupted()])
        with storage.upload("ckpt/old") as file:
            file.write([memoryview(b"abc")])
        file.close()
        assert storage.list("ckpt") == ["old"]
        assert storage.get("ckpt/old") == b"old"
        assert storage.leftovers("ckpt") == []

    @pytest.mark.parametrize("size", [6, 1 << 20])
    def test_bytes_are_taken_before_write_returns(self, storage: Storage, size: int) -> None:
        """The training loop changes its tensors as soon as it may."""
        buffer = bytearray(b"b" * size)
        with storage.upload("ckpt/part", size=size) as file:
            file.write([memoryview(buffer)])
            buffer[:] = b"a" * size
            file.finish()
        assert storage.get("ckpt/part") == b"b" * size

    def test_bytes_that_hold_still_may_be_taken_later(self, storage: Storage) -> None:
        """Of any number of buffers, of any sizes, in their order."""
        data = bytes(i * 7 % 251 for i in range(700_000))
        cuts = [0, 5, 5, 300_000, 300_001, 600_000, 600_100, 700_000]
        buffers = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
        with storage.upload("ckpt/part", size=len(data)) as file:
            file.write(buffers[:3], hold=True)
            file.write(buffers[3:4])
            file.write(buffers[4:], hold=True)
            assert file.bytes == len(data)
            file.finish()
        assert storage.get("ckpt/part") == data

    def test_the_last_upload_to_finish_wins(self, storage: Storage, other: Storage) -> None:
        """Not the last one to begin."""
        with storage.upload("part") as first, other.upload("part") as second:
            second.write([memoryview(b"second")])
            second.finish()
            first.write([memoryview(b"first")])
            first.finish()
        assert storage.get("part") == b"first"

    def test_an_upload_below_what_is_deleted_cannot_be_finished(self, storage: Storage, other: Storage) -> None:
        """Its writer hears that, and nothing comes back."""
        with storage.upload("ckpt/part") as file:
            file.write([memoryview(b"abc")])
            other.delete_all("ckpt")
            with pytest.raises(StorageError):
                file.finish()
        assert storage.list() == storage.list("ckpt") == []
        assert storage.leftovers() == storage.leftovers("ckpt") == []

    def test_ranges_fill_buffers_one_after_another(self, storage: Storage) -> None:
        """From any byte on, also none at all."""
        data = bytes(range(256)) * 40
        upload(storage, "part", data)
        buffers = [bytearray(size) for size in (1, 0, 5000, 100)]
        with storage.open("part") as file:
            file.read([memoryview(buffer) for buffer in buffers], 3)
            file.read([], 0)
        assert b"".join(buffers) == data[3:5104]
        assert read(storage, "part", len(data) - 1, 1) == data[-1:]

    def test_threads_read_at_the_same_time(self, storage: Storage) -> None:
        """From one reader, each another range."""
        data = bytes(range(256)) * 400
        upload(storage, "part", data)
        with storage.open("part") as file:

            def block(i: int) -> bytes:
                buffer = bytearray(1000)
                file.read([memoryview(buffer)], 1000 * i)
                return bytes(buffer)

            assert b"".join(at_once(8, block)) == data[:8000]

    @pytest.mark.parametrize("offset", [0, 3, 100])
    def test_a_file_that_ends_too_early_is_not_one_of_ours(self, storage: Storage, offset: int) -> None:
        """Neither zeros nor an endless wait."""
        upload(storage, "part", b"abc")
        with pytest.raises(StorageForeignError, match="ends already at byte"):
            read(storage, "part", offset, 4)

    @pytest.mark.parametrize("name", ["part", "ckpt/part", "ckpt"])
    def test_what_is_not_there_cannot_be_opened(self, storage: Storage, name: str) -> None:
        """It is said when it is opened, or at the first range."""
        storage.put("ckpt/other", b"", exclusive=True)
        with pytest.raises(StorageNotFoundError):
            read(storage, name, 0, 1)


class Looking(Contract):
    """list, size, modified, now, make_durable, leftovers, check."""

    def test_before_anything_was_written_there_is_nothing(self, storage: Storage) -> None:
        """None and empty, not errors."""
        assert storage.list() == storage.list("ckpt") == storage.leftovers() == storage.leftovers("ckpt") == []
        assert storage.size("a") is storage.size("ckpt/a") is None
        assert storage.modified("a") is storage.modified("ckpt/a") is None

    def test_a_listing_is_sorted_and_one_level_deep(self, storage: Storage) -> None:
        """Without what lies deeper, and without names of the storage's own."""
        for name in ("b", "c/y", "c/x", "a", "ca/z"):
            storage.put(name, b"", exclusive=True)
        with storage.upload("c/w"):
            assert storage.list() == ["a", "b", "c", "ca"]
            assert storage.list("c") == ["x", "y"]
        assert storage.list("a") == []

    def test_a_directory_is_listed_while_something_is_only_being_uploaded_there(
        self, storage: Storage, other: Storage
    ) -> None:
        """Retention finds what a dead writer left, also if nothing else of its ckpt was ever written."""
        storage.put("record", b"", exclusive=True)
        with storage.upload("ckpt/part"), storage.upload("other"):
            assert other.list() == ["ckpt", "record"]
            assert other.list("ckpt") == []

    def test_a_directory_has_no_size(self, storage: Storage) -> None:
        """Nor has what would lie below a file."""
        storage.put("ckpt/part", b"abc", exclusive=True)
        assert storage.size("ckpt/part") == 3
        assert storage.size("ckpt") is storage.size("ckpt/part2") is None

    def test_times_are_those_of_the_storages_clock(self, storage: Storage, other: Storage) -> None:
        """What was written later is not older, and nothing is newer than now."""
        storage.put("a", b"", exclusive=True)
        upload(storage, "b", b"")
        times = [storage.modified("a"), other.modified("b"), storage.now(), other.now()]
        found = [time for time in times if time is not None]
        assert found == sorted(found)
        assert len(found) == 4
        assert found[-1] - found[0] < 60
        assert storage.list() == ["a", "b"]
        assert storage.leftovers() == []

    def test_what_is_listed_can_be_relied_on(self, storage: Storage, other: Storage) -> None:
        """Whoever wrote or deleted it, of the job and of each directory."""
        storage.put("ckpt/a", b"", exclusive=True)
        storage.put("ckpt/b", b"", exclusive=True)
        storage.delete("ckpt/a")
        other.make_durable("ckpt")
        other.make_durable()
        assert other.list("ckpt") == ["b"]

    def test_a_directory_that_is_not_there_cannot_be_made_durable(self, storage: Storage, other: Storage) -> None:
        """Who relied on it hears that somebody has deleted it."""
        storage.put("ckpt/a", b"", exclusive=True)
        other.delete_all("ckpt")
        with pytest.raises(StorageNotFoundError):
            storage.make_durable("ckpt")

    def test_leftovers_have_a_time_and_can_be_removed(self, storage: Storage, other: Storage) -> None:
        """Of the job itself and of a directory; what has a name stays."""
        began = storage.now()
        storage.put("ckpt/a", b"", exclusive=True)
        with storage.upload("ckpt/part") as one, storage.upload("record") as two:
            one.write([memoryview(b"abc")])
            two.write([memoryview(b"abc")])
            left = [*other.leftovers("ckpt"), *other.leftovers()]
            assert len(left) == 2
            for leftover in left:
                time = other.modified(leftover)
                assert time is not None
                assert time >= began - 1
                other.delete_all(leftover)
            assert other.leftovers("ckpt") == other.leftovers() == []
            with pytest.raises(StorageError):
                one.finish()
        assert other.list() == ["ckpt"]
        assert other.list("ckpt") == ["a"]

    def test_a_check_leaves_nothing_behind(self, storage: Storage, other: Storage) -> None:
        """It may be made as often as anybody likes."""
        storage.check()
        other.check()
        assert storage.list() == storage.leftovers() == []

    def test_a_check_compares_what_comes_back(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """A probe that nobody reads would show little."""
        monkeypatch.setattr(type(storage), "get", lambda *_, **__: b"other")
        with pytest.raises(StorageError, match="gave back other bytes"):
            storage.check()


class Deleting(Contract):
    """delete and delete_all."""

    def test_what_is_not_there_can_be_deleted(self, storage: Storage) -> None:
        """Another process was quicker."""
        for name in ("a", "ckpt/a"):
            storage.delete(name)
            storage.delete_all(name)
        storage.delete_all("ckpt")

    def test_what_was_deleted_is_gone_for_everybody(self, storage: Storage, other: Storage) -> None:
        """What lies beside it stays."""
        storage.put("ckpt/a", b"", exclusive=True)
        storage.put("ckpt/b", b"", exclusive=True)
        storage.delete("ckpt/a")
        assert other.list("ckpt") == ["b"]
        assert other.size("ckpt/a") is None
        with pytest.raises(StorageNotFoundError):
            other.get("ckpt/a")

    def test_a_directory_goes_with_all_that_is_in_it(self, storage: Storage, other: Storage) -> None:
        """And no name that only begins like it does."""
        for name in ("ckpt/a", "ckpt/b", "ckpt1", "ckpt-1/a", "ckp/a"):
            storage.put(name, b"", exclusive=True)
        other.delete_all("ckpt")
        assert storage.list() == ["ckp", "ckpt-1", "ckpt1"]
        assert storage.list("ckpt") == storage.leftovers() == []
        storage.put("ckpt/a", b"again", exclusive=True)
        assert storage.list("ckpt") == ["a"]

    def test_a_single_file_goes_as_well(self, storage: Storage) -> None:
        """What lies beside it stays."""
        storage.put("a", b"", exclusive=True)
        storage.put("b", b"", exclusive=True)
        storage.delete_all("a")
        assert storage.list() == ["b"]


class Races(Contract):
    """Several processes at the same moment."""

    def test_an_exclusive_name_is_given_once(self, connect: Connect) -> None:
        """Of many who want it one gets it, all others are told so, and its bytes stay."""
        clients = [connect("job") for _ in range(8)]
        for turn in range(5):
            name = f"generations/{turn}"
            found = at_once(8, lambda i, name=name: clients[i].put(name, b"%d" % i, exclusive=True))  # type: ignore[misc]
            (winner,) = [i for i, error in enumerate(found) if error is None]
            assert [type(error) for error in found].count(StorageExistsError) == 7
            assert clients[0].get(name) == b"%d" % winner
        assert clients[0].leftovers("generations") == []

    def test_a_reader_finds_all_bytes_of_one_writer(self, connect: Connect) -> None:
        """Never a part of them, never none, however often they are replaced."""
        storage, other = connect("job"), connect("job")
        values = [b"%d" % i * 5000 * (i + 1) for i in range(4)]
        storage.put("record", values[0], exclusive=True)

        def act(i: int) -> Sequence[bytes]:
            if i:
                return [other.get("record") for _ in range(40)]
            for turn in range(40):
                storage.put("record", values[turn % 4], exclusive=False)
            return []

        for seen in at_once(3, act):
            assert not isinstance(seen, StorageError), seen
            assert set(seen) <= set(values)

    def test_processes_check_at_the_same_time(self, connect: Connect) -> None:
        """None of them takes another one's probe for its own."""
        clients = [connect("job") for _ in range(8)]
        assert at_once(8, lambda i: clients[i].check()) == [None] * 8
        assert clients[0].list() == clients[0].leftovers() == []

    def test_directories_are_made_by_whoever_is_first(self, connect: Connect) -> None:
        """Nobody fails because another one was quicker."""
        clients = [connect("job") for _ in range(8)]
        found = at_once(8, lambda i: clients[i].put(f"ckpt/{i}", b"", exclusive=True))
        assert found == [None] * 8
        assert clients[0].list("ckpt") == [str(i) for i in range(8)]

    def test_one_deletes_what_another_one_deletes(self, connect: Connect) -> None:
        """Both are done, and nothing is left."""
        clients = [connect("job") for _ in range(4)]
        for i in range(10):
            clients[0].put(f"ckpt/{i}", b"", exclusive=True)
        assert at_once(4, lambda i: clients[i].delete_all("ckpt")) == [None] * 4
        assert clients[0].list() == clients[0].leftovers() == []
