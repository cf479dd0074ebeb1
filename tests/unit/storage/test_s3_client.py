"""Where S3 is, found as the AWS tools find it."""

from __future__ import annotations

from pathlib import Path

import botocore.session
import pytest

from migrator.storage.s3_client import configured_endpoint

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
    assert (configured_endpoint() or "https://s3.amazonaws.com") == said
