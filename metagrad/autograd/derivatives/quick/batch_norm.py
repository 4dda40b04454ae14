r"""BatchNorm with quick second derivatives.

In training it is :math:`y = w \hat x + b` with :math:`\hat x = (x - \mu) r` over the n elements of a channel. With

.. math:: R g = r \, \Big( g - \frac1n \sum g - \frac{\hat x}{n} \sum g \hat x \Big),

which is symmetric and the Jacobian of :math:`\hat x`, the gradients of x, w and b are :math:`w R g`,
:math:`\sum g \hat x` and :math:`\sum g`. With cotangents u, v and t of these, and :math:`\sigma = \sum u \, R g`, the
derivatives of the gradients are

.. math:: w R u + v \hat x + t, \qquad v R g - \frac{w r}{n}
          \Big( \sigma \hat x + R u \sum g \hat x + R g \sum u \hat x \Big), \qquad \sigma

in g, x and w. Torch (2.13) takes some sixty products of activations for them, more time than a convolution, and their
own derivative is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metagrad.autograd.derivatives.quick.channels import affine, beside
from metagrad.autograd.derivatives.quick.plain import is_plain
from metagrad.core.transforms import is_transformed

_aten = torch.ops.aten


class _BatchNorm(torch.autograd.Function):
    """BatchNorm in training."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Any, eps: float
    ) -> Tensor:
        mean, var, momentum = running
        y, mean, r = _aten.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        ctx.save_for_backward(x, weight, mean, r)  # type: ignore[reportArgumentType]
        ctx.eps = eps  # type: ignore[reportAttributeAccessIssue]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, r = ctx.saved_tensors
        return *_gradients(g, x, weight, mean, r, ctx.eps, *ctx.needs_input_grad[:3]), None, None


class _Gradients(torch.autograd.Function):
    """The gradients of x, w and b; u, v and t are the cotangents of these."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        r: Tensor,
        eps: float,
        *wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(g, x, weight, mean, r)  # type: ignore[reportArgumentType]
        ctx.set_materialize_grads(False)
        ctx.eps = eps  # type: ignore[reportAttributeAccessIssue]
        return _gradients(g, x, weight, mean, r, eps, *wanted)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None, t: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        g, x, weight, mean, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            mean, r = with_graph(mean, r, x, _over(x), ctx.eps)
        zero = torch.zeros_like(r)
        v, t = (zero if part is None else part for part in (v, t))
        image, of_scale = _standardized(g, x, mean, r, ctx.eps)
        of_g, of_x, of_weight = affine(x, v * r, t - v * mean * r), image * beside(v, x), None
        if u is not None:
            direction, along = _standardized(u, x, mean, r, ctx.eps)
            w = torch.ones_like(r) if weight is None else weight
            of_weight = (u * image).sum(_over(x))
            of_g = torch.addcmul(of_g, direction, beside(w, x))
            factor = -w * r * (r.numel() / x.numel())
            scale = factor * of_weight * r
            of_x = of_x + affine(x, scale, -scale * mean)
            of_x = torch.addcmul(of_x, direction, beside(factor * of_scale, x))
            of_x = torch.addcmul(of_x, image, beside(factor * along, x))
        return of_g, of_x, None if weight is None else of_weight, *[None] * 6


def _standardized(g: Tensor, x: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return R g, and the sum of g times the normalized x."""
    image, along, _ = _gradients(g, x, None, mean, r, eps, True, True, False)
    return image, along  # type: ignore[reportReturnType]


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    r: Tensor,
    eps: float,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Return w R g, and the sums of g times the normalized x and of g, those asked for."""
    wanted = [of_x, of_weight, of_bias]
    if torch.is_grad_enabled():
        return _Gradients.apply(g, x, weight, mean.detach(), r.detach(), eps, *wanted)  # type: ignore[reportReturnType]
    if is_transformed():  # a batch of backward passes
        over, n = _over(x), x.numel() // r.numel()
        normalized = (x - beside(mean, x)) * beside(r, x)
        along, total = (g * normalized).sum(over), g.sum(over)
        factor = r if weight is None else weight * r
        inner = g - beside(total / n, x) - normalized * beside(along / n, x)
        return inner * beside(factor, x) if of_x else None, along, total
    found = _aten.native_batch_norm_backward(g, x, weight, None, None, mean, r, True, eps, wanted)
    return tuple(part if is_wanted else None for part, is_wanted in zip(found, wanted, strict=True))


def with_graph(mean: Tensor, r: Tensor, x: Tensor, over: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """Return statistics that were saved, bit for bit, as functions of activations."""
    var, again = torch.var_mean(x, over, correction=0, keepdim=mean.ndim == x.ndim)
    scale = (var + eps).rsqrt()
    return mean + (again - again.detach()), r + (scale - scale.detach())


def _over(x: Tensor) -> list[int]:
    """Return the dimensions that are not channels."""
    return [0, *range(2, x.ndim)]


def _normalized(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Take the arguments of ``F.batch_norm``."""
    if not eps > 0 or not _fit(input, running_mean, running_var, weight, bias):
        return None
    if training:
        if input.numel() <= input.shape[1]:
            return None
        return _BatchNorm.apply(input, weight, bias, (running_mean, running_var, momentum), eps)  # type: ignore[reportReturnType]
    if running_mean is None or running_var is None:
        return None
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else weight * scale
    shift = -running_mean * scale
    return affine(input, scale, shift if bias is None else bias + shift)


def _normalized_instances(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Take the arguments of ``F.instance_norm``: every channel of an example is one of a batch of one."""
    if not use_input_stats or running_mean is not None or not _fit(input, weight, bias) or input.ndim < 3:
        return None
    flat = _normalized(input.reshape(1, -1, *input.shape[2:]), None, None, training=True, eps=eps)
    if flat is None or (weight is None and bias is None):
        return None if flat is None else flat.view_as(input)
    channels = input.new_ones(input.shape[1]) if weight is None else weight
    return affine(flat.view_as(input), channels, torch.zeros_like(channels) if bias is None else bias)


def _fit(x: Any, *of_channels: Any) -> bool:
    """Say whether tensors are plain, activations first, and have a number for each channel; of others torch errs."""
    return (
        is_plain(x, *of_channels)
        and x.ndim > 1
        and all(part is None or part.shape == x.shape[1:2] for part in of_channels)
    )


BATCH_NORMS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.batch_norm: _normalized,
    F.instance_norm: _normalized_instances,
}
"""What replaces functions of torch; it returns None for what it leaves to them."""
