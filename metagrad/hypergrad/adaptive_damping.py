"""Damping that grows until the Hessian of the inner loss is positive definite."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any

from metagrad.core.checks import check_count, is_a
from metagrad.curvature.solvers.solution import Result
from metagrad.hypergrad.inverses import CG, Exact, Neumann
from metagrad.hypergrad.problem import Estimate, Problem

_INDEFINITE = {Result.NEGATIVE_CURVATURE, Result.DIVERGED}


@dataclass(frozen=True)
class AdaptiveDamping:
    r"""A solve with :math:`H + \mu I`, whose damping grows by a factor while that is not positive definite.

    Where inner steps end at no minimum, as in a search that takes a step at each level in turn, H has negative
    eigenvalues, and how negative changes along the way. A loop goes on with the damping that was enough. What comes
    of much damping is the hypergradient of ``FirstOrder(scale=1 / damping)``.

    Args:
        method: ``CG``, ``Neumann`` or ``Exact``, with the damping to begin with, above 0. The scale of ``Neumann`` is
            divided by what its damping is multiplied with.
        factor: By which damping grows, above 1.
        tries: Solves of one hypergradient, at most; a failure of the last one is that of the method.

    Raises:
        TypeError: ``method`` has no damping.
        ValueError: An argument is out of its range.

    Example:
        :math:`g = (\phi - \lambda)^2 / 2 - \phi^2` has the second derivative -1 in :math:`\phi`. A damping of 1/2 and
        of 1 is not enough, with 2 its sum is 1:

        >>> method = metagrad.hypergrad.AdaptiveDamping(metagrad.hypergrad.CG(damping=0.5), factor=2.0)
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"],
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2 / 2 - p["phi"] ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}, method=method,
        ... )
        {'lam': tensor(1.)}

    References:
        Nocedal, Wright, "Numerical optimization", 2nd edition, 2006, algorithm 3.3 (a multiple of the identity is
        added, and increased until the matrix is positive definite).
    """

    method: CG | Neumann | Exact
    _: KW_ONLY
    factor: float = 4.0
    tries: int = 10

    def __post_init__(self) -> None:
        if not is_a(self.method, CG, Neumann, Exact):
            raise TypeError(
                f"AdaptiveDamping(method): expected CG, Neumann or Exact, which have damping, got {self.method!r}."
            )
        if not self.method.damping > 0:
            raise ValueError(
                "AdaptiveDamping(method): its damping is 0, which does not grow. Pass one, as CG(damping=1.0)."
            )
        if not self.factor > 1:
            raise ValueError(f"AdaptiveDamping(..., factor): expected a number above 1, got {self.factor}.")
        check_count("AdaptiveDamping(..., tries)", self.tries)

    def estimate(self, problem: Problem, carry: Any = None) -> Estimate:
        """Solve with more and more damping; the carry is the method that was tried last."""
        method = self.method if carry is None else carry
        for _ in range(self.tries - 1):
            estimate = method.estimate(problem)
            if estimate.solution is None or _INDEFINITE.isdisjoint(estimate.solution.stats.results):
                return estimate._replace(carry=method)
            method = self._grown(method)
        return method.estimate(problem)._replace(carry=method)

    def _grown(self, method: Any) -> Any:
        changes = {"damping": method.damping * self.factor}
        if getattr(method, "scale", None) is not None:
            changes["scale"] = method.scale / self.factor
        return dataclasses.replace(method, **changes)
