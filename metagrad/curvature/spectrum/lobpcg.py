"""LOBPCG: eigenvectors of one end of the spectrum by a block of conjugate gradients on the Rayleigh quotient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.spectrum.lanczos import check_symmetric, checked_products, orthogonalise, row_norms
from metagrad.curvature.spectrum.subspace import Subspace


class LobpcgState(NamedTuple):
    """A block of approximate eigenvectors, and the directions that improved it last.

    Attributes:
        vectors: Orthonormal rows X, shape [block, n].
        images: The operator times X.
        directions: Orthonormal rows P, orthogonal to X, shape [at most block, n].
        direction_images: The operator times P.
        values: The Rayleigh quotients of X, largest first, float64 on the CPU, shape [block].
        scale: The largest norm of a product so far: a lower bound of the operator's norm.
        matvecs: Products in all.
    """

    vectors: Tensor
    images: Tensor
    directions: Tensor
    direction_images: Tensor
    values: Tensor
    scale: float
    matvecs: int


def lobpcg(
    operator: LinearMap,
    k: int,
    *,
    sign: int,
    against: Tensor,
    scale: float,
    rtol: float,
    max_products: int,
    generator: torch.Generator | None,
    call: str,
) -> Subspace:
    r"""Find eigenvectors of the k largest eigenvalues (``sign=1``) or smallest (-1).

    The search is in the complement of the orthonormal rows ``against``, other eigenvectors, and ``scale`` is what is
    known of the norm already. Each step maximises the Rayleigh quotient over the block, its residuals and its last
    directions:

    .. math:: X_{i+1} = \mathrm{Ritz}_k \, \mathrm{span}(X_i, \; A X_i - X_i \Theta, \; P_i)

    The three are kept orthonormal, the new directions by the coordinates of the Ritz vectors, so that their images
    are combinations that lose nothing. A block of more vectors than k (half as many again, and at least three more)
    sees repeated eigenvalues, and does not wait for the gap below the k-th.

    References:
        Knyazev, "Toward the optimal preconditioned eigensolver", SIAM J. Sci. Comput. 23, 2001; Hetmaniuk, Lehoucq,
        "Basis selection in LOBPCG", J. Comput. Phys. 218, 2006; Duersch, Shao, Yang, Gu, "A robust and efficient
        implementation of LOBPCG", SIAM J. Sci. Comput. 40, 2018.
    """
    block = block_size(k, against.shape[1] - len(against))
    state = _start(operator, block, sign, against, scale, generator, call)
    while True:
        residuals = state.images - state.values.to(state.vectors).unsqueeze(1) * state.vectors
        residuals = residuals - (residuals @ against.t()) @ against
        open_rows = row_norms(residuals).cpu().double() > rtol * state.scale / 2  # for rounding
        if not bool(open_rows[:k].any()):
            break
        known = torch.cat([state.vectors, state.directions])
        new = orthonormal_rows(residuals[open_rows.to(residuals.device)], torch.cat([against, known]))
        new = new[: max(0, max_products - state.matvecs)]
        if len(new) == 0:
            break
        state = _improve(state, known, new, checked_products(operator, new, call).detach(), sign, call)
    return Subspace(state.vectors[:k], state.scale, state.matvecs, not bool(open_rows[:k].any()))


def block_size(k: int, n: int) -> int:
    """Return how many vectors are iterated on for the sake of k; none for none."""
    return min(n, max(k + 3, k + k // 2)) if k else 0


def _start(
    operator: LinearMap,
    block: int,
    sign: int,
    against: Tensor,
    scale: float,
    generator: torch.Generator | None,
    call: str,
) -> LobpcgState:
    device = operator.device if generator is None else generator.device
    rows = torch.randn(block, operator.shape[0], dtype=operator.dtype, device=device, generator=generator)
    vectors = orthonormal_rows(rows.to(operator.device), against)
    images = checked_products(operator, vectors, call).detach()
    empty = vectors[:0]
    state = LobpcgState(empty, empty, empty, empty, torch.empty(0), scale, 0)
    return _improve(state, empty, vectors, images, sign, call)


def _improve(
    state: LobpcgState, known: Tensor, new: Tensor, new_images: Tensor, sign: int, call: str
) -> LobpcgState:
    """Take the Ritz vectors of X, P and new orthonormal rows."""
    rows = torch.cat([known, new])
    images = torch.cat([state.images, state.direction_images, new_images])
    projected = (rows @ images.t()).cpu().double()
    scale = max(state.scale, float(row_norms(new_images).max()))
    check_symmetric(
        (projected - projected.t()).abs().max(), torch.tensor(scale, dtype=torch.float64), rows.dtype, call
    )
    values, coordinates = torch.linalg.eigh((projected + projected.t()) / 2)
    order = torch.argsort(values * sign, descending=True)
    block = len(state.vectors) or len(new)
    wanted = coordinates[:, order[:block]]
    moves = wanted.clone()
    moves[: len(state.vectors)] = 0.0  # what the block gains from R and P
    moves = orthonormal_rows(moves.t(), wanted.t()) if len(state.vectors) else moves.t()[:0]
    turn, step = wanted.t().to(rows), moves.to(rows)
    return LobpcgState(
        turn @ rows, turn @ images, step @ rows, step @ images, values[order[:block]], scale,
        state.matvecs + len(new),
    )  # fmt: skip


def orthonormal_rows(rows: Tensor, against: Tensor) -> Tensor:
    """Return an orthonormal basis of what ``rows`` add to orthonormal rows; dependent ones are dropped."""
    found = against
    for row in rows:
        before = row_norms(row)
        rest = orthogonalise(row, found)[0]
        norm = row_norms(rest)
        if float(norm) > 100 * torch.finfo(rows.dtype).eps * float(before):
            found = torch.cat([found, (rest / norm).unsqueeze(0)])
    return found[len(against) :]
