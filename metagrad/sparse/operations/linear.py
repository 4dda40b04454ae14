"""Linear layers with a sparse weight."""

from __future__ import annotations

from torch import Tensor

from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.elementwise import as_sparse

_CALL = "linear(x, weight, bias)"


def linear(x: Tensor, weight: SparseTensor, bias: Tensor | None = None) -> Tensor:
    r"""Apply a linear layer whose weight is sparse.

    .. math:: y = x W^\top + b

    Like ``torch.nn.functional.linear``. The gradient of the weight is on its pattern; time and memory of every
    derivative are those of the entries times the rows of ``x``, never those of out x in.

    Args:
        x: Inputs, [..., in].
        weight: Sparse, [out, in].
        bias: Dense, [out].

    Returns:
        [..., out].

    Raises:
        ValueError: Shapes do not fit each other, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Note:
        A sparse product is faster than a dense one only where the weight is very sparse.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3))
        >>> weight = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> metagrad.sparse.linear(torch.tensor([[1.0, 10.0, 100.0]]), weight, torch.tensor([0.0, 0.5]))
        tensor([[200.0000,   3.5000]])
    """
    weight = as_sparse(_CALL, "weight", weight)
    _check_arguments(x, weight, bias)
    scalar = weight.scalar()
    y = rules.matmul(scalar.pattern, scalar.values, x.reshape(x.shape[:-1].numel(), x.shape[-1]).mT)
    y = y.mT.contiguous().reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _check_arguments(x: Tensor, weight: SparseTensor, bias: Tensor | None) -> None:
    check_floating(_CALL, "x", x)
    check_same(_CALL, "x and weight", x, weight.values)
    outputs, inputs = weight.shape
    if not x.ndim or x.shape[-1] != inputs:
        raise ValueError(
            f"{_CALL}: weight is ({outputs}, {inputs}), so x must be [..., {inputs}], got {list(x.shape)}."
        )
    if bias is None:
        return
    check_floating(_CALL, "bias", bias)
    check_same(_CALL, "x and bias", x, bias)
    if bias.shape != (outputs,):
        raise ValueError(
            f"{_CALL}: weight is ({outputs}, {inputs}), so bias must be [{outputs}], got {list(bias.shape)}."
        )
