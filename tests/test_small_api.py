"""What scripts need besides the loop itself: a loader's attributes, counters, sums, state of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from migrator.instance import Migrator
from tests.harness import Job


@pytest.fixture
def migrator(here: Path) -> Iterator[Migrator]:
    """One that listens, in this process."""
    made = Migrator()
    made.register("state", {})
    made.listening()
    yield made
    made.close()


# A wrapped loader.


def test_a_wrapped_loader_has_the_attributes_of_the_loader(migrator: Migrator) -> None:
    """Scripts read its length, its data and its batch size, and set the epoch of its sampler."""
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data), drop_last=True)
    wrapped = migrator.batches(loader)

    assert wrapped.dataset is data
    assert wrapped.sampler is loader.sampler
    assert wrapped.batch_sampler is loader.batch_sampler
    assert (wrapped.batch_size, wrapped.num_workers, wrapped.drop_last, len(wrapped)) == (4, 0, True, 2)
    assert not hasattr(wrapped, "no_such_thing")
    assert not hasattr(wrapped, "_iterator")
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'datset'"):
        _ = wrapped.datset


# Advice.


@pytest.mark.parametrize("wraps", [True, False])
def test_who_has_batches_is_not_told_to_take_it(job: Job, wraps: bool) -> None:
    """A step that is longer than the grace is no matter of `batches()`."""
    life = job.write(f"""
        from tests.jobs.ground import *
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
