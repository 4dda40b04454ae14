"""Training steps on energies and forces, eager and compiled: `python -m experiments.benchmarks.forces`.

The energy of some atoms is a sum over pairs of a network of width 32 on eight radial functions of the distance. A
step computes energies, forces and the gradient of both errors with respect to the parameters. The printed value is
the CPU time of an eager double backward pass in plain torch, divided by the time of each way: the median over rounds
that alternate between the ways.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import metagrad as mg
from experiments.run.files import markdown

SIZES = ((1, 8), (4, 12), (16, 12))  # structures and atoms
STEPS = 30  # of a round


class Energy(nn.Module):
    """The energies of structures ``[batch, atoms, 3]``."""

    centers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.register_buffer("centers", torch.linspace(0.5, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the energies, ``[batch]``."""
        squares = (x[:, :, None] - x[:, None]).square().sum(-1)
        distances = (squares + torch.eye(x.shape[1])).sqrt()  # of an atom to itself: 1
        radial = torch.exp(-4 * (distances[..., None] - self.centers).square())
        return self.net(radial)[..., 0].sum((1, 2))


def by_torch(energy: Energy) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the values and gradients by an eager double backward pass."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        values = energy(x)
        return values, torch.autograd.grad(values.sum(), x, create_graph=True)[0]

    return both


WAYS: dict[str, Callable[[Energy], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "torch, eager": by_torch,
    "eager": mg.autograd.value_and_grad,
    "compiled": lambda energy: mg.autograd.value_and_grad(energy, compile=True),
}


def measure(batch: int, atoms: int, rounds: int) -> list[float]:
    """Return the speed of each way, relative to the first."""
    torch.manual_seed(0)
    torch.compiler.reset()  # without the sizes seen before, which make torch compile for any size
    energy, x, forces = Energy(), 1.5 * torch.randn(batch, atoms, 3), torch.randn(batch, atoms, 3)
    ways = [make(energy) for make in WAYS.values()]

    def step(way: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        values, slopes = way(x)
        loss = values.square().mean() + (slopes + forces).square().mean()
        torch.autograd.grad(loss, list(energy.parameters()))

    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 1):  # the first one compiles
        for way, own in zip(ways, seconds, strict=True):
            start = time.process_time()
            for _ in range(STEPS):
                step(way)
            own.append(time.process_time() - start)
    return [statistics.median(a / b for a, b in zip(seconds[0], own, strict=True)) for own in seconds]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    rows = [
        [f"{batch} structures of {atoms} atoms", *(f"{ratio:.2f}" for ratio in measure(batch, atoms, rounds))]
        for batch, atoms in SIZES
    ]
    print(markdown([["training step", *WAYS], *rows]))


if __name__ == "__main__":
    main()
