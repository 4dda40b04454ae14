"""What `experiments.benchmarks.sparse` measures: product, lookup, attention, convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metagrad import sparse

OURS, DENSE = "metagrad", "dense"
Run = Callable[[], Tensor]


class Problem(NamedTuple):
    """Tensors of floating point, the first of which is the leaf, and all else."""

    tensors: Sequence[Tensor]
    structure: Mapping[str, Any]

    def double(self) -> Problem:
        """Return the same problem in float64."""
        return Problem([x.double() for x in self.tensors], self.structure)


class Operation(NamedTuple):
    """A workload: what is computed by several methods, at which orders; a problem to check on, and one to time."""

    make: Callable[..., Problem]
    small: tuple[Any, ...]
    large: tuple[Any, ...]
    methods: Mapping[str, Callable[..., Tensor]]
    orders: tuple[int, ...]


def run_of(function: Callable[..., Tensor], work: Problem, order: int) -> Run:
    """Differentiate the sum of sines of what a function returns by its first tensor, and again its squared norm."""

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
    """Sum the squares of what is stored."""
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
    """Multiply by ours."""
    return sparse.SparseTensor(pattern, values) @ x


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
    """Draw a table and what is looked up in it."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(rows, (lookups,), generator=source)
    return Problem([torch.randn(rows, width, generator=source)], {"ids": ids})


def heads(length: int, band: int, width: int, dropout: float) -> Problem:
    """Draw queries, keys and values of a sequence, each of which sees those near to it."""
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(length, width, generator=source) for _ in range(3)]
    return Problem(tensors, {"pattern": sparse.Pattern.banded(length, band, band), "dropout": dropout})


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, *, pattern: sparse.Pattern, dropout: float) -> Tensor:
    """Attend by the matrix of all scores, masked."""
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
    """Convolve the whole grid, and read the result at the same sites."""
    image = x.new_zeros(1, side, side, x.shape[1]).index_put(rulebook.coords.unbind(1), x).movedim(-1, 1)
    y = F.conv2d(image, weight, padding=1).movedim(1, -1)
    return y[rulebook.coords.unbind(1)]


def check_cells(shape: Sequence[int]) -> None:
    """Refuse dense matrices that take more than a gibibyte."""
    if shape[0] * shape[1] > 1 << 28:
        raise MemoryError("rows x columns would take more than 1024 MiB")


OPERATIONS = {
    "product": Operation(
        matrix,
        (60, 200, 3),
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
        (12, 2, 3, 0.0),  # what is dropped is drawn otherwise by the dense method
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


def methods_of(operation: Operation) -> dict[str, Callable[[Problem, int], Run]]:
    """Return what makes a run of each method, of a problem and an order."""

    def method(function: Callable[..., Tensor]) -> Callable[[Problem, int], Run]:
        return lambda work, order: run_of(function, work, order)

    return {name: method(function) for name, function in operation.methods.items()}
