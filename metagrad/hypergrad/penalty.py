"""Penalty and value-function methods: gradients alone, for an error that is inverse to the penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.core.checks import check_count, checked_positive
from metagrad.hypergrad.problem import Estimate, Problem, gradients, minus, slopes
from metagrad.hypergrad.unroll import RuleOf, check_comparable, descend, rule_for
from metagrad.optim.rule import Params

_STEPS = "finds what it compares by steps that are constants"


@dataclass(frozen=True)
class F2SA:
    r"""The fully first-order method: the minimum of the inner loss, and that which the outer loss pulls it to.

    .. math::
        \nabla_\lambda f(y_\sigma, \lambda)
            + \sigma \left( \nabla_\lambda g(y_\sigma, \lambda) - \nabla_\lambda g(z, \lambda) \right), \qquad
        y_\sigma = \arg\min_\phi \, \frac{f}{\sigma} + g, \quad z = \arg\min_\phi \, g

    Both are sought by steps of a rule from ``params``; without an error of these, that of the derivative is of the
    order :math:`1 / \sigma` (lemma 3.1). It costs two gradients a step, and no second derivative.

    Args:
        rule: A rule of :mod:`metagrad.optim.rules`, which moves y and z.
        steps: How many, for each of the two.
        penalty: The number :math:`\sigma`, above 0. What y misses of its minimum is multiplied by it.

    Raises:
        ValueError: ``steps`` or ``penalty`` is out of its range.

    Example:
        Here :math:`y_\sigma = \lambda \sigma / (1 + \sigma)`, and the derivative :math:`2 y_\sigma` is short of
        :math:`2 \lambda` by one part in :math:`1 + \sigma`:

        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)},
        ...     method=metagrad.hypergrad.F2SA(metagrad.optim.rules.sgd(lr=0.4), steps=20, penalty=99.0),
        ... )["lam"].round(decimals=3)
        tensor(5.9400)

    References:
        Kwon, Kwon, Wright, Nowak, "A fully first-order method for stochastic bilevel optimization", ICML 2023,
        equation 3, algorithm 1, lemma 3.1.
    """

    rule: RuleOf
    steps: int
    _: KW_ONLY
    penalty: float = 100.0

    def __post_init__(self) -> None:
        check_count("F2SA(..., steps)", self.steps)
        checked_positive("F2SA(..., penalty)", self.penalty)

    def estimate(self, problem: Problem, carry: Any = None) -> Estimate:
        """Seek both minima, and compare gradients there."""
        check_comparable(problem, "F2SA", _STEPS)
        hyper = problem.hyper_leaves()
        rule = rule_for(self.rule, problem, [leaf.detach() for leaf in hyper])

        def pulled(values: Params, hyper: Sequence[Tensor]) -> Tensor:
            return problem.outer(values, hyper) / self.penalty + problem.inner(values, hyper)

        constants = [leaf.detach() for leaf in hyper]
        y, z = (
            descend(loss, problem.variables(), constants, rule, self.steps, create_graph=False)[0]
            for loss in (pulled, problem.inner)
        )
        return Estimate(_penalised(problem, y, z, hyper, self.penalty))


@dataclass(frozen=True)
class BOME:
    r"""Bilevel optimization made easy: descend the outer loss under a barrier that keeps the inner one falling.

    .. math::
        q(\phi, \lambda) = g(\phi, \lambda) - g(\phi_T, \lambda), \qquad
        \phi \leftarrow \phi - \xi \left( \nabla_\phi f + \sigma_k \nabla_\phi q \right), \qquad
        \sigma_k = \max\left( \eta - \frac{\langle \nabla f, \nabla q \rangle}{|\nabla q|^2}, \, 0 \right)

    with :math:`\phi_T` from some steps of a rule on g, a constant. The algorithm moves :math:`\phi` and
    :math:`\lambda` at once; here :math:`\lambda` is held still for ``steps`` moves of :math:`\phi` from ``params``
    on, with the barrier of :math:`\phi` alone, and :math:`\nabla_\lambda f + \sigma_k \nabla_\lambda q` is what comes
    back. The first move is that of f alone, away from the minimum. Moves are as long as
    :math:`\xi / (1 + \sigma_k)`, so that they stay stable as the penalty rises, about as :math:`\eta \xi k` times the
    curvature; the error falls as its inverse.

    Args:
        rule: Makes :math:`\phi_T` of :math:`\phi`.
        steps: Moves of :math:`\phi`.
        inner_steps: The number T of steps for each.
        lr: The length :math:`\xi`, above 0; below 2 over the largest eigenvalue of the Hessian of g.
        barrier: The number :math:`\eta`, above 0.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)},
        ...     method=metagrad.hypergrad.BOME(metagrad.optim.rules.sgd(lr=0.4), steps=400, lr=0.4),
        ... )["lam"].round(decimals=1)
        tensor(6.)

    References:
        Liu, Ye, Wright, Stone, Liu, "BOME! Bilevel optimization made easy: a simple first-order approach", NeurIPS
        2022, algorithm 1 (:math:`\eta` 0.5, T 10 there).
    """

    rule: RuleOf
    steps: int
    _: KW_ONLY
    lr: float
    inner_steps: int = 10
    barrier: float = 0.5

    def __post_init__(self) -> None:
        check_count("BOME(..., steps)", self.steps)
        check_count("BOME(..., inner_steps)", self.inner_steps)
        checked_positive("BOME(..., lr)", self.lr)
        checked_positive("BOME(..., barrier)", self.barrier)

    def estimate(self, problem: Problem, carry: Any = None) -> Estimate:
        """Move the parameters, and return the direction of ``hyper``."""
        check_comparable(problem, "BOME", _STEPS)
        hyper = problem.hyper_leaves()
        constants = [leaf.detach() for leaf in hyper]
        values = problem.variables()
        for move in range(self.steps):
            f, g, penalty = self._slopes(problem, values, constants)
            penalty = penalty if move else 0.0  # at the minimum itself the barrier would hold everything
            length = self.lr / (1 + penalty)
            values = {
                name: (v.detach() - length * (f[name] + penalty * g[name])).requires_grad_()
                for name, v in values.items()
            }
        *_, penalty = self._slopes(problem, values, constants)
        rule = rule_for(self.rule, problem, constants)
        best, _ = descend(problem.inner, values, constants, rule, self.inner_steps, create_graph=False)
        return Estimate(_penalised(problem, values, best, hyper, penalty))

    def _slopes(
        self, problem: Problem, values: Params, hyper: Sequence[Tensor]
    ) -> tuple[Params, Params, float]:
        """Return the gradients of both losses in the parameters, and the penalty that holds the barrier."""
        f, g = (slopes(loss, values, hyper) for loss in (problem.outer, problem.inner))
        return f, g, self._penalty(f, g)

    def _penalty(self, f: Params, g: Params) -> float:
        """Return what holds the barrier; 0 where the inner loss has its minimum."""
        squares = [x.square().sum(dtype=torch.float64) for x in g.values()]
        products = [(a * b).sum(dtype=torch.float64) for a, b in zip(f.values(), g.values(), strict=True)]
        size, inner = to_list(torch.stack([torch.stack(squares).sum(), torch.stack(products).sum()]))
        return max(self.barrier - inner / size, 0.0) if size > 0 else 0.0


def _penalised(
    problem: Problem, y: Params, z: Params, hyper: Sequence[Tensor], penalty: float
) -> list[Tensor | None]:
    """Differentiate f(y) + penalty (g(y) - g(z)) with respect to ``hyper``."""
    with torch.enable_grad():
        outer, above, below = problem.outer(y, hyper), problem.inner(y, hyper), problem.inner(z, hyper)
    difference = [
        None if g is None else penalty * g
        for g in map(minus, gradients(below, hyper), gradients(above, hyper))
    ]
    return [minus(a, b) for a, b in zip(gradients(outer, hyper), difference, strict=True)]
