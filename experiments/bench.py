"""Time one meta-step of metagrad against what a user would write: `python -m experiments.bench [WORKLOAD ...]`.

Every method computes the meta-gradient of the same batch. First they are compared in float64; then they are timed
in rounds, so that a drift of the machine hits all alike, and the medians are printed with their ratios to the
textbook loop. Ratios within one run are what to quote; absolute times belong to the machine.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import metagrad as mg
from metagrad.autograd.unroll import Memory
from metagrad.tasks import Batch, Examples

Gradient = tuple[Tensor, ...]
ROUNDING = 1e-9  # relative, in float64


@dataclass(frozen=True)
class Workload:
    """A meta-learning problem: what is differentiated, and how many calls one timing takes."""

    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: Batch
    lr: float
    steps: int
    calls: int = 1

    @property
    def params(self) -> dict[str, Tensor]:
        """The meta-parameters."""
        return dict(self.model.named_parameters())

    def double(self) -> Workload:
        """Return the same problem in float64."""
        model = copy.deepcopy(self.model).double()
        return replace(self, model=model, batch=self.batch.to(dtype=torch.float64), calls=1)

    def gradient(self, loss: Tensor) -> Gradient:
        """Differentiate the meta-objective."""
        return torch.autograd.grad(loss, list(self.params.values()))


def sinusoid() -> Workload:
    """1-40-40-1, 25 tasks, 10 shots, 5 inner steps (Finn et al. 2017, section 5.1)."""
    batch = mg.tasks.Sinusoid(shots=10, queries=10).sample(25, generator=torch.Generator().manual_seed(0))
    return Workload(mg.models.MLP([1, 40, 40, 1]), F.mse_loss, batch, lr=0.01, steps=5, calls=5)


def conv4(num_tasks: int) -> Workload:
    """Conv4 of 64 filters, 5-way 1-shot with 15 queries, one inner step."""
    generator = torch.Generator().manual_seed(0)

    def examples(shots: int) -> Examples:
        images = torch.rand(num_tasks, 5 * shots, 1, 28, 28, generator=generator)
        return Examples(images, torch.arange(5).repeat_interleave(shots).repeat(num_tasks, 1))

    batch = Batch(examples(1), examples(15))
    return Workload(mg.models.Conv4(5), F.cross_entropy, batch, lr=0.4, steps=1)


def metagrad_maml(work: Workload, *, memory: Memory = "full", task_chunk: int | None = None) -> Gradient:
    """Ours."""
    rule = mg.optim.rules.sgd(lr=work.lr)
    maml = mg.MAML(
        work.model, work.loss_fn, inner=rule, steps=work.steps, memory=memory, task_chunk=task_chunk
    )
    return work.gradient(maml(work.batch).loss)


def textbook_loop(work: Workload) -> Gradient:
    """The plain loop over tasks, with create_graph=True."""
    losses = []
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        fast = work.params
        for _ in range(work.steps):
            loss = work.loss_fn(functional_call(work.model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - work.lr * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        losses.append(work.loss_fn(functional_call(work.model, fast, (query_x,)), query_y))
    return work.gradient(torch.stack(losses).mean())


def torch_func(work: Workload) -> Gradient:
    """The loop of one task by torch.func.grad, all tasks by torch.vmap."""

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return work.loss_fn(functional_call(work.model, params, (x,)), y)

    def task(x: Tensor, y: Tensor, query_x: Tensor, query_y: Tensor) -> Tensor:
        fast = work.params
        for _ in range(work.steps):
            grads = grad(loss_of)(fast, x, y)
            fast = {name: p - work.lr * grads[name] for name, p in fast.items()}
        return loss_of(fast, query_x, query_y)

    return work.gradient(vmap(task)(*work.batch.support, *work.batch.query).mean())


METHODS: dict[str, Callable[[Workload], Gradient]] = {
    "textbook loop": textbook_loop,
    "torch.func grad + vmap": torch_func,
    "metagrad": metagrad_maml,
    "metagrad, tasks together": partial(metagrad_maml, task_chunk=1_000_000),
    'metagrad, memory="step"': partial(metagrad_maml, memory="step"),
}
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "sinusoid": sinusoid,
    "conv4-4": partial(conv4, 4),
    "conv4-32": partial(conv4, 32),
}


def disagreements(work: Workload) -> dict[str, float]:
    """Return how far each method is from the textbook loop, in float64, relative to the gradient.

    Raises:
        SystemExit: One of ours is further off than rounding.
    """
    work = work.double()
    reference = textbook_loop(work)
    size = max(g.abs().max().item() for g in reference)
    errors = {}
    for name, method in METHODS.items():
        pairs = zip(method(work), reference, strict=True)
        errors[name] = max((a - b).abs().max().item() for a, b in pairs) / size
        if name.startswith("metagrad") and not errors[name] < ROUNDING:
            raise SystemExit(f"{name} does not agree with the textbook loop: error {errors[name]:.1e}.")
    return errors


def measure(work: Workload, rounds: int) -> dict[str, list[float]]:
    """Time every method once a round; return seconds of one meta-step, a value for each round.

    The order is drawn anew each round: what a method leaves behind in the allocator is met by another each time.
    """
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(METHODS), len(METHODS)):
            start = time.perf_counter()
            for _ in range(work.calls):
                METHODS[name](work)
            times[name].append((time.perf_counter() - start) / work.calls)
    return times


def report(name: str, times: dict[str, list[float]], errors: dict[str, float]) -> str:
    """Format medians, ratios, and which methods are wrong."""
    loop = statistics.median(times["textbook loop"])
    lines = [f"{name:26}{'median ms':>10}{'faster than the loop':>22}"]
    for method, values in times.items():
        median = statistics.median(values)
        wrong = "" if errors[method] < ROUNDING else f"   wrong by {100 * errors[method]:.1f} %"
        lines.append(f"{method:26}{1000 * median:10.1f}{loop / median:21.2f}x{wrong}")
    return "\n".join(lines)


def main() -> None:
    """Run the workloads named on the command line, by default all."""
    parser = argparse.ArgumentParser(
        description="Time one meta-step of metagrad against what a user would write."
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=9, help="timings of each method (9)")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - set(WORKLOADS)
    if unknown or arguments.rounds < 1:
        parser.error(f"expected workloads among {', '.join(WORKLOADS)} and at least one round")
    for name in arguments.workloads or WORKLOADS:
        torch.manual_seed(0)
        work = WORKLOADS[name]()
        errors = disagreements(work)
        print(report(name, measure(work, arguments.rounds), errors), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
