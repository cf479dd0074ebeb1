"""A job needs the rights that docs/s3.md lists, all of them and no others. The list is read from the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt import generations
from migrator.storage.locate import storage_at
from migrator.testing.s3_server import FULL, S3Server, User, why_not
from tests.docs.test_pages import doc, logged
from tests.object_stores.test_stops import SAMPLES, SCRIPTS, apart, use
from tests.support import chance
from tests.support.harness import Job
from tests.support.job_history import assert_as_if_nothing_had_happened, assert_each_sample_once, stopped, unstopped
from tests.support.rank_history import assert_ranks_as_if_nothing_had_happened, stopped_ranks, unstopped_ranks

(POLICY,) = re.findall(r"^```json\n(.*?)^```$", doc("s3.md"), flags=re.M | re.S)
STATEMENTS: list[dict[str, Any]] = json.loads(POLICY)["Statement"]
RIGHTS = {action: statement["Resource"] for statement in STATEMENTS for action in statement["Action"]}
BUCKET, PREFIX = "my-bucket", "jobs"
"""Those of the page."""
EXACT = User("exact", policy=tuple(STATEMENTS))
LISTENS = 'from migrator import migrator\nmigrator.register("state", {"step": 0})\nmigrator.listening()\n'
WARNINGS = {name for name, levels in logged().items() if "info" not in levels}


def without(right: str) -> User:
    """SeaweedFS lets whoever may write abort an upload, without that right. It obeys a statement that denies it."""
    denied = {"Effect": "Deny", "Action": [right], "Resource": RIGHTS[right]}
    return User(f"without-{right.partition(':')[2]}", policy=(*STATEMENTS, denied))


LACKING = {right: without(right) for right in RIGHTS}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[S3Server]:
    """A server whose users have the rights of the page, or all of them but one."""
    if (missing := why_not()) is not None:
        pytest.skip(f"LOUD: {missing}")
    with S3Server(tmp_path_factory.mktemp("s3"), [User("full", FULL), EXACT, *LACKING.values()]) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def allowed(job: Job, guarded: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that has these rights only, and so has this process. Its name is its own."""
    for name, value in guarded.env(EXACT).items():
        monkeypatch.setenv(name, value)
    job.url = f"s3://{BUCKET}/{PREFIX}/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}"
    job.env |= guarded.env(EXACT)
    return job


def leave_as_a_dead_life(job: Job) -> str:
    """A part without a manifest, and a pending upload, of a save that was never committed."""
    storage = storage_at(job.url, "default", grace_s=30.0)
    generations.claim(storage, fresh=False, about={})
    with storage.upload("000001-000000000001/part-00000-of-00001.safetensors") as part:
        part.write([memoryview(bytes(100))])
        part.finish()
    # Left without `close`: a process that was killed ends no upload.
    storage.client.call("begin", "create_multipart_upload", f"{storage._prefix}000001-000000000002/part")  # type: ignore[attr-defined]
    assert len(storage.client.uploads(storage._prefix)) == 1  # type: ignore[attr-defined]
    return str(storage._prefix)  # type: ignore[attr-defined]


def behind_a_step(moments: list[str]) -> list[str]:
    """Where there is something to save."""
    return moments[moments.index("0:3:done") + 1 :]


def assert_swept_and_retired(guarded: S3Server, prefix: str) -> None:
    """What the dead life left is gone, and of more than two ckpts the newest two are there."""
    pending = guarded.request("GET", f"/{BUCKET}", {"uploads": "", "prefix": prefix}).body.decode()
    assert re.findall("<Key>(.*?)</Key>", pending) == []
    listing = guarded.request("GET", f"/{BUCKET}", {"list-type": "2", "prefix": prefix}).body.decode()
    manifests = re.findall(r"/(\d+-\d+)/manifest.json</Key>", listing)
    assert len(manifests) == 2, listing
    assert set(re.findall(r"/(\d+-\d+)/", listing)) == {*manifests}, listing


def assert_no_warning(text: str) -> None:
    assert not set(re.findall(r" migrator rank \d+: (\w+)", text)) & WARNINGS, text


def test_the_page_lists_rights_of_the_prefix_and_of_the_bucket() -> None:
    """The tests below compare something."""
    assert set(RIGHTS.values()) == {f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/{PREFIX}/*"}
    assert all(statement["Effect"] == "Allow" for statement in STATEMENTS)


def test_a_job_needs_no_other_rights(allowed: Job, client: str, guarded: S3Server) -> None:
    """It is stopped and resumed, retires old ckpts and sweeps what a dead life left, without a warning."""
    use(allowed, client, (SCRIPTS / "everything.py").read_text())
    reference = unstopped(allowed)
    prefix = leave_as_a_dead_life(allowed)

    story = stopped(allowed, apart(behind_a_step(reference.moments), 3))

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=3, samples=SAMPLES)
    assert_no_warning("".join(life.text for life in story.lives))
    assert_swept_and_retired(guarded, prefix)


@pytest.mark.long
def test_ranks_need_no_other_rights(allowed: Job, client: str, guarded: S3Server) -> None:
    """Two of them, as one process does. They sweep behind a save after which they go on."""
    use(allowed, client, (SCRIPTS / "ranked.py").read_text())
    reference = unstopped_ranks(allowed, 2)
    prefix = leave_as_a_dead_life(allowed)
    dice = chance.dice("ranks")

    places = [(place, dice.randrange(2)) for place in apart(behind_a_step(reference.moments), 3)]
    story = stopped_ranks(allowed, places, [2, 2, 2, 2], SAVE_RANK="0", SAVE_STEPS="2")

    assert_ranks_as_if_nothing_had_happened(story, reference)
    assert_no_warning(story.text)
    assert_swept_and_retired(guarded, prefix)


@pytest.mark.long
@pytest.mark.parametrize("right", RIGHTS)
def test_each_right_is_needed_and_is_named_if_it_is_missing(
    allowed: Job, client: str, guarded: S3Server, right: str
) -> None:
    """In `listening()`, and not in the last seconds of a pod."""
    use(allowed, client, LISTENS)
    allowed.env |= guarded.env(LACKING[right])

    life = allowed.run()

    assert life.wait() == 1, life.text
    assert re.search(rf"StorageAccessError: .*right {right} there", life.text), life.text
