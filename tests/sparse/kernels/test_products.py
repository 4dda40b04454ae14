from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import metagrad as mg
from metagrad import sparse
from metagrad.distributed.rows import part_of
from metagrad.optim.torch_optim.sparse_gradients import as_rows
from metagrad.sparse import Pattern, RowSparse, Segments, SparseTensor
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.kernels import products as kernels
from metagrad.sparse.policy import SparsePolicy, use_policy
from metagrad.sparse.tables.embedding import reduce_bags
from tests.sparse.guards import no_large_outputs

POLICIES = {
    "csr": SparsePolicy(threshold=math.inf),
    "gather": SparsePolicy(threshold=math.inf, layout="gather"),
    "dense": SparsePolicy(threshold=0.0, min_nnz=0),
}
HALF = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.fixture(params=POLICIES)
def policy(request):
    with use_policy(POLICIES[request.param]):
        yield request.param


def operands(dtype=torch.float64, n=40, m=30, density=0.2, width=7):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(n, m, generator=generator) < density
    mask[3] = False
    pattern = Pattern.from_mask(mask)
    numbers = (torch.randn(size, generator=generator) for size in ((pattern.nnz,), (n, width), (m, width)))
    return pattern, *(x.to(dtype) for x in numbers)


def dense(pattern, values):
    matrix = torch.zeros(pattern.shape, dtype=values.dtype)
    matrix[pattern.row, pattern.col] = values
    return matrix


@pytest.mark.parametrize(
    "layout", [lambda x: x, lambda x: x.mT.contiguous().mT], ids=["contiguous", "columns"]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_equal_dense_ones(policy, dtype, layout):
    pattern, values, *factors = operands(dtype)
    a, b = map(layout, factors)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernels.matmul(pattern, values, b), dense(pattern, values) @ b, **close)
    sampled = kernels.sample(pattern, a, b)
    torch.testing.assert_close(sampled, (a @ b.mT)[pattern.row, pattern.col], **close)
    assert sampled.dtype == dtype


def test_segment_sums_equal_index_add(policy):
    ids = torch.tensor([2, 0, 2, 5, 2])
    for shape, dtype in itertools.product([(), (3,), (2, 2)], TOLERANCE):
        values = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = torch.zeros(6, *shape, dtype=dtype).index_add(0, ids, values)
        result = kernels.segment_sum(values, Segments(ids, 6))
        torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nothing_to_multiply(policy):
    none = torch.empty(0, dtype=torch.int64)
    for n, m, width in ((0, 3, 2), (3, 0, 2), (3, 3, 0), (3, 3, 2)):
        pattern = Pattern(none, none, (n, m))
        result = kernels.matmul(pattern, torch.empty(0), torch.ones(m, width))
        torch.testing.assert_close(result, torch.zeros(n, width))
        assert kernels.sample(pattern, torch.ones(n, width), torch.ones(m, width)).shape == (0,)
    assert kernels.segment_sum(torch.empty(0, 2), Segments(none, 4)).tolist() == [[0.0, 0.0]] * 4


def test_gathers_are_sliced(monkeypatch):
    monkeypatch.setattr(kernels, "SLICE_NUMBERS", 50)
    pattern, values, a, b = operands(torch.bfloat16)
    with no_large_outputs(7 * 40):
        kernels.matmul(pattern, values, b)
        kernels.sample(pattern, a, b)


def test_dense_products_stay_below_the_limit():
    pattern, values, a, b = operands()
    limited = SparsePolicy(threshold=0.0, min_nnz=0, max_dense_bytes=40 * 30 * 8 - 1)
    with use_policy(limited), no_large_outputs(40 * 30 - 1):
        product = kernels.matmul(pattern, values, b)
        kernels.sample(pattern, a, b)
    torch.testing.assert_close(product, dense(pattern, values) @ b)


@pytest.mark.parametrize(
    "policy", [SparsePolicy(), SparsePolicy(threshold=0.0, min_nnz=0)], ids=["sparse", "dense"]
)
def test_autocast_leaves_products_and_their_derivatives_in_the_dtype_of_the_operands(policy):
    pattern = Pattern.banded(6, below=1, above=1)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()  # noqa: E731
    values, x = draw(pattern.nnz), draw(6, 3)

    def derivatives():
        y = rules.matmul(pattern, values, x)
        z = rules.segment_sum(rules.sample(pattern, y, x).unsqueeze(1) * y[pattern.row], pattern.cols)
        first = torch.autograd.grad((z**2).sum(), [values, x], create_graph=True)
        return [z, *first, *torch.autograd.grad(sum((g**2).sum() for g in first), [values, x])]

    with use_policy(policy):
        expected = derivatives()
        with torch.autocast("cpu", torch.bfloat16):
            got = derivatives()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


N = 4096
ONE, MANY = torch.zeros(N, dtype=torch.int64), torch.arange(N)
SEGMENTS = Segments(ONE, 1)


class Case(NamedTuple):
    """An operation on equal numbers [4096], and torch's operation on the dense tensor."""

    ours: Callable[[Tensor], Tensor]
    dense: Callable[[Tensor], Tensor]


def row(v):
    return SparseTensor(Pattern(ONE, MANY, (1, N)), v)


def column(v):
    return SparseTensor(Pattern(MANY, ONE, (N, 1)), v)


def table(v):
    """Return a table with one column and all rows."""
    return RowSparse(MANY, v[:, None], (N, 1))


def cotangent_of_a_row(v):
    """Return the gradient of a row that is looked up 4096 times."""
    rows = v.new_ones(2, 1, requires_grad=True)
    return mg.grad((sparse.embedding(ONE, rows)[:, 0] * v).sum(), rows, create_graph=True).values


def cotangent_of_a_segment(v, index):
    x = v.new_ones(1, requires_grad=True)
    return mg.grad((sparse.gather(x, index) * v).sum(), x, create_graph=True)


def attended(v):
    q, k = v.new_zeros(1, 2), v.new_zeros(N, 2)
    return sparse.attention(q, k, v[:, None], Pattern(ONE, MANY, (1, N)))


def bag(v, mode):
    return reduce_bags(v[None, :, None], None, mode=mode)


def total(v):
    return v.sum()


def average(v):
    return v.mean()


def normalised(v):
    return v.softmax(0)


def norm(v):
    return torch.linalg.vector_norm(v)


CASES = {
    "sum": Case(lambda v: row(v).sum(), total),
    "sum of a row": Case(lambda v: row(v).sum(1), total),
    "mean": Case(lambda v: row(v).mean(), average),
    "norm": Case(lambda v: row(v).norm(), norm),
    "softmax": Case(lambda v: sparse.softmax(row(v)).values, normalised),
    "log_softmax": Case(lambda v: row(v).log_softmax().values, lambda v: v.log_softmax(0)),
    "segment_sum": Case(lambda v: sparse.segment_sum(v, SEGMENTS), total),
    "segment_mean": Case(lambda v: sparse.segment_mean(v, SEGMENTS), average),
    "segment_mean by ids": Case(lambda v: sparse.segment_mean(v, ONE, 1), average),
    "segment_max": Case(lambda v: sparse.segment_max(v, SEGMENTS), lambda v: v.amax()),
    "segment_softmax": Case(lambda v: sparse.segment_softmax(v, SEGMENTS), normalised),
    "derivative of gather": Case(lambda v: cotangent_of_a_segment(v, SEGMENTS), total),
    "derivative of gather by ids": Case(lambda v: cotangent_of_a_segment(v, ONE), total),
    "spmm": Case(lambda v: row(v) @ v.new_ones(N, 2), lambda v: v[None] @ v.new_ones(N, 2)),
    "sddmm": Case(
        lambda v: sparse.sddmm(v[None], 0.1 * v[:, None], Pattern(ONE[:1], ONE[:1], (1, 1))).values,
        lambda v: v[None] @ (0.1 * v[:, None]),
    ),
    "spgemm": Case(
        lambda v: sparse.spgemm(row(v), column(0.1 * v)).values, lambda v: v[None] @ (0.1 * v[:, None])
    ),
    "attention": Case(attended, average),
    "duplicates": Case(lambda v: SparseTensor.from_coo(ONE, ONE, v, (1, 1)).values, total),
    "duplicate rows": Case(lambda v: RowSparse.from_rows(ONE, v[:, None], (2, 1)).values, total),
    "derivative of embedding": Case(cotangent_of_a_row, total),
    "sum of rows": Case(lambda v: table(v).sum(0), total),
    "embedding_bag": Case(lambda v: bag(v, "sum"), total),
    "masked_sum": Case(lambda v: sparse.masked_sum(v, v == v), total),
    "masked_mean": Case(lambda v: sparse.masked_mean(v, v == v), average),
    "masked_softmax": Case(lambda v: sparse.masked_softmax(v, v == v, 0), normalised),
}


def derivatives(operation, v):
    """Return the result, the gradient of a squared weighted sum, and the gradient of the squared gradient."""
    v = v.detach().requires_grad_()
    y = operation(v)
    wide = y.flatten().to(torch.promote_types(y.dtype, torch.float32))
    weights = torch.linspace(1, 2, wide.numel(), dtype=wide.dtype)
    size = max(1, wide.numel() // 64)  # keeps the square within the range of float16
    weighted = (weights * wide).sum() / size
    (g,) = torch.autograd.grad(weighted.square(), v, create_graph=True)
    squares = g.to(wide.dtype).square().mean()
    (h,) = torch.autograd.grad(squares, v, allow_unused=True) if squares.requires_grad else (None,)
    return [x.detach().double().flatten() for x in (y, g, torch.zeros_like(v) if h is None else h)]


@pytest.mark.parametrize("name", CASES)
def test_sums_of_half_precision_are_accumulated_in_float32(name):
    for dtype in HALF:
        check_half_precision(CASES[name], torch.full((N,), 0.0157).to(dtype), dtype)


def check_half_precision(operation, v, dtype):
    """Compare values and derivatives to order two, with the kernels of the policy and by gathers."""
    assert operation.ours(v).dtype == dtype
    exact, dense = derivatives(operation.dense, v.double()), derivatives(operation.dense, v)
    found = []
    for threshold, layout in ((0.0, "auto"), (math.inf, "gather")):
        with sparse.use_policy(SparsePolicy(threshold=threshold, layout=layout)):
            found += derivatives(operation.ours, v)
    for ours, theirs, expected in zip(found, 2 * dense, 2 * exact, strict=True):
        assert ours.shape == expected.shape
        # The error of torch itself (NaN for the second derivative of log_softmax in float16), and the rounding of
        # results and cotangents.
        error = (theirs - expected).abs().max().nan_to_num()
        allowed = error + 4 * torch.finfo(dtype).eps * expected.abs().max()
        assert (ours - expected).abs().max() <= allowed


def test_duplicates_of_coo_gradients_are_added_in_float32():
    """torch's sparse embedding gives such a gradient to a row that is looked up 4096 times."""
    for dtype in HALF:
        ones = torch.ones(N, 2, dtype=dtype)
        gradient = torch.sparse_coo_tensor(ONE[None], ones, (3, 2), check_invariants=True)
        for values in (as_rows(gradient).values, part_of(gradient).values):
            assert values.tolist() == [[N, N]]
            assert values.dtype == dtype
