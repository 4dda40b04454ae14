"""Operators in the form that SciPy accepts. SciPy has no type annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metagrad.core._torch import from_numpy

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

    from metagrad.curvature.linear_map import LinearMap

_NUMPY = {torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}


def to_scipy(operator: LinearMap) -> LinearOperator:
    """Return a ``scipy.sparse.linalg.LinearOperator`` that multiplies NumPy arrays on the CPU, without a graph.

    The operator must stay open while the result is in use.

    Raises:
        ValueError: NumPy lacks the dtype, such as bfloat16.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with metagrad.curvature.hessian(1.5 * (w**2).sum(), {"w": w}) as H:
        ...     H.to_scipy() @ [1.0, 2.0]
        array([3., 6.], dtype=float32)
    """
    from scipy.sparse.linalg import LinearOperator

    if operator.dtype not in _NUMPY:
        raise ValueError(
            f"H.to_scipy(): NumPy has no {operator.dtype}. Convert the model and its data with .float() first."
        )

    dtype = _NUMPY[operator.dtype]

    def matmat(columns: np.ndarray) -> np.ndarray:
        # A copy: torch has no negative strides.
        rows = from_numpy(np.array(columns.T, dtype)).to(operator.device)
        return operator.multiply(rows).detach().cpu().numpy().T

    def matvec(column: np.ndarray) -> np.ndarray:
        return matmat(column.reshape(-1, 1))[:, 0]

    untyped: Any = LinearOperator
    return untyped(operator.shape, matvec, rmatvec=matvec, matmat=matmat, rmatmat=matmat, dtype=dtype)
