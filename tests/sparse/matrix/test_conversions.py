from __future__ import annotations

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor
from tests.sparse.guards import no_large_outputs
from tests.sparse.strategies import entries, patterns, seeds

quick = settings(max_examples=25, deadline=None)

DENSE = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 4]], dtype=torch.float64)
A = SparseTensor.from_dense(DENSE)
ROW, COL = torch.tensor([0, 0, 2, 2]), torch.tensor([0, 3, 1, 3])
CROW, CCOL = torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1, 2, 2, 4])
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
FORMATS = ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]


def numbers(count, seed=0, dtype=torch.float64):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def blocked(block=(2, 3), requires_grad=False):
    pattern = Pattern(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), (2, 3))
    values = numbers(3 * block[0] * block[1]).reshape(3, *block)
    return SparseTensor(pattern, values).requires_grad_(requires_grad)


def added(row, col, values, shape):
    """The dense matrix, with NumPy's addition of whatever shares a cell."""
    dense = torch.zeros(shape, dtype=values.dtype)
    for i, j, value in zip(row.tolist(), col.tolist(), values, strict=True):
        dense[i, j] += value.detach()
    return dense


# from entries


@quick
@given(entries(), seeds)
def test_from_coo_adds_what_shares_a_cell(e, seed):
    values = numbers(len(e.row), seed)
    a = SparseTensor.from_coo(e.row, e.col, values, e.shape)
    assert torch.allclose(a.to_dense(), added(e.row, e.col, values, e.shape), rtol=1e-14)
    torch_coo = torch.sparse_coo_tensor(torch.stack([e.row, e.col]), values, e.shape)
    assert torch.allclose(SparseTensor.from_torch(torch_coo).to_dense(), a.to_dense(), rtol=1e-14)
    theirs = scipy.sparse.coo_array((values.numpy(), (e.row.numpy(), e.col.numpy())), shape=e.shape)
    assert torch.allclose(SparseTensor.from_scipy(theirs).to_dense(), a.to_dense(), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_from_coo_in_other_dtypes(dtype):
    values = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    a = SparseTensor.from_coo(torch.tensor([1, 0, 1]), torch.tensor([0, 0, 0]), values, (2, 1))
    assert a.dtype == dtype
    assert a.values.tolist() == [2, 5]


def test_from_coo_of_blocks():
    row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0])
    blocks = numbers(12).reshape(3, 2, 2)
    a = SparseTensor.from_coo(row, col, blocks, (4, 4))
    assert (a.shape, a.nnz) == ((4, 4), 8)
    assert torch.allclose(a.to_dense()[2:, :2], blocks[0] + blocks[2])
    assert torch.equal(a.to_dense()[:2, 2:], blocks[1])


@pytest.mark.parametrize("shape", [(5,), (5, 2, 2)], ids=["numbers", "blocks"])
def test_derivatives_through_from_coo(shape):
    row, col = torch.tensor([1, 0, 1, 2, 0]), torch.tensor([0, 1, 0, 2, 0])
    sizes = (6, 6) if len(shape) == 3 else (3, 3)
    mg.gradcheck(
        lambda v: SparseTensor.from_coo(row, col, v, sizes).to_dense().sin(),
        numbers(shape[0] * (4 if len(shape) == 3 else 1)).reshape(shape).requires_grad_(),
        order=3,
    )


def test_entries_in_order_are_not_copied():
    values = torch.ones(4, requires_grad=True)
    a = SparseTensor.from_coo(ROW, COL, values, (3, 4))
    assert a.values is values
    assert (a.pattern.row.data_ptr(), a.pattern.col.data_ptr()) == (ROW.data_ptr(), COL.data_ptr())
    a = SparseTensor.from_csr(CROW, COL, values, (3, 4))
    assert a.values is values
    assert (a.csr().crow.data_ptr(), a.csr().col.data_ptr()) == (CROW.data_ptr(), COL.data_ptr())
    edges = torch.stack([ROW, COL])
    assert SparseTensor.from_edges(edges, shape=(3, 4)).pattern.col.data_ptr() == edges[1].data_ptr()


@quick
@given(patterns(), seeds)
def test_compressed_parts_come_back(pattern, seed):
    a = SparseTensor(pattern, numbers(pattern.nnz, seed))
    for build, parts in [
        (SparseTensor.from_coo, a.coo()),
        (SparseTensor.from_csr, a.csr()),
        (SparseTensor.from_csc, a.csc()),
    ]:
        back = build(*parts, pattern.shape)
        assert back.pattern.equals(pattern)
        assert torch.equal(back.values, a.values)
    row, col, values = a.coo()
    order = torch.randperm(pattern.nnz, generator=torch.Generator().manual_seed(seed))
    shuffled = SparseTensor.from_coo(row[order], col[order], values[order], pattern.shape)
    assert torch.equal(shuffled.to_dense(), a.to_dense())


def test_compressed_entries_may_be_in_any_order_within_a_row_or_column():
    values = torch.tensor([2.0, 1.0, 4.0, 3.0], dtype=torch.float64)
    a = SparseTensor.from_csr(CROW, torch.tensor([3, 0, 3, 1]), values, (3, 4))
    assert torch.equal(a.to_dense(), DENSE)
    values = torch.tensor([1.0, 3.0, 4.0, 2.0], dtype=torch.float64)
    a = SparseTensor.from_csc(CCOL.int(), torch.tensor([0, 2, 2, 0]), values, (3, 4))
    assert torch.equal(a.to_dense(), DENSE)
    assert torch.equal(a.pattern.crow, CROW)


def test_from_bsr():
    a = blocked()
    back = SparseTensor.from_bsr(*a.csr(), a.shape)
    assert back.values is a.values
    assert torch.equal(back.to_dense(), a.to_dense())
    assert torch.equal(SparseTensor.from_csc(*a.csc(), a.shape).to_dense(), a.to_dense())


def test_from_edges():
    edges = torch.tensor([[2, 0, 0, 2], [1, 3, 0, 1]])
    assert SparseTensor.from_edges(edges, shape=(3, 4)).to_dense()[2, 1] == 2
    weights = torch.tensor([3.0, 2.0, 1.0, 4.0], requires_grad=True)
    a = SparseTensor.from_edges(edges, weights, shape=(3, 4))
    (a.to_dense() ** 2).sum().backward()
    assert weights.grad.tolist() == [14, 4, 2, 14]
    for wrong in (edges[0], edges.T, [[0], [1]]):
        with pytest.raises(ValueError, match=r"edge_index must be a tensor of shape \[2, edges\], got"):
            SparseTensor.from_edges(wrong, shape=(3, 4))


@pytest.mark.parametrize(
    ("build", "parts", "message"),
    [
        (
            "from_coo",
            (ROW, COL, torch.ones(3)),
            "one number, or one block, for each entry, got 3 for 4 entries",
        ),
        (
            "from_coo",
            (ROW, COL, torch.ones(4, device="meta")),
            "the indices are on cpu and the values on meta",
        ),
        (
            "from_coo",
            (ROW, COL, torch.ones(4, 2)),
            r"\[entries\], or \[entries, p, q\] for blocks, got \[4, 2\]",
        ),
        (
            "from_coo",
            (ROW, COL, torch.ones(4, 2, 2)),
            r"blocks must be of positive sizes that divide it, got \(2, 2\)",
        ),
        (
            "from_csr",
            (CROW[:3], COL, torch.ones(4)),
            "crow must have one pointer more than .* segments, 4, got 3",
        ),
        (
            "from_csr",
            (CROW.clamp(max=3), COL, torch.ones(4)),
            r"crow must ascend .* entries, 4, got \[0, 2, 2, 3\]",
        ),
        (
            "from_csr",
            (CROW.clamp(min=1), COL, torch.ones(4)),
            r"crow must ascend .* entries, 4, got \[1, 2, 2, 4\]",
        ),
        (
            "from_csr",
            (torch.tensor([0, 3, 2, 4]), COL, torch.ones(4)),
            r"crow must ascend .* got \[0, 3, 2, 4\]",
        ),
        ("from_csr", (CROW * 2, COL, torch.ones(4)), "crow must be from 0 to 4, got 8"),
        ("from_csr", (CROW, COL.to("meta"), torch.ones(4)), "crow is on cpu and col on meta"),
        (
            "from_csr",
            (CROW, torch.tensor([0, 0, 1, 3]), torch.ones(4)),
            "1 of the 4 entries are in a cell .*from_coo",
        ),
        (
            "from_csc",
            (CCOL[:4], ROW, torch.ones(4)),
            "ccol must have one pointer more than .* segments, 5, got 4",
        ),
        ("from_csc", (CCOL.flip(0), ROW, torch.ones(4)), "ccol must ascend"),
        ("from_csc", (CCOL, torch.tensor([0, 2, 0, 0]), torch.ones(4)), "1 of the 4 entries are in a cell"),
        ("from_bsr", (CROW, COL, torch.ones(4)), r"blocks must have shape \[entries, p, q\], got \[4\]"),
        (
            "from_bsr",
            (CROW, torch.tensor([0, 0, 1, 3]), torch.ones(4, 1, 1)),
            "1 of the 4 blocks are in a cell",
        ),
    ],
)
def test_entries_that_are_refused(build, parts, message):
    with pytest.raises(ValueError, match=rf"SparseTensor.{build}\(.*\): .*{message}"):
        getattr(SparseTensor, build)(*parts, (3, 4))


def test_long_pointers_are_abbreviated():
    with pytest.raises(ValueError, match=r"got \[1, ..., 1\]"):
        SparseTensor.from_csr(torch.ones(12, dtype=torch.int64), COL[:1], torch.ones(1), (11, 4))


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        ("from_csr", (CROW.float(), COL, torch.ones(4))),
        ("from_csr", (CROW, COL.float(), torch.ones(4))),
        ("from_csc", (CCOL, ROW.double(), torch.ones(4))),
        ("from_bsr", (CROW, COL, torch.ones(4, 1, 1, dtype=torch.int64))),
        ("from_edges", (torch.ones(2, 3),)),
    ],
)
def test_dtypes_that_are_refused(build, parts):
    with pytest.raises(TypeError, match=rf"SparseTensor.{build}\(.*\): .* Convert it with"):
        getattr(SparseTensor, build)(*parts, shape=(3, 4))


# from dense


def test_from_dense_takes_what_is_not_zero():
    assert torch.equal(A.pattern.to_mask(), DENSE != 0)
    assert A.values.tolist() == [1, 2, 3, 4]
    with_nan = SparseTensor.from_dense(torch.tensor([[float("nan"), 0.0]]))
    assert (with_nan.nnz, SparseTensor.from_dense(torch.zeros(0, 3)).nnz) == (1, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_through_from_dense(transposed):
    mask = torch.tensor([[True, False, True], [False, True, False]])
    x = numbers(6).reshape(3, 2).T if transposed else numbers(6).reshape(2, 3)
    leaf = x.detach().requires_grad_()
    mg.gradcheck(lambda x: SparseTensor.from_dense(x, mask).values.sin(), leaf, order=3)
    a = SparseTensor.from_dense(leaf, mask)
    (gradient,) = torch.autograd.grad((a.values**3).sum(), leaf)
    assert torch.equal(gradient, torch.where(mask, 3 * x**2, 0))


def test_from_dense_under_vmap():
    mask = torch.tensor([[True, False, True]])
    batch = numbers(12).reshape(4, 1, 3)
    assert torch.equal(torch.vmap(lambda x: SparseTensor.from_dense(x, mask).values)(batch), batch[:, 0, ::2])


@pytest.mark.parametrize(
    ("tensor", "mask", "error", "message"),
    [
        (DENSE[0], None, ValueError, r"tensor must have two dimensions, got shape \[4\]"),
        (DENSE.int(), None, TypeError, "tensor must be real floating point"),
        (DENSE.to_sparse(), None, TypeError, "tensor must be a strided tensor"),
        (DENSE, DENSE, TypeError, "mask must be a boolean tensor of two dimensions, got torch.float64"),
        (DENSE, [[True]], TypeError, "mask must be a boolean tensor of two dimensions, got list"),
        (
            DENSE,
            DENSE.T != 0,
            ValueError,
            r"mask must have the shape and the device .* \[3, 4\] on cpu, got \[4, 3\]",
        ),
        (DENSE.to("meta"), DENSE != 0, ValueError, r"\[3, 4\] on meta, got \[3, 4\] on cpu"),
    ],
)
def test_dense_matrices_that_are_refused(tensor, mask, error, message):
    with pytest.raises(error, match=message):
        SparseTensor.from_dense(tensor, mask)


# torch


@quick
@given(patterns(), seeds, st.sampled_from(LAYOUTS))
def test_torch_layouts_come_back(pattern, seed, layout):
    a = SparseTensor(pattern, numbers(pattern.nnz, seed))
    theirs = a.to_torch(layout)
    assert theirs.layout == layout
    assert torch.equal(theirs.to_dense(), a.to_dense())
    back = SparseTensor.from_torch(theirs)
    assert back.pattern.equals(pattern)
    assert torch.equal(back.scalar().values, a.values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_torch_makes_is_taken(layout, dtype):
    options = {"blocksize": (1, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    theirs = DENSE.to(dtype).to_sparse(layout=layout, **options)
    a = SparseTensor.from_torch(theirs)
    assert a.dtype == dtype
    assert a.block_shape == options.get("blocksize", (1, 1))
    assert torch.equal(a.to_dense(), DENSE.to(dtype))
    assert torch.equal(a.to_torch(layout).to_dense(), theirs.to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_layouts_of_blocks(layout):
    a = blocked()
    theirs = a.to_torch(layout)
    assert torch.equal(theirs.to_dense(), a.to_dense())
    back = SparseTensor.from_torch(theirs)
    assert back.is_blocked == (layout in (torch.sparse_bsr, torch.sparse_bsc))
    assert torch.equal(back.to_dense(), a.to_dense())


def test_torch_memory_is_shared():
    pointer = A.values.data_ptr()
    assert A.to_torch(torch.sparse_coo)._values().data_ptr() == pointer
    assert A.to_torch(torch.sparse_csr).values().data_ptr() == pointer
    assert A.to_torch(torch.sparse_bsr).values().data_ptr() == pointer
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr):
        assert SparseTensor.from_torch(A.to_torch(layout)).values.data_ptr() == pointer
    csr = A.to_torch(torch.sparse_csr)
    assert SparseTensor.from_torch(csr).csr().crow.data_ptr() == csr.crow_indices().data_ptr()


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (
            DENSE,
            TypeError,
            r"must have a sparse layout, got torch.strided. SparseTensor.from_dense\(tensor\)",
        ),
        ([[1.0]], TypeError, "must be a torch sparse tensor, got list"),
        (
            DENSE.int().to_sparse(),
            TypeError,
            r"tensor must be real floating point, got torch.int32. Convert it",
        ),
        (DENSE.to(torch.complex64).to_sparse(), TypeError, "Take .real and .imag apart"),
        (
            DENSE.to_sparse().requires_grad_(),
            ValueError,
            r"requires grad.* Use tensor.detach\(\), or .*from_coo",
        ),
        (DENSE[0].to_sparse(), ValueError, r"two dimensions and numbers as entries, got shape \(4,\)"),
        (DENSE.to_sparse(1), ValueError, "the entries of tensor are whole rows"),
    ],
)
def test_torch_tensors_that_are_refused(tensor, error, message):
    with pytest.raises(error, match=r"SparseTensor.from_torch\(tensor\): .*" + message):
        SparseTensor.from_torch(tensor)


def test_leaving_the_tape_is_said():
    a = SparseTensor(A.pattern, A.values.clone()).requires_grad_()
    for leave in (SparseTensor.to_torch, SparseTensor.to_scipy):
        with pytest.raises(ValueError, match=r"a requires grad, .* Use a.detach\(\) first"):
            leave(a)
        with pytest.raises(ValueError, match=r"a requires grad, .* Use a.detach\(\) first"):
            torch.func.grad(lambda b, leave=leave: leave(b).sum())(a.detach())
    assert torch.equal(a.detach().to_torch().to_dense(), DENSE)
    with pytest.raises(
        ValueError, match=r"layout must be one of torch.sparse_coo, .* got torch.strided. .*to_dense\(\)"
    ):
        A.to_torch(torch.strided)


# SciPy


@quick
@given(patterns(min_side=1), seeds, st.sampled_from(FORMATS))
def test_scipy_formats_come_back(pattern, seed, format):
    a = SparseTensor(pattern, numbers(pattern.nnz, seed))
    theirs = a.to_scipy(format)
    assert theirs.format == format
    assert (theirs.toarray() == a.to_dense().numpy()).all()
    assert torch.equal(SparseTensor.from_scipy(theirs).to_dense(), a.to_dense())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_scipy_blocks_and_duplicates(format, kind):
    a = blocked()
    assert (a.to_scipy(format).toarray() == a.to_dense().numpy()).all()
    theirs = kind(a.to_dense().float().numpy()).asformat(format)
    back = SparseTensor.from_scipy(theirs)
    assert back.dtype == torch.float32
    assert back.is_blocked == (format == "bsr")
    assert torch.equal(back.to_dense(), a.to_dense().float())


def test_scipy_entries_of_one_cell_are_added():
    data = numbers(8).reshape(2, 2, 2).numpy()
    theirs = scipy.sparse.bsr_array((data, [1, 1], [0, 2]), shape=(2, 4))
    assert torch.allclose(SparseTensor.from_scipy(theirs).values[0], torch.from_numpy(data).sum(0))
    theirs = scipy.sparse.csr_array(([1.0, 2.0, 3.0], [2, 0, 2], [0, 3]), shape=(1, 3))
    assert SparseTensor.from_scipy(theirs).to_dense().tolist() == [[2, 0, 4]]


def test_scipy_memory_is_shared_where_it_can_be():
    theirs = A.to_scipy()
    assert theirs.data.ctypes.data == A.values.data_ptr()
    assert SparseTensor.from_scipy(theirs).values.data_ptr() == A.values.data_ptr()
    assert A.to_scipy("bsr").data.ctypes.data == A.values.data_ptr()
    theirs.data.flags.writeable = False
    assert SparseTensor.from_scipy(theirs).values.data_ptr() != A.values.data_ptr()
    backwards = scipy.sparse.coo_array((theirs.data[::-1], (ROW.flip(0), COL.flip(0))), shape=(3, 4))
    assert torch.equal(SparseTensor.from_scipy(backwards).to_dense(), DENSE)


@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (DENSE.numpy(), TypeError, "must be a SciPy sparse array or matrix, got ndarray"),
        (scipy.sparse.eye_array(2, dtype=int), TypeError, r"got int64. Use matrix.astype\('float64'\)"),
        (
            scipy.sparse.eye_array(2, dtype=complex),
            TypeError,
            "got complex128. Use the .real and the .imag part",
        ),
        (scipy.sparse.coo_array([1.0, 0.0]), ValueError, r"must have two dimensions, got shape \(2,\)"),
    ],
)
def test_scipy_matrices_that_are_refused(matrix, error, message):
    with pytest.raises(error, match=r"SparseTensor.from_scipy\(matrix\): .*" + message):
        SparseTensor.from_scipy(matrix)


def test_what_scipy_cannot_hold():
    with pytest.raises(ValueError, match=r"format must be one of bsr, coo, .* got 'xyz'"):
        A.to_scipy("xyz")
    with pytest.raises(
        TypeError, match=r"SciPy's sparse arrays are float32 or float64, and a is torch.bfloat16"
    ):
        A.to(torch.bfloat16).to_scipy()
    with pytest.raises(ValueError, match=r"a is on meta, SciPy on the CPU. Use a.to\('cpu'\) first"):
        A.to("meta").to_scipy()


# views


def test_views_are_the_parts():
    assert [part.tolist() for part in A.coo()] == [ROW.tolist(), COL.tolist(), [1, 2, 3, 4]]
    assert [part.tolist() for part in A.csr()] == [CROW.tolist(), COL.tolist(), [1, 2, 3, 4]]
    assert [part.tolist() for part in A.csc()] == [CCOL.tolist(), [0, 2, 0, 2], [1, 3, 2, 4]]
    assert A.coo()._fields == ("row", "col", "values")
    assert (A.csr()._fields, A.csc()._fields) == (("crow", "col", "values"), ("ccol", "row", "values"))
    assert A.coo().values is A.csr().values is A.values


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
def test_derivatives_through_views(form):
    for a in (A, blocked()):
        leaf = a.values.clone().requires_grad_()
        mg.gradcheck(lambda v, a=a: getattr(a.with_values(v), form)().values.sin(), leaf, order=3)


@quick
@given(patterns(min_side=0, max_side=3), seeds)
def test_blocks_and_numbers_are_the_same_matrix(blocks, seed):
    shape = (2 * blocks.shape[0], 3 * blocks.shape[1])
    generator = torch.Generator().manual_seed(seed)
    row, col = (torch.randint(size, (blocks.nnz,), generator=generator) for size in (2, 3))
    a = SparseTensor.from_coo(2 * blocks.row + row, 3 * blocks.col + col, numbers(blocks.nnz, seed), shape)
    b = a.to_blocks((2, 3))
    assert b.pattern.equals(blocks)
    assert torch.equal(b.to_dense(), a.to_dense())
    assert torch.equal(b.to_blocks((1, 1)).to_dense(), a.to_dense())


def test_derivatives_through_to_blocks():
    leaf = A.values.clone().requires_grad_()
    mg.gradcheck(lambda v: A.with_values(v).to_blocks((3, 2)).values.sin(), leaf, order=3)
    leaf = blocked().values.requires_grad_()
    mg.gradcheck(lambda v: blocked().with_values(v).to_blocks((1, 9)).values.sin(), leaf, order=3)


def test_nothing_is_as_large_as_the_matrix():
    n, nnz = 3000, 5000
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(n, (2, nnz), generator=generator)
    leaf = numbers(nnz).requires_grad_()
    with no_large_outputs(8 * (nnz + n)):
        a = SparseTensor.from_coo(row, col, leaf, (n, n))
        loss = sum((form.values**3).sum() for form in (a.csr(), a.csc(), a.to_blocks((2, 2))))
        for _ in range(3):
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            assert gradient.requires_grad
            loss = (gradient**3).sum()
        for layout in LAYOUTS:
            SparseTensor.from_torch(a.detach().to_torch(layout))
        SparseTensor.from_scipy(a.detach().to_scipy())
