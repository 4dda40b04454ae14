"""Running statistics of shares equal the running statistics of the whole meta-batch."""

import copy

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.distributed import average_buffers
from tests.distributed.threads import in_threads


@pytest.mark.parametrize("norm", ["running", "per_step"])
def test_running_statistics_of_five_tasks(norm):
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    ).double()
    maml = mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, norm=norm)
    examples = [mg.tasks.Examples(torch.randn(5, 6, 2).double(), torch.randn(5, 6, 1).double()) for _ in "sq"]
    batch = mg.tasks.Batch(*examples)

    def process(group):
        own, share = copy.deepcopy(maml), batch.shard(group)
        own(share)
        average_buffers(own, weight=share.num_tasks, group=group)
        return dict(own.named_buffers())

    found = in_threads(2, process)
    before = {name: buffer.clone() for name, buffer in maml.named_buffers()}
    maml(batch)
    for buffers in found:
        for name, buffer in maml.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(buffer, before[name]) for name, buffer in maml.named_buffers())
