"""The log-determinant of a positive definite operator."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import Distribution
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.spectrum.quadrature import trace_of

_CALL = "log_determinant(operator)"


def log_determinant(
    operator: LinearMap,
    *,
    damping: float = 0.0,
    steps: int = 50,
    probes: int | None = None,
    rtol: float | None = None,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Estimate:
    r"""Estimate the log-determinant of a positive definite operator by stochastic Lanczos quadrature.

    .. math:: \log \det(A + \delta I) = \mathrm{tr} \log(A + \delta I)

    The determinant itself would overflow. An operator that is not positive definite is refused when a Ritz value
    shows it; one with a few negative eigenvalues near zero may pass unseen. Steps of about the square root of the
    condition number are needed (``converged`` and ``stderr`` tell); damping lowers it.

    Args:
        operator: A symmetric map of n-vectors.
        damping: :math:`\delta \ge 0`, added to every eigenvalue; it costs nothing, as Krylov spaces do not change.
        steps: Products for each probe, at most n of them.
        probes: How many probes, 16 by default; where ``rtol`` is given, the most, 256 by default.
        rtol: Stop when half the 95 % interval is at most this times the value.
        distribution: What probes are drawn from; see :func:`metagrad.curvature.sample_probes`.
        generator: Draws them.
        chunk: Bytes for the bases of probes that are treated at once; one basis, steps * n elements, at the least.

    Returns:
        The estimate, natural logarithm; differentiable once where products are, as
        :func:`metagrad.curvature.trace_of` says.

    Raises:
        ValueError: The operator is not positive definite to working precision, and what :func:`trace_of` raises.

    Example:
        The determinant of diag(1, 2, 4) is 8:

        >>> from metagrad.curvature.spectrum.log_determinant import log_determinant
        >>> class Diagonal:
        ...     shape, dtype, device = (3, 3), torch.float64, torch.device("cpu")
        ...     def multiply(self, vectors):
        ...         return vectors * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        >>> value = log_determinant(Diagonal()).value
        >>> print(f"{value.exp():.6f}")
        8.000000

    References:
        Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
        Appl. 38, 2017; Han, Malioutov, Shin, "Large-scale log-determinant computation through stochastic Chebyshev
        expansions", ICML 2015.
    """
    if not damping >= 0:
        raise ValueError(f"{_CALL}: damping must be at least 0, got {damping}.")
    smallest = operator.shape[0] ** 0.5 * torch.finfo(operator.dtype).eps

    def logarithm(nodes: Tensor) -> Tensor:
        shifted = nodes + damping
        worst = float(shifted.detach().min())
        if worst <= smallest * float(shifted.detach().abs().max()):
            raise ValueError(
                f"{_CALL}: the operator is not positive definite: it has an eigenvalue of {worst:.4g} or less. Damp "
                f"it: pass damping={_round_up(damping - worst)} or more, or use a Gauss-Newton or Fisher operator, "
                "which is semidefinite, with damping."
            )
        return shifted.log()

    estimate = trace_of(
        operator, logarithm, steps=steps, probes=probes, rtol=rtol, distribution=distribution, generator=generator,
        chunk=chunk, call=_CALL,
    )  # fmt: skip
    return dataclasses.replace(estimate, quantity="log-determinant")


def _round_up(damping: float) -> str:
    """Suggest twice what is missing, to one digit."""
    return f"{max(2 * damping, 1e-6):.0e}"
