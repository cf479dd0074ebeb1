"""Epochs and sums of whole jobs go on, however a script counts them."""

from __future__ import annotations

import re

import pytest

from tests.support.harness import Job
from tests.support.job_history import assert_as_if_nothing_had_happened, assert_each_sample_once, stopped, unstopped


@pytest.mark.parametrize("wraps", [True, False])
def test_who_has_batches_is_not_told_to_take_it(job: Job, wraps: bool) -> None:
    """A step that is longer than the grace is no matter of `batches()`."""
    life = job.write(f"""
        from tests.support.scripts.ground import *
        begin()
        for x, ids in {"migrator.batches(loader)" if wraps else "loader"}:
            model(x).sum().backward()
            optimizer.step()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LONG_S)
        """).run(MIGRATOR_GRACE_S="1")

    assert life.wait() == 143, life.text
    (failed,) = life.events("save_failed")
    assert "no safe point was reached within the grace" in failed["why"]
    assert ("wrap the training loader in migrator.batches()" in failed["why"]) is not wraps
    assert ("make the grace longer" in failed["why"]) is wraps


COUNTED = """
from tests.support.scripts.ground import *
loss = migrator.meter("loss")
KIND = os.environ["KIND"]
plain = DataLoader(data, batch_size=4, shuffle=True)
begin(sampler=sampler if KIND == "elastic" else None)
for epoch in migrator.epochs(3):
    state["epoch"] = epoch  # for the lines only
    sampler.set_epoch(epoch)
    for x, ids in migrator.batches(loader if KIND == "elastic" else plain):
        loss.add(model(x).detach().square().mean(), len(x))
        train(x, ids)
    moment(f"evaluation {epoch}")
    total, count = loss.sum, loss.count
    print("evaluated", epoch, loss.take().hex(), total.hex(), count)
    moment(f"after {epoch}")
finish()
"""


@pytest.mark.parametrize("kind", ["elastic", "plain"])
def test_epochs_and_sums_go_on(job: Job, kind: str) -> None:
    """Stopped within an epoch, at its end, and behind the sum: the same epochs, and the same mean of each."""
    places = ["step 2", "evaluation 0", "after 1", "step 14"]
    job.write(COUNTED)
    reference = unstopped(job, KIND=kind)
    story = stopped(job, places, KIND=kind)

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=3, samples=24)
    assert [line.split()[-1] for line in story.evaluated.values()] == ["24"] * 3


def test_epochs_without_batches(job: Job) -> None:
    """The beginning of the next epoch is a safe point: an epoch that is done is not trained again."""
    job.write("""
        from tests.support.scripts.ground import *
        begin(sampler=None)
        for epoch in migrator.epochs(3):
            state["epoch"] = epoch
            for x, ids in DataLoader(data, batch_size=12, shuffle=True):
                train(x, ids)
            moment(f"after {epoch}")
        finish()
        """)

    assert_as_if_nothing_had_happened(stopped(job, ["after 0", "after 1"]), unstopped(job))


STAGES = """
from tests.support.scripts.ground import *
begin()
for epoch in migrator.epochs(3, name="first"):
    print("first", epoch)
    for x, ids in migrator.batches(loader):
        train(x, ids)
    if epoch == 1:
        break  # early
for fold in migrator.epochs(2, name="second"):
    for epoch in migrator.epochs(2, name=f"second {fold}"):
        print("second", fold, epoch)
        for x, ids in migrator.batches(loader):
            train(x, ids)
print("last", state["step"])
"""


def test_stages_and_loops_in_loops(job: Job) -> None:
    """A stage that was left early is over once the next one has begun; nobody takes one loop for another."""
    job.write(STAGES)
    lives = []
    for place in ("step 8", "step 20", "step 31", ""):
        lives.append(job.run(AT=place))
        lives[-1].wait()
    said = [re.findall(r"^((?:first|second|last) .*)$", life.text, re.MULTILINE) for life in lives]

    assert said == [
        ["first 0", "first 1"],
        ["first 1", "second 0 0", "second 0 1"],
        ["second 0 1", "second 1 0", "second 1 1"],
        ["second 1 1", "last 36"],
    ]


def test_more_epochs_than_before(job: Job) -> None:
    """A job that has ended goes on where it ended when it is given more."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        for epoch in migrator.epochs(int(os.environ["EPOCHS"])):
            print("epoch", epoch)
            for x, ids in migrator.batches(loader):
                train(x, ids)
        migrator.save_ckpt()
        """)
    texts = []
    for epochs in ("2", "4"):
        life = job.run(EPOCHS=epochs)
        assert life.wait() == 0, life.text
        texts.append(re.findall(r"^(?:epoch|trained) (\d+)", life.text, re.MULTILINE))

    assert texts[1][0] == "1"  # its end: no batch was left
    assert texts[1][1] == "2"
    assert texts[1][-1] == "24"


def test_a_ckpt_that_does_not_say_its_epoch(job: Job) -> None:
    """A script that counted in another way before: it is asked, and nothing is guessed."""
    before = "from tests.support.scripts.ground import *\nbegin()\n"
    loop = "    sampler.set_epoch(epoch)\n    for x, ids in migrator.batches(loader):\n        train(x, ids)\n"
    old = job.write(before + "for epoch in range(sampler.epoch, 3):\n" + loop).run(AT="step 8")
    assert old.wait() == 143, old.text
    asked = job.write(before + "for epoch in migrator.epochs(3):\n" + loop).run()
    assert asked.wait() == 1
    assert "does not say in which epoch it was made" in asked.text
    given = "for epoch in migrator.epochs(3, start=sampler.epoch):\n" + loop + "print('epoch', epoch)"
    new = job.write(before + given).run()

    assert new.wait() == 0, new.text
    assert "trained 18 " in new.text
    assert "epoch 2" in new.text
