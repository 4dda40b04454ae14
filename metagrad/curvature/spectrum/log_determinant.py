"""The log-determinant of a positive definite operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from metagrad.core.checks import check_number
from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.linear_map import LinearMap, checked_size
from metagrad.curvature.spectrum.quadrature import trace_of

_CALL = "log_determinant(operator)"


def log_determinant(operator: LinearMap, *, damping: float = 0.0, **options: Any) -> Estimate:
    r"""Estimate the log-determinant of a positive definite operator by stochastic Lanczos quadrature.

    .. math:: \log \det(A + \delta I) = \mathrm{tr} \log(A + \delta I)

    The determinant itself would overflow. If a Ritz value shows that the operator is not positive definite, this
    raises ``ValueError``. A few negative eigenvalues near zero may go unnoticed. The number of steps must be about
    the square root of the condition number (see ``converged`` and ``stderr``). Damping reduces the condition number.

    Args:
        operator: A symmetric map of n-vectors.
        damping: :math:`\delta \ge 0`, added to every eigenvalue. It costs nothing, because Krylov spaces do not
            change.
        **options: ``steps``, ``probes``, ``rtol``, ``generator`` and ``chunk`` as for
            :func:`metagrad.curvature.trace_of`.

    Returns:
        The estimate of the natural logarithm. It has a first derivative if products are differentiable, see
        :func:`metagrad.curvature.trace_of`.

    Raises:
        ValueError: The operator is not positive definite to working precision, or for the reasons of
            :func:`trace_of`.

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
    check_number(f"{_CALL}: damping", damping, 0)
    smallest = checked_size(_CALL, operator) ** 0.5 * torch.finfo(operator.dtype).eps

    def logarithm(nodes: Tensor) -> Tensor:
        shifted = nodes + damping
        worst = float(shifted.detach().min())
        if worst <= smallest * float(shifted.detach().abs().max()):
            more = max(2 * (damping - worst), 1e-6)
            raise ValueError(
                f"{_CALL}: the operator is not positive definite: it has an eigenvalue of {worst:.4g} or less. Damp "
                f"it: pass damping={more:.0e} or more, or use a Gauss-Newton or Fisher operator, "
                "which is semidefinite, with damping."
            )
        return shifted.log()

    estimate = trace_of(operator, logarithm, call=_CALL, **options)
    return dataclasses.replace(estimate, quantity="log-determinant")
