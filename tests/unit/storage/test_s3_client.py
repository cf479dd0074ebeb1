"""Where S3 is, found as the AWS tools find it."""

from __future__ import annotations

from pathlib import Path

import botocore.session
import pytest

from migrator.errors import SettingsError
from migrator.storage.obstore_client import ObstoreClient
from migrator.storage.s3_client import S3Client, configured

ONE, TWO, THREE, FOUR = (f"http://store-{i}.example" for i in range(4))
CONFIG = f"""
[default]
region = us-east-1

[profile plain]
endpoint_url = {ONE}

[profile services]
services = mine
endpoint_url = {ONE}

[profile others]
services = others
endpoint_url = {ONE}

[profile ignores]
endpoint_url = {ONE}
ignore_configured_endpoint_urls = true

[services mine]
s3 =
  endpoint_url = {TWO}

[services others]
dynamodb =
  endpoint_url = {TWO}
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-2"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-1"),
        ({"AWS_PROFILE": "far"}, "ap-south-1"),
        ({}, "us-east-1"),
    ],
)
def test_the_region_is_that_of_the_aws_tools_in_all_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    (tmp_path / "config").write_text("[profile far]\nregion = ap-south-1\n")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = ObstoreClient("bucket")
    assert client.region == expected
    assert client.uploading.config["region"] == expected
    assert all(one.client_kwargs["region_name"] == expected for one in client._filesystems.values())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example")
    plain = ObstoreClient("bucket")._plain
    assert plain is not None
    assert plain._client.meta.region_name == expected


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(SettingsError, match=r"nobody.*AWS_PROFILE"):
        S3Client("bucket")


@pytest.mark.parametrize("environment", [{}, {"AWS_ENDPOINT_URL": THREE}, {"AWS_ENDPOINT_URL_S3": FOUR}], ids=str)
@pytest.mark.parametrize("ignores", [None, "true", "false"])
@pytest.mark.parametrize("profile", [None, "plain", "services", "others", "ignores"])
def test_the_endpoint_is_that_of_botocore(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    ignores: str | None,
    profile: str | None,
) -> None:
    (tmp_path / "config").write_text(CONFIG)
    more = {} if profile is None else {"AWS_PROFILE": profile}
    more |= {} if ignores is None else {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": ignores}
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {"AWS_CONFIG_FILE": str(tmp_path / "config"), **keys, **more, **environment}.items():
        monkeypatch.setenv(name, value)
    said = botocore.session.get_session().create_client("s3", region_name="us-east-1").meta.endpoint_url
    assert (configured()[0] or "https://s3.amazonaws.com") == said
