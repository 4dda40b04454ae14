"""Alphabets to tell apart: hundreds of drawings of each, of all its characters, by people who drew no others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.tasks import Omniglot
from metagrad.tasks.omniglot.splits import BACKGROUND

DRAWERS = 20  # of every character
MAX_LEVEL = 255


class Drawings(NamedTuple):
    """Images ``[n, 1, 28, 28]``, ink = 1 on 0, and their classes ``[n]``."""

    x: Tensor
    y: Tensor


class Alphabets(NamedTuple):
    """Drawings by three groups of people, and the names of the alphabets that are the classes."""

    train: Drawings
    val: Drawings
    test: Drawings
    names: list[str]


@functools.cache
def load(classes: int, *drawers: int) -> Alphabets:
    """Return the alphabets of the background set that have most characters, drawings split by who drew them.

    Args:
        classes: How many alphabets.
        *drawers: How many of the 20 drawers of each character are for training, validation and test.

    Raises:
        ValueError: The files are not there, or there are fewer alphabets.
    """
    if classes > len(BACKGROUND):
        raise ValueError(f"distill: classes must be at most {len(BACKGROUND)}, got {classes}.")
    images = Omniglot(split="background", rotations=False, resize="area").images
    by_name = dict(zip(BACKGROUND, images.split(list(BACKGROUND.values())), strict=True))
    names = sorted(BACKGROUND, key=lambda name: -BACKGROUND[name])[:classes]
    ends = torch.tensor([0, *drawers]).cumsum(0).tolist()
    train, val, test = (
        together([by_name[name][:, first:last].flatten(0, 1) for name in names])
        for first, last in pairwise(ends)
    )
    return Alphabets(train, val, test, names)


def together(images: Sequence[Tensor]) -> Drawings:
    """Make drawings of the levels of each class, ``[drawings, 28, 28]`` uint8."""
    labels = [torch.full((len(own),), label) for label, own in enumerate(images)]
    return Drawings(torch.cat(list(images)).unsqueeze(1).float() / MAX_LEVEL, torch.cat(labels))
