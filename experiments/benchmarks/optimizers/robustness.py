"""Which optimizers learn at their defaults: `python -m experiments.benchmarks.optimizers robustness`.

Three small networks in float32 from 20 seeds each, 25 steps of a closure over all data. Of each run the last loss
over the first counts: its median, how many are NaN, above 1 and below 0.1; and of all steps how many raised the loss.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.run.progress import Progress
from metagrad import optim

NUM_SEEDS, NUM_STEPS = 20, 25

Problem = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and what computes its loss."""


def _network(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def tanh_classifier() -> Problem:
    """Cross-entropy of a tanh 4-8-3 network on 12 examples, which it can learn by heart."""
    model, x = _network([4, 8, 3], nn.Tanh), torch.randn(12, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return model, lambda: F.cross_entropy(model(x), y)


def relu_classifier() -> Problem:
    """Cross-entropy of a ReLU 10-32-32-4 network on 128 examples with labels of a linear model."""
    model, x = _network([10, 32, 32, 4], nn.ReLU), torch.randn(128, 10)
    y = (x @ torch.randn(10, 4)).argmax(1)
    return model, lambda: F.cross_entropy(model(x), y)


def tanh_regression() -> Problem:
    """Squared error of a tanh 1-20-20-1 network on 64 points of a sine."""
    model, x = _network([1, 20, 20, 1], nn.Tanh), torch.linspace(-2, 2, 64)[:, None]
    y = torch.sin(3 * x)
    return model, lambda: F.mse_loss(model(x), y)


NETS: dict[str, Callable[[], Problem]] = {
    "tanh 4-8-3": tanh_classifier,
    "ReLU 10-32-32-4": relu_classifier,
    "tanh 1-20-20-1": tanh_regression,
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "NewtonCG": lambda model: optim.NewtonCG(model.parameters()),
    "GaussNewton": lambda model: optim.GaussNewton(model.parameters()),
    "LBFGS": lambda model: optim.LBFGS(model.parameters()),
    "torch.optim.Adam, lr=0.01": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


@dataclass(frozen=True)
class Outcome:
    """The runs of one optimizer on one network."""

    ratios: tuple[float, ...]  # the last loss over the first, of each seed
    rises: int  # steps that raised the loss, of all seeds
    steps: int  # of one seed
    products: float  # with the curvature, of a step, on average; NaN where there are none

    @property
    def num_nan(self) -> int:
        """How many runs end at NaN, or at infinity."""
        return sum(not math.isfinite(ratio) for ratio in self.ratios)

    @property
    def num_above_first(self) -> int:
        """How many end above where they began."""
        return sum(ratio > 1 for ratio in self.ratios)

    @property
    def num_below_a_tenth(self) -> int:
        """How many end below a tenth of where they began."""
        return sum(ratio < 0.1 for ratio in self.ratios)

    @property
    def median(self) -> float:
        """The median of the ratios, where NaN counts as infinity."""
        return statistics.median(ratio if math.isfinite(ratio) else math.inf for ratio in self.ratios)


def run(
    net: Callable[[], Problem],
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    seeds: Sequence[int] = range(NUM_SEEDS),
    steps: int = NUM_STEPS,
) -> Outcome:
    """Run an optimizer on a network from several seeds.

    Args:
        net: Makes model, data and loss of torch's global random numbers.
        make: Makes the optimizer of a model.
        seeds: Of those numbers.
        steps: How many steps each run takes.
    """
    ratios, rises, products = [], 0, []
    for seed in seeds:
        torch.manual_seed(seed)
        model, loss_of = net()
        losses, counted = losses_of(make(model), loss_of, steps)
        ratios.append(losses[-1] / losses[0])
        rises += sum(after > before for before, after in itertools.pairwise(losses))
        products += counted
    return Outcome(tuple(ratios), rises, steps, statistics.mean(products) if products else math.nan)


def losses_of(
    opt: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int
) -> tuple[list[float], list[int]]:
    """Take steps by a closure; return the losses, the last one after all of them, and the products of each step."""

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    losses, products = [], []
    for _ in range(steps):
        losses.append(float(opt.step(closure).detach()))  # type: ignore
        products += [opt.stats["products"]] if "products" in getattr(opt, "stats", {}) else []  # type: ignore
    return [*losses, float(loss_of().detach())], products


def main(names: Sequence[str], out: Path) -> None:
    """Run optimizers on every network; print a table of each, and write all of them to a file."""
    tables = []
    for net, make in NETS.items():
        outcomes = {
            name: run(make, OPTIMIZERS[name]) for name in Progress(names, unit="optimizer", leave=False)
        }
        tables.append(table({net: outcomes}))
        print(tables[-1], end="\n\n", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "robustness.md").write_text("\n\n".join(tables) + "\n")


def table(rows: dict[str, dict[str, Outcome]]) -> str:
    """Write outcomes by network and optimizer as a Markdown table."""
    lines = [
        "| net | optimizer | last / first loss, median | NaN | above first | below a tenth | rises | products |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for net, outcomes in rows.items():
        for name, one in outcomes.items():
            of, taken = len(one.ratios), len(one.ratios) * one.steps
            lines.append(
                f"| {net} | {name} | {one.median:.2g} | {one.num_nan} of {of} | {one.num_above_first} of {of} "
                f"| {one.num_below_a_tenth} of {of} | {one.rises} of {taken} | {one.products:.3g} |"
            )
    return "\n".join(lines)
