from __future__ import annotations

import pytest
import torch

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.policy import SparsePolicy, stats, timed, use_policy
from metagrad.sparse.tables.row_sparse import RowSparse

DENSE = SparsePolicy(threshold=0.0, min_nnz=0)


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
