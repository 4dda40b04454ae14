"""Implicit differentiation: a minimum with its derivative by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from metagrad.autograd.derivatives.recorded import (
    Recorded,
    recorded_gradient,
    rows_of,
    split_rows,
    tensors_of,
)
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_count, check_function, is_a
from metagrad.core.norms import every_order
from metagrad.core.substitution import checked_reruns
from metagrad.core.tape import graph_nodes, is_transformed
from metagrad.core.tree import Params
from metagrad.curvature.operators.space import check_params
from metagrad.curvature.solvers.implicit import Inverse, attach
from metagrad.hypergrad.implicit import ImplicitMethod, check_solution, relative_residual

CALL = "implicit_diff(inner_loss, params)"
LOOSE_FOR_TASKS = 0.1
"""Like :data:`~metagrad.hypergrad.implicit.LOOSE`, for stacked tasks, whose gradients are noisy."""


class SplitLoss(NamedTuple):
    """A loss of a model's outputs plus a quadratic penalty. Its Gauss-Newton matrix replaces the Hessian.

    Attributes:
        losses: A scalar, or the losses ``[tasks]``, with the penalty.
        outputs: The outputs of the model, with their graph.
        penalty: Twice the factor of the squared distance in the penalty.
    """

    losses: Tensor
    outputs: Tensor
    penalty: float | Tensor


def implicit_diff(
    inner_loss: Callable[[Params], Tensor | SplitLoss],
    params: Params,
    *,
    method: ImplicitMethod,
    order: int = 1,
    call: str = CALL,
) -> Params:
    r"""Make the minimum of a loss differentiable by the implicit function theorem.

    .. math:: \frac{d\phi^*}{d\lambda} = -\left( \frac{\partial^2 g}{\partial\phi^2} \right)^{-1}
              \frac{\partial^2 g}{\partial\phi \, \partial\lambda}

    :math:`\lambda` is every other tensor that the loss was computed from, and gradients flow to all of them. A
    backward pass costs the products of the method and two more. The way in which the minimum was found does not
    matter. Only the graph of one gradient is stored.

    Args:
        inner_loss: ``inner_loss(params)``, a scalar. It may also return losses ``[tasks]`` of stacked parameters, if
            each loss depends only on its own parameters. Then the Hessians of all tasks are inverted together and
            independently.
        params: The minimum by name, dense floating point tensors of one dtype. Stacked tasks have ``[tasks, ...]``
            each. A parameter that the loss does not depend on is a constant.
        method: An inverse of the Hessian: CG, Neumann, Exact or FirstOrder with a scale. Only CG and Exact,
            without damping, are correct at a higher order.
        order: How often the minimum can be differentiated. Above 1, the loss is evaluated again for each order,
            with the same random numbers.
        call: Name of the caller in errors.

    Returns:
        Parameters with the same values, differentiable ``order`` times if grad mode is enabled. One more
        derivative raises.

    Raises:
        TypeError: ``method`` is not an inverse of the Hessian, or ``params`` are not such tensors.
        ValueError: The losses are neither a scalar nor one for each task, an operation has no second derivative, or
            the method has no inverse.
        SolveError: In the backward pass, the Hessian is not positive definite.

    Example:
        :math:`\phi^* = \lambda^2`, however it was found:

        >>> lam = torch.tensor(3.0, requires_grad=True)
        >>> def inner(params): return (params["phi"] - lam**2) ** 2
        >>> found = metagrad.hypergrad.implicit_diff(
        ...     inner, {"phi": torch.tensor(9.0)}, method=metagrad.hypergrad.CG()
        ... )
        >>> metagrad.grad(found["phi"], lam)
        tensor(6.)

    References:
        Rajeswaran, Finn, Kakade, Levine, "Meta-learning with implicit gradients", NeurIPS 2019, section 3; Griewank,
        Walther, "Evaluating derivatives", 2008, section 15.1.
    """
    check_inverse(call, method)
    check_count(f"{call}, order", order)
    check_function(call, "inner_loss", inner_loss)
    check_params(call, params)
    if not torch.is_grad_enabled():
        return {name: p.detach() for name, p in params.items()}
    if is_transformed():
        raise ValueError(
            f"{call}: inside a torch.func transform there is no autograd graph. Differentiate by backward() or "
            "torch.autograd.grad."
        )
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    random = RandomState()
    with checked_reruns(call, nested=call != CALL):  # iMAML calls copies of the model, which may run again
        losses = inner_loss(leaves)
    random.close()
    split = losses if isinstance(losses, SplitLoss) else None
    losses = losses if split is None else split.losses
    hessians = _TaskHessians(call, losses, _entering(losses, leaves) or leaves, split)

    def solve(cotangents: Tensor) -> Tensor:
        """Invert the Hessian.

        A row with NaN or Inf remains unchanged, and later checks of gradients report it.
        """
        sound = cotangents.isfinite().all(-1, keepdim=True)
        b = torch.where(sound, cotangents, 0.0)
        solution = method.inverse(hessians, b)
        check_solution(call, solution, relative_residual(solution, b), LOOSE_FOR_TASKS)
        return torch.where(sound, solution.value, torch.nan)

    if order > 1 and (not method.is_exact or getattr(method, "damping", 0.0) or split is not None):
        raise ValueError(
            f"{call}: order above 1 needs the inverse of the Hessian itself. Take CG or Exact, without damping, and "
            "a loss in place of a SplitLoss."
        )

    def residual(rows: Tensor) -> Tensor:
        with torch.enable_grad(), every_order(), random.restored():
            again = inner_loss(dict(zip(hessians.names, tensors_of(rows, hessians.leaves), strict=True)))
        assert isinstance(again, Tensor)
        return -torch.autograd.grad(again.sum(), rows, create_graph=True)[0]

    inverse = Inverse(residual, solve, solve, order, None, f"{call[:-1]}, order={{}})")
    x, slope = rows_of(hessians.leaves, hessians.num_matrices).detach(), hessians.slopes
    rows = attach(inverse, x, -slope, order)
    found = dict(zip(hessians.names, tensors_of(rows, hessians.leaves), strict=True))
    return {name: found.get(name, leaf.detach()) for name, leaf in leaves.items()}


def _entering(losses: object, leaves: Params) -> Params:
    """Return the leaves that losses were computed from. Every other leaf has no minimum and stays constant."""
    nodes: set[Node] = set(graph_nodes([losses])) if is_a(losses, Tensor) else set()
    return {name: leaf for name, leaf in leaves.items() if get_gradient_edge(leaf).node in nodes}


def check_inverse(call: str, method: object) -> None:
    """Raise unless a method is an inverse that :func:`implicit_diff` can use."""
    if not isinstance(method, ImplicitMethod):
        raise TypeError(
            f"{call}: expected an implicit method, CG, Neumann, Exact or FirstOrder(scale=...) of mg.hypergrad, got "
            f"{method!r}."
        )
    if method.is_zero:
        raise ValueError(
            f"{call}: FirstOrder() treats the minimum as a constant, so nothing is learned. Pass a scale, such as "
            "the inner learning rate."
        )


class _TaskHessians:
    """The Hessian of one loss, or of the loss of each stacked task, as a linear map of rows ``[tasks, n]``.

    The Hessian of the sum is block-diagonal, so one backward pass multiplies all rows.
    """

    def __init__(self, call: str, losses: object, params: Params, split: SplitLoss | None) -> None:
        if not isinstance(losses, Tensor) or losses.ndim > 1 or not losses.requires_grad:
            got = tuple(losses.shape) if is_a(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"{call}: the losses must be a scalar, or one for each task, with a graph, got {got}."
            )
        for name, p in params.items():
            if losses.ndim and p.shape[:1] != losses.shape:
                raise ValueError(
                    f"{call}: there are {len(losses)} losses, so parameters must be [{len(losses)}, ...], but "
                    f"{name!r} is {tuple(p.shape)}."
                )
        self.names = list(params)
        self.leaves = list(params.values())
        self.num_matrices: int = len(losses) if losses.ndim else 1
        self.dtype: torch.dtype = self.leaves[0].dtype
        self.device: torch.device = self.leaves[0].device
        size = sum(leaf.numel() for leaf in self.leaves) // self.num_matrices
        self.shape: tuple[int, int] = (size, size)
        self._recorded = recorded_gradient(call, losses.sum(), params)
        self.slopes: Tensor = self._rows(self._recorded.outputs)
        self._penalty = None if split is None else split.penalty
        if split is not None:
            outputs = {"outputs": split.outputs}
            self._model = Recorded(call, [split.outputs], params)
            self._loss = recorded_gradient(call, losses.sum(), outputs)

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply each row with its own matrix."""
        v = torch.cat([part.reshape(-1) for part in tensors_of(vectors, self.leaves)])
        if self._penalty is None:
            return self._rows(self._recorded.pull(v))
        return self._rows(self._model.pull(self._loss.pull(self._model.push(v)))) + self._penalty * vectors

    def _rows(self, flat: Tensor) -> Tensor:
        return rows_of(split_rows(flat, self.leaves), self.num_matrices)
