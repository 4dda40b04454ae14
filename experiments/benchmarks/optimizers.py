"""The cost of a step of an optimizer, in gradients: `python -m experiments.benchmarks.optimizers`.

The models are an MLP, a Conv4 and a transformer, at two batch sizes. Before each step the benchmark times a
gradient (zero_grad, forward, backward) of a copy of the model. The printed value is the median of the ratio over
rounds. If the cost of steps differs, a round is a whole period. "-10" in a name means that curvature, roots or bases
are updated every 10 steps, or that there are at most 10 products with the Hessian. The peak is measured by
metagrad's MemoryTracker, from the creation of the optimizer to one step after its first period, including its state.
It is divided by the peak of a gradient. With one thread, times are CPU times.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.arguments import add_words
from experiments.benchmarks.maml.models import Transformer
from experiments.run.files import markdown
from experiments.run.progress import Progress
from metagrad.memory import MemoryTracker
from metagrad.models import Conv4
from metagrad.optim import KFAC, SOAP, AdaHessian, Lion, Muon, NewtonCG, Shampoo, SophiaG, SophiaH

LR = 1e-5  # small, so that the timed steps stay finite
FEWEST = 3  # steps of a round
MIB = 2**20

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Work:
    """A classifier and a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean cross-entropy of a copy of the model."""
        return F.cross_entropy(model(self.x), self.y)


def mlp(batch: int) -> Work:
    """784-512-512-10 with tanh, 670k parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    return Work(model, torch.randn(batch, 784), torch.randint(10, (batch,)))


def cnn(batch: int) -> Work:
    """Conv4 with 32 filters and batch normalization."""
    torch.manual_seed(0)
    return Work(Conv4(10, hidden=32), torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,)))


def transformer(batch: int) -> Work:
    """Two pre-norm blocks of width 128 on sequences of 32."""
    torch.manual_seed(0)
    return Work(Transformer(2), torch.randn(batch, 32, 128), torch.randint(10, (batch,)))


WORKLOADS: dict[str, Callable[[], Work]] = {
    f"{make.__name__}-{batch}": functools.partial(make, batch)
    for make in (mlp, cnn, transformer)
    for batch in (128, 512)
}


@dataclass(frozen=True)
class Method:
    """How an optimizer is created and used.

    Attributes:
        make: Returns the optimizer of a model, or several optimizers if one optimizer does not take all parameters.
        period: Number of steps after which the cost repeats.
    """

    make: Callable[[nn.Module], Optimizers]
    period: int = 1

    def stepper(self, work: Work, model: nn.Module) -> Callable[[], object]:
        """Return a function that takes a step."""
        first, *others = self.make(model)

        def closure() -> Tensor:
            model.zero_grad()
            loss = work.loss(model)
            loss.backward()
            return loss

        def step() -> object:
            loss = first.step(closure)  # type: ignore[reportCallIssue, reportArgumentType]
            for other in others:
                other.step()
            return loss

        return step


def of_all(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Optimizers]:
    """Give all parameters to one optimizer."""
    return lambda model: [make(model.parameters(), lr=LR, **options)]


def of_matrices(make: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], Optimizers]:
    """Give matrices to one optimizer, and other parameters to plain gradient descent."""

    def both(model: nn.Module) -> Optimizers:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return [make(matrices, lr=LR), torch.optim.SGD(others, lr=LR)]

    return both


METHODS: dict[str, Method] = {
    "torch.SGD": Method(of_all(torch.optim.SGD)),
    "torch.Adam": Method(of_all(torch.optim.Adam)),
    "AdaHessian": Method(of_all(AdaHessian)),
    "SophiaH-10": Method(of_all(SophiaH), period=10),
    "SophiaG-10": Method(of_all(SophiaG), period=10),
    "KFAC-10": Method(lambda model: [KFAC(model, lr=LR)], period=10),
    "Shampoo-10": Method(of_all(Shampoo, root_every=10), period=10),
    "SOAP-10": Method(of_all(SOAP), period=10),
    "Muon": Method(of_matrices(Muon)),
    "Lion": Method(of_all(Lion)),
    # The damping lets the solver continue at negative curvature. On the CNN, the solver ends at once despite the
    # damping.
    "NewtonCG-10": Method(of_all(NewtonCG, max_steps=10, progress=None, damping=1.0)),
}


@dataclass
class Result:
    """What one optimizer did: ratios to a gradient, with one ratio of times for each round."""

    times: list[float] = field(default_factory=list)
    peak: float = float("nan")

    @property
    def time(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.times)


@dataclass
class Measured:
    """One workload: the seconds and bytes of a gradient, and every optimizer."""

    seconds: float
    nbytes: int
    results: dict[str, Result]


def measure(work: Work, names: Sequence[str], rounds: int) -> Measured:
    """Run the optimizers alternately, in a new order each round. A gradient is timed before each step."""
    results = {name: Result() for name in names}
    gradient = gradient_of(work, copy.deepcopy(work.model))
    unit = peak_of(gradient)  # before .grad is there
    steps = {name: METHODS[name].stepper(work, copy.deepcopy(work.model)) for name in names}
    for step in steps.values():  # which creates the state of the optimizer
        step()
    gradients: list[float] = []
    for number in Progress(range(rounds), unit="round", leave=False):
        for name in random.Random(number).sample(list(steps), len(steps)):
            own = other = 0.0
            for _ in range(max(METHODS[name].period, FEWEST)):
                gradients.append(seconds(gradient))
                other += gradients[-1]
                own += seconds(steps[name])
            results[name].times.append(own / other)
    for name in Progress(steps, unit="peak", leave=False):
        results[name].peak = (
            peak_of(functools.partial(_period, work, METHODS[name], copy.deepcopy(work.model))) / unit
        )
    return Measured(statistics.median(gradients), unit, results)


def seconds(run: Callable[[], object]) -> float:
    """Time one call. With one thread it is the CPU time, which other programs hardly change."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def peak_of(run: Callable[[], object]) -> int:
    """Return the peak in bytes of the memory that a call allocates."""
    with MemoryTracker(device="cpu") as tracker, tracker.outer(0):
        run()
    return tracker.peak


def gradient_of(work: Work, model: nn.Module) -> Callable[[], Tensor]:
    """Return a function that computes a gradient like a training step."""

    def gradient() -> Tensor:
        model.zero_grad()
        loss = work.loss(model)
        loss.backward()
        return loss.detach()

    return gradient


def _period(work: Work, method: Method, model: nn.Module) -> None:
    step = method.stepper(work, model)
    for _ in range(method.period + 1):
        step()


def table(name: str, measured: Measured) -> str:
    """Format one workload in Markdown."""
    rows = [["optimizer", "a step, in gradients", "in the rounds", "peak, in gradients'"]]
    for method, result in measured.results.items():
        spread = f"{min(result.times):.2f} to {max(result.times):.2f}"
        rows.append([method, f"{result.time:.2f}", spread, f"{result.peak:.2f}"])
    unit = f"One gradient takes {1000 * measured.seconds:.1f} ms and {measured.nbytes / MIB:.1f} MiB."
    return f"## {name}\n\n{unit}\n\n{markdown(rows)}"


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.optimizers",
        description="What a step of an optimizer costs, in gradients.",
    )
    add = parser.add_argument
    add_words(parser, "--workloads", WORKLOADS)
    add_words(parser, "--optimizers", METHODS)
    add("--rounds", type=int, default=3, help="periods of each optimizer (3)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch (as many as it takes)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be positive")
    return arguments


def main() -> None:
    """Measure the workloads of the command line. The default is all workloads."""
    arguments = parsed()
    warnings.filterwarnings("ignore", "KFAC")  # lists parameters of norms, which follow the gradient
    torch.set_num_threads(arguments.threads)
    for name in arguments.workloads:
        measured = measure(WORKLOADS[name](), arguments.optimizers, arguments.rounds)
        print(table(name, measured), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
