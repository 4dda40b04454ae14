"""The trust-region and the cubic subproblem: models minimised in Krylov spaces, row by row, differentiable."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import from_numpy, linalg
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.rows import dot, norm
from metagrad.curvature.solvers.iteration import divide
from metagrad.curvature.spectrum.lanczos import LanczosVectors, divided, orthogonalise

_STEPS_TO_A_ROOT = 12  # by Newton's method, to rounding
_STEPS_OF_A_BALL = 50
_NEWTON_STEPS = 2


class KrylovStep(NamedTuple):
    """The minimum of a model in a Krylov space, for each row."""

    x: Tensor  # [tasks, n]
    model: Tensor  # its value there, [tasks]
    steps: Tensor  # dimensions of the spaces, int64 [tasks]
    products: int  # of all rows together


def minimize_cubic(products: Rows, g: Tensor, cubic: Tensor, *, rtol: float, max_steps: int) -> KrylovStep:
    r"""Minimise :math:`g^\top x + x^\top H x / 2 + M |x|^3 / 6` in the Krylov space of the gradient, row by row.

    .. math:: x = Q^\top y, \qquad (T + \tfrac{M r}{2} I) \, y = -|g| \, e_1, \qquad r = |y|, \qquad T = Q H Q^\top

    with the least root r at which the matrix is positive definite. A row ends when the gradient of the model at x is
    ``rtol`` times g, when its space is invariant, or after ``max_steps``.

    Args:
        products: Multiplies all rows, each with its own matrix.
        g: Gradients ``[tasks, n]``.
        cubic: :math:`M`, ``[tasks]``, above 0.
        rtol: Relative tolerance.
        max_steps: The largest dimension of the space.

    Returns:
        Steps, on the tape if products are.

    Example:
        :math:`x + x^2 / 2 + |x|^3 / 3`: at -0.618, where :math:`1 + x - x^2 = 0`.

        >>> from metagrad.optim.newton.subproblems import minimize_cubic
        >>> minimize_cubic(lambda rows: rows, torch.ones(1, 1), torch.full((1,), 2.0), rtol=1e-6, max_steps=5).x
        tensor([[-0.6180]])

    References:
        Cartis, Gould, Toint, "Adaptive cubic regularisation methods for unconstrained optimization, part I",
        Mathematical Programming 127, 2011, section 6.
    """
    length = norm(g)
    lengths, cubics = _array(length), _array(cubic)

    def root_of(row: int, T: np.ndarray, lower: float) -> Root:
        at = slice(row, row + 1)
        r, last = least_root(T, lengths[at], cubics[at], np.array([lower]), _STEPS_TO_A_ROOT)
        return Root(float(r[0]), float(0.5 * cubics[row] * r[0]), abs(float(last[0])))

    space = _space_of(products, g, length, root_of, rtol=rtol, max_steps=max_steps)
    T, r = space.T, space.root.to(g)
    for _ in range(_NEWTON_STEPS):
        r = _newton_step(T, length, cubic, r)
    y = _at(T, length, cubic, r)
    quadratic = 0.5 * dot(y, (T @ y[:, :, None]).squeeze(-1))
    model = length * y[:, 0] + quadratic + cubic * norm(y) ** 3 / 6
    x = (y[:, None] @ space.basis).squeeze(1)
    return KrylovStep(x, model, space.steps, space.products)


def minimize_in_ball(products: Rows, g: Tensor, radius: Tensor, *, rtol: float, max_steps: int) -> KrylovStep:
    r"""Minimise :math:`g^\top x + x^\top H x / 2` over :math:`|x| \le \Delta` in the Krylov space of the gradient.

    .. math:: x = Q^\top y, \qquad (T + \lambda I) \, y = -|g| \, e_1, \qquad T = Q H Q^\top

    with the least :math:`\lambda \ge 0` at which the matrix is positive definite and :math:`|y| \le \Delta`. A row
    ends as in :func:`minimize_cubic`.

    Args:
        products: Multiplies all rows, each with its own matrix.
        g: Gradients ``[tasks, n]``.
        radius: :math:`\Delta`, ``[tasks]``, above 0.
        rtol: Relative tolerance.
        max_steps: The largest dimension of the space.

    Returns:
        Steps, on the tape if products are; their derivatives are right up to the third.

    Example:
        :math:`-4 x_1 + 3 x_2` with curvatures 1 and -1 is least on the circle at :math:`\lambda` = 5.0163:

        >>> from metagrad.optim.newton.subproblems import minimize_in_ball
        >>> g, curvatures = torch.tensor([[-4.0, 3.0]]), torch.tensor([1.0, -1.0])
        >>> x = minimize_in_ball(lambda rows: rows * curvatures, g, torch.ones(1), rtol=1e-6, max_steps=5).x
        >>> -g / x - curvatures
        tensor([[5.0163, 5.0163]])

    References:
        Gould, Lucidi, Roma, Toint, "Solving the trust-region subproblem using the Lanczos method", SIAM J. Optim.
        9(2), 1999; Conn, Gould, Toint, "Trust-region methods", 2000, sections 7.3 and 7.5.
    """
    length = norm(g)
    lengths, radii = _array(length), _array(radius)

    def root_of(row: int, T: np.ndarray, lower: float) -> Root:
        at = slice(row, row + 1)
        multiplier, last = least_multiplier(T, lengths[at], radii[at])
        return Root(float(multiplier[0]), float(multiplier[0]), abs(float(last[0])))

    space = _space_of(products, g, length, root_of, rtol=rtol, max_steps=max_steps)
    # In double precision: near the hard case, the multiplier is next to an eigenvalue.
    T, multiplier, size = space.T.double(), space.root, radius.double()
    b = -length.double()[:, None] * _unit(T)
    is_bounded = multiplier > 0
    for _ in range(_NEWTON_STEPS):
        y = linalg.solve(_plus(T, multiplier), b)
        inner = dot(y, linalg.solve(_plus(T, multiplier), y))
        reach = norm(y)
        step = divide((reach - size) * reach**2, size * inner, where=is_bounded & (inner > 0))
        multiplier = multiplier + step
    y = linalg.solve(_plus(T, multiplier), b)
    model = -dot(b, y) + 0.5 * dot(y, (T @ y[:, :, None]).squeeze(-1))
    x = (y.to(g.dtype)[:, None] @ space.basis).squeeze(1)
    return KrylovStep(x, model.to(g.dtype), space.steps, space.products)


class _Space(NamedTuple):
    """The last Krylov space of each row, and the root that solves the model in it."""

    basis: Tensor  # orthonormal rows, [tasks, k, n]
    T: Tensor  # the matrix in the basis, [tasks, k, k]
    root: Tensor  # float64 [tasks], a constant
    steps: Tensor  # dimensions of the spaces, int64 [tasks]
    products: int  # of all rows together


class Root(NamedTuple):
    """A root in the space of one row."""

    value: float
    shift: float  # of the matrix there
    last: float  # the size of the last element of y


RootOf = Callable[[int, np.ndarray, float], Root]
"""A row, its matrix ``[1, k, k]`` and a lower bound to the root."""


def _space_of(
    products: Rows, g: Tensor, length: Tensor, root_of: RootOf, *, rtol: float, max_steps: int
) -> _Space:
    """Run the Lanczos process until the gradient of every model is small in all of space."""
    tolerance = max(rtol, 2 * torch.finfo(g.dtype).eps)
    spaces = [
        _KrylovSpace(number, functools.partial(root_of, row), tolerance)
        for row, number in enumerate(length.tolist())
    ]
    alive = [space.is_alive for space in spaces]
    vectors = LanczosVectors(divided(g, length, alive))
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    while True:
        rest, large, _ = orthogonalise(products(vectors.last), vectors.rows)
        alpha, beta = large[:, 0, -1], norm(rest)
        for space, *numbers in zip(spaces, *torch.stack([alpha, beta]).tolist(), strict=True):
            space.extend(*numbers)
        diagonal.append(_where(alive, alpha, 1.0))  # with which a row goes on that has ended
        alive = [space.is_alive for space in spaces]
        if len(diagonal) in (max_steps, g.shape[1]) or not any(alive):
            break
        off_diagonal.append(_where(alive, beta, 0.0))
        vectors.append(rest, beta, alive)
    root = torch.tensor([space.root() for space in spaces], dtype=torch.float64, device=g.device)
    steps = torch.tensor([len(space.alpha) for space in spaces], device=g.device)
    return _Space(vectors.rows, _tridiagonal(diagonal, off_diagonal), root, steps, len(diagonal))


def _where(alive: Sequence[bool], numbers: Tensor, other: float) -> Tensor:
    """Put another number into the rows that have ended."""
    if all(alive):
        return numbers
    return torch.where(torch.tensor(alive, device=numbers.device), numbers, other)


class _KrylovSpace:
    """The models of one row in the spaces so far, as constants: numbers on the CPU, in double precision.

    For a fixed shift of T, Cholesky's pivots and the last element of y have a recursion. The root in a smaller space
    is a lower bound, with whose shift that element is not too small; another is looked for where the process ends by
    it, where the shift is too small, and where the space has doubled.

    Attributes:
        is_alive: Whether the gradient of the model is above the tolerance.
        alpha: The diagonal of T.
    """

    def __init__(self, length: float, root_of: Callable[[np.ndarray, float], Root], tolerance: float) -> None:
        self._length, self._root_of, self._tolerance = length, root_of, tolerance * length
        self.is_alive = length > 0
        self.alpha: list[float] = []
        self._beta: list[float] = []  # beside it, and what is next
        self._root, self._size = Root(0.0, 0.0, 0.0), 0  # and of which space it is
        self._pivot, self._last = math.inf, 0.0

    def extend(self, alpha: float, beta: float) -> None:
        """Add a row to T, unless the process has ended."""
        if not self.is_alive:
            return
        self.alpha.append(alpha)
        self._beta.append(beta)
        size = len(self.alpha)
        self._recur(size)
        if size & (size - 1) == 0 or not self._goes_on():
            self._look_for_root()
            self.is_alive = self._goes_on()

    def root(self) -> float:
        """Return the root of the last space."""
        if self._size < len(self.alpha):
            self._look_for_root()
        return self._root.value

    def _recur(self, size: int) -> None:
        """Go on by one to the last pivot and the last element of y."""
        before, pivot = (self._beta[size - 2], self._pivot) if size > 1 else (0.0, math.inf)
        taken = before * before / pivot if pivot > 0 else math.nan
        self._pivot = self.alpha[size - 1] + self._root.shift - taken
        size_of_y = self._last * before if size > 1 else self._length
        self._last = size_of_y / self._pivot if self._pivot > 0 else math.nan

    def _goes_on(self) -> bool:
        return self._tolerance < self._beta[-1] * self._last < math.inf

    def _look_for_root(self) -> None:
        """Find the root in this space, and the last pivot for its shift."""
        self._size, off = len(self.alpha), self._beta[:-1]
        T = np.diag(self.alpha) + np.diag(off, 1) + np.diag(off, -1)
        self._root = self._root_of(T[None], self._root.value)
        for size in range(1, self._size + 1):
            self._recur(size)
        self._last = self._root.last


def _array(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


def _tridiagonal(diagonal: list[Tensor], off_diagonal: list[Tensor]) -> Tensor:
    T = torch.diag_embed(torch.stack(diagonal, 1))
    if not off_diagonal:
        return T
    off = torch.stack(off_diagonal, 1)
    return T + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)


def least_root(
    T: np.ndarray, length: np.ndarray, cubic: np.ndarray, lower: np.ndarray, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    r"""Find the root r by Newton's method on the secular equation, and the last element of y there.

    :math:`1 / |y| - 1 / r` is concave in r and increases, so that Newton's method from a lower bound of the root
    approaches it from below (Conn, Gould, Toint, "Trust-region methods", 2000, section 7.3.3). Lower bounds are the
    roots for one element of y each, in the eigenvectors of T.

    Args:
        T: Symmetric matrices ``[tasks, k, k]``.
        length: Those of gradients, ``[tasks]``.
        cubic: :math:`M`, ``[tasks]``.
        lower: A lower bound, ``[tasks]``: 0, or the root in a smaller space.
        num_steps: The most steps of Newton's method; 12 are enough for double precision at 50 dimensions.

    Example:
        >>> from metagrad.optim.newton.subproblems import least_root
        >>> least_root(np.ones((1, 1, 1)), np.ones(1), np.full(1, 2.0), np.zeros(1), 12)[0].round(4).item()
        0.618
    """
    if not np.isfinite(T).all():
        return np.full_like(length, np.nan), np.full_like(length, np.nan)
    values, vectors = _eigh(T)
    parts, half = -length[:, None] * vectors[:, 0], 0.5 * cubic[:, None]
    r = np.maximum(_lower_bound(values, abs(parts), half), lower)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(num_steps):
            shifted = values + half * r
            squares = (parts / shifted) ** 2
            size = np.sqrt(squares.sum(1, keepdims=True))
            slope = half * (squares / shifted).sum(1, keepdims=True)
            step = np.where(size > 0, (size - r) * r / (slope * (r / size) ** 2 + size), 0)
            r = r + step
            if (step <= 1e-15 * r).all():
                break
        last = (vectors[:, -1] * parts / (values + half * r)).sum(1)
    return r[:, 0], last


def least_multiplier(T: np.ndarray, length: np.ndarray, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Find the multiplier of a ball, and the last element of y there.

    By Newton's method on :math:`1 / |y| - 1 / \Delta`, from a lower bound: see :func:`least_root`.

    Args:
        T: Symmetric matrices ``[tasks, k, k]``.
        length: Those of gradients, ``[tasks]``.
        radius: :math:`\Delta`, ``[tasks]``.

    Example:
        >>> from metagrad.optim.newton.subproblems import least_multiplier
        >>> least_multiplier(np.ones((2, 1, 1)), np.ones(2), np.array([0.5, 2.0]))[0]
        array([1., 0.])
    """
    is_known = np.asarray(np.isfinite(T).all((1, 2)))
    values, vectors = _eigh(np.where(is_known[:, None, None], T, np.eye(T.shape[1])))
    parts, size = -length[:, None] * vectors[:, 0], radius[:, None]
    definite = -values[:, 0] + 4 * np.finfo(float).eps * abs(values).max(1)
    bound = np.where(values[:, 0] > 0, 0.0, np.maximum(definite, np.finfo(float).tiny))
    multiplier = np.maximum((abs(parts) / size - values).max(1), bound)[:, None]
    for _ in range(_STEPS_OF_A_BALL):
        shifted = values + multiplier
        squares = (parts / shifted) ** 2
        reach = np.sqrt(squares.sum(1, keepdims=True))
        slope = (squares / shifted).sum(1, keepdims=True)
        is_outside = reach > size * (1 + 1e-14)
        if not is_outside.any():
            break
        step = (reach - size) * reach**2 / np.where(is_outside, size * slope, 1.0)
        multiplier = multiplier + np.where(is_outside, step, 0.0)
    last = (vectors[:, -1] * parts / (values + multiplier)).sum(1)
    return np.where(is_known, multiplier[:, 0], np.nan), np.where(is_known, last, np.nan)


def _eigh(T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decompose with as many threads as torch uses; NumPy has a setting of its own."""
    values, vectors = linalg.eigh(from_numpy(T))
    return values.numpy(), vectors.numpy()


def _lower_bound(values: np.ndarray, sizes: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Solve ``r (value + half r) = size`` for each element, and keep the matrix positive definite."""
    root = np.sqrt(values**2 + 4 * half * sizes)
    bounds = np.where(values > 0, 2 * sizes / (abs(values) + root), (root - values) / (2 * half))
    definite = -values[:, 0] / half[:, 0] * (1 + 4 * np.finfo(float).eps)
    return np.maximum(bounds.max(1), definite)


def _plus(T: Tensor, shift: Tensor) -> Tensor:
    return T + torch.diag_embed(shift[:, None].expand(T.shape[:2]))


def _unit(T: Tensor) -> Tensor:
    unit = torch.zeros_like(T[:, 0])
    unit[:, 0] = 1
    return unit


def _at(T: Tensor, length: Tensor, cubic: Tensor, r: Tensor) -> Tensor:
    return -linalg.solve(_plus(T, 0.5 * cubic * r), length[:, None] * _unit(T))


def _newton_step(T: Tensor, length: Tensor, cubic: Tensor, r: Tensor) -> Tensor:
    """Improve a root, and its derivatives: k steps from a constant have those of order 2^k - 1 right."""
    y = _at(T, length, cubic, r)
    size = norm(y)
    moves = size > 0
    inner = dot(y, linalg.solve(_plus(T, 0.5 * cubic * r), y))
    slope = -0.5 * cubic * divide(inner, size, where=moves) - 1
    return r - (size - r) / slope
