"""Values with a correct first derivative, whose second derivative raises."""

from __future__ import annotations

from torch import Tensor

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
    if not value.requires_grad:
        return value
    sentence = (
        f"{call}: the result has first derivatives only; its gradient was differentiated again. Take the "
        "gradient with create_graph=False, or build the quantity from products, which have every order."
    )
    own = value.view_as(value)
    own.register_hook(lambda g: g if g is None else refuse_derivatives(g, sentence, value))
    return own
