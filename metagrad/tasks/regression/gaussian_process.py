"""Regression to draws of Gaussian processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from metagrad.core._torch import linalg
from metagrad.core.checks import check_choice, check_positive
from metagrad.tasks._checks import check_counts
from metagrad.tasks.regression.family import Range, Regression, check_points

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

JITTER = 1e-9  # of the variance of a value; keeps the Cholesky factor of points that are close together real


def rbf(distance: Tensor) -> Tensor:
    """Return exp(-d^2 / 2), of distances in units of the lengthscale."""
    return torch.exp(-distance.square() / 2)


def matern12(distance: Tensor) -> Tensor:
    """Return exp(-d): the Ornstein-Uhlenbeck process, continuous and nowhere differentiable."""
    return torch.exp(-distance)


def matern32(distance: Tensor) -> Tensor:
    """Return (1 + sqrt(3) d) exp(-sqrt(3) d): differentiable once."""
    scaled = math.sqrt(3) * distance
    return (1 + scaled) * torch.exp(-scaled)


def matern52(distance: Tensor) -> Tensor:
    """Return (1 + sqrt(5) d + 5/3 d^2) exp(-sqrt(5) d): differentiable twice."""
    scaled = math.sqrt(5) * distance
    return (1 + scaled + scaled.square() / 3) * torch.exp(-scaled)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rbf": rbf,
    "matern12": matern12,
    "matern32": matern32,
    "matern52": matern52,
}


class GaussianProcessFunctions:
    """Draw the values of Gaussian processes where they are asked for, and keep to those that were drawn.

    The values at all points asked for so far, in that order, are L z, where L is the Cholesky factor of their
    covariance and z independent normal numbers. Appending points leaves the leading part of L as it is, so that
    new values are drawn from the process given the old ones.

    Args:
        covariance: Maps points [tasks, n, 1] in float64 to covariances [tasks, n, n].
        num_tasks: Number of functions.
        seed: Of the normal numbers.
        device: Where the points are.
    """

    def __init__(
        self, covariance: Callable[[Tensor], Tensor], num_tasks: int, seed: int, device: torch.device
    ) -> None:
        self.covariance = covariance
        self.num_tasks = num_tasks
        self._generator = torch.Generator(device).manual_seed(seed)
        self._points = self._noise = torch.empty(num_tasks, 0, 1, dtype=torch.float64, device=device)

    def evaluate(self, x: Tensor) -> Tensor:
        """Return every task's values at its points.

        Args:
            x: Points [tasks, points, 1], or [points, 1] to evaluate all tasks at the same points.

        Returns:
            Values [tasks, points, 1], of the type of x.

        Raises:
            ValueError: When x has another shape.
        """
        check_points("GaussianProcessFunctions.evaluate(x)", x, self.num_tasks)
        new = x.to(torch.float64).expand(self.num_tasks, -1, 1)
        noise = torch.randn(new.shape, generator=self._generator, dtype=new.dtype, device=new.device)
        self._points, self._noise = torch.cat([self._points, new], 1), torch.cat([self._noise, noise], 1)
        covariance = self.covariance(self._points)
        jitter = JITTER * covariance.diagonal(dim1=1, dim2=2)
        factor = linalg.cholesky(covariance + torch.diag_embed(jitter))
        return (factor @ self._noise)[:, -new.shape[1] :].to(x.dtype)


class GaussianProcess(Regression):
    r"""Regression tasks drawn from a Gaussian process, whose lengthscale and scale each task draws too.

    .. math::
        f \sim GP(0, k), \quad k(x, x') = s^2 \, \kappa(d(x, x') / \ell), \quad
        \ell \sim U[0.1, 0.6], \; s \sim U[0.1, 1], \; x \sim U[-2, 2]

    | kernel | :math:`\kappa(r)` |
    | --- | --- |
    | `"rbf"` | exp(-r^2 / 2) |
    | `"matern12"`, `"matern32"`, `"matern52"` | Matern of smoothness 1/2, 3/2, 5/2 |

    d is the distance of the points, or with a `period` p that of the points on a circle: `"rbf"` then is the
    periodic kernel.

    .. math::
        d(x, x') = 2 \left| \sin(\pi (x - x') / p) \right|

    Targets of support and query examples, and what the functions are asked for later, are one draw, up to
    independent noise of 3e-5 of the scale that keeps the covariance of close points positive.

    Args:
        shots: Support examples of a task.
        queries: Query examples of a task.
        kernel: `"rbf"`, `"matern12"`, `"matern32"` or `"matern52"`.
        lengthscale: Lowest and highest lengthscale.
        scale: Lowest and highest standard deviation of a value.
        period: Lowest and highest period; None is not periodic.
        x: Lowest and highest input.
        **arguments: As of `Regression`: noise, dtype and device.

    Raises:
        ValueError: For an unknown kernel, counts below one, a range that does not ascend or has no positive
            ends.

    Examples:
        >>> tasks = GaussianProcess(shots=10, kernel="matern52")
        >>> functions = tasks.sample_functions(4, generator=torch.Generator().manual_seed(0))
        >>> functions.evaluate(torch.linspace(-2, 2, 50).unsqueeze(-1)).shape
        torch.Size([4, 50, 1])

    References:
        Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, sections 4.2.1 and 4.2.3 (eq. 4.31).
        Kim et al., Attentive Neural Processes, 2019 (tasks of Gaussian processes; ranges as in its code).
    """

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        kernel: str = "rbf",
        lengthscale: Range = (0.1, 0.6),
        scale: Range = (0.1, 1.0),
        period: Range | None = None,
        x: Range = (-2.0, 2.0),
        **arguments: Any,
    ) -> None:
        ranges = {"lengthscale": lengthscale, "scale": scale} | ({} if period is None else {"period": period})
        super().__init__(shots, queries, ranges=ranges, x=x, **arguments)
        self.kernel: str = check_choice("GaussianProcess(kernel)", kernel, KERNELS)
        for name, (lowest, _) in self.ranges.items():
            check_positive(f"GaussianProcess({name})", lowest)

    def sample_functions(
        self, num_tasks: int, *, generator: torch.Generator | None = None
    ) -> GaussianProcessFunctions:
        """Draw the true functions alone, whose values are drawn where they are evaluated.

        Args:
            num_tasks: Number of functions.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            The functions, for `sample_examples` and `evaluate`.

        Raises:
            ValueError: When num_tasks is below one, or the generator is on another device.
        """
        check_counts("GaussianProcess.sample", {"num_tasks": num_tasks})
        drawn = {
            name: self.uniform(ends, (num_tasks, 1, 1), generator).double()
            for name, ends in self.ranges.items()
        }
        seed = torch.randint(2**62, (), generator=generator, device=self.device).item()

        def covariance(points: Tensor) -> Tensor:
            difference = points - points.transpose(1, 2)
            if "period" in drawn:
                difference = 2 * torch.sin(math.pi * difference / drawn["period"])
            return drawn["scale"].square() * KERNELS[self.kernel](difference.abs() / drawn["lengthscale"])

        return GaussianProcessFunctions(covariance, num_tasks, int(seed), self.device)
