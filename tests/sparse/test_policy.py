from __future__ import annotations

import math
import threading

import pytest
import torch

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor, calibrate
from metagrad.sparse.policy import SparsePolicy, current_policy, stats, timed, use_policy
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.sparse.cases import PRODUCTS, arguments

DENSE = SparsePolicy(threshold=0.0, min_nnz=0)
SPARSE = SparsePolicy(threshold=math.inf)
DEFAULT = SparsePolicy()


@pytest.mark.parametrize(
    ("policy", "shape", "nnz", "width", "dense"),
    [
        (SparsePolicy(threshold=0.5, min_nnz=0), (10, 10), 50, None, True),
        (SparsePolicy(threshold=0.5, min_nnz=0), (10, 10), 49, None, False),
        (SparsePolicy(threshold=0.5, min_nnz=51), (10, 10), 50, None, False),
        (SparsePolicy(threshold=0.5, min_nnz=0), (10, 10), 100, 15, False),
        (SparsePolicy(threshold=0.5, min_nnz=0), (10, 10), 100, 16, True),
        (SparsePolicy(threshold=0.5, min_nnz=0, max_dense_bytes=400), (10, 10), 100, None, True),
        (SparsePolicy(threshold=0.5, min_nnz=0, max_dense_bytes=399), (10, 10), 100, None, False),
        (SparsePolicy(threshold=math.inf, min_nnz=0), (10, 10), 100, None, False),
        (DEFAULT, (16000, 16000), 64000, 32, False),
    ],
)
def test_prefers_dense(policy, shape, nnz, width, dense):
    assert policy.prefers_dense(shape, nnz, torch.float32, width=width) is dense


def fail():
    assert current_policy() is DENSE
    raise RuntimeError("left")


def test_a_policy_is_in_force_inside_its_block():
    with use_policy(SPARSE) as policy:
        assert policy is current_policy() is SPARSE
        with pytest.raises(RuntimeError, match="left"), use_policy(DENSE):
            fail()
        assert current_policy() is SPARSE
    assert current_policy() == DEFAULT


def test_a_policy_reaches_the_backward_passes_of_other_threads():
    """torch moves a backward pass that is 60 deep inside others to another thread, as it does for every device."""
    seen = []

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), current_policy()))
            if ctx.depth:
                with torch.enable_grad():
                    Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            return grad, None

    with use_policy(SPARSE):
        Deep.apply(torch.ones(1, requires_grad=True), 80).sum().backward()
    assert len({thread for thread, _ in seen}) > 1
    assert {policy for _, policy in seen} == {SPARSE}


@pytest.mark.parametrize(("meet", "found"), [(0.25, 0.25), (2.0, math.inf), (0.0, 1 / 512)])
def test_calibration_finds_where_two_costs_meet(meet, found, monkeypatch):
    """Dense costs as much as a sparse matrix of density ``meet``."""

    def cost(pattern, values, dense, policy):
        return meet * pattern.shape[0] * pattern.shape[1] if policy == DENSE else pattern.nnz

    monkeypatch.setattr("metagrad.sparse.kernels.calibrate._both", cost)
    assert calibrate().threshold == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize("policy", [DENSE, SPARSE, SparsePolicy(layout="gather")], ids=repr)
def test_every_way_of_computing_is_right_at_every_order(policy):
    a, x = arguments(PRODUCTS[0], Pattern.banded(5, 1, 2))
    with use_policy(policy), stats() as s:
        y = a @ x
        assert mg.gradcheck(lambda a, x: (a @ x).pow(3), (a, x), order=3)
    torch.testing.assert_close(y, a.to_dense() @ x)
    assert bool(s.densified) is (policy == DENSE)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_cells_that_are_not_stored_do_not_multiply_infinity(bad):
    """The product 0 * inf is NaN in a dense matrix, and is not there in a sparse one."""
    a = SparseTensor(Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 3)), torch.tensor([2.0, 3.0]))
    x = torch.tensor([[1.0], [10.0], [bad]])
    with use_policy(DENSE):
        assert (a @ x).tolist() == [[20.0], [3.0]]


def random(n=50, m=40, entries=120, seed=0) -> SparseTensor:
    generator = torch.Generator().manual_seed(seed)
    row, col = (torch.randint(size, (entries,), generator=generator) for size in (n, m))
    pattern, _ = Pattern.coalesce(row, col, (n, m))
    return SparseTensor(pattern, torch.randn(pattern.nnz, generator=generator))


def test_products_and_their_dense_equivalents():
    a, x = random().requires_grad_(), torch.ones(40, 3, requires_grad=True)
    with stats() as s:
        (a @ x).square().sum().backward()
    nnz = len(a.values)
    # One product [50, 3], and the gradients [nnz] (dense: [50, 40]) and [40, 3].
    assert s.calls["product"] == 3
    assert s.nbytes == 4 * (50 * 3 + nnz + 40 * 3)
    assert s.dense_nbytes == 4 * (50 * 3 + 50 * 40 + 40 * 3)
    assert s.dense_seconds() > 0
    assert 0 < s.seconds["conversion"] < sum(s.seconds.values())
    assert not s.densified


def test_a_conversion_inside_a_product_is_not_counted_twice(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("metagrad.sparse.policy.clock", lambda: float(next(now)))
    inner = timed("conversion")(lambda: None)
    outer = timed("product")(lambda: (inner(), inner()))
    with stats() as s:
        outer()  # reads the clock at 0, 1, 2, 3, 4, 5
    assert s.seconds == {"product": 3.0, "segment sum": 0.0, "conversion": 2.0}
    assert s.calls == {"product": 1, "conversion": 2}


def test_merges_done_and_avoided():
    a, b = random(), random(seed=1)
    with stats() as s:
        a + b
    assert s.merges == {"done": 1}
    with stats() as s:
        a + b  # kept
        a + a  # the same pattern
        a * a
        a.pattern.union(a.pattern)
    assert s.merges == {"avoided": 4}


def test_densifications_are_counted_at_the_line_that_calls():
    a, rows = random(), RowSparse(torch.tensor([1]), torch.ones(1, 3), (5, 3))
    with stats() as s, use_policy(DENSE):
        for _ in range(2):
            a.to_dense()
        rows.to_dense()
        a @ torch.ones(40, 2)
    assert [(made.count, made.nbytes) for made in s.densified.values()] == [
        (2, 2 * 50 * 40 * 4),
        (1, 5 * 3 * 4),
        (1, 50 * 40 * 4),
    ]
    assert all(place.rpartition(":")[0] == __file__ for place in s.densified)
    assert len({place.rpartition(":")[2] for place in s.densified}) == 3


def test_inner_statistics_are_added_to_outer_ones():
    a = random()
    with stats() as outer:
        a @ torch.ones(40, 2)
        with stats() as inner, use_policy(DENSE):
            a @ torch.ones(40, 2)
            a + a
        assert outer.calls["product"] == 2
    assert inner.calls["product"] == 1
    assert inner.merges == outer.merges == {"avoided": 1}
    assert inner.densified == outer.densified
    assert outer.nbytes == 2 * inner.nbytes
    assert outer.dense_seconds() == pytest.approx(2 * inner.dense_seconds())


def test_the_table_says_everything():
    a = random().requires_grad_()
    with stats() as s:
        (a @ torch.ones(40, 3)).square().sum().backward()
        a + random(seed=1)
        a.to_dense()
    lines = str(s).splitlines()
    for line, words in ((0, "2 calls"), (4, "estimated"), (6, "1 done, 0 avoided"), (8, "1 x 0.01 MiB")):
        assert words in " ".join(lines[line].split())
    assert lines[8].rpartition(":")[0].endswith(__file__)
