r"""Derivatives of a root by the implicit function theorem, up to a given order.

A root of :math:`F(y, \theta) = 0` has :math:`dy = A^{-1} \, \partial_\theta F \, d\theta` with
:math:`A = -\partial F / \partial y`. In the autograd graph it is written as Newton steps from the known root, a
constant,

.. math:: y_0 = x, \qquad y_j = y_{j-1} + A^{-1} F(y_{j-1}, \theta),

whose values are all x. A first derivative goes only through the last step. A cotangent g gives
:math:`u = A^{-\top} g` to the residual. It gives :math:`u^\top \partial_\theta F` to all tensors that F depends on,
through the graph of :math:`F(y_{j-1}, \theta)`. That gradient depends on :math:`\theta` through u and through
:math:`y_{j-1}`. Here u is itself the root of :math:`g - A(y_{j-1})^\top u`, and the derivative of :math:`y_{j-1}`
comes from the previous step. So each order of differentiation needs one step with the graph of one evaluation of F.
Each first derivative costs one solve.

The solution of a linear system :math:`A(\theta) x = b` is the root of :math:`F = b - A(\theta) x`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.curvature.linear_map import Rows


class Inverse(NamedTuple):
    r"""The inverse of :math:`A = -\partial F / \partial y` at a root, as a map of rows.

    Attributes:
        residual: Maps rows [k, n] to the values of F at these rows, with a graph.
        solve: Solves rows with the transpose of A, without a graph.
        solve_transposed: Solves rows with A, without a graph.
        order: Requested order of differentiation.
        products: Multiplies rows with A, if A is symmetric and the same for all y. None otherwise.
        call: Name of the caller in error messages.
    """

    residual: Rows
    solve: Rows
    solve_transposed: Rows
    order: int
    products: Rows | None = None
    call: str = "solve(..., order={})"


def attach(inverse: Inverse, x: Tensor, residual: Tensor, order: int) -> Tensor:
    """Give a root its derivatives up to ``order``, with respect to all tensors that its residual depends on.

    Args:
        inverse: The inverse of the map.
        x: The roots, constants, [k, n].
        residual: The residual at ``x``, with its graph, [k, n].
        order: Highest order of differentiation, 1 or more.
    """
    y = _Step.apply(x, None, residual, inverse, 1)
    for level in range(2, order + 1):
        before, switch = _Gate.apply(y)
        y = _Step.apply(before, switch, inverse.residual(before), inverse, level)
    return y


def attach_linear(
    products: Rows, inverse: Inverse, b: Tensor, x: Tensor, product: Tensor, order: int
) -> Tensor:
    """Give the solution of a linear system its derivatives, with respect to b and all that products depend on.

    Args:
        products: Products with A, with their graph.
        inverse: The inverse of the map. Its residual is replaced.
        b: The right-hand sides, [k, n].
        x: The solutions, constants, [k, n].
        product: Product of the map with ``x``, with its graph, [k, n].
        order: Highest order of differentiation, 1 or more.
    """
    if not _varies(product):
        return _Step.apply(x, None, b, inverse, None)
    return attach(inverse._replace(residual=lambda y: b - products(y)), x, b - product, order)


def refuse_derivatives(x: Tensor, sentence: str, *depends_on: Tensor) -> Tensor:
    """Return ``x`` as a tensor whose derivative raises."""
    return _Refusal.apply(x, sentence, *depends_on)


def first_order(value: Tensor, call: str) -> Tensor:
    """Return ``value``. Differentiating its gradient again raises, because that derivative would be incorrect.

    Args:
        value: A tensor whose graph gives only the correct first derivative.
        call: Name of the caller in the error.

    Example:
        >>> from metagrad.curvature.solvers.implicit import first_order
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> y = first_order(x**2, "square(x)")
        >>> torch.autograd.grad(y, x)
        (tensor(6.),)
    """
    if not value.requires_grad:
        return value
    sentence = (
        f"{call}: the result has first derivatives only; its gradient was differentiated again. Take the "
        "gradient with create_graph=False, or build the quantity from products, which have every order."
    )
    own = value.view_as(value)
    own.register_hook(lambda g: g if g is None else refuse_derivatives(g, sentence, value))
    return own


def is_batched(x: Tensor) -> bool:
    """Return whether ``torch.func.vmap`` has added a dimension to a tensor."""
    while _torch.is_functorch_wrapped(x):
        if _torch.is_batched(x):
            return True
        x = _torch.get_unwrapped(x)
    return False


def _varies(x: Tensor) -> bool:
    """Return whether a tensor may have a derivative. Inside a transform, outer levels cannot be seen."""
    is_transformed = _torch.functorch_is_active() or _torch.forward_level() >= 0
    return x.requires_grad or is_transformed


def _adjoint(inverse: Inverse, g: Tensor) -> Tensor:
    """Return the solution for ``g``, a constant."""
    if _torch.is_legacy_batched(g):
        raise ValueError(
            "solve(...): its derivative does not work under is_grads_batched=True, which uses torch's old vmap. Take "
            "torch.func.vmap over torch.func.vjp, or torch.func.jacrev."
        )
    return _Constant.apply(g, inverse) if is_batched(g) else inverse.solve(g)


class _Constant(Function):
    """The solution for a right-hand side, without derivatives. Under vmap, the batch adds right-hand sides."""

    @staticmethod
    def forward(g: Tensor, inverse: Inverse) -> Tensor:
        return inverse.solve(g)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, cotangent):
        return None, None

    @staticmethod
    def vmap(info, in_dims, g, inverse):
        g = g.movedim(in_dims[0], 0)
        return _Constant.apply(g.flatten(0, 1), inverse).view(g.shape), 0


class _Step(Function):
    """``before + A^-1 residual``, for a residual whose value is zero."""

    @staticmethod
    def forward(
        before: Tensor, switch: Tensor | None, residual: Tensor, inverse: Inverse, level: int | None
    ) -> Tensor:
        return before.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        before, switch, residual, ctx.inverse, ctx.level = inputs
        ctx.set_materialize_grads(False)
        # A later derivative goes through the anchor to all tensors that the residual depends on.
        anchor = residual if switch is None else switch
        ctx.save_for_backward(before, anchor)

    @staticmethod
    def backward(ctx, g):
        if g is None:  # a closed gate
            return None, None, None, None, None
        before, anchor = ctx.saved_tensors
        u = _adjoint(ctx.inverse, g)
        if torch.is_grad_enabled():
            u = _differentiable(ctx.inverse, ctx.level, g, u, before, anchor)
        return g, None, u, None, None

    @staticmethod
    def vmap(info, in_dims, before, switch, residual, inverse, level):
        before, residual = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in ((before, in_dims[0]), (residual, in_dims[2]))
        )
        y = _Step.apply(before.flatten(0, 1), switch, residual.flatten(0, 1), inverse, level)
        return y.view(before.shape), 0


def _differentiable(
    inverse: Inverse, level: int | None, g: Tensor, u: Tensor, before: Tensor, anchor: Tensor
) -> Tensor:
    """Make ``u``, the solution for ``g``, differentiable."""
    turned = inverse._replace(solve=inverse.solve_transposed, solve_transposed=inverse.solve)
    if level is None:
        return _Step.apply(u, None, g, turned, None)
    if level == 1:
        sentence = (
            f"{inverse.call.format(inverse.order)}: the solution is differentiated more often than that. "
            f"Pass order={inverse.order + 1} or more; each order keeps the graph of one product."
        )
        return refuse_derivatives(u, sentence, anchor)

    def transposed(rows: Tensor) -> Tensor:
        """Multiply rows with the transpose of A at ``before``, on the autograd graph."""
        if inverse.products is not None:
            return inverse.products(rows)
        with torch.enable_grad():
            y = before if before.requires_grad else before.detach().requires_grad_()
            (found,) = torch.autograd.grad(inverse.residual(y), y, rows, create_graph=True, allow_unused=True)
        return torch.zeros_like(rows) if found is None else -found

    return _Switch.apply(attach_linear(transposed, turned, g, u, transposed(u), level - 1), anchor)


class _Gate(Function):
    """Passes cotangents to the previous step only if a gradient is being differentiated.

    Its second output is the switch. In a first backward pass, the switch has no cotangent. The cotangent of
    the first output is then A u = g, which the step has already processed. If :class:`_Switch` has run in the
    same backward pass, a gradient is being differentiated, and the cotangent is passed to ``before``.
    """

    @staticmethod
    def forward(y: Tensor) -> tuple[Tensor, Tensor]:
        return y.clone(), y.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, cotangent, switched):
        return None if switched is None else cotangent

    @staticmethod
    def vmap(info, in_dims, y):
        return _Gate.apply(y), (in_dims[0], None)


class _Switch(Function):
    """The identity. Its backward opens the gate, whose backward runs later."""

    @staticmethod
    def forward(u: Tensor, switch: Tensor) -> Tensor:
        return u.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, cotangent):
        (switch,) = ctx.saved_tensors
        return _Switch.apply(cotangent, switch), torch.zeros_like(switch)  # also opens it one order higher

    @staticmethod
    def vmap(info, in_dims, u, switch):
        return _Switch.apply(u, switch), in_dims[0]


class _Refusal(Function):
    """The identity, whose derivative raises."""

    @staticmethod
    def forward(x: Tensor, sentence: str, *depends_on: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.sentence = inputs[1]

    @staticmethod
    def backward(ctx, cotangent):
        raise RuntimeError(ctx.sentence)

    @staticmethod
    def vmap(info, in_dims, x, sentence, *depends_on):
        return _Refusal.apply(x, sentence, *depends_on), in_dims[0]
