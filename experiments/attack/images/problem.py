"""Characters of Omniglot as a closed set of classes, and the network that tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg

if TYPE_CHECKING:
    from experiments.attack.images.schema import DataConfig

MAX_LEVEL = 255
_SHARPNESS = 5.0  # of softplus: close to ReLU, with curvature


class Images(NamedTuple):
    """Images with their classes.

    Attributes:
        x: ``[n, 1, size, size]``, ink = 1 on a ground of 0.
        y: ``[n]``.
    """

    x: Tensor
    y: Tensor

    def at(self, index: Tensor) -> Images:
        """Return some of them."""
        return Images(self.x[index], self.y[index])


def characters(config: DataConfig, seed: int) -> tuple[Images, Images]:
    """Draw characters and the people whose drawings are held out; return what is trained on, and the test images."""
    images = mg.tasks.Omniglot(split="background", rotations=False, resize=config.resize).images
    generator = torch.Generator().manual_seed(seed)
    chosen = images[torch.randperm(len(images), generator=generator)[: config.classes]]
    chosen = chosen[:, torch.randperm(chosen.shape[1], generator=generator)].float() / MAX_LEVEL
    parts = chosen.split([chosen.shape[1] - config.held_out, config.held_out], 1)
    train, test = (
        Images(part.flatten(0, 1)[:, None], torch.arange(len(part)).repeat_interleave(part.shape[1]))
        for part in parts
    )
    return train, test


def network(classes: int, width: int, size: int) -> nn.Sequential:
    """Make three convolutions that halve the image, and a linear layer; smooth, so that it has second derivatives."""
    channels = [(1, width, 5), (width, 2 * width, 3), (2 * width, 2 * width, 3)]
    blocks = [
        layer
        for before, after, kernel in channels
        for layer in (
            nn.Conv2d(before, after, kernel, stride=2, padding=kernel // 2),
            nn.Softplus(_SHARPNESS),
        )
    ]
    final = -(-size // 2 ** len(channels))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2 * width * final**2, classes))


def shifted(x: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Move each image by up to so many pixels along both axes."""
    size, places = x.shape[-1], 2 * most + 1
    windows = F.pad(x, (most,) * 4).unfold(2, size, 1).unfold(3, size, 1)
    down, right = torch.randint(places, (2, len(x)), generator=generator)
    return windows[torch.arange(len(x)), :, down, right]


def is_right(model: nn.Module, images: Images) -> Tensor:
    """Say which images are classified right, ``[n]``."""
    with torch.no_grad():
        return model(images.x).argmax(1) == images.y
