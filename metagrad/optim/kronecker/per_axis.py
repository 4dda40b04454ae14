"""The base class of rules that store matrices for the axes of a parameter, and products along axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from metagrad.core._torch import pytree
from metagrad.core.tree import widened
from metagrad.optim.per_parameter import PerParameter

T = TypeVar("T")


class AxisMatrices(PerParameter):
    """A rule whose slots may be tuples of matrices, one for each axis of a parameter.

    Scalars are treated as vectors of one element.
    """

    batch_ndim: int

    def refuse_elements(self, **values: float | Tensor) -> None:
        """Raise an error for values that are not scalars, since they apply to the matrices of a whole parameter."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                raise ValueError(
                    f"{self.call}.update: {name} belongs to the matrices of a parameter, so it has no elements, got "
                    f"shape {tuple(value.shape)}."
                )

    def axes_of(self, param: Tensor) -> tuple[int, ...]:
        """Return the sizes of the axes that are not tasks."""
        return tuple(param.shape[self.batch_ndim :]) or (1,)

    def in_axes(self, value: Tensor) -> Tensor:
        """Add an axis to a scalar, and convert half precision to the dtype of the matrices."""
        axes = self.axes_of(value)
        return widened(value).reshape((*value.shape[: self.batch_ndim], *axes))

    def identities(self, param: Tensor, sizes: Sequence[int], scale: float = 1.0) -> tuple[Tensor, ...]:
        """Return a multiple of the identity for each axis size, stacked over tasks."""
        batch = param.shape[: self.batch_ndim]
        return tuple(
            scale * torch.eye(n, dtype=param.dtype, device=param.device).repeat(*batch, 1, 1) for n in sizes
        )


def axis_gram(value: Tensor, axis: int, batch_ndim: int = 0) -> Tensor:
    r"""Compute :math:`G_{(i)} G_{(i)}^\top` for the unfolding of a tensor along an axis.

    Args:
        value: ``[*tasks, n_1, ..., n_k]``.
        axis: The axis, counted from 0 after the task axes.
        batch_ndim: The number of leading task axes.

    Returns:
        ``[*tasks, n_axis, n_axis]``.
    """
    rows = value.movedim(batch_ndim + axis, batch_ndim)
    rows = rows.reshape(*rows.shape[: batch_ndim + 1], -1)
    return rows @ rows.mT


def axis_product(value: Tensor, matrix: Tensor, axis: int, batch_ndim: int = 0) -> Tensor:
    r"""Multiply every fibre of a tensor along an axis with a matrix, from the right: :math:`x \mapsto x M`.

    Args:
        value: ``[*tasks, n_1, ..., n_k]``.
        matrix: ``[*tasks, n_axis, n_axis]``.
        axis: The axis, counted from 0 after the task axes.
        batch_ndim: The number of leading task axes.

    Returns:
        A tensor in the shape of ``value``.
    """
    last = value.movedim(batch_ndim + axis, -1)
    product = last.reshape(*last.shape[:batch_ndim], -1, last.shape[-1]) @ matrix
    return product.reshape(last.shape).movedim(-1, batch_ndim + axis)


def products_along(value: Tensor, matrices: Iterable[tuple[int, Tensor]], batch_ndim: int = 0) -> Tensor:
    """Multiply a tensor along several axes, each with its matrix."""
    for axis, matrix in matrices:
        value = axis_product(value, matrix, axis, batch_ndim)
    return value


def chosen(condition: bool | Tensor, compute: Callable[[], T], old: T) -> T:
    """Return the new value if a condition holds, otherwise the old value.

    If the condition is a tensor, both are computed.
    """
    if isinstance(condition, Tensor):
        return pytree.tree_map(partial(torch.where, condition), compute(), old)
    return compute() if condition else old


def blocks_of(sizes: Sequence[int], block_size: int) -> Iterator[tuple[slice, ...]]:
    """Divide axes into nearly equal parts of at most ``block_size``, and yield all blocks."""
    return itertools.product(*[_parts(size, block_size) for size in sizes])


def block_at(value: Tensor, block: tuple[slice, ...]) -> Tensor:
    """Return a block of a tensor, with all leading task axes."""
    return value[(..., *block)]


def joined_blocks(blocks: Sequence[Tensor], sizes: Sequence[int], block_size: int) -> Tensor:
    """Reassemble blocks, in the order of :func:`blocks_of`."""
    parts = list(blocks)
    for axis in reversed(range(len(sizes))):
        num = len(_parts(sizes[axis], block_size))
        dim = axis - len(sizes)
        parts = [
            parts[i] if num == 1 else torch.cat(parts[i : i + num], dim) for i in range(0, len(parts), num)
        ]
    return parts[0]


def _parts(size: int, block_size: int) -> list[slice]:
    num = max(1, -(-size // block_size))
    return [slice(i * size // num, (i + 1) * size // num) for i in range(num)]
