"""Operations between entries and segments: gather, and the sum, mean, maximum and softmax of each segment."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core.checks import check_count, refuse
from metagrad.core.tree import widened
from metagrad.sparse.checks import check_device, check_floating, check_ids, check_index
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.kernels.products import index_rows, index_sum
from metagrad.sparse.pattern import Segments

Index: TypeAlias = Segments | Tensor
"""The segment of each entry: a fixed map, or ids as data, int64 [entries]."""


def gather(x: Tensor, index: Index) -> Tensor:
    r"""Return the row of the segment of each entry.

    .. math:: y_e = x_{s(e)}

    The derivative is :func:`segment_sum`, whose derivative is ``gather``.

    Args:
        x: Floating point, [num_segments, ...].
        index: :class:`Segments`, or ids [entries]. ``torch.vmap`` may batch ids. Their range is checked on the CPU.
            On CUDA torch's kernel checks it, as in ``F.embedding``.

    Returns:
        [entries, ...].

    Raises:
        ValueError: The number of rows of ``x`` is wrong, an id is out of range, or devices differ.
        TypeError: ``x`` is not a dense floating-point tensor, or the ids are not integers.

    Example:
        >>> metagrad.sparse.gather(torch.tensor([1.0, 10.0]), torch.tensor([1, 0, 1]))
        tensor([10.,  1., 10.])
    """
    call = "gather(x, index)"
    check_floating(call, "x", x)
    if not x.ndim:
        raise ValueError(f"{call}: x must have a row for each segment, got a scalar.")
    if isinstance(index, Segments) and len(x) != index.num_segments:
        refuse(f"{call}: x", f"a row for each of {index.num_segments} segments", len(x))
    return spread(x, _checked(call, index, x, len(x)))


def segment_sum(values: Tensor, index: Index, num_segments: int | None = None) -> Tensor:
    r"""Add the entries of each segment.

    .. math:: y_s = \sum_{e : s(e) = s} v_e

    The derivative is :func:`gather`, whose derivative is ``segment_sum``. With :class:`Segments` the sum is several
    times faster than with ids, and deterministic on CUDA.

    Args:
        values: Floating point, [entries, ...].
        index: :class:`Segments`, or ids [entries], as in :func:`gather`.
        num_segments: Number of segments. It is required with ids, and not allowed with Segments.

    Returns:
        [num_segments, ...]. A segment without entries gives 0.

    Raises:
        ValueError: The number of values is wrong, an id is out of range, or devices differ. It is also raised if
            ``num_segments`` is missing with ids, or given with Segments.
        TypeError: ``values`` is not a dense floating-point tensor, or the ids are not integers.

    Example:
        >>> metagrad.sparse.segment_sum(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 2]), 3)
        tensor([2., 0., 4.])
    """
    index, num = _check_entries("segment_sum(values, index, num_segments)", values, index, num_segments)
    return total(values, index, num)


def segment_mean(values: Tensor, index: Index, num_segments: int | None = None) -> Tensor:
    r"""Average the entries of each segment.

    .. math:: y_s = \frac{1}{\max(n_s, 1)} \sum_{e : s(e) = s} v_e, \qquad n_s = \#\{e : s(e) = s\}

    Args:
        values: Floating point, [entries, ...].
        index: :class:`Segments`, or ids [entries], as in :func:`gather`.
        num_segments: Number of segments. It is required with ids, and not allowed with Segments.

    Returns:
        [num_segments, ...]. A segment without entries gives 0.

    Raises:
        ValueError: As :func:`segment_sum`.
        TypeError: As :func:`segment_sum`.

    Example:
        >>> metagrad.sparse.segment_mean(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 2]), 3)
        tensor([2., 0., 2.])
    """
    index, num = _check_entries("segment_mean(values, index, num_segments)", values, index, num_segments)
    counts = index.counts if isinstance(index, Segments) else index_sum(torch.ones_like(index), index, num)
    sums = total(widened(values), index, num)
    return (sums / counts.clamp(min=1).view(num, *[1] * (values.ndim - 1))).to(values.dtype)


def segment_max(values: Tensor, index: Index, num_segments: int | None = None) -> Tensor:
    r"""Take the largest entry of each segment.

    .. math:: y_s = \max_{e : s(e) = s} v_e, \qquad
        \frac{\partial y_s}{\partial v_e} = \frac{[v_e = y_s]}{\#\{e' : v_{e'} = y_s\}}

    The largest entry receives the gradient. Equal largest entries share it evenly, as in ``torch.amax``. The
    second derivative is zero.

    Args:
        values: Floating point, [entries, ...]. The maximum is taken elementwise.
        index: :class:`Segments`, or ids [entries], as in :func:`gather`.
        num_segments: Number of segments. It is required with ids, and not allowed with Segments.

    Returns:
        [num_segments, ...]. A segment without entries gives 0, because minus infinity would give NaN in a product.

    Raises:
        ValueError: As :func:`segment_sum`.
        TypeError: As :func:`segment_sum`.

    Example:
        >>> values = torch.tensor([5.0, -2.0, 5.0, 1.0], requires_grad=True)
        >>> top = metagrad.sparse.segment_max(values, torch.tensor([2, 0, 2, 2]), 3)
        >>> top.tolist(), torch.autograd.grad(top.sum(), values)[0].tolist()
        ([-2.0, 0.0, 5.0], [0.5, 1.0, 0.5, 0.0])
    """
    index, num = _check_entries("segment_max(values, index, num_segments)", values, index, num_segments)
    dtype, values = values.dtype, widened(values)
    top = largest(values, index, num)
    is_top = values == spread(top, index)
    ties = total(is_top.to(values.dtype), index, num)
    shared = total(torch.where(is_top, values, 0) / spread(ties, index), index, num)
    # Shares of equal entries may not add up to the entry exactly, so they give only the derivative. Infinite values
    # are an exception, since their difference would be NaN.
    return torch.where(top.isfinite(), top + (shared - shared.detach()), shared).to(dtype)


def segment_softmax(values: Tensor, index: Index, num_segments: int | None = None) -> Tensor:
    r"""Compute the softmax of the entries of each segment.

    .. math:: y_e = e^{v_e} \Big/ \sum_{e' : s(e') = s(e)} e^{v_{e'}}

    The largest entry of a segment is subtracted first, so no exponential overflows.

    Args:
        values: Scores, floating point, [entries, ...]. Minus infinity gives a weight of 0.
        index: :class:`Segments`, or ids [entries], as in :func:`gather`.
        num_segments: Number of segments. It is required with ids, and not allowed with Segments.

    Returns:
        Weights in the shape of ``values``. They sum to one over each segment. If all scores of a segment are minus
        infinity, weights and gradients are 0, while ``torch.softmax`` gives NaN.

    Raises:
        ValueError: As :func:`segment_sum`.
        TypeError: As :func:`segment_sum`.

    Example:
        >>> scores = torch.tensor([1.0, 2.0, 2.0, 2.0])
        >>> metagrad.sparse.segment_softmax(scores, torch.tensor([0, 1, 1, 3]), 4)
        tensor([1.0000, 0.5000, 0.5000, 1.0000])
    """
    index, num = _check_entries("segment_softmax(values, index, num_segments)", values, index, num_segments)
    weights, sums = exponentials(widened(values), index, num)[1:]
    return (weights / spread(sums, index)).to(values.dtype)


def spread(x: Tensor, index: Index) -> Tensor:
    """Run :func:`gather` without checks."""
    return rules.gather(x, index) if isinstance(index, Segments) else index_rows(x, index)


def total(values: Tensor, index: Index, num: int) -> Tensor:
    """Run :func:`segment_sum` without checks."""
    if isinstance(index, Segments):
        return rules.segment_sum(values, index)
    return index_sum(values, index, num).to(values.dtype)


def largest(values: Tensor, index: Index, num: int) -> Tensor:
    """Return the maximum of each segment as a constant. A segment without entries gives 0."""
    values = values.detach()
    ids = index.ids if isinstance(index, Segments) else index
    ids = ids.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    empty = values.new_zeros(num, *values.shape[1:])
    return empty.scatter_reduce(0, ids, values, "amax", include_self=False)


def exponentials(values: Tensor, index: Index, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores minus their maximum, their exponentials, and the sums of the exponentials (1 without entries)."""
    top = largest(values, index, num)
    shifted = values - spread(top.masked_fill(top == -math.inf, 0), index)
    weights = shifted.exp()
    sums = total(weights, index, num)
    return shifted, weights, sums.masked_fill(sums == 0, 1)


def _check_entries(call: str, values: Tensor, index: Index, num_segments: int | None) -> tuple[Index, int]:
    """Return the index and the number of segments. Raise an error unless values have a row for each entry."""
    check_floating(call, "values", values)
    if isinstance(index, Segments):
        if num_segments is not None:
            raise ValueError(f"{call}: index is a Segments, which knows num_segments: leave it out.")
        num_segments = index.num_segments
    elif num_segments is None:
        raise ValueError(f"{call}: index holds ids, so num_segments must be given.")
    check_count(call, num_segments, 0)
    index = _checked(call, index, values, num_segments)
    entries = len(index)
    if not values.ndim or len(values) != entries:
        refuse(f"{call}: values", f"[{entries}, ...], as index has entries", list(values.shape))
    return index, num_segments


def _checked(call: str, index: Index, x: Tensor, num_segments: int) -> Index:
    ids = index.ids if isinstance(index, Segments) else index
    check_ids(call, "index", ids)
    check_device(call, "values and index", x, ids)
    if isinstance(index, Segments):
        return index
    if ids.device.type == "cpu" and not _torch.functorch_is_active():
        check_index(call, "index", ids, num_segments)
    return ids.long()
