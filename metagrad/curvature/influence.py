"""Influence functions: how much the loss of a query changes if a training example is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.autograd.derivatives.recorded import split_rows
from metagrad.core._torch import named_modules
from metagrad.core.checks import check_count, refuse
from metagrad.core.tree import LossFn, Params, tensors_in, tree_map
from metagrad.curvature.kronecker.groups import refuse_batch_norms
from metagrad.curvature.kronecker.operator import Kronecker
from metagrad.curvature.likelihoods import evaluate
from metagrad.curvature.operators.batches import Batch, Reduction, count_of, each_batch, num_data, varies
from metagrad.curvature.operators.ggn import ggn
from metagrad.curvature.operators.operator import Operator
from metagrad.curvature.operators.problem import Model, ModelEvaluation, ModelProblem
from metagrad.curvature.operators.space import Parameters, values_of
from metagrad.curvature.rows import norm
from metagrad.curvature.solvers.solve import APPROXIMATE, Rows, SolveError, Solver

Queries: TypeAlias = "Batch | Iterable[Batch] | Callable[[Params], Tensor]"
"""Queries as batches ``(x, y)``, or as a function of the parameters that returns measurements, ``[queries]``."""


@dataclass(frozen=True, eq=False, repr=False)
class InfluenceScores:
    r"""The result of :func:`influence`.

    Attributes:
        scores: By how much the loss of a query grows if an example is left out, ``[queries, examples]``. Without
            queries ``[examples]``.
        residual: :math:`|(G + \gamma) u - q| / |q|` of the solve for each query. It measures the accuracy of
            the inverse.
    """

    scores: Tensor
    residual: Tensor

    def __repr__(self) -> str:
        return (
            f"InfluenceScores(scores={list(self.scores.shape)}, residual at most {self.residual.max():.2g})"
        )

    def top(self, k: int) -> Tensor:
        """Return the indices of the most helpful examples of each query, ``[queries, k]``, best first."""
        return self.scores.topk(min(check_count("InfluenceScores.top(k)", k), self.scores.shape[-1])).indices


def influence(
    model: Model,
    loss_fn: LossFn,
    params: Parameters,
    train: Batch | Iterable[Batch],
    queries: Queries | None = None,
    *,
    damping: float,
    preconditioner: Kronecker | Rows | None = None,
    method: str | Solver = "cg",
    max_steps: int = 10,
    reduction: Reduction | None = None,
) -> InfluenceScores:
    r"""Return how much the loss of each query grows if a training example is left out. Positive scores are helpful.

    .. math:: s_{jn} = \frac{1}{N} \nabla q_j^\top (G + \gamma I)^{-1} \nabla \ell_n

    to first order, for parameters at a minimum of the mean loss of N examples. The unit is the loss of one
    query. If the loss is a sum, the factor 1 / N is absent. :math:`G` is the Gauss-Newton matrix of
    :func:`ggn`. Pass the :math:`\gamma` of a training penalty :math:`\tfrac{\gamma}{2} |\theta|^2` as
    ``damping``. Products with the Jacobian give the scores, so gradients of single training examples are
    never stored.

    =========== =======================================================================================
    method      inverse
    =========== =======================================================================================
    ``"cg"``    ``max_steps`` steps of conjugate gradients for each query, with the preconditioner
    ``"kfac"``  the inverse of a :func:`kfac` operator, passed as ``preconditioner``. It ranks examples roughly
    ``"exact"`` the factorized matrix, for few parameters
    a solver    any solver of ``metagrad.curvature.solvers``
    =========== =======================================================================================

    Args:
        model: As for :func:`ggn`. No batch norm and no dropout may be in training mode.
        loss_fn: As for :func:`ggn`.
        params: The parameters, as for :func:`ggn`.
        train: The training examples, one batch ``(x, y)`` or batches. The first dimension counts examples.
        queries: Batches whose examples are the queries. A function of the parameters that returns one measurement
            for each query, such as a margin, is also accepted. None means that each training example is its own
            query.
        damping: The number :math:`\gamma`, 0 or more.
        preconditioner: An operator of :func:`kfac` on the same parameters, or a preconditioner of :func:`solve`.
        method: The method.
        max_steps: Maximum number of steps for each query.
        reduction: As for :func:`ggn`.

    Raises:
        ValueError: As for :func:`ggn`. It is also raised if a batch norm or dropout is in training mode, the queries
            do not depend on the parameters, or the preconditioner has other parameters.
        SolveError: The matrix is singular or indefinite.

    Example:
        The mean of 1 and 3, fitted by squares. To first order, the loss of the query 3 grows by 1 without the example
        3, and falls by 1 without the example 1:

        >>> params, model = {"mean": torch.tensor([2.0])}, lambda params, x: params["mean"] + 0 * x
        >>> train = torch.zeros(2), torch.tensor([1.0, 3.0])
        >>> found = metagrad.influence(
        ...     model, torch.nn.functional.mse_loss, params, train, (torch.zeros(1), torch.tensor([3.0])), damping=0.0
        ... )
        >>> found.scores, found.top(1)
        (tensor([[-1.,  1.]]), tensor([[1]]))

    References:
        Koh, Liang, "Understanding black-box predictions via influence functions", ICML 2017; Grosse et al., "Studying
        large language model generalization with influence functions", arXiv:2308.03296; Bae et al., "If influence
        functions are the answer, then what is the question?", NeurIPS 2022, for the Gauss-Newton matrix.
    """
    call = "influence(model, loss_fn, params, train, queries)"
    problem = ModelProblem(call, model, loss_fn, params)
    refuse_batch_norms(call, model)
    for path, module in named_modules(model) if isinstance(model, nn.Module) else ():
        if module.training and varies(module):
            refuse(f"{call}: {path!r} draws random numbers", "model.eval()", module)
    if isinstance(preconditioner, Kronecker) and not preconditioner.space.is_same(problem.space):
        refuse(f"{call}: preconditioner", f"an operator on {problem.space}", preconditioner.space)
    with ggn(model, loss_fn, params, train, reduction=reduction) as G:
        solve = partial(_solve, call, G, damping, preconditioner, method, max_steps)
        solved = None if queries is None else solve(_query_gradients(problem, queries))
        scores, residuals, total = list[Tensor](), list[Tensor](), 0.0
        for evaluation in map(problem.evaluate, each_batch(call, train, problem.space.device)):
            count = count_of(call, evaluation.batch, evaluation.known, reduction)
            weight, total = (1.0, 1.0) if count is None else (count, total + count)
            gradients = evaluation.loss_gradients()
            if solved is not None:
                scores.append(_products(evaluation, gradients, solved[0]) * weight)
                continue
            products = list[Tensor]()
            for rows in evaluation.example_rows(gradients, problem.space.names):  # of the terms of the loss
                own, residual = solve(rows)
                products.append((rows * own).sum(-1))
                residuals.append(residual)
            scores.append(torch.cat(products) * weight**2 / _own_counts(evaluation, reduction))
    if solved is not None:
        return InfluenceScores(torch.cat(scores, 1) / total, solved[1])
    return InfluenceScores(torch.cat(scores) / total, torch.cat(residuals))


def measurement_gradients(call: str, params: Parameters, measure: Callable[[Params], Tensor]) -> Tensor:
    """Return the flat gradient of each measurement that a function of the parameters returns, ``[k, n]``."""
    leaves = {name: values_of(p).detach().requires_grad_() for name, p in params.items()}
    with torch.enable_grad():
        values: Any = measure(leaves)
    if not isinstance(values, Tensor) or values.ndim != 1 or not values.requires_grad:
        refuse(call, "a function of the parameters that returns [k] measurements", values)
    return torch.stack([_flat_gradient(value, list(leaves.values())) for value in values])


def _flat_gradient(value: Tensor, inputs: list[Tensor]) -> Tensor:
    parts = torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def _query_gradients(problem: ModelProblem, queries: Any) -> Tensor:
    """Return the flat gradient of each query."""
    if callable(queries):
        measure: Any = queries
        return measurement_gradients(f"{problem.call}: queries", problem.params, measure)
    found = list[Tensor]()
    for batch in each_batch(problem.call, queries, problem.space.device):
        if not all(leaf.ndim for leaf in tensors_in(batch)):
            refuse(f"{problem.call}: queries", "a first axis of examples, as in (x[:1], y[:1])", "a scalar")
        for j in range(num_data(problem.call, batch)):
            one = problem.evaluate(tree_map(lambda leaf: leaf[j : j + 1], batch))  # noqa: B023
            found.append(_flat_gradient(one.loss, one.recorded.inputs))
    if not found:
        refuse(f"{problem.call}: queries", "at least one query", 0)
    return torch.stack(found)


def _own_counts(evaluation: ModelEvaluation, reduction: Reduction | None) -> Tensor:
    """Return the divisor of the mean of each example alone, ``[examples]``. 1 if it is zero or the loss is a sum."""
    found = evaluation.loss.new_ones(evaluation.num_examples)
    for n in range(len(found)):
        output, one = tree_map(lambda leaf: leaf[n : n + 1], (evaluation.output, evaluation.batch))  # noqa: B023
        known = evaluate(evaluation.problem.loss_fn, output, one[1]).known
        found[n] = count_of(evaluation.problem.call, one, known, reduction) or 1
    return found


def _solve(
    call: str, matrix: Operator, damping: float, by: Any, method: str | Solver, max_steps: int, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the solutions for rows of gradients, and their relative residuals."""
    if method == "kfac":
        if not isinstance(by, Kronecker):
            refuse(f'{call}: method="kfac" needs preconditioner', "an operator of kfac", by, TypeError)
        found: Tensor = by.solve(rows, damping).value
        residual = norm(rows - matrix.multiply(found) - damping * found)
    else:
        kind = {"exact": "dense", "cg": "auto"}.get(method, method) if isinstance(method, str) else method
        by = by.inverse(damping) if isinstance(by, Kronecker) else by
        solution = matrix.solve(
            rows, method=kind, damping=damping, max_steps=max_steps, preconditioner=by, check_symmetry=False
        )
        found, residual = solution.value.detach(), solution.stats.residual_norms
        if solution.result not in APPROXIMATE:
            raise SolveError(f"{call}: {solution.result.value}")
    return found, residual / norm(rows).clamp(min=torch.finfo(rows.dtype).tiny)


def _products(evaluation: ModelEvaluation, gradients: Sequence[Tensor], solved: Tensor) -> Tensor:
    """Return the products of each example's gradient with rows, ``[rows, examples]``."""
    found = list[Tensor]()
    for row in solved:
        tangents = split_rows(evaluation.recorded.push(row), evaluation.outputs)
        parts = [g * z for g, z in zip(gradients, tangents, strict=True)]
        found.append(torch.stack([p.reshape(evaluation.num_examples, -1).sum(1) for p in parts]).sum(0))
    return torch.stack(found)
