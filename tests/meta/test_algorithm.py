from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg


def test_maml_is_an_algorithm_and_a_model_is_not():
    model = nn.Linear(2, 3)
    assert isinstance(
        mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=1), mg.meta.Algorithm
    )
    assert not isinstance(model, mg.meta.Algorithm)


def test_forward_and_adapt_of_the_protocol_return_its_outputs(regression):
    maml = mg.MAML(nn.Linear(2, 3).double(), F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2)
    out, fast = maml(regression), maml.adapt(regression.support)
    assert isinstance(out, mg.meta.MetaOutput)
    assert isinstance(fast, mg.meta.Adapted)
    torch.testing.assert_close(out.loss, out.query_losses.mean())
    torch.testing.assert_close(fast.support_losses, out.support_losses)
    assert torch.equal(fast.steps, out.steps)
    assert not out.skipped.any()


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("Reptile", "truncate", 1),
        ("Reptile", "adapted", "0.*"),
    ],
)
def test_what_an_algorithm_does_not_take_cannot_be_assigned(regression, name, attribute, value):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).double()
    make = getattr(mg, name)
    learner = copy.deepcopy(make(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, task_chunk=1))
    learner(regression)
    setattr(learner, attribute, value)
    with pytest.raises(
        ValueError, match=rf"{name}\(...\): {attribute} stays .* cannot be assigned.*Make another"
    ):
        learner(regression)
