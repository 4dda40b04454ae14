"""Which derivatives of sparse operations are correct: `python -m experiments.benchmarks.sparse_support`.

Every cell is the outcome of a run, for torch and for metagrad. t_0 is the sum of squares of an operation's result.
t_k is the sum of squares of the gradients of t_{k-1} with respect to all operands. On a small problem the gradient
of order k is compared with a dense formula in float64. On a large problem its memory is measured. The cells are

- ok: correct, and sparse
- dense: correct, but a tensor of rows x columns was materialized
- cut: a gradient has no graph, or is missing, so that the next order would be silently incorrect
- wrong: different from the dense formula
- error: torch raised

The column "kernel" shows the kernel of metagrad on this device: torch's CSR products, or gathers without them.
"""

from __future__ import annotations

import argparse
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.run.measure import peak_bytes
from experiments.run.progress import Progress
from metagrad import sparse
from metagrad.sparse import Pattern, Segments, SparseTensor

BLOCK = (2, 2)
WIDTH = 3
LAYOUTS = {
    "COO": torch.sparse_coo,
    "CSR": torch.sparse_csr,
    "CSC": torch.sparse_csc,
    "BSR": torch.sparse_bsr,
}


class Leaf(NamedTuple):
    """The tensors that a form is differentiated with respect to."""

    tensor: Tensor
    read: Callable[[Tensor], Tensor]  # the part of its gradient that all forms have, in the same order
    cells: tuple[Tensor, Tensor] | None = None  # the stored cells of a matrix, the only cells of its gradient
    ones: Tensor | None = None  # the gradient at these cells, in the layout of the matrix


class Form(NamedTuple):
    """An operation in one form: dense, torch's sparse, or metagrad's."""

    function: Callable[..., Tensor]
    leaves: Sequence[Leaf]


class Forms(NamedTuple):
    """An operation in three forms."""

    dense: Form
    torch: Form | None  # None if torch does not have it
    metagrad: Form
    dense_numbers: int | None  # size of the dense matrix or table, which sparse forms must not materialize


@dataclass(frozen=True)
class Setting:
    """Size and numbers: n x n matrices of 2 x 2 blocks, so that every layout stores the same cells."""

    n: int
    dtype: torch.dtype
    device: torch.device

    def numbers(self, *shape: int, seed: int = 0) -> Tensor:
        """Draw a dense operand."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=self.dtype).to(self.device)

    def indices(self, high: int, size: int, seed: int = 0) -> Tensor:
        """Draw indices below ``high``."""
        return torch.randint(high, (size,), generator=torch.Generator().manual_seed(seed)).to(self.device)

    def pattern(self, seed: int) -> Pattern:
        """Draw cells: the blocks on the diagonal, so that no row is empty, and an equal number of other blocks."""
        size = self.n // BLOCK[0]
        diagonal = torch.arange(size, device=self.device)
        row, col = (torch.cat([diagonal, self.indices(size, size, seed + k)]) for k in range(2))
        within = torch.cartesian_prod(*map(torch.arange, BLOCK)).to(self.device)
        cells = (
            torch.stack([row, col], 1)[:, None] * torch.tensor(BLOCK, device=self.device) + within
        ).flatten(0, 1)
        return Pattern.coalesce(cells[:, 0], cells[:, 1], (self.n, self.n))[0]


@dataclass(frozen=True)
class MatrixOperation:
    """An operation on sparse matrices A and B, on the values v of one, and on dense matrices x and y."""

    name: str
    operands: str
    dense: Callable[..., Tensor]
    torch: Callable[..., Tensor]
    metagrad: Callable[..., Tensor | SparseTensor]
    layouts: Sequence[str] = tuple(LAYOUTS)

    def forms(self, setting: Setting, layout: str) -> Forms:
        """Return the three forms at a size, for a layout."""
        operands = [_operand(setting, name, LAYOUTS[layout]) for name in self.operands]
        dense, torch_leaves, ours, patterns = zip(*operands, strict=True)

        def on_values(*values: Tensor) -> Tensor:
            made = [v if p is None else SparseTensor._of(p, v) for p, v in zip(patterns, values, strict=True)]
            result = self.metagrad(*made)
            return result.values if isinstance(result, SparseTensor) else result

        return Forms(
            Form(self.dense, dense), Form(self.torch, torch_leaves), Form(on_values, ours), setting.n**2
        )


@dataclass(frozen=True)
class StridedOperation:
    """An operation on dense tensors."""

    name: str
    write: Callable[[Setting], Forms]
    layouts: Sequence[str] = ("-",)

    def forms(self, setting: Setting, layout: str) -> Forms:
        """Return the three forms at a size."""
        return self.write(setting)


def _operand(setting: Setting, name: str, layout: torch.layout) -> tuple[Leaf, Leaf, Leaf, Pattern | None]:
    if name in "xy":
        leaf = _whole(setting.numbers(setting.n, WIDTH, seed=ord(name)))
        return leaf, leaf, leaf, None
    pattern = setting.pattern(ord(name))
    made = SparseTensor(pattern, setting.numbers(pattern.nnz, seed=ord(name)))
    cells = (pattern.row, pattern.col)

    def read(gradient: Tensor) -> Tensor:
        return gradient.to_dense()[cells]

    matrix = _in_layout(made, layout)
    ones = _in_layout(made.with_values(torch.ones_like(made.values)), layout)
    ours = SparseTensor.from_torch(matrix)
    return (
        Leaf(made.to_dense(), read, cells),
        Leaf(matrix, read, cells, ones),
        Leaf(ours.values, lambda gradient: gradient),
        ours.pattern,
    )


def _in_layout(a: SparseTensor, layout: torch.layout) -> Tensor:
    return a.to_torch().to_sparse_bsr(BLOCK) if layout == torch.sparse_bsr else a.to_torch(layout)


def _whole(tensor: Tensor) -> Leaf:
    return Leaf(tensor, lambda gradient: gradient.to_dense())


def strided_forms(
    leaves: Sequence[Tensor],
    *,
    dense: Callable[..., Tensor],
    torch: Callable[..., Tensor] | None,
    metagrad: Callable[..., Tensor],
    dense_numbers: int | None = None,
) -> Forms:
    """Return the forms of an operation on dense tensors, whose whole gradients are compared."""
    whole = [_whole(leaf) for leaf in leaves]
    return Forms(Form(dense, whole), torch and Form(torch, whole), Form(metagrad, whole), dense_numbers)


def _constructor(layout: str) -> Callable[[Setting], Forms]:
    """Return the product of a vector with a matrix whose values are differentiable."""

    def write(setting: Setting) -> Forms:
        pattern = setting.pattern(1)
        shape, row, col = pattern.shape, pattern.row, pattern.col
        make = {
            "COO": lambda v: torch.sparse_coo_tensor(torch.stack([row, col]), v, shape, is_coalesced=True),
            "CSR": lambda v: torch.sparse_csr_tensor(pattern.crow, col, v, shape),
        }[layout]
        return strided_forms(
            [setting.numbers(pattern.nnz), setting.numbers(setting.n, WIDTH, seed=1)],
            dense=lambda v, x: x.new_zeros(shape).index_put((row, col), v) @ x,
            torch=lambda v, x: torch.sparse.mm(make(v), x),
            metagrad=lambda v, x: sparse.spmm(SparseTensor(pattern, v), x),
            dense_numbers=setting.n**2,
        )

    return write


def _sampled(setting: Setting) -> Forms:
    pattern = setting.pattern(1)
    cells = (pattern.row, pattern.col)
    zeros = SparseTensor(pattern, setting.numbers(pattern.nnz) * 0).to_torch(torch.sparse_csr)
    return strided_forms(
        [setting.numbers(setting.n, WIDTH, seed=k) for k in range(2)],
        dense=lambda x, y: (x @ y.mT)[cells],
        torch=lambda x, y: torch.sparse.sampled_addmm(zeros, x, y.mT),
        metagrad=lambda x, y: sparse.sddmm(x, y.mT, pattern).values,
        dense_numbers=setting.n**2,
    )


def _table(setting: Setting) -> tuple[Tensor, Tensor]:
    table = setting.numbers(setting.n**2 // 4, WIDTH)
    return table, setting.indices(len(table), 8)


def _embedding(setting: Setting) -> Forms:
    table, ids = _table(setting)
    return strided_forms(
        [table],
        dense=lambda w: w[ids],
        torch=lambda w: F.embedding(ids, w, sparse=True),
        metagrad=lambda w: sparse.embedding(ids, w),
        dense_numbers=table.numel(),
    )


def _embedding_bag(setting: Setting) -> Forms:
    table, ids = _table(setting)
    ids, weights = ids.reshape(4, 2), setting.numbers(4, 2, seed=1)
    return strided_forms(
        [table, weights],
        dense=lambda w, s: (w[ids] * s[..., None]).sum(1),
        torch=lambda w, s: F.embedding_bag(ids, w, per_sample_weights=s, mode="sum", sparse=True),
        metagrad=lambda w, s: sparse.embedding_bag(ids, None, w, per_sample_weights=s, mode="sum"),
        dense_numbers=table.numel(),
    )


def _segments(reduction: str, ours: Callable[[Tensor, Segments], Tensor]) -> Callable[[Setting], Forms]:
    def write(setting: Setting) -> Forms:
        lengths = setting.indices(3, setting.n) + 1
        ids = torch.repeat_interleave(lengths)
        return strided_forms(
            [setting.numbers(len(ids), WIDTH)],
            dense=lambda v: torch.stack([_reduced(v[ids == k], reduction) for k in range(setting.n)]),
            torch=lambda v: torch.segment_reduce(v, reduction, lengths=lengths, unsafe=True),
            metagrad=lambda v: ours(v, Segments(ids, setting.n)),
        )

    return write


def _reduced(values: Tensor, reduction: str) -> Tensor:
    return values.mean(0) if reduction == "mean" else values.amax(0)


def _attention(setting: Setting) -> Forms:
    pattern = setting.pattern(1)
    # The mask is created in the call, since it is dense and must not count for a sparse form.
    return strided_forms(
        [setting.numbers(1, setting.n, 8, seed=k) for k in range(3)],
        dense=lambda q, k, v: _scores(q, k, pattern).softmax(-1) @ v,
        torch=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=pattern.to_mask()),
        metagrad=lambda q, k, v: sparse.attention(q, k, v, pattern),
        dense_numbers=setting.n**2,
    )


def _scores(q: Tensor, k: Tensor, pattern: Pattern) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~pattern.to_mask(), float("-inf"))


def _row_sums(a: Tensor) -> Tensor:
    return torch.sparse.sum(a, 1) if a.layout == torch.sparse_coo else a.sum(1, keepdim=True)


def _masked_softmax(a: Tensor) -> Tensor:
    return a.masked_fill(a == 0, float("-inf")).softmax(1)


OPERATIONS: Sequence[MatrixOperation | StridedOperation] = (
    MatrixOperation("A @ x", "Ax", torch.matmul, torch.matmul, sparse.spmm),
    MatrixOperation("sparse.mm(A, x)", "Ax", torch.matmul, torch.sparse.mm, sparse.spmm),
    MatrixOperation(
        "A.t() @ x", "Ax", lambda a, x: a.mT @ x, lambda a, x: a.t() @ x, lambda a, x: sparse.spmm(a.t(), x)
    ),
    StridedOperation("v -> A(v) @ x", _constructor("COO"), ("COO",)),
    StridedOperation("v -> A(v) @ x", _constructor("CSR"), ("CSR",)),
    MatrixOperation("A @ B", "AB", torch.matmul, torch.matmul, sparse.spgemm),
    MatrixOperation("A + B", "AB", torch.add, torch.add, operator.add),
    MatrixOperation("A * B", "AB", torch.mul, torch.mul, operator.mul),
    MatrixOperation("A.sum(1)", "A", lambda a: a.sum(1), _row_sums, lambda a: a.sum(1)),
    MatrixOperation(
        "softmax(A, 1)",
        "A",
        _masked_softmax,
        lambda a: torch.sparse.softmax(a, 1),
        lambda a: sparse.softmax(a, 1),
    ),
    StridedOperation("sddmm(x, y)", _sampled, ("CSR",)),
    StridedOperation("embedding", _embedding),
    StridedOperation("embedding_bag", _embedding_bag),
    StridedOperation("segment mean", _segments("mean", sparse.segment_mean)),
    StridedOperation("segment max", _segments("max", sparse.segment_max)),
    StridedOperation("attention", _attention),
)


ORDERS = (1, 2, 3)
SMALL, LARGE = 6, 2000  # rows
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative


@dataclass(frozen=True)
class Row:
    """An operation in a layout: the answers at orders 1 to 3."""

    operation: str
    layout: str
    device: str
    torch: list[str]
    metagrad: list[str]
    kernel: str


class _CutError(Exception):
    """A gradient has no graph, and no error was raised."""


def capabilities(device: torch.device | str = "cpu") -> list[Row]:
    """Run every operation of torch and of metagrad and return the outcomes. This takes some seconds.

    Args:
        device: The device to run on.

    Returns:
        A row for every operation and layout, which :func:`table` formats.
    """
    device = torch.device(device)
    exact = torch.float32 if device.type == "mps" else torch.float64
    small, large = Setting(SMALL, exact, device), Setting(LARGE, torch.float32, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning that a layout is in beta
        return [
            _row(
                operation.name, layout, operation.forms(small, layout), operation.forms(large, layout), large
            )
            for operation in Progress(OPERATIONS, unit="operation", leave=False)
            for layout in operation.layouts
        ]


def table(rows: Sequence[Row]) -> str:
    """Format the answers for a terminal.

    Example:
        >>> row = Row("A @ x", "COO", "cpu", ["dense"] * 3, ["ok"] * 3, "csr")
        >>> print(table([row]))
        operation  layout  torch 1  torch 2  torch 3  ours 1  ours 2  ours 3  kernel
        A @ x      COO     dense    dense    dense    ok      ok      ok      csr
    """
    header = (
        "operation",
        "layout",
        *(f"torch {k}" for k in ORDERS),
        *(f"ours {k}" for k in ORDERS),
        "kernel",
    )
    lines = [header, *((row.operation, row.layout, *row.torch, *row.metagrad, row.kernel) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _row(name: str, layout: str, small: Forms, large: Forms, setting: Setting) -> Row:
    with sparse.stats() as s:
        ours = _answers(small, large, small.metagrad, large.metagrad, setting)
    has_csr = setting.dtype in (torch.float32, torch.float64) and setting.device.type in ("cpu", "cuda")
    return Row(
        operation=name,
        layout=layout,
        device=str(setting.device),
        torch=_answers(small, large, small.torch, large.torch, setting),
        metagrad=ours,
        kernel=("csr" if has_csr else "gather") if s.calls["product"] or s.calls["segment sum"] else "-",
    )


def _answers(
    small: Forms, large: Forms, form: Form | None, large_form: Form | None, setting: Setting
) -> list[str]:
    if form is None or large_form is None:
        return ["-"] * len(ORDERS)
    found = []
    for order in ORDERS:
        answer = _compare(form, small.dense, order)
        if answer == "ok" and large.dense_numbers is not None:
            answer = _weigh(large_form, large.dense_numbers * setting.dtype.itemsize, order, setting.device)
        found.append(answer)
    return found


def _compare(form: Form, dense: Form, order: int) -> str:
    expected = _read(dense, _gradients(dense, order))
    try:
        found = _read(form, _gradients(form, order))
    except _CutError:
        return "cut"
    except Exception:  # any error of torch is a result
        return "error"
    if any(g is None for g in found):
        return "cut"
    want, got = (
        torch.cat([g.flatten() for g in gradients if g is not None]) for gradients in (expected, found)
    )
    error = (got - want).abs().max() / want.abs().max()
    return "ok" if error <= ROUNDING[want.dtype] else "wrong"


def _weigh(form: Form, dense_bytes: int, order: int, device: torch.device) -> str:
    try:
        peak = peak_bytes(lambda: _gradients(form, order), device)
    except Exception:
        return "error"
    return "ok" if peak < dense_bytes // 2 else "dense"


def _gradients(form: Form, order: int) -> list[Tensor | None]:
    """Return the gradients of t_{order - 1}. A gradient is None if torch finds no dependence."""
    leaves = [leaf.tensor.detach().requires_grad_() for leaf in form.leaves]
    result = form.function(*leaves)
    objective = (result * result).sum()
    gradients: Sequence[Tensor | None] = ()
    for k in range(1, order + 1):
        if not objective.requires_grad:
            raise _CutError
        gradients = torch.autograd.grad(objective, leaves, create_graph=k < order, allow_unused=True)
        if k < order:
            if any(g is not None and not g.requires_grad for g in gradients):
                raise _CutError
            stored = [
                _stored(g, leaf) for g, leaf in zip(gradients, form.leaves, strict=True) if g is not None
            ]
            objective = sum(((g * g).sum() for g in stored), start=objective.new_zeros(()))
    return list(gradients)


def _read(form: Form, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if g is None else leaf.read(g.detach()) for g, leaf in zip(gradients, form.leaves, strict=True)
    ]


def _stored(gradient: Tensor, leaf: Leaf) -> Tensor:
    """Leave out the cells that the matrix does not store, if torch's gradient has more cells."""
    if leaf.cells is None:
        return gradient
    if gradient.layout == torch.strided:
        return gradient[leaf.cells]
    assert leaf.ones is not None
    return gradient if gradient._nnz() == leaf.ones._nnz() else gradient * leaf.ones


def main() -> None:
    """Print the table. The exit status is 1 if an outcome of metagrad is not "ok"."""
    parser = argparse.ArgumentParser(description="Show which derivatives of sparse operations are right.")
    parser.add_argument("--device", default="cpu", help="where to run (cpu)")
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to the terminal
    rows = capabilities(arguments.device)
    print(table(rows))
    if any(answer != "ok" for row in rows for answer in row.metagrad):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
