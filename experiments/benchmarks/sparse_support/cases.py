"""The operations of the capability table."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.sparse_support.forms import (
    WIDTH,
    Forms,
    MatrixOperation,
    Setting,
    StridedOperation,
    strided_forms,
)
from metagrad import sparse
from metagrad.sparse import Pattern, Segments, SparseTensor


def _constructor(layout: str) -> Callable[[Setting], Forms]:
    """Write down a product with a matrix whose values are on the tape."""

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
    # Made when it is called: the mask is dense, and a sparse form must not pay for it.
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
