r"""Biases and matrix factorization by alternating least squares, and a new student folded in.

.. math:: \hat y_{ui} = \mu + b_u + b_i + p_u \cdot q_i

Without factors these are the biases of student and lecturer, shrunk towards zero. Koren, Bell, Volinsky, "Matrix
factorization techniques for recommender systems", IEEE Computer 42:30, 2009: biases, and alternating least squares.
A new student has the least squares solution that the students of training had, given what is known of the lecturers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.tasks import Examples


@dataclass(frozen=True)
class Ridge:
    """The penalties of one side, in ratings: as many as these count as much as zero does.

    Attributes:
        bias: Of the bias.
        factors: Of each factor.
    """

    bias: float
    factors: float

    def solve(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return weights ``[groups, rank + 1]`` of features ``[groups, n, rank + 1]``, the last of which is 1."""
        gram = features.mT @ features
        return self.solve_normal(gram, (features.mT @ targets.unsqueeze(-1)).squeeze(-1))

    def solve_normal(self, gram: Tensor, right: Tensor) -> Tensor:
        """Return weights, of normal equations without the penalties."""
        penalties = torch.full((right.shape[-1],), self.factors).to(right)
        penalties[-1] = self.bias
        return torch.linalg.solve(gram + penalties.diag(), right)


@dataclass(frozen=True)
class Factors:
    """What is known of the lecturers.

    Attributes:
        mean: Of all ratings.
        items: The factors and the bias of each lecturer, ``[lecturers, rank + 1]``.
        ridge: Of a student.
    """

    mean: float
    items: Tensor
    ridge: Ridge

    def predict(self, support: Examples, x: dict[str, Tensor]) -> Tensor:
        """Fold students in, ``[tasks, shots]``, and return scores ``[tasks, n, 1]``."""
        features, offsets = self._of(support.x["lecturer"])
        students = self.ridge.solve(features, support.y.squeeze(-1) - offsets)
        features, offsets = self._of(x["lecturer"])
        return offsets.unsqueeze(-1) + features @ students.unsqueeze(-1)

    def _of(self, lecturers: Tensor) -> tuple[Tensor, Tensor]:
        found = self.items[lecturers]
        return _with_one(found), self.mean + found[..., -1]


def factorize(
    ratings: dict[str, Tensor],
    lecturers: int,
    rank: int,
    *,
    student: Ridge,
    lecturer: Ridge,
    sweeps: int = 10,
) -> Factors:
    """Fit students and lecturers in turns; rank 0 fits their biases alone."""
    scores = ratings["score"].float()
    mean = scores.mean()
    sides = ratings["student"].unique(return_inverse=True)[1], ratings["lecturer"]
    sizes = int(sides[0].max()) + 1, lecturers
    weights = [torch.zeros(size, rank + 1) for size in sizes]
    torch.nn.init.normal_(weights[1][:, :rank], std=0.1)
    for own in (0, 1) * sweeps:
        other = weights[1 - own][sides[1 - own]]
        features, targets = _with_one(other), scores - mean - other[:, -1]
        gram = torch.zeros(sizes[own], rank + 1, rank + 1)
        gram.index_add_(0, sides[own], features.unsqueeze(2) * features.unsqueeze(1))
        right = torch.zeros(sizes[own], rank + 1).index_add_(0, sides[own], features * targets[:, None])
        weights[own] = (student, lecturer)[own].solve_normal(gram, right)
    return Factors(mean.item(), weights[1], student)


def _with_one(weights: Tensor) -> Tensor:
    """Put 1 in the place of the bias: its feature on the other side."""
    return torch.cat([weights[..., :-1], torch.ones_like(weights[..., -1:])], -1)
