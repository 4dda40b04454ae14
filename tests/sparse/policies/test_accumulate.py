from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.policies.accumulate import Accumulator
from metagrad.sparse.policies.policy import SparsePolicy
from metagrad.sparse.policies.stats import stats
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.joint import joint_gradcheck
from tests.sparse.guards import no_large_outputs

ALWAYS = SparsePolicy(threshold=0.0, min_nnz=0)


def pattern(seed: int, n=4, m=3, entries=5) -> Pattern:
    generator = torch.Generator().manual_seed(seed)
    row, col = (torch.randint(size, (entries,), generator=generator) for size in (n, m))
    return Pattern.coalesce(row, col, (n, m))[0]


def numbers(*shape: int, seed=0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def added(*terms, policy=None):
    total = Accumulator(policy)
    for term in terms:
        total.add(term)
    return total.result()


def dense(x):
    return x if type(x) is torch.Tensor else x.to_dense()


def blocks(seed: int, block: tuple[int, int]) -> SparseTensor:
    p, q = block
    made = pattern(seed, 4 // p, 4 // q, 3)
    return SparseTensor(made, numbers(made.nnz, p, q, seed=seed))


def matrix(seed: int) -> SparseTensor:
    made = pattern(seed)
    return SparseTensor(made, numbers(made.nnz, seed=seed))


def rows(seed: int, *width: int) -> RowSparse:
    chosen = torch.tensor([[0, 2], [1, 2], [3, 5]][seed % 3])
    return RowSparse(chosen, numbers(2, *width, seed=seed), (6, *width))


A, B, C = matrix(0), matrix(1), matrix(2)
TERMS = {
    "one matrix": [A],
    "one pattern": [A, A, A],
    "two patterns": [A, B],
    "many patterns": [A, B, C, A, B],
    "rows": [rows(0, 3), rows(1, 3), rows(2, 3)],
    "the same rows": [rows(0, 3), rows(0, 3)],
    "rows of scalars": [rows(0), rows(1)],
    "dense": [numbers(4, 3), numbers(4, 3, seed=1)],
    "dense and matrices": [A, numbers(4, 3), B],
    "dense and rows": [rows(0, 3), numbers(6, 3), rows(1, 3)],
    "blocks": [blocks(0, (2, 2)), blocks(1, (2, 2))],
    "blocks of two sizes": [blocks(0, (2, 2)), blocks(1, (4, 1))],
}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("policy", [None, ALWAYS])
def test_the_sum_is_the_dense_sum(name, policy):
    terms = TERMS[name]
    result = added(*terms, policy=policy)
    torch.testing.assert_close(dense(result), sum(dense(term) for term in terms))
    is_dense = policy is not None or any(type(term) is torch.Tensor for term in terms)
    assert type(result) is (torch.Tensor if is_dense else type(terms[0]))


def rebuilt(terms, values):
    """Put other numbers in the places of the terms'."""
    return [
        SparseTensor(term.pattern, new)
        if isinstance(term, SparseTensor)
        else RowSparse(term.rows, new, term.shape)
        if isinstance(term, RowSparse)
        else new
        for term, new in zip(terms, values, strict=True)
    ]


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("policy", [None, ALWAYS])
def test_sums_are_right_at_every_order(name, policy):
    terms = TERMS[name]
    leaves = [
        (term if type(term) is torch.Tensor else term.values).clone().requires_grad_() for term in terms
    ]

    def loss(*values):
        result = added(*rebuilt(terms, [value * value for value in values]), policy=policy)
        return (result if isinstance(result, torch.Tensor) else result.values).pow(3).sum()

    assert joint_gradcheck(loss, tuple(leaves), order=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_any_patterns_in_any_order(seeds):
    terms = [matrix(seed) for seed in seeds]
    torch.testing.assert_close(added(*terms).to_dense(), sum(term.to_dense() for term in terms))


def test_one_pattern_never_merges():
    with stats() as s:
        result = added(A, A, A)
    assert result.pattern is A.pattern
    assert s.merges == {"avoided": 2}


def test_many_patterns_merge_once_and_then_never():
    terms = [matrix(seed) for seed in range(5)]
    with stats() as first:
        result = added(*terms)
    with stats() as second:
        again = added(*terms)
    assert first.merges == {"done": 1}
    assert second.merges == {"avoided": 1}
    assert again.pattern is result.pattern
    assert second.calls["conversion"] == 0


def test_other_patterns_are_not_taken_for_those_kept():
    first = added(A, B)
    second = added(A, C)
    assert first.pattern is not second.pattern
    torch.testing.assert_close(second.to_dense(), A.to_dense() + C.to_dense())


def test_what_is_kept_does_not_keep_patterns_alive():
    terms = [matrix(seed) for seed in (10, 11)]
    watch = [weakref.ref(term.pattern) for term in terms]
    result = added(*terms)
    del terms
    gc.collect()
    assert [reference() for reference in watch] == [None, None]
    assert result.pattern.nnz


def test_a_sum_of_large_sparse_matrices_is_sparse():
    patterns = [pattern(seed, 10**6, 10**6, 100) for seed in range(3)]
    leaves = [numbers(p.nnz).requires_grad_() for p in patterns]
    with no_large_outputs(1000):
        result = added(*(SparseTensor(p, v) for p, v in zip(patterns, leaves, strict=True)))
        gradients = torch.autograd.grad(result.values.pow(3).sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), leaves)


def test_the_policy_is_asked_about_the_sum():
    halves = [Pattern.banded(4, 3, 0), Pattern.banded(4, 0, 3)]
    terms = [SparseTensor(half, torch.ones(half.nnz)) for half in halves]
    full = SparsePolicy(threshold=1.0, min_nnz=0)
    with stats() as s:
        assert isinstance(added(terms[0], policy=full), SparseTensor)
        assert isinstance(added(*terms, policy=full), torch.Tensor)
    assert [(made.count, made.nbytes) for made in s.densified.values()] == [(1, 64)]
    small = SparsePolicy(threshold=1.0, min_nnz=0, max_dense_bytes=63)
    assert isinstance(added(*terms, policy=small), SparseTensor)


def test_nothing_was_added():
    with pytest.raises(ValueError, match=r"Accumulator.result\(\): nothing was added"):
        Accumulator().result()


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        (numbers(3, 4), ValueError, r"expected shape \(4, 3\), as before, got \(3, 4\)"),
        (numbers(4, 3).float(), TypeError, "expected dtype torch.float64, as before, got torch.float32"),
        (numbers(4, 3).to("meta"), ValueError, "expected device cpu, as before, got meta"),
        (numbers(4, 3).to_sparse(), TypeError, "a RowSparse or a strided tensor, got torch.sparse_coo"),
        (3.0, TypeError, "x must be a SparseTensor, a RowSparse or a strided tensor, got float"),
        (RowSparse(torch.tensor([1]), numbers(1, 3), (4, 3)), TypeError, r"Call to_dense\(\) on one of them"),
    ],
)
def test_what_cannot_be_added(other, error, match):
    total = Accumulator()
    total.add(A)
    with pytest.raises(error, match=rf"Accumulator.add\(x\): .*{match}"):
        total.add(other)


def test_entries_do_not_add_to_rows():
    total = Accumulator()
    total.add(RowSparse(torch.tensor([1]), numbers(1, 3), (4, 3)))
    with pytest.raises(TypeError, match=r"sparse in rows and another in entries"):
        total.add(A)


def test_a_refused_term_leaves_the_sum_as_it_was():
    total = Accumulator()
    with pytest.raises(TypeError, match="got float"):
        total.add(3.0)
    total.add(A)
    with pytest.raises(ValueError, match="expected shape"):
        total.add(numbers(3, 4))
    torch.testing.assert_close(total.result().to_dense(), A.to_dense())
