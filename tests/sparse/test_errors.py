"""The message of each mistake, once. ``test_wrong_inputs.py`` replaces every argument of every function."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import tensor

from metagrad.sparse import (
    Parameter,
    Pattern,
    RowSparse,
    Rulebook,
    Segments,
    SparsePolicy,
    SparseTensor,
    attention,
    conv,
    embedding,
    embedding_bag,
    gather,
    masked_mean,
    masked_softmax,
    masked_sum,
    sddmm,
    segment_sum,
    softmax,
    spgemm,
    spmm,
)
from tests.sparse.mistakes import complaints

PATTERN = Pattern(tensor([0, 1]), tensor([2, 0]), (2, 3))
A = SparseTensor(PATTERN, tensor([2.0, 3.0]))
WIDE = SparseTensor(Pattern.banded(4, 0), torch.ones(4))
IDS, NONE, VALUES = tensor([0, 1]), tensor([0, 1])[:0], tensor([2.0, 3.0])
X, MASK, TABLE = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(3, 2)
META = torch.device("meta")
ones = torch.ones
SEGMENTS = Segments(tensor([2, 0, 2, 2, 0]), 4)
RULEBOOK = Rulebook(tensor([[0, 0, 0], [0, 0, 1]]), 3)
ROWS = RowSparse(IDS, ones(2, 2), (3, 2))


def from_coo(values=VALUES, shape=(2, 2)):
    return SparseTensor.from_coo(IDS, IDS, values, shape)


def attend(**change):
    given = {"q": ones(2, 4), "k": ones(3, 4), "v": ones(3, 5), "pattern": PATTERN}
    return attention(**given | change)


def convolve(**change):
    given = {"x": ones(2, 2), "weight": ones(3, 2, 3, 3), "rulebook": RULEBOOK, "bias": ones(3)}
    return conv(**given | change)


def sites(*rows):
    return Rulebook(tensor(rows), 3)


def bag(ids=IDS, offsets=IDS, **options):
    return embedding_bag(ids, offsets, TABLE, **options)


def computed():
    return A.detach().requires_grad_() * 2.0


VALUE_ERRORS = {
    r"shape must not be negative, got \(-1, 2\)": lambda: Pattern(NONE, NONE, (-1, 2)),
    r"2147483648 has more than 2\^63 - 1": lambda: Pattern(IDS, IDS, (2**32, 2**31)),
    "row must be from 0 to 1, got 2": lambda: Pattern(2 * IDS, IDS, (2, 2)),
    "col must be from 0 to 1, got -1": lambda: Pattern(IDS, -IDS, (2, 2)),
    r"expected a strided vector, got \(\(1, 2\)": lambda: Pattern(IDS[None], IDS, (2, 2)),
    r"vector, got \(\(2,\), torch.sparse_coo": lambda: Pattern(IDS, IDS.to_sparse(), (2, 2)),
    "row must be empty, for there is nothing to count, got 0": lambda: Pattern(IDS[:1], IDS[:1], (0, 2)),
    r"one number for each entry, got \(2, 1\)": lambda: Pattern(IDS, IDS[:1], (2, 2)),
    r"row-major order.*entry 1, \(0, 0\), comes after \(1, 0\)": lambda: Pattern(1 - IDS, 0 * IDS, (2, 2)),
    r"entry 1, \(0, 0\), comes after \(0, 1\).*from_coo": lambda: Pattern(0 * IDS, 1 - IDS, (2, 2)),
    r"entry 1, \(0, 0\), is given twice": lambda: Pattern(0 * IDS, 0 * IDS, (2, 2)),
    r"row and col must be on one device, got cpu and meta.*\.to": lambda: Pattern(IDS, IDS.to(META), (2, 2)),
    r"Pattern.union\(other\): both patterns must be on one": lambda: PATTERN.union(PATTERN.to(META)),
    r"union\(other\): .* \(2, 3\), so the other must have": lambda: PATTERN.union(PATTERN.t()),
    r"product\(other\): .*must have 3 rows, got \(2, 3\)": lambda: PATTERN.product(PATTERN),
    r"banded\(below\): expected an int of 0 or more, got -1": lambda: Pattern.banded(3, -1),
    r"num_segments\): expected an int of 0 or more, got 2.5": lambda: Segments(IDS, 2.5),
    "coalesce.*row must be from 0": lambda: Pattern.coalesce(5 * IDS, IDS, (2, 2)),
    r"SparsePolicy\(threshold\): expected a number of 0 or more, got -1": lambda: SparsePolicy(threshold=-1),
    r"SparsePolicy\(min_nnz\): expected a number of 0 or more": lambda: SparsePolicy(min_nnz=math.nan),
    r"SparsePolicy\(max_dense_bytes\): expected a number": lambda: SparsePolicy(max_dense_bytes=-1),
    "expected one of 'auto', 'gather', got 'coo'": lambda: SparsePolicy(layout="coo"),
    "tensor must have two dimensions, got": lambda: SparseTensor.from_dense(X[0]),
    "mask must have the shape and": lambda: SparseTensor.from_dense(X, MASK.T),
    r"Use tensor.detach\(\)": lambda: SparseTensor.from_torch(X.to_sparse().requires_grad_()),
    r"numbers as entries, got \(3,\)": lambda: SparseTensor.from_torch(X[0].to_sparse()),
    "the entries of tensor are whole": lambda: SparseTensor.from_torch(X.to_sparse(1)),
    "layout must be one of torch.sparse_coo, .* got": lambda: A.to_torch(torch.sparse_bsr),
    r"requires grad, .* Use a.detach\(\)": lambda: A.detach().requires_grad_().to_torch(),
    r"to_scipy\(format\): expected one of 'bsr', .* got 'xyz'": lambda: A.to_scipy("xyz"),
    "a is on meta, SciPy on the CPU": lambda: A.to(META).to_scipy(),
    r"got shape \(3,\)": lambda: SparseTensor.from_scipy(scipy.sparse.coo_array(np.ones(3))),
    "2 entries, so values must have": lambda: SparseTensor(PATTERN, ones(2, 1)),
    "pattern and values must be on one device": lambda: SparseTensor(PATTERN, VALUES.to(META)),
    r"a \+ b: a number is added to every cell.*with_values\(a.values \+ 1\)": lambda: A + 1,
    r"x @ a: a is \(2, 3\), so x must be \[\.\.\., 2\], got": lambda: X @ A,
    r"a \*\* exponent: exponent must be positive, got 0: .*a\.values\*\*0": lambda: A**0,
    r"a.dropout\(p\): p must be from 0 to 1, got 1.5": lambda: A.dropout(1.5),
    r"a \+ b: a is \(2, 3\), so b must be too, got \(4, 4\)": lambda: A + WIDE,
    r"a is \(2, 3\), so a dense b must be too, got \(3,\).*a": lambda: A + ones(3),
    r"b must be \[2, 3\], \[2, 1\], \[1, 3\], \[3\] or a scalar": lambda: A * ones(2),
    r"Parameter\(a\): a was computed from other tensors, .* Parameter\(a": lambda: Parameter(computed()),
    r"spmm\(a, b\): a is \(2, 3\), so b must have 3 rows": lambda: spmm(A, ones(5)),
    r"spgemm\(a, b\): b: expected 3 rows": lambda: spgemm(A, A),
    r"a must be \[2, K\] and b \[K, 3\]": lambda: sddmm(ones(2, 4), ones(4, 4), PATTERN),
    "a and pattern must be on one device": lambda: sddmm(ones(2, 4), ones(4, 3), PATTERN.to(META)),
    r"a.sum\(dim\): dim: expected 0 .* or None .*got 2": lambda: A.sum(2),
    r"a.max\(dim\): dim: expected .*got \(0, 1\)": lambda: A.max((0, 1)),
    r"a.norm\(p\): p must be 1 or more, got 0.5": lambda: A.norm(0.5),
    r"softmax\(a, dim\): dim: expected 0 .*got 2": lambda: softmax(A, 2),
    r"pattern is \(2, 3\), so q must be \[\.\.\., 2, D\].*got \[6, 4\]": lambda: attend(q=ones(6, 4)),
    r"k \[\.\.\., 3, D\].*got \[2, 4\], \[5, 4\] and \[3, 5\]": lambda: attend(k=ones(5, 4)),
    r"dropout_p must be from 0 to 1, got 1\.5": lambda: attend(dropout_p=1.5),
    "of q, k and v must broadcast": lambda: attend(q=ones(2, 2, 4), k=ones(3, 3, 4)),
    "q and pattern must be on one device, got cpu and meta": lambda: attend(pattern=PATTERN.to(META)),
    r"coords must be \[sites, 1 \+ d\].*got \[2": lambda: sites([0], [1]),
    r"rows 0 and 2 are both \[0, 1": lambda: sites([0, 1, 2], [0, 0, 0], [0, 1, 2]),
    r"Rulebook.*more than 2\^63 - 1": lambda: sites([0, 0, 0], [0, 2**40, 2**40]),
    r"kernel_size must be odd, got \(2, 2\)": lambda: Rulebook(RULEBOOK.coords, 2),
    r"kernel_size must be one number or 2, got \(3, 3, 3\)": lambda: Rulebook(RULEBOOK.coords, (3, 3, 3)),
    "kernel_size must be at least 1, got 0": lambda: Rulebook(RULEBOOK.coords, 0),
    "dilation must be one number or 2": lambda: Rulebook(RULEBOOK.coords, 3, dilation=(1,)),
    r"rulebook has 2 sites, so x must be \[2, C_in\], got \[3, 2\]": lambda: convolve(x=ones(3, 2)),
    r"weight must be \[C_out, 2, 3, 3\], got \[3, 2, 5, 5\]": lambda: convolve(weight=ones(3, 2, 5, 5)),
    r"bias must be \[3\], got \[2\]": lambda: convolve(bias=ones(2)),
    r"masked_mean.*shape of x, \(2, 3\), got \(2, 2\)": lambda: masked_mean(X, MASK[:, :2]),
    r"dim must be from -2 to 1.*\(2, 3\), got 2": lambda: masked_sum(X, MASK, 2),
    "index holds ids, so num_segments must be given": lambda: segment_sum(ones(2), IDS),
    "index is a Segments, which knows num_segments: leave it": lambda: segment_sum(ones(5), SEGMENTS, 4),
    r"values: expected \[5, \.\.\.\], as index has entries, got": lambda: segment_sum(ones(4), SEGMENTS),
    "index must be from 0 to 0, got 1": lambda: segment_sum(ones(2), IDS, 1),
    "values and index must be on one device": lambda: segment_sum(ones(5, device=META), SEGMENTS),
    r"gather\(x, index\): x: expected a row for each of 4 segments, got 3": lambda: gather(X.T, SEGMENTS),
    "x must have a row for each segment, got a scalar": lambda: gather(ones(()), IDS),
    r"embedding\(ids, table\): ids must be.*0": lambda: embedding(3 * IDS, TABLE),
    r"table: expected \[V, D...\], .*got \(3,\)": lambda: embedding(IDS, ones(3)),
    "padding_idx.*from -3 to 2, got 3": lambda: embedding(IDS, TABLE, padding_idx=3),
    "mode: expected one of .*got 'min'": lambda: bag(mode="min"),
    r"ids must be \[bags, n\] without offsets": lambda: bag(offsets=None),
    r"ids must be 1-d with offsets.*\(1, 2\)": lambda: bag(IDS[None]),
    "offsets must be 1-d": lambda: bag(offsets=IDS[None]),
    r"offsets: expected ascending from 0.*got \[1, 2\]": lambda: bag(offsets=IDS + 1),
    r"to at most 2 ids, got \[0": lambda: bag(offsets=3 * IDS),
    'for mode="sum"': lambda: bag(per_sample_weights=VALUES),
    r"must have the shape of ids, \(2,\), got \(3,\)": lambda: bag(mode="sum", per_sample_weights=ones(3)),
    r"rows must be 1-d.*\(1, 1\) and \(1, 2\)": lambda: RowSparse(IDS[None, :1], ones(1, 2), (3, 2)),
    r"rows of shape \(2,\), as values has, got \(3, 4\)": lambda: RowSparse(IDS, ones(2, 2), (3, 4)),
    r"shape: expected \[V, ...\]": lambda: RowSparse.from_rows(IDS, ones(2, 2), (2,)),
    "rows must be from 0 to 2.*got 3": lambda: RowSparse.from_rows(3 * IDS, ones(2, 2), (3, 2)),
    "ascend without duplicates. Call RowSparse.from_rows": lambda: RowSparse(1 - IDS, ones(2, 2), (3, 2)),
    r"expected the shape of x, \(3, 2\), got \(8, 2\)": lambda: ROWS + RowSparse(IDS, ones(2, 2), (8, 2)),
    "dim must be from -2 to 1, and none twice": lambda: ROWS.sum(2),
}
TYPE_ERRORS = {
    "from_coo.*: shape must be two integers, rows and columns, got": lambda: from_coo(shape=(2.0, 2)),
    r"from_coo.*: shape must be two integers.*\(True, 2\)": lambda: from_coo(shape=(True, 2)),
    r"col: expected integers, such as \.long\(\) makes them, got torch.float32": lambda: Pattern(
        IDS, VALUES, (2, 2)
    ),
    r"col: expected integers, .* got torch.bool": lambda: Pattern(IDS, IDS.bool(), (2, 2)),
    r"Segments\(ids, num_segments\): ids must be a tensor of integers": lambda: Segments([0, 1], 2),
    r"from_coo.*: values .*got torch.int64. Convert it with .float\(\)": lambda: from_coo(IDS),
    "from_coo.*: values .*got torch.complex64. Take .real and .imag apart": lambda: from_coo(VALUES + 1j),
    "values must be a strided tensor, got torch.sparse_coo": lambda: from_coo(VALUES.to_sparse()),
    "values must be a tensor, got list": lambda: from_coo([1.0, 2.0]),
    "from_mask.*: mask must be a boolean tensor": lambda: Pattern.from_mask(X),
    "tensor must be a strided tensor": lambda: SparseTensor.from_dense(X.to_sparse()),
    "mask must be a boolean tensor of two": lambda: SparseTensor.from_dense(X, X),
    "must have a sparse layout, got torch.strided.": lambda: SparseTensor.from_torch(X),
    r"a is torch.bfloat16. Use a.float\(\) first": lambda: A.to(torch.bfloat16).to_scipy(),
    "expected a SciPy sparse array or matrix": lambda: SparseTensor.from_scipy(np.eye(2)),
    "got int64. Use matrix.as": lambda: SparseTensor.from_scipy(scipy.sparse.eye_array(2, dtype=int)),
    "pattern: expected Pattern, got Tensor": lambda: SparseTensor(X, VALUES),
    r"SparseTensor.to\(...\): the result must be real floating point": lambda: A.to(torch.int32),
    r"x / a: .*its zeros would divide.*with_values\(1 / a.values\)": lambda: 1 / A,
    r"a @ b: b must be a SparseTensor, got ndarray.*from_scipy": lambda: A @ np.ones(3),
    r"torch's relu does not take a SparseTensor.*\.to_dense\(\)": lambda: torch.relu(A),
    "exponent must be a number, got SparseTensor": lambda: A**A,
    r"a / b: b must be dense.*a.with_values\(a.values / b.values\)": lambda: A / A,
    r"a \* b: b must be a strided tensor": lambda: A * X.to_sparse(),
    r"Parameter\(a\): a must be a SparseTensor, got Tensor. SparseTensor.from_dense": lambda: Parameter(X),
    r"spmm\(a, b\): a must be a SparseTensor, got Tensor": lambda: spmm(X, ones(3)),
    r"spgemm\(a, b\): b must be a SparseTensor, got": lambda: spgemm(A, ones(3, 2)),
    r"softmax\(a, dim\): a must be a SparseTensor, got Tensor": lambda: softmax(X),
    "attention.*pattern: expected Pattern, got Tensor": lambda: attend(pattern=MASK),
    "k must be real floating point": lambda: attend(k=ones(3, 4, dtype=torch.int64)),
    "q and v must have one dtype": lambda: attend(v=ones(3, 5).double()),
    "coords must be a tensor of integers, got list": lambda: Rulebook([[0, 0]], 3),
    "coords: expected integers, .*got torch.float32": lambda: Rulebook(X, 3),
    "kernel_size must be an int or a sequence of them, got 3.0": lambda: Rulebook(RULEBOOK.coords, 3.0),
    "rulebook: expected Rulebook, got Tensor": lambda: convolve(rulebook=RULEBOOK.coords),
    "conv.*: x must be a tensor, got list": lambda: convolve(x=[1.0]),
    "x and weight must have one dtype": lambda: convolve(weight=ones(3, 2, 3, 3).double()),
    "x and bias must have one dtype": lambda: convolve(bias=ones(3).double()),
    "masked_sum.*mask: expected bool, .*got torch.float32": lambda: masked_sum(X, MASK.float()),
    "must be floating, got torch.complex64": lambda: masked_softmax(X.cfloat(), MASK, 0),
    "ids: expected int64 or int32, .*got torch": lambda: embedding(VALUES, TABLE),
    "offsets must be int64 or int32, got torch": lambda: bag(offsets=VALUES),
    "rows must be int64, got torch.float32": lambda: RowSparse(VALUES, ones(2, 2), (3, 2)),
}
ERRORS = {ValueError: VALUE_ERRORS, TypeError: TYPE_ERRORS}


@pytest.mark.parametrize("error", ERRORS)
def test_each_mistake_is_named(error):
    assert complaints(ERRORS[error], error) == {}
