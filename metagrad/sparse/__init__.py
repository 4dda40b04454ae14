"""Sparse matrices, embedding rows and masked reductions whose derivatives stay sparse and right at every order."""

from metagrad.sparse.matrix.files import load, save
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.matrix.pattern import Pattern
from metagrad.sparse.matrix.segments import Segments
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.attention import attention
from metagrad.sparse.operations.conv import conv
from metagrad.sparse.operations.elementwise import dropout, pow
from metagrad.sparse.operations.linear import linear
from metagrad.sparse.operations.masked import mask_gradient, masked_mean, masked_softmax, masked_sum
from metagrad.sparse.operations.merge import add, div, mul, sub
from metagrad.sparse.operations.products import sddmm, spgemm, spmm
from metagrad.sparse.operations.reduce import max, mean, norm, sum
from metagrad.sparse.operations.rulebook import Rulebook
from metagrad.sparse.operations.segment_functions import gather, segment_max, segment_mean, segment_sum
from metagrad.sparse.operations.softmax import log_softmax, segment_softmax, softmax
from metagrad.sparse.policies.policy import SparsePolicy, current_policy, use_policy
from metagrad.sparse.policies.stats import stats
from metagrad.sparse.tables.clip import clip_grad_norm_
from metagrad.sparse.tables.embedding import embedding, embedding_bag
from metagrad.sparse.tables.row_sparse import RowSparse
from metagrad.sparse.tables.table import RowTable

__all__ = [
    "Parameter",
    "Pattern",
    "RowSparse",
    "RowTable",
    "Rulebook",
    "Segments",
    "SparsePolicy",
    "SparseTensor",
    "add",
    "attention",
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
