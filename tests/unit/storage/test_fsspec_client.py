"""What only the client of fsspec's filesystems does: markers, deadlines, errors of any library, no writer's name."""

from __future__ import annotations

import errno
import gc
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from migrator import roots
from migrator.ckpt import generations
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import ckpt_name, manifest_name
from migrator.errors import (
    StorageAccessError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.save.commit import commit
from migrator.storage import fsspec_client
from migrator.storage.fsspec_client import FsspecClient, as_storage_error, marker_of
from migrator.storage.locate import storage_at
from migrator.storage.object_client import ConditionRefusedError, PendingUpload, scrubbed
from migrator.storage.object_storage import Conditions, ObjectStorage
from tests.unit.storage.contract import at_once

SECRET = "c2VjcmV0LXZhbHVl"


@pytest.fixture
def root() -> str:
    return f"{uuid.uuid4().hex[:12]}/jobs"


@pytest.fixture
def client(root: str) -> FsspecClient:
    return FsspecClient("memory", root, aside="job/")


@pytest.fixture
def storage(client: FsspecClient) -> ObjectStorage:
    return ObjectStorage(client, "", "job")


def names(root: str) -> list[str]:
    """All objects below a root, hidden ones too."""
    return sorted(name.removeprefix(f"/{root}/") for name in MemoryFileSystem.store if name.startswith(f"/{root}/"))


# Which storage a URL means.


def test_a_url_leads_to_the_filesystem(root: str) -> None:
    """With the job below the prefix, and the clock's objects below the job."""
    storage = storage_at(f"memory://{root}", "job", grace_s=30.0)
    storage.check()
    storage.put("record", b"1", exclusive=True)
    assert names(root) == ["job/record"]
    assert storage.where("record") == f"memory://{root}/job/record"
    assert storage.root == f"memory://{root}"
    assert storage.traits() == {"client": "fsspec", "conditional_writes": "honoured"}


# Writing once.


class Slow(MemoryFileSystem):
    """It looks, as the default of fsspec does, and writes a moment later."""

    protocol = "slowmemory"

    def exists(self, path: str, **more: Any) -> bool:
        found: bool = super().exists(path, **more)
        time.sleep(0.02)
        return found


@pytest.mark.parametrize("creates", [True, False])
def test_a_filesystem_that_looks_and_then_writes_gives_a_name_once(
    creates: bool, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory by a lock, elsewhere by claims: a probe alone would take a look for a condition."""
    kind = replace(fsspec_client._KINDS["memory"], module=__name__, type="Slow", creates=creates)
    monkeypatch.setitem(fsspec_client._KINDS, "memory", kind)
    storages = [ObjectStorage(FsspecClient("memory", root), "", "job") for _ in range(6)]

    ended = at_once(6, lambda i: storages[i].put("generations/1", b"%d" % i, exclusive=True))

    assert {storage.conditions for storage in storages} == {Conditions.HONOURED if creates else Conditions.REFUSED}
    assert ended.count(None) <= 1
    assert all(end is None or isinstance(end, StorageExistsError) for end in ended), ended
    assert names(root) == ["job/generations/1"] * ended.count(None)


def test_only_a_filesystem_whose_source_was_read_is_taken() -> None:
    """The settings refuse the others by name; here nothing is guessed either."""
    assert set(fsspec_client._KINDS) == {"gs", "gcs", "abfs", "az", "memory", "s3"}
    with pytest.raises(KeyError):
        FsspecClient("ftp", "host/a")


@pytest.mark.parametrize("error", [NotImplementedError(), TypeError("unexpected keyword 'mode'"), ValueError("mode")])
def test_a_version_that_does_not_know_the_mode_refuses_the_condition(
    client: FsspecClient, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then claims are used; the same error of a write without a condition is one of the store."""

    def pipe_file(self: Any, path: str, value: bytes, **mode: str) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(ConditionRefusedError):
        client.put("job/a", b"1", absent=True)
    with pytest.raises(StorageTransientError):
        client.put("job/a", b"1")


class Repeating(FsspecClient):
    """A library that repeats the first conditional write of a name that ends so, as one whose answer was lost."""

    repeats: tuple[str, ...] = ("",)

    def _pipe(self, key: str, data: bytes, **mode: str) -> None:
        super()._pipe(key, data, **mode)
        if mode and self.repeats and key.endswith(self.repeats[-1]):
            self.repeats = self.repeats[:-1]
            super()._pipe(key, data, **mode)


def test_a_probe_that_a_library_repeats_finds_out_the_same(root: str) -> None:
    """The condition is honoured: the repeated write met the first one."""
    storage = ObjectStorage(Repeating("memory", root), "", "job")
    storage.check()
    assert storage.conditions is Conditions.HONOURED
    assert names(root) == []


def test_a_claim_that_a_library_repeats_costs_a_number_and_nothing_else(root: str) -> None:
    """No writer's name is kept: the life meets its own record and takes the next number, which continues it."""
    storage = ObjectStorage(Repeating("memory", root), "", "job")
    storage.conditions = Conditions.HONOURED

    claimed = generations.claim(storage, fresh=False, about={"script": "a"})
    later = generations.claim(ObjectStorage(FsspecClient("memory", root), "", "job"), fresh=False, about={})

    assert (claimed.number, claimed.lineage) == (2, (2, 1))
    assert (later.number, later.lineage) == (3, (3, 2, 1))


def test_a_commit_that_a_library_repeats_is_this_commit(root: str) -> None:
    """The manifest met is compared: its bytes are ours, so nobody else has committed."""
    storage = ObjectStorage(Repeating("memory", root), "", "job")
    storage.conditions = Conditions.HONOURED
    manifest = Manifest(1, 5, "job", 1, (), {})
    assert commit(storage, manifest) is None
    assert storage.list(ckpt_name(1, 5)) == ["manifest.json"]
    assert storage.get(manifest_name(ckpt_name(1, 5))) == manifest.to_bytes()


# Uploads.


def test_an_upload_has_a_marker_from_its_begin_to_its_end(storage: ObjectStorage, root: str) -> None:
    """Beside the name, hidden in every listing, and found at any depth."""
    with storage.upload("ckpt/part") as file:
        (marker,) = names(root)
        assert marker.startswith("job/ckpt/.part.")
        assert marker.endswith(".uploading")
        (pending,) = storage.client.uploads("job/")
        assert pending.key == "job/ckpt/part"
        assert marker_of(pending) == marker
        assert storage.client.uploads("job/ckpt/pa") == [pending]
        assert storage.client.uploads("job/ckpt/b") == storage.client.uploads("other/") == []
        assert storage.client.list("job/ckpt/").objects == {}
        file.finish()
    assert names(root) == ["job/ckpt/part"]


def test_a_sweep_between_the_looks_of_finish_takes_the_object_as_well(storage: ObjectStorage, root: str) -> None:
    """It has listed the directory before the object had its name."""
    client = storage.client
    assert isinstance(client, FsspecClient)
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(b"abc")])
        pipe = client._pipe

        def swept(key: str, data: bytes, **mode: str) -> None:
            storage.delete_all("ckpt")
            pipe(key, data, **mode)

        client._pipe = swept  # type: ignore[method-assign]
        with pytest.raises(StorageNotFoundError, match="was aborted"):
            file.finish()
    assert names(root) == []


def test_an_upload_that_was_aborted_sends_nothing_more(storage: ObjectStorage, root: str) -> None:
    """The marker is looked for before the object gets its name too: what has the name keeps it."""
    storage.put("ckpt/part", b"old", exclusive=True)
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(b"abc")])
        (pending,) = storage.client.uploads("job/")
        storage.client.abort(pending)
        with pytest.raises(StorageNotFoundError, match="was aborted"):
            file.finish()
    assert storage.get("ckpt/part") == b"old"


def test_an_upload_whose_second_look_fails_leaves_nothing(storage: ObjectStorage, root: str) -> None:
    """Nobody knows whether it was aborted, and its writer hears that it failed."""
    client = storage.client
    assert isinstance(client, FsspecClient)
    looks, head = iter([True]), client.head

    def once(key: str) -> Any:
        if next(looks, False):
            return head(key)
        raise StorageTransientError("no answer")

    with storage.upload("part") as file:
        client.head = once  # type: ignore[method-assign]
        with pytest.raises(StorageTransientError, match="no answer"):
            file.finish()
    assert names(root) == []


class Buffered(AbstractBufferedFile):
    """A file as remote filesystems have them: `close` gives it its name."""

    sent: list[int]

    def _initiate_upload(self) -> None:
        self.sent = []

    def _upload_chunk(self, final: bool = False) -> None:
        self.sent.append(self.buffer.tell())
        if final:
            MemoryFileSystem.pipe_file(self.fs, self.path, b"%d" % len(self.sent))


class Remote(MemoryFileSystem):
    protocol = "remotememory"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **more: Any) -> Any:
        if "data" in more:
            return super()._open(path, mode, block_size, **more)
        return Buffered(self, path, mode, block_size=block_size)


@pytest.fixture
def remote(root: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    kind = replace(fsspec_client._KINDS["memory"], module=__name__, type="Remote", streams=True)
    monkeypatch.setitem(fsspec_client._KINDS, "memory", kind)
    monkeypatch.setattr(fsspec_client, "PART", 1000)
    return ObjectStorage(FsspecClient("memory", root), "", "job")


def test_a_large_buffer_goes_up_in_parts(remote: ObjectStorage, root: str) -> None:
    """Not all of it at once: it may be larger than what is left of the memory."""
    with remote.upload("part") as file:
        file.write([memoryview(bytes(2500)), memoryview(bytes(700))])
        opened: Buffered = file._file  # type: ignore[attr-defined]
        assert opened.sent == [1000, 1000, 1000]
        file.finish()
    assert opened.sent == [1000, 1000, 1000, 200]
    assert remote.get("part") == b"4"
    assert names(root) == ["job/part"]


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_upload_that_is_given_up_or_forgotten_never_gets_its_name(
    remote: ObjectStorage, root: str, is_closed: bool
) -> None:
    """fsspec finishes a file that is collected as garbage; a part that ends early would stand there."""
    file = remote.upload("part")
    file.write([memoryview(bytes(1500))])
    if is_closed:
        file.close()
    del file
    gc.collect()
    assert "job/part" not in names(root)
    assert len(names(root)) == (0 if is_closed else 1)


def test_an_upload_whose_file_cannot_be_opened_leaves_no_marker(
    remote: ObjectStorage, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would abort it before the next life."""

    opened = Remote._open

    def no(self: Any, path: str, mode: str = "rb", **more: Any) -> Any:
        if "data" not in more:
            raise PermissionError("403")
        return opened(self, path, mode, **more)

    monkeypatch.setattr(Remote, "_open", no)
    with pytest.raises(StorageAccessError):
        remote.upload("part")
    assert names(root) == []


# Time.


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The filesystem does not answer `info` before this is set."""
    answers = threading.Event()
    info = MemoryFileSystem.info

    def wait(self: Any, path: str, **more: Any) -> Any:
        assert answers.wait(20)
        return info(self, path, **more)

    monkeypatch.setattr(MemoryFileSystem, "info", wait)
    yield answers
    answers.set()


def test_a_call_without_an_answer_is_given_up(root: str, stuck: threading.Event) -> None:
    """Earlier in a pod that must leave; the error says how long it waited."""
    client = FsspecClient("memory", root, grace_s=0.0)
    fsspec_client_limits = (client._limit_s, client._hurried_s)
    assert fsspec_client_limits == (fsspec_client.CALL_S, fsspec_client._HURRIED_S)
    client._hurried_s = 0.2
    client.hurry()
    began = time.monotonic()
    with pytest.raises(StorageTransientError, match=r"no answer within 0\.2 s"):
        client.head("job/a")
    assert time.monotonic() - began < 5
    client.hurry(False)
    assert client._limit_s == fsspec_client.CALL_S
    stuck.set()
    assert client.head("job/a") is None


@pytest.mark.parametrize(("grace_s", "limit_s"), [(1.0, 3.0), (30.0, 10.0), (600.0, 60.0)])
def test_the_limit_of_a_pod_that_must_leave_follows_its_grace(root: str, grace_s: float, limit_s: float) -> None:
    """A third of it: the call can be made again."""
    client = FsspecClient("memory", root, grace_s=grace_s)
    client.hurry()
    assert client._limit_s == pytest.approx(limit_s)


def test_threads_wait_for_their_own_answers(client: FsspecClient) -> None:
    """Calls go on side by side."""
    meet = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda i: client.call("meet", "", lambda: (meet.wait(10), i)[1]), range(4))
        assert list(found) == [0, 1, 2, 3]


def test_the_clock_leaves_nothing(client: FsspecClient, root: str) -> None:
    """Its object is below the job, where a dead process's is swept, and gone, also if its time could not be read."""
    put, made = client.put, []
    client.put = lambda key, data, **more: (made.append(key), put(key, data, **more))[1]  # type: ignore[method-assign]
    now = client.now()
    assert abs(now - time.time()) < 60
    assert [key.startswith("job/.probe.") for key in made] == [True]
    client.head = lambda key: (_ for _ in ()).throw(StorageTransientError("no"))  # type: ignore[method-assign,assignment]
    with pytest.raises(StorageTransientError):
        client.now()
    assert names(root) == []


# Reading.


def test_no_more_is_read_than_the_limit(client: FsspecClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is larger; what is smaller is read without a range, which an empty object does not have."""
    asked = []
    cat = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, **part: Any) -> Any:
        asked.append(part)
        return cat(self, path, **part)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    client.put("job/a", b"12345")
    client.put("job/b", b"")
    assert client.get("job/a", limit=4) == b"1234"
    assert client.get("job/a", limit=5) == b"12345"
    assert client.get("job/b", limit=5) == b""
    assert asked == [{"start": 0, "end": 4}, {}, {}]


# Errors.


class StatusError(Exception):
    def __init__(self, text: str = "no", **named: Any) -> None:
        super().__init__(text)
        self.__dict__.update(named)


class DefaultCredentialsError(Exception):
    """As google.auth names it."""


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("a"), StorageNotFoundError),
        (StatusError(status_code=404), StorageNotFoundError),
        (IsADirectoryError("a"), StorageNotFoundError),
        (FileExistsError("a"), StorageExistsError),
        (StatusError(code=412), StorageExistsError),
        (StatusError(response={"ResponseMetadata": {"HTTPStatusCode": 412}}), StorageExistsError),
        (caused(OSError(22, "a condition did not hold"), StatusError(code="412")), StorageExistsError),
        (PermissionError("a"), StorageAccessError),
        (StatusError(status_code=403), StorageAccessError),
        (StatusError(code="401"), StorageAccessError),
        (OSError("Forbidden: b/o/a\nno"), StorageAccessError),
        (caused(RuntimeError("Failed to upload block"), StatusError(status_code=403)), StorageAccessError),
        (DefaultCredentialsError("none were found"), StorageAccessError),
        (OSError(errno.ENOSPC, "full"), StorageFullError),
        (MemoryError(), StorageFullError),
        (StatusError(status=507), StorageFullError),
        (StatusError(status=503), StorageTransientError),
        (ConnectionResetError("a"), StorageTransientError),
        (TimeoutError(), StorageTransientError),
        (KeyError("etag"), StorageTransientError),
        (AssertionError("Response looks like upload is over"), StorageTransientError),
    ],
)
def test_any_error_of_a_library_is_one_of_ours(
    client: FsspecClient, error: Exception, kind: type[StorageError]
) -> None:
    """By its type, its status, or those of the error behind it."""

    def fail() -> None:
        raise error

    with pytest.raises(StorageError, match=r"cannot try memory://.*/job/a: ") as failure:
        client.call("try", "job/a", fail)
    assert type(failure.value) is kind
    assert failure.value.__cause__ is None


def test_a_write_where_there_is_no_bucket_says_so(client: FsspecClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that a file is missing: no retry helps."""

    def pipe_file(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("bucket")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(StorageAccessError, match="Is the bucket there"):
        client.put("job/a", b"1")


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"{{'Authorization': 'Bearer {SECRET}'}}",
        f'{{"Authorization": "SharedKey account:{SECRET}"}}',
        f"Authorization=Basic {SECRET}",
        f"Bearer {SECRET} was refused",
        f"https://a.blob.core.windows.net/c/p?sv=2024&sig={SECRET}&se=1",
        f"AccountName=a;AccountKey={SECRET};EndpointSuffix=core.windows.net",
        f"BlobEndpoint=https://a;SharedAccessSignature=sv=1&sig={SECRET}",
        f"SharedAccessKey={SECRET}",
        f"sas_token='{SECRET}'",
        f"account_key: {SECRET}",
        f'{{"access_token": "{SECRET}", "expires_in": 3599}}',
        f"refresh_token={SECRET}&grant_type=refresh_token",
        f"id_token={SECRET}",
        f"client_secret={SECRET}&scope=a",
        f"client_assertion={SECRET}",
        f'{{"private_key": "-----BEGIN PRIVATE KEY-----\n{SECRET}\n{SECRET}\n-----END PRIVATE KEY-----\n"}}',
        f'{{"private_key_id": "{SECRET}"}}',
        f"https://storage.googleapis.com/b/o?X-Goog-Signature={SECRET}&X-Goog-Date=1",
        f"X-Goog-Credential={SECRET}",
        f"X-Amz-Security-Token={SECRET}",
        f"https://user:{SECRET}@host/a",
        f"<SecretAccessKey>{SECRET}</SecretAccessKey>",
        f"<Code>ExpiredToken</Code><Token-0>{SECRET}</Token-0>",
        f"x-amz-security-token:{SECRET}",
        f"Action=AssumeRoleWithWebIdentity&WebIdentityToken={SECRET}&Version=1",
    ],
)
def test_no_credential_is_in_an_error(client: FsspecClient, text: str) -> None:
    """Whatever the library says; the rest of the text stays."""
    assert SECRET not in scrubbed(text)
    assert "***" in scrubbed(text)
    error = as_storage_error(OSError(f"before {text} behind"), "try", "")
    assert SECRET not in str(error)
    assert "before" in str(error)


@pytest.mark.parametrize("text", ["no such bucket: signature of a design=a", "https://host/a@b", "tokens are missing"])
def test_what_is_no_credential_stays(text: str) -> None:
    """An error that says nothing helps nobody."""
    assert scrubbed(text) == text


def test_an_abort_of_what_is_over_is_fine(client: FsspecClient) -> None:
    """Another life has aborted it."""
    client.abort(PendingUpload("job/ckpt/part", "0123456789ab", 0.0))


def test_the_settings_let_through_what_the_client_knows() -> None:
    """S3 has clients of its own."""
    assert roots.STORES.keys() == fsspec_client._KINDS.keys() - {"s3"}
    assert {scheme: module for scheme, (module, _) in roots.STORES.items()} == {
        scheme: kind.module.partition(".")[0] for scheme, kind in fsspec_client._KINDS.items() if scheme != "s3"
    }
