from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from metagrad.meta.objective.vmap import forward_stacked, losses_stacked, values_for


class Doubling(nn.Linear):
    """A subclass with another forward, which must not be treated as a Linear."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    linear = nn.Linear(4, 3)
    linear.register_forward_hook(lambda module, args, output: output * 3)
    return linear


def frozen(name):
    linear = nn.Linear(4, 3)
    getattr(linear, name).requires_grad_(False)
    return linear


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def parametrized():
    linear = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "without bias": lambda: nn.Linear(4, 3, bias=False),
    "frozen weight": lambda: frozen("weight"),
    "frozen bias": lambda: frozen("bias"),
    "deep": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.GELU()), nn.Linear(5, 3)),
    "flatten": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)),
    "prelu": lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)),
    "subclass": lambda: Doubling(4, 3),
    "hook": hooked,
    "parametrized": parametrized,
}


FLAT_ONLY = {"flatten", "prelu", "softmax"}
CASES = [(name, ()) for name in MODELS] + [(name, (2,)) for name in MODELS if name not in FLAT_ONLY]


@pytest.mark.parametrize(("name", "extra"), CASES)
def test_equals_one_task_after_the_other(name, extra):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(6, 5, *extra, 4, dtype=torch.float64)
    params = {
        k: (p + torch.randn(6, *p.shape, dtype=torch.float64)).detach().requires_grad_()
        for k, p in model.named_parameters()
        if p.requires_grad
    }
    together = forward_stacked(model, values_for(model, params, {}), x)
    each = torch.stack(
        [functional_call(model, {k: p[i] for k, p in params.items()}, (x[i],)) for i in range(len(x))]
    )
    torch.testing.assert_close(together, each, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.pow(2).sum(), list(params.values())) for y in (together, each)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("loss_fn", "classes"),
    [
        (F.mse_loss, False),
        (F.l1_loss, False),
        (nn.MSELoss(), False),
        (F.cross_entropy, True),
        (functools.partial(F.cross_entropy), True),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), True),
        (nn.CrossEntropyLoss(), True),
    ],
)
def test_losses_are_those_of_each_task(loss_fn, classes):
    torch.manual_seed(0)
    prediction = torch.randn(4, 5, 3, dtype=torch.float64)
    target = torch.randint(3, (4, 5)) if classes else torch.randn(4, 5, 3, dtype=torch.float64)
    expected = torch.stack([loss_fn(p, t) for p, t in zip(prediction, target, strict=True)])
    torch.testing.assert_close(losses_stacked(loss_fn, prediction, target), expected)


def test_cross_entropies_of_many_examples_in_float16():
    """The sum overflows although the mean does not."""
    logits = torch.tensor([0.0, 12.0]).half().expand(2, 6000, 2)
    losses = losses_stacked(F.cross_entropy, logits, torch.zeros(2, 6000, dtype=torch.int64))
    assert losses.tolist() == [12.0, 12.0]
    assert losses.dtype == torch.float16
