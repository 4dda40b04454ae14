"""The inverse Hessian of L-BFGS for one vector of parameters, without a tape."""

from __future__ import annotations

import torch
from torch import Tensor

_SPARE = 8
_ALIGNED = 16  # elements


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

        >>> from metagrad.optim.torch_optim.lbfgs_history import History
        >>> history = History(torch.tensor([8.0]))
        >>> history.add(torch.tensor([1.0]), torch.tensor([4.0]), most=10)
        >>> history.direction(torch.tensor([8.0]))
        tensor([-2.])

    References:
        Byrd, Nocedal, Schnabel, "Representations of quasi-Newton matrices and their use in limited memory methods",
        Mathematical Programming 63, 1994.
    """

    def __init__(self, like: Tensor) -> None:
        empty = like.new_empty(0, like.numel())
        self._hold(empty, empty, like.new_empty(0, 0))

    @classmethod
    def of(cls, moves: Tensor, changes: Tensor, products: Tensor) -> History:
        """Make that of pairs which are known; these tensors are not written."""
        history = cls.__new__(cls)
        history._hold(moves, changes, products)
        return history

    def _hold(self, moves: Tensor, changes: Tensor, products: Tensor) -> None:
        """Copy pairs into buffers that are half as long again."""
        size, n = moves.shape
        length = size + size // 2 + _SPARE
        # Rows are aligned wherever a window begins, so that products are the same to the last bit.
        self._moves, self._changes = (
            moves.new_empty(length, -n // _ALIGNED * -_ALIGNED)[:, :n] for _ in range(2)
        )
        self._products = products.new_zeros(length, length)
        self._show(slice(0, size))
        self.moves.copy_(moves)
        self.changes.copy_(changes)
        self.products.copy_(products)
        self._scale = 1.0
        if size:
            last = self.changes[-1]
            self._scale = self.products[-1, -1].item() / last.dot(last).item()

    def _show(self, window: slice) -> None:
        self.moves, self.changes = self._moves[window], self._changes[window]
        self.products = self._products[window, window]
        self._end = window.stop

    def add(self, move: Tensor, change: Tensor, *, most: int) -> None:
        """Add a pair, if it has the curvature that keeps the matrix positive definite; ``most`` are kept."""
        curvature, squared = torch.stack([move.dot(change), change.dot(change)]).tolist()
        if not curvature > torch.finfo(move.dtype).eps * squared:
            return
        kept = min(len(self.moves), most - 1)
        if self._end == len(self._moves):
            begin = len(self.moves) - kept
            self._hold(self.moves[begin:], self.changes[begin:], self.products[begin:, begin:])
        end = self._end
        self._moves[end].copy_(move)
        self._changes[end].copy_(change)
        self._show(slice(end - kept, end + 1))
        self.products[:, kept] = self.moves @ change
        self.products[kept, kept] = curvature  # above 0, which the rounding of the product may not be
        self._scale = curvature / squared

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
