"""Custom functions, right and wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def custom_function(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> type:
    """Return a Function of one tensor whose gradient is the product of the cotangent and a slope."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return value(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * slope(ctx.saved_tensors[0])

    return Custom


class Exponential(torch.autograd.Function):
    """A Function that saves its output, as in torch's tutorials."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]
