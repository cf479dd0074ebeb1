"""What `ObjectStorage` makes of requests that fail, of stores without conditions, and of answers that are not true."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from migrator.errors import (
    StorageAccessError,
    StorageError,
    StorageExistsError,
    StorageForeignError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage import object_storage
from migrator.storage.memory import Bucket, MemoryClient
from migrator.storage.object_client import ConditionRefusedError, Found, Listing
from migrator.storage.object_storage import RANGE, Conditions, ObjectStorage
from tests.unit.storage.contract import at_once, upload, views

LOST = StorageTransientError("no answer came")


class Pauses:
    """Stands for the module `time` of `object_storage`: nobody waits, and what was to be waited is added up."""

    def __init__(self) -> None:
        self.made: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.made.append(seconds)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(object_storage, "time", pauses)
    return pauses


class Way(Enum):
    """What becomes of a PUT."""

    DONE = "done"
    LOST = "not done, and no answer"
    UNANSWERED = "done, and no answer"


class Client(MemoryClient):
    """Its PUTs go the given ways, then all are done."""

    def __init__(self, bucket: Bucket, *ways: Way) -> None:
        super().__init__(bucket)
        self.ways: Iterator[Way] = iter(ways)
        self.puts = 0

    def put(self, key: str, data: bytes, **condition: Any) -> None:
        self.puts += 1
        way = next(self.ways, Way.DONE)
        if way is not Way.LOST:
            super().put(key, data, **condition)
        if way is not Way.DONE:
            raise LOST


class Ignoring(Client):
    """A store that writes whatever the condition says."""

    def put(self, key: str, data: bytes, *, writer: str = "", **condition: Any) -> None:
        super().put(key, data, writer=writer)


class Refusing(Client):
    """A store that does not know conditions."""

    def put(self, key: str, data: bytes, *, writer: str = "", **condition: Any) -> None:
        if any(condition.values()):
            raise ConditionRefusedError("501 NotImplemented")
        super().put(key, data, writer=writer)


class Repeating(Client):
    """A library that repeats each PUT with a condition, as one whose answer was lost."""

    def put(self, key: str, data: bytes, **condition: Any) -> None:
        super().put(key, data, **condition)
        if condition.get("absent") or condition.get("etag"):
            super().put(key, data, **condition)


WITHOUT_CONDITIONS = pytest.mark.parametrize("client", [Ignoring, Refusing])


def of(client: MemoryClient, conditions: Conditions = Conditions.HONOURED) -> ObjectStorage:
    """Its storage, which knows already what the store does with conditions."""
    storage = ObjectStorage(client, "", "job")
    storage.conditions = conditions
    return storage


# A PUT that must act once, whose answer is lost.


def test_an_exclusive_put_whose_answer_was_lost_succeeds() -> None:
    """Made again it finds the name taken, by its own first try."""
    client = Client(Bucket(), Way.UNANSWERED)
    of(client).put("record", b"mine", exclusive=True)
    assert client.puts == 2
    assert of(client).get("record") == b"mine"


def test_an_exclusive_put_that_a_library_repeats_by_itself_succeeds() -> None:
    """The library's first try acted, its second met the name: that is all that we hear of."""
    client = Repeating(Bucket())
    of(client).put("record", b"mine", exclusive=True)
    assert of(client).get("record") == b"mine"


def test_a_library_that_repeats_requests_makes_nobody_believe_otherwise() -> None:
    """The store honours conditions, a change has been made, and a name that was given is given."""
    storage = ObjectStorage(Repeating(Bucket()), "", "job")
    storage.check()
    assert storage.conditions is Conditions.HONOURED
    storage.put("mark", b"beat 1", exclusive=True)
    storage.change("mark", b"beat 2")
    assert storage.get("mark") == b"beat 2"
    with pytest.raises(StorageExistsError):
        storage.put("mark", b"beat 3", exclusive=True)


def test_an_exclusive_put_that_was_lost_is_made_again(pauses: Pauses) -> None:
    """It did not act; each pause is twice as long."""
    client = Client(Bucket(), Way.LOST, Way.LOST)
    of(client).put("record", b"mine", exclusive=True)
    assert client.puts == 3
    assert of(client).get("record") == b"mine"
    assert pauses.made == pytest.approx([0.1, 0.2])


def test_an_exclusive_put_that_is_lost_each_time_fails() -> None:
    """After so many tries, and nothing is there."""
    client = Client(Bucket(), *[Way.LOST] * 10)
    with pytest.raises(StorageTransientError):
        of(client).put("record", b"mine", exclusive=True)
    assert client.puts == object_storage._TRIES
    assert of(client).list() == []


def test_a_put_that_met_the_name_fails_if_nobody_can_say_whose_it_is() -> None:
    """The answer is lost, then that of the HEAD too: it is an error that may pass, and not that the name is taken."""

    class Blind(Client):
        def head(self, key: str) -> Found | None:
            raise LOST

    with pytest.raises(StorageTransientError):
        of(Blind(Bucket(), Way.UNANSWERED)).put("record", b"mine", exclusive=True)


def test_a_name_that_was_taken_before_the_first_try_is_not_ours_even_with_equal_bytes() -> None:
    """Two writers of the same bytes: only one has given the name."""
    bucket = Bucket()
    of(Client(bucket)).put("record", b"same", exclusive=True)
    with pytest.raises(StorageExistsError, match="another writer"):
        of(Client(bucket)).put("record", b"same", exclusive=True)


@pytest.mark.parametrize("theirs", [b"theirs", b"mine"])
def test_a_name_that_another_writer_took_while_our_put_was_lost_is_theirs(theirs: bytes) -> None:
    """Their bytes stay, and we are told; also if they are equal to ours."""
    bucket = Bucket()

    class Second(Client):
        def put(self, key: str, data: bytes, **condition: Any) -> None:
            try:
                super().put(key, data, **condition)
            except StorageTransientError:
                MemoryClient(bucket).put(key, theirs, absent=True, writer="another")
                raise

    with pytest.raises(StorageExistsError):
        of(Second(bucket, Way.LOST)).put("record", b"mine", exclusive=True)
    assert of(Client(bucket)).get("record") == theirs


def test_what_no_repetition_helps_is_not_repeated() -> None:
    """A missing right."""

    class Forbidden(Client):
        def put(self, key: str, data: bytes, **condition: Any) -> None:
            self.puts += 1
            raise StorageAccessError("403")

    client = Forbidden(Bucket())
    with pytest.raises(StorageAccessError):
        of(client).put("record", b"mine", exclusive=True)
    assert client.puts == 1


def test_a_put_that_replaces_counts_if_its_bytes_are_there() -> None:
    """With a lost answer; and it fails if they are not."""
    client = Client(Bucket(), Way.UNANSWERED, Way.LOST)
    of(client).put("mark", b"1", exclusive=False)
    with pytest.raises(StorageTransientError):
        of(client).put("mark", b"2", exclusive=False)
    assert of(client).get("mark") == b"1"


def test_a_name_whose_check_fails_after_the_put_does_not_stay() -> None:
    """Somebody swept the directory between the first look and the PUT."""
    looks = iter([None, StorageNotFoundError("swept")])

    def check() -> None:
        error = next(looks)
        if error is not None:
            raise error

    client = Client(Bucket())
    with pytest.raises(StorageNotFoundError, match="swept"):
        of(client).put("ckpt/manifest", b"m", exclusive=True, check=check)
    assert client.puts == 1
    assert client.bucket.files == {}


@pytest.mark.parametrize("failures", [1, object_storage._TRIES - 1, 99])
def test_a_request_that_fails_after_the_put_does_not_take_the_name_away(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have seen it, and the deletion might act later, when a look has found it."""
    monkeypatch.setattr(object_storage, "_PAUSE_S", 0.0)
    looks = iter([None, *[StorageTransientError("503")] * failures, *[None] * 9])

    def check() -> None:
        error = next(looks)
        if error is not None:
            raise error

    client = Client(Bucket())
    if failures < object_storage._TRIES:
        of(client).put("ckpt/manifest", b"m", exclusive=True, check=check)
    else:
        with pytest.raises(StorageTransientError):
            of(client).put("ckpt/manifest", b"m", exclusive=True, check=check)
    assert of(client).get("ckpt/manifest") == b"m"


def test_a_refusal_without_a_winner_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amazon may refuse one of two that arrive together, and the other one may fail."""
    monkeypatch.setattr(object_storage, "_PAUSE_S", 0.0)

    class Conflicting(Client):
        def put(self, key: str, data: bytes, **how: Any) -> None:
            if self.puts == 0:
                self.puts = 1
                raise StorageExistsError("409 ConditionalRequestConflict")
            super().put(key, data, **how)

    client = Conflicting(Bucket())
    of(client).put("record", b"mine", exclusive=True)
    assert of(client).get("record") == b"mine"


@WITHOUT_CONDITIONS
def test_a_claim_that_cannot_be_withdrawn_takes_no_name_away(client: type[Client]) -> None:
    """The name was given; the claim is a leftover."""

    class Keeping(client):  # type: ignore[misc, valid-type]
        def delete(self, key: str) -> None:
            raise StorageTransientError("503")

    made = Keeping(Bucket())
    of(made, Conditions.IGNORED).put("record", b"mine", exclusive=True)
    assert of(made).get("record") == b"mine"


def test_a_store_that_lists_what_it_has_deleted_is_given_up() -> None:
    """It would be asked for ever."""

    class Undying(Client):
        def delete(self, key: str) -> None:
            """Said to be done."""

    client = Undying(Bucket())
    of(client).put("ckpt/part", b"1", exclusive=False)
    with pytest.raises(StorageTransientError, match="listed again and again"):
        of(client).delete_all("ckpt")


# Changing.


@pytest.mark.parametrize("theirs", [None, b"theirs"])
def test_a_change_brings_nothing_back_and_replaces_nothing_of_others(theirs: bytes | None) -> None:
    """Between the look and the PUT the object is deleted, or written by another process."""
    bucket = Bucket()
    other = MemoryClient(bucket)

    class Slow(Client):
        def put(self, key: str, data: bytes, **condition: Any) -> None:
            other.delete(key)
            if theirs is not None:
                other.put(key, theirs)
            super().put(key, data, **condition)

    other.put("job/mark", b"1")
    with pytest.raises(StorageNotFoundError if theirs is None else StorageTransientError):
        of(Slow(bucket)).change("mark", b"2")
    assert [file.data for file in bucket.files.values()] == ([] if theirs is None else [theirs])


# Stores without conditions.


@pytest.mark.parametrize(
    ("client", "expected"),
    [(Client, Conditions.HONOURED), (Ignoring, Conditions.IGNORED), (Refusing, Conditions.REFUSED)],
)
def test_a_check_finds_out_what_the_store_does_with_conditions(client: type[Client], expected: Conditions) -> None:
    """Also the first exclusive PUT does; neither leaves anything behind."""
    bucket = Bucket()
    checked, unchecked = (ObjectStorage(client(bucket), "", "job") for _ in range(2))
    checked.check()
    assert bucket.files == {}
    assert bucket.pending == {}
    unchecked.put("record", b"mine", exclusive=True)
    assert (checked.conditions, unchecked.conditions) == (expected, expected)
    assert [*bucket.files] == ["job/record"]


@WITHOUT_CONDITIONS
def test_of_eight_writers_at_most_one_gets_a_name_in_a_store_without_conditions(client: type[Client]) -> None:
    """The bytes are the winner's, and no claim is left."""
    for _ in range(20):
        bucket = Bucket()
        storages = [ObjectStorage(client(bucket), "", "job") for _ in range(8)]
        for storage in storages:
            storage.check()

        def put(i: int) -> int:
            storages[i].put("generations/1", b"%d" % i, exclusive=True)  # noqa: B023 - used up within the turn
            return i

        ended = at_once(8, put)
        won = [end for end in ended if isinstance(end, int)]
        assert len(won) <= 1
        assert all(isinstance(end, int | StorageExistsError) for end in ended)
        assert [(key, file.data) for key, file in bucket.files.items()] == [
            ("job/generations/1", b"%d" % i) for i in won
        ]


def test_a_claim_costs_three_requests_more() -> None:
    """PUT, LIST and DELETE of the claim."""
    made: list[str] = []

    class Counting(Client):
        def put(self, key: str, data: bytes, **condition: Any) -> None:
            made.append("PUT")
            super().put(key, data, **condition)

        def list(self, prefix: str) -> Listing:
            made.append("LIST")
            return super().list(prefix)

        def delete(self, key: str) -> None:
            made.append("DELETE")
            super().delete(key)

    of(Counting(Bucket())).put("record", b"mine", exclusive=True)
    assert made == ["PUT"]
    made.clear()
    of(Counting(Bucket()), Conditions.IGNORED).put("record", b"mine", exclusive=True)
    assert made == ["PUT", "LIST", "PUT", "DELETE"]


@WITHOUT_CONDITIONS
def test_a_name_that_is_there_is_not_written_over_without_conditions(client: type[Client]) -> None:
    """At once: whoever has it keeps it."""
    storage = ObjectStorage(client(Bucket()), "", "job")
    storage.put("record", b"first", exclusive=True)
    with pytest.raises(StorageExistsError):
        storage.put("record", b"second", exclusive=True)
    assert storage.get("record") == b"first"


@WITHOUT_CONDITIONS
def test_the_claim_of_a_dead_writer_blocks_nobody_for_longer_than_the_tries(
    client: type[Client], pauses: Pauses
) -> None:
    """It blocks one name, for a second or two; it is a leftover, and goes with the others."""
    bucket = Bucket()
    storage = of(client(bucket), Conditions.IGNORED)
    claim = ".1.0123456789ab.claim"
    storage.client.put(f"job/generations/{claim}", b"")

    with pytest.raises(StorageExistsError, match="claimed by another writer"):
        storage.put("generations/1", b"mine", exclusive=True)
    assert len(pauses.made) == object_storage._CLAIM_TRIES
    assert sum(pauses.made) < 2.0
    assert [*bucket.files] == [f"job/generations/{claim}"]

    storage.put("generations/2", b"mine", exclusive=True)
    assert storage.list("generations") == ["2"]
    assert storage.leftovers("generations") == [f"generations/{claim}"]
    assert storage.modified(f"generations/{claim}") is not None

    storage.delete_all(f"generations/{claim}")
    storage.put("generations/1", b"mine", exclusive=True)
    assert storage.leftovers("generations") == []


@WITHOUT_CONDITIONS
def test_a_writer_that_fails_behind_its_claim_withdraws_it(client: type[Client]) -> None:
    """The next one gets the name."""
    bucket = Bucket()
    storage = of(client(bucket, Way.DONE, Way.LOST), Conditions.IGNORED)
    with pytest.raises(StorageTransientError):
        storage.put("record", b"mine", exclusive=True)
    assert bucket.files == {}
    storage.put("record", b"mine", exclusive=True)


# Clocks.


@pytest.mark.parametrize(
    ("by_s", "is_said"), [(0.0, False), (55.0, False), (-55.0, False), (70.0, True), (-70.0, True)]
)
def test_a_clock_that_differs_from_the_stores_is_a_weakness(by_s: float, is_said: bool) -> None:
    """More than a minute is said, with both times and what to do. Nothing is refused."""
    storage = ObjectStorage(MemoryClient(Bucket(lambda: time.time() + by_s)), "", "job")
    storage.check()
    found = storage.weaknesses()
    assert bool(found) == is_said
    for text in found:
        assert len(re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)) == 2
        assert "NTP" in text
    storage.check()
    assert len(storage.weaknesses()) == len(found)


def test_a_store_that_does_not_tell_its_time_is_used() -> None:
    """No save needs it."""

    class Timeless(Client):
        def now(self) -> float:
            raise StorageAccessError("403")

    storage = ObjectStorage(Timeless(Bucket()), "", "job")
    storage.check()
    assert storage.weaknesses() == []


# Answers that are not true.


def test_a_store_whose_list_lags_behind_is_refused() -> None:
    """The next life would not find the newest ckpt there."""

    class Lagging(Client):
        def list(self, prefix: str) -> Listing:
            return Listing()

    client = Lagging(Bucket())
    with pytest.raises(StorageError, match="LIST does not show"):
        ObjectStorage(client, "", "job").check()
    assert client.bucket.files == {}


def test_an_upload_that_was_aborted_by_a_sweep_cannot_be_finished() -> None:
    """Neither in a directory nor alone, nor by the name that `leftovers` gives it."""
    client = Client(Bucket())
    storage = of(client)
    for target in ("ckpt", "ckpt/part", ""):
        with storage.upload("ckpt/part") as file:
            file.write(views(b"abc", 3))
            storage.delete_all(target or storage.leftovers("ckpt")[0])
            with pytest.raises(StorageError):
                file.finish()
        assert storage.list() == []
    assert client.bucket.files == {}


def test_a_sweep_aborts_nothing_of_a_directory_whose_name_only_begins_alike() -> None:
    """`ckpt` and `ckpt-2`."""
    storage = of(Client(Bucket()))
    with storage.upload("ckpt-2/part") as file:
        storage.delete_all("ckpt")
        file.write(views(b"abc", 3))
        file.finish()
    assert storage.list("ckpt-2") == ["part"]


def test_an_object_that_is_replaced_while_it_is_read_is_not_read_on() -> None:
    """Bytes of two versions are never put together."""
    storage = of(Client(Bucket()))
    upload(storage, "part", b"a" * 10)
    with storage.open("part") as file:
        file.read([memoryview(bytearray(5))], 0)
        upload(storage, "part", b"b" * 10)
        with pytest.raises(StorageForeignError):
            file.read([memoryview(bytearray(5))], 5)


@pytest.mark.parametrize("size", [10, 2 * RANGE + 1])
def test_fewer_bytes_than_were_asked_for_are_an_error(size: int) -> None:
    """In one range, and in one of several; and so is a range behind the end."""

    class Short(Client):
        def read(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> int:
            return super().read(key, buffer[: min(len(buffer), 9)], offset, etag=etag)

    storage = of(Short(Bucket()))
    upload(storage, "part", bytes(size))
    with storage.open("part") as file:
        with pytest.raises(StorageForeignError, match="9 bytes came from byte 0 on"):
            file.read([memoryview(bytearray(size))], 0)
        with pytest.raises(StorageForeignError, match=f"ends already at byte {size}"):
            file.read([memoryview(bytearray(2))], size - 1)


def test_an_object_that_goes_between_the_head_and_the_first_range_is_not_found() -> None:
    """The sweep of a later life."""
    storage = of(Client(Bucket()))
    upload(storage, "part", b"abc")
    with storage.open("part") as file:
        storage.delete("part")
        with pytest.raises(StorageNotFoundError):
            file.read([memoryview(bytearray(3))], 0)


def test_a_store_that_gives_no_etags_is_changed_without_a_condition() -> None:
    """Nothing else is left to do there."""

    class Bare(Client):
        def head(self, key: str) -> Found | None:
            found = super().head(key)
            return None if found is None else Found(found.size, found.modified_s)

    storage = of(Bare(Bucket()))
    storage.put("mark", b"1", exclusive=False)
    storage.change("mark", b"2")
    assert storage.get("mark") == b"2"


def test_what_a_writer_finishes_behind_the_listing_of_a_sweep_goes_as_well() -> None:
    """Else a manifest would stay whose parts the sweep has just deleted."""
    bucket = Bucket()
    writer = MemoryClient(bucket)

    class Late(MemoryClient):
        def delete(self, key: str) -> None:
            if key.endswith("/part"):
                writer.put("job/ckpt/manifest", b"{}")
            super().delete(key)

    writer.put("job/ckpt/part", b"1")
    of(Late(bucket)).delete_all("ckpt")
    assert bucket.files == {}


def test_the_error_of_a_check_is_not_hidden_by_a_deletion_that_fails() -> None:
    """It says why there is no commit; that a request failed behind it says nothing."""

    class Stuck(MemoryClient):
        def delete(self, key: str) -> None:
            raise LOST

    looks = iter([None, StorageNotFoundError("swept")])

    def check() -> None:
        if (error := next(looks)) is not None:
            raise error

    with pytest.raises(StorageNotFoundError, match="swept"):
        of(Stuck(Bucket())).put("ckpt/manifest", b"m", exclusive=True, check=check)
