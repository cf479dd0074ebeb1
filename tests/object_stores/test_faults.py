"""Faults between a job and a real S3 server: of the network, of a busy store, of keys. `test_rights.py` has rights."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

from migrator.ckpt.names import file_in, part_name
from migrator.ckpt.part_writer import write_part
from migrator.ckpt.tensor_file import read_part
from migrator.errors import StorageAccessError, StorageCredentialsError, StorageExistsError, StorageTransientError
from migrator.storage import obstore_client, s3_client
from migrator.storage.object_storage import ObjectStorage
from migrator.testing.s3_server import S3Server
from tests.object_stores.conftest import BUCKET, CLIENTS
from tests.support.halting_jobs import HALTING
from tests.support.harness import ROOT, Job
from tests.support.tcp_faults import FaultyProxy

PART = 5 << 20
"""What S3 takes as a part at least."""
SIZE = 3 * PART + 1000
CKPT = "000001-000000000005"
EVERYTHING = ROOT / "tests" / "support" / "scripts" / "everything.py"

Connect = Callable[[], ObjectStorage]


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    made = FaultyProxy(server.port)
    yield made
    made.close()


@pytest.fixture
def prefix(url: str, server: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """Below it a test's objects lie. This process finds the server by way of the proxy, and has little patience."""
    for name, value in server.env(endpoint=proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    for module in (s3_client, obstore_client):
        monkeypatch.setattr(module, "PART", PART)
    monkeypatch.setattr(s3_client, "READ_S", 3.0)
    return url.partition(f"{BUCKET}/")[2]


@pytest.fixture
def connect(prefix: str, client: str) -> Connect:
    """A new process's storage."""
    return lambda: ObjectStorage(CLIENTS[client](BUCKET), prefix, "job")


@pytest.fixture
def storage(connect: Connect) -> ObjectStorage:
    return connect()


def upload(storage: ObjectStorage, name: str, data: bytes) -> None:
    with storage.upload(name) as file:
        for at in range(0, len(data), 1 << 20):
            file.write([memoryview(data)[at : at + (1 << 20)]])
        file.finish()


def bytes_of(storage: ObjectStorage, name: str) -> bytes:
    size = storage.size(name)
    assert size is not None
    buffer = bytearray(size)
    with storage.open(name) as file:
        file.read([memoryview(buffer)], 0)
    return bytes(buffer)


@pytest.fixture(scope="module")
def data() -> bytes:
    return bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy())


# Uploads.


def test_a_reset_in_any_part_costs_that_part_only(storage: ObjectStorage, proxy: FaultyProxy, data: bytes) -> None:
    """It is sent again, and the object has every byte."""
    for number in range(4):
        proxy.reset_after(number * PART + 2000 if number else 100)
        upload(storage, f"ckpt/{number}", data)
        assert not proxy.is_armed
        assert bytes_of(storage, f"ckpt/{number}") == data
    assert storage.leftovers("ckpt") == []


def test_a_burst_of_503_is_waited_out(storage: ObjectStorage, proxy: FaultyProxy, data: bytes) -> None:
    """A store that is busy says so, and expects to be asked again."""
    proxy.answer_503(3)
    upload(storage, "ckpt/part", data)
    assert not proxy.is_armed
    proxy.answer_503(2)
    storage.put("record", b"{}", exclusive=True)
    assert bytes_of(storage, "ckpt/part") == data
    assert storage.get("record") == b"{}"


@pytest.mark.long
def test_a_slow_link_is_no_fault(storage: ObjectStorage, proxy: FaultyProxy, data: bytes) -> None:
    """Parts that arrive are not given up."""
    proxy.slow(8e6)
    upload(storage, "ckpt/part", data)
    proxy.heal()
    assert bytes_of(storage, "ckpt/part") == data


def test_a_link_that_is_just_fast_enough_is_used_to_the_end(
    proxy: FaultyProxy, prefix: str, client: str, data: bytes
) -> None:
    """A pod that must leave gives up a silent request early, but none that is on its way."""
    storage = ObjectStorage(CLIENTS[client](BUCKET, grace_s=6), prefix, "job")
    storage.hurry()
    proxy.slow(len(data) / 4.5)
    with storage.upload("ckpt/part", size=len(data)) as file:
        file.write([memoryview(data)], hold=True)
        file.finish()
    proxy.heal()
    assert bytes_of(storage, "ckpt/part") == data


@pytest.mark.long
def test_an_upload_that_may_have_been_too_slow_is_followed_by_a_careful_one(
    prefix: str, proxy: FaultyProxy, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part at a time arrives in the time in which all together do not."""
    monkeypatch.setattr(s3_client, "TRIES", 1)
    storage = ObjectStorage(obstore_client.ObstoreClient(BUCKET), prefix, "job")
    proxy.slow(4e6)
    with pytest.raises(StorageTransientError):
        upload(storage, "ckpt/part", data)
    for _ in range(2):
        upload(storage, "ckpt/part", data)
    proxy.heal()
    assert bytes_of(storage, "ckpt/part") == data


def test_a_link_that_is_cut_and_healed_costs_time_only(storage: ObjectStorage, proxy: FaultyProxy, data: bytes) -> None:
    """As long as the tries last."""
    healing = threading.Timer(0.7, proxy.heal)
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(data)[: PART + 10]])
        proxy.cut()
        healing.start()
        file.write([memoryview(data)[PART + 10 :]])
        file.finish()
    healing.join()
    assert bytes_of(storage, "ckpt/part") == data


@pytest.mark.long
def test_a_link_that_is_cut_for_good_is_given_up_in_time(
    storage: ObjectStorage, proxy: FaultyProxy, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there is intact, and what the upload left is swept."""
    storage.put("ckpt/old", b"old", exclusive=True)
    storage.hurry()
    start_s = time.monotonic()
    with pytest.raises(StorageTransientError), storage.upload("ckpt/part") as file:  # noqa: PT012
        file.write([memoryview(data)[: PART + 10]])
        proxy.cut()
        file.write([memoryview(data)[PART + 10 :]])
        file.finish()
    assert time.monotonic() - start_s < 25
    proxy.heal()
    assert storage.list("ckpt") == ["old"]
    assert storage.get("ckpt/old") == b"old"
    for leftover in storage.leftovers("ckpt"):
        storage.delete_all(leftover)
    assert storage.leftovers("ckpt") == []


@pytest.mark.long
def test_a_server_that_is_killed_and_started_again_costs_time_only(
    tmp_path: Path, client: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an upload, whose parts it has kept."""
    server = S3Server(tmp_path).start()
    try:
        server.make_bucket(BUCKET)
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        for module in (s3_client, obstore_client):
            monkeypatch.setattr(module, "PART", PART)
        monkeypatch.setattr(s3_client, "TRIES", 10)
        storage = ObjectStorage(CLIENTS[client](BUCKET), "", "job")
        with storage.upload("ckpt/part") as file, ThreadPoolExecutor(1) as other:
            file.write([memoryview(data)[: 2 * PART]])
            server.kill()

            def go_on() -> None:
                file.write([memoryview(data)[2 * PART :]])
                file.finish()

            done = other.submit(go_on)
            server.start()  # in this thread: it ends with the one that started it
            done.result(100)
        assert bytes_of(storage, "ckpt/part") == data
    finally:
        server.close()


# Answers that are lost.


def test_an_exclusive_put_whose_answer_is_lost_has_acted_once(storage: ObjectStorage, proxy: FaultyProxy) -> None:
    """It is read back, and counts as done; for everybody else the name is taken."""
    storage.put("other", b"", exclusive=True)
    proxy.drop_next_answer(r"PUT /.*/record")
    storage.put("record", b"mine", exclusive=True)
    assert not proxy.is_armed
    with pytest.raises(StorageExistsError):
        storage.put("record", b"mine", exclusive=True)
    assert storage.get("record") == b"mine"


def test_an_upload_whose_last_answer_is_lost_is_finished(
    storage: ObjectStorage, proxy: FaultyProxy, data: bytes
) -> None:
    """Repeated, the request finds no upload any more."""
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(data)])
        proxy.drop_next_answer(r"POST /.*uploadId")
        file.finish()
    assert not proxy.is_armed
    assert bytes_of(storage, "ckpt/part") == data
    assert storage.leftovers("ckpt") == []


# Reading.


@pytest.mark.parametrize("fault", ["truncated", "corrupted"])
def test_a_bad_answer_does_not_make_a_ckpt_bad(
    storage: ObjectStorage, proxy: FaultyProxy, fault: str, data: bytes
) -> None:
    """What the network spoilt is read once more before the ckpt is given up."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    record = write_part(storage, file_in(CKPT, part_name(0, 1)), {"w": tensor})
    if fault == "truncated":
        proxy.truncate_next_get(100_000)
    else:
        proxy.corrupt_next_get(1 << 20)
    found = read_part(storage, CKPT, record)
    assert not proxy.is_armed
    assert torch.equal(found["w"], tensor)


# Keys and names.


def test_a_key_that_the_store_does_not_know_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the secret."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDUNKNOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "averysecretsecret")
    with pytest.raises(StorageCredentialsError) as refusal:
        connect().check()
    assert "InvalidAccessKeyId" in str(refusal.value) or "access key" in str(refusal.value).lower()
    assert "averysecretsecret" not in str(refusal.value)


def test_a_wrong_secret_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is said, its value is not."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "averysecretsecret")
    with pytest.raises(StorageAccessError, match="AWS_SECRET_ACCESS_KEY") as refusal:
        connect().check()
    assert "averysecretsecret" not in str(refusal.value)


def test_a_bucket_that_is_not_there_is_named(client: str, url: str) -> None:
    """With the setting that names it."""
    with pytest.raises(StorageAccessError, match=r"no-such-bucket.*MIGRATOR_CKPT"):
        ObjectStorage(CLIENTS[client]("no-such-bucket"), "", "job").check()


# Time.


@pytest.mark.long
@pytest.mark.parametrize("is_hurried", [False, True])
def test_a_silent_request_is_made_so_often(
    connect: Connect, proxy: FaultyProxy, is_hurried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time on a new connection; less often once the pod must leave."""
    monkeypatch.setattr(s3_client, "READ_S", 1.0)
    storage = connect()
    if is_hurried:
        storage.hurry()
    before = proxy.connections
    proxy.stall()
    with pytest.raises(StorageTransientError):
        storage.size("record")
    proxy.heal()
    assert proxy.connections - before == (s3_client.HURRIED_TRIES if is_hurried else s3_client.TRIES)


# Clocks.


@pytest.mark.parametrize("by_s", [600.0, -600.0])
def test_a_clock_that_differs_from_the_stores_is_said(connect: Connect, proxy: FaultyProxy, by_s: float) -> None:
    """By the date of an answer."""
    proxy.move_clock(by_s)
    storage = connect()
    storage.check()
    (why,) = storage.weaknesses()
    assert re.search(r"differ by (59\d|60\d) s\. Set the node's clock \(NTP\)", why), why


def test_a_clock_that_is_too_far_off_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 refuses every request that was signed more than 15 minutes ago, or in the future."""

    def wrong(**how: bool) -> datetime:
        return datetime.now(timezone.utc).replace(tzinfo=None) - timedelta(minutes=20)

    monkeypatch.setattr("botocore.auth.get_current_datetime", wrong)
    with pytest.raises(StorageAccessError, match=r"request time.*set it \(NTP\)"):
        connect().check()


# Whole jobs.


@pytest.mark.long
def test_a_job_whose_clock_differs_says_so_once(stored: Job, server: S3Server, proxy: FaultyProxy) -> None:
    """And trains and saves."""
    proxy.move_clock(-300.0)
    stored.env |= server.env(endpoint=proxy.endpoint)
    life = stored.use(EVERYTHING).run(AT="0:5:drawn", HOW="sigterm")
    assert life.wait() == 143, life.text
    (said,) = life.events("storage_warning")
    assert "differ by" in said["why"]
    assert life.events("leaving")[0]["why"] == "saved"


@pytest.mark.long
@pytest.mark.parametrize("healed_s", [pytest.param(1.5, id="healed"), pytest.param(None, id="for good")])
def test_a_job_whose_store_is_cut_when_it_has_to_leave(
    stored: Job, server: S3Server, proxy: FaultyProxy, healed_s: float | None
) -> None:
    """Saved if the store comes back in time; else the deadline is kept, and the ckpt before is what is resumed."""
    stored.env |= server.env(endpoint=proxy.endpoint)
    stored.use(EVERYTHING)
    first = stored.run(AT="0:5:drawn", HOW="sigterm")
    assert first.wait() == 143, first.text
    before = first.events("leaving")[0]["ckpt"]
    assert before != "None", first.text

    life = stored.run(AT="1:5:drawn", HOW="sigterm", MIGRATOR_GRACE_S="12")
    life.wait_for("^moment 1:4:drawn")
    proxy.cut()
    if healed_s is not None:
        threading.Timer(healed_s, proxy.heal).start()
    assert life.wait(30) == 143, life.text
    (leaving,) = life.events("leaving")
    assert float(leaving["since_signal_s"]) < 13.5, life.text
    assert (leaving["ckpt"] != "None") == (healed_s is not None), life.text
    proxy.heal()

    last = stored.run()
    assert last.wait() == 0, last.text
    expected = leaving["ckpt"] if healed_s is not None else before
    assert last.events("loaded")[0]["ckpt"] == expected, last.text


def test_a_notice_ends_the_wait_of_an_upload_that_began_before_it(
    prefix: str, client: str, proxy: FaultyProxy, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the patience of the time before, which may be more than the grace. The last save must begin in time."""
    monkeypatch.setattr(s3_client, "READ_S", 60.0)
    storage = ObjectStorage(CLIENTS[client](BUCKET, grace_s=3), prefix, "job")
    with suppress(StorageTransientError), storage.upload("ckpt/part") as file:
        file.write([memoryview(data)])
        proxy.stall()
        storage.hurry()
        start_s = time.monotonic()
        raise StorageTransientError("the periodic save is given up for a newer step")
    assert time.monotonic() - start_s < 20, "a request that hangs has 60 s"
    proxy.heal()
    upload(storage, "ckpt/part", data)
    assert bytes_of(storage, "ckpt/part") == data


@pytest.mark.long
def test_a_save_that_hangs_until_the_deadline_is_told_of(stored: Job) -> None:
    """The pod ends in time with 143, and says that its last steps are not saved."""
    stored.use(HALTING)
    stored.env["MIGRATOR_EVERY"] = "off"
    life = stored.run(HALT="finish:1", HOW="hold", MIGRATOR_GRACE_S="3")
    life.wait_for("^step 3$")
    life.kill()
    life.wait_for("^halts finish:1$")
    assert life.wait(30) == 143, life.text
    (failed,) = life.events("save_failed")
    assert "no progress" in failed["why"]
    assert life.events("leaving") == []


def test_a_client_is_made_without_an_endpoint(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for AWS itself. No request is made."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    assert CLIENTS[client](BUCKET).where == f"s3://{BUCKET}/"


def test_a_store_that_cannot_be_reached_is_told_of_in_time(
    client: str, monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, connect: Connect
) -> None:
    """By the request that failed, and not by one that was to clean up behind it."""
    proxy.cut()
    start_s = time.monotonic()
    with pytest.raises(StorageTransientError, match="cannot write"):
        connect().check()
    assert time.monotonic() - start_s < 20
