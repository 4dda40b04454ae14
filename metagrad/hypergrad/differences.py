"""The mixed derivative by a difference of gradients. The identity replaces the Hessian of the inner loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_number, check_positive
from metagrad.core.tree import HALF, Params, leaf_names, plus, tree_leaves, zeros_for_none
from metagrad.hypergrad.problem import CALL, CREATE, Derivative, Problem, partials


@dataclass(frozen=True)
class FiniteDifference:
    r"""DARTS: the derivative of one inner step, with its mixed derivative by a central difference.

    .. math::
        \phi' = \phi - \xi \nabla_\phi g(\phi, \lambda), \qquad
        \nabla_\lambda f(\phi', \lambda) - \xi \,
        \frac{\nabla_\lambda g(\phi^+, \lambda) - \nabla_\lambda g(\phi^-, \lambda)}{2 \epsilon}, \qquad
        \phi^\pm = \phi \pm \epsilon \, \nabla_{\phi'} f(\phi', \lambda)

    It costs four gradients, or one gradient if ``lr`` is 0, and no second derivative. Its error relative to
    ``FirstOrder(scale=lr)`` is of the order :math:`\epsilon^2`, plus rounding errors over :math:`\epsilon`. For a
    quadratic inner loss only rounding errors remain.

    Args:
        lr: The learning rate :math:`\xi` of the inner step, 0 or more. 0 omits the second term: first-order DARTS.
        epsilon: Distance :math:`\epsilon` of the two points, times the norm of the gradient of f.

    Raises:
        ValueError: ``lr`` is negative, or ``epsilon`` is not above 0.

    Example:
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)},
        ...     method=metagrad.hypergrad.FiniteDifference(lr=0.5),
        ... )["lam"].round(decimals=2)
        tensor(6.)

    References:
        Liu, Simonyan, Yang, "DARTS: differentiable architecture search", ICLR 2019, equations 7 and 8, and section
        2.3 (0.01 for ``epsilon``).
    """

    lr: float
    _: KW_ONLY
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        check_number("FiniteDifference(lr)", self.lr, 0.0)
        check_positive("FiniteDifference(..., epsilon)", self.epsilon)

    def estimate(self, problem: Problem) -> Derivative:
        """Take the step, and two gradients next to the parameters."""
        _check(problem)
        values, hyper = problem.variables(), problem.hyper_leaves()
        moved = values
        if self.lr > 0:
            slopes, _ = _partials(problem.inner, values, hyper)
            moved = {name: _leaf(v - self.lr * slopes[name]) for name, v in values.items()}
        direction, found = _partials(problem.outer, moved, hyper)
        norm = linalg.vector_norm(torch.stack([linalg.vector_norm(v) for v in direction.values()]))
        if self.lr == 0 or not bool(norm > 0):
            return Derivative(zeros_for_none(found, hyper))
        distance = self.epsilon / norm
        for shift in (distance, -distance):
            at = {name: _leaf(v + shift * direction[name]) for name, v in values.items()}
            _, slopes = _partials(problem.inner, at, hyper)
            scaled = [None if g is None else -self.lr / (2 * shift) * g for g in slopes]
            found = [plus(*pair) for pair in zip(found, scaled, strict=True)]
        return Derivative(found)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def _partials(
    loss: Callable[[Params, Sequence[Tensor]], Tensor], values: Params, hyper: Sequence[Tensor]
) -> tuple[Params, list[Tensor | None]]:
    with torch.enable_grad():
        return partials(loss(values, hyper), values, hyper)


def _check(problem: Problem) -> None:
    """Raise for a differentiable derivative, and for half precision."""
    if problem.create_graph:
        raise ValueError(
            f"{CREATE}: FiniteDifference is a difference, which is not differentiable. Take CG, Exact or Unroll."
        )
    hyper = zip(leaf_names(problem.hyper, "hyper"), tree_leaves(problem.hyper), strict=True)
    for name, value in [*problem.params.items(), *hyper]:
        if value.dtype in HALF:
            raise TypeError(
                f"{CALL}: FiniteDifference takes differences that are below the rounding of {value.dtype}, which "
                f"{name!r} has. Pass float32, or take CG or Unroll."
            )
