"""Items by the class or the task that they belong to, and draws of them without replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Groups:
    """The members of groups of unequal size.

    Args:
        codes: The group of each item, [items] int64; negative are items of no group.
        num_groups: How many groups there are.
        device: Where members are drawn.
    """

    def __init__(self, codes: Tensor, num_groups: int, device: torch.device) -> None:
        kept = (codes >= 0).nonzero().squeeze(1)
        order = codes[kept].argsort(stable=True)
        sizes = torch.bincount(codes[kept], minlength=num_groups)
        self.num_groups: int = num_groups
        self.largest: int = int(sizes.max())
        self.items: Tensor = kept[order].to(device)
        self.sizes: Tensor = sizes.to(device)
        self.starts: Tensor = (sizes.cumsum(0) - sizes).to(device)

    @property
    def device(self) -> torch.device:
        """Where members are drawn."""
        return self.sizes.device

    def draw_members(self, groups: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw distinct members of groups; of a group with fewer, what follows all its members means nothing.

        Args:
            groups: Numbers of groups, [...].
            count: How many members of each, at most as many as the largest group has.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            Items, [..., count] int64.
        """
        members = draw_distinct(self.sizes[groups], self.largest, count, generator)
        places = self.starts[groups].unsqueeze(-1) + members
        return self.items[places.clamp(max=len(self.items) - 1)]


def draw_distinct(sizes: Tensor, largest: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw distinct numbers below the sizes; after all of them come numbers that are not below.

    The positions of the k largest of n independent uniform keys are a uniform draw of k out of n in uniform
    order, so that a whole batch is one call of `topk`. Keys are float64: ties are then too rare to favour
    anything.

    Args:
        sizes: [...], int64.
        largest: The largest of these, or more.
        count: How many are drawn for each.
        generator: Source of the random numbers; None is torch's global one.

    Returns:
        Numbers, [..., count] int64.
    """
    shape = (*sizes.shape, largest)
    keys = torch.rand(shape, generator=generator, dtype=torch.float64, device=sizes.device)
    beyond = torch.arange(largest, device=sizes.device) >= sizes.unsqueeze(-1)
    return keys.masked_fill_(beyond, -1.0).topk(count, dim=-1).indices
