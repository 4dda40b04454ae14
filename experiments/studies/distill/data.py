"""Alphabets to tell apart: hundreds of drawings of each, of all its characters, by people who drew no others."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from experiments.studies import characters
from experiments.studies.characters import Examples
from metagrad.tasks.omniglot.splits import BACKGROUND


class Alphabets(NamedTuple):
    """Images ``[n, 1, 28, 28]`` by three groups of people, and the names of the alphabets that are the classes."""

    train: Examples
    val: Examples
    test: Examples
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
    images = characters.load("background", resize="area").unsqueeze(2)
    by_name = dict(zip(BACKGROUND, images.split(list(BACKGROUND.values())), strict=True))
    names = sorted(BACKGROUND, key=lambda name: -BACKGROUND[name])[:classes]
    labels = torch.arange(classes).repeat_interleave(torch.tensor([BACKGROUND[name] for name in names]))
    drawn = torch.cat([by_name[name] for name in names])
    return Alphabets(*characters.by_drawers(drawn, *drawers, classes=labels), names=names)
