"""What the derivative of a training costs, in trainings: `python -m experiments.benchmarks.training`.

The unit is the CPU time of a training of an MLP by torch.optim.SGD, without derivatives. The methods take turns. The
printed value is the median over rounds of the ratio to a training of the same round. The second table is the peak
memory of the derivative of one step, measured by metagrad's MemoryTracker.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.progress import Progress

EXAMPLES, INPUTS, HIDDEN, CLASSES, BATCH = 5000, 784, 32, 10, 100
LR, MOMENTUM = 0.01, 0.9
METRICS = 20
MODES = ("full", "step", "sqrt", "log")
MANY = f"Training, log, {METRICS} metrics"


class Work:
    """A training of an MLP 784-32-10 on random data, by mini-batches of 100, and some test examples."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.steps = steps
        self.x, self.y = torch.randn(EXAMPLES, INPUTS), torch.randint(CLASSES, (EXAMPLES,))
        self.test = torch.randn(METRICS, INPUTS), torch.randint(CLASSES, (METRICS,))
        self.training = self._training(BATCH, None, steps)

    def _training(self, batch: int, micro: int | None, steps: int) -> mg.Training:
        rule = mg.optim.rules.sgd(lr=LR, momentum=MOMENTUM)
        data = self.x, self.y
        return mg.Training(
            model(), F.cross_entropy, data, optimizer=rule, batch_size=batch, steps=steps, micro_batch=micro
        )

    def plain(self) -> None:
        """Train by torch.optim."""
        net, order = model(), self.training.step.stream
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        for t in range(self.steps):
            rows = order.rows(t)
            optimizer.zero_grad()
            F.cross_entropy(net(self.x[rows]), self.y[rows]).backward()
            optimizer.step()

    def derivative(self, memory: str) -> None:
        """Train, and differentiate one metric with respect to the weights of the examples."""
        weights = torch.ones(EXAMPLES, requires_grad=True)
        trained = self.training(weights, memory=memory)
        torch.autograd.grad(self.losses(trained).mean(), weights)

    def metrics(self, memory: str = "log") -> None:
        """Train, and differentiate many metrics."""
        self.training(memory=memory).jacobian(self.losses)

    def losses(self, net: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the test losses of a model."""
        x, y = self.test
        return F.cross_entropy(net(x), y, reduction="none")

    def unrolled(self, memory: str) -> None:
        """Train in `mg.unroll`, and differentiate one metric with respect to the weights of the examples."""
        rule, net = mg.optim.rules.sgd(lr=LR, momentum=MOMENTUM), model()
        order = torch.stack([self.training.step.stream.rows(t) for t in range(self.steps)])
        params = {name: p.detach() for name, p in net.named_parameters()}
        weights = torch.ones(EXAMPLES, requires_grad=True)

        def step(state, t, weights):
            params, own = state
            rows = order[t]
            params = {name: p if p.requires_grad else p.requires_grad_() for name, p in params.items()}
            output = torch.func.functional_call(net, params, (self.x[rows],))
            losses = F.cross_entropy(output, self.y[rows], reduction="none")
            grads = mg.grad((weights[rows] * losses).mean(), params, create_graph=True)
            return rule.update(grads, own, params), None

        (params, _), _ = mg.unroll(
            step, (params, rule.init(params)), weights, steps=self.steps, memory=memory
        )
        loss = self.losses(lambda x: torch.func.functional_call(net, params, (x,))).mean()
        torch.autograd.grad(loss, weights)

    def peak(self, batch: int, micro: int | None) -> int:
        """Return the peak of the memory of one step and its derivative, in bytes."""
        training = self._training(batch, micro, 1)
        weights = torch.ones(EXAMPLES, requires_grad=True)
        with mg.MemoryTracker(device="cpu") as tracker, tracker.outer(0):
            trained = training(weights, memory="step")
            torch.autograd.grad(self.losses(trained).mean(), weights)
        return tracker.peak


def model() -> nn.Module:
    """784-32-10 with GELU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES))


def measure(work: Work, rounds: int, methods: Sequence[str]) -> dict[str, float]:
    """Return the median of the cost of each method, in trainings."""
    ways: dict[str, Callable[[], None]] = {
        **{f"Training, {memory}": functools.partial(work.derivative, memory) for memory in MODES},
        MANY: work.metrics,
        **{f"unroll, {memory}": functools.partial(work.unrolled, memory) for memory in MODES},
    }
    chosen = {name: run for name, run in ways.items() if not methods or any(word in name for word in methods)}
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for run in (work.plain, *chosen.values()):
        run()
    for _ in Progress(range(rounds), unit="round", leave=False):
        for name, run in chosen.items():
            unit = seconds(work.plain)
            ratios[name].append(seconds(run) / unit)
    return {name: statistics.median(own) for name, own in ratios.items()}


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="words of the names of methods, the default is all")
    parser.add_argument("--steps", type=int, default=300, help="steps of the training")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    work = Work(given.steps)
    costs = measure(work, given.rounds, given.methods)
    print(f"{given.steps} steps, in trainings by torch.optim\n")
    print(markdown([["method", "trainings"], *([name, f"{cost:.1f}"] for name, cost in costs.items())]))
    many, one = costs.get(MANY), costs.get("Training, log")
    if many is not None and one is not None:
        print(f"\nEach further metric: {(many - one) / (METRICS - 1):.2f} trainings")
    if not given.methods:
        rows = [
            [str(batch), *(f"{work.peak(batch, micro) / 2**20:.2f}" for micro in (None, 50))]
            for batch in (100, 400, 1600)
        ]
        print("\nPeak of one step and its derivative (MiB)\n")
        print(markdown([["batch", "whole", "micro_batch=50"], *rows]))


if __name__ == "__main__":
    main()
