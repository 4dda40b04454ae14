"""Sparse matrices, embedding rows and masked reductions whose derivatives stay sparse and right at every order."""

from metagrad.sparse.kernels.calibrate import calibrate
from metagrad.sparse.matrix.files import load, save
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.matrix.tensor import SparseTensor, sddmm
from metagrad.sparse.operations.arithmetic import add, div, dropout, mul, pow, sub
from metagrad.sparse.operations.attention import attention
from metagrad.sparse.operations.conv import conv
from metagrad.sparse.operations.masked import mask_gradient, masked_mean, masked_softmax, masked_sum
from metagrad.sparse.operations.products import linear, spgemm, spmm
from metagrad.sparse.operations.reduce import log_softmax, max, mean, norm, softmax, sum
from metagrad.sparse.operations.rulebook import Rulebook, StridedRulebook
from metagrad.sparse.operations.segments import (
    gather,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
)
from metagrad.sparse.pattern import Pattern, Segments
from metagrad.sparse.policy import SparsePolicy, current_policy, use_policy
from metagrad.sparse.statistics import stats
from metagrad.sparse.tables import row_operations as row_operations  # registers the operations of RowSparse
from metagrad.sparse.tables.clip import clip_grad_norm_
from metagrad.sparse.tables.embedding import embedding, embedding_bag
from metagrad.sparse.tables.row_sparse import RowSparse
from metagrad.sparse.tables.row_table import RowTable

__all__ = [
    "Parameter",
    "Pattern",
    "RowSparse",
    "RowTable",
    "Rulebook",
    "Segments",
    "SparsePolicy",
    "SparseTensor",
    "StridedRulebook",
    "add",
    "attention",
    "calibrate",
    "clip_grad_norm_",
    "conv",
    "current_policy",
    "div",
    "dropout",
    "embedding",
    "embedding_bag",
    "gather",
    "linear",
    "load",
    "log_softmax",
    "mask_gradient",
    "masked_mean",
    "masked_softmax",
    "masked_sum",
    "max",
    "mean",
    "mul",
    "norm",
    "pow",
    "save",
    "sddmm",
    "segment_max",
    "segment_mean",
    "segment_softmax",
    "segment_sum",
    "softmax",
    "spgemm",
    "spmm",
    "stats",
    "sub",
    "sum",
    "use_policy",
]
