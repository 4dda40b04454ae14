r"""Layer norm with quick second derivatives, and right ones beyond.

It is :math:`y = w \hat x + b` with :math:`\hat x = (x - \mu) r` over the n elements of an example. With R, the
symmetric Jacobian of :math:`\hat x` (written out in ``batch_norm.py``), the gradients of x, w and b are
:math:`R (w g)`, :math:`\sum g \hat x` and :math:`\sum g`, summed over examples. With cotangents u, v and t of these,
the derivatives of the gradients in g, x and w are

.. math:: w R u + v \hat x + t, \qquad R (v g) - \frac{r}{n}
          \Big( \hat x \sum u \, R (w g) + R u \sum w g \hat x + R (w g) \sum u \hat x \Big), \qquad \sum g \, R u,

the last summed over examples. The derivative of torch's own (2.13) is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metagrad.autograd.derivatives.quick.batch_norm import with_graph
from metagrad.autograd.derivatives.quick.plain import is_plain
from metagrad.core.transforms import is_transformed

_aten = torch.ops.aten


class _LayerNorm(torch.autograd.Function):
    """Layer norm over the last dimensions, so many."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor | None, bias: Tensor | None, ndim: int, eps: float
    ) -> Tensor:
        y, mean, r = _aten.native_layer_norm(x, x.shape[-ndim:], weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, r)  # type: ignore[reportArgumentType]
        ctx.how = ndim, eps  # type: ignore[reportAttributeAccessIssue]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, r = ctx.saved_tensors
        return *_gradients(g, x, weight, mean, r, ctx.how, *ctx.needs_input_grad[:3]), None, None


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
        how: tuple[int, float],
        *wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(g, x, weight, mean, r)  # type: ignore[reportArgumentType]
        ctx.set_materialize_grads(False)
        ctx.how = how  # type: ignore[reportAttributeAccessIssue]
        return _gradients(g, x, weight, mean, r, how, *wanted)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None, t: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        g, x, weight, mean, r = ctx.saved_tensors
        ndim, eps = ctx.how
        inner, examples = list(range(x.ndim - ndim, x.ndim)), list(range(x.ndim - ndim))
        if torch.is_grad_enabled():
            mean, r = with_graph(mean, r, x, inner, eps)

        def standardized(cotangent: Tensor) -> Tensor:
            return _gradients(cotangent, x, None, mean, r, ctx.how, True, False, False)[0]  # type: ignore[reportReturnType]

        normalized = (x - mean) * r
        of_g, of_x, of_weight = torch.zeros_like(g), torch.zeros_like(x), None
        if t is not None:
            of_g = of_g + t
        if v is not None:
            of_g, of_x = torch.addcmul(of_g, normalized, v), standardized(v * g)
        if u is not None:
            weighted, direction = g if weight is None else g * weight, standardized(u)
            image = standardized(weighted)
            of_g = of_g + (direction if weight is None else direction * weight)
            of_weight = (g * direction).sum(examples) if examples else g * direction
            inside = normalized * (u * image).sum(inner, keepdim=True)
            inside = torch.addcmul(inside, direction, (weighted * normalized).sum(inner, keepdim=True))
            inside = torch.addcmul(inside, image, (u * normalized).sum(inner, keepdim=True))
            of_x = torch.addcmul(of_x, inside, -r * (r.numel() / x.numel()))
        return of_g, of_x, None if weight is None else of_weight, *[None] * 6


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    r: Tensor,
    how: tuple[int, float],
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Return R (w g), and the sums of g times the normalized x and of g, those asked for."""
    wanted = [of_x, of_weight, of_bias]
    if torch.is_grad_enabled():
        return _Gradients.apply(g, x, weight, mean.detach(), r.detach(), how, *wanted)  # type: ignore[reportReturnType]
    ndim, shape = how[0], x.shape[x.ndim - how[0] :]
    if is_transformed():  # a batch of backward passes
        inner, examples = list(range(x.ndim - ndim, x.ndim)), list(range(x.ndim - ndim))
        normalized, weighted = (x - mean) * r, g if weight is None else g * weight
        along = (weighted * normalized).mean(inner, keepdim=True)
        centred = weighted - weighted.mean(inner, keepdim=True) - normalized * along
        return centred * r, *(part.sum(examples) if examples else part for part in (g * normalized, g))
    bias = x.new_empty(shape) if of_bias else None  # of which the shape counts
    found = _aten.native_layer_norm_backward(g, x, shape, mean, r, weight, bias, wanted)
    return tuple(part if is_wanted else None for part, is_wanted in zip(found, wanted, strict=True))


def _normalized(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    """Take the arguments of ``F.layer_norm``."""
    shape = tuple(normalized_shape)
    if not is_plain(input, weight, bias) or not shape or input.shape[-len(shape) :] != shape or not eps > 0:
        return None
    if not input.numel():
        return None
    if any(part is not None and part.shape != shape for part in (weight, bias)):
        return None
    return _LayerNorm.apply(input, weight, bias, len(shape), eps)  # type: ignore[reportReturnType]


LAYER_NORMS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {F.layer_norm: _normalized}
"""What replaces functions of torch; it returns None for what it leaves to them."""
