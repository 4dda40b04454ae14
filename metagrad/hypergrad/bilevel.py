"""Bilevel problems: the derivative of an outer loss at the minimum of an inner loss, and descent along it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.core._torch import backward
from metagrad.core.checks import check_count, check_function, refuse
from metagrad.core.tape import refuse_transforms
from metagrad.core.tree import Params, Tree, detached, leaf_names, tree_leaves
from metagrad.hypergrad.implicit import CG, check_solution
from metagrad.hypergrad.problem import CALL, CREATE, BilevelLoss, HypergradientMethod, Parameters, Problem
from metagrad.hypergrad.unroll import moved_by
from metagrad.optim.rule import Rule
from metagrad.optim.transforms.chain import check_rule
from metagrad.sparse.tables.row_sparse import RowSparse

LOOP = "bilevel(outer_loss, inner_loss, params, hyper)"

OptimizerLike: TypeAlias = "Rule | Callable[[list[Tensor]], torch.optim.Optimizer]"
"""A rule of :mod:`metagrad.optim.rules`, or a function from a list of tensors to a ``torch.optim`` optimizer."""

Loss: TypeAlias = Callable[..., Tensor]
"""``loss(params, hyper)``, or with batches ``loss(params, hyper, batch)``."""


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
    problem, method = Problem(outer_loss, inner_loss, params, hyper, create_graph), _checked(method)
    if create_graph and not getattr(method, "is_exact", False):
        raise ValueError(
            f"{CREATE}: {type(method).__name__} approximates the derivative, so its own derivative is not correct. "
            "Take CG, Exact or Unroll."
        )
    return _derivative(problem, method)


def _checked(method: HypergradientMethod | None) -> HypergradientMethod:
    """Return ``method``, or the default. Raise ``TypeError`` unless ``method`` is a hypergradient method."""
    if isinstance(method, type) or not hasattr(method or CG, "estimate"):
        refuse("hypergradient(..., method)", "a method such as hypergrad.CG(steps=20)", method, TypeError)
    return CG() if method is None else method


def _derivative(problem: Problem, method: HypergradientMethod) -> Tree:
    """Return the derivative by a method as a pytree like ``hyper``.

    Raises:
        SolveError: The solve failed.
        ValueError: A part of ``hyper`` is unused, or a derivative is not finite.
    """
    estimate = method.estimate(problem)
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


class BilevelResult(NamedTuple):
    """The result of :func:`bilevel`.

    Attributes:
        params: Parameters after the last inner step.
        hyper: The learned hyperparameters, in their pytree.
        outer_losses: The outer loss before each outer step, ``[steps]``.
        inner_losses: The inner loss after the inner steps of each outer step, ``[steps]``.
    """

    params: Parameters
    hyper: Tree
    outer_losses: Tensor
    inner_losses: Tensor


def bilevel(
    outer_loss: Loss,
    inner_loss: Loss,
    params: Parameters | Callable[[int], Parameters],
    hyper: Tree,
    *,
    inner: OptimizerLike,
    outer: OptimizerLike,
    steps: int,
    inner_steps: int,
    method: HypergradientMethod | None = None,
    warm_start: bool = True,
    inner_batches: Iterable[Any] | None = None,
    outer_batches: Iterable[Any] | None = None,
    callback: Callable[[int, Parameters, Tree, float], object] | None = None,
) -> BilevelResult:
    r"""Minimize an outer loss over hyperparameters, at the minimum of an inner loss that depends on them.

    .. math:: \min_\lambda f(\phi^*(\lambda), \lambda), \qquad \phi^*(\lambda) = \arg\min_\phi g(\phi, \lambda)

    Each outer step takes ``inner_steps`` steps on the inner loss and estimates the hypergradient at the final
    parameters. The outer optimizer uses it as its gradient. ``params`` and ``hyper`` are not modified.

    Args:
        outer_loss: ``outer_loss(params, hyper)``, a scalar. With ``outer_batches``, ``outer_loss(params, hyper,
            batch)``.
        inner_loss: ``inner_loss(params, hyper)``, a scalar. With ``inner_batches``, it also takes a batch.
        params: Parameters by name, the start of the inner steps. Without a warm start, also a function of the outer
            step that returns them. If it draws new parameters, hyperparameters are learned for random
            initializations.
        hyper: A pytree of the hyperparameters, which are learned.
        inner: The optimizer of the parameters: a rule of :mod:`metagrad.optim.rules`, or a function or class that
            makes a ``torch.optim`` optimizer from a list of tensors. Examples are ``metagrad.optim.NewtonCG`` and
            ``functools.partial(torch.optim.SGD, lr=0.1)``.
        outer: The optimizer of ``hyper``, as ``inner``.
        steps: Number of outer steps.
        inner_steps: Number of inner steps for each outer step, 0 or more. ``Unroll`` takes its own steps in
            addition.
        method: The hypergradient method. None means ``CG()``.
        warm_start: Start each outer step from the parameters and optimizer state of the last outer step. Otherwise
            start again from ``params``.
        inner_batches: Batches of the inner loss, one for each inner step, repeated as needed. The hypergradient uses
            the next batch.
        outer_batches: Batches of the outer loss, one for each outer step, repeated as needed.
        callback: Called before each outer step as ``callback(step, params, hyper, outer_loss)``. Torch optimizers
            write into these tensors later.

    Returns:
        Parameters, learned hyperparameters, and losses.

    Raises:
        ValueError: A number is out of its range, there are no batches, or ``params`` is a function with a warm start.
            It is also raised for the reasons of :func:`metagrad.hypergradient`.
        TypeError: An optimizer is neither a rule nor a function of tensors.

    Example:
        Data hyper-cleaning: a weight for each example is learned on clean data. Of ten examples of
        :math:`y = 2 x`, the first three are corrupted:

        >>> x = torch.linspace(-1, 1, 10)
        >>> y = 2 * x + torch.tensor([5.0] * 3 + [0.0] * 7)
        >>> def inner(params, hyper):
        ...     losses = (params["w"] * x + params["b"] - y) ** 2
        ...     return (hyper["weight"].sigmoid() * losses).mean() + 1e-3 * params["w"] ** 2
        >>> def outer(params, hyper):
        ...     return ((params["w"] * x[3:] + params["b"] - 2 * x[3:]) ** 2).mean()
        >>> found = metagrad.bilevel(
        ...     outer, inner, {"w": torch.zeros(()), "b": torch.zeros(())}, {"weight": torch.zeros(10)},
        ...     inner=metagrad.optim.rules.sgd(lr=0.5), outer=metagrad.optim.rules.adam(lr=0.3),
        ...     steps=30, inner_steps=20,
        ... )
        >>> found.hyper["weight"][:3].max() < found.hyper["weight"][3:].min()
        tensor(True)

    References:
        Franceschi, Frasconi, Salzo, Grazzi, Pontil, "Bilevel programming for hyperparameter optimization and
        meta-learning", ICML 2018, section 5.1 (hyper-cleaning); Ji, Yang, Liang, "Bilevel optimization: convergence
        analysis and enhanced design", ICML 2021, algorithm 1 (warm start); Wang, Zhu, Torralba, Efros, "Dataset
        distillation", arXiv:1811.10959, section 3 (an initialization for each outer step).
    """
    check_count(f"{LOOP}: steps", steps)
    check_count(f"{LOOP}: inner_steps", inner_steps, 0)
    if callback is not None:
        check_function(LOOP, "callback", callback)
    method = _checked(method)
    outers, inners = _losses(outer_loss, outer_batches), _losses(inner_loss, inner_batches)
    draws = callable(params) and not isinstance(params, torch.nn.Module)  # a ParameterDict is callable
    if draws and warm_start:
        raise ValueError(
            f"{LOOP}: a function as params starts again at each outer step, and a warm start continues from the last "
            "one. Pass warm_start=False, or the parameters themselves."
        )

    def begin(step: int) -> Parameters:
        given: Any = params
        return given(step) if draws else given

    first = Problem(outer_loss, inner_loss, begin(0), hyper)
    lower = _Level("inner", inner, first.variables())
    names = leaf_names(hyper, "hyper")
    upper = _Level("outer", outer, dict(zip(names, first.hyper_leaves(), strict=True)))
    outer_losses: list[Tensor] = []
    inner_losses: list[Tensor] = []

    def here(outer_loss: Loss, inner_loss: Loss) -> Problem:
        """Return the problem at the current parameters and hyperparameters."""
        found = first.wrapped({name: v.detach() for name, v in lower.values.items()})
        learned = first.hyper_of([leaf.detach() for leaf in upper.values.values()])
        return Problem(outer_loss, inner_loss, found, learned)

    for step in range(steps):
        if step and not warm_start:
            first = dataclasses.replace(first, params=begin(step))
            lower = _Level("inner", inner, first.variables())
        for _ in range(inner_steps):
            lower.descend(here(outer_loss, next(inners)))
        problem = here(next(outers), next(inners))
        values = problem.variables(), problem.hyper_leaves()
        with torch.no_grad():
            outer_losses.append(problem.outer(*values))
            inner_losses.append(problem.inner(*values))
        if callback is not None:
            callback(step, problem.params, problem.hyper, float(outer_losses[-1]))
        upper.follow(tree_leaves(_derivative(problem, method)))
    last = here(outer_loss, inner_loss)
    return BilevelResult(last.params, last.hyper, torch.stack(outer_losses), torch.stack(inner_losses))


def _losses(loss: Loss, batches: Iterable[Any] | None) -> Iterator[Loss]:
    """Yield the loss of each batch forever, or the loss itself if there are no batches."""

    def of_batch(batch: Any, params: Any, hyper: Any) -> Tensor:
        return loss(params, hyper, batch)

    while batches is None:
        yield loss
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield partial(of_batch, batch)
        if is_empty:
            raise ValueError(
                f"{LOOP}: the batches are at their end, and there are none when iterated over again. Pass a list or "
                "a DataLoader, no iterator."
            )


class _Level:
    """Tensors by name, and the optimizer that updates them."""

    def __init__(self, which: str, optimizer: Any, values: Params) -> None:
        # Optimizers of torch write in place.
        self.values = {name: v.detach().clone().requires_grad_() for name, v in values.items()}
        self.is_rule: bool = hasattr(optimizer, "update") and hasattr(optimizer, "init")
        self.optimizer: Any = optimizer
        self.state: Any = None
        if self.is_rule:
            check_rule(LOOP, optimizer, which)
            self.state = optimizer.init(self.values)
            return
        self.optimizer = optimizer(list(self.values.values())) if callable(optimizer) else None
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{LOOP}: {which} must be a functional optimizer, such as mg.optim.rules.adam(), or a function of a "
                "list of tensors that returns a torch.optim optimizer, such as functools.partial(torch.optim.Adam, "
                f"lr=0.01), got {type(optimizer).__name__}."
            )

    def descend(self, problem: Problem) -> None:
        """Take a step on the inner loss."""
        hyper = [leaf.detach() for leaf in problem.hyper_leaves()]
        if self.is_rule:
            loss_at = partial(problem.inner, hyper=hyper)
            self._move(*moved_by(loss_at, self.values, self.optimizer, self.state, create_graph=False))
            return

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = problem.inner(self.values, hyper)
            backward(loss)
            return loss

        self.optimizer.step(closure)

    def follow(self, gradients: Sequence[Tensor]) -> None:
        """Take a step along a gradient."""
        if self.is_rule:
            by_name = dict(zip(self.values, gradients, strict=True))
            self._move(*self.optimizer.update(by_name, self.state, self.values))
            return
        for leaf, gradient in zip(self.values.values(), gradients, strict=True):
            leaf.grad = gradient.to_coo() if isinstance(gradient, RowSparse) else gradient
        self.optimizer.step()

    def _move(self, values: Params, state: Any) -> None:
        self.values = {name: v.detach().requires_grad_() for name, v in values.items()}
        self.state = detached(state)
