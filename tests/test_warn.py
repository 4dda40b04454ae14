"""Warnings point to the line of the user, at any depth of the call stack."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim import KFAC, rules


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 1)


def tasks_one_by_one():
    batch = tuple((torch.ones(2, 3, 1), torch.ones(2, 3, 1)) for _ in range(2))
    mg.MAML(Branching(1, 1), F.mse_loss, inner=rules.sgd(lr=0.1), steps=1)(batch)


def other_layers():
    KFAC(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)))


def no_recomputation():
    torch.func.grad(lambda x: mg.checkpoint(torch.sin, x))(torch.ones(()))


@pytest.mark.parametrize("call", [tasks_one_by_one, other_layers, no_recomputation])
def test_the_line_of_the_caller_is_named(call):
    with pytest.warns(UserWarning, match=r"one by one|plain gradient|be recomputed") as found:
        call()
    (warning,) = found
    lines = [line for *_, line in call.__code__.co_lines()]
    assert (warning.filename, warning.lineno) == (__file__, lines[-1])
