from __future__ import annotations

import math

import pytest
import torch

from metagrad.sparse import Pattern, Segments
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.kernels import products as kernels
from metagrad.sparse.policy import SparsePolicy, use_policy
from tests.sparse.guards import no_large_outputs

POLICIES = {
    "csr": SparsePolicy(threshold=math.inf),
    "gather": SparsePolicy(threshold=math.inf, layout="gather"),
    "dense": SparsePolicy(threshold=0.0, min_nnz=0),
}
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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_equal_dense_ones(policy, dtype):
    pattern, values, a, b = operands(dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernels.matmul(pattern, values, b), dense(pattern, values) @ b, **close)
    sampled = kernels.sample(pattern, a, b)
    torch.testing.assert_close(sampled, (a @ b.mT)[pattern.row, pattern.col], **close)
    assert sampled.dtype == dtype


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_segment_sums_equal_index_add(policy, dtype, shape):
    ids = torch.tensor([2, 0, 2, 5, 2])
    values = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.zeros(6, *shape, dtype=dtype).index_add(0, ids, values)
    result = kernels.segment_sum(values, Segments(ids, 6))
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [(0, 3, 2), (3, 0, 2), (3, 3, 0), (3, 3, 2)])
def test_nothing_to_multiply(policy, size):
    n, m, width = size
    none = torch.empty(0, dtype=torch.int64)
    pattern = Pattern(none, none, (n, m))
    result = kernels.matmul(pattern, torch.empty(0), torch.ones(m, width))
    torch.testing.assert_close(result, torch.zeros(n, width))
    assert kernels.sample(pattern, torch.ones(n, width), torch.ones(m, width)).shape == (0,)
    assert kernels.segment_sum(torch.empty(0, 2), Segments(none, 4)).tolist() == [[0.0, 0.0]] * 4


def test_operands_that_are_not_contiguous(policy):
    pattern, values, a, b = operands()
    result = kernels.matmul(pattern, values, b.mT.contiguous().mT)
    torch.testing.assert_close(result, dense(pattern, values) @ b)
    result = kernels.sample(pattern, a.mT.contiguous().mT, b.mT.contiguous().mT)
    torch.testing.assert_close(result, (a @ b.mT)[pattern.row, pattern.col])


def test_gathers_are_sliced(monkeypatch):
    monkeypatch.setattr(kernels, "SLICE_NUMBERS", 50)
    pattern, values, a, b = operands(torch.bfloat16)
    with no_large_outputs(7 * 40):
        product, sampled = kernels.matmul(pattern, values, b), kernels.sample(pattern, a, b)
    exact = dense(pattern, values).double() @ b.double()
    torch.testing.assert_close(product.double(), exact, rtol=0.1, atol=0.1)
    exact = (a.double() @ b.double().mT)[pattern.row, pattern.col]
    torch.testing.assert_close(sampled.double(), exact, rtol=0.1, atol=0.1)


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
