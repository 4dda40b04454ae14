"""The table of backward nodes of torch whose further derivatives are missing or incorrect.

Each row was established on torch 2.13 and checked on 2.14 and 2.15. ``tests/autograd/checks/test_lint.py`` shows the
defect of every row that runs on a CPU. An order is the number of derivatives of the tensor whose graph contains the
node. The third derivative of ``layer_norm`` is incorrect, so ``NativeLayerNormBackward0`` has order 3. The cause is
``NativeLayerNormBackwardBackward0``. Such a node is in the graph of the gradient, so its row has order 2.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node

Predicate = Callable[[Node], bool]

COO = frozenset({torch.sparse_coo})
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def both(first: Predicate, second: Predicate) -> Predicate:
    """Return a predicate that is true if both predicates are. The second is evaluated only if the first is true."""
    return lambda node: first(node) and second(node)


def flag(name: str) -> Predicate:
    """Return a predicate for a saved argument. In a version of torch that does not save it, the predicate is true."""
    return lambda node: bool(getattr(node, name, True))


def needs_gradient(index: int) -> Predicate:
    """Return a predicate for a gradient that flows to one of the inputs."""
    return lambda node: node.next_functions[index][0] is not None


def layout_in(name: str, layouts: frozenset[torch.layout]) -> Predicate:
    """Return a predicate for the layout of a saved tensor. It unpacks the tensor."""
    return lambda node: getattr(node, name).layout in layouts


def without_strides(name: str) -> Predicate:
    """Return a predicate for a sparse matrix, which has no saved strides. It unpacks nothing."""
    return lambda node: getattr(node, name) == ()


def pads_its_output(node: Node) -> bool:
    """Return whether a convolution is transposed, with output padding."""
    return node._saved_transposed and any(node._saved_output_padding)  # type: ignore[attr-defined]


# Every wrapper that once_differentiable makes shares this code object.
_ONCE = once_differentiable(lambda ctx: None).__code__


def is_once_differentiable(node: Node) -> bool:
    """Return whether the backward of a custom function has the decorator, possibly below other decorators."""
    if not isinstance(node, BackwardCFunction):  # nodes of torch.distributed.rpc are C++
        return False
    backward = type(node)._forward_cls.backward  # type: ignore[attr-defined]
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def is_of_masked_tensor(node: Node) -> bool:
    """Return whether a custom function belongs to ``torch.masked``."""
    return type(node)._forward_cls.__module__.startswith("torch.masked.")  # type: ignore[attr-defined]


Kind = Literal["cut", "dense", "error", "wrong"]


class LintRule(NamedTuple):
    """A defect of one backward node."""

    node: str  # fnmatch pattern of Node.name(), where ? is the number of an overload
    kind: Kind
    order: int  # the lowest derivative of the loss that is affected
    source: str  # the user's call
    suggestion: str
    applies: Predicate | None = None  # true for nodes with the defect, None for all
    since: str = "0"  # the first version of torch with the defect
    until: str = "99"  # the first version of torch without the defect


_VALUES = "Keep the values as a strided vector, and compute with gather, multiply and index_add."
_DISTANCES = "Subtract with broadcasting, and take torch.linalg.vector_norm over the last dimension."
_BAG = "Take metagrad.sparse.embedding_bag."
_MATH = "Call the model inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
_NATIVE_RNN = "Run the forward under torch.backends.cudnn.flags(enabled=False)."
_BATCH_NORM = "Call the model inside metagrad.models.composite_norms(), or use F.group_norm or F.rms_norm."
_LAYER_NORM = (
    "Call the model inside metagrad.models.composite_norms(), or use F.rms_norm or F.group_norm(x, 1)."
)
_OUTPUT_PADDING = "Leave output_padding at 0, and pad or crop the output instead."
_EAGER = "Compile the whole derivative, torch.compile(torch.func.grad(...)), or run the forward uncompiled."
_SAMPLE = "Take the sample as a constant, or reparametrize it another way."
_CTC = "Write the forward recursion with torch.logsumexp."
_EARLIER = "Lint the loss whose gradient this is. The finding names the operation."

_COO_FACTOR = both(needs_gradient(1), layout_in("_saved_mat1", COO))
_COMPRESSED_FACTOR = both(needs_gradient(1), layout_in("_saved_mat1", COMPRESSED))

_KNOWN: tuple[LintRule, ...] = (
    # Sparse tensors. The gradient of their values is read by `_values()`, which detaches. `sparse_mask` restricts a
    # gradient to a pattern. It has no second derivative.
    LintRule(
        "SparseCooTensorWithDimsAndTensorsBackward?",
        "cut",
        2,
        "torch.sparse_coo_tensor(indices, values)",
        _VALUES,
    ),
    LintRule(
        "SparseCompressedTensorBackward?", "error", 2, "torch.sparse_csr_tensor and its relatives", _VALUES
    ),
    LintRule(
        "ValuesBackward?",
        "cut",
        2,
        "Tensor.values() of a CSR, CSC, BSR or BSC tensor",
        _VALUES,
        layout_in("_saved_self", COMPRESSED),
    ),
    LintRule(
        "ValuesBackward?",
        "cut",
        3,
        "Tensor.values() of a COO tensor",
        _VALUES,
        layout_in("_saved_self", COO),
    ),
    LintRule(
        "ToDenseBackward?",
        "error",
        3,
        "to_dense() of a sparse tensor",
        _VALUES,
        layout_in("_saved_self", COO | COMPRESSED),
    ),
    LintRule("SparseMaskBackward?", "error", 2, "Tensor.sparse_mask, or the gradient of to_dense()", _VALUES),
    LintRule(
        "SparseAddmmBackward?",
        "error",
        1,
        "torch.sparse.mm of a CSR, CSC, BSR or BSC tensor that requires grad",
        _VALUES,
        _COMPRESSED_FACTOR,
    ),
    LintRule(
        "SparseAddmmBackward?",
        "error",
        3,
        "torch.sparse.mm of a COO tensor that requires grad",
        _VALUES,
        _COO_FACTOR,
    ),
    LintRule(
        "SparseAddmmBackward?",
        "dense",
        1,
        "torch.sparse.mm of a COO tensor that requires grad",
        _VALUES,
        _COO_FACTOR,
    ),
    LintRule(
        "MmBackward?",
        "dense",
        1,
        "a @ b with a sparse a that requires grad",
        _VALUES,
        both(needs_gradient(0), without_strides("_saved_self_sym_strides")),
    ),
    LintRule(
        "AddmmBackward?",
        "dense",
        1,
        "torch.addmm(c, a, b) with a sparse a that requires grad",
        _VALUES,
        both(needs_gradient(1), without_strides("_saved_mat1_sym_strides")),
    ),
    LintRule("SparseSparseMatmulBackward?", "error", 2, "a product of two sparse tensors", _VALUES),
    LintRule("SparseSampledAddmmBackward?", "error", 2, "torch.sparse.sampled_addmm", _VALUES),
    LintRule("SparseSoftmaxBackward?", "error", 2, "torch.sparse.softmax", _VALUES),
    LintRule("SparseLogSoftmaxBackward?", "error", 2, "torch.sparse.log_softmax", _VALUES),
    LintRule("SparseSumBackward?", "error", 2, "torch.sparse.sum(a, dim)", _VALUES),
    LintRule("SparseMmReduceImplBackward?", "error", 2, "torch.sparse.mm(a, b, reduce)", _VALUES),
    # Lookups and segments.
    LintRule(
        "EmbeddingBackward?",
        "cut",
        3,
        "F.embedding(..., sparse=True)",
        "Leave sparse at False.",
        flag("_saved_sparse"),
    ),
    LintRule(
        "EmbeddingBackward?",
        "wrong",
        2,
        "F.embedding(..., scale_grad_by_freq=True)",
        "Leave it at False, and take row / count + (row - row / count).detach() of the rows looked up.",
        flag("_saved_scale_grad_by_freq"),
    ),
    LintRule(
        "GatherBackward?",
        "cut",
        3,
        "torch.gather(..., sparse_grad=True)",
        "Leave sparse_grad at False.",
        flag("_saved_sparse_grad"),
    ),
    LintRule("EmbeddingBagBackward?", "error", 2, "F.embedding_bag", _BAG),
    LintRule("EmbeddingBagBackwardBackward?", "error", 1, "the gradient of F.embedding_bag", _BAG),
    LintRule(
        "SegmentReduceBackward?",
        "error",
        2,
        "torch.segment_reduce",
        "Repeat the segment's number for each element, and use index_add.",
    ),
    # Distances, losses, activations, random numbers.
    LintRule("CdistBackward?", "error", 2, "torch.cdist", _DISTANCES, until="2.14"),
    LintRule("CdistBackwardBackward?", "error", 1, "the gradient of torch.cdist", _DISTANCES, until="2.14"),
    LintRule("PdistBackward?", "error", 2, "F.pdist", _DISTANCES, until="2.14"),
    LintRule("PdistBackwardBackward?", "error", 1, "the gradient of F.pdist", _DISTANCES, until="2.14"),
    LintRule("PdistBackward?", "wrong", 3, "F.pdist", _DISTANCES, since="2.14"),  # NaN
    LintRule("CtcLossBackward?", "error", 2, "F.ctc_loss", _CTC),
    LintRule(
        "MultiMarginLossBackward?",
        "error",
        2,
        "F.multi_margin_loss",
        "Write it out with gather and clamp_min.",
    ),
    LintRule(
        "MultilabelMarginLossBackward?",
        "error",
        2,
        "F.multilabel_margin_loss",
        "Write it out with gather and clamp_min, or use F.multilabel_soft_margin_loss.",
    ),
    LintRule(
        "GeneratedBackwardFor_torch_nn__linear_cross_entropy*",
        "cut",
        2,
        "F.linear_cross_entropy(..., options=...)",
        "Leave options at None, which computes F.cross_entropy(F.linear(...)).",
    ),
    LintRule("HardsigmoidBackward?", "error", 2, "F.hardsigmoid", "Write it as F.relu6(x + 3) / 6."),
    LintRule(
        "LogcumsumexpBackward?",
        "wrong",
        3,
        "torch.logcumsumexp (its third derivative is nan)",
        "Stack torch.logsumexp of the prefixes, or subtract the maximum and take cumsum().log().",
    ),
    LintRule(
        "MaskedSoftmaxBackward?",
        "error",
        2,
        "torch._masked_softmax",
        "Use torch.softmax of torch.where(mask, x, -inf).",
    ),
    LintRule(
        "StandardGammaBackward?", "error", 2, "rsample() of Gamma and the distributions made from it", _SAMPLE
    ),
    LintRule("StandardGammaGradBackward?", "error", 1, "the gradient of rsample() of a Gamma", _SAMPLE),
    LintRule(
        "FakeQuantizeLearnablePer*AffineBackward?",
        "error",
        2,
        "torch._fake_quantize_learnable_per_tensor_affine and per_channel",
        "Write it out with a straight-through round: x + (x.round() - x).detach().",
    ),
    # Normalization and convolution.
    LintRule("NativeLayerNormBackward?", "wrong", 3, "F.layer_norm", _LAYER_NORM),
    LintRule("NativeLayerNormBackwardBackward?", "wrong", 2, "the gradient of F.layer_norm", _LAYER_NORM),
    LintRule(
        "NativeBatchNormBackward?",
        "wrong",
        3,
        "F.batch_norm in training, or F.instance_norm",
        _BATCH_NORM,
        flag("_saved_training"),
    ),
    LintRule(
        "NativeBatchNormBackwardBackward?",
        "wrong",
        2,
        "the gradient of F.batch_norm in training, or of F.instance_norm",
        _BATCH_NORM,
        flag("_saved_train"),
    ),
    LintRule(
        "WeightNormInterfaceBackward?",
        "wrong",
        2,
        "torch.nn.utils.weight_norm",
        "Write it out: g * v / torch.linalg.vector_norm(v, dim=..., keepdim=True).",
    ),
    LintRule(
        "ConvolutionBackward?",
        "error",
        3,
        "F.conv_transpose with output_padding",
        _OUTPUT_PADDING,
        pads_its_output,
    ),
    LintRule(
        "ConvolutionBackwardBackward?",
        "error",
        2,
        "the gradient of F.conv_transpose with output_padding",
        _OUTPUT_PADDING,
        pads_its_output,
    ),
    LintRule(
        "ScaledDotProduct*Backward?", "error", 2, "F.scaled_dot_product_attention by a fused kernel", _MATH
    ),
    # Python functions.
    LintRule(
        "*Backward",
        "cut",
        2,
        "an autograd.Function whose backward is once_differentiable",
        "Write its backward with differentiable operations on ctx.saved_tensors, and drop the decorator.",
        is_once_differentiable,
    ),
    LintRule(
        "GetDataBackward",
        "cut",
        2,
        "get_data() or to_tensor() of a torch.masked.MaskedTensor",
        "Use torch.where, or the masked reductions of metagrad.sparse.",
        is_of_masked_tensor,
    ),
    LintRule(
        "CheckpointFunctionBackward",
        "error",
        1,
        "torch.utils.checkpoint with use_reentrant=True",
        "Use metagrad.checkpoint.",
    ),
    LintRule("CompiledFunctionBackward", "error", 2, "torch.compile", _EAGER),
    LintRule(
        "CompiledFunctionBackwardBackward", "error", 1, "the gradient of a torch.compile'd function", _EAGER
    ),
    # Nodes that torch puts into the graph of a gradient if a derivative is missing.
    LintRule(
        "torch::autograd::NotImplemented", "error", 1, "a gradient without a derivative of its own", _EARLIER
    ),
    LintRule(
        "torch::autograd::Error", "error", 1, "the gradient of a once_differentiable function", _EARLIER
    ),
    # Nodes that only CUDA makes. They were not run. The file derivatives.yaml of torch marks the derivative of their
    # backward as not implemented, gives the derivative for batch_norm above, or uses a saved raw gradient.
    LintRule("*AttentionForwardBackward?", "error", 2, "attention by a fused kernel", _MATH),
    LintRule("CudnnRnnBackward?", "error", 2, "an RNN by cuDNN", _NATIVE_RNN),
    LintRule("CudnnRnnBackwardBackward?", "error", 1, "the gradient of an RNN by cuDNN", _NATIVE_RNN),
    LintRule(
        "CudnnBatchNormBackward?",
        "wrong",
        3,
        "F.batch_norm in training, by cuDNN",
        _BATCH_NORM,
        flag("_saved_training"),
    ),
    LintRule(
        "CudnnBatchNormBackwardBackward?",
        "wrong",
        2,
        "the gradient of F.batch_norm in training, by cuDNN",
        _BATCH_NORM,
    ),
    LintRule("CudnnCtcLossBackward?", "cut", 2, "F.ctc_loss by cuDNN", _CTC),
)

RULES = tuple(rule for rule in _KNOWN if rule.since <= torch.__version__ < rule.until)
"""The defects of the installed version of torch."""

_PIECEWISE_LINEAR = (
    *(
        "ReluBackward?",
        "LeakyReluBackward?",
        "PreluKernelBackward?",
        "RreluWithNoiseBackward?",
        "AbsBackward?",
    ),
    *("ThresholdBackward?", "HardtanhBackward?", "HardshrinkBackward?", "SoftshrinkBackward?"),
)


def is_piecewise_linear(name: str) -> bool:
    """Return whether a node belongs to a piecewise linear activation. Its zero second derivative is no defect.

    Example:
        >>> from metagrad.autograd.checks.lint_rules import is_piecewise_linear
        >>> is_piecewise_linear("ReluBackward0"), is_piecewise_linear("TanhBackward0")
        (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in _PIECEWISE_LINEAR)
