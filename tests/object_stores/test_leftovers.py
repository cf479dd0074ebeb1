"""Whatever an upload fails of, the next commits of the job leave nothing of it in the bucket."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrator.ckpt.names import GENERATIONS
from migrator.storage.object_storage import ObjectStorage
from migrator.storage.s3_client import S3Client
from migrator.testing.s3_server import S3Server
from tests.object_stores.conftest import BUCKET
from tests.support.bucket import Bucket
from tests.support.halting_jobs import HALTING, ends
from tests.support.harness import Job, Process, until
from tests.support.tcp_faults import FaultyProxy

MB = "20"
"""Two parts of an upload."""
FAULTS = ("reset", "503", "many 503", "cut and healed", "cut for good", "slow", "killed while leaving")


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    made = FaultyProxy(server.port)
    yield made
    made.close()


@pytest.fixture
def bucket(stored: Job, url: str, client: str) -> Bucket:
    """Of a job that halts itself at its requests. It is looked at without the proxy."""
    stored.use(HALTING)
    stored.env |= {"MIGRATOR_EVERY": "off"} | ({"NO_OBSTORE": "1"} if client == "s3fs" else {})
    return Bucket(ObjectStorage(S3Client(BUCKET), url.partition(f"{BUCKET}/")[2], "default"))


def strike(fault: str, life: Process, proxy: FaultyProxy, go: Path) -> None:
    """The upload of this life is pending, and nothing of it is sent yet."""
    if fault == "reset":
        proxy.reset_after(3 << 20)
    elif fault == "503":
        proxy.answer_503(2)
    elif fault == "many 503":
        proxy.answer_503(30)
    elif fault == "slow":
        proxy.slow(1e6)
    elif fault.startswith("cut"):
        proxy.cut()
    if fault == "cut and healed":
        threading.Timer(1.5, proxy.heal).start()
    if fault.startswith("killed"):
        life.kill(signal.SIGKILL)
    go.touch()


@pytest.mark.parametrize("fault", ["killed", *(pytest.param(fault, marks=pytest.mark.long) for fault in FAULTS)])
def test_a_failed_upload_leaves_nothing_behind_the_next_commits(
    stored: Job, bucket: Bucket, server: S3Server, proxy: FaultyProxy, fault: str
) -> None:
    """No pending upload, and no object that no manifest names. What was there before is loaded, or what is newer."""
    stored.env["MB"] = "0" if fault == "killed" else MB
    first = stored.run()
    first.wait_for("^step 2$")
    ends(first)
    before = bucket.whole()[0]

    grace = {"cut for good": "4", "slow": "4", "killed while leaving": "2"}.get(fault, "20")
    is_periodic = fault == "killed"
    env = {**server.env(endpoint=proxy.endpoint), "MIGRATOR_GRACE_S": grace, "HALT": "part:1", "HOW": "hold"}
    second = stored.run(env=env, MIGRATOR_EVERY="2" if is_periodic else "off")
    second.wait_for("^step ([6-9]|..)$")
    if not is_periodic:
        second.kill()
    second.wait_for("^halts part:1$")
    assert bucket.orphans() != []
    strike(fault, second, proxy, stored.directory / "go")
    # Where a save hangs, the process ends all the same.
    assert second.wait(float(grace) + 15) == (-signal.SIGKILL if fault.startswith("killed") else 143), second.text
    proxy.heal()
    saved = [event["ckpt"] for event in second.events("committed")]
    assert bool(saved) == (fault in ("reset", "503", "many 503", "cut and healed")), second.text
    assert bucket.whole()[0] == (saved[-1] if saved else before)
    goes_on(stored, bucket, (saved or [before])[-1])


def goes_on(job: Job, bucket: Bucket, expected: str) -> None:
    """The next life loads this ckpt and commits until nobody may still be saving."""
    life = job.run(MIGRATOR_EVERY="2")

    def nobody_saves() -> bool:
        marks = [name for name in bucket.storage.list(GENERATIONS) if name.endswith(".leaving")]
        return not marks and len(life.events("committed")) >= 2

    until(nobody_saves, "two commits, and the end of the marks", context=lambda: life.text)
    ends(life)
    assert [event["ckpt"] for event in life.events("loaded")] == [expected], life.text
    assert bucket.orphans() == []
    assert len(bucket.whole()) == 2


@pytest.mark.long
def test_a_server_that_is_killed_in_an_upload_leaves_nothing_behind_the_next_commits(
    job: Job, tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back with the upload that was pending."""
    server = S3Server(tmp_path).start()
    try:
        server.make_bucket(BUCKET)
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        job.url = f"s3://{BUCKET}/jobs"
        job.env |= {**server.env(), "MB": MB, "MIGRATOR_EVERY": "off"}
        job.env |= {"NO_OBSTORE": "1"} if client == "s3fs" else {}
        job.use(HALTING)
        bucket = Bucket(ObjectStorage(S3Client(BUCKET), "jobs", "default"))
        first = job.run(HALT="finish:1", HOW="hold")
        first.wait_for("^step 2$")
        first.kill()
        first.wait_for("^halts finish:1$")
        server.kill()
        (job.directory / "go").touch()
        first.wait_for("save_retry")
        server.start()
        assert first.wait() == 143, first.text
        (saved,) = (event["ckpt"] for event in first.events("committed"))
        goes_on(job, bucket, saved)
    finally:
        server.close()
