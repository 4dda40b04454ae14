"""Reductions over the valid entries of padded data. Invalid entries affect no derivative.

A product with a 0/1 mask is not enough: ``0 * nan`` is ``nan`` in the value and in every derivative. Each function
applies :func:`torch.where` to its input, so that arithmetic never sees an invalid entry. A result with the shape of
the input is masked again, which drops cotangents of invalid entries. Shapes never depend on the values of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core.checks import check_type, is_integer, is_list_or_tuple, refuse
from metagrad.core.tree import HALF, is_differentiable


def masked_sum(
    x: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False
) -> Tensor:
    r"""Sum the valid entries.

    .. math:: y = \sum_{i : m_i} x_i

    The gradient is exactly zero at invalid entries, at every order. An operation *before* this one can still make it
    NaN: ``masked_sum(x.log(), mask)`` multiplies zero by ``1 / x``. Replace invalid entries before such an operation:
    ``masked_sum(torch.where(mask, x, 1).log(), mask)``.

    Args:
        x: Values, of any shape and dtype.
        mask: Valid entries, bool. Broadcasts to the shape of ``x``.
        dim: Dimensions to reduce. None reduces all.
        keepdim: True to keep reduced dimensions with size 1.

    Returns:
        The sum. It is 0 if no entry is valid.

    Raises:
        TypeError: ``mask`` is not bool.
        ValueError: ``mask`` does not broadcast to ``x``, or ``dim`` is out of range.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [float("nan"), 4.0]], requires_grad=True)
        >>> y = metagrad.sparse.masked_sum(x, ~x.isnan(), 1)
        >>> y.tolist(), torch.autograd.grad(y.pow(2).sum(), x)[0].tolist()
        ([3.0, 4.0], [[6.0, 6.0], [0.0, 8.0]])
    """
    _check_mask("masked_sum", x, mask)
    _check_dim("masked_sum", x, dim)
    return torch.where(mask, x, 0).sum(dim, keepdim=keepdim)


def masked_mean(
    x: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False
) -> Tensor:
    r"""Average the valid entries.

    .. math:: y = \frac{1}{\max(n, 1)} \sum_{i : m_i} x_i, \qquad n = \#\{i : m_i\}

    Half precision is accumulated in float32, so that neither the sum nor the count overflows. The gradient is
    exactly zero at invalid entries, at every order. :func:`masked_sum` describes earlier operations that make
    it NaN.

    Args:
        x: Values, floating or complex, of any shape.
        mask: Valid entries, bool. Broadcasts to the shape of ``x``.
        dim: Dimensions to reduce. None reduces all.
        keepdim: True to keep reduced dimensions with size 1.

    Returns:
        The mean. It is 0 if no entry is valid.

    Raises:
        TypeError: ``mask`` is not bool, or ``x`` is neither floating nor complex.
        ValueError: ``mask`` does not broadcast to ``x``, or ``dim`` is out of range.

    Example:
        >>> x = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
        >>> metagrad.sparse.masked_mean(x, torch.tensor([[True, True], [False, False]]), 1)
        tensor([2., 0.])
    """
    _check_mask("masked_mean", x, mask)
    _check_dim("masked_mean", x, dim)
    _check_floating("masked_mean", x)
    wide = torch.float32 if x.dtype in HALF else x.dtype
    total = torch.where(mask, x, 0).sum(dim, keepdim=keepdim, dtype=wide)
    count = mask.expand(x.shape).sum(dim, keepdim=keepdim)
    return (total / count.clamp_min(1)).to(x.dtype)


def masked_softmax(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    r"""Compute the softmax of the valid entries.

    .. math:: y_i = m_i \, e^{x_i} \Big/ \sum_{j : m_j} e^{x_j}

    Invalid entries and their gradients are exactly zero, at every order. Cotangents of invalid entries are dropped.

    Args:
        x: Scores, floating, of any shape.
        mask: Valid entries, bool. Broadcasts to the shape of ``x``.
        dim: The dimension along which the result sums to one.

    Returns:
        Weights in the shape of ``x``. They are zero along ``dim`` if no entry is valid.

    Raises:
        TypeError: ``mask`` is not bool, or ``x`` is not floating.
        ValueError: ``mask`` does not broadcast to ``x``, or ``dim`` is out of range.

    Example:
        >>> x = torch.tensor([[0.0, 0.0, float("nan")], [1.0, 2.0, 3.0]])
        >>> metagrad.sparse.masked_softmax(x, torch.tensor([[True, True, False], [False, False, False]]), 1)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    _check_mask("masked_softmax", x, mask)
    _check_dim("masked_softmax", x, dim)
    _check_floating("masked_softmax", x, complex_too=False)
    # The softmax of a row of -inf would be nan. The mask would hide it, but anomaly detection would report it.
    is_empty = ~mask.expand(x.shape).any(dim, keepdim=True)
    scores = torch.where(mask, x, -torch.inf).masked_fill(is_empty, 0)
    return torch.where(mask, scores.softmax(dim), 0)


def mask_gradient(x: Tensor, mask: Tensor) -> Tensor:
    r"""Return ``x`` unchanged, with a derivative only where the mask is True.

    .. math:: y = x, \qquad \partial y / \partial x := \operatorname{diag}(m)

    Masked entries are constants for derivatives of every order. Unlike a gradient hook, this operation works under
    ``vmap``, ``torch.func`` and ``torch.compile``. Forward mode masks tangents as reverse mode masks cotangents, so
    all modes give the same second derivatives. Finite differences give the identity, by design.

    Args:
        x: Values, floating or complex, of any shape. They may be nan or inf.
        mask: Entries with a gradient, bool. Broadcasts to the shape of ``x``.

    Returns:
        A tensor equal to ``x``.

    Raises:
        TypeError: ``mask`` is not bool, or ``x`` is neither floating nor complex.
        ValueError: ``mask`` does not broadcast to ``x``.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = metagrad.sparse.mask_gradient(x, torch.tensor([True, False]))
        >>> y.tolist(), torch.autograd.grad((y**3).sum(), x)[0].tolist()
        ([1.0, 2.0], [3.0, 0.0])
    """
    _check_mask("mask_gradient", x, mask)
    _check_floating("mask_gradient", x)
    return torch.where(mask, x, x.detach())


def _check_mask(call: str, x: Tensor, mask: Tensor) -> None:
    check_type(f"{call}(x, ...)", x, Tensor)
    check_type(f"{call}(x, mask)", mask, Tensor)
    if x.layout != torch.strided:
        refuse(f"{call}(x, mask): x", "a dense tensor, such as x.to_dense()", x.layout, TypeError)
    if mask.dtype != torch.bool:
        refuse(f"{call}(x, mask): mask", "bool, such as mask != 0", mask.dtype, TypeError)
    if mask.device != x.device:
        raise ValueError(f"{call}(x, mask): mask must be on the device of x, {x.device}, got {mask.device}.")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.ndim > x.ndim or any(m not in (1, size) for m, size in sizes):
        raise ValueError(
            f"{call}(x, mask): mask must broadcast to the shape of x, {tuple(x.shape)}, got "
            f"{tuple(mask.shape)}. Insert dimensions of size 1 where it is shared, or expand x."
        )


def _check_dim(call: str, x: Tensor, dim: int | tuple[int, ...] | None) -> None:
    ndim = max(x.ndim, 1)
    if call == "masked_softmax" and not is_integer(dim):
        raise TypeError(f"{call}(x, mask, dim): dim must be an int, got {dim!r}.")
    for d in () if dim is None else dim if is_list_or_tuple(dim) else (dim,):
        if not is_integer(d) or not -ndim <= d < ndim:
            raise ValueError(
                f"{call}(x, mask, dim): dim must be from {-ndim} to {ndim - 1} for x of shape "
                f"{tuple(x.shape)}, got {d}."
            )


def _check_floating(call: str, x: Tensor, *, complex_too: bool = True) -> None:
    if not (is_differentiable(x) if complex_too else x.is_floating_point()):
        kinds = "floating or complex" if complex_too else "floating"
        raise TypeError(
            f"{call}(x, mask): x must be {kinds}, got {x.dtype}. Convert it, for instance x.float()."
        )
