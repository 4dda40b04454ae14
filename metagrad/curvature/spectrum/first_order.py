"""Values with a correct first derivative, whose second derivative raises."""

from __future__ import annotations

from torch import Tensor

from metagrad.core._torch import Function
from metagrad.curvature.solvers.implicit import refuse_derivatives


def first_order(value: Tensor, call: str) -> Tensor:
    """Return ``value``. Differentiating its gradient again raises, because that derivative would be incorrect.

    Args:
        value: A tensor whose graph gives only the correct first derivative.
        call: Name of the caller in the error.

    Example:
        >>> from metagrad.curvature.spectrum.first_order import first_order
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> y = first_order(x**2, "square(x)")
        >>> torch.autograd.grad(y, x)
        (tensor(6.),)
    """
    return _FirstOrder.apply(value, call) if value.requires_grad else value


class _FirstOrder(Function):
    """The identity. The result of its backward cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, call: str) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, str], output: Tensor) -> None:
        value, ctx.call = inputs
        ctx.save_for_backward(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        sentence = (
            f"{ctx.call}: the result has first derivatives only; its gradient was differentiated again. Take the "
            "gradient with create_graph=False, or build the quantity from products, which have every order."
        )
        return refuse_derivatives(gradient, sentence, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()
