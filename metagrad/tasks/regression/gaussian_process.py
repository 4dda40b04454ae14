"""Regression tasks from Gaussian processes."""

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

JITTER = (
    1e-9  # relative to the variance, so that the Cholesky factor exists for points that are close together
)


def rbf(distance: Tensor) -> Tensor:
    """Return exp(-d^2 / 2) for distances in units of the lengthscale."""
    return torch.exp(-distance.square() / 2)


def matern12(distance: Tensor) -> Tensor:
    """Return exp(-d), the kernel of the Ornstein-Uhlenbeck process, which is not differentiable."""
    return torch.exp(-distance)


def matern32(distance: Tensor) -> Tensor:
    """Return (1 + sqrt(3) d) exp(-sqrt(3) d). The process is differentiable once."""
    scaled = math.sqrt(3) * distance
    return (1 + scaled) * torch.exp(-scaled)


def matern52(distance: Tensor) -> Tensor:
    """Return (1 + sqrt(5) d + 5/3 d^2) exp(-sqrt(5) d). The process is differentiable twice."""
    scaled = math.sqrt(5) * distance
    return (1 + scaled + scaled.square() / 3) * torch.exp(-scaled)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rbf": rbf,
    "matern12": matern12,
    "matern32": matern32,
    "matern52": matern52,
}


class GaussianProcessFunctions:
    """Functions from Gaussian processes. Values are drawn at the points where a function is evaluated.

    The values at all points evaluated so far, in order, are L z. L is the Cholesky factor of their covariance, and z
    are independent normal numbers. More points do not change the leading part of L. So new values are drawn from the
    conditional distribution given the earlier values.

    Args:
        covariance: Maps points [tasks, n, 1] in float64 to covariances [tasks, n, n].
        num_tasks: Number of functions.
        seed: Seed of the normal numbers.
        device: Device of the points.
    """

    def __init__(
        self, covariance: Callable[[Tensor], Tensor], num_tasks: int, seed: int, device: torch.device
    ) -> None:
        self.covariance = covariance
        self.num_tasks = num_tasks
        self._generator = torch.Generator(device).manual_seed(seed)
        self._points = self._noise = torch.empty(num_tasks, 0, 1, dtype=torch.float64, device=device)

    def evaluate(self, x: Tensor) -> Tensor:
        """Return the values of each task at its points.

        Args:
            x: Points, [tasks, points, 1], or [points, 1] for the same points in each task.

        Returns:
            Values, [tasks, points, 1], in the dtype of x.

        Raises:
            ValueError: x has another shape.
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
    r"""Regression tasks from a Gaussian process, with a random lengthscale and scale for each task.

    .. math::
        f \sim GP(0, k), \quad k(x, x') = s^2 \, \kappa(d(x, x') / \ell), \quad
        \ell \sim U[0.1, 0.6], \; s \sim U[0.1, 1], \; x \sim U[-2, 2]

    | kernel | :math:`\kappa(r)` |
    | --- | --- |
    | `"rbf"` | exp(-r^2 / 2) |
    | `"matern12"`, `"matern32"`, `"matern52"` | Matern with smoothness 1/2, 3/2, 5/2 |

    d is the distance of the points. With a `period` p it is their distance on a circle, and `"rbf"` becomes the
    periodic kernel.

    .. math::
        d(x, x') = 2 \left| \sin(\pi (x - x') / p) \right|

    Support targets, query targets and values at later points belong to the same function. Independent noise
    of 3e-5 of the scale keeps the covariance of close points positive definite.

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        kernel: `"rbf"`, `"matern12"`, `"matern32"` or `"matern52"`.
        lengthscale: Lowest and highest lengthscale.
        scale: Lowest and highest standard deviation of a value.
        period: Lowest and highest period. None means that the kernel is not periodic.
        x: Lowest and highest input.
        **arguments: noise, dtype and device of `Regression`.

    Raises:
        ValueError: The kernel is unknown, a number or a range is invalid, or a range is not positive.

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
        """Draw true functions without examples. Their values are drawn where they are evaluated.

        Args:
            num_tasks: Number of functions.
            generator: Source of random numbers. None means torch's global generator.

        Returns:
            The functions, for `sample_examples` and `evaluate`.

        Raises:
            ValueError: num_tasks is below one, or the generator is on another device.
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
