r"""Batch, layer and instance norm with quick second derivatives, and right ones beyond.

They are :math:`y = w \hat x + b` with :math:`\hat x = (x - \mu) r` over groups of n elements: the channels of a
batch, or the examples. The Jacobian of :math:`\hat x` is

.. math:: R g = r \, \Big( g - \frac1n \sum g - \frac{\hat x}{n} \sum g \hat x \Big),

which is symmetric, so the gradients of x, w and b are :math:`R(w g)`, and the sums of :math:`g \hat x` and g. With
cotangents u, v and t of these, the derivatives of the gradients in g, x and w are

.. math:: w R u + v \hat x + t, \qquad R(v g) - \frac{r}{n}
          \Big( \hat x \sum u \, R(w g) + R u \sum w g \hat x + R(w g) \sum u \hat x \Big), \qquad g \, R u,

the last summed over what shares a weight. A weight that is the same in a group comes out of R, and since R is
symmetric, the sum of :math:`u \, R g` is that of :math:`g \, R u`: then all three are combinations of x, R u and R g.
Torch (2.13) takes some sixty products of activations for those of batch
norm, more time than a convolution, and their own derivatives are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metagrad.autograd.derivatives.quick.channels import affine, beside
from metagrad.autograd.derivatives.quick.plain import QuickFunction, is_plain
from metagrad.core.tape import is_transformed
from metagrad.core.tree import widened

_aten = torch.ops.aten

Found: TypeAlias = "tuple[Tensor | None, ...]"


class ByChannel(NamedTuple):
    """Groups are channels ``[N, C, ...]``, with a weight each."""

    eps: float
    running: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, and mean and r beside x."""
        mean, var, momentum = self.running
        if _is_slow_in_torch(x):
            return self._forward(x, weight, bias)
        y, mean, r = _aten.native_batch_norm(x, weight, bias, mean, var, True, momentum, self.eps)
        return y, beside(mean, x)[None], beside(r, x)[None]

    def _forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        inside, n = self.groups(x), x.numel() // x.shape[1]
        mean = x.mean(inside, keepdim=True)
        var = (x - mean).square_().mean(inside, keepdim=True)
        running_mean, running_var, momentum = self.running
        for running, current in ((running_mean, mean), (running_var, var * (n / (n - 1)))):
            if running is not None:
                running.lerp_(current.flatten(), momentum)
        statistics = mean.flatten(), var.flatten()
        y = _aten.native_batch_norm(x, weight, bias, *statistics, False, 0.0, self.eps)[0]
        return y, mean, (var + self.eps).rsqrt_()

    def gradients(
        self, g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, r: Tensor, wanted: list[bool]
    ) -> Found:
        """Return the gradients of x, w and b, those wanted, by torch's kernel."""
        statistics = mean.reshape(-1), r.reshape(-1)
        weight = None if weight is None else weight.contiguous()  # torch (2.13) reads it so anyway
        return _aten.native_batch_norm_backward(g, x, weight, None, None, *statistics, True, self.eps, wanted)

    def groups(self, x: Tensor) -> list[int]:
        """Return the dimensions of a group."""
        return [0, *range(2, x.ndim)]

    weighted_alike = groups
    """The dimensions along which the weights are the same."""

    def beside(self, weight: Tensor, x: Tensor) -> Tensor:
        """Give weights the dimensions of x."""
        return beside(weight, x)

    def second(
        self,
        cotangents: Found,
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        r: Tensor,
    ) -> Found:
        """Return the derivatives of the gradients in g, x and w, all of them combinations of x, R u and R g."""
        u, *others = cotangents
        m, s = mean.flatten(), r.flatten()
        v, t = (torch.zeros_like(s) if part is None else part for part in others)
        w = torch.ones_like(s) if weight is None else weight

        def image(part: Tensor) -> tuple[Tensor, Tensor]:
            """Return R of a part, and the sum of its product with the normalized x."""
            found, along, _ = _gradients(part, x, None, mean, r, self, True, True, False)
            assert found is not None
            assert along is not None
            return found, along

        straight, along = image(g)
        shift, factor = t - v * s * m, v * s
        if u is None:
            return _combined(shift, (x, factor)), _combined(torch.zeros_like(s), (straight, v)), None
        direction, of_u = image(u)
        of_weight = (g * direction).sum(self.groups(x))
        bent = -w * s * (s.numel() / x.numel())
        normal = bent * of_weight * s
        of_x = _combined(-normal * m, (x, normal), (direction, bent * along), (straight, v + bent * of_u))
        return _combined(shift, (x, factor), (direction, w)), of_x, None if weight is None else of_weight


class ByExample(NamedTuple):
    """Groups are the last dimensions, so many, whose weights are those of all groups."""

    eps: float
    ndim: int

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, and mean and r beside x."""
        return _aten.native_layer_norm(x, x.shape[-self.ndim :], weight, bias, self.eps)

    def gradients(
        self, g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, r: Tensor, wanted: list[bool]
    ) -> Found:
        """Return the gradients of x, w and b, those wanted, by torch's kernel."""
        shape = x.shape[-self.ndim :]
        bias = x.new_empty(shape) if wanted[2] else None  # of which the shape counts
        return _aten.native_layer_norm_backward(g, x, shape, mean, r, weight, bias, wanted)

    def groups(self, x: Tensor) -> list[int]:
        """Return the dimensions of a group."""
        return list(range(x.ndim - self.ndim, x.ndim))

    def weighted_alike(self, x: Tensor) -> list[int]:
        """Return the dimensions along which the weights are the same."""
        return list(range(x.ndim - self.ndim))

    def beside(self, weight: Tensor, x: Tensor) -> Tensor:
        """Give weights the dimensions of x."""
        return weight

    def second(
        self,
        cotangents: Found,
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        r: Tensor,
    ) -> Found:
        """Return the derivatives of the gradients in g, x and w."""
        u, v, t = cotangents
        normalized, inside, alike = (x - mean) * r, self.groups(x), self.weighted_alike(x)

        def image(part: Tensor) -> Tensor:
            found = _gradients(part, x, None, mean, r, self, True, False, False)[0]
            assert found is not None
            return found

        def total(part: Tensor) -> Tensor:
            return part.sum(inside, keepdim=True)

        of_g = of_x = of_weight = None
        if v is not None:
            of_g, of_x = normalized * v, image(g * v)
        if t is not None:
            of_g = t.expand_as(g) if of_g is None else of_g + t
        if u is not None:
            direction, weighted = image(u), g if weight is None else g * weight
            moved = direction if weight is None else direction * weight
            of_g = moved if of_g is None else of_g + moved
            along = g * direction
            if weight is not None:
                of_weight = along.sum(alike) if alike else along
            bent = normalized * total(along if weight is None else along * weight)
            bent = torch.addcmul(bent, direction, total(weighted * normalized))
            bent = torch.addcmul(bent, image(weighted), total(u * normalized))
            factor = -r * (r.numel() / x.numel())
            of_x = bent * factor if of_x is None else torch.addcmul(of_x, bent, factor)
        return of_g, of_x, of_weight


class _Norm(QuickFunction):
    """A norm by the statistics of its groups."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: ByChannel | ByExample
    ) -> Tensor:
        y, mean, r = kind.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, mean, r)  # type: ignore[reportArgumentType]
        ctx.kind = kind  # type: ignore[reportAttributeAccessIssue]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Found:  # type: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, r = ctx.saved_tensors
        return *_gradients(g, x, weight, mean, r, ctx.kind, *ctx.needs_input_grad[:3]), None


class _Gradients(QuickFunction):
    """The gradients of x, w and b; u, v and t are the cotangents of these."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        r: Tensor,
        kind: ByChannel | ByExample,
        *wanted: bool,
    ) -> Found:
        ctx.save_for_backward(g, x, weight, mean, r)  # type: ignore[reportArgumentType]
        ctx.set_materialize_grads(False)
        ctx.kind = kind  # type: ignore[reportAttributeAccessIssue]
        return _gradients(g, x, weight, mean, r, kind, *wanted)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None, t: Tensor | None) -> Found:  # type: ignore[reportIncompatibleMethodOverride]
        g, x, weight, mean, r = ctx.saved_tensors
        if torch.is_grad_enabled():  # the numbers that were saved, bit for bit, as functions of x
            var, again = torch.var_mean(x, ctx.kind.groups(x), correction=0, keepdim=True)
            scale = (var + ctx.kind.eps).rsqrt()
            mean, r = mean + (again - again.detach()), r + (scale - scale.detach())
        return *ctx.kind.second((u, v, t), g, x, weight, mean, r), *[None] * 6


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    r: Tensor,
    kind: ByChannel | ByExample,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> Found:
    """Return R (w g), and the sums of g times the normalized x and of g, those asked for."""
    wanted = [of_x, of_weight, of_bias]
    if torch.is_grad_enabled():
        return _Gradients.apply(g, x, weight, mean.detach(), r.detach(), kind, *wanted)  # type: ignore[reportReturnType]
    if is_transformed():  # a batch of backward passes
        inside, alike = kind.groups(x), kind.weighted_alike(x)
        normalized, weighted = (x - mean) * r, g if weight is None else g * kind.beside(weight, x)
        along = (weighted * normalized).mean(inside, keepdim=True)
        image = (weighted - weighted.mean(inside, keepdim=True) - normalized * along) * r
        found = image, *(part.sum(alike) if alike else part for part in (g * normalized, g))
    else:
        found = kind.gradients(g, x, weight, mean, r, wanted)
    return tuple(part if is_wanted else None for part, is_wanted in zip(found, wanted, strict=True))


def _combined(shift: Tensor, *terms: tuple[Tensor, Tensor]) -> Tensor:
    """Return a sum of activations, each with a factor for every channel, and of a number for every channel."""
    (first, factor), *others = terms
    total = affine(first, factor, shift)
    for part, factor in others:
        total = torch.addcmul(total, part, beside(factor, part))
    return total


def _normalized_batch(
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
        running = [part for part in (running_mean, running_var) if part is not None]
        is_single = input.numel() <= input.shape[1]
        if is_single or len(running) == 1 or any(part.requires_grad for part in running):
            return None  # of which torch errs
        kind = ByChannel(eps, (running_mean, running_var, momentum))
        return _Norm.apply(input, weight, bias, kind)  # type: ignore[reportReturnType]
    if running_mean is None or running_var is None:
        return None
    scale = (widened(running_var) + eps).rsqrt()
    scale = scale if weight is None else weight * scale
    shift = -running_mean * scale
    return affine(widened(input), scale, shift if bias is None else bias + shift).to(input.dtype)


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
    is_left = not use_input_stats or running_mean is not None or running_var is not None or not eps > 0
    if is_left or not _fit(input, weight, bias) or math.prod(input.shape[2:]) <= 1 or not len(input):
        return None
    flat = input.reshape(1, -1, *input.shape[2:])
    normalized = _Norm.apply(flat, None, None, ByChannel(eps)).view_as(input)  # type: ignore[reportOptionalMemberAccess]
    if weight is None and bias is None:
        return normalized
    channels = input.new_ones(input.shape[1]) if weight is None else weight
    return affine(normalized, channels, torch.zeros_like(channels) if bias is None else bias)


def _normalized_examples(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    """Take the arguments of ``F.layer_norm``."""
    shape = tuple(normalized_shape)
    if not eps > 0 or not shape or not is_plain(input, weight, bias) or not input.numel():
        return None
    sizes = [input.shape[-len(shape) :], *(part.shape for part in (weight, bias) if part is not None)]
    if any(size != shape for size in sizes):
        return None
    return _Norm.apply(input, weight, bias, ByExample(eps, len(shape)))  # type: ignore[reportReturnType]


def _is_slow_in_torch(x: Tensor) -> bool:
    """Say whether torch (2.13) takes the statistics of a batch one number at a time, as it does on a CPU."""
    is_wide = x.dtype in (torch.float32, torch.float64)
    return is_wide and x.device.type == "cpu" and x.ndim > 2 and x.is_contiguous()


def _fit(x: Any, *of_channels: Any) -> bool:
    """Say whether tensors are plain, activations first, and have a number for each channel; of others torch errs."""
    return (
        is_plain(x, *of_channels)
        and x.ndim > 1
        and all(part is None or part.shape == x.shape[1:2] for part in of_channels)
    )


NORMS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.batch_norm: _normalized_batch,
    F.instance_norm: _normalized_instances,
    F.layer_norm: _normalized_examples,
}
"""What replaces functions of torch; it returns None for what it leaves to them."""
