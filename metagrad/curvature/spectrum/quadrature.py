"""Stochastic Lanczos quadrature: spectral densities and traces of functions, by Gauss rules of random vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import (
    check_count,
    check_function,
    check_number,
    check_positive,
    is_a,
    refuse,
)
from metagrad.core.tree import widened
from metagrad.curvature.estimators.estimate import Estimate, from_samples, standard_error
from metagrad.curvature.estimators.probes import ProbeSampler, batches, is_tight
from metagrad.curvature.linear_map import LinearMap, checked_size
from metagrad.curvature.rows import dot
from metagrad.curvature.solvers.implicit import first_order
from metagrad.curvature.spectrum.lanczos import LanczosState, lanczos

_DENSITY = "spectral_density(operator)"
_FEWEST = 4  # probes between two checks of a tolerance


class GaussRule(NamedTuple):
    """A quadrature rule for the spectral measure of one unit vector, in float64 on the CPU.

    Attributes:
        nodes: Eigenvalues of the tridiagonal matrix, ascending, shape [m].
        vectors: Eigenvectors of the tridiagonal matrix, columns, shape [m, m]. The weights are the squares of the
            first row.
    """

    nodes: Tensor
    vectors: Tensor

    @property
    def weights(self) -> Tensor:
        """Positive weights with the sum 1, shape [m]."""
        return self.vectors[0].square()


def gauss_rule(state: LanczosState, start: int, size: int | None = None) -> GaussRule:
    r"""Make the Gauss rule of one start from its Lanczos process.

    .. math:: q^T f(A) q = \sum_j w_j f(\theta_j), \quad T = S \Theta S^T, \quad w_j = S_{1j}^2

    The rule is exact for polynomials f of degree up to 2 m - 1, and after a breakdown for every f.

    Args:
        state: Result of :func:`~metagrad.curvature.spectrum.lanczos.lanczos`.
        start: Index of the start.
        size: Use fewer steps than were taken.

    Returns:
        The rule.

    Example:
        The vector (1, 1) / sqrt(2) has half of its weight on each eigenvalue of diag(1, 3):

        >>> from metagrad.curvature.spectrum.lanczos import lanczos
        >>> from metagrad.curvature.spectrum.quadrature import gauss_rule
        >>> class Diagonal:
        ...     shape, dtype, device = (2, 2), torch.float64, torch.device("cpu")
        ...     def multiply(self, vectors):
        ...         return vectors * torch.tensor([1.0, 3.0], dtype=torch.float64)
        >>> state = lanczos(Diagonal(), torch.ones(1, 2).double(), steps=2)
        >>> rule = gauss_rule(state, 0)
        >>> [round(x, 6) for x in rule.nodes.tolist()], [round(w, 6) for w in rule.weights.tolist()]
        ([1.0, 3.0], [0.5, 0.5])

    References:
        Golub, Welsch, "Calculation of Gauss quadrature rules", Math. Comp. 23, 1969; Golub, Meurant, "Matrices,
        moments and quadrature", 1994.
    """
    size = state.sizes[start] if size is None else min(size, state.sizes[start])
    return GaussRule(*linalg.eigh(state.projected[start, :size, :size]))


def krylov_sampler(
    call: str, operator: LinearMap, steps: int, generator: torch.Generator | None, chunk: str | int | float
) -> ProbeSampler:
    """Return a sampler of as many probes together as have their Krylov bases in a chunk."""
    check_count(f"{call}: steps", steps)
    stored = min(steps, checked_size(call, operator))
    return ProbeSampler(call, operator, "rademacher", generator, chunk, stored=stored)


def krylov_spaces(sampler: ProbeSampler, count: int, steps: int) -> Iterator[tuple[Tensor, LanczosState]]:
    """Draw probes, and run Lanczos from them."""
    for probes in sampler.drawn(count):
        yield probes, lanczos(sampler.operator, probes, steps=steps, call=sampler.call)


@dataclass(frozen=True, eq=False, repr=False)
class Density:
    r"""A spectral density: the point masses of each probe, smoothed by a Gaussian.

    .. math:: \phi(t) = \frac1p \sum_k \sum_j w_{kj} \, g_\sigma(t - \theta_{kj}) \approx
        \frac1n \sum_i g_\sigma(t - \lambda_i), \quad \int \phi = 1

    It is a probability density. Multiply it by n to count eigenvalues.

    Attributes:
        nodes: Ritz values, float64 on the CPU, shape [probes, steps]. Constants.
        weights: Masses of the nodes, in the same shape. Each row sums to 1. A process that ended early has trailing
            zeros.
        sigma: Standard deviation of the Gaussian.
        n: Size of the operator.
        matvecs: Number of products.

    Example:
        >>> from metagrad.curvature.spectrum.quadrature import Density
        >>> one = Density(torch.tensor([[3.0]]), torch.tensor([[1.0]]), sigma=0.5, n=1, matvecs=1)
        >>> one
        density of 1 eigenvalue from 3 to 3 (1 probe, 1 product)
        >>> one(torch.tensor([3.0])).value * 0.5 * (2 * torch.pi) ** 0.5
        tensor([1.])
    """

    nodes: Tensor
    weights: Tensor
    sigma: float
    n: int
    matvecs: int

    def __call__(self, grid: Tensor) -> Estimate:
        """Evaluate the density at some points.

        Args:
            grid: Floating point tensor of any shape.

        Returns:
            The density there, with its standard error over the probes.

        Raises:
            TypeError: ``grid`` is not a floating point tensor.
        """
        if not is_a(grid, Tensor) or not grid.is_floating_point():
            got = grid.dtype if is_a(grid, Tensor) else type(grid).__name__
            raise TypeError(f"density(grid): expected a floating point tensor, got {got}. Use grid.double().")
        points = grid.detach().cpu().double()
        samples = torch.stack([self._of_probe(points, k) for k in range(len(self.nodes))]).to(grid)
        rounding = torch.finfo(samples.dtype).eps * samples.abs().mean(0)
        return from_samples(
            samples, rounding, matvecs=self.matvecs, method="lanczos quadrature", quantity="density"
        )

    def grid(self, num_points: int | None = None) -> Tensor:
        """Return evenly spaced points that cover the density, up to four sigma beyond the Ritz values on both sides.

        Args:
            num_points: Number of points, 2 or more. By default they are half a sigma apart, so sums over them are
                accurate integrals.

        Returns:
            The points, float64 on the CPU, shape [num_points].
        """
        margin = 4 * self.sigma
        low, high = float(self.nodes.min()) - margin, float(self.nodes.max()) + margin
        if num_points is None:
            num_points = math.ceil(2 * (high - low) / self.sigma) + 1
        check_count("density.grid(num_points)", num_points, 2)
        return torch.linspace(low, high, num_points, dtype=torch.float64)

    def _of_probe(self, points: Tensor, k: int) -> Tensor:
        distances = (points.unsqueeze(-1) - self.nodes[k]) / self.sigma
        kernels = torch.exp(-0.5 * distances**2) / (self.sigma * math.sqrt(2 * math.pi))
        return (self.weights[k] * kernels).sum(-1)

    def __repr__(self) -> str:
        counts = [
            f"{count} {name}{'s' * (count != 1)}"
            for count, name in ((self.n, "eigenvalue"), (len(self.nodes), "probe"), (self.matvecs, "product"))
        ]
        ends = f"from {float(self.nodes.min()):.4g} to {float(self.nodes.max()):.4g}"
        return f"density of {counts[0]} {ends} ({counts[1]}, {counts[2]})"


def spectral_density(
    operator: LinearMap,
    *,
    steps: int = 64,
    probes: int = 8,
    sigma: float | None = None,
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Density:
    """Estimate the density of the eigenvalues of a symmetric operator.

    Each probe gives a Gauss rule from ``steps`` products. Its outer nodes are accurate eigenvalues if these
    are well separated. Each inner node represents many eigenvalues. Moments up to the degree 2 steps - 1 are
    exact for the probe. Inside the bulk, the resolution is the range of the spectrum divided by ``steps``, for any
    ``sigma``. The result is a constant for derivatives. See :func:`metagrad.curvature.trace_of` for a differentiable
    function of the spectrum.

    Args:
        operator: A symmetric map of n-vectors.
        steps: Number of products for each probe, at most n.
        probes: Number of probes.
        sigma: Standard deviation of the Gaussian at each node, in units of eigenvalues. The default is 1 / 200 of the
            range of the nodes.
        generator: Draws the probes, signs.
        chunk: Bytes for the bases of probes that are treated together, at least one basis of steps * n elements.

    Returns:
        The density. Call it on a grid.

    Raises:
        ValueError: An argument is out of its range, a product is not finite, or the operator is not symmetric.

    Example:
        Half of the eigenvalues of diag(1, 1, 3, 3) are 1, so their mean is 2:

        >>> from metagrad.curvature.spectrum.quadrature import spectral_density
        >>> class Diagonal:
        ...     shape, dtype, device = (4, 4), torch.float64, torch.device("cpu")
        ...     def multiply(self, vectors):
        ...         return vectors * torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64)
        >>> phi = spectral_density(Diagonal(), probes=4)
        >>> phi
        density of 4 eigenvalues from 1 to 3 (4 probes, 8 products)
        >>> print(f"{(phi.weights * phi.nodes).sum(1).mean():.6f}")
        2.000000
        >>> grid = phi.grid()
        >>> print(f"{torch.trapezoid(phi(grid).value, grid):.3f}")
        1.000

    References:
        Lin, Saad, Yang, "Approximating spectral densities of large matrices", SIAM Review 58, 2016; Ghorbani,
        Krishnan, Xiao, "An investigation into neural net optimization via Hessian eigenvalue density", ICML 2019;
        Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", 2017.
    """
    check_count(f"{_DENSITY}: probes", probes)
    check_positive(f"{_DENSITY}: sigma", sigma, optional=True)
    sampler = krylov_sampler(_DENSITY, operator, steps, generator, chunk)
    nodes: list[Tensor] = []
    weights: list[Tensor] = []
    matvecs = 0
    for _, state in krylov_spaces(sampler, probes, steps):
        rules = [gauss_rule(state, start) for start in range(len(state.sizes))]
        nodes += [_padded(rule.nodes, state.basis.shape[1], float(rule.nodes[0])) for rule in rules]
        weights += [_padded(rule.weights, state.basis.shape[1], 0.0) for rule in rules]
        matvecs += state.matvecs
    found = torch.stack(nodes)
    if sigma is None:
        spread = float(found.max() - found.min())
        sigma = (spread or float(found.abs().max()) or 1.0) / 200
    return Density(found, torch.stack(weights), sigma, operator.shape[0], matvecs)


def _padded(row: Tensor, length: int, value: float) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


def trace_of(
    operator: LinearMap,
    function: Callable[[Tensor], Tensor],
    *,
    steps: int = 50,
    probes: int | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
    call: str = "trace_of(operator, function)",
) -> Estimate:
    r"""Estimate the trace of a function of a symmetric operator by stochastic Lanczos quadrature (SLQ).

    .. math:: \mathrm{tr} f(A) = E[z^T f(A) z] \approx \frac1p \sum_{k=1}^p \|z_k\|^2 \sum_j w_{kj} f(\theta_{kj})

    The error has two parts. The error from few probes is in ``stderr``. The error from few steps is extrapolated from
    the results with half and with a quarter of the steps, and added to ``stderr``. If it exceeds the error from few
    probes, ``converged`` is False. It falls as :math:`\rho^{-2 m}`, with :math:`\rho` from the largest ellipse around
    the spectrum in which f is analytic. For the logarithm and the condition number :math:`\kappa` it falls as
    :math:`e^{-4 m / \sqrt\kappa}`. It is underestimated if too few steps miss the important part of the spectrum,
    such as the small eigenvalues for a reciprocal. For functions with jumps, use
    :func:`metagrad.curvature.spectral_density`.

    If products are differentiable, the value has a first derivative. :math:`d \, \mathrm{tr} f(A) = \mathrm{tr}(f'(A)
    \, dA)` is estimated without bias from the same probes by :math:`z^T f'(A) \, dA \, z`. A second derivative
    raises.

    Args:
        operator: A symmetric map of n-vectors.
        function: Takes eigenvalues, a float64 tensor on the CPU, elementwise.
        steps: Number of products for each probe, at most n.
        probes: Number of probes, 16 by default. With ``rtol`` it is a maximum, 256 by default.
        rtol: Stop if half the 95 % interval is at most ``rtol`` times the value. It is checked after 4 probes, 8, 12,
            18, 27, ...
        generator: Draws the probes, signs.
        chunk: Bytes for the bases of probes that are treated together, at least one basis of steps * n elements.
        call: Name of the caller in errors.

    Returns:
        The estimate.

    Raises:
        ValueError: An argument is out of its range, ``function`` is not finite at a Ritz value, a product is not
            finite, or the operator is not symmetric.
        TypeError: ``function`` is not callable.

    Example:
        The trace of the square root of diag(1, 4, 9) is 6:

        >>> from metagrad.curvature.spectrum.quadrature import trace_of
        >>> class Diagonal:
        ...     shape, dtype, device = (3, 3), torch.float64, torch.device("cpu")
        ...     def multiply(self, vectors):
        ...         return vectors * torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
        >>> print(f"{float(trace_of(Diagonal(), torch.sqrt)):.6f}")
        6.000000

    References:
        Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
        Appl. 38, 2017; Gardner, Pleiss, Bindel, Weinberger, Wilson, "GPyTorch", NeurIPS 2018 (the derivative).
    """
    probes = (16 if rtol is None else 256) if probes is None else probes
    check_count(f"{call}: probes", probes)
    check_positive(f"{call}: rtol", rtol, optional=True)
    check_function(call, "function", function)
    sampler = krylov_sampler(call, operator, steps, generator, chunk)
    samples: list[Tensor] = []
    estimate, matvecs = None, 0
    for count in [probes] if rtol is None else batches(probes, _FEWEST, _FEWEST):
        for starts, state in krylov_spaces(sampler, count, steps):
            samples += [_sample(start, state, i, function, call) for i, start in enumerate(starts)]
            matvecs += state.matvecs
        estimate = _estimate(torch.stack(samples), matvecs, rtol, torch.finfo(operator.dtype).eps, call)
        if rtol is not None and estimate.converged:
            break
    assert estimate is not None
    return estimate


def _sample(
    start: Tensor, state: LanczosState, i: int, function: Callable[[Tensor], Tensor], call: str
) -> Tensor:
    """Return z^T f(A) z of a probe, from all, half and a quarter of the steps, and its size, [4]."""
    rule = gauss_rule(state, i)
    values, slopes = _with_slope(function, rule.nodes, call)
    forms = [rule.weights @ values, *_from_fewer_steps(state, i, function, call), rule.weights @ values.abs()]
    square = start.double().square().sum().cpu()
    start = widened(start)
    sample = (square * torch.stack(forms)).to(start)
    if state.first.requires_grad:
        coordinates = (rule.vectors @ (slopes * rule.vectors[0])).to(start)
        direction = coordinates @ widened(state.basis[i, : len(rule.nodes)])
        form = square.to(start) * dot(direction, widened(state.first[i]))
        sample = torch.cat([(sample[0] + form - form.detach())[None], sample[1:]])
    return sample


def _from_fewer_steps(
    state: LanczosState, i: int, function: Callable[[Tensor], Tensor], call: str
) -> list[Tensor]:
    """Return the quadrature of half and a quarter of the steps, or of all if the space is invariant."""
    steps, n = state.basis.shape[1:]
    if state.sizes[i] < steps or steps == n:
        fewer = [state.sizes[i]] * 2
    elif steps == 1:
        return [torch.tensor(math.inf, dtype=torch.float64)] * 2
    else:
        half = steps // 2
        fewer = [half, (half + 1) // 2]
    rules = [gauss_rule(state, i, size) for size in fewer]
    return [rule.weights @ _with_slope(function, rule.nodes, call)[0] for rule in rules]


def _with_slope(function: Callable[[Tensor], Tensor], nodes: Tensor, call: str) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        nodes = nodes.clone().requires_grad_()
        values = function(nodes)
    if not is_a(values, Tensor) or values.shape != nodes.shape:
        refuse(f"{call}: function", f"a tensor of the shape of its argument, {list(nodes.shape)}", values)
    if not bool(values.isfinite().all()):
        worst = float(nodes.detach()[~values.isfinite()][0])
        raise ValueError(
            f"{call}: function is not finite at {worst:.4g}, which is about an eigenvalue of the operator. Damp the "
            "operator, H.damped(1e-3), or pass a function that is finite on the whole spectrum."
        )
    if not values.requires_grad:
        return values, torch.zeros_like(values)
    return values.detach(), torch.autograd.grad(values.sum(), nodes, materialize_grads=True)[0]


def _estimate(samples: Tensor, matvecs: int, rtol: float | None, eps: float, call: str) -> Estimate:
    values, halves, quarters, sizes = samples.unbind(1)
    unfinished = _error_of_quadrature(*(column.detach().mean() for column in (values, halves, quarters)))
    rounding = eps * sizes.detach().mean()
    found = from_samples(
        first_order(values, call), torch.hypot(rounding, unfinished),
        matvecs=matvecs,
        method="lanczos quadrature",
        quantity="trace",
    )  # fmt: skip
    if rtol is None:
        converged = bool(unfinished <= standard_error(values.detach(), rounding))
    else:
        converged = is_tight(found, rtol)
    return dataclasses.replace(found, converged=converged)


def _error_of_quadrature(full: Tensor, half: Tensor, quarter: Tensor) -> Tensor:
    """Extrapolate as if the error fell as a power of the steps. The result is too large if the error falls faster."""
    last, before = (full - half).abs(), (half - quarter).abs()
    ratio = torch.where(last < 0.9 * before, last / before, 0.9)
    return last * ratio / (1 - ratio)


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

        >>> from metagrad.curvature.spectrum.quadrature import log_determinant
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
    call = "log_determinant(operator)"
    check_number(f"{call}: damping", damping, 0)
    smallest = checked_size(call, operator) ** 0.5 * torch.finfo(operator.dtype).eps

    def logarithm(nodes: Tensor) -> Tensor:
        shifted = nodes + damping
        worst = float(shifted.detach().min())
        if worst <= smallest * float(shifted.detach().abs().max()):
            more = max(2 * (damping - worst), 1e-6)
            raise ValueError(
                f"{call}: the operator is not positive definite: it has an eigenvalue of {worst:.4g} or less. Damp "
                f"it: pass damping={more:.0e} or more, or use a Gauss-Newton or Fisher operator, "
                "which is semidefinite, with damping."
            )
        return shifted.log()

    estimate = trace_of(operator, logarithm, call=call, **options)
    return dataclasses.replace(estimate, quantity="log-determinant")
