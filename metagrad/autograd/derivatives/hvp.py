"""Hessian-vector products in reverse mode or forward mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.checks.missing_derivatives import MissingDerivative, refuse_missing
from metagrad.autograd.derivatives.grad import grad, refuse_complex
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.core.capture import forward_mode
from metagrad.core.checks import check_function, is_a, refuse
from metagrad.core.modules import refuse_sharded
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import differentiable_run
from metagrad.core.tape import is_differentiated, is_transformed
from metagrad.core.tree import (
    Tree,
    is_differentiable,
    leaf_names,
    tree_flatten,
    tree_unflatten,
    zeros_for_none,
)
from metagrad.memory.tracker import hooks_aside

HvpMode = Literal["reverse", "forward"]


class Hvp(NamedTuple):
    """A Hessian-vector product with the loss and the gradient.

    Attributes:
        loss: The loss at the parameters, a scalar.
        gradient: The gradient, as a pytree like the parameters.
        product: The Hessian-vector product, as a pytree like the parameters.
    """

    loss: Tensor
    gradient: Tree
    product: Tree


def hvp(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    v: Tree,
    *args: Tree,
    mode: HvpMode = "reverse",
    create_graph: bool = False,
) -> Hvp:
    r"""Compute a Hessian-vector product (HVP) of a loss function.

    .. math:: H v = \frac{d}{d\varepsilon} \nabla L(\theta + \varepsilon v) \Big|_{\varepsilon = 0}

    ========= ============================================ =======================================================
    mode      how                                          memory, and where it does not work
    ========= ============================================ =======================================================
    "reverse" the gradient of :math:`\langle g, v \rangle` the graphs of loss and gradient, always works
    "forward" ``torch.func.jvp`` of ``torch.func.grad``    the graph of the loss and its tangents, fails for
                                                           operations that write in place or lack forward derivatives
                                                           (most attention kernels, ``F.mse_loss``), and
                                                           differentiates through ``torch.no_grad``
    ========= ============================================ =======================================================

    Reverse mode frees its graphs after the product. :func:`linearize` keeps the graph of the gradient for many
    products. It is not faster for a single product.

    Args:
        loss_fn: ``loss_fn(params, *args)`` returns a tensor with one element. It must be deterministic except for the
            random numbers of torch.
        params: A pytree of floating point tensors. They need not require grad.
        v: A pytree of the same structure, shapes and dtypes.
        *args: Other arguments of the loss. The Hessian does not include them.
        mode: ``"reverse"`` or ``"forward"``, see the table.
        create_graph: Return results that can be differentiated with respect to ``params``, ``v`` and other tensors
            that require grad. Inside a ``torch.func`` transform the results are always differentiable.

    Returns:
        The loss, the gradient and the product. Gradient and product are zero for parameters that the loss does not
        use.

    Raises:
        ValueError: ``mode`` is unknown, or the structure or a shape of ``v`` differs from ``params``. The
            loss has more than one element or is complex. An operation lacks a derivative that the mode needs.
            With ``create_graph=True``, the operation must also have one more derivative.
        TypeError: A leaf is not a floating point tensor.

    Example:
        :math:`L = \sum_k \theta_k^3` has the Hessian :math:`\mathrm{diag}(6 \theta)`:

        >>> theta, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0])
        >>> metagrad.autograd.hvp(lambda p: (p["w"] ** 3).sum(), {"w": theta}, {"w": v})
        Hvp(loss=tensor(9.), gradient={'w': tensor([ 3., 12.])}, product={'w': tensor([  6., 120.])})

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994; Dagreou, Ablin,
        Vaiter, Moreau, "How to compute Hessian-vector products?", ICLR blog posts 2024.
    """
    if mode not in get_args(HvpMode):
        raise ValueError(f"hvp(..., mode): expected one of {', '.join(get_args(HvpMode))}, got {mode!r}.")
    check_function("hvp(loss_fn, params, v)", "loss_fn", loss_fn)
    leaves, weights = _checked(params, v)
    if is_transformed():
        create_graph = True
    if not create_graph:
        leaves, weights = [leaf.detach() for leaf in leaves], [weight.detach() for weight in weights]
    spec = tree_flatten(params)[1]

    order = 3 if (is_differentiated() if is_transformed() else create_graph) else 2

    def fn(tensors: Sequence[Tensor]) -> Tensor:
        loss = _one_element(loss_fn(tree_unflatten(list(tensors), spec), *args))
        if order == 3 or (is_transformed() and mode == "reverse"):
            behind = [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]
            refuse_missing("hvp(loss_fn, ...)", loss, order=order, behind=behind, kinds=("cut", "wrong"))
        return loss

    reverse = _nested if is_transformed() else _reverse
    with differentiable_run("hvp(loss_fn, ...)", ReachableObjects(loss_fn).modules):
        loss, gradient, product = (reverse if mode == "reverse" else _forward)(
            fn, leaves, weights, create_graph
        )
    return Hvp(loss, tree_unflatten(list(gradient), spec), tree_unflatten(list(product), spec))


Products = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
"""The loss, its gradient and the Hessian-vector product."""


def _reverse(
    fn: Callable[[Sequence[Tensor]], Tensor],
    leaves: list[Tensor],
    weights: list[Tensor],
    create_graph: bool,
) -> Products:
    with torch.enable_grad():
        inputs = [_variable(leaf) for leaf in leaves]
        loss = fn(inputs)
        gradient = grad(loss, inputs, create_graph=True, materialize_grads=True)
        product = zeros_for_none(graph_vjp(gradient, inputs, weights, create_graph=create_graph), inputs)
    if create_graph:
        return loss, gradient, product
    return loss.detach(), [g.detach() for g in gradient], product


def _nested(
    fn: Callable[[Sequence[Tensor]], Tensor], leaves: list[Tensor], weights: list[Tensor], create_graph: bool
) -> Products:
    """Differentiate the gradient by ``torch.func`` transforms, because these nest inside other transforms."""
    with forward_mode(), hooks_aside():
        (gradient, loss), pull, *_ = torch.func.vjp(torch.func.grad_and_value(fn), leaves)
        (product,) = pull((weights, torch.zeros_like(loss)))
    return loss, gradient, product


def _forward(
    fn: Callable[[Sequence[Tensor]], Tensor],
    leaves: list[Tensor],
    weights: list[Tensor],
    create_graph: bool,
) -> Products:
    with torch.set_grad_enabled(create_graph), forward_mode(), hooks_aside():
        try:
            pairs: Any = torch.func.jvp(torch.func.grad_and_value(fn), (leaves,), (weights,))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _has_gradient(fn, leaves):
                raise
            what = str(error).splitlines()[0]
            raise MissingDerivative(
                f'hvp(..., mode="forward"): an operation has no forward derivative: {what} Take mode="reverse".'
            ) from error
    (gradient, loss), (product, _) = pairs
    return loss, gradient, product


def _has_gradient(fn: Callable[[Sequence[Tensor]], Tensor], leaves: list[Tensor]) -> bool:
    """Return whether the gradient exists without forward mode, so that forward mode caused the error."""
    try:
        torch.func.grad(fn)(leaves)
    except Exception:
        return False
    return True


def _variable(leaf: Tensor) -> Tensor:
    """Return a new tensor for a parameter, since the loss may also read the parameter itself as a constant."""
    return leaf.view_as(leaf) if leaf.requires_grad else leaf.detach().requires_grad_()


def _checked(params: Tree, v: Tree) -> tuple[list[Tensor], list[Tensor]]:
    leaves, spec = tree_flatten(params)
    weights, structure = tree_flatten(v)
    if structure != spec:
        refuse("hvp(loss_fn, params, v): v", f"the structure of params, {spec}", structure)
    names = leaf_names(params, "params"), leaf_names(v, "v")
    for name, leaf in zip([*names[0], *names[1]], [*leaves, *weights], strict=True):
        if not isinstance(leaf, Tensor) or not is_differentiable(leaf):
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"hvp(loss_fn, params, v): {name} must be a floating point tensor, got {got}.")
    refuse_sharded("hvp(loss_fn, params, v)", dict(zip(names[0], leaves, strict=True)))
    for name, leaf, weight in zip(names[1], leaves, weights, strict=True):
        expected, got = (tuple(leaf.shape), leaf.dtype), (tuple(weight.shape), weight.dtype)
        if got != expected:
            refuse(
                f"hvp(loss_fn, params, v): {name}", f"the shape and dtype of its parameter, {expected}", got
            )
    return leaves, weights


def _one_element(loss: Tensor) -> Tensor:
    if not is_a(loss, Tensor):
        raise TypeError(f"hvp(loss_fn, ...): loss_fn must return a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        refuse("hvp(loss_fn, ...): the loss", "one element", tuple(loss.shape))
    refuse_complex("hvp(loss_fn, ...)", loss)
    return loss.reshape(())
