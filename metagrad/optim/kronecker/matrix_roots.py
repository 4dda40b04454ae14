"""Roots and eigenvectors of symmetric matrices, which can be differentiated where eigenvalues are equal."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import Function, linalg
from metagrad.core.checks import check_count


def inverse_root(matrix: Tensor, p: int) -> Tensor:
    r"""Compute the inverse p-th root of symmetric positive definite matrices.

    .. math:: X = A^{-1/p} = V \operatorname{diag}(\lambda^{-1/p}) V^\top

    Its derivative does not go through that of the eigenvectors, which is infinite where two eigenvalues are equal:
    :math:`X^{-p} = A` says that :math:`\sum_k X^k \, dX \, X^{p-1-k} = -X^p \, dA \, X^p`, which is solved in the
    eigenbasis by divisions by :math:`\sum_k x_i^k x_j^{p-1-k} > 0`. The solution is differentiated in the same way,
    so that every order is right.

    Eigenvalues below the rounding errors of the largest, n times the machine precision, are replaced by these. The
    inverse root of the zero matrix is taken as zero, with derivatives of zero: gradients are zero there as well.

    Args:
        matrix: Symmetric and positive semi-definite, ``[..., n, n]``, in float32 or float64.
        p: Which root, 1 or more.

    Returns:
        The root, ``[..., n, n]``, symmetric.

    Example:
        >>> from metagrad.optim.kronecker.matrix_roots import inverse_root
        >>> inverse_root(torch.tensor([[16.0, 0.0], [0.0, 81.0]]), 4)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.3333]])

    References:
        Higham, "Functions of matrices", SIAM 2008, section 3.2 (Daleckii and Krein).
    """
    check_count("inverse_root(matrix, p)", p)
    _check_square("inverse_root(matrix, p)", matrix)
    values, vectors = linalg.eigh(matrix.detach())
    return _InverseRoot.apply(matrix, vectors, _inverse_roots(values, p), p)


def eigenvectors(matrix: Tensor) -> Tensor:
    r"""Compute the eigenvectors of symmetric matrices, by descending eigenvalues.

    .. math:: dV = V \bigl(F \odot (V^\top dA \, V)\bigr), \qquad F_{ij} = \frac{1}{\lambda_j - \lambda_i}

    Vectors of eigenvalues that are equal, up to rounding, are a choice among many and no function of the matrix:
    they are taken not to turn into one another, :math:`F_{ij} = 0`, so that no derivative is infinite.

    Args:
        matrix: Symmetric, ``[..., n, n]``, in float32 or float64.

    Returns:
        The vectors as columns, ``[..., n, n]``.

    Example:
        >>> from metagrad.optim.kronecker.matrix_roots import eigenvectors
        >>> eigenvectors(torch.tensor([[1.0, 0.0], [0.0, 4.0]])).abs()
        tensor([[0., 1.],
                [1., 0.]])
    """
    _check_square("eigenvectors(matrix)", matrix)
    values, vectors = linalg.eigh(matrix.detach())
    return _Eigenvectors.apply(matrix, vectors.flip(-1), values.flip(-1))[0]


# Outputs are recomputed from the eigenvectors, not saved: torch would detach a saved output by a call, which the
# recording of a step for recomputation must not see.


class _InverseRoot(Function):
    """Gives the root, of which the eigenvectors and eigenvalues are known. Its derivative is its own adjoint."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix, vectors, roots, p):
        return (vectors * roots.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        matrix, vectors, roots = ctx.saved_tensors
        root = _InverseRoot.apply(matrix, vectors, roots, ctx.p)
        inverse = linalg.matrix_power(root, ctx.p)
        right = _symmetric(inverse @ _symmetric(cotangent) @ inverse)
        return -_Solution.apply(root, right, vectors, roots, ctx.p), None, None, None


class _Solution(Function):
    r"""Solves :math:`\sum_k X^k D X^{p-1-k} = C` for D, given the eigenvectors and eigenvalues of X.

    The left side is the derivative of :math:`X^p` along D, so that dD solves the same equation for
    :math:`dC - d^2(X^p)[D, dX]`. Second derivatives of a power are symmetric in all three of their matrices, whence
    the adjoint.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(root, right, vectors, roots, p):
        rows, columns = roots.unsqueeze(-1), roots.unsqueeze(-2)
        divisor = torch.stack([rows**k * columns ** (p - 1 - k) for k in range(p)]).sum(0)
        inner = vectors.mT @ right @ vectors
        # Zero alone has no inverse here: the root of a matrix of zeros.
        quotient = torch.where(divisor == 0, 0, inner / torch.where(divisor == 0, 1, divisor))
        return _from_basis(quotient, vectors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        root, right, vectors, roots = ctx.saved_tensors
        solution = _Solution.apply(root, right, vectors, roots, ctx.p)
        for_right = _Solution.apply(root, _symmetric(cotangent), vectors, roots, ctx.p)
        for_root = -_second_derivative_of_power(root, solution, for_right, ctx.p)
        return for_root, for_right, None, None, None


def _second_derivative_of_power(x: Tensor, u: Tensor, w: Tensor, p: int) -> Tensor:
    """Return the coefficient of ``s t`` in ``(x + s u + t w)**p``, multiplying out to that order."""
    power, by_u, by_w, by_both = x, u, w, torch.zeros_like(x)
    for _ in range(p - 1):
        by_both = by_both @ x + by_u @ w + by_w @ u
        by_u, by_w = by_u @ x + power @ u, by_w @ x + power @ w
        power = power @ x
    return by_both


class _Eigenvectors(Function):
    """Gives eigenvectors and eigenvalues that are known, with derivatives; those of the first contain both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix, vectors, values):
        return vectors.clone(), values.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, for_vectors, for_values):
        vectors, values = _Eigenvectors.apply(*ctx.saved_tensors)
        inner = _inverse_gaps(values) * (vectors.mT @ for_vectors) + torch.diag_embed(for_values)
        return _symmetric(_from_basis(inner, vectors)), None, None


def _inverse_gaps(values: Tensor) -> Tensor:
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    equal = gaps.abs() <= _rounding(values).unsqueeze(-1)
    return torch.where(equal, 0, 1 / torch.where(equal, 1, gaps))


def _inverse_roots(values: Tensor, p: int) -> Tensor:
    kept = torch.maximum(values, _rounding(values))
    return torch.where(kept > 0, torch.where(kept > 0, kept, 1) ** (-1 / p), 0)


def _rounding(values: Tensor) -> Tensor:
    """Return the error of eigenvalues ``[..., n]``, as ``[..., 1]``."""
    return values.shape[-1] * torch.finfo(values.dtype).eps * values.detach().abs().amax(-1, keepdim=True)


def _from_basis(inner: Tensor, vectors: Tensor) -> Tensor:
    return vectors @ inner @ vectors.mT


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _check_square(call: str, matrix: Tensor) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or not matrix.shape[-1]:
        raise ValueError(f"{call}: the matrix must be square and not empty, got shape {tuple(matrix.shape)}.")
    if matrix.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{call}: the matrix must be float32 or float64, got {matrix.dtype}. Use .float() for half precision."
        )
