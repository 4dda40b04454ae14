"""Products: sparse @ dense, dense @ dense at the entries of a pattern, sparse @ sparse."""

from __future__ import annotations

from torch import Tensor

from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.kernels.accumulation import widened
from metagrad.sparse.matrix.pattern import Pattern
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.elementwise import as_sparse


def spmm(a: SparseTensor, b: Tensor) -> Tensor:
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


def sddmm(a: Tensor, b: Tensor, pattern: Pattern) -> SparseTensor:
    r"""Multiply two dense matrices at the entries of a pattern alone (sampled dense-dense product).

    .. math:: y_{ij} = \sum_k a_{ik} \, b_{kj} \quad \text{for } (i, j) \text{ in the pattern}

    Args:
        a: Dense, [n, K].
        b: Dense, [K, m]; a transposed view costs nothing.
        pattern: The cells to compute, of shape (n, m).

    Returns:
        The product on the pattern.

    Raises:
        ValueError: Shapes that do not fit the pattern or each other, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> metagrad.sparse.sddmm(a, a.mT, pattern)
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([11., 11.]))
    """
    call = "sddmm(a, b, pattern)"
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{call}: pattern must be a Pattern, got {type(pattern).__name__}.")
    check_floating(call, "a", a)
    check_floating(call, "b", b)
    check_same(call, "a and b", a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != pattern.shape:
        n, m = pattern.shape
        raise ValueError(
            f"{call}: the pattern is {pattern.shape}, so a must be [{n}, K] and b [K, {m}], "
            f"got {list(a.shape)} and {list(b.shape)}."
        )
    if a.device != pattern.device:
        raise ValueError(
            f"{call}: a is on {a.device} and the pattern on {pattern.device}. Move one with .to(device)."
        )
    return SparseTensor._of(pattern, rules.sample(pattern, a, b.mT))


def spgemm(a: SparseTensor, b: SparseTensor) -> SparseTensor:
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
    return SparseTensor._of(plan.pattern, rules.segment_sum(products, plan.cell).to(a.values.dtype))
