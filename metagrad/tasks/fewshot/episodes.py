"""Which classes, and which of their members, make few-shot tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from metagrad.tasks._groups import Groups, draw_distinct
from metagrad.tasks.batch import PADDING

if TYPE_CHECKING:
    from torch import Tensor


Count = int | tuple[int, int]
"""A number, or the lowest and the highest of uniform ones."""


class Composition(NamedTuple):
    """Say how many classes a task has, and how many examples of each.

    Args:
        ways: Classes of a task.
        shots: Support examples of each class.
        queries: Query examples of each class.
    """

    ways: Count
    shots: Count
    queries: int

    @property
    def is_balanced(self) -> bool:
        """Whether all tasks have the same numbers of examples, so that nothing is padded."""
        return isinstance(self.ways, int) and isinstance(self.shots, int)

    @property
    def fewest_examples(self) -> int:
        """How many members a class must have."""
        return (self.shots if isinstance(self.shots, int) else self.shots[0]) + self.queries

    @property
    def fewest_ways(self) -> int:
        """How many classes there must be."""
        return self.ways if isinstance(self.ways, int) else self.ways[0]

    def most_ways(self, num_classes: int) -> int:
        """How many classes a task has at most."""
        return self.ways if isinstance(self.ways, int) else min(self.ways[1], num_classes)

    def most_examples(self, largest: int) -> int:
        """How many members of a class a task has at most, where the largest class has so many."""
        most = self.shots if isinstance(self.shots, int) else self.shots[1]
        return min(most + self.queries, largest)


class Members(NamedTuple):
    """Hold the members of a part (support or query) of a batch of tasks.

    Args:
        items: Positions in the data set, [tasks, examples] int64; -1 is padding.
        labels: 0 to ways - 1, [tasks, examples] int64; -100 is padding.
    """

    items: Tensor
    labels: Tensor


def draw_episodes(
    groups: Groups, num_tasks: int, composition: Composition, generator: torch.Generator | None
) -> tuple[Members, Members]:
    """Draw the support and the query members of tasks.

    Classes are drawn without replacement for each task, and members without replacement for each class.

    Args:
        groups: The members of each class.
        num_tasks: Number of tasks.
        composition: How many classes and members.
        generator: Source of the random numbers; None is torch's global one.
    """
    classes_of_all = torch.full((num_tasks,), groups.num_groups, device=groups.device)
    most_ways = composition.most_ways(groups.num_groups)
    classes = draw_distinct(classes_of_all, groups.num_groups, most_ways, generator)
    if composition.is_balanced:
        items = groups.draw_members(classes, composition.fewest_examples, generator)
        sizes = [composition.fewest_examples - composition.queries, composition.queries]
        support, query = map(_labelled, items.split_with_sizes(sizes, -1))
        return support, query
    shots, queries = (
        count.unsqueeze(-1) for count in _draw_counts(groups.sizes[classes], composition, generator)
    )
    items = groups.draw_members(classes, composition.most_examples(groups.largest), generator)
    place = torch.arange(items.shape[-1], device=groups.device)
    return _kept(items, place < shots), _kept(items, (place >= shots) & (place < shots + queries))


def _draw_counts(
    sizes: Tensor, composition: Composition, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw how many support and query examples each class has, [tasks, ways] each; zero is no class."""
    num_tasks, most_ways = sizes.shape
    ways = _uniform(composition.ways, (num_tasks, 1), generator, sizes.device, most=most_ways)
    is_real = torch.arange(most_ways, device=sizes.device) < ways
    shots = _uniform(composition.shots, (num_tasks, most_ways), generator, sizes.device)
    queries = torch.full_like(shots, composition.queries)
    return torch.minimum(shots, sizes - queries) * is_real, queries * is_real


def _uniform(
    count: Count,
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    device: torch.device,
    most: int | None = None,
) -> Tensor:
    if isinstance(count, int):
        return torch.full(shape, count, device=device)
    low, high = count[0], count[1] if most is None else min(count[1], most)
    return torch.randint(low, high + 1, shape, generator=generator, device=device)


def _labelled(items: Tensor) -> Members:
    """Label items [tasks, ways, examples] by their class."""
    num_tasks, ways, examples = items.shape
    labels = torch.arange(ways, device=items.device).repeat_interleave(examples)
    return Members(items.flatten(1), labels.repeat(num_tasks, 1))


def _kept(items: Tensor, keep: Tensor) -> Members:
    """Label those items [tasks, ways, examples] that are kept, and pad tasks that have fewer at their end."""
    members, keep = _labelled(items), keep.flatten(1)
    order = keep.logical_not().byte().argsort(dim=1, stable=True)[:, : int(keep.sum(1).max())]
    is_real = keep.gather(1, order)
    return Members(
        members.items.gather(1, order).where(is_real, -1),
        members.labels.gather(1, order).where(is_real, PADDING),
    )
