"""Operators for SciPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

    from metagrad.curvature.operators.operator import Operator

_NUMPY = {torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}


def to_scipy(operator: Operator) -> LinearOperator:
    """Make a SciPy operator that multiplies NumPy arrays on the CPU; symmetric, and without graph.

    Args:
        operator: Must stay open for as long as the result is used.

    Raises:
        ValueError: NumPy does not have the operator's dtype.

    Example:
        >>> space = metagrad.curvature.ParameterSpace({"w": torch.zeros(2)})
        >>> (3 * metagrad.curvature.Identity(space)).to_scipy() @ [1.0, 2.0]
        array([3., 6.], dtype=float32)
    """
    from scipy.sparse.linalg import LinearOperator

    if operator.dtype not in _NUMPY:
        raise ValueError(
            f"H.to_scipy(): NumPy has no {operator.dtype}. Convert the model and its data with .float() first."
        )

    def matmat(columns: np.ndarray) -> np.ndarray:
        rows = torch.as_tensor(columns.T, dtype=operator.dtype, device=operator.device)
        return operator.products(rows).detach().cpu().numpy().T

    def matvec(column: np.ndarray) -> np.ndarray:
        return matmat(column.reshape(-1, 1))[:, 0]

    dtype = _NUMPY[operator.dtype]
    return LinearOperator(operator.shape, matvec, rmatvec=matvec, matmat=matmat, rmatmat=matmat, dtype=dtype)  # type: ignore[reportCallIssue]
