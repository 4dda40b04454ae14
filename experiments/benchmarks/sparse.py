"""Time and weigh gradients of sparse values, orders 1 to 3: `python -m experiments.benchmarks.sparse [WORKLOAD ...]`.

What is differentiated is t_0 = sum(sin(A x)) with respect to the values v of A on a fixed pattern, and from then on
t_k = sum((d t_{k-1} / dv)^2), which no cut gradient survives; likewise for lookups in a table, attention with dropout
and convolution. Of the product of 2M entries it is the forward alone, beside SciPy and MKL. First every
method is compared with dense tensors in float64 on a small problem; then the methods take turns, and medians are
printed with their ratios to ours. Ratios within one run are what to quote: 1.00 is ours, 40 is forty times slower or
larger. Structure that a training loop makes once (patterns, compiled programs) is made in a first call, which is not
timed. Times are those of the CPU, of all its threads. The peak is what torch's allocator gave out in one more call,
memory inside its kernels included; JAX states its own, SciPy's is not seen.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.sparse_operations import OPERATIONS, methods_of
from experiments.run.measure import cpu_seconds, peak_bytes
from experiments.run.progress import Progress
from metagrad.sparse import Pattern, SparseTensor

OURS = "metagrad"
ORDERS = (1, 2, 3)
ROUNDING = 1e-9  # relative, in float64
MIB = 2**20
DENSE_MIB = 6 * 1024  # the most that a dense method may be expected to take

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Problem:
    """A matrix of random entries, and the dense matrix that it multiplies."""

    pattern: Pattern
    values: Tensor  # [nnz]
    x: Tensor  # [n, width]

    @property
    def cells(self) -> int:
        """Rows times columns."""
        return self.pattern.shape[0] * self.pattern.shape[1]

    def double(self) -> Problem:
        """Return the same problem in float64."""
        return replace(self, values=self.values.double(), x=self.x.double())


def problem(n: int, entries: int, width: int) -> Problem:
    """Draw a square matrix."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(n, (entries,), generator=generator) for _ in range(2))
    pattern, _ = Pattern.coalesce(row, col, (n, n))
    values = torch.randn(pattern.nnz, generator=generator)
    return Problem(pattern, values, torch.randn(n, width, generator=generator))


def gradient(leaf: Tensor, product: Tensor, order: int) -> Tensor:
    """Differentiate sum(sin(product)) again and again."""
    loss, found = product.sin().sum(), leaf
    for k in range(1, order + 1):
        (found,) = torch.autograd.grad(loss, leaf, create_graph=k < order)
        loss = (found * found).sum() if k < order else loss
    return found


def metagrad(work: Problem, order: int) -> Run:
    """Ours."""

    def run() -> Tensor:
        values = work.values.detach().requires_grad_()
        return gradient(values, SparseTensor(work.pattern, values) @ work.x, order)

    return run


def index_add(work: Problem, order: int) -> Run:
    """Gather rows, multiply, and add with strided tensors, as message passing does."""
    row, col = work.pattern.row, work.pattern.col

    def run() -> Tensor:
        values = work.values.detach().requires_grad_()
        messages = values[:, None] * work.x.index_select(0, col)
        return gradient(values, torch.zeros_like(work.x).index_add(0, row, messages), order)

    return run


def torch_coo(work: Problem, order: int) -> Run:
    """Multiply by torch.sparse.mm with a COO tensor."""
    indices = torch.stack([work.pattern.row, work.pattern.col])
    matrix = torch.sparse_coo_tensor(indices, work.values, work.pattern.shape, is_coalesced=True)
    return lambda: _of_layout(matrix, work, order).coalesce().values()


def torch_csr(work: Problem, order: int) -> Run:
    """Multiply by torch.sparse.mm with a CSR tensor."""
    matrix = torch.sparse_csr_tensor(work.pattern.crow, work.pattern.col, work.values, work.pattern.shape)
    return lambda: _of_layout(matrix, work, order).values()


def dense(work: Problem, order: int) -> Run:
    """Multiply by the dense matrix, and read its gradient at the entries."""
    at = (work.pattern.row, work.pattern.col)
    if work.cells * work.values.itemsize * 3 * order > DENSE_MIB * MIB:
        raise MemoryError(f"rows x columns would take more than {DENSE_MIB} MiB")

    def run() -> Tensor:
        values = work.values.detach().requires_grad_()
        matrix = torch.zeros(work.pattern.shape, dtype=values.dtype).index_put(at, values)
        return gradient(values, matrix @ work.x, order)

    return run


def jax_bcoo(work: Problem, order: int) -> Run:
    """Multiply by JAX's BCOO, compiled."""
    import jax  # type: ignore[reportMissingImports]
    from jax.experimental import sparse  # type: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    indices = torch.stack([work.pattern.row, work.pattern.col], 1).numpy()
    x, values = jax.numpy.asarray(work.x.numpy()), jax.numpy.asarray(work.values.numpy())

    def loss(values):
        matrix = sparse.BCOO((values, indices), shape=work.pattern.shape, indices_sorted=True)
        return jax.numpy.sin(matrix @ x).sum()

    def squared(function):
        return lambda values: (jax.grad(function)(values) ** 2).sum()

    for _ in range(order - 1):
        loss = squared(loss)
    compiled = jax.jit(jax.grad(loss)).lower(values).compile()

    def run() -> Tensor:
        return torch.from_dlpack(compiled(values).block_until_ready())

    memory = compiled.memory_analysis()
    run.peak = memory.temp_size_in_bytes + memory.output_size_in_bytes  # type: ignore[attr-defined]
    return run


METHODS: dict[str, Callable[[Problem, int], Run]] = {
    OURS: metagrad,
    "torch index_add": index_add,
    "torch.sparse.mm, COO": torch_coo,
    "torch.sparse.mm, CSR": torch_csr,
    "dense": dense,
    "JAX BCOO": jax_bcoo,
}
WORKLOADS = {
    "16k": lambda: problem(16_000, 64_000, 32),
    "200k": lambda: problem(200_000, 2_000_000, 32),
}


@dataclass
class Result:
    """What one method did at one order."""

    seconds: float = float("nan")
    peak: int = 0
    note: str = ""


Work = Any
"""A problem: of matrices, or of an operation."""
Methods = Mapping[str, Callable[[Any, int], Run]]
Notes = dict[tuple[str, int], str]


def errors(work: Work, methods: Methods | None = None, orders: Sequence[int] = ORDERS) -> Notes:
    """Say which methods raise or are wrong, by dense tensors in float64; empty where all is right.

    Raises:
        SystemExit: Ours is not right.
    """
    methods, found = methods or METHODS, {}
    for order in orders:
        expected = methods.get("dense", dense)(work.double(), order)().to_dense()
        for name, method in methods.items():
            note = _compare(method, work.double(), order, expected)
            if note and name == OURS:
                raise SystemExit(f"{name} does not agree with dense matrices at order {order}: {note}.")
            if note:
                found[name, order] = note
    return found


def measure(
    work: Work, order: int, rounds: int, bad: Notes, methods: Methods | None = None
) -> dict[str, Result]:
    """Time the methods in turns, in a new order each round, then weigh each."""
    methods = methods or METHODS
    results = {name: Result(note=bad.get((name, order), "")) for name in methods}
    runs: dict[str, Run] = {}
    for name in methods:
        if not results[name].note:
            try:
                runs[name] = methods[name](work, order)
                runs[name]()
            except (MemoryError, RuntimeError) as error:
                runs.pop(name, None)
                results[name].note = _first_line(error)
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for _ in Progress(range(rounds), unit="round", leave=False):
        for name in shuffle.sample(list(runs), len(runs)):
            times[name].append(seconds(runs[name]))
    for name, run in runs.items():
        results[name].seconds = statistics.median(times[name])
        results[name].peak = getattr(run, "peak", None) or peak_bytes(run)
    return results


def seconds(run: Run) -> float:
    """Time a call: the median of a twentieth of a second, after one call that pays for what the last method left."""
    run()
    times: list[float] = []
    while sum(times) < 0.05:
        times.append(cpu_seconds(run))
    return statistics.median(times)


def report(name: str, order: int, results: dict[str, Result]) -> str:
    """Format one order: medians, peaks and ratios to ours."""
    ours = results[OURS]
    lines = [f"{f'{name}, order {order}':24}{'median ms':>11}{'x ours':>9}{'peak MiB':>11}{'x ours':>9}"]
    for method, result in results.items():
        if result.note:
            lines.append(f"{method:24}  {result.note}")
            continue
        slower, larger = result.seconds / ours.seconds, result.peak / ours.peak
        lines.append(
            f"{method:24}{1000 * result.seconds:11.2f}{slower:9.2f}{result.peak / MIB:11.2f}{larger:9.2f}"
        )
    return "\n".join(lines)


def known() -> list[str]:
    """Return the names of all workloads."""
    return [*WORKLOADS, *OPERATIONS]


def tables(name: str, rounds: int) -> Iterator[str]:
    """Check the methods of a workload, and measure them at each order."""
    methods, orders, small = METHODS, ORDERS, problem(60, 200, 3)
    if name in WORKLOADS:
        work = WORKLOADS[name]()
    else:
        operation = OPERATIONS[name]
        methods, orders = methods_of(operation), operation.orders
        small, work = operation.make(*operation.small), operation.make(*operation.large)
    bad = errors(small, methods, orders)
    for order in orders:
        yield report(name, order, measure(work, order, rounds, bad, methods))


def _of_layout(matrix: Tensor, work: Problem, order: int) -> Tensor:
    leaf = matrix.detach().requires_grad_()
    return gradient(leaf, torch.sparse.mm(leaf, work.x), order)


def _compare(method: Callable[[Any, int], Run], work: Work, order: int, expected: Tensor) -> str:
    try:
        error = (method(work, order)().to_dense() - expected).abs().max() / expected.abs().max()
    except (ImportError, RuntimeError, MemoryError) as failure:
        return _first_line(failure)
    return "" if error < ROUNDING else f"wrong by {100 * error:.1f} %"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def main() -> None:
    """Run the workloads named on the command line, by default the small one."""
    parser = argparse.ArgumentParser(description="Time and weigh gradients of sparse values, orders 1 to 3.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(known())}")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each method (3)")
    arguments = parser.parse_args()
    if set(arguments.workloads) - set(known()) or arguments.rounds < 1:
        parser.error(f"expected workloads among {', '.join(known())} and at least one round")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    for name in arguments.workloads or ["16k"]:
        for text in tables(name, arguments.rounds):
            print(text, end="\n\n", flush=True)


if __name__ == "__main__":
    main()
