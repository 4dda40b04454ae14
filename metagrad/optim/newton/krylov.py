"""Conjugate gradients as optimizers use them: row by row, each with its own matrix, and differentiable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.linear_map import Rows
from metagrad.curvature.rows import dot
from metagrad.curvature.solvers.cg import ConjugateGradients
from metagrad.curvature.solvers.iteration import initial, length
from metagrad.optim.hyperparameters import check_count


class Pairs(NamedTuple):
    """Directions and their products, oldest first; empty places are zero, and come before."""

    moves: tuple[Tensor, ...]  # directions p, [tasks, n] each
    changes: tuple[Tensor, ...]  # A p


class PairSampler:
    """Collects at most ``length`` pairs of each row of a solve with right-hand sides ``b``, ``[tasks, n]``.

    Directions whose residual is below the cube root of the precision, relative to ``b``, are left out: by then
    rounding has cost them their conjugacy.
    """

    def __init__(self, b: Tensor, length: int) -> None:
        places = (torch.zeros_like(b),) * length
        self.pairs = Pairs(places, places)
        self._least = torch.finfo(b.dtype).eps ** (2 / 3) * dot(b, b).detach()

    def __call__(self, step: int, r: Tensor, p: Tensor, q: Tensor, where: Tensor) -> None:
        """Take the pair of a step where it is to be kept."""
        where = where & (dot(r, r) > self._least)
        place = place_given_up(step, len(self.pairs.moves))
        if place is not None and bool(where.any()):
            both = zip(self.pairs, (p, q), strict=True)
            self.pairs = Pairs(*(_exchanged(old, place, new, where) for old, new in both))


def place_given_up(step: int, length: int) -> int | None:
    """Say which of the places of steps 0, ..., ``step`` - 1 is given up for this one; None keeps them all.

    As long as there are empty ones, the first place is. Of a full history, whose steps are multiples of a stride,
    every second is then replaced in turn by the next multiple of twice the stride; so a solve of any length leaves
    evenly spread steps, the first among them, without knowing its length in advance.

    References:
        Morales, Nocedal, "Automatic preconditioning by limited memory quasi-Newton updating", SIAM J. Optim. 10(4),
        2000, section 2.1.

    Example:
        >>> from metagrad.optim.newton.krylov import place_given_up
        >>> kept = [None] * 4
        >>> for step in range(13):
        ...     place = place_given_up(step, 4)
        ...     kept = kept if place is None else [*kept[:place], *kept[place + 1 :], step]
        >>> kept
        [0, 4, 8, 12]
    """
    if step < length:
        return 0
    stride = 1
    while step >= length * stride:
        stride *= 2
    number, rest = divmod(step, stride)
    return None if rest else number - (length + 1) // 2 + 1


def _exchanged(old: tuple[Tensor, ...], place: int, new: Tensor, where: Tensor) -> tuple[Tensor, ...]:
    exchanged = (*old[:place], *old[place + 1 :], new)
    if bool(where.all()):
        return exchanged
    return tuple(torch.where(where[:, None], a, b) for a, b in zip(exchanged, old, strict=True))


class Krylov(NamedTuple):
    """The result of conjugate gradients, for each row."""

    x: Tensor  # [tasks, n]
    model: Tensor  # x^T A x / 2 - b^T x, [tasks]
    steps: Tensor  # int64 [tasks]
    ending: Tensor  # index into RESULTS, int64 [tasks]
    products: int  # of all rows together
    pairs: Pairs  # of search directions p and products A p


def conjugate_gradients(
    products: Rows,
    b: Tensor,
    *,
    x0: Tensor | None = None,
    radius: Tensor | None = None,
    metric: Tensor | None = None,
    pairs: int = 0,
    rtol: float = 1e-10,
    progress: float | None = None,
    max_steps: int = 250,
) -> Krylov:
    r"""Minimise :math:`\phi(x) = x^\top A x / 2 - b^\top x` in each row, by conjugate gradients.

    A row ends at a residual of ``rtol`` times that of 0; by Martens' rule; on the trust radius; or at a direction
    :math:`p` with :math:`\kappa = p^\top A p / p^\top p \le 0`. Along that it takes one more step, to the radius if
    there is one, else of the length that :math:`|\kappa|` gives, so that the model falls all the same.

    With a preconditioner :math:`M` the steps are those for :math:`M^{-1/2} A M^{-1/2}`, as many as its eigenvalues
    ask for. The residual that ends a row is all the same :math:`b - A x`, in the Euclidean norm.

    Steps are on the tape if products are: a derivative of what was computed, however early it ended.
    :func:`metagrad.curvature.solve` differentiates solutions implicitly, and has one matrix for all rows.

    Args:
        products: Multiplies all rows, each with its own matrix.
        b: Right-hand sides ``[tasks, n]``.
        x0: Where to begin; rows in which that is worse than 0 begin there.
        radius: Of the trust region around 0, ``[tasks]``; without ``x0`` and ``metric``.
        metric: The diagonal of a preconditioner M that is like A, ``[tasks, n]``, above 0; may be on the tape.
        pairs: How many pairs of :math:`p_i` and :math:`A p_i` to keep of each row, evenly over its steps, of
            directions with :math:`\kappa > 0`; see :class:`PairSampler`.
        rtol: Relative tolerance of a residual; the precision of the dtype bounds it.
        progress: Stop at step i when :math:`\phi` fell by less than :math:`k \epsilon |\phi|` in the last
            :math:`k = \max(10, i / 10)` steps; None never does.
        max_steps: The most steps.

    Returns:
        Solutions, and how they ended.

    Example:
        >>> from metagrad.optim.newton.krylov import conjugate_gradients
        >>> found = conjugate_gradients(lambda rows: rows * torch.tensor([1.0, 4.0]), torch.tensor([[2.0, 4.0]]))
        >>> found.x.round(decimals=4), found.model, int(found.steps)
        (tensor([[2., 1.]]), tensor([-4.]), 2)

    References:
        Hestenes, Stiefel, J. Res. NBS 49, 1952; Steihaug, SIAM J. Numer. Anal. 20(3), 1983; Martens, "Deep learning
        via Hessian-free optimization", ICML 2010, section 4.4; Dauphin et al., "Identifying and attacking the saddle
        point problem", NeurIPS 2014, for the step by the absolute curvature.
    """
    x, r, count = _start(products, b, x0)
    is_sound = torch.ones(len(b), dtype=torch.bool, device=b.device)
    if metric is not None:
        is_sound = metric.detach().isfinite().all(-1)
        metric = torch.where(is_sound[:, None], metric, 1.0)
    sampler = PairSampler(b, pairs)
    run = ConjugateGradients(
        lambda rows, active: products(rows),
        tolerance=max(rtol, 2 * torch.finfo(b.dtype).eps) * length(b),
        precondition=None if metric is None else lambda rows: rows / metric,
        radius=radius,
        progress=progress,
        follows_negative=True,
        observe=sampler if pairs else None,
    ).run(b, x, r, max_steps, is_sound)
    model = -0.5 * dot(run.x, b + run.r)
    return Krylov(run.x, model, run.steps, run.status, count + run.products, sampler.pairs)


def _start(products: Rows, b: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return x0 where the model is lower there than at 0, its residual, and how many products that took."""
    x, r = initial(products, b, x0)
    if x0 is None:
        return x, r, 0
    is_better = (dot(x0, b + r) > 0)[:, None]
    return torch.where(is_better, x, 0.0), torch.where(is_better, r, b), 1


def check_solver(call: str, rtol: float, progress: float | None, max_steps: int) -> None:
    """Refuse numbers of the inner solver that are out of their range."""
    if not 0 < rtol < 1:
        raise ValueError(f"{call}: rtol must be between 0 and 1, got {rtol}.")
    if progress is not None and not progress > 0:
        raise ValueError(f"{call}: progress must be above 0, or None, got {progress}.")
    check_count(call, "max_steps", max_steps)
