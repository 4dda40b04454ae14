"""Time and weigh curvature products against one gradient: `python -m experiments.bench_curvature [WORKLOAD ...]`.

An MLP, a CNN and a transformer, whose attention is that of torch's MATH backend. First every product is compared with
forward-over-reverse in float64, on a few examples; then the methods take turns, in a new order each round, and every
time is divided by that of a gradient of the same round: the medians of these ratios are printed, and are what to
quote. The time of a product is that of another one once the operator is there; 64 probes are the whole call, the
operator's own gradient included, divided by 64. The peak is what torch's allocator gave out from nothing to the
result, the graph included, and is divided by that of one gradient. curvlinops takes part where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import itertools
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from experiments.allocations import peak_bytes
from experiments.bench.models import Transformer
from experiments.bench_sparse import MIB, seconds
from metagrad.curvature import ParameterSpace, ggn, hessian

PROBES = 64
ROUNDING = 1e-9  # relative, in float64
GRADIENT, HVP, GGN = "gradient", "Hessian product", "Gauss-Newton product"
FORWARD, RIVAL = "jvp of grad, torch.func", "64 probes, curvlinops, each"
TRACE, FRUGAL = "64 probes, each", "64 probes, chunk=1MiB, each"

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Work:
    """A classifier and a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.model.named_parameters())

    @functools.cached_property
    def vector(self) -> Tensor:
        """What is multiplied, flat."""
        generator = torch.Generator().manual_seed(1)
        size = sum(p.numel() for p in self.params.values())
        return torch.randn(size, generator=generator, dtype=torch.float64).to(self.x)

    def loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(functional_call(self.model, params, (x,)), y)

    def few(self) -> Work:
        """Return the same in float64 on four examples."""
        return Work(copy.deepcopy(self.model).double(), self.x[:4].double(), self.y[:4])


def mlp() -> Work:
    """784-512-512-10 with tanh, 535k parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    return Work(model, torch.randn(1024, 784), torch.randint(10, (1024,)))


def cnn(*, has_norm: bool = False) -> Work:
    """Four convolutions with ReLU and average pooling; with group norm, whose second derivative torch composes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise([3, 32, 32, 64, 64])):
        norm = [nn.GroupNorm(8, after)] if has_norm else []
        layers += [nn.Conv2d(before, after, 3, padding=1), *norm, nn.ReLU()]
        layers += [nn.AvgPool2d(2)] if i % 2 else []
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))
    return Work(model, torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


def transformer() -> Work:
    """Four pre-norm blocks of width 128."""
    torch.manual_seed(0)
    return Work(Transformer(4), torch.randn(16, 64, 128), torch.randint(10, (16,)))


def gradient(work: Work) -> Run:
    """One gradient, as a training step takes it."""
    params = list(work.params.values())

    def run() -> Tensor:
        loss = F.cross_entropy(work.model(work.x), work.y)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params)])

    return run


def hessian_product(work: Work) -> Run:
    """Ours: the graph of the gradient is kept."""
    H = hessian(work.loss, work.params, (work.x, work.y), mode="reverse")
    return lambda: H @ work.vector


def gauss_newton_product(work: Work) -> Run:
    """Ours, likewise."""
    G = ggn(work.model, F.cross_entropy, work.params, (work.x, work.y))
    return lambda: G @ work.vector


def forward_over_reverse(work: Work) -> Run:
    """Multiply by `torch.func.jvp` of `torch.func.grad`, which begins anew each time."""
    params = {name: p.detach() for name, p in work.params.items()}
    space = ParameterSpace(params)
    gradient_at = grad(lambda params: work.loss(params, work.x, work.y))
    return lambda: space.flatten(jvp(gradient_at, (params,), (space.unflatten(work.vector),))[1])


def trace(work: Work, chunk: str = "64MiB") -> Run:
    """Ours: the operator and 64 probes."""

    def run() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        with hessian(work.loss, work.params, (work.x, work.y), mode="reverse", chunk=chunk) as H:
            return H.trace(method="hutchinson", probes=PROBES, generator=generator, chunk=chunk).value

    return run


def curvlinops_operator(work: Work) -> object:
    """Return curvlinops' operator, without its check of the data."""
    rival = importlib.import_module("curvlinops")
    data = [(work.x, work.y)]
    params = [p for p in work.model.parameters() if p.requires_grad]
    return rival.HessianLinearOperator(
        work.model, nn.CrossEntropyLoss(), params, data, check_deterministic=False
    )


def curvlinops_trace(work: Work) -> Run:
    """The same number of probes by curvlinops."""
    rival = importlib.import_module("curvlinops")
    return lambda: rival.hutchinson_trace(curvlinops_operator(work), num_matvecs=PROBES)


METHODS: dict[str, Callable[[Work], Run]] = {
    GRADIENT: gradient,
    HVP: hessian_product,
    GGN: gauss_newton_product,
    FORWARD: forward_over_reverse,
    TRACE: trace,
    FRUGAL: functools.partial(trace, chunk="1MiB"),
    RIVAL: curvlinops_trace,
}
WORKLOADS: dict[str, Callable[[], Work]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cnn-norm": functools.partial(cnn, has_norm=True),
    "transformer": transformer,
}


@dataclass
class Result:
    """What one method did: time and peak, as multiples of a gradient's, or why it did nothing."""

    slower: float = float("nan")
    larger: float = float("nan")
    note: str = ""


def check(work: Work) -> None:
    """Compare Hessian products with forward-over-reverse in float64.

    Raises:
        SystemExit: They are not the same.
    """
    few = work.few()
    expected = forward_over_reverse(few)()
    error = ((hessian_product(few)() - expected).norm() / expected.norm()).item()
    if not error < ROUNDING:
        raise SystemExit(f"{HVP} does not agree with forward-over-reverse: off by {error:.1e}.")


def measure(work: Work, rounds: int) -> tuple[dict[str, Result], float, int]:
    """Return every method's ratios, and the seconds and bytes of one gradient."""
    results = {name: Result() for name in METHODS}
    runs = _started(work, results)
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    gradients: list[float] = []
    shuffle = random.Random(0)
    for _ in range(rounds):
        times = {name: seconds(runs[name]) for name in shuffle.sample(list(runs), len(runs))}
        gradients.append(times[GRADIENT])
        for name, taken in times.items():
            ratios[name].append(taken / times[GRADIENT] / _products(name))
    runs.clear()
    unit = peak_bytes(lambda: METHODS[GRADIENT](work)())
    for name, found in ratios.items():
        results[name].slower = statistics.median(found)
        results[name].larger = peak_bytes(lambda name=name: METHODS[name](work)()) / unit
    return results, statistics.median(gradients), unit


def report(name: str, results: dict[str, Result], gradient_seconds: float, gradient_bytes: int) -> str:
    """Format one workload, and whether the goals are met."""
    lines = [
        f"{name}: one gradient takes {1000 * gradient_seconds:.1f} ms and {gradient_bytes / MIB:.1f} MiB",
        f"{'':30}{'x its time':>12}{'x its peak':>12}",
    ]
    for method, result in results.items():
        numbers = result.note or f"{result.slower:12.2f}{result.larger:12.2f}{goal(method, result)}"
        lines.append(f"{method:30}{numbers}")
    for ours in (TRACE, FRUGAL):
        lines += against(results[RIVAL], results[ours], ours)
    return "\n".join(lines)


def against(rival: Result, ours: Result, name: str) -> list[str]:
    """Say how much a rival costs more than ours; nothing where it did not run."""
    if rival.note:
        return []
    faster, smaller = rival.slower / ours.slower, rival.larger / ours.larger
    verdicts = _verdict(faster >= 3, "faster >= 3") + _verdict(smaller >= 10, "smaller >= 10")
    return [f"{name}: {faster:.1f} times faster and {smaller:.1f} times smaller than curvlinops{verdicts}"]


def goal(method: str, result: Result) -> str:
    """Say what a method should cost at most, and whether it does."""
    if method == HVP:
        return _verdict(result.slower <= 2.5, "time <= 2.5")
    if method in (TRACE, FRUGAL):
        time, peak = result.slower <= 1.8, result.larger < 3
        return _verdict(time, "time <= 1.8") + _verdict(peak, "peak < 3")
    return ""


def _verdict(is_met: bool, text: str) -> str:
    return f"   {text}: {'met' if is_met else 'MISSED'}"


def _started(work: Work, results: dict[str, Result]) -> dict[str, Run]:
    """Make every method's operator and call it once; note what cannot."""
    runs = {name: _start(method, work, results[name]) for name, method in METHODS.items()}
    return {name: run for name, run in runs.items() if run is not None}


def _start(method: Callable[[Work], Run], work: Work, result: Result) -> Run | None:
    try:
        run = method(work)
        run()
    except ModuleNotFoundError as error:
        result.note = f"  {error.name} is not installed"
    except (RuntimeError, MemoryError) as error:
        result.note = f"  {type(error).__name__}: {str(error).splitlines()[0]}"[:90]
    else:
        return run
    return None


def _products(name: str) -> int:
    return PROBES if name in (TRACE, FRUGAL, RIVAL) else 1


def main() -> None:
    """Run the workloads named on the command line, by default all."""
    parser = argparse.ArgumentParser(description="Time and weigh curvature products against one gradient.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each method (3)")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - set(WORKLOADS)
    if unknown or arguments.rounds < 1:
        parser.error(f"expected workloads among {', '.join(WORKLOADS)} and at least one round")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    for name in arguments.workloads or WORKLOADS:
        work = WORKLOADS[name]()
        check(work)
        print(report(name, *measure(work, arguments.rounds)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
