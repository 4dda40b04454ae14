r"""Four differential equations with known solutions, for physics-informed networks in float64.

A network, or a function of it, is :math:`u(z)` for points :math:`z`. The loss is the mean square of the residual at
points inside, plus the mean square of :math:`u` minus its value at points on the boundary.

`python -m experiments.studies.equations [--out FILE] [--seconds N]` solves each by Gauss-Newton and
draws the solutions with their errors.

Raissi, Perdikaris, Karniadakis, "Physics-informed neural networks", J. Comput. Phys. 378, 2019, for Burgers' and the
Allen-Cahn equation. Müller, Zeinhofer, "Achieving high accuracy with PINNs via energy natural gradient descent", ICML
2023, for Poisson's.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jacrev

import metagrad as mg
from experiments.benchmarks.arguments import add_words
from experiments.run.plots.style import figure
from experiments.studies.characters import Examples

Function = Callable[[Tensor], Tensor]
"""Maps points `[..., 2]` to values `[...]`."""
F64 = torch.float64
VISCOSITY = 0.01 / math.pi  # of Burgers' equation
DIFFUSION = 1e-4  # of the Allen-Cahn equation


class Jet(NamedTuple):
    """A function at one or several points, with derivatives with respect to the coordinates."""

    z: Tensor  # [..., 2]
    u: Tensor  # [...]
    first: Tensor  # [..., 2]
    second: Tensor  # [..., 2], the diagonal of the Hessian


class Equation(NamedTuple):
    """A differential equation, its points, and the network that solves it."""

    network: nn.Module
    residual: Callable[[Jet], Tensor]
    inside: Tensor  # [N, 2]
    edge: Examples | None  # points of the boundary with their values
    test: Examples  # points with the values of the solution
    lift: Callable[[Function, Tensor], Tensor] = lambda network, z: network(z)  # the network to u

    def at(self, z: Tensor) -> Tensor:
        """Evaluate u at points `[..., 2]`."""
        return self.lift(lambda z: self.network(z)[..., 0], z)

    def residuals(self) -> Tensor:
        """Return the residuals at all points inside, `[N]`. A backward pass handles all points."""
        z = self.inside.detach().requires_grad_()
        u = self.at(z)
        first = mg.grad(u.sum(), z, create_graph=True)
        second = [mg.grad(part.sum(), z, create_graph=True)[:, i] for i, part in enumerate(first.unbind(1))]
        return self.residual(Jet(z, u, first, torch.stack(second, 1)))

    def loss(self) -> Tensor:
        """Return the loss with its graph."""
        inside = self.residuals()
        loss = F.mse_loss(inside, torch.zeros_like(inside))
        return loss if self.edge is None else loss + F.mse_loss(self.at(self.edge.x), self.edge.y)

    def loss_of(self, optimizer: mg.optim.GaussNewton) -> Tensor:
        """Return the same loss, from residuals that are passed to an optimizer."""
        loss = optimizer.residuals(self.residual_at, self.inside)
        if self.edge is not None:
            loss = loss + optimizer.residuals(lambda p, z, y: self._value(p, z) - y, *self.edge)
        return loss

    def residual_at(self, params: dict[str, Tensor], z: Tensor) -> Tensor:
        """Return the residual at one point."""

        def first(z: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            slope, u = grad_and_value(self._value, argnums=1)(params, z)
            return slope, (slope, u)

        hessian, (slope, u) = jacrev(first, has_aux=True)(z)
        return self.residual(Jet(z, u, slope, hessian.diagonal()))

    def error(self) -> float:
        """Return the relative error of the solution in the L2 norm."""
        with torch.no_grad():
            wrong = self.at(self.test.x) - self.test.y
        return float(wrong.norm() / self.test.y.norm())

    def _value(self, params: dict[str, Tensor], z: Tensor) -> Tensor:
        return self.lift(lambda z: functional_call(self.network, params, (z,))[..., 0], z)


def poisson() -> Equation:
    """Return Poisson's equation in the unit square, with u = sin(pi x) sin(pi y)."""

    def solution(z: Tensor) -> Tensor:
        return (math.pi * z).sin().prod(-1)

    middle = (torch.arange(16, dtype=F64) + 0.5) / 16
    along = torch.arange(16, dtype=F64) / 16
    edge, test = square(along, 0, 1), grid(torch.linspace(0, 1, 50, dtype=F64))
    return Equation(
        tanh_network(2, 32),
        lambda jet: jet.second.sum(-1) + 2 * math.pi**2 * solution(jet.z),
        torch.cartesian_prod(middle, middle),
        Examples(edge, torch.zeros(len(edge), dtype=F64)),
        Examples(test, solution(test)),
    )


def helmholtz() -> Equation:
    """Return the Helmholtz equation in the square [-1, 1], with u = sin(pi x) sin(4 pi y)."""
    waves = torch.tensor([math.pi, 4 * math.pi], dtype=F64)
    weight = 1 / float(waves.square().sum())  # so that residuals have the scale of values

    def solution(z: Tensor) -> Tensor:
        return (waves * z).sin().prod(-1)

    middle = (torch.arange(24, dtype=F64) + 0.5) / 12 - 1
    edge, test = (
        square((torch.arange(30, dtype=F64) + 0.5) / 15 - 1, -1, 1),
        grid(torch.linspace(-1, 1, 60, dtype=F64)),
    )
    return Equation(
        tanh_network(2, 24, 24),
        lambda jet: weight * (jet.second.sum(-1) + jet.u + (1 / weight - 1) * solution(jet.z)),
        torch.cartesian_prod(middle, middle),
        Examples(edge, torch.zeros(len(edge), dtype=F64)),
        Examples(test, solution(test)),
    )


def burgers() -> Equation:
    """Return Burgers' equation for 0 < t < 1 and -1 < x < 1, whose solution has a shock at x = 0.

    Half of the points are close to the shock. The solution by Cole and Hopf is integrated numerically.
    """
    even, dense = (scattered(2000, seed) for seed in (1, 2))
    dense[:, 1] = torch.sinh(3 * dense[:, 1]) / math.sinh(3)
    start, side = torch.linspace(-1, 1, 100, dtype=F64), torch.linspace(0, 1, 40, dtype=F64)
    edge = torch.cat([pairs(0.0, start), pairs(side, -1.0), pairs(side, 1.0)])
    values = torch.where(edge[:, 0] == 0, -(math.pi * edge[:, 1]).sin(), 0.0)
    test = torch.cartesian_prod(torch.linspace(0.02, 1, 50, dtype=F64), torch.linspace(-1, 1, 201, dtype=F64))
    return Equation(
        tanh_network(2, 20, 20, 20),
        lambda jet: jet.first[..., 0] + jet.u * jet.first[..., 1] - VISCOSITY * jet.second[..., 1],
        torch.cat([even, dense]),
        Examples(edge, values),
        Examples(test, cole_hopf(test)),
    )


def cole_hopf(z: Tensor) -> Tensor:
    """Return the solution of Burgers' equation at points (t, x).

    Basdevant et al., "Spectral and finite difference solutions of the Burgers equation", Computers & Fluids 14, 1986.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    t, x = z.numpy().T[..., None]
    at = x - 2 * np.sqrt(VISCOSITY * t) * nodes
    exponents = -np.cos(np.pi * at) / (2 * np.pi * VISCOSITY)
    weighted = weights * np.exp(exponents - exponents.max(1, keepdims=True))
    return torch.from_numpy(-(np.sin(np.pi * at) * weighted).sum(1) / weighted.sum(1))


def allen_cahn() -> Equation:
    """Return the Allen-Cahn equation for 0 < t < 1, periodic in -1 < x < 1.

    The start, x^2 cos(pi x), and the period are parts of the function, so there are no points on the boundary. A
    spectral method computes the solution.
    """
    times, places, values = spectral(0.02)

    def residual(jet: Jet) -> Tensor:
        return jet.first[..., 0] - DIFFUSION * jet.second[..., 1] + 5 * (jet.u**3 - jet.u)

    return Equation(
        nn.Sequential(Periodic(), tanh_network(3, 24, 24, 24)),
        residual,
        scattered(1000, 3),
        None,
        Examples(torch.cartesian_prod(times, places), values.flatten()),
        lambda network, z: z[..., 1] ** 2 * (math.pi * z[..., 1]).cos() + z[..., 0] * network(z),
    )


def spectral(every: float, places: int = 512, step: float = 1e-3) -> tuple[Tensor, Tensor, Tensor]:
    """Return times, every fourth place, and the solution of the Allen-Cahn equation there.

    Kassam, Trefethen, "Fourth-order time-stepping for stiff PDEs", SIAM J. Sci. Comput. 26, 2005, section 3.
    """
    x = np.linspace(-1, 1, places, endpoint=False)
    linear = step * (5 - DIFFUSION * (np.pi * np.fft.fftfreq(places, 1 / places)) ** 2)
    circle = linear[:, None] + np.exp(1j * np.pi * (np.arange(1, 33) - 0.5) / 32)  # means over it are exact
    whole, half = np.exp(linear), np.exp(linear / 2)
    exp, cube = np.exp(circle), circle**3
    q = step * ((np.exp(circle / 2) - 1) / circle).mean(1).real
    f = [
        step * (terms / cube).mean(1).real
        for terms in (
            -4 - circle + exp * (4 - 3 * circle + circle**2),
            2 + circle + exp * (circle - 2),
            -4 - 3 * circle - circle**2 + exp * (4 - circle),
        )
    ]

    def reaction(v: np.ndarray) -> np.ndarray:
        return np.fft.fft(-5 * np.fft.ifft(v).real ** 3)

    v, kept = np.fft.fft(x**2 * np.cos(np.pi * x)), []
    for i in range(1, round(1 / step) + 1):
        first = reaction(v)
        a = half * v + q * first
        second = reaction(a)
        third = reaction(half * v + q * second)
        fourth = reaction(half * a + q * (2 * third - first))
        v = whole * v + f[0] * first + 2 * f[1] * (second + third) + f[2] * fourth
        if i % round(every / step) == 0:
            kept.append(np.fft.ifft(v).real[::4])
    times = every * torch.arange(1, len(kept) + 1, dtype=F64)
    return times, torch.from_numpy(x[::4].copy()), torch.from_numpy(np.stack(kept))


class Periodic(nn.Module):
    """Maps points (t, x) to t and one wave of x."""

    def forward(self, z: Tensor) -> Tensor:
        """Return `[..., 3]`."""
        t, x = z.unbind(-1)
        return torch.stack([t, (math.pi * x).cos(), (math.pi * x).sin()], -1)


def tanh_network(inputs: int, *hidden: int) -> nn.Module:
    """Return a network of tanh units with one output."""
    return mg.models.MLP([inputs, *hidden, 1], nn.Tanh).double()


def scattered(number: int, seed: int) -> Tensor:
    """Return points of a low-discrepancy sequence in [0, 1] x [-1, 1]."""
    points = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(number, dtype=F64)
    return torch.stack([points[:, 0], 2 * points[:, 1] - 1], 1)


def grid(along: Tensor) -> Tensor:
    """Return all pairs of the numbers ``along``, ``[n * n, 2]``."""
    return torch.cartesian_prod(along, along)


def square(along: Tensor, low: float, high: float) -> Tensor:
    """Return points on the four sides of a square."""
    sides = (pairs(along, low), pairs(along, high), pairs(low, along), pairs(high, along))
    return torch.cat(sides)


def pairs(first: Tensor | float, second: Tensor | float) -> Tensor:
    """Return pairs of a tensor and a number, or of two tensors."""
    columns = (torch.as_tensor(column, dtype=F64) for column in (first, second))
    return torch.stack(torch.broadcast_tensors(*columns), 1)


OF_TIME = ("burgers", "allen_cahn")
EQUATIONS: dict[str, Callable[[], Equation]] = {
    "poisson": poisson,
    "helmholtz": helmholtz,
    "burgers": burgers,
    "allen_cahn": allen_cahn,
}


def solved(name: str, seconds: float, seed: int = 0) -> Equation:
    """Solve an equation by dense Gauss-Newton steps for a number of CPU seconds."""
    torch.manual_seed(seed)
    equation = EQUATIONS[name]()
    optimizer = mg.optim.GaussNewton(equation.network.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = equation.loss_of(optimizer)
        loss.backward()
        return loss

    began = time.process_time()
    while time.process_time() - began < seconds:
        optimizer.step(closure)
    return equation


def draw(path: Path, found: dict[str, Equation]) -> None:
    """Draw each solution, and below it the logarithm of its error."""
    with figure(path, 2, len(found), size=(11, 5)) as axes:
        for column, (name, equation) in zip(axes.T, found.items(), strict=True):
            z, exact = equation.test
            first, second = (coordinate.unique() for coordinate in z.T)
            with torch.no_grad():
                u = equation.at(z)
            log_error = (u - exact).abs().clamp(min=1e-16).log10()
            titles = (name.replace("_", "-").title(), f"relative error {equation.error():.1e}")
            for axis, values, title in zip(column, (u, log_error), titles, strict=True):
                picture = axis.pcolormesh(first, second, values.view(len(first), -1).T, rasterized=True)
                axis.figure.colorbar(picture, ax=axis)
                axis.set_title(title)
                axis.grid(False)
            column[1].set_xlabel("t to the right, x up" if name in OF_TIME else "x to the right, y up")
        axes[0, 0].set_ylabel("solution u")
        axes[1, 0].set_ylabel("log10 of the absolute error")


def main() -> None:
    """Solve the equations that are named, by default all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_words(parser, "equations", EQUATIONS)
    parser.add_argument("--out", type=Path, help="where the picture goes")
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU seconds of each (30)")
    arguments = parser.parse_args()
    found = {name: solved(name, arguments.seconds) for name in arguments.equations}
    for name, equation in found.items():
        print(f"{name}: relative L2 error {equation.error():.2g}")
    if arguments.out is not None:
        draw(arguments.out, found)


if __name__ == "__main__":
    main()
