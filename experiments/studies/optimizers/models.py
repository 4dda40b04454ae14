"""The deep autoencoder, a hard problem for first-order methods since Hessian-free optimization began with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from metagrad.models import MLP

INPUTS_OF_A_UNIT = 15


class Autoencoder(nn.Sequential):
    r"""Encode images by layers of sigmoid units into a linear code, and decode it by their mirror into logits.

    Weights are initialised sparsely: every unit has 15 inputs with weights of N(0, 1), and the other weights and the
    biases are zero.

    Args:
        sizes: Features of the input, of the hidden layers and of the code; the mirror follows.

    Example:
        >>> from experiments.studies.optimizers.models import Autoencoder
        >>> model = Autoencoder([784, 1000, 500, 250, 30])
        >>> model(torch.zeros(2, 784)).shape, len(model)
        (torch.Size([2, 784]), 14)
        >>> (model[0].weight != 0).sum(1).unique()
        tensor([15])

    References:
        Hinton, Salakhutdinov, "Reducing the dimensionality of data with neural networks", Science 313, 2006; Martens,
        "Deep learning via Hessian-free optimization", ICML 2010, sections 5 (initialisation) and 6.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise([*sizes, *reversed(sizes[:-1])]):
            layers += [sparse_linear(fan_in, fan_out)]
            if fan_out != sizes[-1]:
                layers += [nn.Sigmoid()]
        super().__init__(*layers[:-1])


def double_mlp(sizes: Sequence[int]) -> MLP:
    """Return a network of tanh units in float64; of two sizes, an affine map."""
    return MLP(sizes, nn.Tanh).double()


def sparse_linear(fan_in: int, fan_out: int) -> nn.Linear:
    """Return a layer with Martens' sparse initialisation."""
    layer = nn.Linear(fan_in, fan_out)
    chosen = torch.rand(fan_out, fan_in).argsort(1)[:, :INPUTS_OF_A_UNIT]
    with torch.no_grad():
        layer.weight.zero_().scatter_(1, chosen, torch.randn(chosen.shape))
        layer.bias.zero_()
    return layer
