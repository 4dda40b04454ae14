"""Kinks between two points: where a function goes over from one smooth piece to another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import TorchDispatchMode, pytree

aten = torch.ops.aten

Side = Callable[..., Tensor]
"""Says of each element on which side of a kink it is, given the arguments of an operation."""


def _above_zero(x: Tensor, *_: object, **__: object) -> Tensor:
    return x > 0


def _larger(x: Tensor, y: Tensor | float) -> Tensor:
    return x > y


def _between(x: Tensor, low: Tensor | float | None = None, high: Tensor | float | None = None) -> Tensor:
    sides = [x > bound for bound in (low, high) if bound is not None]
    return torch.stack(torch.broadcast_tensors(*sides))


def _within(width: float) -> Side:
    return lambda x, lambd=width: _between(x, -lambd, lambd)


def _is_extreme(x: Tensor, dim: Any = (), keepdim: bool = False, *, sign: float = 1.0) -> Tensor:
    return x == sign * aten.amax(sign * x, dim, True)


def _is_least(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _is_extreme(x, dim, sign=-1.0)


def _of_norm(x: Tensor, order: float = 2, dim: Any = None, *_: object, **__: object) -> Tensor:
    if math.isinf(order):
        return _is_extreme(x.abs(), () if dim is None else dim)
    return x > 0 if order <= 1 else x.new_zeros(0)


# Operations whose derivative jumps, or that jump themselves. Not listed are those that return integers or booleans,
# which are the sides (comparisons, maxima with their places, max pooling, sorting); nor those of which the second
# derivative alone jumps (ELU, the Huber loss), where a difference of gradients stays near to the Hessian.
SIDES: dict[Any, Side] = {
    aten.relu: _above_zero,
    aten.leaky_relu: _above_zero,
    aten._prelu_kernel: _above_zero,
    aten.rrelu_with_noise: _above_zero,
    aten.threshold: lambda x, threshold, value: x > threshold,
    aten.hardtanh: lambda x, low=-1.0, high=1.0: _between(x, low, high),
    aten.hardsigmoid: _within(3.0),
    aten.clamp: lambda x, low=None, high=None, **bounds: _between(
        x, *({"min": low, "max": high} | bounds).values()
    ),
    aten.clamp_min: _larger,
    aten.clamp_max: _larger,
    aten.softshrink: _within(0.5),
    aten.hardshrink: _within(0.5),
    aten.abs: _above_zero,
    aten.sign: _above_zero,
    aten.sgn: _above_zero,
    aten.floor: torch.floor,
    aten.ceil: torch.ceil,
    aten.round: torch.round,
    aten.trunc: torch.trunc,
    aten.frac: torch.trunc,
    aten.maximum: _larger,
    aten.minimum: _larger,
    aten.fmax: _larger,
    aten.fmin: _larger,
    aten.amax: _is_extreme,
    aten.amin: _is_least,
    aten.max.default: _is_extreme,
    aten.min.default: _is_least,
    aten.linalg_vector_norm: _of_norm,
}

# Operations with kinks whose sides cannot be seen from outside.
OPAQUE: dict[Any, Callable[..., bool]] = {
    aten.multi_margin_loss: lambda *_: True,
    aten.multilabel_margin_loss_forward: lambda *_: True,
    aten._cdist_forward: lambda x, y, p, *_: p <= 1 or math.isinf(p),
    aten._pdist_forward: lambda x, p=2.0: p <= 1 or math.isinf(p),
}


class Pieces(TorchDispatchMode):
    """Notes, of the operations that run inside of it, on which smooth piece of each the arguments are.

    Attributes:
        sides: For each operation with kinks, in their order, a tensor that is the same on the same piece.
        opaque: The names of operations that do not tell.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Tensor] = []
        self.opaque: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # Wrappers come first, and the operations inside of them arrive here again.
        if any(getattr(cls, "__torch_dispatch__", None) is not _NO_DISPATCH for cls in types):
            return NotImplemented
        known = _without_underscore(func)
        if known in OPAQUE and OPAQUE[known](*args):
            self.opaque.add(known.__name__)
        if known in SIDES:
            self.sides.append(SIDES[known](*args, **kwargs))
        outputs = func(*args, **kwargs)
        if any(isinstance(a, Tensor) and _is_number(a) for a in pytree.tree_leaves((args, kwargs))):
            leaves = pytree.tree_leaves(outputs)
            self.sides.extend(out for out in leaves if isinstance(out, Tensor) and not _is_number(out))
        return outputs

    def crossings(self, other: Pieces) -> int | None:
        """Count the elements that are on another side there; None if other operations ran."""
        if [side.shape for side in self.sides] != [side.shape for side in other.sides]:
            return None
        counts = [(a != b).sum() for a, b in zip(self.sides, other.sides, strict=True)]
        return int(torch.stack(counts).sum()) if counts else 0


_NO_DISPATCH = _torch.disabled_torch_dispatch


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _without_underscore(func: Any) -> Any:
    """Return what the table calls an operation: of the one in place, the other; of some, an overload."""
    if func in SIDES:
        return func
    name = func.overloadpacket.__name__
    plain = name.removesuffix("_")
    return getattr(aten, plain, func.overloadpacket) if plain != name else func.overloadpacket
