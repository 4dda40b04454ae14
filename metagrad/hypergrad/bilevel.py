"""Bilevel optimization: steps on the inner loss, then a step of the hyperparameters along the hypergradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import backward
from metagrad.core.checks import check_count, check_function
from metagrad.core.tree import Params, Tree, detached, leaf_names, tree_leaves
from metagrad.hypergrad.hypergradient import checked, completed
from metagrad.hypergrad.implicit import CG
from metagrad.hypergrad.problem import HypergradientMethod, Parameters, Problem
from metagrad.hypergrad.unroll import moved_by
from metagrad.optim.rule import Rule
from metagrad.optim.transforms.chain import check_rule
from metagrad.sparse.tables.row_sparse import RowSparse

CALL = "bilevel(outer_loss, inner_loss, params, hyper)"

OptimizerLike: TypeAlias = "Rule | Callable[[list[Tensor]], torch.optim.Optimizer]"
"""A rule of :mod:`metagrad.optim.rules`, or a function from a list of tensors to a ``torch.optim`` optimizer."""

Loss: TypeAlias = Callable[..., Tensor]
"""``loss(params, hyper)``, or with batches ``loss(params, hyper, batch)``."""


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
    check_count(f"{CALL}: steps", steps)
    check_count(f"{CALL}: inner_steps", inner_steps, 0)
    if callback is not None:
        check_function(CALL, "callback", callback)
    method = checked(CG() if method is None else method)
    outers, inners = _losses(outer_loss, outer_batches), _losses(inner_loss, inner_batches)
    draws = callable(params) and not isinstance(params, torch.nn.Module)  # a ParameterDict is callable
    if draws and warm_start:
        raise ValueError(
            f"{CALL}: a function as params starts again at each outer step, and a warm start continues from the last "
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
        upper.follow(tree_leaves(completed(problem, method.estimate(problem))))
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
                f"{CALL}: the batches are at their end, and there are none when iterated over again. Pass a list or "
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
            check_rule(CALL, optimizer, which)
            self.state = optimizer.init(self.values)
            return
        self.optimizer = optimizer(list(self.values.values())) if callable(optimizer) else None
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{CALL}: {which} must be a functional optimizer, such as mg.optim.rules.adam(), or a function of a "
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
