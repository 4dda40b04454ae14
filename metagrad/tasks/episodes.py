"""Which classes and which of their members make a few-shot task."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Episodes(NamedTuple):
    """Hold the choices of a batch of few-shot tasks.

    Args:
        classes: Distinct classes of a task, [tasks, ways].
        members: Distinct members of each of those classes, [tasks, ways, examples].
    """

    classes: Tensor
    members: Tensor


def draw_episodes(
    num_tasks: int,
    *,
    num_classes: int,
    class_size: int,
    ways: int,
    examples: int,
    generator: torch.Generator | None,
    device: torch.device,
) -> Episodes:
    """Draw classes without replacement for each task, and members without replacement for each class.

    The positions of the k largest of n independent uniform keys are a uniform draw of k out of n in uniform
    order, so that a whole batch is two calls of `topk`. Keys are float64: ties are then too rare to favour a
    class.

    Args:
        num_tasks: Number of tasks.
        num_classes: Number of classes to choose from.
        class_size: Number of members that every class has.
        ways: Classes of a task.
        examples: Members drawn from each class, support and query together.
        generator: Source of the random numbers; None is torch's global one.
        device: Where the indices are drawn.

    Returns:
        The choices, int64.
    """
    classes = _distinct((num_tasks, num_classes), ways, generator, device)
    members = _distinct((num_tasks, ways, class_size), examples, generator, device)
    return Episodes(classes, members)


def _distinct(
    shape: tuple[int, ...], count: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    keys = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    return keys.topk(count, dim=-1).indices
