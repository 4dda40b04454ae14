r"""Submanifold sparse convolution, as a family of rules closed under differentiation.

The convolution is linear in features and in weights. Its derivative with respect to the features is the convolution
with the mirrored kernel and its channels exchanged. The derivative with respect to the weights is
:class:`_Correlate`, whose own derivatives are convolutions. Only features and weights are kept for a derivative.
Features of pairs are gathered for one kernel position at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import Context, VmapInfo
from metagrad.core.checks import check_type
from metagrad.core.tree import widened
from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels.tangents import Bilinear
from metagrad.sparse.operations.rulebook import Rulebook

_CALL = "conv(x, weight, rulebook, bias)"

_Gradients: TypeAlias = tuple[None, Tensor | None, Tensor | None]


def conv(x: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None = None) -> Tensor:
    r"""Convolve features on the sites of a sparse grid; the output is on the same sites.

    .. math:: y_p = b + \sum_{o \,:\, p + o \text{ is a site}} W_o \, x_{p + o}

    Equal to ``torch.nn.functional.conv2d`` (or ``conv1d``, ``conv3d``) of the grid, zero where there is no site, read
    at the sites, with padding ``dilation * (kernel_size - 1) / 2``. Time is in pairs of sites, memory of every
    derivative in sites: no grid is made.

    Args:
        x: Features, [sites, C_in], in the order of the rulebook's ``coords``.
        weight: [C_out, C_in, *kernel_size], torch's layout.
        rulebook: Made of the sites for this kernel size.
        bias: [C_out].

    Returns:
        [sites, C_out].

    Raises:
        ValueError: Shapes do not fit the rulebook or each other, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Note:
        Under ``vmap`` the batch is a loop.

    Example:
        >>> coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]])
        >>> rulebook = metagrad.sparse.Rulebook(coords, 3)
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> metagrad.sparse.conv(x, torch.ones(1, 1, 3, 3), rulebook).tolist()
        [[3.0], [3.0], [4.0]]

    References:
        Graham, van der Maaten, "Submanifold sparse convolutional networks", arXiv:1706.01307.
    """
    _check_arguments(x, weight, rulebook, bias)
    kernels = weight.flatten(2).permute(2, 1, 0).contiguous()
    y = _Convolve.apply(rulebook, x, kernels)
    return y if bias is None else y + bias


class _ConvContext(Context, Protocol):
    """What a derivative has of a rule."""

    structure: tuple[Rulebook]


def _each(
    rule: type[Bilinear],
    info: VmapInfo,
    in_dims: Sequence[int | None],
    rulebook: Rulebook,
    *operands: Tensor,
) -> tuple[Tensor, int]:
    """Apply a rule to each member of a vmapped batch."""
    members = zip(
        *(
            [x] * info.batch_size if dim is None else x.unbind(dim)
            for x, dim in zip(operands, in_dims[-2:], strict=True)
        ),
        strict=True,
    )
    return torch.stack([rule.apply(rulebook, *member) for member in members]), 0


class _Rule(Bilinear):
    """A rule of which ``vmap`` is a loop."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.vmap = staticmethod(functools.partial(_each, cls))


class _Convolve(_Rule):
    """x [sites, C_in], w [positions, C_in, C_out] to [sites, C_out]."""

    @staticmethod
    def forward(rulebook: Rulebook, x: Tensor, w: Tensor) -> Tensor:
        y = widened(x.new_zeros(rulebook.num_sites, w.shape[2]))
        for route, kernel in zip(rulebook.routes(), w, strict=True):
            if route is None:
                y += x @ kernel
            else:
                to, of = route
                y.index_add_(0, to, widened(x[of] @ kernel))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: _ConvContext, grad: Tensor) -> _Gradients:
        x, w = ctx.saved_tensors
        (rulebook,) = ctx.structure
        d_x = _Convolve.apply(rulebook, grad, _adjoint(w)) if ctx.needs_input_grad[1] else None
        d_w = _Correlate.apply(rulebook, x, grad) if ctx.needs_input_grad[2] else None
        return None, d_x, d_w


class _Correlate(_Rule):
    """x [sites, C_in], g [sites, C_out] to [positions, C_in, C_out]: the sum of x g^T over the pairs of each."""

    @staticmethod
    def forward(rulebook: Rulebook, x: Tensor, g: Tensor) -> Tensor:
        routes = rulebook.routes()
        w = x.new_empty(len(routes), x.shape[1], g.shape[1])
        for i, route in enumerate(routes):
            w[i] = x.mT @ g if route is None else x[route[1]].mT @ g[route[0]]
        return w

    @staticmethod
    def backward(ctx: _ConvContext, grad: Tensor) -> _Gradients:
        x, g = ctx.saved_tensors
        (rulebook,) = ctx.structure
        d_x = _Convolve.apply(rulebook, g, _adjoint(grad)) if ctx.needs_input_grad[1] else None
        d_g = _Convolve.apply(rulebook, x, grad) if ctx.needs_input_grad[2] else None
        return None, d_x, d_g


def _adjoint(w: Tensor) -> Tensor:
    """Return the kernel that moves cotangents back: mirrored positions join the same pairs of sites."""
    return w.flip(0).mT.contiguous()


def _check_arguments(x: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None) -> None:
    check_type(f"{_CALL}: rulebook", rulebook, Rulebook)
    for name, tensor in (("x", x), ("weight", weight)) + ((("bias", bias),) if bias is not None else ()):
        check_floating(_CALL, name, tensor)
        check_same(_CALL, f"x and {name}", x, tensor)
    if x.device != rulebook.device:
        raise ValueError(
            f"{_CALL}: x is on {x.device} and the rulebook on {rulebook.device}. Make it of coords.to(x.device)."
        )
    if x.ndim != 2 or x.shape[0] != rulebook.num_sites:
        raise ValueError(
            f"{_CALL}: the rulebook has {rulebook.num_sites} sites, so x must be [{rulebook.num_sites}, C_in], "
            f"got {list(x.shape)}."
        )
    kernel = list(rulebook.kernel_size)
    if weight.ndim != 2 + len(kernel) or list(weight.shape[2:]) != kernel or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"{_CALL}: x has {x.shape[1]} channels and the rulebook is for kernel_size {rulebook.kernel_size}, so "
            f"weight must be [C_out, {x.shape[1]}, {', '.join(map(str, kernel))}], got {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{_CALL}: weight has {weight.shape[0]} output channels, so bias must be [{weight.shape[0]}], "
            f"got {list(bias.shape)}."
        )
