"""Residuals with the rows of their Jacobian, and dense Gauss-Newton systems made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metagrad.autograd.derivatives.recorded import Recorded
from metagrad.core._torch import linalg
from metagrad.core.tree import Params
from metagrad.curvature.likelihoods.output_losses import Gaussian
from metagrad.curvature.operators.jacobian import Examples
from metagrad.optim.newton.vector import split

LARGEST = 5000
"""Limit of ``solver="auto"``: a dense system has at most this number of residuals or of parameters."""
LARGEST_WHOLE = 500
"""The same limit for residuals without ``data``, whose rows cost one product each."""
MOST_BYTES = 2**30
"""Limit of ``solver="auto"``: the Jacobian of a dense system has at most this number of bytes in float64."""
_CHUNK = 2**28  # bytes of rows that are computed together
_DIFFERENCE = 0.1  # fraction of a step for the finite difference of the second derivative
_LONGEST = 0.75  # maximum length of an acceleration, relative to the step
_FLOOR = 1e-15  # smaller damping, relative to the largest diagonal element, is only rounding error


@dataclass(frozen=True, eq=False)
class Residuals(Gaussian):
    """The loss of residuals that are a known function of the parameters.

    Attributes:
        fn: ``fn(params, *example)`` returns the residuals of one example.
        examples: The function with its examples. None for ``fn(params)``, which returns all residuals.
        params: All parameters by name, at the values of the step.
    """

    fn: Callable[..., Tensor] = field(kw_only=True)
    examples: Examples | None = field(kw_only=True)
    params: Mapping[str, Tensor] = field(kw_only=True)

    @property
    def are_few(self) -> bool:
        """Whether ``solver="auto"`` makes a dense system of the residuals."""
        count, size = self.output.numel(), sum(p.numel() for p in self.params.values() if p.requires_grad)
        largest = LARGEST_WHOLE if self.examples is None else LARGEST
        return min(count, size) <= largest and 8 * count * size <= MOST_BYTES

    def columns(self, params: Params) -> Tensor:
        """Return the columns of the Jacobian for some parameters that require grad, ``[residuals, n]``."""
        if self.examples is None:
            return _rows_of_graph(self.output, params)
        return self.examples.rows(params, self.output.numel(), _CHUNK, self.params)

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the residuals at other values of some parameters, without a graph."""
        with torch.no_grad():
            return evaluated(self.fn, self.examples, {**self.params, **params})


def evaluated(fn: Callable[..., Tensor], examples: Examples | None, params: Mapping[str, Tensor]) -> Tensor:
    """Return all residuals."""
    return fn(params) if examples is None else examples.values(params)


def _rows_of_graph(output: Tensor, params: Params) -> Tensor:
    """Compute the rows, with one product for each residual, or for each parameter if there are fewer parameters."""
    count, size = output.numel(), sum(p.numel() for p in params.values())
    graph = Recorded("opt.residuals(fn)", [output], params)
    identity = torch.eye(min(count, size), dtype=output.dtype, device=output.device)
    return graph.pull(identity) if count <= size else graph.push(identity).mT


class DenseSystem:
    r"""The Gauss-Newton system of residuals, solved in the smaller of its two spaces.

    .. math:: (J^\top J + \lambda I)^{-1} J^\top = J^\top (J J^\top + \lambda I)^{-1}

    Residuals and rows are scaled such that the loss is :math:`|r|^2 / 2`. They are float64, because
    :math:`J^\top J` squares the condition number of :math:`J`.

    Args:
        losses: The residuals in a loss, each with the derivative of the loss with respect to their mean square.
        params: The parameters that are updated, by name.
        g: Gradient of the objective, ``[n]``.
        decay: Factor of the parameters' penalty.
        moves: Whether each coordinate is updated, ``[n]``, or 0-d for all coordinates.

    Attributes:
        is_complete: True if the residuals are the whole objective.
        floor: Smallest damping that exceeds the rounding error of the system.
    """

    def __init__(
        self,
        losses: Sequence[tuple[Residuals, Tensor]],
        params: Params,
        g: Tensor,
        decay: float,
        moves: Tensor,
    ) -> None:
        self._params, self._g, self._decay = params, g.double(), decay
        self._residuals = [residuals for residuals, _ in losses]
        self._roots = [_root(*loss) for loss in losses]
        self.values = self._scaled([residuals.output.detach() for residuals in self._residuals])
        parts = [residuals.columns(params).double() for residuals in self._residuals]
        self.rows = torch.cat([root[:, None] * rows for root, rows in zip(self._roots, parts, strict=True)])
        if moves.ndim:
            self.rows *= moves
        self.is_complete: bool = decay == 0 and self._has_all_of(g)
        self._is_by_rows = self.is_complete and len(self.rows) < self.rows.shape[1]
        self._matrix = self.rows @ self.rows.mT if self._is_by_rows else self.rows.mT @ self.rows
        if decay:
            self._matrix.diagonal().add_(decay)
        self.floor: float = _FLOOR * float(self._matrix.diagonal().max())

    def factorize(self, damping: float) -> bool:
        """Factorize the damped matrix, and return whether it is positive definite."""
        damped = self._matrix.clone()
        damped.diagonal().add_(damping)
        self._factor, info = linalg.cholesky_ex(damped)
        return int(info) == 0

    def direction(self) -> Tensor:
        """Return the step of the factorized system, ``[n]``."""
        return -(self._inverse(self.values) if self._is_by_rows else self._solve(self._g))

    def acceleration(self, w: Tensor, d: Tensor) -> Tensor:
        r"""Return the geodesic acceleration of a step, or zeros if it is too long to be trusted.

        .. math:: a = -\tfrac{1}{2} (J^\top J + \lambda I)^{-1} J^\top r_{dd}, \qquad
                  r_{dd} \approx \frac{2}{h} \left( \frac{r(w + h d) - r(w)}{h} - J d \right)

        References:
            Transtrum, Sethna, "Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares
            minimization", arXiv:1201.5885, 2012, section 3.
        """
        h = _DIFFERENCE
        curved = 2 / h * ((self.at(w + h * d) - self.values) / h - self.rows @ d)
        a = -self._inverse(curved) / 2
        is_trusted = linalg.vector_norm(a) <= _LONGEST * linalg.vector_norm(d)
        return torch.where(is_trusted, a, 0.0)

    def predicted(self, step: Tensor) -> float:
        """Return the change of the objective that its quadratic model predicts."""
        moved = self.rows @ step
        return float(self._g.dot(step) + (moved.dot(moved) + self._decay * step.dot(step)) / 2)

    def at(self, w: Tensor) -> Tensor:
        """Return the scaled residuals at a vector of parameters."""
        values = {key: part.to(self._params[key].dtype) for key, part in split(w, self._params).items()}
        return self._scaled([residuals.at(values) for residuals in self._residuals])

    def loss(self, w: Tensor | None = None) -> float:
        """Return the loss of the residuals, here or at another vector of parameters."""
        values = self.values if w is None else self.at(w)
        return float(values.dot(values)) / 2

    def _inverse(self, values: Tensor) -> Tensor:
        r"""Multiply residuals by :math:`(J^\top J + \lambda I)^{-1} J^\top`."""
        if self._is_by_rows:
            return self.rows.mT @ self._solve(values)
        return self._solve(self.rows.mT @ values)

    def _solve(self, b: Tensor) -> Tensor:
        return torch.cholesky_solve(b[:, None], self._factor)[:, 0]

    def _scaled(self, values: Sequence[Tensor]) -> Tensor:
        flat = [root * each.reshape(-1) for root, each in zip(self._roots, values, strict=True)]
        return torch.cat(flat)

    def _has_all_of(self, g: Tensor) -> bool:
        """Return whether the residuals have a gradient, up to rounding."""
        rounding = torch.finfo(g.dtype).eps ** 0.5 * (self.rows.abs().mT @ self.values.abs())
        return bool(((self.rows.mT @ self.values - self._g).abs() <= rounding).all())


def _root(residuals: Residuals, weight: Tensor) -> Tensor:
    """Return the square root of the loss curvature for each residual, float64 ``[residuals]``."""
    curvature = residuals.hessian_product(torch.ones_like(residuals.output)).detach()
    return (weight * curvature.double()).sqrt().reshape(-1)
