"""Ranks of one job that run different versions of the package: a newer one writes what an older one cannot read.

The newer version is this one with a higher number of a format, so it reads what the older one writes.
"""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN

SCRIPT = (
    BEGIN
    + GROUP
    + """
from migrator.ckpt import generations as lineage
from migrator.ckpt import rank_record
from migrator.ranks import shares as sharing
if str(rank) in os.environ.get("NEWER_RECORDS", "").split():
    rank_record.RANK_FORMAT += 1
    put = sharing.OnStorage.put
    def put_and_hang(self, *arguments):
        put(self, *arguments)
        while "HANGS" in os.environ:  # so it does not commit itself
            time.sleep(0.1)
    sharing.OnStorage.put = put_and_hang
if str(rank) in os.environ.get("NEWER_LIVES", "").split():
    lineage.GENERATION_FORMAT += 1
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
registered = {"model": model, "optimizer": optimizer, "state": state}
"""
    + LISTEN
    + """
for step in range(state["step"] + 1, 7):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] = step
    migrator.safe_point()
    if step == 3 and "SAVES" in os.environ:
        migrator.save_ckpt()
    trained(step)
"""
    + END
)


@pytest.fixture
def job(job: Job) -> Job:
    job.env["MIGRATOR_GRACE_S"] = "12"
    return job.write(SCRIPT)


def test_a_last_save_does_not_wait_for_a_rank_whose_record_cannot_be_read(job: Job) -> None:
    """It is named with what to do, and the ckpt has all that the ranks have in common."""
    gang = job.gang(3, pods=3, NEWER_RECORDS="2", HANGS="1", AT="4", AT_RANK="0")

    assert [gang[rank].wait() for rank in (0, 1)] == [143, 143], gang.text

    (ckpt,) = job.ckpts()
    for rank in (0, 1):
        (leaving,) = gang[rank].events("leaving")
        assert leaving["ckpt"] == ckpt, gang.text
        assert float(leaving["since_signal_s"]) < 4.0, gang.text
    said = [fields for _, fields in gang.events("rank_newer")]
    assert said, gang.text
    assert {fields["other"] for fields in said} == {"2"}, gang.text
    assert all("same version on all ranks" in fields["why"] for fields in said), gang.text
    (lost,) = [fields for _, fields in gang.events("rank_lost")]
    assert lost["lost"] == "2", gang.text
    assert "newer migrator" in lost["why"], gang.text


def test_a_save_that_goes_on_says_that_ranks_run_different_versions(job: Job) -> None:
    """On every rank that asked for it, at once: not after a wait for what has come already."""
    gang = job.gang(2, pods=2, NEWER_RECORDS="1", SAVES="1")

    assert gang.wait(20.0) == [1, 1], gang.text

    for rank in range(2):
        assert "SaveFailed: step 3 could not be saved by all ranks" in gang[rank].text, gang.text
        assert "of rank 1: what a rank wrote was written by a newer migrator" in gang[rank].text, gang.text
    assert job.ckpts() == []


def test_ranks_that_meet_find_that_rank_0_runs_a_newer_version(job: Job) -> None:
    """They would take it for a root that they do not share, and send all that they save to rank 0."""
    gang = job.gang(2, pods=2, NEWER_LIVES="0")

    assert gang.wait(20.0) == [1, 1], gang.text

    assert "RanksError: rank 0 runs a newer migrator than rank 1: run the same on all ranks" in gang[1].text
    assert not gang.events("roots_apart"), gang.text
    assert "trained" not in gang.text, gang.text
