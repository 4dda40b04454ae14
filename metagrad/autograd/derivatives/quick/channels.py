r"""A scale and a shift of each channel, as in BatchNorm in evaluation, with quick second derivatives.

With the gradient g of :math:`y = s \, x + t` its gradients are

.. math:: \nabla_x = s \, g, \qquad \nabla_s = \textstyle\sum g x, \qquad \nabla_t = \sum g,

and with cotangents u, v and r of these, the derivatives of the gradients are :math:`s u + v x + r` in g, :math:`v g`
in x and :math:`\sum g u` in s: again such operations, where torch (2.13) takes ten products of activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metagrad.autograd.derivatives.quick.plain import QuickFunction
from metagrad.core.tape import is_transformed

_aten = torch.ops.aten


class _Affine(QuickFunction):
    """s x + t."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return affine(x, scale, shift)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        x, scale = ctx.saved_tensors
        return _gradients(g, x, scale, *ctx.needs_input_grad)


class _Gradients(QuickFunction):
    """The gradients of <s x + t, g> in x, s and t; u, v and r are the cotangents of these."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, g: Tensor, x: Tensor, scale: Tensor, *wanted: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(g, x, scale)
        ctx.set_materialize_grads(False)
        return _gradients(g, x, scale, *wanted)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None, r: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        g, x, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_g = of_x = of_scale = None
        if v is not None or r is not None:
            v, r = (torch.zeros_like(scale) if part is None else part for part in (v, r))
            of_g = affine(x, v, r) if needs[0] else None
            of_x = g * beside(v, g) if needs[1] else None
        if u is not None:
            if needs[0]:
                factor = beside(scale, u)
                of_g = u * factor if of_g is None else torch.addcmul(of_g, u, factor)
            of_scale = _gradients(g, u, scale, False, True, False)[1] if needs[2] else None
        return of_g, of_x, of_scale, *[None] * 3


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return s x + t for activations ``[N, C, ...]`` and numbers ``[C]``."""
    if torch.is_grad_enabled():
        return _Affine.apply(x, scale, shift)  # type: ignore[reportReturnType]
    if is_transformed():  # a batch of backward passes
        return x * beside(scale, x) + beside(shift, x)
    return _aten.native_batch_norm(x, scale, shift, *_neutral(scale), False, 0.0, 0.0)[0]


def _gradients(
    g: Tensor, x: Tensor, scale: Tensor, of_x: bool, of_scale: bool, of_shift: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of <s x + t, g> in x, s and t, those asked for."""
    wanted = [of_x, of_scale, of_shift]
    if torch.is_grad_enabled():
        return _Gradients.apply(g, x, scale, *wanted)  # type: ignore[reportReturnType]
    if is_transformed():
        over = [0, *range(2, x.ndim)]
        return (
            g * beside(scale, g) if of_x else None,
            (g * x).sum(over) if of_scale else None,
            g.sum(over) if of_shift else None,
        )
    mean, variance = _neutral(scale)
    scale = scale.contiguous()  # torch (2.13) reads it so, whatever its strides
    found = _aten.native_batch_norm_backward(g, x, scale, mean, variance, None, None, False, 0.0, wanted)
    return tuple(part if is_wanted else None for part, is_wanted in zip(found, wanted, strict=True))


def _neutral(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean and a variance that change nothing."""
    return torch.zeros_like(scale), torch.ones_like(scale)


def beside(channels: Tensor, x: Tensor) -> Tensor:
    """Give numbers of channels the dimensions of activations."""
    return channels.reshape(-1, *[1] * (x.ndim - 2))
