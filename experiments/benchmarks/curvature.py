"""Measure curvature products against a gradient: `python -m experiments.benchmarks.curvature [NAME ...]`.

The models are a small and a large MLP, a CNN, a transformer with torch's MATH attention, and a ResNet-20 with batch
normalization in evaluation mode. First every product is compared with forward-over-reverse in float64, on a few
examples. Then the methods take turns, in a new order each round. The printed value is the median over rounds of the
CPU time, divided by the CPU time of a gradient in the same round. Quote these ratios.

The time of a product is the time of a further product of an existing operator. The time of probes is the time of
the whole call, including the gradient, divided by their number. The time of eigenvalues is the time of the whole
call. The peak is the memory that torch's allocator gives out from the start to the result, including the graph,
divided by the peak of a gradient. "By hand" is a program without a library: a stored graph of the gradient,
and `torch.autograd.grad` for each product. "By SciPy" is `eigsh` on such products, with the same tolerance.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from experiments.benchmarks.arguments import add_words
from experiments.benchmarks.maml.models import ResNet20, Transformer
from experiments.run.measure import peak_bytes
from experiments.run.progress import Progress
from metagrad.curvature import ParameterSpace, ggn, hessian

PROBES, MIB = 64, 2**20
ROUNDING = 1e-9  # relative, in float64
GRADIENT, HVP, GGN = "gradient", "Hessian product", "Gauss-Newton product"
FORWARD, TRACE = "jvp of grad, torch.func", "probes, each"

BY_HAND, GGN_BY_HAND, TRACE_BY_HAND = f"{HVP}, by hand", f"{GGN}, by hand", "probes, by hand, each"
EIGENVALUES, EIGENVALUES_BY_SCIPY = "3 eigenvalues", "3 eigenvalues, by SciPy"
NUM_EIGENVALUES, RTOL = 3, 1e-5  # the default tolerance

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Work:
    """A classifier, a batch, and the number of probes of a trace."""

    model: nn.Module
    x: Tensor
    y: Tensor
    probes: int = PROBES

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.model.named_parameters())

    @functools.cached_property
    def vector(self) -> Tensor:
        """The multiplied vector, flat."""
        generator = torch.Generator().manual_seed(1)
        size = sum(p.numel() for p in self.params.values())
        return torch.randn(size, generator=generator, dtype=torch.float64).to(self.x)

    def loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(functional_call(self.model, params, (x,)), y)

    def few(self) -> Work:
        """Return the same workload in float64 on four examples."""
        return Work(copy.deepcopy(self.model).double(), self.x[:4].double(), self.y[:4])


def small() -> Work:
    """10-32-32-4 with tanh and 1,540 parameters, so that the overhead of a product is visible."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return Work(model, torch.randn(128, 10), torch.randint(4, (128,)))


def mlp() -> Work:
    """784-512-512-10 with tanh, 535k parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    return Work(model, torch.randn(1024, 784), torch.randint(10, (1024,)))


def cnn() -> Work:
    """Four convolutions with ReLU and average pooling."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise([3, 32, 32, 64, 64])):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.AvgPool2d(2)] if i % 2 else []
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))
    return Work(model, torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


def transformer() -> Work:
    """Four pre-norm blocks of width 128."""
    torch.manual_seed(0)
    return Work(Transformer(4), torch.randn(16, 64, 128), torch.randint(10, (16,)))


def resnet20() -> Work:
    """ResNet-20, 272k parameters, in evaluation mode."""
    torch.manual_seed(0)
    return Work(ResNet20().eval(), torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


def gradient(work: Work) -> Run:
    """One gradient, as a training step takes it."""
    params = list(work.params.values())

    def run() -> Tensor:
        loss = F.cross_entropy(work.model(work.x), work.y)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params)])

    return run


def hessian_product(work: Work) -> Run:
    """Ours: the graph of the gradient is kept."""
    H = hessian(work.loss, work.params, (work.x, work.y))
    return lambda: H @ work.vector


def gauss_newton_product(work: Work) -> Run:
    """The method of metagrad."""
    G = ggn(work.model, F.cross_entropy, work.params, (work.x, work.y))
    return lambda: G @ work.vector


def forward_over_reverse(work: Work) -> Run:
    """Apply `torch.func.jvp` to `torch.func.grad`, which computes the gradient in every product."""
    params = {name: p.detach() for name, p in work.params.items()}
    space = ParameterSpace(params)
    gradient_at = grad(lambda params: work.loss(params, work.x, work.y))
    return lambda: space.flatten(jvp(gradient_at, (params,), (space.unflatten(work.vector),))[1])


def trace(work: Work) -> Run:
    """Ours: the operator and its probes."""

    def run() -> Tensor:
        with hessian(work.loss, work.params, (work.x, work.y)) as H:
            generator = torch.Generator().manual_seed(0)
            return H.trace(method="hutchinson", probes=work.probes, generator=generator).value

    return run


def eigenvalues(work: Work) -> Run:
    """Ours: the operator and its largest eigenvalues."""

    def run() -> Tensor:
        with hessian(work.loss, work.params, (work.x, work.y)) as H:
            generator = torch.Generator().manual_seed(0)
            return H.eigenvalues(NUM_EIGENVALUES, generator=generator).values

    return run


Product = Callable[[Tensor], Tensor]


def product_by_hand(work: Work) -> Product:
    """Keep the graph of the gradient."""
    params = list(work.params.values())
    loss = F.cross_entropy(work.model(work.x), work.y)
    gradient = torch.autograd.grad(loss, params, create_graph=True)

    def product(flat: Tensor) -> Tensor:
        pieces = flat.split([p.numel() for p in params])
        vectors = [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]
        found = torch.autograd.grad(gradient, params, vectors, retain_graph=True)
        return torch.cat([f.reshape(-1) for f in found])

    return product


def hessian_product_by_hand(work: Work) -> Run:
    """Take one more product with the kept graph."""
    product = product_by_hand(work)
    return lambda: product(work.vector)


def gauss_newton_by_hand(work: Work) -> Run:
    """Take two products with the kept graph of the outputs, and one with the Hessian of the loss."""
    params = list(work.params.values())
    output = work.model(work.x)
    u = torch.zeros_like(output, requires_grad=True)
    transposed = torch.autograd.grad(output, params, u, create_graph=True)
    p = output.detach().softmax(-1)

    def run() -> Tensor:
        pieces = work.vector.split([p.numel() for p in params])
        vectors = [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]
        (pushed,) = torch.autograd.grad(transposed, u, vectors, retain_graph=True)
        weighted = p * pushed
        curved = (weighted - p * weighted.sum(-1, keepdim=True)) / len(output)
        found = torch.autograd.grad(output, params, curved, retain_graph=True)
        return torch.cat([f.reshape(-1) for f in found])

    return run


def trace_by_hand(work: Work) -> Run:
    """Apply Hutchinson's estimator with the kept graph."""

    def run() -> Tensor:
        generator, total = torch.Generator().manual_seed(0), torch.zeros(())
        product = product_by_hand(work)
        for _ in range(work.probes):
            z = torch.empty_like(work.vector).random_(0, 2, generator=generator).mul_(2).sub_(1)
            total += z @ product(z)
        return total / work.probes

    return run


def eigenvalues_by_scipy(work: Work) -> Run:
    """Find the largest eigenvalues by SciPy's eigsh, with the kept graph and metagrad's tolerance."""
    import scipy.sparse.linalg

    sparse: Any = scipy.sparse.linalg
    n, v0 = len(work.vector), np.random.default_rng(0).standard_normal(len(work.vector))

    def run() -> Tensor:
        product = product_by_hand(work)

        def multiply(v: np.ndarray) -> np.ndarray:
            return product(torch.from_numpy(v.reshape(-1)).to(work.x)).numpy()

        matrix = sparse.LinearOperator((n, n), multiply, dtype=work.vector.numpy().dtype)
        values = sparse.eigsh(matrix, NUM_EIGENVALUES, which="LA", tol=RTOL, v0=v0)[0]
        return torch.from_numpy(values.copy()).flip(0)

    return run


METHODS: dict[str, Callable[[Work], Run]] = {
    GRADIENT: gradient,
    BY_HAND: hessian_product_by_hand,
    HVP: hessian_product,
    GGN_BY_HAND: gauss_newton_by_hand,
    GGN: gauss_newton_product,
    FORWARD: forward_over_reverse,
    TRACE_BY_HAND: trace_by_hand,
    TRACE: trace,
    EIGENVALUES_BY_SCIPY: eigenvalues_by_scipy,
    EIGENVALUES: eigenvalues,
}
PLAIN = {HVP: BY_HAND, GGN: GGN_BY_HAND, TRACE: TRACE_BY_HAND, EIGENVALUES: EIGENVALUES_BY_SCIPY}
TRACES = (TRACE_BY_HAND, TRACE)
WORKLOADS = {"small": small, "mlp": mlp, "cnn": cnn, "transformer": transformer, "resnet20": resnet20}


@dataclass
class Result:
    """The time and peak memory of one method, relative to a gradient."""

    slower: float
    larger: float


def check(work: Work) -> None:
    """Compare Hessian products with forward-over-reverse in float64.

    Raises:
        SystemExit: The products differ.
    """
    few = work.few()
    expected = forward_over_reverse(few)()
    error = ((hessian_product(few)() - expected).norm() / expected.norm()).item()
    if not error < ROUNDING:
        raise SystemExit(f"{HVP} does not agree with forward-over-reverse: off by {error:.1e}.")


def measure(
    work: Work, rounds: int, methods: Iterable[str] = METHODS
) -> tuple[dict[str, Result], float, int]:
    """Return the ratios of methods, and the seconds and bytes of one gradient."""
    runs = {name: METHODS[name](work) for name in METHODS if name == GRADIENT or name in methods}
    for run in runs.values():
        run()
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    gradients: list[float] = []
    shuffle = random.Random(0)
    for _ in Progress(range(rounds), unit="round", leave=False):
        times = {name: seconds(runs[name]) for name in shuffle.sample(list(runs), len(runs))}
        gradients.append(times[GRADIENT])
        for name, taken in times.items():
            ratios[name].append(taken / times[GRADIENT] / (work.probes if name in TRACES else 1))
    runs.clear()
    unit = peak_bytes(lambda: METHODS[GRADIENT](work)())
    results = {}
    for name, found in Progress(ratios.items(), unit="peak", leave=False):
        larger = peak_bytes(lambda name=name: METHODS[name](work)()) / unit
        results[name] = Result(statistics.median(found), larger)
    return results, statistics.median(gradients), unit


def report(name: str, results: dict[str, Result], gradient_seconds: float, gradient_bytes: int) -> str:
    """Format one workload."""
    lines = [
        f"{name}: one gradient takes {1000 * gradient_seconds:.1f} ms and {gradient_bytes / MIB:.1f} MiB",
        f"{'':30}{'x its time':>12}{'x its peak':>12}",
    ]
    lines += [f"{method:30}{one.slower:12.2f}{one.larger:12.2f}" for method, one in results.items()]
    for name, ours in results.items():
        if plain := results.get(PLAIN.get(name, "")):
            ratios = f"{ours.slower / plain.slower:.2f} of the time and {ours.larger / plain.larger:.2f}"
            lines.append(f"{name}: {ratios} of the peak of what is written by hand")
    return "\n".join(lines)


def seconds(run: Run) -> float:
    """Time a call in CPU seconds. A short call is timed by the median over a twentieth of a second."""
    times: list[float] = []
    while not times or (times[0] < 0.05 and sum(times) < 0.1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Run the workloads named on the command line, by default all."""
    parser = argparse.ArgumentParser(description="Time and weigh curvature products against one gradient.")
    add_words(parser, "workloads", WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3, help="timings of each method (3)")
    parser.add_argument("--probes", type=int, default=PROBES, help=f"probes of a trace ({PROBES})")
    add_words(parser, "--methods", METHODS)
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.probes, arguments.threads) < 1:
        parser.error("expected at least one round, probe and thread")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to the terminal
    torch.set_num_threads(arguments.threads)
    for name in arguments.workloads:
        work = replace(WORKLOADS[name](), probes=arguments.probes)
        check(work)
        print(report(name, *measure(work, arguments.rounds, arguments.methods)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
