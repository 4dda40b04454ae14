"""Sharpness-aware minimization: the highest loss nearby, to first order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metagrad.autograd.derivatives.grad import grad
from metagrad.autograd.derivatives.recorded import checked_leaves
from metagrad.core._torch import linalg
from metagrad.core.checks import check_function, is_a
from metagrad.core.tree import Tree, leaf_names, tree_flatten, tree_unflatten, widened
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.tables.row_sparse import RowSparse

_CALL = "sharpness_aware(loss_fn, params)"


def sharpness_aware(
    loss_fn: Callable[..., Tensor], params: Tree, *args: Tree, rho: float | Tensor = 0.05, order: int = 1
) -> Tensor:
    r"""Evaluate a loss after one step uphill.

    The gradient of this loss is the gradient of sharpness-aware minimization (SAM).

    .. math:: L_{\mathrm{SAM}}(\theta) = L(\theta + \epsilon), \qquad
              \epsilon = \rho \, \frac{\nabla L(\theta)}{\| \nabla L(\theta) \|}

    with the norm over all parameters together. With ``order=1``, as in the paper, :math:`\epsilon` is a
    constant for the derivative, and :math:`\nabla L_{\mathrm{SAM}} = \nabla L(\theta + \epsilon)`. With
    ``order=2``, the derivative includes the derivative of :math:`\epsilon`, also with respect to ``rho``. Any
    optimizer may minimize this loss. At a gradient of zero, there is no direction, and the loss is
    :math:`L(\theta)`.

    The loss is evaluated twice: dropout draws two masks, and BatchNorm in training updates its statistics twice.

    Args:
        loss_fn: ``loss_fn(params, *args)``, a tensor with one element.
        params: A pytree of floating point tensors that require grad. The loss must use each parameter.
        *args: Further arguments of the loss.
        rho: Length of the step uphill, :math:`\rho`.
        order: 1 or 2.

    Returns:
        The loss one step uphill, differentiable.

    Raises:
        ValueError: ``order`` or ``rho`` is out of its range, the loss does not use a parameter, or a parameter has
            two names. With ``order=2``, it is also raised if torch has no second derivative of an operation, or an
            incorrect second derivative.
        TypeError: A gradient is sparse, since a step uphill would be as large as its table.

    Example:
        :math:`L = \frac{1}{2} \theta^2` from 3 with a step of 0.5:

        >>> from metagrad.optim import sharpness_aware
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> loss = sharpness_aware(lambda p: p["w"] ** 2 / 2, {"w": w}, rho=0.5)
        >>> loss.backward()
        >>> loss.item(), w.grad
        (6.125, tensor(3.5000))

    References:
        Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-aware minimization for efficiently improving generalization",
        ICLR 2021, section 2 and algorithm 1.
    """
    check_function(_CALL, "loss_fn", loss_fn)
    if order not in (1, 2):
        raise ValueError(f"{_CALL}: order must be 1 or 2, got {order!r}.")
    if not is_a(rho, int, float, Tensor) or (isinstance(rho, Tensor) and rho.numel() != 1) or not rho >= 0:
        raise ValueError(f"{_CALL}: rho must be one number, at least 0, got {rho!r}.")
    leaves = checked_leaves(_CALL, params).values()
    gradient, spec = tree_flatten(grad(loss_fn(params, *args), params, create_graph=order == 2))
    _refuse_sparse(params, gradient)
    # The norm of float16 tensors may overflow float16.
    wide = list(map(widened, gradient))
    norm = linalg.vector_norm(torch.stack([linalg.vector_norm(part) for part in wide]))
    length = (rho.reshape(()) if isinstance(rho, Tensor) else rho) / torch.where(norm == 0, 1, norm)
    uphill = [leaf + (length * part).to(leaf.dtype) for leaf, part in zip(leaves, wide, strict=True)]
    return loss_fn(tree_unflatten(uphill, spec), *args)


def _refuse_sparse(params: Tree, gradient: Sequence[Tensor]) -> None:
    for name, part in zip(leaf_names(params, "params"), gradient, strict=True):
        if isinstance(part, (RowSparse, SparseTensor)) or part.layout is not torch.strided:
            raise TypeError(
                f"{_CALL}: the gradient of {name} is sparse, and one step uphill would be as large as its table. "
                "Leave it out of params, or make it dense with sparse=False."
            )
