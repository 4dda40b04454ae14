"""The table of backward nodes of torch whose higher derivatives are missing or incorrect.

Each row was established on torch 2.13 and checked on 2.14 and 2.15. ``tests/autograd/checks/test_lint.py`` shows the
defect of every row that runs on a CPU. An order is the number of derivatives of the tensor whose graph contains the
node. The third derivative of ``layer_norm`` is incorrect, so ``NativeLayerNormBackward0`` has order 3. The cause is
``NativeLayerNormBackwardBackward0``. Such a node is in the graph of the gradient, so its row has order 2.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node

Predicate = Callable[[Node], bool]

COO = frozenset({torch.sparse_coo})
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def both(first: Predicate, second: Predicate) -> Predicate:
    """Return the conjunction of two predicates. The second predicate is evaluated only if the first is true."""
    return lambda node: first(node) and second(node)


def flag(*names: str) -> Predicate:
    """Return a predicate for a saved flag with one of these names.

    It is also true if torch does not save the flag.
    """
    return lambda node: bool(next((getattr(node, name) for name in names if hasattr(node, name)), True))


def needs_gradient(index: int) -> Predicate:
    """Return a predicate for a gradient that flows to one of the inputs."""
    return lambda node: node.next_functions[index][0] is not None


def layout_in(name: str, layouts: frozenset[torch.layout]) -> Predicate:
    """Return a predicate for the layout of a saved tensor, which it unpacks."""
    return lambda node: getattr(node, name).layout in layouts


def without_strides(name: str) -> Predicate:
    """Return a predicate for a sparse matrix, which has no saved strides. It unpacks no tensor."""
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
_BATCH_NORM = "Call the model inside metagrad.models.composite_norms(), or use F.group_norm or F.rms_norm."

_COO_VALUES = layout_in("_saved_self", COO)
_COMPRESSED_VALUES = layout_in("_saved_self", COMPRESSED)
_SPARSE_VALUES = layout_in("_saved_self", COO | COMPRESSED)
_COO_FACTOR = both(needs_gradient(1), layout_in("_saved_mat1", COO))
_COMPRESSED_FACTOR = both(needs_gradient(1), layout_in("_saved_mat1", COMPRESSED))
_FIRST_FACTOR = both(needs_gradient(0), without_strides("_saved_self_sym_strides"))
_SECOND_FACTOR = both(needs_gradient(1), without_strides("_saved_mat1_sym_strides"))
_SPARSE_MM = "torch.sparse.mm of a {} tensor that requires grad"
_SCALES_BY_FREQUENCY = flag("_saved_scale_grad_by_freq")
_ONCE_SOURCE = "an autograd.Function whose backward is once_differentiable"
_MASKED_SOURCE = "get_data() or to_tensor() of a torch.masked.MaskedTensor"
_IS_TRAINING = flag("_saved_training", "_saved_train")


def _rules(suggestion: str, *rows: tuple[Any, ...], since: str = "0", until: str = "99") -> list[LintRule]:
    """Return rules with one suggestion. A row has the node, the kind, the order, the source and the predicate."""
    return [
        LintRule(node, kind, order, source, suggestion, next(iter(applies), None), since, until)
        for node, kind, order, source, *applies in rows
    ]


def _with_gradient(suggestion: str, row: tuple[Any, ...], until: str = "99") -> list[LintRule]:
    """Return the rule of a row, and the rule of the node of its gradient, one order lower."""
    node, kind, order, source, *applies = row
    gradient = node.replace("Backward", "BackwardBackward"), kind, order - 1, f"the gradient of {source}"
    return _rules(suggestion, row, (*gradient, *applies), until=until)


_KNOWN: tuple[LintRule, ...] = (
    # Sparse tensors. The gradient of their values is read by `_values()`, which detaches. `sparse_mask` restricts a
    # gradient to a pattern. It has no second derivative.
    *_rules(
        _VALUES,
        ("SparseCooTensorWithDimsAndTensorsBackward?", "cut", 2, "torch.sparse_coo_tensor(indices, values)"),
        ("SparseCompressedTensorBackward?", "error", 2, "torch.sparse_csr_tensor and its relatives"),
        ("ValuesBackward?", "cut", 2, "Tensor.values() of a CSR, CSC, BSR or BSC tensor", _COMPRESSED_VALUES),
        ("ValuesBackward?", "cut", 3, "Tensor.values() of a COO tensor", _COO_VALUES),
        ("ToDenseBackward?", "error", 3, "to_dense() of a sparse tensor", _SPARSE_VALUES),
        ("SparseMaskBackward?", "error", 2, "Tensor.sparse_mask, or the gradient of to_dense()"),
        ("SparseAddmmBackward?", "error", 1, _SPARSE_MM.format("CSR, CSC, BSR or BSC"), _COMPRESSED_FACTOR),
        ("SparseAddmmBackward?", "error", 3, _SPARSE_MM.format("COO"), _COO_FACTOR),
        ("SparseAddmmBackward?", "dense", 1, _SPARSE_MM.format("COO"), _COO_FACTOR),
        ("MmBackward?", "dense", 1, "a @ b with a sparse a that requires grad", _FIRST_FACTOR),
        (
            "AddmmBackward?",
            "dense",
            1,
            "torch.addmm(c, a, b) with a sparse a that requires grad",
            _SECOND_FACTOR,
        ),
        ("SparseSparseMatmulBackward?", "error", 2, "a product of two sparse tensors"),
        ("SparseSampledAddmmBackward?", "error", 2, "torch.sparse.sampled_addmm"),
        ("SparseSoftmaxBackward?", "error", 2, "torch.sparse.softmax"),
        ("SparseLogSoftmaxBackward?", "error", 2, "torch.sparse.log_softmax"),
        ("SparseSumBackward?", "error", 2, "torch.sparse.sum(a, dim)"),
        ("SparseMmReduceImplBackward?", "error", 2, "torch.sparse.mm(a, b, reduce)"),
    ),
    # Lookups and segments.
    *_rules(
        "Leave sparse at False.",
        ("EmbeddingBackward?", "cut", 3, "F.embedding(..., sparse=True)", flag("_saved_sparse")),
    ),
    *_rules(
        "Leave it at False, and take row / count + (row - row / count).detach() of the rows looked up.",
        ("EmbeddingBackward?", "wrong", 2, "F.embedding(..., scale_grad_by_freq=True)", _SCALES_BY_FREQUENCY),
    ),
    *_rules(
        "Leave sparse_grad at False.",
        ("GatherBackward?", "cut", 3, "torch.gather(..., sparse_grad=True)", flag("_saved_sparse_grad")),
    ),
    *_with_gradient(
        "Take metagrad.sparse.embedding_bag.", ("EmbeddingBagBackward?", "error", 2, "F.embedding_bag")
    ),
    *_rules(
        "Repeat the segment's number for each element, and use index_add.",
        ("SegmentReduceBackward?", "error", 2, "torch.segment_reduce"),
    ),
    # Distances, losses, activations, random numbers.
    *_with_gradient(_DISTANCES, ("CdistBackward?", "error", 2, "torch.cdist"), until="2.14"),
    *_with_gradient(_DISTANCES, ("PdistBackward?", "error", 2, "F.pdist"), until="2.14"),
    *_rules(_DISTANCES, ("PdistBackward?", "wrong", 3, "F.pdist"), since="2.14"),  # NaN
    *_rules(
        "Write the forward recursion with torch.logsumexp.",
        ("CtcLossBackward?", "error", 2, "F.ctc_loss"),
        ("CudnnCtcLossBackward?", "cut", 2, "F.ctc_loss by cuDNN"),
    ),
    *_rules(
        "Write it out with gather and clamp_min.",
        ("MultiMarginLossBackward?", "error", 2, "F.multi_margin_loss"),
    ),
    *_rules(
        "Write it out with gather and clamp_min, or use F.multilabel_soft_margin_loss.",
        ("MultilabelMarginLossBackward?", "error", 2, "F.multilabel_margin_loss"),
    ),
    *_rules(
        "Leave options at None, which computes F.cross_entropy(F.linear(...)).",
        (
            "GeneratedBackwardFor_torch_nn__linear_cross_entropy*",
            "cut",
            2,
            "F.linear_cross_entropy(..., options=...)",
        ),
    ),
    *_rules("Write it as F.relu6(x + 3) / 6.", ("HardsigmoidBackward?", "error", 2, "F.hardsigmoid")),
    *_rules(
        "Stack torch.logsumexp of the prefixes, or subtract the maximum and take cumsum().log().",
        ("LogcumsumexpBackward?", "wrong", 3, "torch.logcumsumexp (its third derivative is nan)"),
    ),
    *_rules(
        "Use torch.softmax of torch.where(mask, x, -inf).",
        ("MaskedSoftmaxBackward?", "error", 2, "torch._masked_softmax"),
    ),
    *_rules(
        "Take the sample as a constant, or reparametrize it another way.",
        ("StandardGammaBackward?", "error", 2, "rsample() of Gamma and the distributions made from it"),
        ("StandardGammaGradBackward?", "error", 1, "the gradient of rsample() of a Gamma"),
    ),
    *_rules(
        "Write it out with a straight-through round: x + (x.round() - x).detach().",
        ("FakeQuantizeLearnablePer*AffineBackward?", "error", 2, "torch._fake_quantize_learnable_per_*"),
    ),
    # Normalization and convolution.
    *_with_gradient(
        "Call the model inside metagrad.models.composite_norms(), or use F.rms_norm or F.group_norm(x, 1).",
        ("NativeLayerNormBackward?", "wrong", 3, "F.layer_norm"),
    ),
    *_with_gradient(
        _BATCH_NORM,
        (
            "NativeBatchNormBackward?",
            "wrong",
            3,
            "F.batch_norm in training, or F.instance_norm",
            _IS_TRAINING,
        ),
    ),
    *_rules(
        "Write it out: g * v / torch.linalg.vector_norm(v, dim=..., keepdim=True).",
        ("WeightNormInterfaceBackward?", "wrong", 2, "torch.nn.utils.weight_norm"),
    ),
    *_with_gradient(
        "Leave output_padding at 0, and pad or crop the output instead.",
        ("ConvolutionBackward?", "error", 3, "F.conv_transpose with output_padding", pads_its_output),
    ),
    # The second attention kernel runs only on CUDA.
    *_rules(
        "Call the model inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH).",
        ("ScaledDotProduct*Backward?", "error", 2, "F.scaled_dot_product_attention by a fused kernel"),
        ("*AttentionForwardBackward?", "error", 2, "attention by a fused kernel"),
    ),
    # Python functions.
    *_rules(
        "Write its backward with differentiable operations on ctx.saved_tensors, and drop the decorator.",
        ("*Backward", "cut", 2, _ONCE_SOURCE, is_once_differentiable),
    ),
    *_rules(
        "Use torch.where, or the masked reductions of metagrad.sparse.",
        ("GetDataBackward", "cut", 2, _MASKED_SOURCE, is_of_masked_tensor),
    ),
    *_rules(
        "Use metagrad.checkpoint.",
        ("CheckpointFunctionBackward", "error", 1, "torch.utils.checkpoint with use_reentrant=True"),
    ),
    *_with_gradient(
        "Compile the whole derivative, torch.compile(torch.func.grad(...)), or run the forward uncompiled.",
        ("CompiledFunctionBackward", "error", 2, "torch.compile"),
    ),
    # Nodes that torch puts into the graph of a gradient if a derivative is missing.
    *_rules(
        "Lint the loss whose gradient this is. The finding names the operation.",
        ("torch::autograd::NotImplemented", "error", 1, "a gradient without a derivative of its own"),
        ("torch::autograd::Error", "error", 1, "the gradient of a once_differentiable function"),
    ),
    # Nodes that only CUDA makes. They were not run. The file derivatives.yaml of torch marks the derivative of their
    # backward as not implemented, or gives the derivative for batch_norm above.
    *_with_gradient(
        "Run the forward under torch.backends.cudnn.flags(enabled=False).",
        ("CudnnRnnBackward?", "error", 2, "an RNN by cuDNN"),
    ),
    *_with_gradient(
        _BATCH_NORM,
        ("CudnnBatchNormBackward?", "wrong", 3, "F.batch_norm in training, by cuDNN", _IS_TRAINING),
    ),
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
    """Return whether a node belongs to a piecewise linear activation. A second derivative of zero is correct there.

    Example:
        >>> from metagrad.autograd.checks.lint_rules import is_piecewise_linear
        >>> is_piecewise_linear("ReluBackward0"), is_piecewise_linear("TanhBackward0")
        (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in _PIECEWISE_LINEAR)
