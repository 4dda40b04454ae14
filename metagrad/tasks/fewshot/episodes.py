"""Random draws of the classes and items of few-shot tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from metagrad.tasks._groups import Groups, draw_distinct
from metagrad.tasks.batch import PADDING

if TYPE_CHECKING:
    from torch import Tensor


Count = int | tuple[int, int]
"""A number, or the bounds of a uniform random number, both included."""


class Composition(NamedTuple):
    """The numbers of classes and examples of a task.

    Args:
        ways: Number of classes.
        shots: Number of support examples of each class.
        queries: Number of query examples of each class.
    """

    ways: Count
    shots: Count
    queries: int

    @property
    def is_balanced(self) -> bool:
        """True if all tasks have the same size, so that no padding is needed."""
        return isinstance(self.ways, int) and isinstance(self.shots, int)

    @property
    def fewest_examples(self) -> int:
        """Minimum number of items of a class."""
        return (self.shots if isinstance(self.shots, int) else self.shots[0]) + self.queries

    @property
    def fewest_ways(self) -> int:
        """Minimum number of classes."""
        return self.ways if isinstance(self.ways, int) else self.ways[0]

    def most_ways(self, num_classes: int) -> int:
        """Return the maximum number of classes of a task."""
        return self.ways if isinstance(self.ways, int) else min(self.ways[1], num_classes)

    def most_examples(self, largest: int) -> int:
        """Return the maximum number of items that a task takes from a class. `largest` is the largest class size."""
        most = self.shots if isinstance(self.shots, int) else self.shots[1]
        return min(most + self.queries, largest)


class Members(NamedTuple):
    """The support or query items of a batch of tasks.

    Args:
        items: Positions in the data set, [tasks, examples] int64. Padding is -1.
        labels: Labels from 0 to ways - 1, [tasks, examples] int64. Padding is -100.
    """

    items: Tensor
    labels: Tensor


def draw_episodes(
    groups: Groups, num_tasks: int, composition: Composition, generator: torch.Generator | None
) -> tuple[Members, Members]:
    """Draw the support and query items of tasks.

    The classes of a task are drawn without replacement, and so are the items of a class.

    Args:
        groups: The items of each class.
        num_tasks: Number of tasks.
        composition: Numbers of classes and examples.
        generator: Source of random numbers. None means torch's global generator.
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
    """Draw the numbers of support and query examples, [tasks, ways] each. They are zero for unused classes."""
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
    """Label items [tasks, ways, examples] by the position of their class."""
    num_tasks, ways, examples = items.shape
    labels = torch.arange(ways, device=items.device).repeat_interleave(examples)
    return Members(items.flatten(1), labels.repeat(num_tasks, 1))


def _kept(items: Tensor, keep: Tensor) -> Members:
    """Label the kept items of [tasks, ways, examples], and pad shorter tasks at their end."""
    members, keep = _labelled(items), keep.flatten(1)
    order = keep.logical_not().byte().argsort(dim=1, stable=True)[:, : int(keep.sum(1).max())]
    is_real = keep.gather(1, order)
    return Members(
        members.items.gather(1, order).where(is_real, -1),
        members.labels.gather(1, order).where(is_real, PADDING),
    )
