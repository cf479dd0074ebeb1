"""Temporary credentials: renewed, or revoked, while an upload is under way."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from migrator.errors import StorageAccessError, StorageCredentialsError
from migrator.storage import obstore_client, s3_client
from migrator.storage.object_storage import ObjectStorage
from migrator.storage.s3_client import S3Client
from migrator.testing.s3_server import FULL, S3Server, User, why_not
from tests.object_stores.conftest import BUCKET, CLIENTS
from tests.support.bucket import Bucket
from tests.support.halting_jobs import HALTING, ends
from tests.support.harness import Job

PART = 5 << 20
Give = Callable[[User], None]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[S3Server]:
    """A server whose users change. The first one is never changed."""
    if (missing := why_not()) is not None:
        pytest.skip(f"LOUD: {missing}")
    made = S3Server(tmp_path_factory.mktemp("s3"), [User("full", FULL), User("job", FULL)]).start()
    made.make_bucket(BUCKET)
    yield made
    made.close()


@pytest.fixture
def env(tmp_path: Path, own: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A profile whose program gives credentials for 5 minutes. Below 10 botocore asks it again for every request."""
    config = tmp_path / "aws-config"
    config.write_text(f"[default]\ncredential_process = cat {tmp_path / 'given.json'}\n")
    found = {name: value for name, value in own.env().items() if "KEY" not in name}
    found |= {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def give(tmp_path: Path) -> Give:
    """What the program gives from now on."""

    def given(user: User) -> None:
        until = datetime.now(timezone.utc) + timedelta(minutes=5)
        said = {"Version": 1, "AccessKeyId": user.key, "SecretAccessKey": user.secret, "Expiration": until.isoformat()}
        aside = tmp_path / "aside.json"
        aside.write_text(json.dumps(said))
        aside.rename(tmp_path / "given.json")

    return given


@pytest.fixture
def first(own: S3Server, env: dict[str, str], give: Give) -> User:
    """Whom the job is at its beginning."""
    user = User("job", FULL)
    own.change_users(own.users[0], user)
    give(user)
    return user


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And credentials that obstore asks for again each time: as if minutes had passed."""
    monkeypatch.setattr(s3_client, "PART", PART)
    monkeypatch.setattr(obstore_client, "PART", PART)
    monkeypatch.setattr(obstore_client, "_KEPT_S", 0.0)


@pytest.fixture
def storage(first: User, client: str, small_parts: None) -> ObjectStorage:
    return ObjectStorage(CLIENTS[client](BUCKET), uuid.uuid4().hex, "job")


@pytest.fixture
def stored(job: Job, env: dict[str, str], client: str) -> Job:
    """A job that halts itself at its requests."""
    job.url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    job.env |= {**env, "MIGRATOR_EVERY": "off", **({"NO_OBSTORE": "1"} if client == "s3fs" else {})}
    return job.use(HALTING)


def test_credentials_that_are_renewed_in_an_upload_cost_nothing(
    storage: ObjectStorage, own: S3Server, give: Give, first: User
) -> None:
    """The new ones are used from then on, by both libraries."""
    renewed = User("job", FULL)
    data = bytes(range(256)) * (3 * PART // 256)
    storage.put("record", b"before", exclusive=True)
    with storage.upload("ckpt/part") as file:
        # Before any part is on its way: one that was signed before would be refused.
        give(renewed)
        own.change_users(own.users[0], renewed)
        file.write([memoryview(data)])
        file.finish()
    assert storage.size("ckpt/part") == len(data)
    assert storage.get("record") == b"before"
    assert storage.leftovers("ckpt") == []


def test_credentials_that_are_revoked_in_an_upload_are_named(
    storage: ObjectStorage, own: S3Server, first: User
) -> None:
    """The error says what the store said and what to do, and no secret. What was there is as it was."""
    storage.put("ckpt/old", b"old", exclusive=True)
    data = bytes(3 * PART)
    with pytest.raises(StorageAccessError) as refusal, storage.upload("ckpt/part") as file:  # noqa: PT012
        file.write([memoryview(data)[: PART + 10]])
        own.change_users(own.users[0], User("job", FULL))
        file.write([memoryview(data)[PART + 10 :]])
        file.finish()
    said = str(refusal.value)
    assert "does not know this access key" in said
    assert first.secret not in said
    own.change_users(own.users[0], first)
    assert storage.list("ckpt") == ["old"]
    for leftover in storage.leftovers("ckpt"):
        storage.delete_all(leftover)
    assert storage.leftovers("ckpt") == []


def test_keys_that_are_replaced_in_their_file_are_found_again(
    own: S3Server, env: dict[str, str], client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries read the file once. Who is refused reads it again: a save that fails of old keys is tried again."""

    def written(user: User) -> None:
        own.change_users(own.users[0], user)
        text = f"[default]\naws_access_key_id = {user.key}\naws_secret_access_key = {user.secret}\n"
        (tmp_path / "keys").write_text(text)

    (tmp_path / "aws-config").write_text("[default]\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setattr(s3_client, "_RENEWED_S", 0.0)
    written(User("job", FULL))
    storage = ObjectStorage(CLIENTS[client](BUCKET), uuid.uuid4().hex, "job")
    storage.put("record", b"1", exclusive=True)

    def upload() -> None:
        with storage.upload("ckpt/part") as file:
            file.write([memoryview(b"part")])
            file.finish()

    def read() -> None:
        with storage.open("ckpt/part") as file:
            file.read([memoryview(bytearray(4))], 0)

    for act in (upload, read, lambda: storage.put("record", b"2", exclusive=False)):
        act()
        written(User("job", FULL))
        with suppress(StorageCredentialsError):  # some requests are made again by ourselves
            act()
        act()
    assert storage.get("record") == b"2"
    assert storage.get("ckpt/part") == b"part"


@pytest.mark.long
@pytest.mark.parametrize("is_given", [True, False], ids=["renewed", "gone"])
def test_a_job_whose_credentials_are_revoked_in_its_last_save(
    stored: Job, own: S3Server, give: Give, first: User, is_given: bool
) -> None:
    """The save is tried again until the deadline. It is made if there are new ones; else the log and the hook hear why,
    and the ckpt before is intact, and is resumed."""
    bucket = Bucket(ObjectStorage(S3Client(BUCKET), stored.url.rpartition("/")[2], "default"))
    before = stored.run()
    before.wait_for("^step 3$")
    ends(before)
    (expected,) = bucket.whole()

    life = stored.run(HALT="finish:1", HOW="hold", MIGRATOR_GRACE_S="10")
    life.wait_for("^step 6$")
    life.kill()
    life.wait_for("^halts finish:1$")
    renewed = User("job", FULL)
    own.change_users(own.users[0], renewed)
    (stored.directory / "go").touch()
    life.wait_for("save_retry .*does not know this access key")
    if is_given:
        give(renewed)
    assert life.wait() == 143, life.text
    (leaving,) = life.events("leaving")
    if is_given:
        expected = leaving["ckpt"]
        assert expected != "None", life.text
    else:
        assert leaving["ckpt"] == "None"
        said = next(line for line in life.text.splitlines() if " leaving " in line)
        assert "does not know this access key" in said
        assert f"the ckpt before is untouched: {expected}" in said
    assert first.secret not in life.text

    give(renewed)
    last = stored.run(STEPS="9", MIGRATOR_EVERY="1")
    assert last.wait() == 0, last.text
    assert last.events("loaded")[0]["ckpt"] == expected
