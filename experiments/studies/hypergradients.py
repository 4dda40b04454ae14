"""Error over cost of every hypergradient: `python -m experiments.studies.hypergradients [--figure PATH]`.

The problem is ridge regression in float64 with a learned penalty for each weight. The derivative of its validation
loss has a closed form. Every method runs at the minimum with increasing numbers of products or steps. The cost
counts floating-point operations, relative to one gradient of the inner loss. The error is the relative error of the
derivative. If the error does not decrease, the method itself is biased: it replaces the Hessian with the identity.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import metagrad as mg
from experiments.run.plots.style import CYCLE, figure
from experiments.run.progress import Progress
from metagrad import hypergrad
from metagrad.hypergrad import HypergradientMethod

if TYPE_CHECKING:
    from metagrad.optim.rules import Rule

MARKERS, DASHES = ("o", "^", "s"), ("-", "--", ":")


class Ridge(NamedTuple):
    """Regression on training examples, with penalties that are evaluated on validation examples."""

    x: Tensor  # [n, d]
    y: Tensor  # [n, 1]
    query_x: Tensor
    query_y: Tensor
    log_penalty: Tensor  # [d, 1]

    def inner(self, params: dict[str, Tensor], hyper: dict[str, Tensor]) -> Tensor:
        """Return the training loss."""
        residual = self.x @ params["w"] - self.y
        penalty = (hyper["log_penalty"].exp() * params["w"].square()).sum()
        return residual.square().mean() / 2 + penalty / 2

    def outer(self, params: dict[str, Tensor], hyper: dict[str, Tensor]) -> Tensor:
        """Return the validation loss."""
        return (self.query_x @ params["w"] - self.query_y).square().mean() / 2

    def hessian(self, log_penalty: Tensor) -> Tensor:
        """Return the Hessian of the training loss."""
        return self.x.mT @ self.x / len(self.y) + torch.diag(log_penalty.exp()[:, 0])

    def minimum(self, log_penalty: Tensor) -> dict[str, Tensor]:
        """Return the weights at the minimum of the training loss."""
        return {"w": torch.linalg.solve(self.hessian(log_penalty), self.x.mT @ self.y / len(self.y))}

    def derivative(self) -> Tensor:
        """Differentiate the closed form."""
        log_penalty = self.log_penalty.clone().requires_grad_()
        return mg.grad(self.outer(self.minimum(log_penalty), {}), log_penalty)


def ridge(d: int, n: int, seed: int = 0) -> Ridge:
    """Make a problem with features on many scales, so that the Hessian is ill-conditioned."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    scales = torch.logspace(0, -1, d, dtype=torch.float64)
    x, query_x, w = draw(n, d) * scales, draw(n, d) * scales, draw(d, 1)
    return Ridge(x, x @ w + draw(n, 1), query_x, query_x @ w + draw(n, 1), -4 + 0.5 * draw(d, 1))


def methods(rule: Rule, lr: float, d: int, longest: int) -> dict[str, list[HypergradientMethod]]:
    """Return a list of settings with increasing cost for each method."""
    steps = [2**i for i in range(12) if 2**i <= longest]
    ranks = [k for k in (1, 4, 16, d // 2, d) if k <= d]

    def over(make: Callable[[int], Any], values: Sequence[int] = steps) -> list[HypergradientMethod]:
        return [make(value) for value in values]

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    H = hypergrad
    return {
        "Exact": [H.Exact()],
        "CG": over(lambda k: H.CG(steps=k)),
        "Neumann": over(lambda k: H.Neumann(steps=k, scale=lr)),
        "Nystrom": over(lambda k: H.Nystrom(rank=k, damping=2e-2, generator=seeded()), ranks),
        "Unroll": over(lambda k: H.Unroll(rule, steps=k)),
        "Unroll, truncated to 32": over(
            lambda k: H.Unroll(rule, steps=k, truncate=32), [k for k in steps if k > 32]
        ),
        "FirstOrder (T1-T2)": [H.FirstOrder(scale=lr)],
        "FiniteDifference (DARTS)": [H.FiniteDifference(lr=lr)],
    }


def measure(problem: Ridge, method: HypergradientMethod, truth: Tensor, unit: int) -> tuple[float, float]:
    """Return cost and error of a call."""
    arguments = (problem.outer, problem.inner, problem.minimum(problem.log_penalty))
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.filterwarnings("ignore", message=".*left a residual")  # the error shows it
        found = mg.hypergradient(*arguments, {"log_penalty": problem.log_penalty}, method=method)
    error = (found["log_penalty"] - truth).norm() / truth.norm()
    return counter.get_total_flops() / unit, error.item()


def gradient_cost(problem: Ridge) -> int:
    """Count the operations of one gradient of the training loss."""
    params = {"w": torch.zeros_like(problem.log_penalty, requires_grad=True)}
    with FlopCounterMode(display=False) as counter:
        mg.grad(problem.inner(params, {"log_penalty": problem.log_penalty}), params)
    return counter.get_total_flops()


def draw(path: Path, curves: dict[str, list[tuple[float, float]]]) -> Path:
    """Draw error over cost, with one line for each method."""
    with figure(path, size=(9.2, 5.2)) as axes:
        axis = axes[0, 0]
        for i, (name, points) in enumerate(curves.items()):
            group = i // len(CYCLE)
            style = {"color": CYCLE[i % len(CYCLE)], "marker": MARKERS[group], "linestyle": DASHES[group]}
            cost, error = zip(*points, strict=True)
            axis.plot(
                cost, [max(e, 1e-16) for e in error], label=name, markersize=4.5, linewidth=1.4, **style
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(1e-16, 30)
        axis.set_xlabel("Cost, in gradients of the inner loss")
        axis.set_ylabel("Relative error of the hypergradient")
        axis.grid(axis="y")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return path


def report(curves: dict[str, list[tuple[float, float]]]) -> str:
    """Format the cheapest and the most expensive call of each method."""
    lines = [f"{'method':28}{'cost':>10}{'error':>11}{'cost':>12}{'error':>11}"]
    for name, points in curves.items():
        (first, worst), (last, best) = points[0], points[-1]
        lines.append(f"{name:28}{first:10.1f}{worst:11.1e}{last:12.1f}{best:11.1e}")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and draw the plot."""
    parser = argparse.ArgumentParser(
        description="Error over cost of every hypergradient, on ridge regression."
    )
    parser.add_argument("--size", type=int, default=50, help="weights, and penalties (50)")
    parser.add_argument("--steps", type=int, default=512, help="the most steps of a method (512)")
    parser.add_argument("--figure", type=Path, default=Path("outputs/hypergradients.png"), help="the plot")
    arguments = parser.parse_args()
    if arguments.size < 4 or arguments.steps < 64:
        parser.error("expected a size of at least 4 and at least 64 steps")
    problem = ridge(arguments.size, 2 * arguments.size)
    lr = 1 / torch.linalg.matrix_norm(problem.hessian(problem.log_penalty), 2).item()
    truth, unit = problem.derivative(), gradient_cost(problem)
    rows = methods(mg.optim.rules.sgd(lr=lr), lr, arguments.size, arguments.steps)
    curves = {
        name: [measure(problem, method, truth, unit) for method in row]
        for name, row in Progress(rows.items(), unit="method", leave=False)
    }
    print(report(curves))
    print(draw(arguments.figure, curves))


if __name__ == "__main__":
    main()
