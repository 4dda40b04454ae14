from collections import UserDict

import pytest
import torch

from metagrad.tasks import Batch, Examples
from metagrad.tasks.batch import share_of


@pytest.fixture
def batch() -> Batch:
    support = Examples(torch.arange(12.0).view(3, 2, 2), torch.arange(6).view(3, 2))
    return Batch(support, Examples(torch.ones(3, 4, 2), torch.ones(3, 4)))


def test_num_tasks_is_the_leading_axis_and_len_stays_that_of_a_pair(batch):
    assert batch.num_tasks == 3
    assert len(batch) == 2


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(("meta", torch.float64), {}), ((), {"device": "meta", "dtype": torch.float64, "non_blocking": True})],
)
def test_to_takes_what_a_tensor_takes_and_keeps_labels(batch, args, kwargs):
    moved = batch.to(*args, **kwargs)
    assert moved.support.x.dtype == moved.query.x.dtype == moved.query.y.dtype == torch.float64
    assert moved.support.y.dtype == torch.int64
    assert moved.support.x.device == moved.support.y.device == torch.device("meta")
    assert torch.equal(batch.to(torch.float64).support.x, batch.support.x.double())
    assert batch.to("cpu").support.x is batch.support.x


def test_pairs_of_a_batch_may_be_lists_which_a_data_loader_makes(batch):
    lists = Batch(list(batch.support), tuple(batch.query))
    assert lists.num_tasks == 3
    assert lists.to(torch.float64).support.x.dtype == torch.float64


def test_inputs_may_be_the_mapping_that_a_tokenizer_returns(batch):
    ids = Batch(*(Examples(UserDict(input_ids=x.long()), y) for x, y in batch))
    assert ids.num_tasks == 3
    assert ids.to("meta").support.x["input_ids"].is_meta
    assert len(ids.select(slice(2)).query.x["input_ids"]) == 2


class Process:
    """A process group, as far as a share looks at it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def test_shares_are_consecutive_and_differ_by_one_task_at_most():
    for count in range(1, 12):
        for size in range(1, count + 1):
            shares = [share_of(count, rank, size) for rank in range(size)]
            assert [i for share in shares for i in range(count)[share]] == list(range(count))
            lengths = [share.stop - share.start for share in shares]
            assert sorted(lengths, reverse=True) == lengths
            assert lengths[0] - lengths[-1] <= 1


def test_shares_of_a_batch_are_the_batch(batch):
    structured = Batch(Examples({"x": batch.support.x, "scale": 2}, batch.support.y), batch.query)
    shares = [structured.shard(Process(rank, 2)) for rank in range(2)]
    assert [share.num_tasks for share in shares] == [2, 1]
    assert torch.equal(torch.cat([share.support.x["x"] for share in shares]), batch.support.x)
    assert torch.equal(torch.cat([share.query.y for share in shares]), batch.query.y)
    assert shares[1].support.x["scale"] == 2


def test_a_process_without_a_task_is_an_error(batch):
    with pytest.raises(ValueError, match="3 tasks for 4 processes would leave some without a task"):
        batch.shard(Process(0, 4))
