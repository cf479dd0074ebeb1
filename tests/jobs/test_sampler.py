"""A sampler of ours in torch's loader, with and without processes of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from migrator.data.permutation import permutation
from migrator.data.sampler import ElasticSampler


# A machine with one core, or a newer Python that warns of every fork, is no failure of the sampler.
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore::DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("drop_last", "trained"), [(False, 50), (True, 48)])
def test_a_real_loader_goes_on_where_training_stopped(workers: int, drop_last: bool, trained: int) -> None:
    """Batches that workers fetched but nobody trained come again, and those that were trained do not."""
    data, seen = TensorDataset(torch.arange(50)), []
    sampler = ElasticSampler(data, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers, drop_last=drop_last)
    sampler.begin()
    for (batch,) in itertools.islice(loader, 2):
        seen += batch.tolist()
        sampler.advance(len(batch))

    successor = ElasticSampler(data)
    successor.load_state_dict(sampler.state_dict())
    successor.begin()
    loader = DataLoader(data, batch_size=4, sampler=successor, num_workers=workers, drop_last=drop_last)
    for (batch,) in loader:
        seen += batch.tolist()
        successor.advance(len(batch))

    assert seen == [permutation(1, 0, at, 50) for at in range(trained)]
    assert trained == successor.cursor
