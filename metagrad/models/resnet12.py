"""The twelve-layer residual network of few-shot image classification."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from metagrad.core.checks import check_choice, check_count, refuse
from metagrad.models.conv4 import NORMS, Images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SLOPE = 0.1  # slope of the leaky ReLU for negative inputs


class ResNet12(nn.Sequential):
    r"""Image classifier with four residual blocks of three 3x3 convolutions. Each block halves the image.

    .. math:: y = \mathrm{pool}(\sigma(N(C_3\,\sigma(N(C_2\,\sigma(N(C_1 x)))))) + N(C_0 x)))

    with 1x1 convolutions :math:`C_0` and leaky ReLUs :math:`\sigma` of slope 0.1. The input of the linear layer is
    the mean of the features over space. There is no DropBlock.

    The model is a sequence of `images`, `blocks`, `features` and `head`. The module `images` checks shapes, and
    `features` computes the mean. First and second derivatives are correct. For third derivatives, choose `norm`
    as for :class:`Conv4`.

    Args:
        ways: Number of classes.
        in_channels: Number of channels of an image.
        widths: Number of filters of each block. The default is from Lee et al. Oreshkin et al. use
            `(64, 128, 256, 512)`. A quarter of these widths is enough for Omniglot.
        norm: `"batch"` (batch statistics, transductive), `"running"`, `"group"` or `"none"`, as in :class:`Conv4`.

    Raises:
        ValueError: A size is less than 1, there are no widths, or the norm is unknown. In a call: the input does not
            have the shape [batch, in_channels, height, width], or it is too small for the blocks.

    Examples:
        >>> import torch
        >>> model = ResNet12(5, widths=(8, 16, 32, 64))
        >>> model(torch.zeros(10, 1, 28, 28)).shape
        torch.Size([10, 5])
        >>> sum(p.numel() for p in ResNet12(5, in_channels=3).parameters())
        12427525

    References:
        Oreshkin et al., TADAM: Task dependent adaptive metric for improved few-shot learning, 2018.
        Lee, Maji, Ravichandran, Soatto, Meta-Learning with Differentiable Convex Optimization, 2019, section 4.1.
    """

    def __init__(
        self,
        ways: int,
        in_channels: int = 1,
        widths: Sequence[int] = (64, 160, 320, 640),
        *,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        check_count("ResNet12(ways)", ways)
        check_count("ResNet12(in_channels)", in_channels)
        if not widths or min(widths) < 1:
            refuse("ResNet12(widths)", "one or more ints of 1 or more", list(widths))
        check_choice("ResNet12(norm)", norm, NORMS)
        self.images: Images = Images("ResNet12", in_channels, least=2 ** len(widths))
        self.blocks: nn.Sequential = nn.Sequential(
            *(_Block(a, b, norm) for a, b in pairwise([in_channels, *widths]))
        )
        self.features: nn.Sequential = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.head: nn.Linear = nn.Linear(widths[-1], ways)


class _Block(nn.Module):
    def __init__(self, in_channels: int, width: int, norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (in_channels, width, width):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=False),
                NORMS[norm](width),
                nn.LeakyReLU(SLOPE),
            ]
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential(nn.Conv2d(in_channels, width, 1, bias=False), NORMS[norm](width))

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.leaky_relu(self.residual(x) + self.shortcut(x), SLOPE), 2)
