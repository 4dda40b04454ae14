"""A multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class MLP(nn.Sequential):
    r"""Multilayer perceptron with a linear last layer.

    .. math::
        f(x) = W_L \, \sigma(\dots \sigma(W_1 x + b_1) \dots) + b_L

    Args:
        sizes: Number of features of the input, of each hidden layer and of the output. MAML's sinusoids use
            `[1, 40, 40, 1]`.
        activation: Factory of the activation after each hidden layer. The second derivative of the default ReLU is
            zero. Use a smooth activation such as `nn.Tanh` if curvature matters.

    Raises:
        ValueError: There are fewer than two sizes, or a size is less than 1.

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
