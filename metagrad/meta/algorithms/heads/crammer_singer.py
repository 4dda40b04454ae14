"""The dual of the multi-class support vector machine: solved by Clarabel, differentiated as a linear system."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import Function, from_numpy, linalg

_ACCURACY = 1e-10  # of the solver, in its own measures
_CORRECTIONS = 5  # of active bounds that the solver could not tell from others
_TOLERANCE = 1e-8  # to which bounds and signs of multipliers must hold, relatively
_STRICT = 1e-11  # how large the larger of distance and multiplier must be for a derivative, likewise


class Dual(NamedTuple):
    r"""The dual problems of a batch of tasks.

    .. math::
        \min_\alpha \; \tfrac12 \sum_k \alpha_k^\top (K + \delta I) \alpha_k - \sum_n \alpha_{n y_n}
        \quad \text{s.t.} \quad \alpha_{nk} \le C \, [y_n = k], \quad \sum_k \alpha_{nk} = 0

    Attributes:
        gram: :math:`K + \delta I`, ``[tasks, n, n]``, float64.
        labels: One-hot classes ``[tasks, n, ways]``, float64; zeros for padding, which takes no part.
        C: The bound.
    """

    gram: Tensor
    labels: Tensor
    C: float

    @property
    def exists(self) -> Tensor:
        """Which variables a task has, ``[tasks, n, ways]``, bool: of its examples and its classes; others are 0."""
        return self.labels.any(2, keepdim=True) & self.labels.any(1, keepdim=True)


def solve(call: str, problem: Dual) -> Tensor:
    r"""Return the solution of each task, differentiable with respect to the Gram matrix.

    Clarabel finds which bounds are active. Given these, the solution is that of a linear system, the conditions of
    Karush, Kuhn and Tucker, which is solved by operations of torch: so a solution has the accuracy of float64, and
    derivatives of every order, wherever the active bounds stay the same nearby (strict complementarity).

    Args:
        call: How errors begin.
        problem: The dual problems.

    Returns:
        :math:`\alpha`, ``[tasks, n, ways]``.

    Raises:
        ImportError: Clarabel is not installed.
        ValueError: A task has no solution to the accuracy needed, or one that is to be differentiated has no
            derivative.
        RuntimeError: It is called inside ``torch.vmap``.
    """
    problem = _without_nonfinite(problem)
    active = _ActiveBounds.apply(call, problem.gram.detach(), *problem[1:])
    assert isinstance(active, Tensor)
    for _ in range(_CORRECTIONS):
        alpha, slack = _given_active(problem, active)
        if bool((wrong := slack < 0).any()):
            active = active ^ wrong
        else:
            break
    _check(call, problem, slack.flatten(1).amin(1))
    return alpha


def _without_nonfinite(problem: Dual) -> Dual:
    """Leave tasks that are not finite to their loss, which tells them: their embeddings make the weights NaN."""
    gram = problem.gram
    finite = gram.detach().isfinite().flatten(1).all(1)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return problem._replace(gram=torch.where(finite[:, None, None], gram, eye))


class _ActiveBounds(Function):
    """Find which bounds hold with equality, ``[tasks, n, ways]``, bool; a Function sees values in torch.func too."""

    @staticmethod
    def forward(call, gram, labels, C):
        solver = _clarabel(call)
        found = [_solve_one(solver, g, y, C) for g, y in zip(gram.cpu(), labels.cpu(), strict=True)]
        return torch.stack(found).to(gram.device)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        return None

    @staticmethod
    def vmap(info, in_dims, call, gram, labels, C):
        raise RuntimeError(
            f"{call}: the solver is called for each task on its own, so torch.vmap cannot pass through it. Put the "
            "tasks into one batch."
        )


def _clarabel(call: str) -> ModuleType:
    try:
        import clarabel
    except ImportError as error:
        raise ImportError(
            f"{call}: the support vector machine needs the solver Clarabel. Install it by pip install "
            "'metagrad[qp]', or take head=\"ridge\", which needs none."
        ) from error
    return clarabel


def _solve_one(clarabel: ModuleType, gram: Tensor, labels: Tensor, C: float) -> Tensor:
    """Return which bounds of one task are active: those whose multiplier is larger than the distance from them."""
    examples, classes = labels.any(1), labels.any(0)
    own, y = gram[examples][:, examples].numpy(), labels[examples][:, classes].t().flatten().numpy()
    n, ways = len(own), int(classes.sum())
    form = _form(n, ways)
    bounds = np.concatenate([np.zeros(n), C * y])
    cones = [clarabel.ZeroConeT(n), clarabel.NonnegativeConeT(n * ways)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = _ACCURACY
    solution = clarabel.DefaultSolver(
        form.quadratic(own), -y, form.constraints, bounds, cones, settings
    ).solve()
    multipliers, distances = np.array(solution.z[n:]), np.array(solution.s[n:])
    exists = examples.unsqueeze(1) & classes
    active = ~exists
    active[exists] = from_numpy(multipliers > distances).view(ways, n).t().flatten()
    return active


class _Form(NamedTuple):
    """What programs of one size have in common; their variables are ordered class by class.

    Attributes:
        constraints: The matrix of the sums over classes, above that of the bounds.
        rows: Of the upper triangle of a Gram matrix, column by column.
        columns: Likewise.
        pattern: Indices and pointers of a block of these for each class, compressed by columns.
    """

    constraints: Any
    rows: np.ndarray
    columns: np.ndarray
    pattern: tuple[np.ndarray, np.ndarray]

    def quadratic(self, gram: np.ndarray) -> Any:
        """Return the upper triangle of the quadratic part."""
        from scipy import sparse

        size = self.constraints.shape[1]
        values = np.tile(gram[self.rows, self.columns], size // len(gram))
        return sparse.csc_array((values, *self.pattern), shape=(size, size))


@functools.lru_cache(maxsize=32)
def _form(n: int, ways: int) -> _Form:
    from scipy import sparse

    columns, rows = np.tril_indices(n)
    blocks: Any = sparse.block_diag([sparse.csc_array(np.triu(np.ones((n, n))))] * ways, format="csc")
    sums = sparse.hstack([sparse.eye_array(n)] * ways)
    constraints = sparse.vstack([sums, sparse.eye_array(n * ways)], format="csc")
    return _Form(constraints, rows, columns, (blocks.indices, blocks.indptr))


def _given_active(problem: Dual, active: Tensor) -> tuple[Tensor, Tensor]:
    r"""Solve the optimality conditions, where it is known which bounds are active.

    The free :math:`\alpha_{nk}` satisfy :math:`((K + \delta I) \alpha_k)_n + \nu_n = [y_n = k]` with a multiplier
    :math:`\nu_n` of each sum: a system for each class, and one for :math:`\nu`.

    Returns:
        The solution, and what must not be negative: of an active bound its multiplier, of others their distance, each
        relative to others of its task.
    """
    gram, labels, C = problem
    free = (~active).to(gram.dtype).mT.unsqueeze(-1)  # [tasks, ways, n, 1]
    y, shared = labels.mT.unsqueeze(-1), gram.unsqueeze(1)
    fixed = (1 - free) * C * y
    system = free * shared * free.mT + torch.diag_embed((1 - free).squeeze(-1))
    right = torch.cat([free * (y - shared @ fixed), torch.diag_embed(free.squeeze(-1))], dim=-1)
    particular, homogeneous = linalg.solve_ex(system, right)[0].split([1, gram.shape[-1]], dim=-1)
    padding = torch.diag_embed((~problem.exists.any(2)).to(gram.dtype))
    nu = linalg.solve_ex(homogeneous.sum(1) + padding, (particular + fixed).sum(1))[0].unsqueeze(1)
    alpha = particular - homogeneous @ nu + fixed
    with torch.no_grad():
        scores, distances = shared @ alpha, C * y - alpha
        relative = torch.where(
            free == 0, (y - scores - nu) / (1 + largest(scores)), distances / largest(alpha)
        )
    return alpha.squeeze(-1).mT, relative.squeeze(-1).mT.masked_fill(~problem.exists, torch.inf)


def largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of each task, ``[tasks, 1, 1, 1]``."""
    return tensor.abs().amax((1, 2, 3), keepdim=True)


@torch.no_grad()
def _check(call: str, problem: Dual, lowest: Tensor) -> None:
    """Refuse what is no solution, and one without a derivative where that is asked for."""
    if (task := _first(~(lowest > -_TOLERANCE))) is not None:
        raise ValueError(
            f"{call}: the quadratic program of task {task} has no solution to {_TOLERANCE:g} in float64. Are its "
            "support embeddings linearly dependent, or very large? Take a larger damping, or normalise them."
        )
    if problem.gram.requires_grad and (task := _first(lowest < _STRICT)) is not None:
        raise ValueError(
            f"{call}: the solution of the quadratic program of task {task} has no derivative: a bound is active with "
            "a multiplier of zero, as it can be where examples are equal. Change the examples, damping or C."
        )


def _first(where: Tensor) -> int | None:
    """Return the number of the first task of which it is true."""
    return int(where.nonzero()[0]) if bool(where.any()) else None
