"""Characters as a closed set of classes, with drawings to train on, to choose architectures by, and for the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from experiments.run.schema import key
from experiments.studies import characters
from experiments.studies.characters import Examples
from metagrad.tasks.omniglot.splits import NUM_DRAWERS, SPLITS

SPLIT = "small1"
NUM_CHARACTERS = len(SPLITS[SPLIT].characters)


@dataclass
class DataConfig:
    """Characters, and drawings of each."""

    characters: int = key("Classes, drawn with the seed.")
    train: int = key("Drawings of each that weights are trained on in the search.")
    validation: int = key("Drawings that architectures are chosen by; what remains of 20 is for the test.")
    size: int = key("Pixels along a side of an image.")


class Data(NamedTuple):
    """The parts that a search and the training of what it finds are given: images `[n, 1, size, size]`."""

    train: Examples
    validation: Examples
    both: Examples
    test: Examples


def load(config: DataConfig, seed: int) -> Data:
    """Draw the characters of a seed, and which drawings are for what."""
    source = torch.Generator().manual_seed(seed)
    images = characters.load(
        SPLIT,
        config.characters,
        generator=source,
        key="search: data.characters",
        size=config.size,
        resize="area",
    )
    order = torch.rand(config.characters, NUM_DRAWERS, generator=source).argsort(1)
    images = images[torch.arange(config.characters)[:, None], order].unsqueeze(2)
    kept = config.train + config.validation
    train, validation = characters.by_drawers(images, config.train, config.validation)
    both, test = characters.by_drawers(images, kept, NUM_DRAWERS - kept)
    return Data(train, validation, both, test)
