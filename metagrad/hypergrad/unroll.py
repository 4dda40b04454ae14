"""Unrolled steps of a rule on the inner loss, and their derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.grad import grad
from metagrad.autograd.unrolling.unroll import unroll
from metagrad.core.budget import Memory, checked_memory
from metagrad.core.checks import check_count, check_function, refuse
from metagrad.core.tree import Params, Tree
from metagrad.hypergrad.problem import Derivative, Problem, gradients, refuse_sparse
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
