"""Every format that was ever written is read from S3 as from a directory: what lies there was copied as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrator.ckpt.names import MANIFEST
from migrator.storage.object_storage import ObjectStorage
from migrator.testing.s3_server import S3Server
from tests.jobs.test_golden_ckpts import JOBS, SCRIPT, assert_goes_on
from tests.object_stores.conftest import BUCKET, CLIENTS, without_obstore
from tests.support.harness import Job
from tests.unit.ckpt.test_older_torch import GOLDEN, assert_gone_on_with
from tests.unit.state.test_adapters import Volume


def put(server: S3Server, directory: Path, prefix: str) -> None:
    """All files of a directory as objects, as any tool would copy them."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            assert server.request("PUT", f"/{BUCKET}/{prefix}/{name}", body=path.read_bytes()).status == 200


@pytest.mark.long
@pytest.mark.parametrize("golden", JOBS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_job_goes_on_with_what_was_copied_into_the_bucket(
    stored: Job, server: S3Server, golden: Path, client: str
) -> None:
    """Every value is what it was, and the rest is trained as it would have been."""
    put(server, golden / "default", f"{stored.url.partition(BUCKET)[2].strip('/')}/default")
    script, line = SCRIPT.read_text(), "from __future__ import annotations\n"
    assert line in script
    stored.write(script if client == "obstore" else without_obstore(script.replace(line, "")))

    assert_goes_on(stored, golden)


@pytest.mark.long
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_ckpt_of_an_older_torch_is_loaded_from_the_bucket(
    server: S3Server, url: str, golden: Path, client: str, tmp_path: Path
) -> None:
    """Its manifest has the first format."""
    (path,) = golden.glob("0*")
    assert (path / MANIFEST).exists()
    put(server, path, f"{url.partition(BUCKET)[2].strip('/')}/default/{path.name}")
    volume = Volume(tmp_path)
    volume.storage = ObjectStorage(CLIENTS[client](BUCKET), url.partition(f"{BUCKET}/")[2], "default")

    assert_gone_on_with(volume, golden)
