"""L-BFGS beside torch's: `python -m experiments.benchmarks.optimizers lbfgs`.

Both have a strong Wolfe line search, else their defaults, and take the same steps from the same parameters, in turns.
Printed are the loss after them, the calls of the closure, and the ratio of CPU times: the median over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.run.progress import Progress, tell
from metagrad import optim

MAKES: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": torch.optim.LBFGS,
    "metagrad": optim.LBFGS,
}


class Problem(NamedTuple):
    """Parameters, and what computes their loss."""

    params: Sequence[Tensor]
    loss: Callable[[], Tensor]


class Run(NamedTuple):
    """What one optimizer has done."""

    loss: float
    calls: int  # of the closure
    seconds: float  # of CPU time


def beale(w: Tensor) -> Tensor:
    """Beale's function; 0 at (3, 0.5)."""
    x, y = w
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def rosenbrock(w: Tensor) -> Tensor:
    """Rosenbrock's valley of any dimension; 0 at 1."""
    return (100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum()


def _from(loss: Callable[[Tensor], Tensor], *start: float) -> Callable[[], Problem]:
    def made() -> Problem:
        w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        return Problem([w], lambda: loss(w))

    return made


def logistic() -> Problem:
    """Logistic regression on 200 examples that a plane separates."""
    x = torch.randn(200, 10)
    y, model = (x @ torch.randn(10) > 0).float(), nn.Linear(10, 1)
    return Problem(list(model.parameters()), lambda: F.binary_cross_entropy_with_logits(model(x)[:, 0], y))


def _network(sizes: list[int], activation: type[nn.Module]) -> Problem:
    """Learn random labels of 128 examples."""
    x, y = torch.randn(128, sizes[0]), torch.randint(sizes[-1], (128,))
    layers = [module for pair in itertools.pairwise(sizes) for module in (nn.Linear(*pair), activation())]
    model = nn.Sequential(*layers[:-1])
    return Problem(list(model.parameters()), lambda: F.cross_entropy(model(x), y))


def transformer() -> Problem:
    """Two layers of width 16 on 16 sequences of 8 vectors, with random labels."""
    x, y = torch.randn(16, 8, 16), torch.randint(4, (16,))
    layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
    body, head = nn.Sequential(*layers), nn.Linear(16, 4)
    params = [*body.parameters(), *head.parameters()]
    return Problem(params, lambda: F.cross_entropy(head(body(x).mean(1)), y))


PROBLEMS: dict[str, tuple[Callable[[], Problem], int]] = {
    "Beale": (_from(beale, 1.0, 1.0), 100),
    "Rosenbrock, n = 2": (_from(rosenbrock, -1.2, 1.0), 5),
    "Rosenbrock, n = 2, to its end": (_from(rosenbrock, -1.2, 1.0), 100),
    "Rosenbrock, n = 20": (_from(rosenbrock, *[-1.2, 1.0] * 10), 10),
    "logistic regression": (logistic, 10),
    "ReLU, 7 layers of 32": (lambda: _network([10, *[32] * 6, 4], nn.ReLU), 5),
    "transformer": (transformer, 5),
    "MLP, 100k parameters": (lambda: _network([784, 128, 10], nn.Tanh), 5),
}
"""What makes a problem of torch's global random numbers, and how many steps it is given."""


def spent(make: Callable[..., torch.optim.Optimizer], problem: Callable[[], Problem], steps: int) -> Run:
    """Take steps, and count what they cost."""
    torch.manual_seed(0)
    params, loss_of = problem()
    opt: Any = make(params, line_search_fn="strong_wolfe")
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    begun = time.process_time()
    for _ in range(steps):
        opt.step(closure)
    seconds = time.process_time() - begun
    return Run(float(loss_of().detach()), calls, seconds)


def row(name: str, rounds: int) -> str:
    """Compare both on a problem, in Markdown; a first round is not counted."""
    problem, steps = PROBLEMS[name]
    runs = [{who: spent(make, problem, steps) for who, make in MAKES.items()} for _ in range(rounds + 1)][1:]
    last, ratios = runs[-1], [both["metagrad"].seconds / both["torch"].seconds for both in runs]
    cells = [f"{run.loss:.2g}, {run.calls}" for run in last.values()]
    return f"| {name} | {steps} | {' | '.join(cells)} | {statistics.median(ratios):.2f} |"


def main(rounds: int, out: Path) -> None:
    """Print and write a row for each problem."""
    lines = ["| problem | steps | torch: loss, closures | metagrad | CPU time |", f"| --- |{' ---: |' * 4}"]
    print("\n".join(lines), flush=True)
    for name in Progress(PROBLEMS, unit="problem"):
        lines.append(row(name, rounds))
        tell(lines[-1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "lbfgs.md").write_text("\n".join(lines) + "\n")
