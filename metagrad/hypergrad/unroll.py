"""Derivatives of steps on the inner loss: of any number, or of one with a difference in place of its Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.grad import grad
from metagrad.autograd.unrolling.unroll import unroll
from metagrad.core._torch import linalg
from metagrad.core.budget import Memory, checked_memory
from metagrad.core.checks import check_count, check_function, check_number, check_positive, refuse
from metagrad.core.tree import HALF, Params, Tree, leaf_names, plus, tree_leaves, zeros_for_none
from metagrad.hypergrad.problem import CALL, Derivative, Problem, gradients, partials, refuse_sparse
from metagrad.optim.rule import Rule
from metagrad.optim.transforms.chain import check_rule

RuleOf: TypeAlias = "Rule | Callable[[Tree], Rule]"
"""A rule, or a function that maps ``hyper`` to a rule, to learn hyperparameters of the rule."""


@dataclass(frozen=True)
class Unroll:
    r"""Differentiate through steps of a rule, starting from ``params``.

    .. math:: \frac{d}{d\lambda} f(\phi_T(\lambda), \lambda), \qquad
              \phi_{t+1} = U(\phi_t, \nabla_\phi g(\phi_t, \lambda)), \quad \phi_0 = \mathrm{params}

    The derivative is exact for these steps at any order. As a derivative of the minimum, its error depends on
    how far the steps are from convergence.

    Args:
        rule: A rule of :mod:`metagrad.optim.rules`. A function of ``hyper`` that returns a rule is also accepted, to
            learn hyperparameters of the rule.
        steps: Number of steps, 1 or more.
        memory: Checkpointing policy, see :func:`metagrad.unroll`.
        truncate: Differentiate only through the last ``truncate`` steps. Earlier steps are constants. None means all
            steps.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        A step of rate 1/4 on :math:`(\phi - \lambda)^2` leads halfway to :math:`\lambda`, from 1 to 2:

        >>> method = metagrad.hypergrad.Unroll(metagrad.optim.rules.sgd(lr=0.25), steps=1)
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(1.0)}, {"lam": torch.tensor(3.0)}, method=method,
        ... )
        {'lam': tensor(2.)}

    References:
        Maclaurin, Duvenaud, Adams, "Gradient-based hyperparameter optimization through reversible learning", ICML
        2015; Shaban, Cheng, Hatch, Boots, "Truncated back-propagation for bilevel optimization", AISTATS 2019.
    """

    is_exact: ClassVar[bool] = True
    rule: RuleOf
    steps: int
    _: KW_ONLY
    memory: Memory = "full"
    truncate: int | None = None

    def __post_init__(self) -> None:
        check_count("Unroll(..., steps)", self.steps)
        checked_memory("Unroll(...)", self.memory)
        check_count("Unroll(..., truncate)", self.truncate, optional=True)
        if self.truncate is not None and self.truncate > self.steps:
            refuse("Unroll(..., truncate)", f"None or 1 to steps={self.steps}", self.truncate)

    def estimate(self, problem: Problem) -> Derivative:
        """Take the steps, and differentiate through them."""
        hyper, values = problem.hyper_leaves(), problem.variables()
        call, rule = "hypergradient(..., method)", self.rule
        made: Any = rule
        if not (isinstance(rule, type) or hasattr(rule, "update")):
            made = check_function(call, "rule", rule)(problem.hyper_of(hyper))
        check_rule(call, made)

        def step(state: tuple[Params, Any], t: int, hyper: list[Tensor], rule: Rule) -> tuple[Any, None]:
            values, of_rule = state
            return moved_by(lambda v: problem.inner(v, hyper), values, rule, of_rule, create_graph=True), None

        with torch.enable_grad():
            start = values, made.init(values)
            (values, _), _ = unroll(
                step, start, list(hyper), made, steps=self.steps, memory=self.memory, truncate=self.truncate
            )
            loss = problem.outer(values, hyper)
        return Derivative(gradients(loss, hyper, create_graph=problem.create_graph))


def moved_by(
    loss: Callable[[Params], Tensor], values: Params, rule: Rule, state: Any, *, create_graph: bool
) -> tuple[Params, Any]:
    """Take a step of a rule."""
    with torch.enable_grad():
        value = loss(values)
    slopes = grad(value, values, create_graph=create_graph, materialize_grads=True)
    refuse_sparse(slopes)
    return rule.update(slopes, state, values)


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

    @torch.enable_grad()
    def estimate(self, problem: Problem) -> Derivative:
        """Take the step, and two gradients next to the parameters."""
        _check(problem)
        values, hyper = problem.variables(), problem.hyper_leaves()
        moved = values
        if self.lr > 0:
            slopes, _ = partials(problem.inner(values, hyper), values, hyper)
            moved = {name: _leaf(v - self.lr * slopes[name]) for name, v in values.items()}
        direction, found = partials(problem.outer(moved, hyper), moved, hyper)
        norm = linalg.vector_norm(torch.stack([linalg.vector_norm(v) for v in direction.values()]))
        if self.lr == 0 or not bool(norm > 0):
            return Derivative(zeros_for_none(found, hyper))
        distance, ends = self.epsilon / norm, list[list[Tensor | None]]()
        for sign in (1, -1):
            at = {name: _leaf(v + sign * distance * direction[name]) for name, v in values.items()}
            ends.append(partials(sign * problem.inner(at, hyper), at, hyper)[1])
        differences = [plus(*pair) for pair in zip(*ends, strict=True)]
        mixed = [None if d is None else -self.lr / (2 * distance) * d for d in differences]
        return Derivative([plus(*pair) for pair in zip(found, mixed, strict=True)])


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def _check(problem: Problem) -> None:
    """Raise ``TypeError`` for half precision."""
    hyper = zip(leaf_names(problem.hyper, "hyper"), tree_leaves(problem.hyper), strict=True)
    for name, value in [*problem.params.items(), *hyper]:
        if value.dtype in HALF:
            raise TypeError(
                f"{CALL}: FiniteDifference takes differences that are below the rounding of {value.dtype}, which "
                f"{name!r} has. Pass float32, or take CG or Unroll."
            )
