"""The derivative of an outer loss at the minimum of an inner loss."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.core.checks import refuse
from metagrad.core.tape import refuse_transforms
from metagrad.core.tree import Tree, leaf_names, tree_leaves
from metagrad.hypergrad.implicit import CG, check_solution
from metagrad.hypergrad.problem import CALL, BilevelLoss, Derivative, HypergradientMethod, Parameters, Problem


def hypergradient(
    outer_loss: BilevelLoss,
    inner_loss: BilevelLoss,
    params: Parameters,
    hyper: Tree,
    *,
    method: HypergradientMethod | None = None,
    create_graph: bool = False,
) -> Tree:
    r"""Differentiate an outer loss at the minimum of an inner loss with respect to hyperparameters of both.

    .. math::
        \frac{d}{d\lambda} f(\phi^*(\lambda), \lambda), \qquad \phi^*(\lambda) = \arg\min_\phi g(\phi, \lambda)

    ========================== ================================== ====================================================
    method                     cost                               error
    ========================== ================================== ====================================================
    ``Exact``                  n products with the Hessian        rounding
    ``CG``                     one product per step               the residual of its solve
    ``Unroll``                 one second derivative per step     none for its steps from ``params``, at any order
    ``Neumann``                one product per step               falls with :math:`(1 - \alpha \lambda_{\min})^k`
    ``Nystrom``                ``rank`` products                  the eigenvalues beyond the rank, and its damping
    ``FirstOrder``             none, or a mixed derivative        the Hessian's distance to a multiple of the identity
    ``FiniteDifference``       4 gradients                        as ``FirstOrder``, plus the square of a difference
    ========================== ================================== ====================================================

    Args:
        outer_loss: ``outer_loss(params, hyper)``, a tensor with one element.
        inner_loss: ``inner_loss(params, hyper)``, a tensor with one element. Deterministic.
        params: Parameters by name, at the minimum of the inner loss. For ``Unroll``, the start of its steps.
            Only the stored values of a :class:`~metagrad.sparse.SparseTensor` are parameters. All parameters are
            treated as constants.
        hyper: The hyperparameters: a dict, or another pytree, of floating point tensors or SparseTensors.
        method: A row of the table. None means ``CG()``.
        create_graph: Make the derivative differentiable with respect to ``hyper``. ``Unroll`` supports any order, and
            ``CG`` and ``Exact`` support one more derivative. Every other method raises.

    Returns:
        A pytree like ``hyper``. The derivative of a SparseTensor is on the same pattern.

    Raises:
        ValueError: A loss is not a scalar, or neither loss depends on a part of ``hyper``. The inner loss does not
            depend on a parameter. An operation has no derivative or an incorrect derivative. The method does not
            support ``create_graph``.
        TypeError: ``params`` or ``hyper`` has an entry that is not a floating point tensor.
        SolveError: The Hessian of the inner loss is not positive definite, or a product with it is not finite.

    Example:
        A penalty on :math:`\phi`: :math:`\phi^* = 1 / (1 + \lambda)`, and :math:`f = \phi` has
        :math:`-1 / (1 + \lambda)^2`:

        >>> def inner(params, hyper): return (params["phi"] - 1) ** 2 + hyper["lam"] * params["phi"] ** 2
        >>> params, hyper = {"phi": torch.tensor(0.5)}, {"lam": torch.tensor(1.0)}
        >>> metagrad.hypergradient(lambda params, hyper: params["phi"], inner, params, hyper)
        {'lam': tensor(-0.2500)}

    References:
        Bengio, "Gradient-based optimization of hyperparameters", Neural Computation 12(8), 2000; Grazzi, Franceschi,
        Pontil, Salzo, "On the iteration complexity of hypergradient computation", ICML 2020.
    """
    refuse_transforms(CALL)
    problem = Problem(outer_loss, inner_loss, params, hyper, create_graph)
    return completed(problem, checked(CG() if method is None else method).estimate(problem))


def checked(method: HypergradientMethod) -> HypergradientMethod:
    """Return ``method``. Raise ``TypeError`` unless ``method`` is a hypergradient method."""
    if isinstance(method, type) or not hasattr(method, "estimate"):
        refuse("hypergradient(..., method)", "a method such as hypergrad.CG(steps=20)", method, TypeError)
    return method


def completed(problem: Problem, estimate: Derivative) -> Tree:
    """Return an estimate as a pytree like ``hyper``.

    Raises:
        SolveError: The solve failed.
        ValueError: A part of ``hyper`` is unused, or a derivative is not finite.
    """
    if estimate.solution is not None:
        check_solution(CALL, estimate.solution, estimate.residual)
    leaves, names, found = tree_leaves(problem.hyper), leaf_names(problem.hyper, "hyper"), list[Tensor]()
    for name, leaf, gradient in zip(names, leaves, estimate.gradient, strict=True):
        if leaf.numel() and gradient is None:
            raise ValueError(
                f"{CALL}: neither loss depends on {name}. Leave it out of hyper, or look for a detach."
            )
        found.append(torch.zeros_like(leaf) if gradient is None else gradient.to(leaf.dtype))
        if not is_finite(found[-1:]):
            raise ValueError(
                f"{CALL}: the derivative of {name} has nan or inf. Look for them in the losses at params, and in "
                "their derivatives."
            )
    return problem.hyper_of(found)
