"""Where credentials come from, and that they go nowhere: no log line, error, manifest or record has one."""

from __future__ import annotations

import base64
import os
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from migrator.testing.s3_server import FULL, S3Server, User, why_not
from tests.object_stores.conftest import BUCKET
from tests.object_stores.test_stops import SCRIPTS, use
from tests.support.harness import Job

USER = User("distinctive", FULL, key="AKIDISTINCTIVEKEY001", secret="distinctive/secret+0123456789")
TOKEN = "distinctive/session+token=="


@pytest.fixture(scope="module")
def distinct(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[S3Server]:
    """A server with a user whose credentials can be searched for."""
    if (missing := why_not()) is not None:
        pytest.skip(f"LOUD: {missing}")
    with S3Server(tmp_path_factory.mktemp("s3"), [USER]) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def searched(job: Job, distinct: S3Server, client: str, request: pytest.FixtureRequest) -> Job:
    """A job with these credentials. Its ckpts are below a prefix of its own."""
    use(job, client, (SCRIPTS / "everything.py").read_text())
    job.url = f"s3://{BUCKET}/{re.sub('[^a-z0-9]+', '-', request.node.name)}"
    job.env |= distinct.env()
    return job


def ways_to_write(secret: str) -> set[bytes]:
    """As it is, in a URL, and in base64."""
    return {
        secret.encode(),
        urllib.parse.quote(secret, safe="").encode(),
        base64.b64encode(secret.encode()).rstrip(b"="),
    }


def found(where: bytes, *secrets: str) -> list[str]:
    """Those of the secrets that stand there."""
    return [secret for secret in secrets if any(way in where for way in ways_to_write(secret))]


def objects(server: S3Server, prefix: str) -> dict[str, bytes]:
    """Bytes and headers of all objects."""
    listing = server.request("GET", f"/{BUCKET}", {"list-type": "2", "prefix": prefix}).body.decode()
    answers = {key: server.request("GET", f"/{BUCKET}/{key}") for key in re.findall("<Key>(.*?)</Key>", listing)}
    return {key: repr(answer.headers).encode() + answer.body for key, answer in answers.items()}


def test_a_job_writes_its_credentials_nowhere(searched: Job, distinct: S3Server) -> None:
    """Stopped and resumed: not into its output, not into a file beside it, and not into the bucket."""
    life = searched.run(AT="1:3:drawn", HOW="sigterm", MIGRATOR_TERMINATION_LOG=str(searched.directory / "message"))
    assert life.wait() == 143, life.text
    last = searched.run()
    assert last.wait() == 0, last.text
    assert last.events("loaded"), last.text

    there = objects(distinct, searched.url.partition(f"{BUCKET}/")[2])
    names = {name.rpartition("/")[2] for name in there}
    assert names >= {"manifest.json", "part-00000-of-00001.safetensors", "000001.json"}
    there |= {str(path): path.read_bytes() for path in searched.directory.rglob("*") if path.is_file()}
    assert {name: found(data, USER.key, USER.secret) for name, data in there.items()} == {name: [] for name in there}


@pytest.mark.parametrize("wrong", ["key", "secret", "token"])
def test_the_error_of_a_job_with_wrong_credentials_shows_none(searched: Job, distinct: S3Server, wrong: str) -> None:
    """Nor does its traceback, or a log line."""
    token = {"AWS_SESSION_TOKEN": TOKEN} if wrong == "token" else {}
    other = USER if wrong == "token" else replace(USER, **{wrong: f"WRONG{wrong.upper()}0123456789"})

    life = searched.run(env={**distinct.env(other), **token})

    assert life.wait() == 1, life.text
    assert re.search("Storage(Access|Credentials)Error: ", life.text)
    assert found(life.text.encode(), other.key, other.secret, TOKEN) == [], life.text


def test_credentials_of_a_profile_are_used(searched: Job, distinct: S3Server) -> None:
    """Without any in the environment, as the AWS tools do."""
    config = searched.directory / "aws-config"
    keys = f"aws_access_key_id = {USER.key}\naws_secret_access_key = {USER.secret}\n"
    config.write_text(f"[profile training]\nregion = us-east-1\n{keys}")
    searched.env = {name: value for name, value in searched.env.items() if not name.startswith("AWS_")}
    searched.env |= {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "training", "AWS_ENDPOINT_URL": distinct.endpoint}
    searched.env |= {"AWS_EC2_METADATA_DISABLED": "true"}
    assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & os.environ.keys()

    life = searched.run(AT="0:5:drawn", HOW="sigterm")

    assert life.wait() == 143, life.text
    assert life.events("committed"), life.text
