"""The derivatives of a training, against central differences of trainings that run again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg

R = mg.optim.rules
STEP = 1e-6  # of the central differences: their error is of order STEP**2 + eps / STEP


class Block(nn.Module):
    """A transformer block with dropout, on sequences of three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = x.unflatten(1, (3, 4))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x.flatten(1))


def mlp():
    return nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3))


def conv(norm):
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 2, bias=False),
        norm,
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


MODELS = {
    "mlp": mlp,
    "group norm": lambda: conv(nn.GroupNorm(2, 4)),
    "batch norm": lambda: conv(nn.BatchNorm2d(4)),
    "attention and dropout": Block,
}
MATRICES = ["*weight"]
RULES = {
    "sgd": lambda: R.sgd(lr=0.1),
    "momentum": lambda: R.sgd(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw and clip": lambda: R.chain(R.clip_by_norm(0.5), R.adamw(lr=0.01)),
    "schedule": lambda: R.sgd(lr=[0.1, 0.2, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1]),
}


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(model="mlp", rule="momentum", **options):
    torch.manual_seed(0)
    net = MODELS[model]() if isinstance(model, str) else model
    x, y = torch.randn(14, 12), torch.randint(0, 3, (14,))
    given = {
        "optimizer": RULES[rule]() if isinstance(rule, str) else rule,
        "batch_size": 4,
        "epochs": 2,
        **options,
    }
    return mg.Training(net, F.cross_entropy, (x, y), **given)


def metric(trained):
    torch.manual_seed(1)
    x, y = torch.randn(6, 12), torch.randint(0, 3, (6,))
    return F.cross_entropy(trained(x), y) + trained.losses[-1]


def difference(function, at, direction):
    return (function(at + STEP * direction) - function(at - STEP * direction)) / (2 * STEP)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_derivatives_agree_with_trainings_that_run_again(model, rule):
    training = problem(model, rule)
    leaves = {
        "weights": torch.ones(14),
        "x": training.examples.tensors[0],
        **training.model.params(),
    }
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}

    def trained(leaves):
        params = {name: leaf for name, leaf in leaves.items() if name not in ("weights", "x")}
        data = leaves["x"], training.examples.tensors[1]
        return training(leaves["weights"], data=data, params=params, memory="sqrt")

    found = dict(
        zip(leaves, torch.autograd.grad(metric(trained(leaves)), list(leaves.values())), strict=True)
    )
    for name, gradient in found.items():
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2))

        def at(value, name=name):
            with torch.no_grad():
                return float(metric(trained({**leaves, name: value})))

        expected = difference(at, leaves[name].detach(), direction)
        scale = float(gradient.norm() * direction.norm())
        assert abs(float((gradient * direction).sum()) - expected) < 1e-6 * max(scale, 1e-3), name
