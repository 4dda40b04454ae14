"""Steps of a rule on the inner loss, and the derivative through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.grad import grad
from metagrad.autograd.unrolling.unroll import unroll
from metagrad.core.budget import Memory, checked_memory
from metagrad.core.checks import check_count
from metagrad.core.tree import HALF, Tree, leaf_names, tree_leaves
from metagrad.hypergrad.problem import CALL, CREATE, Derivative, Loss, Problem, gradients, refuse_sparse
from metagrad.optim.rule import Params, Rule
from metagrad.optim.transforms.chain import check_rule

if TYPE_CHECKING:
    from typing_extensions import TypeIs

RuleOf: TypeAlias = "Rule | Callable[[Tree], Rule]"
"""A rule, or a function of ``hyper`` that returns one, so that learning rates can be learned."""


@dataclass(frozen=True)
class Unroll:
    r"""Differentiate through steps of a rule, from ``params`` on.

    .. math:: \frac{d}{d\lambda} f(\phi_T(\lambda), \lambda), \qquad
              \phi_{t+1} = U(\phi_t, \nabla_\phi g(\phi_t, \lambda)), \quad \phi_0 = \mathrm{params}

    It is exact for these steps at any order; for the minimum as far as they converge. With ``truncate`` the last so
    many are differentiated through, and those before taken as constants.

    Args:
        rule: A rule of :mod:`metagrad.optim.rules`; or a function of ``hyper`` that returns one, whose
            hyper-parameters are then learned too.
        steps: How many, 1 or more.
        memory: What is kept, see :func:`metagrad.unroll`.
        truncate: How many of the last steps are differentiated through; None means all.

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
        if self.truncate is not None and not 1 <= self.truncate <= self.steps:
            raise ValueError(
                f"Unroll(..., truncate): expected None or 1 to steps={self.steps}, got {self.truncate}."
            )

    def estimate(self, problem: Problem) -> Derivative:
        """Take the steps, and differentiate through them."""
        refuse_tables(problem, "Unroll")
        hyper = problem.hyper_leaves()
        with torch.enable_grad():
            values, _ = descend(
                problem.inner,
                problem.variables(),
                hyper,
                rule_for(self.rule, problem, hyper),
                self.steps,
                memory=self.memory,
                truncate=self.truncate,
            )
            loss = problem.outer(values, hyper)
        return Derivative(gradients(loss, hyper, create_graph=problem.create_graph))


def descend(
    loss: Loss,
    values: Params,
    hyper: Sequence[Tensor],
    rule: Rule,
    steps: int,
    *,
    state: Any = None,
    first: int = 0,
    memory: Memory = "full",
    truncate: int | None = None,
    create_graph: bool | None = None,
) -> tuple[Params, Any]:
    """Take steps of a rule down a loss; return parameters and the state of the rule.

    Args:
        loss: The loss.
        values: Where to begin; leaves that require grad.
        hyper: What else the loss takes.
        rule: The rule.
        steps: How many.
        state: Of the rule; None begins with one.
        first: The number of the first step, by which a rule says whether it asks for curvature.
        memory: As of :func:`metagrad.unroll`.
        truncate: Likewise.
        create_graph: Likewise; False returns constants.
    """
    on_tape = torch.is_grad_enabled() if create_graph is None else create_graph

    def step(state: tuple[Params, Any], t: int, hyper: list[Tensor], rule: Rule) -> tuple[Any, None]:
        values, of_rule = state
        if not on_tape:
            values = {name: v.detach().requires_grad_() for name, v in values.items()}
        number = first + t
        return moved_by(lambda v: loss(v, hyper), values, rule, of_rule, number, create_graph=on_tape), None

    start = (values, rule.init(values) if state is None else state)
    result, _ = unroll(
        step,
        start,
        list(hyper),
        rule,
        steps=steps,
        memory=memory,
        truncate=truncate,
        create_graph=create_graph,
    )
    return result


def moved_by(
    loss: Callable[[Params], Tensor], values: Params, rule: Rule, state: Any, t: int, *, create_graph: bool
) -> tuple[Params, Any]:
    """Take the step of a rule whose number is ``t``."""
    with torch.enable_grad():
        value = loss(values)
    slopes = grad(value, values, create_graph=create_graph, materialize_grads=True)
    refuse_sparse(slopes)
    return rule.update(slopes, state, values)


def rule_for(rule: RuleOf, problem: Problem, hyper: Sequence[Tensor]) -> Rule:
    """Return the rule, made of ``hyper`` if it is a function of that."""
    made = rule if _is_rule(rule) else rule(problem.hyper_of(hyper))
    check_rule("hypergradient(..., method)", made)
    return made


def _is_rule(rule: RuleOf) -> TypeIs[Rule]:
    return hasattr(rule, "update")


def refuse_tables(problem: Problem, method: str) -> None:
    """Refuse tables by rows where a method moves parameters as a whole."""
    if problem.sparse:
        raise ValueError(
            f"hypergradient(..., sparse={list(problem.sparse)}): {method} takes steps with whole tables. Leave "
            "sparse out, or take CG or another method with the Hessian."
        )


def check_comparable(problem: Problem, method: str, why: str) -> None:
    """Refuse what a method cannot do that compares losses or gradients at two points, by steps of whole parameters.

    Args:
        problem: The problem.
        method: Its name.
        why: Why its result has no graph.
    """
    refuse_tables(problem, method)
    if problem.create_graph:
        raise ValueError(f"{CREATE}: {method} {why}. Take CG, Exact or Unroll.")
    named = [
        *problem.params.items(),
        *zip(leaf_names(problem.hyper, "hyper"), tree_leaves(problem.hyper), strict=True),
    ]
    for name, value in named:
        if value.dtype in HALF:
            raise TypeError(
                f"{CALL}: {method} takes differences that are below the rounding of {value.dtype}, which {name!r} "
                "has. Pass float32, or take CG or Unroll."
            )
