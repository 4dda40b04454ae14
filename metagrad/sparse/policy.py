"""Sparse or dense: the rule by which a kernel chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

import torch

from metagrad.core import _torch
from metagrad.core.checks import is_a

T = TypeVar("T")
Layout = Literal["auto", "csr", "gather"]
WIDE = 32  # columns of the dense operand in the products that thresholds are measured on


class Scope(Generic[T]):
    """A variable of this thread and of the threads in which torch runs its backward passes.

    The derivatives of CUDA tensors are computed in threads of torch's own, which Python's context variables do
    not reach. torch hands them the thread-local state of the caller, as its CUDA graph trees rely on, so the value
    is kept there.
    """

    def __init__(self, name: str) -> None:
        self._key = f"metagrad.sparse.{name}"

    def get(self) -> T | None:
        """Return the value, or None in a thread that set none."""
        return _torch.get_in_thread_state(self._key) if _torch.is_in_thread_state(self._key) else None

    def set(self, value: T | None) -> None:
        """Replace the value."""
        _torch.put_in_thread_state(self._key, value)


@dataclass(frozen=True)
class SparsePolicy:
    r"""Decide from density and size whether a product is computed densely.

    .. math::
        \frac{\mathrm{nnz}}{n m} \ge \mathrm{threshold} \cdot \max\!\left(1, \frac{32}{\mathrm{width}}\right)

    says dense, where also ``nnz >= min_nnz`` and the n x m matrix fits into ``max_dense_bytes``. A narrow product
    needs a higher density, for its few multiplications must pay for making the matrix dense. Only the way of
    computing changes: the result is the same up to rounding, and a gradient stays on its pattern. Such a choice
    is counted by :func:`metagrad.sparse.stats`.

    The defaults are measured (float32, x86 CPU, one thread, MKL; a product and a sampled product of n x n matrices,
    n = 128 to 2048). At density 0.5 the dense products were 1.0 to 1.25 times faster at width 32 and 1.2 to 1.7
    times at width 128; at density 0.3 they were slower at nearly every size and width. Below 4096 entries either
    takes microseconds. In float64 the two met between 0.15 and 0.3, and in bfloat16, which has no CSR kernels, at
    0.025; other devices were not measured: :func:`calibrate` finds the threshold of a device and dtype.

    Args:
        threshold: Density from which a product of width 32 or more is dense; ``math.inf`` is never.
        min_nnz: Matrices with fewer entries stay sparse.
        layout: The sparse kernels: "csr" are torch's CSR products (MKL, cuSPARSE), for float32 and float64;
            "gather" gathers and adds slices of bounded size, for any dtype and device; "auto" takes CSR where it
            exists.
        max_dense_bytes: The largest dense matrix that may be made.

    Raises:
        ValueError: A number is negative or not a number, or the layout is unknown.

    Example:
        >>> policy = metagrad.sparse.SparsePolicy(threshold=0.25, min_nnz=0)
        >>> policy.prefers_dense((8, 8), 16, torch.float32), policy.prefers_dense((8, 8), 16, torch.float32, width=16)
        (True, False)
        >>> policy.prefers_dense((10**6, 10**6), 10**12, torch.float32)
        False
    """

    threshold: float = 0.5
    min_nnz: int = 4096
    layout: Layout = "auto"
    max_dense_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("threshold", "min_nnz", "max_dense_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"SparsePolicy({name}=...): expected at least 0, got {getattr(self, name)}.")
        if self.layout not in get_args(Layout):
            raise ValueError(
                f"SparsePolicy(layout=...): expected one of {get_args(Layout)}, got {self.layout!r}."
            )

    def prefers_dense(
        self, shape: Sequence[int], nnz: int, dtype: torch.dtype, *, width: int | None = None
    ) -> bool:
        """Say whether a matrix should be made dense.

        Args:
            shape: Its rows and columns.
            nnz: How many of its cells are stored.
            dtype: Of its values.
            width: The columns of the dense operand it is multiplied by; None for a matrix that stays dense.
        """
        cells = shape[0] * shape[1]
        if (
            nnz < self.min_nnz
            or nnz < self.threshold * cells
            or cells * dtype.itemsize > self.max_dense_bytes
        ):
            return False
        return width is None or width >= WIDE or nnz * width >= self.threshold * cells * WIDE


DEFAULT = SparsePolicy()
_SCOPE: Scope[SparsePolicy] = Scope("policy")


def current_policy() -> SparsePolicy:
    """Return the policy that the kernels ask now, which :func:`use_policy` sets.

    Example:
        >>> isinstance(metagrad.sparse.current_policy(), metagrad.sparse.SparsePolicy)
        True
    """
    return _SCOPE.get() or DEFAULT


@contextlib.contextmanager
def use_policy(policy: SparsePolicy) -> Generator[SparsePolicy]:
    """Make the kernels ask a policy inside a ``with`` block, in this thread and the backward passes it runs.

    Args:
        policy: What decides.

    Raises:
        TypeError: It is not a :class:`SparsePolicy`.

    Example:
        >>> never = metagrad.sparse.SparsePolicy(threshold=float("inf"))
        >>> with metagrad.sparse.use_policy(never):
        ...     metagrad.sparse.current_policy() is never
        True
    """
    if not is_a(policy, SparsePolicy):
        raise TypeError(f"use_policy(policy): expected a SparsePolicy, got {type(policy).__name__}.")
    before = _SCOPE.get()
    _SCOPE.set(policy)
    try:
        yield policy
    finally:
        _SCOPE.set(before)
