"""Sparse matrices, embedding rows and masked reductions with sparse, correct derivatives at every order."""

from metagrad.sparse.kernels.calibrate import calibrate
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.matrix.tensor import SparseTensor, sddmm
from metagrad.sparse.operations.attention import attention
from metagrad.sparse.operations.conv import Rulebook, conv
from metagrad.sparse.operations.masked import mask_gradient, masked_mean, masked_softmax, masked_sum
from metagrad.sparse.operations.products import spgemm, spmm
from metagrad.sparse.operations.reduce import softmax
from metagrad.sparse.operations.segments import (
    gather,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
)
from metagrad.sparse.pattern import Pattern, Segments
from metagrad.sparse.policy import SparsePolicy, stats, use_policy
from metagrad.sparse.tables import row_operations as row_operations  # registers the operations of RowSparse
from metagrad.sparse.tables.embedding import embedding, embedding_bag
from metagrad.sparse.tables.row_sparse import RowSparse

__all__ = [
    "Parameter",
    "Pattern",
    "RowSparse",
    "Rulebook",
    "Segments",
    "SparsePolicy",
    "SparseTensor",
    "attention",
    "calibrate",
    "conv",
    "embedding",
    "embedding_bag",
    "gather",
    "mask_gradient",
    "masked_mean",
    "masked_softmax",
    "masked_sum",
    "sddmm",
    "segment_max",
    "segment_mean",
    "segment_softmax",
    "segment_sum",
    "softmax",
    "spgemm",
    "spmm",
    "stats",
    "use_policy",
]
