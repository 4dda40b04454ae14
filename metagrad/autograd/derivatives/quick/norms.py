r"""Batch, layer and instance norm with quick second derivatives, and right ones beyond.

They are :math:`y = w \hat x + b` with :math:`\hat x = (x - \mu) r` over groups of n elements: the channels of a
batch, or the examples. The Jacobian of :math:`\hat x` is

.. math:: R g = r \, \Big( g - \frac1n \sum g - \frac{\hat x}{n} \sum g \hat x \Big),

which is symmetric, so the gradients of x, w and b are :math:`R(w g)`, and the sums of :math:`g \hat x` and g. With
cotangents u, v and t of these, the derivatives of the gradients in g, x and w are

.. math:: w R u + v \hat x + t, \qquad R(v g) - \frac{r}{n}
          \Big( \hat x \sum u \, R(w g) + R u \sum w g \hat x + R(w g) \sum u \hat x \Big), \qquad g \, R u,

the last summed over what shares a weight. Torch (2.13) takes some sixty products of activations for those of batch
norm, more time than a convolution, and their own derivatives are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metagrad.autograd.derivatives.quick.channels import affine, beside
from metagrad.autograd.derivatives.quick.plain import is_plain
from metagrad.core.transforms import is_transformed

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
        return _aten.native_batch_norm_backward(g, x, weight, None, None, *statistics, True, self.eps, wanted)

    def groups(self, x: Tensor) -> list[int]:
        """Return the dimensions of a group."""
        return [0, *range(2, x.ndim)]

    weighted_alike = groups
    """The dimensions along which the weights are the same."""

    def beside(self, weight: Tensor, x: Tensor) -> Tensor:
        """Give weights the dimensions of x."""
        return beside(weight, x)

    def normalized(self, x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        """Return the normalized x."""
        return affine(x, r.reshape(-1), (-mean * r).reshape(-1))


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

    def normalized(self, x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        """Return the normalized x."""
        return (x - mean) * r


class _Norm(torch.autograd.Function):
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
        kind: ByChannel | ByExample = ctx.kind
        inside = kind.groups(x)
        if torch.is_grad_enabled():  # the numbers that were saved, bit for bit, as functions of x
            var, again = torch.var_mean(x, inside, correction=0, keepdim=True)
            scale = (var + kind.eps).rsqrt()
            mean, r = mean + (again - again.detach()), r + (scale - scale.detach())

        def total(part: Tensor) -> Tensor:
            return part.sum(inside, keepdim=True)

        def standardized(part: Tensor) -> tuple[Tensor, Tensor]:
            """Return R of a part, and the sum of its product with the normalized x."""
            image, along, _ = _gradients(
                part, x, None, mean, r, kind, True, isinstance(kind, ByChannel), False
            )
            assert image is not None
            return image, total(part * normalized) if along is None else kind.beside(along, x)

        normalized = kind.normalized(x, mean, r)
        of_g = of_x = of_weight = None
        if v is not None:
            v = kind.beside(v, x)
            of_g, (of_x, _) = normalized * v, standardized(g * v)
        if t is not None:
            t = kind.beside(t, x)
            of_g = t.expand_as(g) if of_g is None else of_g + t
        if u is not None:
            w = None if weight is None else kind.beside(weight, x)
            direction, along = standardized(u)
            image, of_scale = standardized(g if w is None else g * w)
            beside_v = direction if w is None else direction * w
            of_g = beside_v if of_g is None else of_g + beside_v
            if weight is not None:
                alike = kind.weighted_alike(x)
                of_weight = (g * direction).sum(alike) if alike else g * direction
            bent = normalized * total(u * image)
            bent = torch.addcmul(torch.addcmul(bent, direction, of_scale), image, along)
            factor = -r * (r.numel() / x.numel())
            of_x = bent * factor if of_x is None else torch.addcmul(of_x, bent, factor)
        return of_g, of_x, of_weight, *[None] * 6


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
        if input.numel() <= input.shape[1]:
            return None
        kind = ByChannel(eps, (running_mean, running_var, momentum))
        return _Norm.apply(input, weight, bias, kind)  # type: ignore[reportReturnType]
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
    flat = _normalized_batch(input.reshape(1, -1, *input.shape[2:]), None, None, training=True, eps=eps)
    if flat is None or (weight is None and bias is None):
        return None if flat is None else flat.view_as(input)
    channels = input.new_ones(input.shape[1]) if weight is None else weight
    return affine(flat.view_as(input), channels, torch.zeros_like(channels) if bias is None else bias)


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
