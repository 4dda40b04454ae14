"""Tangents of tangents through a custom rule, which torch alone would take to be zero."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from metagrad.core import _torch
from metagrad.core._torch import Function

Result = TypeVar("Result")


def nestable(jvp: Callable[..., Result]) -> Callable[..., Result]:
    """Make the ``jvp`` of an ``autograd.Function`` differentiable in forward mode again.

    torch calls it with forward mode switched off, and ``jacfwd(jacfwd(f))`` then leaves out, in silence, every term
    that goes through the tangent (torch 2.13, pytorch issue 197867). Here it is on, and the tangents are those of the
    level being differentiated; saved tensors must pass through :func:`primal`, for on that level they have tangents
    themselves and the rule would call itself without end.
    """

    @functools.wraps(jvp)
    def nested(ctx: object, *tangents: Tensor | None) -> Result:
        with _torch.forward_mode(True):
            return jvp(ctx, *(primal(t) if isinstance(t, Tensor) else t for t in tangents))

    return nested


def primal(x: Tensor) -> Tensor:
    """Take from a tensor its tangent on the level being differentiated; those of outer levels stay."""
    return unpack_dual(x).primal


class Kernel(Function):
    """A Function whose arguments are given by position.

    torch binds them by name at each ``apply``, which took 40 % of the time of a small lookup. Under ``torch.func`` it
    does so here too, with a signature that is read once.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the rule."""
        if _torch.functorch_is_active():
            return super().apply(*args)
        return super(Function, cls).apply(*_torch.unwrap_dead_wrappers(args))  # type: ignore[reportAttributeAccessIssue]


class Bilinear(Kernel):
    """A rule ``apply(*structure, first, second)`` that is linear in each of its last two arguments.

    A subclass writes ``forward``, ``backward`` and ``vmap``; its tangent follows from the rule itself.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.jvp = staticmethod(nestable(functools.partial(_bilinear_tangent, cls)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands."""
        ctx.structure, operands = inputs[:-2], inputs[-2:]
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)


def _bilinear_tangent(rule: type[Bilinear], ctx: Any, *tangents: Tensor | None) -> Tensor:
    """Differentiate a bilinear rule in forward mode."""
    *_, d_first, d_second = tangents
    first, second = map(primal, ctx.saved_tensors)
    if d_second is None:
        return rule.apply(*ctx.structure, d_first, second)
    if d_first is None:
        return rule.apply(*ctx.structure, first, d_second)
    return rule.apply(*ctx.structure, d_first, second) + rule.apply(*ctx.structure, first, d_second)
