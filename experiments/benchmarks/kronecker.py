"""K-FAC as a preconditioner and for influence functions: `python -m experiments.benchmarks.kronecker`.

A tanh network 32-48-32-10 learns 2,000 random examples that a random teacher labels, by Adam until its loss is at
most `--loss`. The first table has the steps of conjugate gradients on the damped Gauss-Newton matrix, by
preconditioner. The right-hand side is the gradient of the loss, and a random vector in the last columns. The second
table has the correlation of influence scores with exact influence scores, averaged over queries.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.progress import Progress

SIZES, EXAMPLES, QUERIES, LR = [32, 48, 32, 10], 2000, 10, 3e-3
DAMPINGS = (1e-2, 1e-3, 1e-4, 1e-5)
KINDS: dict[str, dict[str, Any]] = {
    "K-FAC, sampled": {"fisher": "sampled"},
    "K-FAC, exact": {"fisher": "exact"},
    "EK-FAC, sampled": {"fisher": "sampled", "correct": True},
    "EK-FAC, exact": {"fisher": "exact", "correct": True},
}
"""The arguments of `mg.kfac`."""


class Work:
    """The trained network, its data, and its Kronecker approximations, in float64."""

    def __init__(self, loss: float) -> None:
        torch.manual_seed(0)
        teacher, self.net = network(), network()
        x = torch.randn(EXAMPLES + QUERIES, SIZES[0], dtype=torch.float64)
        y = (4 * teacher(x)).detach().argmax(1)
        self.train, self.queries = (x[:EXAMPLES], y[:EXAMPLES]), (x[EXAMPLES:], y[EXAMPLES:])
        self.loss, self.steps = self._fit(loss)
        self.params = dict(self.net.named_parameters())
        self.kronecker = {name: mg.kfac(*self.problem, **given) for name, given in KINDS.items()}

    @property
    def problem(self) -> tuple[Any, Any, Any, Any]:
        """The arguments of `mg.ggn` and `mg.kfac`."""
        return self.net, F.cross_entropy, self.params, self.train

    def _fit(self, target: float) -> tuple[float, int]:
        optimizer, (x, y) = torch.optim.Adam(self.net.parameters(), lr=LR), self.train
        steps = 0
        while (loss := F.cross_entropy(self.net(x), y)) > target:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        return loss.item(), steps

    def cg_steps(self, damping: float, rtol: float) -> list[int]:
        """Return the steps for the gradient of the loss, by approximation, then for a random vector."""
        with mg.ggn(*self.problem) as G:

            def steps(b: Tensor, name: str | None) -> int:
                P = None if name is None else self.kronecker[name].inverse(damping)
                solved = G.solve(b, damping=damping, rtol=rtol, max_steps=20_000, preconditioner=P)
                return int(solved.stats.steps)

            random = torch.randn(G.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            return [
                *(steps(self.gradient(), name) for name in (None, *KINDS)),
                *(steps(random, name) for name in (None, "EK-FAC, exact")),
            ]

    def gradient(self) -> Tensor:
        """Return the gradient of the training loss, flat."""
        x, y = self.train
        grads = torch.autograd.grad(F.cross_entropy(self.net(x), y), list(self.params.values()))
        return torch.cat([grad.flatten() for grad in grads])

    def correlations(self, damping: float) -> list[float]:
        """Return the correlation with the exact scores for each method of `INFLUENCE`."""
        exact = self.scores(damping, method="exact")
        K, E = self.kronecker["EK-FAC, sampled"], self.kronecker["EK-FAC, exact"]
        found = [
            self.scores(damping),
            self.scores(damping, preconditioner=K),
            self.scores(damping, preconditioner=E),
            self.scores(damping, preconditioner=E, max_steps=20),
            self.scores(damping, preconditioner=E, method="kfac"),
        ]
        return [correlation(scores, exact) for scores in found]

    def scores(self, damping: float, **options: Any) -> Tensor:
        """Return the influence of the examples on the queries."""
        return mg.influence(*self.problem, self.queries, damping=damping, **options).scores


INFLUENCE = (
    "CG, 10 steps",
    "with EK-FAC sampled",
    "with EK-FAC exact",
    "20 steps",
    "EK-FAC exact alone",
)


def network() -> nn.Sequential:
    """Return a tanh network in float64."""
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def correlation(scores: Tensor, exact: Tensor) -> float:
    """Return the Pearson correlation, averaged over queries."""
    pairs = zip(scores, exact, strict=True)
    return torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean().item()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="CG steps and influence scores with K-FAC.")
    parser.add_argument("--loss", type=float, default=0.25, help="train until this loss (0.25)")
    parser.add_argument("--dampings", type=float, nargs="+", default=DAMPINGS, help="of the matrix")
    parser.add_argument("--rtol", type=float, default=1e-2, help="relative residual of the solves (1e-2)")
    arguments = parser.parse_args()
    work = Work(arguments.loss)
    print(f"3,482 parameters, {EXAMPLES:,} examples, loss {work.loss:.3g} after {work.steps} steps of Adam\n")
    solves = [["CG steps", "plain", *KINDS, "random vector, plain", "random vector, EK-FAC exact"]]
    influence = [["correlation", *INFLUENCE]]
    for damping in Progress(arguments.dampings, unit="damping", leave=False):
        solves.append([f"{damping:.0e}", *map(str, work.cg_steps(damping, arguments.rtol))])
        influence.append([f"{damping:.0e}", *(f"{c:.3f}" for c in work.correlations(damping))])
    print(markdown(solves), markdown(influence), sep="\n\n")


if __name__ == "__main__":
    main()
