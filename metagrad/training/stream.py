"""Order of the examples and random numbers of a training run, as functions of the seed and the step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from metagrad.core.capture import entropy
from metagrad.core.checks import refuse
from metagrad.core.tree import Tree, dissect, plain_dicts, tree_leaves


class Stream:
    """The mini-batch of each step. The order of an epoch depends on the seed and the epoch number.

    Args:
        size: Number of examples.
        batch_size: Examples in a mini-batch. The last mini-batch of an epoch can be smaller.
        steps: Number of steps.
        seed: Seed of the order.
        order: Indices of the examples of each step, ``[steps, batch]``, instead of the shuffled order.
    """

    def __init__(
        self, size: int, batch_size: int, steps: int, seed: int, order: Tensor | None = None
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.steps = steps
        self.seed = seed
        self.order = order
        self._epoch: tuple[int, Tensor] | None = None

    def rows(self, t: int) -> Tensor:
        """Return the indices of the examples of step ``t``."""
        if self.order is not None:
            return self.order[t]
        epoch, number = divmod(t, self.per_epoch)
        return self._permutation(epoch)[number * self.batch_size : (number + 1) * self.batch_size]

    @property
    def per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return -(-self.size // self.batch_size)

    def _permutation(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(entropy(self.seed, epoch))
            self._epoch = epoch, torch.randperm(self.size, generator=generator)
        return self._epoch[1]


def seed_step(seed: int, t: int, part: int) -> None:
    """Seed the global generators of torch, NumPy and Python for a part of step ``t``."""
    number = entropy(seed, t, part)
    # torch.manual_seed formats a stack trace if CUDA is not in use
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    random.seed(number)
    np.random.seed(number % 2**32)


class Examples:
    """Training examples, accessed by index.

    Args:
        data: A pair ``(x, y)`` of pytrees of tensors whose first axis counts examples, or a map-style dataset of
            pairs.

    Raises:
        TypeError: The data is an iterator or holds objects that are not tensors.
        ValueError: The tensors have different lengths, or there are no examples.
    """

    def __init__(self, data: Any) -> None:
        self.tensors: tuple[Tree, Tree] | None = None
        self.dataset: Any = None
        if isinstance(data, (tuple, list)) and len(data) == 2 and tree_leaves(data):
            self.tensors = pair = plain_dicts(tuple(data))
            self.size = _length(pair)
            self._dissected = dissect(pair)
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self.dataset, self.size = data, len(data)
        else:
            refuse(
                "Training(data)",
                "a pair (x, y) of tensors or a map-style dataset. An iterator or a loader cannot be used, because "
                "steps are repeated by their number",
                type(data).__name__,
                TypeError,
            )
        if not self.size:
            refuse("Training(data)", "at least one example", 0)

    def of(self, tensors: Sequence[Tensor]) -> Examples:
        """Return the same examples with other tensors."""
        return self if self.tensors is None else Examples(self._dissected[1].fill(tensors))

    def batch(self, rows: Tensor) -> tuple[Tree, Tree]:
        """Return the examples at some indices."""
        if self.tensors is not None:
            tensors, structure = self._dissected
            return structure.fill([values.index_select(0, rows.to(values.device)) for values in tensors])
        items = [self.dataset[i] for i in rows.tolist()]
        if not isinstance(items[0], (tuple, list)) or len(items[0]) != 2:
            kind = type(items[0]).__name__
            refuse("Training(data)", "a dataset of pairs (x, y)", f"{kind} items", TypeError)
        x, y = default_collate(items)
        return x, y


def _length(data: tuple[Tree, Tree]) -> int:
    leaves: Sequence[Any] = tree_leaves(data)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            refuse(
                "Training(data)",
                "tensors whose first axis counts examples, such as torch.from_numpy(array)",
                type(leaf).__name__,
                TypeError,
            )
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) > 1:
        refuse("Training(data)", "x and y of the same number of examples", sizes)
    return sizes[0]
