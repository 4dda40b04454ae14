"""Context vectors that describe a task to a model: concatenated with the input, or scaling its features."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from metagrad.core.checks import check_count
from metagrad.models.mlp import MLP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ContextInput(nn.Module):
    r"""Append a context vector to every input, :math:`x \mapsto (x, \phi)`.

    Args:
        size: Length of the context vector, which is initialized to zero.

    Raises:
        ValueError: ``size`` is less than 1.

    Examples:
        >>> ContextInput(2)(torch.ones(3, 1)).tolist()
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector: nn.Parameter = new_context("ContextInput(size)", size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., features] to [..., features + size]."""
        return torch.cat([x, self.vector.expand(*x.shape[:-1], -1)], -1)


class ContextMLP(nn.Sequential):
    r"""A multilayer perceptron of the input and a context vector, :math:`f_\theta(x, \phi)`.

    The parameter ``context.vector`` is the context. The module ``body`` is the perceptron.

    Args:
        sizes: Layer widths as in `MLP`, without the context.
        context: Length of the context vector, which is initialized to zero.
        activation: Factory of the activation, as in `MLP`.

    Raises:
        ValueError: ``sizes`` are invalid for `MLP`, or ``context`` is less than 1.

    Examples:
        >>> model = ContextMLP([1, 40, 40, 1], context=5)
        >>> model.body[0].in_features, model.context.vector.shape
        (6, torch.Size([5]))

    References:
        Zintgraf et al., Fast Context Adaptation via Meta-Learning, 2019, section 5.1: regression with a
        perceptron of 40 and 40 hidden units and a context of 4 or 5 entries.
    """

    context: ContextInput
    body: MLP

    def __init__(
        self, sizes: Sequence[int], context: int, activation: Callable[[], nn.Module] = nn.ReLU
    ) -> None:
        first, body = ContextInput(context), MLP([sizes[0] + context, *sizes[1:]], activation)
        super().__init__(OrderedDict(context=first, body=body))


class FiLM(nn.Module):
    r"""Scale and shift the channels of features by linear functions of a context vector.

    .. math::
        h_c \mapsto (1 + \gamma_c) h_c + \beta_c, \qquad (\gamma, \beta) = W \phi + b

    The bias is initialized to :math:`b = 0`, so the layer is the identity for a zero context.

    Args:
        context: Context vector. Several layers may share this parameter.
        channels: Number of channels of the features.

    Examples:
        >>> layer = FiLM(nn.Parameter(torch.zeros(3)), channels=2)
        >>> bool((layer(torch.ones(5, 2, 4, 4)) == 1).all())
        True

    References:
        Perez et al., FiLM: Visual Reasoning with a General Conditioning Layer, 2018, section 2.
        Zintgraf et al., Fast Context Adaptation via Meta-Learning, 2019, section 3.
    """

    def __init__(self, context: nn.Parameter, channels: int) -> None:
        super().__init__()
        self.context = context
        self.modulation: nn.Linear = nn.Linear(context.numel(), 2 * channels)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Tensor) -> Tensor:
        """Map [batch, channels, ...] to the same shape."""
        scale, shift = self.modulation(self.context).view(2, -1, *[1] * (h.dim() - 2))
        return torch.addcmul(shift, 1 + scale, h)


def new_context(call: str, size: int) -> nn.Parameter:
    """Return a context vector of zeros."""
    return nn.Parameter(torch.zeros(check_count(call, size)))
