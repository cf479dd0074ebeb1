"""A save that comes when a later life has begun without it says so, and no other one does."""

from __future__ import annotations

from tests.jobs.test_notices import COUNT, another_pod, answer, request, stopped
from tests.support.harness import Job, Process, until


def overtaken(job: Job, **env: str) -> tuple[Process, Process]:
    """A life that trains, and a later one that has begun to train beside it."""
    stopped(job.write(COUNT), after=10)
    old = job.run(**env)
    old.wait_for("^step 40$")
    later = job.run(MIGRATOR_SIGNAL=another_pod(job))
    later.wait_for("^loaded")
    return old, later


def test_a_late_save_is_told_to_all_who_ask(job: Job) -> None:
    """The log, the answer to the hook, the container's last message."""
    message = job.directory / "termination-log"
    message.touch()
    old, later = overtaken(job, MIGRATOR_TERMINATION_LOG=str(message))
    (before,) = job.ckpts()
    request(job, "r")

    assert old.wait() == 143, old.text
    said = f"a later life of the job (generation 3) went on from {before} and does not have it"
    found = answer(job)
    assert (found.word, found.fields["late"]) == ("resume", said)
    assert [event["means"] for event in old.events("later_life")] == [f'"{said}"']
    (leaving,) = old.events("leaving")
    assert leaving["why"] == f'"saved, but {said}"'
    assert message.read_text().startswith(f"migrator: saved, but {said}: ckpt 000002-")
    later.kill()
    assert later.wait() == 143, later.text
    assert not later.events("later_life")
    assert later.events("leaving")[0]["why"] == "saved"


def test_a_periodic_save_of_a_life_that_was_replaced_says_so_once(job: Job) -> None:
    """It trains for nobody, and its owner learns it before the pod ends."""
    old, _ = overtaken(job, MIGRATOR_EVERY="20")
    old.wait_for("later_life")
    before = len(old.events("committed"))
    until(lambda: len(old.events("committed")) >= before + 2, "two more saves")

    assert len(old.events("later_life")) == 1


def test_a_life_that_waits_for_the_save_has_it(job: Job) -> None:
    """Begun before the ckpt was there, and told by nothing but the mark: that is the ordinary way, and all is well."""
    stopped(job.write(COUNT), after=10)
    old = job.run(HOLD_COMMIT="1")
    old.wait_for("^step 40$")
    old.kill()
    old.wait_for("^holds the commit$")
    later = job.run(STEPS="1", MIGRATOR_SIGNAL=another_pod(job))
    later.wait_for("waiting_for_leaving")
    (job.directory / "go").touch()

    assert old.wait() == 143, old.text
    assert "late" not in answer(job).fields
    assert not old.events("later_life")
