"""Omniglot's characters as a fixed set of classes, with images split by writer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import metagrad as mg
from metagrad.tasks.omniglot.dataset import MAX_LEVEL


class Examples(NamedTuple):
    """Inputs ``[n, ...]`` and targets, which are mostly classes ``[n]``."""

    x: Tensor
    y: Tensor

    def at(self, index: Tensor) -> Examples:
        """Return the examples at some indices."""
        return Examples(self.x[index], self.y[index])

    def and_also(self, other: Examples) -> Examples:
        """Return these examples followed by other examples."""
        return Examples(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]))

    def batches(self, size: int, seed: int) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return whole batches. Every pass over the examples has a new order."""
        source = torch.Generator().manual_seed(seed)
        data = TensorDataset(self.x, self.y)
        return DataLoader(data, min(size, len(self.y)), shuffle=True, drop_last=True, generator=source)  # type: ignore[reportReturnType]


def load(
    split: str,
    count: int | None = None,
    *,
    generator: torch.Generator | None = None,
    key: str = "",
    **options: Any,
) -> Tensor:
    """Return the ink of characters, ``[characters, 20, size, size]``, 1 on a ground of 0.

    Args:
        split: A split of :class:`metagrad.tasks.Omniglot`.
        count: The number of characters. None for all characters.
        generator: Samples the characters. Without a generator they are the first characters.
        key: The key of the count in the configuration, for the error.
        **options: Further options of :class:`metagrad.tasks.Omniglot`: size, root, download. The default of resize is
            area.

    Raises:
        ValueError: The files are not there, or there are fewer characters.
    """
    tasks = mg.tasks.Omniglot(split=split, rotations=False, **{"resize": "area", **options})
    if count is not None and count > tasks.num_classes:
        raise ValueError(f"{key} must be at most {tasks.num_classes}, got {count}.")
    if generator is None:
        return tasks.images[:count].float() / MAX_LEVEL
    return tasks.images[torch.randperm(tasks.num_classes, generator=generator)[:count]].float() / MAX_LEVEL


def by_drawers(images: Tensor, *drawers: int, classes: Tensor | None = None) -> list[Examples]:
    """Split images by writer, so that no writer is in two parts.

    Args:
        images: Or features, ``[characters, people, ...]``.
        *drawers: Number of writers in each part, in their order.
        classes: The classes of the characters. By default each character is a class.

    Example:
        >>> train, test = by_drawers(torch.arange(8).view(2, 4), 3, 1)
        >>> train.x, test.x, test.y
        (tensor([0, 1, 2, 4, 5, 6]), tensor([3, 7]), tensor([0, 1]))
    """
    if classes is None:
        classes = torch.arange(len(images), device=images.device)
    parts = images[:, : sum(drawers)].split(drawers, 1)
    return [Examples(part.flatten(0, 1), classes.repeat_interleave(part.shape[1])) for part in parts]
