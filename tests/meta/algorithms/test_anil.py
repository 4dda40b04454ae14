"""First-order MAML, ANIL and BOIL against the textbook's loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from tests.meta.textbook import assert_learns_as, learner, textbook


def net():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    return nn.Sequential(body, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


HEAD = ["3.weight", "3.bias"]
BODY = ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
ALGORITHMS = {
    "FOMAML": (mg.FOMAML, lambda model: {}, [*BODY, *HEAD], 1),
    "ANIL": (mg.ANIL, lambda model: {"head": "3"}, HEAD, 2),
    "first-order ANIL, by the module": (mg.ANIL, lambda model: {"head": model[3], "order": 1}, HEAD, 1),
    "BOIL": (mg.BOIL, lambda model: {"head": "3"}, BODY, 2),
}


@pytest.mark.parametrize(("task_chunk", "memory"), [(None, "full"), (1, "step"), (None, "sqrt")])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_meta_gradient_is_that_of_the_textbook(regression, algorithm, task_chunk, memory):
    make, arguments, names, order = ALGORITHMS[algorithm]
    model = net()
    meta = learner(make, model, steps=3, memory=memory, task_chunk=task_chunk, **arguments(model))
    losses = textbook(model, F.mse_loss, regression, lr=0.1, steps=3, order=order, names=names)
    assert_learns_as(meta(regression), losses, model.parameters())
    assert list(meta.adapt(regression.support).params) == names
