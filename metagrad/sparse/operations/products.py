"""Products of a sparse matrix with a dense one and with another sparse one, and linear layers."""

from __future__ import annotations

from torch import Tensor

from metagrad.core.tree import widened
from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries, Matrix, as_sparse, like

_LINEAR = "linear(x, weight, bias)"


def spmm(a: Entries, b: Tensor) -> Tensor:
    r"""Multiply a sparse matrix by a dense one.

    .. math:: y_{ik} = \sum_{j \in \mathrm{row}\ i} a_{ij} \, b_{jk}

    The gradient with respect to the values is :func:`sddmm`, and that with respect to ``b`` is a product with the
    transpose, at every order: memory and time are those of the entries, never of rows x columns.

    Args:
        a: Sparse, [n, m].
        b: Dense, [m], [m, K] or [..., m, K].

    Returns:
        Dense, [n], [n, K] or [..., n, K].

    Raises:
        ValueError: The rows of ``b`` are not the columns of ``a``, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> metagrad.sparse.spmm(a, torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
        tensor([[ 4., 40.],
                [ 3., 30.]])
    """
    a = as_sparse("spmm(a, b)", "a", a)
    check_floating("spmm(a, b)", "b", b)
    check_same("spmm(a, b)", "a and b", a.values, b)
    rows, columns = a.shape
    if not b.ndim or b.shape[-1 if b.ndim == 1 else -2] != columns:
        got = b.shape[-1 if b.ndim == 1 else -2] if b.ndim else "a scalar"
        raise ValueError(f"spmm(a, b): a is ({rows}, {columns}), so b must have {columns} rows, got {got}.")
    scalar = a.scalar()
    if b.ndim == 1:
        return rules.matmul(scalar.pattern, scalar.values, b.unsqueeze(1)).squeeze(1)
    return rules.matmul(scalar.pattern, scalar.values, b)


def spgemm(a: Matrix, b: Matrix) -> Matrix:
    r"""Multiply two sparse matrices.

    .. math:: y_{ij} = \sum_k a_{ik} \, b_{kj}

    Which entries meet, and where their products go, is found once for a pair of patterns and kept with them; the
    numbers are gathered, multiplied and added by segments, so every derivative costs what the product does.

    Args:
        a: Sparse, [n, k].
        b: Sparse, [k, m].

    Returns:
        The product, [n, m]; its pattern is the same object for the same two patterns. A cell in which the
        products cancel is stored all the same.

    Raises:
        ValueError: The rows of ``b`` are not the columns of ``a``, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> metagrad.sparse.spgemm(a, a).to_dense()
        tensor([[6., 0.],
                [0., 6.]])
    """
    a = as_sparse("spgemm(a, b)", "a", a)
    b = as_sparse("spgemm(a, b)", "b", b)
    check_same("spgemm(a, b)", "a and b", a.values, b.values)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"spgemm(a, b): a is {tuple(a.shape)}, so b must have {a.shape[1]} rows, got {b.shape[0]}."
        )
    a, b = a.scalar(), b.scalar()
    plan = a.pattern.product(b.pattern)
    products = rules.gather(widened(a.values), plan.left) * rules.gather(widened(b.values), plan.right)
    return like(a, plan.pattern, rules.segment_sum(products, plan.cell).to(a.values.dtype))


def linear(x: Tensor, weight: Entries, bias: Tensor | None = None) -> Tensor:
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
    weight = as_sparse(_LINEAR, "weight", weight)
    _check_linear(x, weight, bias)
    scalar = weight.scalar()
    y = rules.matmul(scalar.pattern, scalar.values, x.reshape(x.shape[:-1].numel(), x.shape[-1]).mT)
    y = y.mT.contiguous().reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _check_linear(x: Tensor, weight: Entries, bias: Tensor | None) -> None:
    check_floating(_LINEAR, "x", x)
    check_same(_LINEAR, "x and weight", x, weight.values)
    outputs, inputs = weight.shape
    if not x.ndim or x.shape[-1] != inputs:
        raise ValueError(
            f"{_LINEAR}: weight is ({outputs}, {inputs}), so x must be [..., {inputs}], got {list(x.shape)}."
        )
    if bias is None:
        return
    check_floating(_LINEAR, "bias", bias)
    check_same(_LINEAR, "x and bias", x, bias)
    if bias.shape != (outputs,):
        raise ValueError(
            f"{_LINEAR}: weight is ({outputs}, {inputs}), so bias must be [{outputs}], got {list(bias.shape)}."
        )
