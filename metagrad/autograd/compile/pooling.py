"""The gradient of max-pooling in compiled graphs, for windows that do not overlap.

Inductor (torch 2.13) finds for every entry of the gradient which window it is in, by divisions that a CPU does not
vectorize: for the first block of a Conv4 that takes longer than all else that comes back through the block. Windows
that do not overlap need no search: rows share the gradient of a window, then columns that of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_aten = torch.ops.aten
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def pooling_gradient(
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
