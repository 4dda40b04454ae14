"""Measure gradients of sparse values at orders 1 to 3: `python -m experiments.benchmarks.sparse [WORKLOAD ...]`.

The first workload differentiates t_0 = sum(sin(A x)) with respect to the values v of A on a fixed pattern. Higher
orders differentiate t_k = sum((d t_{k-1} / dv)^2), which detects any detached gradient. The other workloads are
lookups in a table, attention with dropout, and convolution. The product of 2M entries is compared with SciPy and MKL,
only forward.

First every method is compared with dense tensors in float64 on a small problem. Then the methods take turns. The
printed values are medians and their ratios to metagrad. Quote ratios within one run: a ratio of 40 means forty times
slower or larger. The structure that a training loop creates once (patterns) is created in a first call, which is not
timed. Times are CPU times of all threads. The peak is the memory that torch's allocator gives out in one more call,
including memory inside its kernels. The memory of SciPy is not visible.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.arguments import add_words
from experiments.run.measure import cpu_seconds, peak_bytes
from experiments.run.progress import Progress
from metagrad import sparse

OURS, DENSE = "metagrad", "dense"
ROUNDING = 1e-9  # relative, in float64
MIB = 2**20

Run = Callable[[], Tensor]
Notes = dict[tuple[str, int], str]


class Problem(NamedTuple):
    """Arguments of a function: floating point tensors, the differentiated tensor first, and others."""

    tensors: Sequence[Tensor]
    structure: Mapping[str, Any]

    def double(self) -> Problem:
        """Return the same problem in float64."""
        return Problem([x.double() for x in self.tensors], self.structure)


class Operation(NamedTuple):
    """A workload: its methods, its orders, a small problem to check, and a problem to time."""

    make: Callable[..., Problem]
    small: tuple[Any, ...]
    large: tuple[Any, ...]
    methods: Mapping[str, Callable[..., Tensor]]
    orders: tuple[int, ...]


def run_of(function: Callable[..., Tensor], work: Problem, order: int) -> Run:
    """Differentiate the sum of sines of a function's result, and then the squared norm of each derivative."""

    def run() -> Tensor:
        leaf = work.tensors[0].detach().requires_grad_(order > 0)
        found = function(leaf, *work.tensors[1:], **work.structure)
        if not order:
            return found
        loss = found.sin().sum()
        for k in range(1, order + 1):
            (found,) = torch.autograd.grad(loss, leaf, create_graph=k < order)
            loss = squared_norm(found) if k < order else loss
        return found

    return run


def squared_norm(x: Tensor) -> Tensor:
    """Sum the squares of the stored values."""
    values = x.coalesce().values() if x.layout == torch.sparse_coo else x
    return (values.values if isinstance(values, sparse.RowSparse) else values).square().sum()


def matrix(n: int, entries: int, width: int) -> Problem:
    """Draw a square matrix in every form, and the dense matrix that it multiplies."""
    source = torch.Generator().manual_seed(0)
    row, col = (torch.randint(n, (entries,), generator=source) for _ in range(2))
    pattern, _ = sparse.Pattern.coalesce(row, col, (n, n))
    values = torch.randn(pattern.nnz, generator=source)
    return Problem([values, torch.randn(n, width, generator=source)], {"pattern": pattern, "kept": {}})


def by_metagrad(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Multiply by metagrad's sparse matrix."""
    return sparse.SparseTensor(pattern, values) @ x


def by_index_add(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Gather rows, multiply, and add with dense tensors, as message passing does."""
    messages = values[:, None] * x.index_select(0, pattern.col)
    return torch.zeros_like(x).index_add(0, pattern.row, messages)


def by_coo(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Multiply by torch's COO tensor of the values."""
    indices = torch.stack([pattern.row, pattern.col])
    return torch.sparse.mm(
        torch.sparse_coo_tensor(indices, values, pattern.shape, is_coalesced=True, check_invariants=False), x
    )


def by_csr(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Multiply by torch's CSR tensor of the values."""
    return torch.sparse.mm(torch.sparse_csr_tensor(pattern.crow, pattern.col, values, pattern.shape), x)


def by_scipy(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Multiply by SciPy's CSR."""
    if ("scipy", values.dtype) not in kept:
        kept["scipy", values.dtype] = sparse.SparseTensor(pattern, values).to_scipy("csr")
    return torch.from_numpy(kept["scipy", values.dtype] @ x.numpy())


def by_mkl(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Multiply by torch's CSR with indices of 32 bits, which MKL takes as they are."""
    if ("mkl", values.dtype) not in kept:
        pointers, col = pattern.crow.int(), pattern.col.int()
        kept["mkl", values.dtype] = torch.sparse_csr_tensor(pointers, col, values, pattern.shape)
    return kept["mkl", values.dtype] @ x


def by_dense_matrix(values: Tensor, x: Tensor, *, pattern: sparse.Pattern, kept: dict) -> Tensor:
    """Multiply by the dense matrix."""
    check_cells(pattern.shape)
    return values.new_zeros(pattern.shape).index_put((pattern.row, pattern.col), values) @ x


def table(rows: int, lookups: int, width: int) -> Problem:
    """Draw a table and the indices of the lookups."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(rows, (lookups,), generator=source)
    return Problem([torch.randn(rows, width, generator=source)], {"ids": ids})


def heads(length: int, band: int, width: int, dropout: float) -> Problem:
    """Draw queries, keys and values of a sequence, where each query sees its neighbors."""
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(length, width, generator=source) for _ in range(3)]
    return Problem(tensors, {"pattern": sparse.Pattern.banded(length, band, band), "dropout": dropout})


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, *, pattern: sparse.Pattern, dropout: float) -> Tensor:
    """Compute attention by the masked matrix of all scores."""
    check_cells(pattern.shape)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~pattern.to_mask(), -math.inf)
    return F.dropout(scores.softmax(-1), dropout) @ v


def strokes(side: int, channels: int, part: float) -> Problem:
    """Draw the sites of a square grid, their features, and the weights of a convolution."""
    source = torch.Generator().manual_seed(0)
    sites = (torch.rand(1, side, side, generator=source) < part).nonzero()
    weight = torch.randn(channels, channels, 3, 3, generator=source)
    rulebook = sparse.Rulebook(sites, 3)
    return Problem(
        [weight, torch.randn(len(sites), channels, generator=source)], {"rulebook": rulebook, "side": side}
    )


def on_the_grid(weight: Tensor, x: Tensor, *, rulebook: sparse.Rulebook, side: int) -> Tensor:
    """Convolve the whole grid, and return the result at the sites."""
    image = x.new_zeros(1, side, side, x.shape[1]).index_put(rulebook.coords.unbind(1), x).movedim(-1, 1)
    y = F.conv2d(image, weight, padding=1).movedim(1, -1)
    return y[rulebook.coords.unbind(1)]


def check_cells(shape: Sequence[int]) -> None:
    """Raise an error for dense matrices of more than one GiB."""
    if shape[0] * shape[1] > 1 << 28:
        raise MemoryError("rows x columns would take more than 1024 MiB")


GRADIENTS = {
    OURS: by_metagrad,
    "torch index_add": by_index_add,
    "torch.sparse.mm, COO": by_coo,
    "torch.sparse.mm, CSR": by_csr,
    DENSE: by_dense_matrix,
}
SMALL = (60, 200, 3)
OPERATIONS = {
    "16k": Operation(matrix, SMALL, (16_000, 64_000, 32), GRADIENTS, (1, 2, 3)),
    "200k": Operation(matrix, SMALL, (200_000, 2_000_000, 32), GRADIENTS, (1, 2, 3)),
    "product": Operation(
        matrix,
        SMALL,
        (200_000, 2_000_000, 32),
        {OURS: by_metagrad, "SciPy CSR": by_scipy, "MKL, 32-bit CSR": by_mkl, DENSE: by_dense_matrix},
        (0,),
    ),
    "lookup": Operation(
        table,
        (20, 30, 3),
        (100_000, 16_384, 32),
        {
            OURS: lambda table, *, ids: sparse.embedding(ids, table),
            "F.embedding(sparse=True)": lambda table, *, ids: F.embedding(ids, table, sparse=True),
            DENSE: lambda table, *, ids: F.embedding(ids, table),
        },
        (1, 2, 3),
    ),
    "attention": Operation(
        heads,
        (12, 2, 3, 0.0),  # no dropout, since the dense method drops other entries
        (2048, 16, 32, 0.1),
        {
            OURS: lambda q, k, v, *, pattern, dropout: sparse.attention(q, k, v, pattern, dropout_p=dropout),
            DENSE: attend_to_all,
        },
        (1, 2, 3),
    ),
    "convolution": Operation(
        strokes,
        (9, 2, 0.3),
        (512, 16, 0.02),
        {OURS: lambda weight, x, *, rulebook, side: sparse.conv(x, weight, rulebook), DENSE: on_the_grid},
        (1, 2, 3),
    ),
}
"""Workloads by name."""


@dataclass
class Result:
    """The result of one method at one order."""

    seconds: float = float("nan")
    peak: int = 0
    note: str = ""


def errors(work: Problem, operation: Operation) -> Notes:
    """Return the methods that raise or differ from dense tensors in float64.

    Raises:
        SystemExit: The method of metagrad is incorrect.
    """
    found = {}
    for order in operation.orders:
        expected = run_of(operation.methods[DENSE], work.double(), order)().to_dense()
        for name, method in operation.methods.items():
            note = _compare(run_of(method, work.double(), order), expected)
            if note and name == OURS:
                raise SystemExit(f"{name} does not agree with dense matrices at order {order}: {note}.")
            if note:
                found[name, order] = note
    return found


def measure(work: Problem, operation: Operation, order: int, rounds: int, bad: Notes) -> dict[str, Result]:
    """Time the methods alternately, in a new order each round, then measure the memory of each method."""
    results = {name: Result(note=bad.get((name, order), "")) for name in operation.methods}
    runs: dict[str, Run] = {}
    for name, method in operation.methods.items():
        if not results[name].note:
            try:
                runs[name] = run_of(method, work, order)
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
        results[name].seconds, results[name].peak = statistics.median(times[name]), peak_bytes(run)
    return results


def seconds(run: Run) -> float:
    """Time a call: the median over a twentieth of a second, after a first call that is not timed."""
    run()
    times: list[float] = []
    while sum(times) < 0.05:
        times.append(cpu_seconds(run))
    return statistics.median(times)


def report(name: str, order: int, results: dict[str, Result]) -> str:
    """Format one order: medians, peaks and ratios to metagrad."""
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


def tables(name: str, rounds: int) -> Iterator[str]:
    """Check the methods of a workload, and measure them at each order."""
    operation = OPERATIONS[name]
    bad = errors(operation.make(*operation.small), operation)
    work = operation.make(*operation.large)
    for order in operation.orders:
        yield report(name, order, measure(work, operation, order, rounds, bad))


def _compare(run: Run, expected: Tensor) -> str:
    try:
        error = (run().to_dense() - expected).abs().max() / expected.abs().max()
    except (ImportError, RuntimeError, MemoryError) as failure:
        return _first_line(failure)
    return "" if error < ROUNDING else f"wrong by {100 * error:.1f} %"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def main() -> None:
    """Run the workloads of the command line. The default is the small workload."""
    parser = argparse.ArgumentParser(description="Time and weigh gradients of sparse values, orders 1 to 3.")
    add_words(parser, "workloads", OPERATIONS, ["16k"])
    parser.add_argument("--rounds", type=int, default=3, help="timings of each method (3)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("expected at least one round")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to the terminal
    for name in arguments.workloads:
        for text in tables(name, arguments.rounds):
            print(text, end="\n\n", flush=True)


if __name__ == "__main__":
    main()
