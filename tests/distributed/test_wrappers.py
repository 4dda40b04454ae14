"""Wrapped models are refused with a sentence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """A wrapper that needs no group."""

    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module


def sharded():
    model = torch.nn.Linear(1, 1)
    model.bias.device_mesh = "as a DTensor has"
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Wrapped(torch.nn.Linear(1, 1)), "model is a Wrapped, which averages what reaches .grad"),
        (sharded, "the parameter bias is a DTensor, as fully_shard makes them"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=1),
        lambda model: mg.ProtoNet(model),
        lambda model: mg.ggn(
            model, F.mse_loss, dict(model.named_parameters()), (torch.ones(1, 1), torch.ones(1, 1))
        ),
    ],
    ids=["MAML", "ProtoNet", "ggn"],
)
def test_wrapped_models_are_refused(make, message, use):
    with pytest.raises(ValueError, match=message):
        use(make())
