"""Characters as a closed set of classes, with drawings to train on, to choose architectures by, and for the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from experiments.schema import key
from metagrad.tasks import Omniglot

NUM_DRAWINGS, NUM_CHARACTERS = 20, 136  # in Omniglot's first small set
MAX_LEVEL = 255


@dataclass
class DataConfig:
    """Characters, and drawings of each."""

    characters: int = key("Classes, drawn with the seed.")
    train: int = key("Drawings of each that weights are trained on in the search.")
    validation: int = key("Drawings that architectures are chosen by; what remains of 20 is for the test.")
    size: int = key("Pixels along a side of an image.")


class Examples(NamedTuple):
    """Images `[n, 1, size, size]` and their classes `[n]`."""

    x: Tensor
    y: Tensor

    def batches(self, size: int, seed: int) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return whole batches, in another order in every pass."""
        source = torch.Generator().manual_seed(seed)
        data = TensorDataset(self.x, self.y)
        return DataLoader(data, min(size, len(self.y)), shuffle=True, drop_last=True, generator=source)  # type: ignore[reportReturnType]


class Data(NamedTuple):
    """The parts that a search and the training of what it finds are given."""

    train: Examples
    validation: Examples
    both: Examples
    test: Examples


def load(config: DataConfig, seed: int) -> Data:
    """Draw the characters of a seed, and which drawings are for what."""
    source = torch.Generator().manual_seed(seed)
    tasks = Omniglot(split="small1", rotations=False, size=config.size, resize="area")
    chosen = torch.randperm(NUM_CHARACTERS, generator=source)[: config.characters]
    order = torch.rand(config.characters, NUM_DRAWINGS, generator=source).argsort(1)
    images = tasks.images[chosen[:, None], order].float().unsqueeze(2) / MAX_LEVEL

    def part(first: int, end: int) -> Examples:
        x = images[:, first:end]
        return Examples(x.flatten(0, 1), torch.arange(len(x)).repeat_interleave(x.shape[1]))

    kept = config.train + config.validation
    return Data(part(0, config.train), part(config.train, kept), part(0, kept), part(kept, NUM_DRAWINGS))
