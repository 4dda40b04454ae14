"""The gradients of pooling in compiled graphs, where those of inductor (torch 2.11 to 2.15) are slow or wrong.

*Max-pooling.* It finds for every entry of the gradient which window it is in, by divisions that a CPU does not
vectorize: for the first block of a Conv4 that takes longer than all else that comes back through the block. Windows
that do not overlap need no search: rows share the gradient of a window, then columns that of a row.

*Averages with* ``ceil_mode``. It divides by the size of a whole window also where the last one reaches beyond the
padded input (pytorch issue 198119), of which the forward pass takes the mean of what is there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_aten = torch.ops.aten
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def max_gradient(
    g: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Take the arguments of ``aten.max_pool2d_with_indices_backward``; windows that overlap are left to torch."""
    (height, span), zero = (kernel_size[0], kernel_size[-1]), {*padding} == {0}
    is_apart = [*stride] in ([], [height], [height, span]) and zero and {*dilation} == {1} and not ceil_mode
    kind = _INTEGERS.get(g.dtype.itemsize)
    if not is_apart or x.device.type != "cpu" or kind is None or not x.is_contiguous():
        return NotImplemented
    rows, columns = g.shape[-2:]
    windows = x[..., : rows * height, : columns * span].unflatten(-1, (-1, span)).unflatten(-3, (-1, height))
    entries = windows.unbind(-1)
    lines = functools.reduce(torch.maximum, entries).unbind(-2)
    of_lines = torch.stack(_shared(g.view(kind), lines), -2)
    found = torch.stack(_shared(of_lines, entries), -1).view(g.dtype)
    found = found.flatten(-2).flatten(-3, -2)
    rest = [0, x.shape[-1] - columns * span, 0, x.shape[-2] - rows * height]
    return _aten.constant_pad_nd(found, rest, 0.0) if any(rest) else found


def _shared(g: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Give g to the largest of several, the first of those that are equal, and 0 to the others; g is of bits."""
    if len(parts) == 1:
        return [g]
    first, second = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    larger = functools.reduce(torch.maximum, second) > functools.reduce(torch.maximum, first)
    bits = larger.to(g.dtype).neg()  # all, or none: a choice would be a branch for every number
    return [*_shared(g & ~bits, first), *_shared(g & bits, second)]


def mean_gradient(
    g: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Tensor:
    """Take the arguments of ``aten.avg_pool2d_backward``, or 3d; windows within the input are left to torch."""
    if not (ceil_mode and count_include_pad) or divisor_override is not None:
        return NotImplemented
    dims = len(kernel_size)
    steps, pads = [*stride] or kernel_size, [*padding] * (dims // len(padding))
    windows = [*zip(kernel_size, steps, pads, x.shape[-dims:], g.shape[-dims:], strict=True)]
    if all((count - 1) * step + width <= size + 2 * pad for width, step, pad, size, count in windows):
        return NotImplemented
    for trailing, (width, step, pad, size, count) in zip(reversed(range(dims)), windows, strict=True):
        left = size + 2 * pad - step * torch.arange(count, device=g.device)
        g = g / left.clamp(max=width).view(-1, *[1] * trailing)
    operation = {2: _aten.avg_pool2d_backward, 3: _aten.avg_pool3d_backward}[dims]
    return operation(g, x, kernel_size, stride, padding, ceil_mode, count_include_pad, 1)
