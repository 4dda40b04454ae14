"""Kernels that round differently, as on another CPU.

With ``METAGRAD_TEST_NOISE=1`` the results of matrix products, convolutions and sums on a CPU are multiplied by
1 + 4 ulp of a pseudo-random sign. The sign of an entry depends only on its mantissa and position. So
results are deterministic, and the factor of a power of two is exact. A test that fails here depends on rounding.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

aten = torch.ops.aten


def noisy(result: Tensor) -> Tensor:
    """Return a result whose entries are changed by 4 units in the last place."""
    if result.dtype not in (torch.float32, torch.float64) or not result.numel():
        return result
    integer, width = (torch.int32, 23) if result.dtype == torch.float32 else (torch.int64, 52)
    mantissas = result.contiguous().view(integer) & ((1 << width) - 1)
    positions = torch.arange(result.numel()).view(result.shape)
    hashed = (mantissas.long() ^ positions) * 2654435761 % 1013
    signs = (hashed % 2 * 2 - 1).to(result.dtype)
    return result * (1 + 4 * torch.finfo(result.dtype).eps * signs)


def empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


def mm(a: Tensor, b: Tensor) -> Tensor:
    result = aten.mm.out(a, b, out=empty(a))
    return noisy(result) if a.shape[1] > 1 else result  # every kernel rounds a product of two numbers alike


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return noisy(aten.bmm.out(a, b, out=empty(a)))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    return noisy(aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=empty(a)))


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    return noisy(aten.baddbmm.out(bias, a, b, beta=beta, alpha=alpha, out=empty(a)))


def sum_dim(a: Tensor, dim=None, keepdim=False, *, dtype=None) -> Tensor:
    kind = dtype or (a.dtype if a.is_floating_point() or a.is_complex() else torch.int64)
    result = aten.sum.IntList_out(a, dim, keepdim, dtype=dtype, out=a.new_empty(0, dtype=kind))
    return noisy(result) if result.numel() < a.numel() else result  # there is nothing to round


def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> Tensor:
    flags = (False, False, True, True)  # benchmark, deterministic, cudnn, TF32
    arguments = (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *flags)
    return noisy(aten._convolution(*arguments))


def install() -> torch.library.Library:
    """Replace torch's CPU kernels until the returned library is dropped."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {"mm": mm, "bmm": bmm, "addmm": addmm, "baddbmm": baddbmm}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is overridden, which is the purpose
        for name, kernel in {**kernels, "sum.dim_IntList": sum_dim, "convolution": convolution}.items():
            library.impl(name, kernel, "CPU")
    return library
