"""A multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class MLP(nn.Sequential):
    r"""Alternate affine maps and an activation, with an affine map last.

    .. math::
        f(x) = W_L \, \sigma(\dots \sigma(W_1 x + b_1) \dots) + b_L

    Args:
        sizes: Features of the input, of each hidden layer and of the output; `[1, 40, 40, 1]` is the network
            of MAML's sinusoids.
        activation: Makes the activation after each hidden layer. MAML's network is ReLU, whose second
            derivative is zero; take a smooth one such as `nn.Tanh` where curvature matters.

    Parameters are initialised as `nn.Linear` does it.

    Raises:
        ValueError: For fewer than two sizes, or one below one.

    Examples:
        >>> import torch
        >>> sum(p.numel() for p in MLP([1, 40, 40, 1]).parameters())
        1761
        >>> MLP([3, 2])(torch.zeros(7, 3)).shape
        torch.Size([7, 2])

    References:
        Finn, Abbeel, Levine, Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, 2017,
        section 5.1.
    """

    def __init__(self, sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(
                f"MLP(sizes): sizes must be the features of input, hidden layers and output, two or more "
                f"positive numbers such as [1, 40, 40, 1], got {list(sizes)}."
            )
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        super().__init__(*layers[:-1])
