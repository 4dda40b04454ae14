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

SLOPE = 0.1  # of the leaky ReLU for negative inputs


class ResNet12(nn.Sequential):
    r"""Classify images by four residual blocks of three 3x3 convolutions, each of which halves the image.

    .. math:: y = \mathrm{pool}(\sigma(N(C_3\,\sigma(N(C_2\,\sigma(N(C_1 x)))))) + N(C_0 x)))

    with 1x1 convolutions :math:`C_0` and leaky ReLUs :math:`\sigma` of slope 0.1; a linear layer sees the mean of the
    features over space. There is no DropBlock, which would draw other masks whenever a step is recomputed.

    A chain: a check of the shape, `blocks`, the mean (`features`) and `head`.

    Args:
        ways: Number of classes.
        in_channels: Channels of an image.
        widths: Filters of each block: of Lee et al. by default, `(64, 128, 256, 512)` of Oreshkin et al., and a
            quarter of that is enough for Omniglot.
        norm: As of :class:`Conv4`: `"batch"` (by the statistics of the batch at hand, transductive), `"group"` or
            `"none"`.

    It is differentiable twice and runs under `torch.vmap`, as :class:`Conv4` does; what is said there of third
    derivatives through batch normalisation holds here.

    Raises:
        ValueError: For sizes below one, no widths, or an unknown norm; when it is called on anything but images
            [batch, in_channels, height, width] large enough to be halved by every block.

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
