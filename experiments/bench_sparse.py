"""Time and weigh gradients of sparse values, orders 1 to 3: `python -m experiments.bench_sparse [WORKLOAD ...]`.

What is differentiated is t_0 = sum(sin(A x)) with respect to the values v of A on a fixed pattern, and from then on
t_k = sum((d t_{k-1} / dv)^2), which no cut gradient survives. First every method is compared with dense matrices in
float64 on a small problem; then the methods take turns, and medians are printed with their ratios to ours. Ratios
within one run are what to quote: 1.00 is ours, 40 is forty times slower or larger. Structure that a training loop
makes once (patterns, compiled programs) is made in a first call, which is not timed. The peak is what torch's
allocator gave out in one more call, memory inside its kernels included; JAX states its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.allocations import peak_bytes
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


def errors(work: Problem) -> dict[tuple[str, int], str]:
    """Say which methods raise or are wrong, by the dense matrix in float64; empty where all is right.

    Raises:
        SystemExit: Ours is not right.
    """
    found = {}
    for order in ORDERS:
        expected = dense(work.double(), order)()
        for name, method in METHODS.items():
            note = _compare(method, work.double(), order, expected)
            if note and name == OURS:
                raise SystemExit(f"{name} does not agree with dense matrices at order {order}: {note}.")
            if note:
                found[name, order] = note
    return found


def measure(work: Problem, order: int, rounds: int, bad: dict[tuple[str, int], str]) -> dict[str, Result]:
    """Time the methods in turns, in a new order each round, then weigh each."""
    results = {name: Result(note=bad.get((name, order), "")) for name in METHODS}
    runs: dict[str, Run] = {}
    for name in METHODS:
        if not results[name].note:
            try:
                runs[name] = METHODS[name](work, order)
                runs[name]()
            except (MemoryError, RuntimeError) as error:
                runs.pop(name, None)
                results[name].note = _first_line(error)
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for _ in range(rounds):
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
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
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


def _of_layout(matrix: Tensor, work: Problem, order: int) -> Tensor:
    leaf = matrix.detach().requires_grad_()
    return gradient(leaf, torch.sparse.mm(leaf, work.x), order)


def _compare(method: Callable[[Problem, int], Run], work: Problem, order: int, expected: Tensor) -> str:
    try:
        error = (method(work, order)() - expected).abs().max() / expected.abs().max()
    except (ImportError, RuntimeError, MemoryError) as failure:
        return _first_line(failure)
    return "" if error < ROUNDING else f"wrong by {100 * error:.1f} %"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def main() -> None:
    """Run the workloads named on the command line, by default the small one."""
    parser = argparse.ArgumentParser(description="Time and weigh gradients of sparse values, orders 1 to 3.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each method (3)")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - set(WORKLOADS)
    if unknown or arguments.rounds < 1:
        parser.error(f"expected workloads among {', '.join(WORKLOADS)} and at least one round")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    bad = errors(problem(60, 200, 3))
    for name in arguments.workloads or ["16k"]:
        work = WORKLOADS[name]()
        for order in ORDERS:
            print(report(name, order, measure(work, order, arguments.rounds, bad)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
