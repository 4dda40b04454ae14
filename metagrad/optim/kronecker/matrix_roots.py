"""Roots and eigenvectors of symmetric matrices, with derivatives also at equal eigenvalues."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import Function, linalg
from metagrad.core.checks import check_count, refuse


def inverse_root(matrix: Tensor, p: int) -> Tensor:
    r"""Compute the inverse p-th root of symmetric positive definite matrices.

    .. math:: X = A^{-1/p} = V \operatorname{diag}(\lambda^{-1/p}) V^\top

    The derivative does not differentiate the eigenvectors, because their derivative is infinite where two eigenvalues
    are equal. It multiplies each entry of :math:`V^\top dA \, V` by a divided difference of the inverse root:

    .. math:: \frac{x_i - x_j}{\lambda_i - \lambda_j} = - \frac{1}{y_i y_j \sum_k y_i^k y_j^{p-1-k}}, \qquad
              y = \lambda^{1/p} = 1 / x

    The sum has no cancellation, so it is accurate for small eigenvalues in float32. Higher orders
    follow from
    :math:`Y^p = A` and :math:`X = Y^{-1}`, which are differentiated in the same basis.

    An eigenvalue below the rounding error of the largest one, n times the machine precision, is replaced by that
    error. The inverse root of the zero matrix is zero, and so are its derivatives.

    Args:
        matrix: Symmetric and positive semi-definite, ``[..., n, n]``, in float32 or float64.
        p: Degree of the root, at least 1.

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
    values = torch.maximum(values, _rounding(values))
    return _InverseRoot.apply(matrix, vectors, torch.where(values > 0, values, 0) ** (1 / p), p)


def eigenvectors(matrix: Tensor) -> Tensor:
    r"""Compute the eigenvectors of symmetric matrices, by descending eigenvalues.

    .. math:: dV = V \bigl(F \odot (V^\top dA \, V)\bigr), \qquad F_{ij} = \frac{1}{\lambda_j - \lambda_i}

    If eigenvalues are equal up to rounding, their vectors are not a function of the matrix. The derivative
    assumes that such vectors do not rotate into one another, :math:`F_{ij} = 0`, so it is finite.

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


# The backward pass recomputes outputs, because torch detaches saved outputs.


class _InverseRoot(Function):
    """Inverse root, given the eigenvectors and the p-th roots of the eigenvalues. A root of 0 marks a zero matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix, vectors, roots, p):
        return (vectors * torch.where(roots > 0, 1 / roots, 0).unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        matrix, vectors, roots = ctx.saved_tensors
        is_zero, roots = roots == 0, torch.where(roots > 0, roots, 1)
        root = _Root.apply(_in_basis(matrix, vectors), roots, ctx.p)
        inverse = linalg.inv(root).masked_fill(is_zero.unsqueeze(-1), 0)
        right = inverse.mT @ _in_basis(_symmetric(cotangent), vectors) @ inverse
        return -_from_basis(_Solution.apply(root, right, roots, ctx.p), vectors), None, None, None


# The two functions below work in the eigenbasis, where the root is diagonal, so that products by it mix no entries.


class _Root(Function):
    """The p-th root of a diagonal matrix, given its entries."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix, roots, p):
        return torch.diag_embed(roots)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        matrix, roots = ctx.saved_tensors
        root = _Root.apply(matrix, roots, ctx.p)
        return _Solution.apply(root, _symmetric(cotangent), roots, ctx.p), None, None


class _Solution(Function):
    r"""Solution D of :math:`\sum_k Y^k D Y^{p-1-k} = C` for a diagonal Y, given its entries.

    The left side is the derivative of :math:`Y^p` along D, so dD solves the same equation for
    :math:`dC - d^2(Y^p)[D, dY]`. The second derivative of a power is symmetric in its three matrices, which gives the
    adjoint.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(root, right, roots, p):
        rows, columns = roots.unsqueeze(-1), roots.unsqueeze(-2)
        return right / torch.stack([rows**k * columns ** (p - 1 - k) for k in range(p)]).sum(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        root, right, roots = ctx.saved_tensors
        solution = _Solution.apply(root, right, roots, ctx.p)
        for_right = _Solution.apply(root, _symmetric(cotangent), roots, ctx.p)
        for_root = -_second_derivative_of_power(root, solution, for_right, ctx.p)
        return for_root, for_right, None, None


def _second_derivative_of_power(x: Tensor, u: Tensor, w: Tensor, p: int) -> Tensor:
    """Return the coefficient of ``s t`` in ``(x + s u + t w)**p``, multiplying out to that order."""
    power, by_u, by_w, by_both = x, u, w, torch.zeros_like(x)
    for _ in range(p - 1):
        by_both = by_both @ x + by_u @ w + by_w @ u
        by_u, by_w = by_u @ x + power @ u, by_w @ x + power @ w
        power = power @ x
    return by_both


class _Eigenvectors(Function):
    """Identity for given eigenvectors and eigenvalues that adds their derivatives."""

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


def _rounding(values: Tensor) -> Tensor:
    """Return the rounding error ``[..., 1]`` of eigenvalues ``[..., n]``."""
    return values.shape[-1] * torch.finfo(values.dtype).eps * values.detach().abs().amax(-1, keepdim=True)


def _in_basis(matrix: Tensor, vectors: Tensor) -> Tensor:
    return vectors.mT @ matrix @ vectors


def _from_basis(inner: Tensor, vectors: Tensor) -> Tensor:
    return vectors @ inner @ vectors.mT


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _check_square(call: str, matrix: Tensor) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or not matrix.shape[-1]:
        raise ValueError(f"{call}: the matrix must be square and not empty, got shape {tuple(matrix.shape)}.")
    if matrix.dtype not in (torch.float32, torch.float64):
        refuse(f"{call}: the matrix", "float32 or float64", matrix.dtype, TypeError)
