"""Parameters that all tasks share are arguments of compiled code, and have gradients there."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import metagrad as mg
from tests.marks import slow

rules = mg.optim.rules


class Net(nn.Module):
    """No chain: a body, a scale, and a head that is tied to the middle."""

    def __init__(self):
        super().__init__()
        self.body, self.mix, self.out = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.out.weight = self.mix.weight

    def forward(self, x):
        return self.out((self.scale * self.mix(self.body(x).tanh())).sin())


class Loss(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.power = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, prediction, y):
        return ((prediction - y).square() + 0.1).pow(self.power).mean()


def layers():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


MODELS = {
    "between shared layers": (layers, "2", ["2.weight", "2.bias"]),
    "all but the head": (layers, "!4", ["0.weight", "0.bias", "2.weight", "2.bias"]),
    "the head alone": (layers, "4", ["4.weight", "4.bias"]),
    "no chain": (Net, ["body"], ["body.weight", "body.bias"]),
}
CASES = [
    slow("between shared layers", None, "full", 2, "mse"),
    slow("no chain", None, "step", 2, "learned"),
    ("no chain", None, "full", 2, "learned"),
    *(
        slow(model, task_chunk, memory, order, loss)
        for model in MODELS
        for task_chunk in (None, 1)
        for memory, order, loss in (
            ("full", 2, "learned"),
            ("step", 1, "mse"),
            ("sqrt", 2, "mse"),
            ("whole", 2, "mse"),
        )
        if (model, task_chunk, memory) != ("no chain", None, "full")
    ),
    slow("no chain", None, "whole", 1, "learned"),
]


@pytest.mark.parametrize(("model", "task_chunk", "memory", "order", "loss"), CASES)
def test_compiled_gradients_of_shared_parameters(
    textbook, regression, model, task_chunk, memory, order, loss
):
    make, adapt, names = MODELS[model]
    torch.manual_seed(0)
    module, loss_fn, backend = (
        make().double(),
        {"mse": F.mse_loss, "learned": Loss()}[loss],
        CompileCounterWithBackend("eager"),
    )
    maml = mg.MAML(
        module,
        loss_fn,
        inner=rules.sgd(lr=0.3),
        steps=2,
        adapt=adapt,
        order=order,
        task_chunk=task_chunk,
        memory="full" if memory == "whole" else memory,
        compile={"backend": backend, "whole": memory == "whole"},
    )
    expected = textbook(module, loss_fn, regression, lr=0.3, steps=2, order=order, names=names)
    variables = list(maml.parameters())
    wanted = torch.autograd.grad(expected.mean(), variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fall-back would warn
        for repetition in range(3):
            out = maml(regression)
            torch.testing.assert_close(out.query_losses, expected, rtol=1e-9, atol=1e-12)
            found = torch.autograd.grad(out.loss, variables)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
            assert backend.frame_count
            if repetition == 1:
                compiled = backend.frame_count
        assert backend.frame_count == compiled
