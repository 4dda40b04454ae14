from __future__ import annotations

import inspect
import re

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
    assert isinstance(fast, mg.meta.AdaptedModel)
    torch.testing.assert_close(out.loss, out.query_losses.mean())
    torch.testing.assert_close(fast.support_losses, out.support_losses)
    assert torch.equal(fast.steps, out.steps)
    assert not out.skipped.any()
    assert re.fullmatch(
        r"MetaOutput\(loss=[\d.]+, query_losses=\[4\], query_outputs=\[4, 5, 3\], .*skipped=\[4\]\)",
        repr(out),
    )


@pytest.mark.parametrize(("attribute", "value"), [("truncate", 1), ("adapted", "0.*"), ("order", 2)])
def test_what_reptile_does_not_take_cannot_be_assigned(regression, attribute, value):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).double()
    learner = mg.Reptile(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, task_chunk=1)
    learner(regression)
    setattr(learner, attribute, value)
    with pytest.raises(ValueError, match=r"Reptile\(...\): expected order 1, adapted None and truncate None"):
        learner(regression)


def test_maml_has_few_arguments():
    assert len(inspect.signature(mg.MAML).parameters) <= 10
