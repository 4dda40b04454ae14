import itertools

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metagrad as mg
from metagrad.sparse import SparseTensor
from tests.draws import draw
from tests.sparse.guards import no_large_outputs
from tests.sparse.strategies import entries, patterns, seeds

quick = settings(max_examples=15, deadline=None)

DENSE = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 4]], dtype=torch.float64)
A = SparseTensor.from_dense(DENSE)
ROW, COL = torch.tensor([0, 0, 2, 2]), torch.tensor([0, 3, 1, 3])
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
BLOCKS = [torch.sparse_bsr, torch.sparse_bsc]
FORMATS = ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]


@quick
@given(entries(), seeds)
def test_what_shares_a_cell_is_added(e, seed):
    values = draw(len(e.row), seed=seed)
    expected = torch.zeros(e.shape, dtype=torch.float64).index_put((e.row, e.col), values, accumulate=True)
    torch_coo = torch.sparse_coo_tensor(torch.stack([e.row, e.col]), values, e.shape)
    theirs = scipy.sparse.coo_array((values.numpy(), (e.row.numpy(), e.col.numpy())), shape=e.shape)
    for a in (
        SparseTensor.from_coo(e.row, e.col, values, e.shape),
        SparseTensor.from_torch(torch_coo),
        SparseTensor.from_scipy(theirs),
    ):
        assert torch.allclose(a.to_dense(), expected, rtol=1e-14)
        # The sums of the rows rely on the order of the entries, a dense matrix does not.
        assert torch.allclose(a.sum(1), expected.sum(1), rtol=1e-14, atol=1e-14 * float(values.abs().sum()))


def test_derivatives_through_from_coo():
    row, col = torch.tensor([1, 0, 1, 2, 0]), torch.tensor([0, 1, 0, 2, 0])
    values = draw(5).requires_grad_()
    mg.gradcheck(lambda v: SparseTensor.from_coo(row, col, v, (3, 3)).to_dense().sin(), values, order=3)


def test_entries_in_order_are_not_copied():
    values = torch.ones(4, requires_grad=True)
    a = SparseTensor.from_coo(ROW, COL, values, (3, 4))
    assert a.values is values
    assert (a.pattern.row.data_ptr(), a.pattern.col.data_ptr()) == (ROW.data_ptr(), COL.data_ptr())
    pointer = A.values.data_ptr()
    for layout, parts in zip(LAYOUTS[:2], (torch.Tensor._values, torch.Tensor.values), strict=True):
        assert parts(A.to_torch(layout)).data_ptr() == pointer
        assert SparseTensor.from_torch(A.to_torch(layout)).values.data_ptr() == pointer
    theirs = A.to_scipy()
    assert theirs.data.ctypes.data == pointer == SparseTensor.from_scipy(theirs).values.data_ptr()
    theirs.data.flags.writeable = False
    assert SparseTensor.from_scipy(theirs).values.data_ptr() != pointer


@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_through_from_dense(transposed):
    mask = torch.tensor([[True, False, True], [False, True, False]])
    x = draw(6).reshape(3, 2).T if transposed else draw(6).reshape(2, 3)
    leaf = x.detach().requires_grad_()
    mg.gradcheck(lambda x: SparseTensor.from_dense(x, mask).values.sin(), leaf, order=3)
    (gradient,) = torch.autograd.grad((SparseTensor.from_dense(leaf, mask).values ** 3).sum(), leaf)
    assert torch.equal(gradient, torch.where(mask, 3 * x**2, 0))


def test_from_dense_takes_what_is_not_zero():
    assert torch.equal(A.pattern.to_mask(), DENSE != 0)
    with_nan = SparseTensor.from_dense(torch.tensor([[float("nan"), 0.0]]))
    assert (with_nan.nnz, SparseTensor.from_dense(torch.zeros(0, 3)).nnz) == (1, 0)
    batch = draw(12).reshape(4, 1, 3)
    mask = torch.tensor([[True, False, True]])
    assert torch.equal(torch.vmap(lambda x: SparseTensor.from_dense(x, mask).values)(batch), batch[:, 0, ::2])


@quick
@given(patterns(), seeds, st.sampled_from(LAYOUTS))
def test_torch_layouts_come_back(pattern, seed, layout):
    a = SparseTensor(pattern, draw(pattern.nnz, seed=seed))
    theirs = a.to_torch(layout)
    assert theirs.layout == layout
    assert torch.equal(theirs.to_dense(), a.to_dense())
    back = SparseTensor.from_torch(theirs)
    assert back.pattern.equals(pattern)
    assert torch.equal(back.values, a.values)


def test_every_layout_of_torch_is_converted():
    for layout, dtype in itertools.product(LAYOUTS + BLOCKS, (torch.float32, torch.bfloat16)):
        options = {"blocksize": (1, 2)} if layout in BLOCKS else {}
        a = SparseTensor.from_torch(DENSE.to(dtype).to_sparse(layout=layout, **options))
        assert torch.equal(a.to_dense(), DENSE.to(dtype))


@quick
@given(patterns(min_side=1), seeds, st.sampled_from(FORMATS))
def test_scipy_formats_come_back(pattern, seed, format):
    a = SparseTensor(pattern, draw(pattern.nnz, seed=seed))
    theirs = a.to_scipy(format)
    assert theirs.format == format
    assert (theirs.toarray() == a.to_dense().numpy()).all()
    assert torch.equal(SparseTensor.from_scipy(theirs).to_dense(), a.to_dense())


def test_scipy_matrices_and_duplicates():
    assert torch.equal(SparseTensor.from_scipy(scipy.sparse.csr_matrix(DENSE.numpy())).to_dense(), DENSE)
    theirs = scipy.sparse.csr_array(([1.0, 2.0, 3.0], [2, 0, 2], [0, 3]), shape=(1, 3))
    assert SparseTensor.from_scipy(theirs).to_dense().tolist() == [[2, 0, 4]]


def test_conversions_are_not_as_large_as_the_matrix():
    n = 2000
    row, col = torch.randint(n, (2, 4000), generator=torch.Generator().manual_seed(0))
    with no_large_outputs(30_000):
        a = SparseTensor.from_coo(row, col, torch.ones(4000), (n, n))
        for layout in LAYOUTS:
            SparseTensor.from_torch(a.to_torch(layout))
        SparseTensor.from_scipy(a.to_scipy())
