"""The four-block convolutional network of few-shot image classification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from metagrad.core.checks import check_choice, check_count
from metagrad.models.context import FiLM, new_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUM_BLOCKS = 4
POOLS = ("max", "stride")
HEADS = ("flatten", "mean")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
    "running": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(math.gcd(8, channels), channels),
    "none": lambda channels: nn.Identity(),
}


class Conv4(nn.Sequential):
    """Image classifier with four blocks of 3x3 convolution, normalization, ReLU and downsampling by 2.

    Pooling comes before the ReLU. The result and the gradients are the same as in the usual order, because ReLU is
    monotonic. A meta-step that runs its tasks sequentially then needs a quarter less memory.

    The model is a sequence of `images`, `blocks`, `features` and `head`. The module `images` checks shapes. The model
    works with `torch.func.functional_call` and `torch.vmap`. Its first and second derivatives are correct, but
    PyTorch 2.13 computes wrong third derivatives of `nn.BatchNorm2d`. If you need them, use `norm="group"` or call
    the model in `metagrad.models.composite_norms()`.

    Args:
        ways: Number of classes.
        in_channels: Number of channels of an image.
        hidden: Number of filters of each block.
        image_size: Height and width of an image in pixels.
        pool: `"max"` for a 2x2 max-pool that drops an odd row and column (28 -> 14 -> 7 -> 3 -> 1). `"stride"` for
            convolutions with stride 2 (28 -> 14 -> 7 -> 4 -> 2), which need about a quarter of the multiplications.
        norm: `"batch"` for batch statistics, also in evaluation. Then the predictions of a batch depend on each
            other (transductive). `"running"` for running statistics, which `norm=` of an algorithm controls.
            `"group"` for gcd(8, hidden) groups of channels. `"none"` for no normalization.
        head: Input of the linear layer: `"flatten"` for all features, `"mean"` for their mean over space.
        context: Length of a context vector, the parameter `context`. A `FiLM` layer scales the normalized channels of
            each block with it. 0 means no context.

    Raises:
        ValueError: A size is less than 1, a choice is unknown, or an image is too small to be halved four times. In a
            call: the input does not have the shape [batch, in_channels, image_size, image_size].

    Examples:
        >>> import torch
        >>> model = Conv4(5)
        >>> model(torch.zeros(10, 1, 28, 28)).shape
        torch.Size([10, 5])
        >>> sum(p.numel() for p in model.parameters())
        112261

    References:
        Vinyals et al., Matching Networks for One Shot Learning, 2016, section 4.1.1.
        Finn, Abbeel, Levine, Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, 2017,
        section 5.2 and appendix A, with `pool="stride", head="mean"` as its code for Omniglot has it.
        Zintgraf et al., Fast Context Adaptation via Meta-Learning, 2019, section 5.3, for the context.
    """

    def __init__(
        self,
        ways: int,
        in_channels: int = 1,
        hidden: int = 64,
        image_size: int = 28,
        *,
        pool: str = "max",
        norm: str = "batch",
        head: str = "flatten",
        context: int = 0,
    ) -> None:
        super().__init__()
        for name, size in (("ways", ways), ("in_channels", in_channels), ("hidden", hidden)):
            check_count(f"Conv4({name})", size)
        check_count("Conv4(image_size)", image_size)
        for name, value, choices in (("pool", pool, POOLS), ("norm", norm, NORMS), ("head", head, HEADS)):
            check_choice(f"Conv4({name})", value, choices)
        final_size = _final_size(image_size, pool)
        channels = [in_channels] + [hidden] * (NUM_BLOCKS - 1)
        self.context: nn.Parameter | None = new_context("Conv4(..., context)", context) if context else None
        self.images: Images = Images("Conv4", in_channels, image_size)
        blocks = [_make_block(c, hidden, pool, norm, self.context) for c in channels]
        self.blocks: nn.Sequential = nn.Sequential(*blocks)
        mean = [nn.AdaptiveAvgPool2d(1)] if head == "mean" else []
        self.features: nn.Sequential = nn.Sequential(*mean, nn.Flatten(1))
        self.head: nn.Linear = nn.Linear(hidden * (1 if head == "mean" else final_size**2), ways)


class Images(nn.Module):
    """Raise ``ValueError`` unless images have the expected shape, or a minimum height and width."""

    def __init__(self, call: str, channels: int, size: int | None = None, *, least: int = 1) -> None:
        super().__init__()
        self.call, self.channels, self.size, self.least = call, channels, size, least

    def forward(self, x: Tensor) -> Tensor:
        """Return the images."""
        least = self.least if self.size is None else self.size
        is_small = x.dim() == 4 and min(x.shape[2:]) < least
        is_large = self.size is not None and x.shape[2:] != (self.size, self.size)
        if x.dim() != 4 or x.shape[1] != self.channels or is_small or is_large:
            size = "height, width" if self.size is None else f"{self.size}, {self.size}"
            least = f" with sides of at least {self.least}" if self.size is None else ""
            raise ValueError(
                f"{self.call}(x): x must be [batch, {self.channels}, {size}]{least}, got {list(x.shape)}."
            )
        return x


def _make_block(
    in_channels: int, hidden: int, pool: str, norm: str, context: nn.Parameter | None
) -> nn.Sequential:
    stride = 2 if pool == "stride" else 1
    convolution = nn.Conv2d(in_channels, hidden, kernel_size=3, stride=stride, padding=1)
    modulation = [] if context is None else [FiLM(context, hidden)]
    pooling = [nn.MaxPool2d(2)] if pool == "max" else []
    return nn.Sequential(convolution, NORMS[norm](hidden), *modulation, *pooling, nn.ReLU())


def _final_size(image_size: int, pool: str) -> int:
    if pool == "stride":
        return math.ceil(image_size / 2**NUM_BLOCKS)
    if image_size < 2**NUM_BLOCKS:
        raise ValueError(
            f"Conv4: image_size must be at least {2**NUM_BLOCKS} to be halved by four max-pools, "
            f"got {image_size}. "
            'Take larger images, or pool="stride".'
        )
    return image_size // 2**NUM_BLOCKS
