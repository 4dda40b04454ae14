"""The spectral density of an operator, by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.core.checks import check_count, check_positive, is_a
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.spectrum.quadrature import check_quadrature, gauss_rule, krylov_spaces

_CALL = "spectral_density(operator)"


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
        >>> from metagrad.curvature.spectrum.density import Density
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
        total = torch.zeros_like(points)
        for node, weight in zip(to_list(self.nodes[k]), to_list(self.weights[k]), strict=True):
            total += weight * torch.exp(-0.5 * ((points - node) / self.sigma) ** 2)
        return total / (self.sigma * math.sqrt(2 * math.pi))

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

        >>> from metagrad.curvature.spectrum.density import spectral_density
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
    check_quadrature(_CALL, probes, steps, generator)
    check_positive(f"{_CALL}: sigma", sigma, optional=True)
    nodes: list[Tensor] = []
    weights: list[Tensor] = []
    matvecs = 0
    for _, state in krylov_spaces(
        operator, probes, steps=steps, generator=generator, chunk=chunk, call=_CALL
    ):  # fmt: skip
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
