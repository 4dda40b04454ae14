"""Every optimizer at its defaults on eight problems: `python -m experiments.benchmarks.optimizers zoo`.

Two valleys (Rosenbrock, Beale), an ill-conditioned quadratic, a logistic regression without a minimum, a tanh MLP, a
deep ReLU net, a convolutional net with BatchNorm and a transformer, each for 100 steps on all of its data. Printed is
the loss after them; Adam at lr 1e-3 stands beside, and an asterisk marks an end that is not below it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.run.progress import Progress, tell
from metagrad import optim
from metagrad.optim import KFAC, Muon

REFERENCE = "torch.Adam, lr 1e-3"
STEPS = 100


@dataclass(frozen=True)
class Problem:
    """A model and the loss on all of its data."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


class Point(nn.Module):
    """Parameters by themselves, in no layer; a matrix of one row, which every optimizer takes."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([values]))

    def forward(self) -> Tensor:
        """Return them."""
        return self.w[0]


def least_squares(start: Sequence[float], residuals: Callable[[Tensor], Tensor]) -> Problem:
    """Return the problem of a sum of squares, in a form whose curvature is known."""

    def loss(model: nn.Module) -> Tensor:
        found = residuals(model())
        return F.mse_loss(found, torch.zeros_like(found), reduction="sum")

    return Problem(Point(*start), loss)


def rosenbrock() -> Problem:
    """Rosenbrock's valley from (-1.2, 1); 0 at (1, 1)."""
    return least_squares((-1.2, 1.0), lambda w: torch.stack([1 - w[0], 10 * (w[1] - w[0] ** 2)]))


def beale() -> Problem:
    """Beale's function from (1, 1); 0 at (3, 0.5)."""
    values, powers = torch.tensor([1.5, 2.25, 2.625]), torch.tensor([1.0, 2.0, 3.0])
    return least_squares((1.0, 1.0), lambda w: values - w[0] * (1 - w[1] ** powers))


def quadratic() -> Problem:
    """A convex quadratic in 20 dimensions, of condition 1e6; 0 at 1."""
    roots = torch.logspace(0, 3, 20)
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(20, 20, generator=generator))[0]
    return least_squares([0.0] * 20, lambda w: roots * (rotation @ (w - 1)))


def logistic() -> Problem:
    """Logistic regression on 40 examples that a plane separates; it has no minimum, and its infimum is 0."""
    x = _drawn(40, 5)
    y = (x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0]) > 0).float().unsqueeze(1)
    return Problem(nn.Linear(5, 1), lambda model: F.binary_cross_entropy_with_logits(model(x), y))


def mlp() -> Problem:
    """10-32-32-4 with tanh on 128 examples."""
    return _classifier(_dense(10, 32, 32, 4, nonlinearity=nn.Tanh), _drawn(128, 10), 4)


def deep_relu() -> Problem:
    """Ten layers of width 32 with ReLU on 128 examples."""
    return _classifier(_dense(10, *[32] * 9, 4, nonlinearity=nn.ReLU), _drawn(128, 10), 4)


def batch_norm() -> Problem:
    """Two convolutions with BatchNorm on 64 images of 8 x 8."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 4),
    )
    return _classifier(model, _drawn(64, 1, 8, 8), 4)


def transformer() -> Problem:
    """Two pre-norm blocks of width 16 on 32 sequences of 8 tokens, of each of which the sum modulo 4 is asked."""
    tokens = torch.randint(8, (32, 8), generator=torch.Generator().manual_seed(0))
    return Problem(Sequences(), lambda model: F.cross_entropy(model(tokens), tokens.sum(1) % 4))


class Sequences(nn.Module):
    """A classifier of sequences; attention is written out, since fused kernels have no second derivative."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.Sequential(Attention(width), Dense(width), Attention(width), Dense(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return four scores of each sequence."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)).mean(1))


class Attention(nn.Module):
    """Pre-norm attention of two heads, added to its input."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape."""
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.outer((weights @ v).transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """A pre-norm layer of four times the width, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape."""
        return x + self.layers(x)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    make.__name__: make
    for make in (rosenbrock, beale, quadratic, logistic, mlp, deep_relu, batch_norm, transformer)
}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _dense(*sizes: int, nonlinearity: Callable[[], nn.Module]) -> nn.Module:
    layers = [(nn.Linear(*pair), nonlinearity()) for pair in pairwise(sizes)]
    return nn.Sequential(*[module for pair in layers for module in pair][:-1])


def _classifier(model: nn.Module, x: Tensor, num_classes: int) -> Problem:
    """Let a random function of the inputs, a quadratic one, be learned."""
    flat = x.flatten(1)
    directions = torch.randn(num_classes, 2, flat.shape[1], generator=torch.Generator().manual_seed(1))
    scores = torch.einsum("nd,cd->nc", flat, directions[:, 0]) * torch.einsum(
        "nd,cd->nc", flat, directions[:, 1]
    )
    y = scores.argmax(1)
    return Problem(model, lambda model: F.cross_entropy(model(x), y))


Make = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]


def _of_all(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: [make(model.parameters(), **options)]


def _muon(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
    """Give matrices to Muon, and what is left to AdamW, as its authors do."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [Muon(matrices), *([torch.optim.AdamW(others)] if others else [])]


SECOND_ORDER: dict[str, Make] = {
    "NewtonCG": _of_all(optim.NewtonCG),
    "GaussNewton": _of_all(optim.GaussNewton),
    "LBFGS": _of_all(optim.LBFGS),
    "KFAC": lambda model: [KFAC(model)],
    "KFAC, eigen": lambda model: [KFAC(model, eigen=True)],
    "KFAC, sampled": lambda model: [KFAC(model, fisher="sampled", seed=0)],
    "Shampoo": _of_all(optim.Shampoo),
    "SOAP": _of_all(optim.SOAP),
    "AdaHessian": _of_all(optim.AdaHessian, seed=0),
    "SophiaH": _of_all(optim.SophiaH, seed=0),
    "SophiaG": _of_all(optim.SophiaG, seed=0),
}
FIRST_ORDER: dict[str, Make] = {
    "Lion": _of_all(optim.Lion),
    "Muon": _muon,
    "SparseAdam": _of_all(optim.SparseAdam),
}
OPTIMIZERS: Mapping[str, Make] = {
    REFERENCE: _of_all(torch.optim.Adam, lr=1e-3),
    **SECOND_ORDER,
    **FIRST_ORDER,
}


def trained(problem: Problem, make: Make, steps: int = STEPS) -> float:
    """Take steps on a copy of the model, and return the loss after them; NaN where a step refuses."""
    model = copy.deepcopy(problem.model)
    first, *others = make(model)

    def closure() -> Tensor:
        model.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        return loss

    try:
        for _ in range(steps):
            first.step(closure)  # type: ignore[reportArgumentType]
            for other in others:
                other.step()
    except FloatingPointError:
        return math.nan
    with torch.no_grad():
        return float(problem.loss(model))


def made(name: str, seed: int = 0) -> Problem:
    """Make a problem; a seed draws the weights of its model."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return PROBLEMS[name]()


def row(name: str, losses: Mapping[str, float], reference: Mapping[str, float]) -> str:
    """Format the losses of an optimizer in Markdown; an asterisk marks those that are not below the reference."""
    marks = ["" if name == REFERENCE or losses[p] < reference.get(p, math.inf) else "*" for p in losses]
    cells = [f"{loss:.2g}{mark}" for loss, mark in zip(losses.values(), marks, strict=True)]
    return f"| {name} | {' | '.join(cells)} |"


def main(optimizers: Sequence[str], out: Path) -> None:
    """Train all problems by some optimizers, and print and write a row for each."""
    reference = {name: trained(made(name), OPTIMIZERS[REFERENCE]) for name in PROBLEMS}
    lines = [f"| optimizer | {' | '.join(PROBLEMS)} |", f"| --- |{' ---: |' * len(PROBLEMS)}"]
    print("\n".join(lines), flush=True)
    for name in Progress(optimizers, unit="optimizer"):
        losses = {problem: trained(made(problem), OPTIMIZERS[name]) for problem in PROBLEMS}
        lines.append(row(name, losses, reference))
        tell(lines[-1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "zoo.md").write_text("\n".join(lines) + "\n")
