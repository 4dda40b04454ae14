"""First-order MAML, ANIL and BOIL against the textbook's loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg

rules = mg.optim.rules


def net():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    return nn.Sequential(body, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


HEAD = ["3.weight", "3.bias"]
BODY = ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
ALGORITHMS = {
    "FOMAML": (mg.FOMAML, {}, [*BODY, *HEAD], 1),
    "ANIL": (mg.ANIL, {"head": "3"}, HEAD, 2),
    "first-order ANIL": (mg.ANIL, {"head": "3", "order": 1}, HEAD, 1),
    "BOIL": (mg.BOIL, {"head": "3"}, BODY, 2),
}


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_meta_gradient_is_that_of_the_textbook(textbook, regression, algorithm, task_chunk, memory):
    make, arguments, names, order = ALGORITHMS[algorithm]
    model = net()
    meta = make(
        model,
        F.mse_loss,
        inner=rules.sgd(lr=0.3),
        steps=3,
        memory=memory,
        task_chunk=task_chunk,
        **arguments,
    )
    expected = textbook(model, F.mse_loss, regression, lr=0.3, steps=3, order=order, names=names)
    out = meta(regression)
    torch.testing.assert_close(out.query_losses, expected, rtol=1e-9, atol=1e-12)
    variables = list(model.parameters())
    found, wanted = (torch.autograd.grad(value, variables) for value in (out.loss, expected.mean()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert list(meta.adapt(regression.support).params) == names


@pytest.mark.parametrize("make", [mg.ANIL, mg.BOIL])
def test_the_head_is_a_module_of_the_model(make, regression):
    model, arguments = net(), {"inner": rules.sgd(lr=0.1), "steps": 1}
    by_name = make(model, F.mse_loss, head="3", **arguments)
    by_module = make(model, F.mse_loss, head=model[3], **arguments)
    assert by_name.adapted == by_module.adapted
