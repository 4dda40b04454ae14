"""The inverse Hessian of L-BFGS for one vector of parameters, without a tape."""

from __future__ import annotations

import torch
from torch import Tensor

_SPARE = 8


class History:
    """The last differences s of places and y of gradients, and the directions that they give.

    They are windows of buffers with room at their ends, where the next pair is written. Nothing within a window is
    written again, so that what was given out stays as it was.

    Args:
        like: A vector of parameters.

    Attributes:
        moves: The differences s, oldest first, ``[k, n]``.
        changes: The differences y, likewise.
        products: The upper triangle of s_i^T y_j, ``[k, k]``.

    Example:
        A pair of a quadratic with the Hessian 4 says all there is to know:

        >>> from metagrad.optim.shells.lbfgs_history import History
        >>> history = History(torch.tensor([8.0]))
        >>> history.add(torch.tensor([1.0]), torch.tensor([4.0]), most=10)
        >>> history.direction(torch.tensor([8.0]))
        tensor([-2.])

    References:
        Byrd, Nocedal, Schnabel, "Representations of quasi-Newton matrices and their use in limited memory methods",
        Mathematical Programming 63, 1994.
    """

    def __init__(self, like: Tensor) -> None:
        self._hold(like.new_empty(0, like.numel()), like.new_empty(0, like.numel()), like.new_empty(0, 0))

    @classmethod
    def of(cls, moves: Tensor, changes: Tensor, products: Tensor) -> History:
        """Make that of pairs which are known; these tensors are not written."""
        history = cls.__new__(cls)
        history._hold(moves, changes, products)
        return history

    def _hold(self, moves: Tensor, changes: Tensor, products: Tensor) -> None:
        self.moves, self.changes, self.products = moves, changes, products
        self._buffers = (moves, changes, products)
        self._end = len(moves)
        self._scale = float(products[-1, -1] / changes[-1].dot(changes[-1])) if len(moves) else 1.0

    def add(self, move: Tensor, change: Tensor, *, most: int) -> None:
        """Add a pair, if it has the curvature that keeps the matrix positive definite; ``most`` are kept."""
        curvature, squared = torch.stack([move.dot(change), change.dot(change)]).tolist()
        if not curvature > torch.finfo(move.dtype).eps * squared:
            return
        if self._end == len(self._buffers[0]):
            self._make_room(most)
        moves, changes, products = self._buffers
        end, kept = self._end, min(len(self.moves), most - 1)
        window = slice(end - kept, end + 1)
        moves[end].copy_(move)
        changes[end].copy_(change)
        self.moves, self.changes, self.products = moves[window], changes[window], products[window, window]
        self.products[:, kept] = self.moves @ change
        self.products[kept, kept] = curvature  # above 0, which the rounding of the product may not be
        self._end, self._scale = end + 1, curvature / squared

    def _make_room(self, most: int) -> None:
        """Copy the windows into buffers that are half as long again."""
        size, n = self.moves.shape
        length = size + min(size, most) // 2 + _SPARE
        moves, changes = (self.moves.new_empty(length, n) for _ in range(2))
        products = self.products.new_zeros(length, length)
        moves[:size], changes[:size], products[:size, :size] = self.moves, self.changes, self.products
        self._buffers, self._end = (moves, changes, products), size

    def direction(self, g: Tensor) -> Tensor:
        """Multiply minus a gradient with the inverse Hessian, by two triangular systems.

        The first pass of the loop of two has the weights of R a = S g, and leaves q = g - Y^T a; the second those of
        R^T c = D a - Y H_0 q, with the diagonal D of R and H_0 a multiple of 1. Without a pair: minus the gradient,
        made no longer than 1 in the sum of its absolute values.
        """
        S, Y, R = self.moves, self.changes, self.products
        if not len(S):
            return g / -max(1.0, g.abs().sum().item())
        D, scale = R.diagonal(), self._scale
        a = torch.linalg.solve_triangular(R, (S @ g)[:, None], upper=True)[:, 0]
        q = torch.addmv(g, Y.mT, a, beta=scale, alpha=-scale)
        rest = torch.addmv(D * a, Y, q, alpha=-1)
        c = torch.linalg.solve_triangular(R.mT, rest[:, None], upper=False)[:, 0]
        return torch.addmv(q, S.mT, c, beta=-1, alpha=-1)
