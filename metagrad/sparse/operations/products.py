"""Products of a sparse matrix with a dense matrix and with a sparse matrix."""

from __future__ import annotations

from torch import Tensor

from metagrad.core.checks import refuse
from metagrad.core.tree import widened
from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries, Matrix, as_sparse, like


def spmm(a: Entries, b: Tensor) -> Tensor:
    r"""Multiply a sparse matrix by a dense matrix.

    .. math:: y_{ik} = \sum_{j \in \mathrm{row}\ i} a_{ij} \, b_{jk}

    The gradient with respect to the values is :func:`sddmm`. The gradient with respect to ``b`` is a product with the
    transpose. At every order, memory and time are proportional to the entries, not to rows x columns.

    Args:
        a: Sparse, [n, m].
        b: Dense, [m], [m, K] or [..., m, K].

    Returns:
        Dense, [n], [n, K] or [..., n, K].

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: An operand has another type, or dtypes differ.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> metagrad.sparse.spmm(a, torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
        tensor([[ 4., 40.],
                [ 3., 30.]])
    """
    matrix = as_sparse("spmm(a, b)", "a", a)
    check_floating("spmm(a, b)", "b", b)
    check_same("spmm(a, b)", "a and b", matrix.values, b)
    rows, columns = matrix.shape
    if not b.ndim or b.shape[-1 if b.ndim == 1 else -2] != columns:
        got = b.shape[-1 if b.ndim == 1 else -2] if b.ndim else "a scalar"
        raise ValueError(f"spmm(a, b): a is ({rows}, {columns}), so b must have {columns} rows, got {got}.")
    if b.ndim == 1:
        return rules.matmul(matrix.pattern, matrix.values, b.unsqueeze(1)).squeeze(1)
    return rules.matmul(matrix.pattern, matrix.values, b)


def spgemm(a: Matrix, b: Matrix) -> Matrix:
    r"""Multiply two sparse matrices.

    .. math:: y_{ij} = \sum_k a_{ik} \, b_{kj}

    The pairs of entries that are multiplied are found once for two patterns and cached. Values are gathered,
    multiplied and added by segments, so every derivative costs as much as the product.

    Args:
        a: Sparse, [n, k].
        b: Sparse, [k, m].

    Returns:
        The product, [n, m]. The same two patterns give the same pattern. A cell whose products cancel is stored.

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: An operand has another type, or dtypes differ.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> metagrad.sparse.spgemm(a, a).to_dense()
        tensor([[6., 0.],
                [0., 6.]])
    """
    left, right = as_sparse("spgemm(a, b)", "a", a), as_sparse("spgemm(a, b)", "b", b)
    check_same("spgemm(a, b)", "a and b", left.values, right.values)
    if left.shape[1] != right.shape[0]:
        refuse("spgemm(a, b): b", f"{left.shape[1]} rows, the columns of a", right.shape[0])
    plan = left.pattern.product(right.pattern)
    products = rules.gather(widened(left.values), plan.left) * rules.gather(widened(right.values), plan.right)
    return like(left, plan.pattern, rules.segment_sum(products, plan.cell).to(left.values.dtype))
