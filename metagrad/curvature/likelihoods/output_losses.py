r"""Curvature of a loss with respect to the output of a model, in closed form: products and random scores.

Every loss here is a negative log-likelihood, :math:`L = \sum_n s_n \ell_n`. The weight :math:`s_n` is the
weight of a datum over the divisor of the mean. Vectors have the shape of the output. Several vectors
have more dimensions in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OutputLoss(ABC):
    """A loss of one output :math:`z` that is the negative log-likelihood of a predictive distribution.

    Attributes:
        output: :math:`z`, the output of the model.
        scale: The weights :math:`s`, in a shape that broadcasts to the shape of ``output``. Zero for ignored
            examples.
        count: Divisor of the mean, already applied to ``scale``. None for a sum.
    """

    output: Tensor
    scale: Tensor
    count: Tensor | float | None = field(default=None, kw_only=True)

    @property
    def num_data(self) -> int:
        """Number of data in the output: the size of its first dimension."""
        return len(self.output) if self.output.ndim else 1

    def hessian_product(self, vectors: Tensor) -> Tensor:
        r"""Multiply by :math:`H_L = \nabla^2_z L`, which is :math:`F_L` for most losses."""
        return self.fisher_product(vectors)

    @abstractmethod
    def fisher_product(self, vectors: Tensor) -> Tensor:
        r"""Multiply by :math:`F_L = \sum_n s_n\, \mathbb{E}_{y \sim p(y | z_n)} \nabla\ell_n \nabla\ell_n^\top`."""

    def root_column(self, unit: Tensor) -> Tensor:
        r"""Return one column c of a root of :math:`F_L`, for the output that ``unit`` selects for each datum.

        :math:`F_L` of a datum is the sum of :math:`c c^\top` over its columns. ``unit`` has the shape of the output.
        It is 1 for at most one output of a datum, and 0 elsewhere.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, generator: torch.Generator | None) -> Tensor:
        r"""Draw labels from the predictive distribution, and return :math:`\sqrt{s_n} \nabla\ell_n` for them."""


@dataclass(frozen=True, eq=False)
class Categorical(OutputLoss):
    r"""Cross-entropy of logits: :math:`\ell = -\log p_y` with :math:`p = \mathrm{softmax}(z)`.

    .. math:: H_L = F_L = s\, (\mathrm{diag}(p) - p p^\top)

    The curvature does not depend on the label. Probabilities as targets and smoothed labels have the same curvature.

    Args:
        output: Logits :math:`z`, ``[N, C, d...]``, or ``[C]``.
        scale: ``[N, 1, d...]``, or ``[1]``.

    Example:
        >>> loss = Categorical(torch.zeros(1, 2), torch.ones(1, 1))
        >>> loss.hessian_product(torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])

    References:
        Martens, "New insights and perspectives on the natural gradient method", JMLR 21, 2020, section 8; Kunstner,
        Balles, Hennig, "Limitations of the empirical Fisher approximation", NeurIPS 2019, section 2.
    """

    @property
    def num_data(self) -> int:
        """Number of data in the output: 1, or the size of its first dimension."""
        return len(self.output) if self.output.ndim > 1 else 1

    @cached_property
    def probabilities(self) -> Tensor:
        """The predicted probabilities, in the shape of the logits."""
        return self.output.softmax(self._dim)

    @property
    def _dim(self) -> int:
        """The dimension of classes, counted from the end because vectors have more dimensions in front."""
        return -1 if self.output.ndim == 1 else 1 - self.output.ndim

    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Fisher matrix, which equals the Hessian."""
        weighted = self.probabilities * vectors
        return self.scale * (weighted - self.probabilities * weighted.sum(self._dim, keepdim=True))

    def root_column(self, unit: Tensor) -> Tensor:
        """Return the gradient for one class, times the root of its probability."""
        weight = (unit * self.probabilities).sum(self._dim, keepdim=True)
        return (self.scale * weight).sqrt() * (unit - self.probabilities)

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw classes."""
        p = self.probabilities.detach().movedim(self._dim, -1)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator)
        label = torch.zeros_like(p).scatter_(-1, drawn.view(*p.shape[:-1], 1), 1).movedim(-1, self._dim)
        return self.scale.sqrt() * (self.probabilities - label)


class _Elementwise(OutputLoss):
    """A loss whose outputs are independent of each other."""

    @abstractmethod
    def _information(self) -> Tensor:
        """Return the Fisher information of each output, without its weight."""

    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Fisher matrix, a diagonal matrix."""
        return self.scale * self._information() * vectors

    def root_column(self, unit: Tensor) -> Tensor:
        """Return the root of the Fisher information of one output."""
        return (self.scale * self._information()).sqrt() * unit


@dataclass(frozen=True, eq=False)
class Gaussian(_Elementwise):
    r"""Squared error: :math:`\ell = \tfrac{\lambda}{2} (z - y)^2`, for a Gaussian of precision :math:`\lambda`.

    .. math:: H_L = F_L = s \lambda

    ``F.mse_loss`` has :math:`\lambda = 2`.

    Args:
        output: Means :math:`z`, of any shape.
        scale: Weights, in a shape that broadcasts to the shape of ``output``.
        precision: :math:`\lambda`, in a shape that broadcasts to the shape of ``output``.

    Example:
        >>> loss = Gaussian(torch.zeros(2), scale=torch.tensor(0.5), precision=torch.tensor(2.0))
        >>> loss.hessian_product(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """

    precision: Tensor

    def _information(self) -> Tensor:
        return self.precision

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw targets."""
        return (self.scale * self.precision).sqrt() * _drawn(torch.randn, self.output, generator)


@dataclass(frozen=True, eq=False)
class Bernoulli(_Elementwise):
    r"""Binary cross-entropy of logits: :math:`p = \sigma(z)`.

    .. math:: H_L = F_L = s\, p (1 - p)

    Args:
        output: Logits :math:`z`, of any shape.
        scale: Weights, in a shape that broadcasts to the shape of ``output``. They include ``pos_weight``.

    Example:
        >>> Bernoulli(torch.zeros(1), scale=torch.tensor(1.0)).hessian_product(torch.ones(1))
        tensor([0.2500])
    """

    def _information(self) -> Tensor:
        p = self.output.sigmoid()
        return p * (1 - p)

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw labels."""
        p = self.output.sigmoid()
        return self.scale.sqrt() * (p - (_drawn(torch.rand, p, generator) < p).to(p.dtype))


@dataclass(frozen=True, eq=False)
class BernoulliProbability(_Elementwise):
    r"""Binary cross-entropy of probabilities :math:`z`. Its Hessian is not the Fisher matrix.

    .. math:: H_L = s \left(\frac{y}{z^2} + \frac{1 - y}{(1 - z)^2}\right), \qquad F_L = \frac{s}{z (1 - z)}

    Args:
        output: Probabilities :math:`z`, of any shape.
        scale: Weights, in a shape that broadcasts to the shape of ``output``.
        target: Labels :math:`y` between 0 and 1, in a shape that broadcasts to the shape of ``output``.

    Example:
        >>> loss = BernoulliProbability(torch.tensor([0.25]), torch.tensor(1.0), target=torch.ones(1))
        >>> loss.hessian_product(torch.ones(1)), loss.fisher_product(torch.ones(1))
        (tensor([16.]), tensor([5.3333]))
    """

    target: Tensor

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Hessian, a diagonal matrix."""
        p, q = self._clamped()
        return self.scale * (self.target / p**2 + (1 - self.target) / q**2) * vectors

    def _information(self) -> Tensor:
        p, q = self._clamped()
        return 1 / (p * q)

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw labels."""
        p, q = self._clamped()
        label = _drawn(torch.rand, p, generator) < self.output
        return self.scale.sqrt() * torch.where(label, -1 / p, 1 / q)

    def _clamped(self) -> tuple[Tensor, Tensor]:
        # Torch clamps the denominator of the gradient in the same way.
        return self.output.clamp(min=1e-12), (1 - self.output).clamp(min=1e-12)


def _drawn(distribution: Callable[..., Tensor], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return distribution(like.shape, generator=generator, dtype=like.dtype, device=like.device)
