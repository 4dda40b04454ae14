"""The one place where gradients of different structure are added."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.matrix.pattern import Pattern
from metagrad.sparse.matrix.segments import Segments
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.policies.policy import SparsePolicy
from metagrad.sparse.policies.stats import count_densified, count_merge, timed
from metagrad.sparse.tables.row_sparse import RowSparse

_ADD = "Accumulator.add(x)"


class Accumulator:
    r"""Add gradients of one matrix or table, keeping them sparse, differentiable at every order.

    .. math:: y = \sum_k x_k

    Matrices on one :class:`Pattern` add as vectors when they come. Those on different patterns are kept as they are
    until :meth:`result` merges them *once*, by one sort of all their entries, however many they are:
    :math:`O(N \log N)` for N entries together, where adding them one by one would sort and copy the growing
    sum each time. The merge of the same patterns in the same order is kept, so later sums of them do not sort,
    and are on the same ``Pattern`` object. Rows of tables are merged once in the same way. Dense tensors add at
    once; what is sparse is then added into their sum, which has the size of what was given.

    Args:
        policy: When a sum of matrices or of rows becomes dense, by its density and bytes. None: never.

    Example:
        >>> diagonal = metagrad.sparse.Pattern.banded(2, 0)
        >>> corner = metagrad.sparse.Pattern(torch.tensor([0]), torch.tensor([1]), (2, 2))
        >>> total = metagrad.sparse.Accumulator()
        >>> for pattern in (diagonal, corner, diagonal):
        ...     total.add(metagrad.sparse.SparseTensor(pattern, torch.ones(pattern.nnz)))
        >>> total.result().to_dense()
        tensor([[2., 1.],
                [0., 2.]])

    References:
        An accumulator of sparse and dense gradients with its own derivative: Maclaurin, "Modeling, inference and
        optimization with composable differentiable procedures", Harvard, 2016, chapter 4.
    """

    def __init__(self, policy: SparsePolicy | None = None) -> None:
        self.policy = policy
        self._matrices: dict[tuple[Pattern, tuple[int, int]], SparseTensor] = {}
        self._rows: list[RowSparse] = []
        self._dense: Tensor | None = None
        self._kind: tuple[tuple[int, ...], torch.dtype, torch.device] | None = None

    def add(self, x: SparseTensor | RowSparse | Tensor) -> None:
        """Add a gradient.

        Args:
            x: In the shape, dtype and on the device of those before.

        Raises:
            ValueError: Its shape or device differs.
            TypeError: Its dtype differs, it is neither sparse nor strided, or rows of a table meet a matrix that is
                sparse in single entries: their sum is neither.
        """
        self._check(x)
        if isinstance(x, SparseTensor):
            key = (x.pattern, x.block_shape)
            known = self._matrices.get(key)
            if known is not None:
                count_merge("avoided")
                x = SparseTensor._of(x.pattern, known.values + x.values)
            self._matrices[key] = x
        elif isinstance(x, RowSparse):
            self._rows.append(x)
        else:
            self._dense = x if self._dense is None else self._dense + x

    def result(self) -> SparseTensor | RowSparse | Tensor:
        """Return the sum: sparse where everything was, unless the policy says dense.

        Raises:
            ValueError: Nothing was added.
        """
        if self._matrices:
            total = _added_matrices(list(self._matrices.values()))
            return self._settled(total, total.scalar().pattern.nnz)
        if self._rows:
            total = _added_rows(self._rows)
            return self._settled(total, len(total.rows) * total.values[:1].numel())
        if self._dense is None:
            raise ValueError("Accumulator.result(): nothing was added, so the shape of the sum is not known.")
        return self._dense

    def _settled(self, total: SparseTensor | RowSparse, nnz: int) -> SparseTensor | RowSparse | Tensor:
        if self._dense is not None:
            return _added_into(self._dense, total)
        shape = (total.shape[0], total.shape[1:].numel())
        if self.policy is None or not self.policy.prefers_dense(shape, nnz, total.dtype):
            return total
        dense = torch.zeros(total.shape, dtype=total.dtype, device=total.device)
        count_densified(dense.nbytes)
        return _added_into(dense, total)

    def _check(self, x: SparseTensor | RowSparse | Tensor) -> None:
        is_strided = isinstance(x, Tensor) and x.layout == torch.strided
        if not (is_strided or isinstance(x, SparseTensor)):
            got = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{_ADD}: x must be a SparseTensor, a RowSparse or a strided tensor, got {got}.")
        kind = (tuple(x.shape), x.dtype, x.device)
        self._kind = self._kind or kind
        for name, want, got in zip(("shape", "dtype", "device"), self._kind, kind, strict=True):
            if want != got:
                error = TypeError if name == "dtype" else ValueError
                raise error(f"{_ADD}: expected {name} {want}, as before, got {got}.")
        if (self._rows and isinstance(x, SparseTensor)) or (self._matrices and isinstance(x, RowSparse)):
            raise TypeError(
                f"{_ADD}: one gradient is sparse in rows and another in entries, so their sum is neither. "
                "Call to_dense() on one of them."
            )


class _Plan(NamedTuple):
    """The union of patterns, and the entry of it that each of theirs adds to."""

    others: list[weakref.ref[Pattern]]  # all but the first
    pattern: Pattern
    index: Segments


# The last plan that began with a pattern. It holds none of the patterns that it was made of, so all can be freed.
_plans: weakref.WeakKeyDictionary[Pattern, _Plan] = weakref.WeakKeyDictionary()


def _added_matrices(matrices: Sequence[SparseTensor]) -> SparseTensor:
    if len(matrices) == 1:
        return matrices[0]
    blocks = {matrix.block_shape for matrix in matrices}
    if len(blocks) > 1:
        matrices = [matrix.scalar() for matrix in matrices]
    plan = _plan([matrix.pattern for matrix in matrices])
    return SparseTensor._of(
        plan.pattern, rules.segment_sum(torch.cat([m.values for m in matrices]), plan.index)
    )


def _plan(patterns: Sequence[Pattern]) -> _Plan:
    known = _plans.get(patterns[0])
    others = [weakref.ref(pattern) for pattern in patterns[1:]]
    if known is not None and known.others == others:
        count_merge("avoided")
        return known
    count_merge("done")
    pattern, index = _union(patterns)
    plan = _plans[patterns[0]] = _Plan(others, pattern, Segments.grouped(index, pattern.nnz))
    return plan


@timed("conversion")
def _union(patterns: Sequence[Pattern]) -> tuple[Pattern, Tensor]:
    row = torch.cat([pattern.row for pattern in patterns])
    col = torch.cat([pattern.col for pattern in patterns])
    return Pattern.coalesce(row, col, patterns[0].shape)


def _added_rows(tables: Sequence[RowSparse]) -> RowSparse:
    if len(tables) == 1:
        return tables[0]
    rows = torch.cat([table.rows for table in tables])
    return RowSparse.coalesce(rows, torch.cat([table.values for table in tables]), tables[0].shape)


def _added_into(dense: Tensor, x: SparseTensor | RowSparse) -> Tensor:
    if isinstance(x, RowSparse):
        return dense + x
    scalar = x.scalar()
    place = scalar.pattern.row * dense.shape[1] + scalar.pattern.col
    return dense.flatten().index_add(0, place, scalar.values).reshape(dense.shape)
