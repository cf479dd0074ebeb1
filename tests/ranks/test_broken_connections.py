"""The network between one rank and the job's store fails; the ranks' own collectives go on, or fail as without us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.support import rank_processes as gangs
from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN
from tests.support.rank_history import whole_steps
from tests.support.rank_processes import Gang
from tests.support.store_proxy import Wire

SHORT_S = 3.0
"""A stall that a network may have, and nobody is lost. Longer than a call to the store is waited for."""
LOSSES = ("rank_lost", "saving_alone", "store_lost", "share_taken_over", "save_failed", "left_hard")
# Until the test says so; both ranks end behind the same step.
SCRIPT = (
    BEGIN
    + GROUP
    + """
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
registered = {"model": model, "optimizer": optimizer, "state": state}
"""
    + LISTEN
    + """
is_over = torch.zeros(1)
while not is_over:
    loss = model(torch.rand(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state["step"] += 1
    trained(state["step"], loss.item().hex())
    migrator.safe_point()
    time.sleep(0.01)
    is_over[0] = Path("over").exists()
    dist.all_reduce(is_over)
"""
    + END
)

Behind = Callable[..., tuple[Gang, Wire]]


@pytest.fixture
def behind(job: Job, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    """Two ranks that train, each in a pod of its own; rank 1 reaches the store by the wire."""
    port = gangs.free_port()
    wire = Wire(port)
    monkeypatch.setattr(gangs, "free_port", lambda: port)

    def start(**env: str) -> tuple[Gang, Wire]:
        gang = job.write(SCRIPT).gang(2, pods=2, each={1: {"MASTER_PORT": str(wire.port)}}, **env)
        gang.wait_for("^trained 15 ")
        return gang, wire

    yield start
    wire.end()


def lost(gang: Gang) -> dict[str, object]:
    return {name: gang.events(name) for name in LOSSES if gang.events(name)}


@pytest.mark.parametrize("every", ["off", "20"])
def test_a_short_stall_is_not_noticed_by_a_job_that_trains(job: Job, behind: Behind, every: str) -> None:
    """Saves are made meanwhile as well: what the ranks wrote, storage says."""
    gang, wire = behind(MIGRATOR_EVERY=every)

    wire.stall()
    time.sleep(SHORT_S)
    saved = whole_steps(job)
    wire.mend()
    (job.directory / "over").touch()

    assert gang.wait() == [0, 0], gang.text
    assert lost(gang) == {}, gang.text
    assert bool(saved) == (every == "20"), gang.text


@pytest.mark.parametrize("told", [0, 1], ids=["the other one told", "the stalled one told"])
def test_a_short_stall_while_leaving_costs_nobody(job: Job, behind: Behind, told: int) -> None:
    """Late is not lost: with most of the grace left both wait for the wire, and save one ckpt."""
    gang, wire = behind()

    wire.stall()
    gang.kill(ranks=[told])
    time.sleep(SHORT_S)
    wire.mend()

    assert gang.wait() == [143, 143], gang.text
    leaving = dict(gang.events("leaving"))
    assert {fields["why"] for fields in leaving.values()} == {"saved"}, gang.text
    assert len(leaving) == 2, gang.text
    # Whoever waits in a collective for the one that has left may end with gloo's error, saved.
    assert lost(gang).keys() <= {"left_hard"}, gang.text
    assert len(whole_steps(job)) == 1, gang.text


@pytest.mark.parametrize("fault", ["stall", "reset"])
def test_a_rank_that_is_cut_off_and_has_to_leave_saves_alone_and_says_so(job: Job, behind: Behind, fault: str) -> None:
    """The other one, which no notice can reach, ends with its collective: by gloo's error, not by ours."""
    gang, wire = behind(MIGRATOR_GRACE_S="10")

    getattr(wire, fault)()
    gang.kill(ranks=[1])

    assert gang.wait()[1] == 143, gang.text
    (alone,) = gang[1].events("saving_alone")
    assert "the job's store is gone" in alone["why"], gang.text
    (leaving,) = gang[1].events("leaving")
    assert leaving["why"] == "saved", gang.text
    assert whole_steps(job) == [int(leaving["step"])], gang.text
    assert "by peer" in gang[0].text, gang.text


def test_a_rank_that_is_cut_off_from_one_that_leaves_costs_no_ckpt(job: Job, behind: Behind) -> None:
    gang, wire = behind(MIGRATOR_GRACE_S="10")

    wire.stall()
    gang.kill(ranks=[0])
    code = gang[0].wait()
    wire.mend()

    assert code == 143, gang.text
    (step,) = whole_steps(job)
    (leaving,) = gang[0].events("leaving")
    assert int(leaving["step"]) == step, gang.text
    assert float(leaving["since_signal_s"]) < 10, gang.text
    (missing,) = gang[0].events("rank_lost")
    assert missing["lost"] == "1", gang.text
    assert "cut off" in missing["why"], gang.text
    assert gang[1].wait() != 0, gang.text


def test_a_connection_that_is_reset_ends_no_training(behind: Behind, job: Job) -> None:
    gang, wire = behind()

    wire.reset()
    gang[1].wait_for("store_lost")
    (job.directory / "over").touch()

    assert gang.wait() == [0, 0], gang.text
    assert gang[0].events("store_lost") == [], gang.text


@pytest.mark.parametrize("told", [0, 1])
def test_a_connection_that_broke_is_made_again(behind: Behind, job: Job, told: int) -> None:
    """From then on it is a job like any other: whoever has the notice, both leave with one ckpt."""
    gang, wire = behind()
    wire.reset()
    gang[1].wait_for("store_lost")
    wire.mend()
    gang[1].wait_for("store_found")
    gang.kill(ranks=[told])

    assert gang.wait() == [143, 143], gang.text
    assert {fields["why"] for _, fields in gang.events("leaving")} == {"saved"}, gang.text
    assert not gang.events("saving_alone"), gang.text
    assert not gang.events("rank_lost"), gang.text
