"""Real drawings that stand for all of their class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.studies.characters import Examples


def random(features: Tensor, count: int) -> list[int]:
    """Draw examples at random."""
    return torch.randperm(len(features))[:count].tolist()


def herding(features: Tensor, count: int) -> list[int]:
    """Choose examples one by one, such that the mean of those chosen stays close to the mean of all.

    Welling, "Herding dynamical weights to learn", ICML 2009; for classes of images, Rebuffi et al., "iCaRL", CVPR
    2017, algorithm 4.
    """
    mean, total, found = features.mean(0), torch.zeros_like(features[0]), []
    for number in range(1, count + 1):
        distances = (mean - (total + features) / number).norm(dim=1)
        distances[found] = torch.inf
        found.append(int(distances.argmin()))
        total = total + features[found[-1]]
    return found


def k_center(features: Tensor, count: int) -> list[int]:
    """Choose the example nearest to the mean, then each time the one farthest from all chosen.

    Sener, Savarese, "Active learning for convolutional neural networks: a core-set approach", ICLR 2018, algorithm 1.
    """
    found = [int((features - features.mean(0)).norm(dim=1).argmin())]
    nearest = torch.full((len(features),), torch.inf)
    while len(found) < count:
        nearest = torch.minimum(nearest, (features - features[found[-1]]).norm(dim=1))
        found.append(int(nearest.argmax()))
    return found


CORESETS: dict[str, Callable[[Tensor, int], list[int]]] = {
    "random": random,
    "herding": herding,
    "k_center": k_center,
}


def coreset(name: str, examples: Examples, features: Tensor, per_class: int) -> Examples:
    """Choose as many examples of each class, by their features ``[examples, features]``."""
    chosen = []
    for label in examples.y.unique():
        own = (examples.y == label).nonzero()[:, 0]
        chosen.append(own[CORESETS[name](features[own], per_class)])
    return examples.at(torch.cat(chosen))
