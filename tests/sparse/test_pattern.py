import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings

from metagrad.sparse import Pattern, SparseTensor
from tests.sparse.strategies import entries, patterns

quick = settings(max_examples=12, deadline=None)


def pattern_of(*cells, shape=(3, 4)):
    row, col = torch.tensor(cells, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return Pattern(row, col, shape)


A = pattern_of((0, 1), (0, 3), (2, 0))
B = pattern_of((0, 3), (1, 1), (2, 0), (2, 2))


def mask_of(row, col, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[row, col] = True
    return mask


@quick
@given(cells=entries())
def test_coalesce_sorts_and_says_where_each_entry_went(cells):
    pattern, place = Pattern.coalesce(*cells)
    assert torch.equal(pattern.to_mask(), mask_of(*cells))
    assert torch.equal(pattern.row[place], cells.row)
    assert torch.equal(pattern.col[place], cells.col)
    assert Pattern(pattern.row, pattern.col, pattern.shape).equals(pattern)  # in order, no cell twice


@quick
@given(pattern=patterns())
def test_maps_are_those_of_the_mask(pattern):
    mask = pattern.to_mask()
    assert torch.equal(Pattern.from_mask(mask).row, pattern.row)
    assert torch.equal(pattern.crow.diff(), mask.sum(1))
    assert torch.equal(pattern.ccol.diff(), mask.sum(0))
    assert torch.equal(pattern.t().to_mask(), mask.T)
    assert torch.equal(pattern.col[pattern.csc_order], pattern.t().row)
    assert pattern.t().t() is pattern
    row, col = (~mask).nonzero(as_tuple=True)
    assert torch.equal(pattern._find(pattern.row, pattern.col), torch.arange(pattern.nnz))
    assert torch.equal(pattern._find(row, col), torch.full_like(row, -1))


@quick
@given(first=entries(3, 3), second=entries(3, 3))
def test_unions_and_intersections_are_those_of_the_masks(first, second):
    a, b = Pattern.coalesce(*first)[0], Pattern.coalesce(*second)[0]
    union, both = a.union(b), a.intersection(b)
    assert torch.equal(union.pattern.to_mask(), a.to_mask() | b.to_mask())
    assert torch.equal(both.pattern.to_mask(), a.to_mask() & b.to_mask())
    for x, place, entry in ((a, union.left, both.left), (b, union.right, both.right)):
        assert torch.equal(union.pattern.row[place], x.row)
        assert torch.equal(union.pattern.col[place], x.col)
        assert torch.equal(x.row[entry], both.pattern.row)
        assert torch.equal(x.col[entry], both.pattern.col)


def test_a_product_pairs_the_entries_that_meet():
    plan = A.product(pattern_of((0, 0), (1, 0), (1, 1), (3, 0), shape=(4, 2)))
    assert plan.pattern.to_mask().tolist() == [[True, True], [False, False], [True, False]]
    assert plan.left.ids.tolist() == [0, 0, 1, 2]
    assert plan.right.ids.tolist() == [1, 2, 3, 0]
    assert plan.cell.ids.tolist() == [0, 1, 0, 2]


def test_maps_are_computed_once():
    assert A.union(B).pattern is A.union(B).pattern
    assert A.intersection(B).left is A.intersection(B).left
    assert A.product(B.t()) is A.product(B.t())
    assert A.t() is A.t()
    assert A.repeat(2) is A.repeat(2)
    assert A.to("meta") is A.to("meta")
    assert A.to("cpu") is A


def test_a_pattern_and_what_it_caches_are_freed_without_a_collection():
    pattern, part = Pattern.banded(4, 1), Pattern.banded(4, 0)
    pattern.t(), pattern.union(part), part.union(pattern), pattern.intersection(part), pattern.repeat(2)
    pattern.product(pattern.t()), pattern.union(pattern.t())
    gone = weakref.ref(pattern)
    gc.disable()
    try:
        del pattern
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("below", "above"), [(0, 0), (1, 2), (10**12, 1)])
def test_bands_are_the_diagonals_between(below, above):
    offset = torch.arange(5) - torch.arange(5)[:, None]
    expected = (offset >= -below) & (offset <= above)
    assert torch.equal(Pattern.banded(5, below, above).to_mask(), expected)


@pytest.mark.parametrize("made_inside", [False, True])
def test_what_inference_mode_has_computed_can_be_differentiated_later(made_inside):
    """A graph saves the cached tensors of a pattern. It cannot save tensors of inference mode."""
    with torch.inference_mode(made_inside):
        first, second = Pattern.banded(4, 1, 1), Pattern.banded(4, 0, 2)
    a = SparseTensor(first, torch.ones(first.nnz).clone()).requires_grad_()
    b = SparseTensor(second, torch.ones(second.nnz))

    def uses():
        used = [a.t(), a + b, a * b, a @ b, a * torch.ones(4, 4), a * torch.ones(4, 1), a.softmax(0)]
        return sum(x.values.square().sum() for x in used) + (a + torch.ones(4, 4)).square().sum()

    with torch.inference_mode():
        value = uses()
    uses().backward()
    assert a.grad is not None
    torch.testing.assert_close(uses().detach(), value.clone())


def test_the_last_cell_has_the_largest_int64():
    assert Pattern(torch.tensor([0]), torch.tensor([0]), (2**32, 2**31 - 1)).nnz == 1


def test_a_pattern_cannot_be_changed():
    with pytest.raises(AttributeError, match=r"Pattern.row cannot be changed.*shared"):
        A.row = torch.zeros(3, dtype=torch.int64)


def test_copies_share_it_and_pickles_are_checked_again():
    a = SparseTensor(A, torch.ones(3))
    assert copy.deepcopy(A) is A
    assert copy.deepcopy([a, a])[0].pattern is A
    assert pickle.loads(pickle.dumps(A)).equals(A)
