"""Max-pooling of windows that do not overlap, on a CPU.

For activations that are contiguous torch (2.13) takes the windows one number at a time, which is three times as long
as a convolution of 64 channels before them takes. Here all windows are compared at once, position by position of a
window, and the derivatives are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metagrad.autograd.derivatives.quick.plain import QuickFunction, is_plain

_aten = torch.ops.aten

_SMALL = 2**16  # numbers, of which torch takes the maxima in less time than a few more calls take


class _MaxPool(QuickFunction):
    """The maxima of windows ``[h, w]`` of images ``[..., H, W]``."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, window: tuple[int, int]) -> Tensor:
        y, found = _maxima(x, window)
        ctx.save_for_backward(found)
        ctx.shape, ctx.window = x.shape, window  # type: ignore[reportAttributeAccessIssue]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[reportIncompatibleMethodOverride]
        (found,) = ctx.saved_tensors
        like = torch.empty(1, dtype=g.dtype, device=g.device).expand(ctx.shape)  # of which the shape counts
        window = list(ctx.window)
        return _aten.max_pool2d_with_indices_backward(
            g, like, window, window, [0, 0], [1, 1], False, _corners(found, like, window) + found
        ), None


def _maxima(x: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the maxima, and how far in memory each is from the corner of its window."""
    (height, span), width = window, x.shape[-1]
    rows, columns = (size - size % part for size, part in zip(x.shape[-2:], window, strict=True))
    kind = torch.uint8 if (height - 1) * width + span <= 256 else torch.int32

    def best(places: list[int]) -> tuple[Tensor, Tensor | int]:
        """Return the larger of the best of two halves; of equal ones the first, as torch does."""
        if len(places) == 1:
            place = places[0]
            return x[..., place // width : rows : height, place % width : columns : span], place
        (first, i), (second, j) = best(places[: len(places) // 2]), best(places[len(places) // 2 :])
        is_second = (second > first).to(kind).neg_()  # all bits or none, by which choosing is quickest
        return torch.maximum(first, second), i ^ (is_second & (i ^ j))

    maxima, found = best([i * width + j for i in range(height) for j in range(span)])
    assert isinstance(found, Tensor)
    if maxima.sum().isnan():  # of several in a window torch takes the last
        maxima, places = _aten.max_pool2d_with_indices(x, [height, span], [height, span])
        found = places - _corners(places, x, [height, span])
    return maxima, found


def _corners(maxima: Tensor, x: Tensor, window: Sequence[int]) -> Tensor:
    """Return where in an image the windows begin."""
    (rows, columns), (height, span) = maxima.shape[-2:], window
    return torch.arange(rows).unsqueeze(1) * (height * x.shape[-1]) + torch.arange(columns) * span


def _pooled(
    input: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Take the arguments of ``F.max_pool2d``."""
    window = _pair(kernel_size)
    given = [_pair(size) for size in (window if stride in (None, []) else stride, padding, dilation)]
    if (
        given != [window, (0, 0), (1, 1)]
        or ceil_mode
        or return_indices
        or not is_plain(input)
        or input.device.type != "cpu"
        or not input.is_contiguous()
        or input.ndim not in (3, 4)
        or input.numel() < _SMALL
        or math.prod(window) == 1
        or any(size < part for size, part in zip(input.shape[-2:], window, strict=True))
    ):
        return None
    return _MaxPool.apply(input, window)  # type: ignore[reportReturnType]


POOLING: dict[Callable[..., Any], Callable[..., Tensor | None]] = {F.max_pool2d: _pooled}
"""What replaces functions of torch; it returns None for what it leaves to them."""


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
