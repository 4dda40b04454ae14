from __future__ import annotations

import pytest
import torch

from metagrad.tasks import Batch, Examples, Omniglot, Sinusoid, TaskDistribution


@pytest.fixture
def batch() -> Batch:
    support = Examples(torch.arange(12.0).view(3, 2, 2), torch.arange(6).view(3, 2))
    return Batch(support, Examples(torch.ones(3, 4, 2), torch.ones(3, 4)))


def test_num_tasks_is_the_leading_axis_and_len_stays_that_of_a_pair(batch):
    assert batch.num_tasks == 3
    assert len(batch) == 2


def test_to_casts_floating_tensors_and_keeps_labels(batch):
    moved = batch.to(dtype=torch.float64)
    assert moved.support.x.dtype == moved.query.x.dtype == moved.query.y.dtype == torch.float64
    assert moved.support.y.dtype == torch.int64
    assert torch.equal(moved.support.x, batch.support.x.double())


def test_to_without_a_change_copies_nothing(batch):
    assert batch.to(device="cpu").support.x is batch.support.x


def test_to_moves_every_tensor(batch):
    moved = batch.to(device="meta")
    assert {t.device.type for examples in moved for t in examples} == {"meta"}


def test_the_distributions_meet_the_protocol():
    assert isinstance(Sinusoid(), TaskDistribution)
    assert callable(Omniglot.sample)
    assert not isinstance(object(), TaskDistribution)
