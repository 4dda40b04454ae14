"""Every public function with every argument replaced by something else: it works, or its own error says why."""

import itertools
import re
import traceback

import torch
from torch import tensor

from metagrad import sparse

PATTERN = sparse.Pattern(tensor([0, 1]), tensor([1, 0]), (2, 3))
A = sparse.SparseTensor(PATTERN, tensor([2.0, 3.0]))
X, MASK, IDS, TABLE = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool), tensor([0, 2]), torch.ones(4, 2)
SITES = tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]])
MATRIX = sparse.SparseTensor
CALLS = {  # how an error names the call: the function and its arguments
    "Pattern": (sparse.Pattern, IDS[:1], IDS[:1], (2, 3)),
    "coalesce": (sparse.Pattern.coalesce, IDS, IDS, (3, 3)),
    "from_mask": (sparse.Pattern.from_mask, MASK),
    "banded": (sparse.Pattern.banded, 3, 1, 1),
    "union": (PATTERN.union, PATTERN),
    "product": (PATTERN.product, PATTERN.t()),
    "equals": (PATTERN.equals, PATTERN),
    "Segments": (sparse.Segments, IDS, 3),
    "SparseTensor": (MATRIX, PATTERN, tensor([2.0, 3.0])),
    "from_coo": (MATRIX.from_coo, IDS, IDS, tensor([1.0, 2.0]), (3, 3)),
    "from_dense": (MATRIX.from_dense, X, MASK),
    "from_torch": (MATRIX.from_torch, X.to_sparse()),
    "to_torch": (A.to_torch, torch.sparse_csr),
    "a.sum": (A.sum, 1),
    "a.max": (A.max, 0),
    "a.norm": (A.norm, 2),
    "a.log_softmax": (A.log_softmax, 1),
    "a.dropout": (A.dropout, 0.5),
    r"a \*\*": (lambda exponent: A**exponent, 2),
    "a ": (lambda b: (A + b, A * b), A),
    "a /": (lambda b: A / b, 2.0),
    r"a @|spgemm|spmm": (lambda b: A @ b, X),
    "Parameter": (sparse.Parameter, A),
    "sddmm": (sparse.sddmm, torch.ones(2, 4), torch.ones(4, 3), PATTERN),
    "spmm": (sparse.spmm, A, X),
    "spgemm": (sparse.spgemm, A, A.t()),
    "softmax": (sparse.softmax, A, 1),
    "attention": (sparse.attention, torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 5), PATTERN),
    "Rulebook": (sparse.Rulebook, SITES, 3),
    "conv": (sparse.conv, X, torch.ones(4, 2, 3, 3), sparse.Rulebook(SITES, 3), torch.ones(4)),
    "gather": (sparse.gather, X, IDS),
    "segment_sum": (sparse.segment_sum, torch.ones(2), IDS, 3),
    "segment_softmax": (sparse.segment_softmax, torch.ones(2), IDS, 3),
    "embedding": (lambda ids, table, row: sparse.embedding(ids, table, padding_idx=row), IDS, TABLE, 1),
    "embedding_bag|embedding": (lambda ids, table: sparse.embedding_bag(ids, IDS, table), IDS, TABLE),
    "masked_sum": (sparse.masked_sum, X, MASK, 1),
    "masked_mean": (sparse.masked_mean, X, MASK, 1),
    "masked_softmax": (sparse.masked_softmax, X, MASK, 1),
    "mask_gradient": (sparse.mask_gradient, X, MASK),
    "RowSparse": (sparse.RowSparse, IDS, torch.ones(2, 2), (4, 2)),
    "SparsePolicy": (sparse.SparsePolicy, 0.5, 0, "auto", 100),
    "use_policy": (lambda policy: sparse.use_policy(policy).__enter__(), sparse.SparsePolicy()),
}
WRONG = [None, 3, -1, 2.5, True, "a", [0, 1], (2,), A, object()]
WRONG += [tensor([5, 7]), tensor([0.5, 1.5]), torch.ones(5, 5)]
WRONG += [torch.ones(2, 3, dtype=torch.complex64), X.double(), X.to("meta"), X.to_sparse()]


def error_of(function, *arguments):
    """Return the error of a call, or None."""
    try:
        function(*arguments)
    except Exception as error:
        return error


def test_an_error_is_ours_and_names_the_call():
    for name, (function, *arguments) in CALLS.items():
        assert error_of(function, *arguments) is None
        for place, wrong in itertools.product(range(len(arguments)), WRONG):
            error = error_of(function, *arguments[:place], wrong, *arguments[place + 1 :])
            if error is not None:
                case = (name, place, wrong, error)
                assert isinstance(error, (TypeError, ValueError)), case
                assert re.search(name, str(error)), case
                assert "/metagrad/" in traceback.extract_tb(error.__traceback__)[-1].filename, case
