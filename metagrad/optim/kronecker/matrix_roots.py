"""Roots and eigenvectors of symmetric matrices, which can be differentiated where eigenvalues are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from metagrad.core._torch import Function, linalg
from metagrad.optim.hyperparameters import check_count
from metagrad.sparse.kernels.tangents import nestable, primal


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
    check_count("inverse_root(matrix, p)", "p", p)
    _check_square("inverse_root(matrix, p)", matrix)
    values, vectors = linalg.eigh(matrix.detach())
    return _InverseRoot.apply(matrix, vectors, _inverse_roots(values, p), p)


def inverse_roots(matrices: Sequence[Tensor], p: Sequence[int]) -> list[Tensor]:
    """Compute the inverse root of each matrix, :func:`inverse_root`; of those of one shape and root, at once.

    Args:
        matrices: Each ``[..., n, n]``.
        p: Which root of each.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for place, (matrix, root) in enumerate(zip(matrices, p, strict=True)):
        alike[matrix.shape, matrix.dtype, matrix.device, root].append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        first = places[0]
        if len(places) == 1:
            found[first] = inverse_root(matrices[first], p[first])
        else:
            stacked = inverse_root(torch.stack([matrices[place] for place in places]), p[first])
            found |= zip(places, stacked.unbind(), strict=True)
    return [found[place] for place in range(len(matrices))]


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
    """Gives the root, of which the eigenvectors and eigenvalues are known."""

    @staticmethod
    def forward(matrix, vectors, roots, p):
        return (vectors * roots.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        return _derivative_of_root(ctx.saved_tensors, cotangent, ctx.p), None, None, None

    @staticmethod
    @nestable
    def jvp(ctx, tangent, *_):
        return _derivative_of_root(map(primal, ctx.saved_tensors), tangent, ctx.p)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        *tensors, p = inputs
        return _InverseRoot.apply(*_all_first(info, in_dims, tensors), p), 0


def _derivative_of_root(saved: Iterable[Tensor], direction: Tensor, p: int) -> Tensor:
    """Apply the derivative, which is its own adjoint."""
    matrix, vectors, roots = saved
    root = _InverseRoot.apply(matrix, vectors, roots, p)
    inverse = linalg.matrix_power(root, p)
    direction = inverse @ _symmetric(direction) @ inverse
    return -_Solution.apply(root, _symmetric(direction), vectors, roots, p)


class _Solution(Function):
    r"""Solves :math:`\sum_k X^k D X^{p-1-k} = C` for D, given the eigenvectors and eigenvalues of X.

    The left side is the derivative of :math:`X^p` along D, so that dD solves the same equation for
    :math:`dC - d^2(X^p)[D, dX]`. Second derivatives of a power are symmetric in all three of their matrices, whence
    the adjoint.
    """

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
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, cotangent):
        root, right, vectors, roots = ctx.saved_tensors
        solution = _Solution.apply(root, right, vectors, roots, ctx.p)
        for_right = _Solution.apply(root, _symmetric(cotangent), vectors, roots, ctx.p)
        for_root = -_second_derivative_of_power(root, solution, for_right, ctx.p)
        return for_root, for_right, None, None, None

    @staticmethod
    @nestable
    def jvp(ctx, root_tangent, right_tangent, *_):
        root, right, vectors, roots = map(primal, ctx.saved_tensors)
        direction = torch.zeros_like(root) if right_tangent is None else right_tangent
        if root_tangent is not None:
            solution = _Solution.apply(root, right, vectors, roots, ctx.p)
            direction = direction - _second_derivative_of_power(root, solution, root_tangent, ctx.p)
        return _Solution.apply(root, _symmetric(direction), vectors, roots, ctx.p)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        *tensors, p = inputs
        return _Solution.apply(*_all_first(info, in_dims, tensors), p), 0


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

    @staticmethod
    def forward(matrix, vectors, values):
        return vectors.clone(), values.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, for_vectors, for_values):
        vectors, values = _Eigenvectors.apply(*ctx.saved_tensors)
        inner = _inverse_gaps(values) * (vectors.mT @ for_vectors) + torch.diag_embed(for_values)
        return _symmetric(_from_basis(inner, vectors)), None, None

    @staticmethod
    @nestable
    def jvp(ctx, tangent, *_):
        vectors, values = _Eigenvectors.apply(*map(primal, ctx.saved_tensors))
        inner = vectors.mT @ _symmetric(tangent) @ vectors
        return vectors @ (_inverse_gaps(values) * inner), torch.diagonal(inner, dim1=-2, dim2=-1)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _Eigenvectors.apply(*_all_first(info, in_dims, inputs)), (0, 0)


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


def _all_first(info, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Move the axis that is mapped over to the front; give one to tensors without."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for dim, tensor in zip(in_dims, tensors, strict=False)
    ]


def _check_square(call: str, matrix: Tensor) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or not matrix.shape[-1]:
        raise ValueError(f"{call}: the matrix must be square and not empty, got shape {tuple(matrix.shape)}.")
    if matrix.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{call}: the matrix must be float32 or float64, got {matrix.dtype}. Use .float() for half precision."
        )
