r"""What a step costs: its floating-point operations, in units of one gradient.

Products of matrices and convolutions are counted by torch's own formulas, and decompositions, of which it knows none,
by the textbook's leading terms. Elementwise work and products with single vectors are not counted; seconds show them.

References:
    Golub, Van Loan, "Matrix computations", 4th edition, 2013, sections 3.2 (LU), 4.2 (Cholesky), 5.2 (Householder's
    QR), 8.3 (symmetric QR) and 8.6 (SVD).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]
aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations of what is computed inside, `flops`.

    `FlopCounterMode` counts the same, for each module too, and takes twice the time for every operation, which the
    seconds of optimizers with many small ones would show.

    Example:
        >>> from experiments.studies.optimizers.cost import FlopCounter
        >>> with FlopCounter() as counter:
        ...     _ = torch.linalg.cholesky(torch.eye(3)) @ torch.ones(3, 2)
        >>> counter.flops == 3**3 // 3 + 2 * 3 * 3 * 2
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


def _cubic(factor: float) -> Callable[..., int]:
    """Return the formula of something that costs `factor` n^3 for each matrix [..., n, n]."""

    def flops(shape: Shape, *_: Any, **__: Any) -> int:
        return round(factor * math.prod(shape[:-2]) * shape[-1] ** 3)

    return flops


def _qr(shape: Shape, *_: Any, **__: Any) -> int:
    """Reduce [..., m, n] to R, and multiply out the n columns of Q."""
    m, n = max(shape[-2:]), min(shape[-2:])
    return round(math.prod(shape[:-2]) * 4 * n**2 * (m - n / 3))


def _svd(shape: Shape, *_: Any, **__: Any) -> int:
    """Find singular values and vectors of [..., m, n] by Golub and Reinsch's algorithm."""
    m, n = max(shape[-2:]), min(shape[-2:])
    return math.prod(shape[:-2]) * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3)


def _solve(shape: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Factorise [..., n, n] by LU, and substitute twice for every right-hand side."""
    columns = right[-1] if len(right) == len(shape) else 1
    return round(math.prod(shape[:-2]) * (2 / 3 * shape[-1] ** 3 + 2 * shape[-1] ** 2 * columns))


DECOMPOSITIONS: dict[Any, Callable[..., int]] = {
    aten.linalg_cholesky_ex: _cubic(1 / 3),
    aten.cholesky_inverse: _cubic(2 / 3),
    aten.linalg_inv_ex: _cubic(2),
    aten._linalg_eigh: _cubic(9),
    aten._linalg_svd: _svd,
    aten._linalg_solve_ex: _solve,
    aten.linalg_qr: _qr,
}
"""Formulas by operator."""

FORMULAS = FlopCounterMode(display=False, custom_mapping=DECOMPOSITIONS).flop_registry
"""Those of torch, and these, of tensors."""
