"""Characters of Omniglot as a closed set of classes, and the network that tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.studies import characters as omniglot
from experiments.studies.characters import Examples, by_drawers
from metagrad.tasks.omniglot.splits import NUM_DRAWERS

if TYPE_CHECKING:
    from experiments.studies.attack_images.schema import DataConfig

_SHARPNESS = 5.0  # of softplus: close to ReLU, with curvature


def characters(config: DataConfig, seed: int) -> tuple[Examples, Examples]:
    """Draw characters and the people whose drawings are held out; return what is trained on, and the test images."""
    generator = torch.Generator().manual_seed(seed)
    key = "attack_images: data.classes"
    images = omniglot.load("background", config.classes, generator=generator, key=key, resize=config.resize)
    order = torch.randperm(NUM_DRAWERS, generator=generator)
    train, test = by_drawers(images[:, order].unsqueeze(2), NUM_DRAWERS - config.held_out, config.held_out)
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


def is_right(model: nn.Module, images: Examples) -> Tensor:
    """Say which images are classified right, ``[n]``."""
    with torch.no_grad():
        return model(images.x).argmax(1) == images.y
