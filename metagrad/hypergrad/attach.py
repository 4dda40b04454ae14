"""A minimum with a graph: what it depends on by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from metagrad.autograd.derivatives.linearize import Linearization, linearized
from metagrad.autograd.derivatives.variables import find_variables
from metagrad.core.tree import tree_structure
from metagrad.curvature.solvers.implicit import refuse_derivatives
from metagrad.hypergrad.implicit import ImplicitMethod, check_solution, relative_residual
from metagrad.optim.rule import Params

CALL = "attach(inner_loss, params)"
LOOSE_FOR_TASKS = 0.1
"""As :data:`~metagrad.hypergrad.implicit.LOOSE`: gradients of few tasks are not worth more steps than this."""

_ONCE = (
    "attach(inner_loss, params): the derivative of a minimum by an implicit method is not differentiable again. Take "
    "mg.hypergradient(..., create_graph=True), or differentiate through the steps."
)


def attach(
    inner_loss: Callable[[Params], Tensor],
    params: Params,
    *,
    method: ImplicitMethod,
    call: str = CALL,
) -> Params:
    r"""Give the minimum of a loss the derivative that it has, by the implicit function theorem.

    .. math:: \frac{d\phi^*}{d\lambda} = -\left( \frac{\partial^2 g}{\partial\phi^2} \right)^{-1}
              \frac{\partial^2 g}{\partial\phi \, \partial\lambda}

    Whatever else the loss was computed from is :math:`\lambda`: gradients flow to all of it. A backward pass costs
    the products of the method and two more; how the minimum was found does not matter, and nothing of it is kept but
    the graph of one gradient.

    Args:
        inner_loss: ``inner_loss(params)``, one number; or losses ``[tasks]`` of stacked parameters, of which each
            depends on its own. Then the Hessians of all tasks are inverted together, each by itself.
        params: The minimum by name, strided floating point tensors; for stacked tasks ``[tasks, ...]`` each.
        method: An inverse of the Hessian: CG, Neumann, Exact or FirstOrder with a scale.
        call: How errors name the caller.

    Returns:
        The same numbers, differentiable once where grad mode is on; a second derivative raises.

    Raises:
        TypeError: ``method`` is not an inverse of the Hessian.
        ValueError: The losses are neither one number nor one for each task, an operation lacks a second derivative,
            or the method is one without an inverse.
        SolveError: In the backward pass, the Hessian is not positive definite.

    Example:
        :math:`\phi^* = \lambda^2`, wherever it comes from:

        >>> lam = torch.tensor(3.0, requires_grad=True)
        >>> def inner(params): return (params["phi"] - lam**2) ** 2
        >>> found = metagrad.hypergrad.attach(
        ...     inner, {"phi": torch.tensor(9.0)}, method=metagrad.hypergrad.CG()
        ... )
        >>> metagrad.grad(found["phi"], lam)
        tensor(6.)

    References:
        Rajeswaran, Finn, Kakade, Levine, "Meta-learning with implicit gradients", NeurIPS 2019, section 3; Griewank,
        Walther, "Evaluating derivatives", 2008, section 15.1.
    """
    check_inverse(call, method)
    if not torch.is_grad_enabled():
        return {name: p.detach() for name, p in params.items()}
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    losses = inner_loss(leaves)
    _check_losses(call, losses, leaves)
    total = losses.sum()
    variables = find_variables(call, total, leaves, ())
    lin = linearized(call, total, variables, tree_structure(leaves), True, False)
    minimum = _Minimum(call, method, lin, leaves, losses.ndim)
    rows = _Attached.apply(minimum.rows(list(leaves.values())).detach(), minimum.slope(), minimum)
    return dict(zip(leaves, minimum.split(rows), strict=True))  # type: ignore[reportArgumentType]


def check_inverse(call: str, method: object) -> None:
    """Refuse a method that cannot be attached to a minimum."""
    if not isinstance(method, ImplicitMethod):
        raise TypeError(
            f"{call}: expected an implicit method, CG, Neumann, Exact or FirstOrder(scale=...) of mg.hypergrad, got "
            f"{method!r}."
        )
    if method.is_zero:
        raise ValueError(
            f"{call}: FirstOrder() takes the minimum for a constant, so nothing is learned. Pass a scale, such as "
            "the inner learning rate."
        )


def _check_losses(call: str, losses: object, leaves: Params) -> None:
    """Refuse what is neither one loss nor one for each of stacked parameters."""
    if not isinstance(losses, Tensor) or losses.ndim > 1 or not losses.requires_grad:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{call}: the inner loss must be one number, or one for each task, with a graph, got {got}."
        )
    for name, leaf in leaves.items():
        if losses.ndim and leaf.shape[:1] != losses.shape:
            raise ValueError(
                f"{call}: there are {len(losses)} losses, so parameters must be [{len(losses)}, ...], but {name!r} "
                f"is {tuple(leaf.shape)}."
            )


@dataclass(frozen=True, eq=False)
class _Minimum:
    """The Hessian of a loss at its minimum, of one task or of stacked ones, as maps of rows ``[tasks, n]``."""

    call: str
    method: ImplicitMethod
    lin: Linearization
    leaves: Params
    num_axes: int  # that count tasks

    @property
    def num_matrices(self) -> int:
        first = next(iter(self.leaves.values()))
        return first.shape[0] if self.num_axes else 1

    @property
    def shape(self) -> tuple[int, int]:
        n = sum(leaf[0].numel() if self.num_axes else leaf.numel() for leaf in self.leaves.values())
        return n, n

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.leaves.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.leaves.values())).device

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply each row with the Hessian of its task, all by one product with that of the sum."""
        parts = [part[None] for part in self.split(vectors)]
        ((_, products),) = self.lin.pieces(parts, chunk=1, create_graph=False)
        return self.rows([product[0] for product in products])

    def rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Join tensors like the parameters to ``[tasks, n]``."""
        return torch.cat([part.reshape(self.num_matrices, -1) for part in parts], 1)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Undo :meth:`rows`."""
        sizes = [leaf.numel() // self.num_matrices for leaf in self.leaves.values()]
        return [
            part.reshape(leaf.shape)
            for part, leaf in zip(rows.split(sizes, 1), self.leaves.values(), strict=True)
        ]

    def slope(self) -> Tensor:
        """Return the gradient on the tape of what the loss was computed from, ``[tasks, n]``."""
        return self.rows(self.lin.gradient_on_tape())

    def solve(self, cotangents: Tensor) -> Tensor:
        """Invert the Hessian; a row that is not finite stays so, for whoever looks at gradients."""
        sound = cotangents.isfinite().all(-1, keepdim=True)
        b = torch.where(sound, cotangents, 0.0)
        solution = self.method.inverse(self, b)
        check_solution(self.call, solution, relative_residual(solution, b), LOOSE_FOR_TASKS)
        return torch.where(sound, solution.value, torch.nan)


class _Attached(Function):
    """The minimum, and its dependence on the gradient of the loss there: minus the inverse of the Hessian."""

    @staticmethod
    def forward(rows: Tensor, slope: Tensor, minimum: _Minimum) -> Tensor:
        return rows.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, slope, ctx.minimum = inputs
        ctx.save_for_backward(slope)

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor):
        (slope,) = ctx.saved_tensors
        with torch.no_grad():
            u = -ctx.minimum.solve(cotangents.detach())
        if torch.is_grad_enabled():
            u = refuse_derivatives(u, _ONCE, slope, cotangents)
        return None, u, None
