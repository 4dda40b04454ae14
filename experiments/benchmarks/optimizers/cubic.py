"""What CubicNewton costs beside its products: `python -m experiments.benchmarks.optimizers cubic`.

Steps on networks with tanh, each followed by as many products of the Hessian by nothing but `torch.autograd.grad`.
Printed are the mean number of products, the milliseconds of CPU time of one, and the ratio of the CPU time of steps
to that of the products, and to that of products, a gradient with its graph and a loss, of which a step consists;
medians over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.run.progress import Progress, tell
from experiments.run.seconds import cpu_seconds
from metagrad.optim import CubicNewton

STEPS = 10
NETWORKS: Mapping[str, tuple[list[int], int]] = {
    "4-8-3 on 32 examples": ([4, 8, 3], 32),
    "10-32-32-4 on 128": ([10, 32, 32, 4], 128),
    "64-64-64-10 on 512": ([64, 64, 64, 10], 512),
    "256-256-256-10 on 4096": ([256, 256, 256, 10], 4096),
}
"""Widths, and how many examples there are."""


class Spent(NamedTuple):
    """Seconds of CPU time over some steps."""

    steps: float
    products: float
    others: float  # a gradient with its graph, and the loss at the end of a step
    count: float  # of products


def spent(sizes: list[int], batch: int) -> Spent:
    """Take steps, and products beside them; a first step of each is not counted."""
    torch.manual_seed(0)
    layers = [module for pair in itertools.pairwise(sizes) for module in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    x, y = torch.randn(batch, sizes[0]), torch.randint(sizes[-1], (batch,))
    params, opt = list(model.parameters()), CubicNewton(model.parameters())

    def loss_of() -> Tensor:
        return F.cross_entropy(model(x), y)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    def others() -> list[Tensor]:
        with torch.no_grad():
            loss_of()
        return list(torch.autograd.grad(loss_of(), params, create_graph=True))

    total = Spent(0.0, 0.0, 0.0, 0)
    for step in range(STEPS + 1):
        stepped = cpu_seconds(lambda: opt.step(closure))
        count = int(opt.stats["products"])
        grads, v = others(), [torch.randn_like(p) for p in params]

        def products(count: int = count, grads: list[Tensor] = grads, v: list[Tensor] = v) -> None:
            for _ in range(count):
                torch.autograd.grad(grads, params, v, retain_graph=True)

        found = Spent(stepped, cpu_seconds(products), cpu_seconds(others), count)
        if step:
            total = Spent(*(a + b for a, b in zip(total, found, strict=True)))
    return total


def row(name: str, rounds: int) -> str:
    """Measure a network, in Markdown."""
    runs = [spent(*NETWORKS[name]) for _ in range(rounds)]
    ratio = statistics.median(run.steps / run.products for run in runs)
    whole = statistics.median(run.steps / (run.products + run.others) for run in runs)
    one = statistics.median(1e3 * run.products / run.count for run in runs)
    return f"| {name} | {runs[-1].count / STEPS:.0f} | {one:.2f} | {ratio:.2f} | {whole:.2f} |"


def main(rounds: int, out: Path) -> None:
    """Print and write a row for each network."""
    lines = [
        "| network | products of a step | ms of one | step / products | / all of it |",
        f"| --- |{' ---: |' * 4}",
    ]
    print("\n".join(lines), flush=True)
    for name in Progress(NETWORKS, unit="network"):
        lines.append(row(name, rounds))
        tell(lines[-1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "cubic.md").write_text("\n".join(lines) + "\n")
