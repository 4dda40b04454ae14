"""The structure of a sparse matrix: the stored cells in a fixed order, with maps that are computed once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from metagrad.core._torch import distinct_and_places
from metagrad.core.checks import check_count, check_type, is_a
from metagrad.sparse.checks import check_device, check_index, check_indices, check_shape
from metagrad.sparse.policy import count_merge, timed

P = ParamSpec("P")
R = TypeVar("R")


def structural(compute: Callable[P, R]) -> Callable[P, R]:
    """Compute indices outside of inference mode, because a graph cannot save tensors of inference mode."""

    @functools.wraps(compute)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return compute(*args, **kwargs)
        with torch.inference_mode(False):
            return compute(*args, **kwargs)

    return unseen


@structural
def _kept(index: Tensor) -> Tensor:
    """Return indices, as a copy if they come from inference mode."""
    return index.clone() if index.is_inference() else index


class Segments:
    """A fixed map from entries to segments, which groups the entries once.

    :func:`gather` and :func:`segment_sum` accept it instead of an id tensor. They are then several times faster. On
    CUDA they are also deterministic, because entries are added segment by segment.

    Args:
        ids: Segment of each entry, integers [entries], in any order.
        num_segments: Number of segments. Segments may be empty.

    Raises:
        ValueError: An id is out of range.
        TypeError: The ids, or their number, are not integers.

    Example:
        >>> segments = metagrad.sparse.Segments(torch.tensor([2, 0, 2]), 3)
        >>> metagrad.sparse.segment_sum(torch.tensor([1.0, 2.0, 3.0]), segments)
        tensor([2., 0., 4.])
    """

    def __init__(self, ids: Tensor, num_segments: int) -> None:
        check_count("Segments(ids, num_segments)", num_segments, 0)
        check_index("Segments(ids, num_segments)", "ids", ids, num_segments)
        self.ids: Tensor = _kept(ids.detach().long())
        self.num_segments = num_segments

    @classmethod
    def grouped(cls, ids: Tensor, num_segments: int, order: Tensor | None = None) -> Segments:
        """Return segments of ids that are in range. Give their stable order if it is known."""
        segments = cls.__new__(cls)
        segments.ids, segments.num_segments = ids, num_segments
        if order is not None:
            segments.order = order
        return segments

    @classmethod
    def sorted_ids(cls, ids: Tensor, num_segments: int) -> Segments:
        """Return segments of ascending ids."""
        return cls.grouped(ids, num_segments, torch.arange(len(ids), device=ids.device))

    @cached_property
    @structural
    @timed("conversion")
    def order(self) -> Tensor:
        """Entries sorted by segment, int64 [entries]."""
        return torch.argsort(self.ids, stable=True)

    @cached_property
    @structural
    @timed("conversion")
    def pointers(self) -> Tensor:
        """Pointers into `order`, int64 [num_segments + 1]. Segment s is ``order[pointers[s]:pointers[s + 1]]``."""
        pointers = torch.zeros(self.num_segments + 1, dtype=torch.int64, device=self.ids.device)
        torch.cumsum(self.counts, 0, out=pointers[1:])
        return pointers

    @cached_property
    @structural
    @timed("conversion")
    def counts(self) -> Tensor:
        """Number of entries of each segment, int64 [num_segments]."""
        return torch.bincount(self.ids, minlength=self.num_segments)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __repr__(self) -> str:
        return f"Segments(entries={len(self)}, num_segments={self.num_segments})"


class Merge(NamedTuple):
    """The union or the intersection of two patterns."""

    pattern: Pattern
    left: Tensor  # int64, union: the place of each entry of the first pattern. Intersection: its entries
    right: Tensor  # the same for the second pattern


class Product(NamedTuple):
    """The symbolic part of ``a @ b``: pairs of entries that are multiplied, and the cell of each product."""

    pattern: Pattern
    left: Segments  # [pairs] an entry of a
    right: Segments  # [pairs] an entry of b
    cell: Segments  # [pairs] an entry of the product


Pair = TypeVar("Pair", Merge, Product)


class Pattern:
    """The cells of a sparse matrix: immutable, row-major, without duplicates, compared by identity.

    A tensor and all its derivatives share one pattern, so they add as plain vectors. Pointers, the column order, the
    transpose and the merges with other patterns are computed at first use and cached.

    Args:
        row: Row of each entry, int64 [nnz], ascending.
        col: Column of each entry, int64 [nnz], ascending within a row. No cell occurs twice.
        shape: Numbers of rows and columns.

    Raises:
        ValueError: Entries are out of order, out of range or duplicated, lengths or devices differ, or the shape has
            more than 2^63 - 1 cells.
        TypeError: The indices are not integers, or the shape is not two integers.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1]), (2, 3))
        >>> pattern
        Pattern(shape=(2, 3), nnz=3)
        >>> pattern.crow
        tensor([0, 1, 3])
        >>> pattern.to_mask()
        tensor([[False, False,  True],
                [ True,  True, False]])
    """

    row: Tensor
    col: Tensor
    shape: tuple[int, int]

    def __init__(self, row: Tensor, col: Tensor, shape: Sequence[int]) -> None:
        size = check_shape("Pattern(row, col, shape)", shape)
        row, col = check_indices("Pattern(row, col, shape)", row, col, size)
        _check_order(row, col, size)
        self._set(row, col, size)

    def _set(self, row: Tensor, col: Tensor, shape: tuple[int, int]) -> None:
        self.row, self.col, self.shape = _kept(row), _kept(col), shape
        self._transpose: Pattern | weakref.ref[Pattern] | None = None
        self._merges: dict[str, weakref.WeakKeyDictionary[Pattern, Any]] = {}  # see _without_owner
        self._copies: weakref.WeakValueDictionary[torch.device, Pattern] = weakref.WeakValueDictionary()
        self._repeat: tuple[int, Pattern] | None = None
        self._frozen = True

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("row", "col", "shape") and hasattr(self, "_frozen"):
            raise AttributeError(
                f"Pattern.{name} cannot be changed: a pattern is shared by tensors and their gradients. "
                "Make a new one."
            )
        super().__setattr__(name, value)

    @classmethod
    def _trusted(cls, row: Tensor, col: Tensor, shape: tuple[int, int]) -> Pattern:
        pattern = cls.__new__(cls)
        pattern._set(row, col, shape)
        return pattern

    @classmethod
    @timed("conversion")
    def coalesce(cls, row: Tensor, col: Tensor, shape: Sequence[int]) -> tuple[Pattern, Tensor]:
        """Return the pattern of entries in any order. A cell may occur more than once.

        Args:
            row: Row of each entry, integers [entries].
            col: Column of each entry, integers [entries].
            shape: Numbers of rows and columns.

        Returns:
            The pattern, and the place of each entry in it, int64 [entries]. The values of the pattern are
            ``segment_sum(values, index, pattern.nnz)``.

        Raises:
            ValueError: Entries are out of range, lengths or devices differ, or there are too many cells.
            TypeError: The indices are not integers, or the shape is not two integers.

        Example:
            >>> row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 2, 0])
            >>> pattern, index = metagrad.sparse.Pattern.coalesce(row, col, (2, 3))
            >>> pattern.nnz, index
            (2, tensor([1, 0, 1]))
        """
        size = check_shape("Pattern.coalesce(row, col, shape)", shape)
        row, col = check_indices("Pattern.coalesce(row, col, shape)", row, col, size)
        return cls._coalesced(row, col, size)

    @classmethod
    def _coalesced(cls, row: Tensor, col: Tensor, shape: tuple[int, int]) -> tuple[Pattern, Tensor]:
        """Run :meth:`coalesce` without checks."""
        keys, index = distinct_and_places(_keys(row, col, shape))
        return cls._of_keys(keys, shape), index

    @classmethod
    def from_mask(cls, mask: Tensor) -> Pattern:
        """Return the pattern of the true cells of a boolean matrix."""
        check_mask("Pattern.from_mask(mask)", mask)
        row, col = mask.nonzero(as_tuple=True)
        return cls._trusted(row, col, (mask.shape[0], mask.shape[1]))

    @classmethod
    def banded(
        cls, n: int, below: int, above: int = 0, *, device: torch.device | str | None = None
    ) -> Pattern:
        """Return the pattern of the cells with ``-below <= col - row <= above`` in an n x n matrix."""
        for name, size in (("n", n), ("below", below), ("above", above)):
            check_count(f"Pattern.banded({name})", size, 0)
        below, above = min(below, n), min(above, n)
        row = torch.arange(n, device=device).repeat_interleave(below + above + 1)
        col = row + torch.arange(-below, above + 1, device=device).repeat(n)
        inside = (col >= 0) & (col < n)
        return cls._trusted(row[inside], col[inside], (n, n))

    @classmethod
    def _of_keys(cls, keys: Tensor, shape: tuple[int, int]) -> Pattern:
        width = max(shape[1], 1)
        row = torch.div(keys, width, rounding_mode="floor")
        return cls._trusted(row, keys - row * width, shape)

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return self.row.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the indices."""
        return self.row.device

    @property
    def density(self) -> float:
        """Fraction of the cells that are stored. 0 for a matrix without cells."""
        return self.nnz / max(self.shape[0] * self.shape[1], 1)

    @cached_property
    @structural
    def rows(self) -> Segments:
        """Entries grouped by row."""
        return Segments.sorted_ids(self.row, self.shape[0])

    @cached_property
    @structural
    @timed("conversion")
    def cols(self) -> Segments:
        """Entries grouped by column."""
        order = torch.argsort(self.col, stable=True)
        return Segments.grouped(self.col, self.shape[1], order)

    @cached_property
    @structural
    @timed("conversion")
    def cells(self) -> Tensor:
        """Row-major number of the cell of each entry, int64 [nnz]. Dense products use it."""
        return _keys(self.row, self.col, self.shape)

    @property
    def crow(self) -> Tensor:
        """CSR pointers, int64 [rows + 1]. Row i has the entries from ``crow[i]`` to ``crow[i + 1]``."""
        return self.rows.pointers

    @property
    def ccol(self) -> Tensor:
        """CSC pointers into :attr:`csc_order`, int64 [columns + 1]."""
        return self.cols.pointers

    @property
    def csc_order(self) -> Tensor:
        """Entries sorted by column, then by row, int64 [nnz]. ``values[csc_order]`` has the order of CSC."""
        return self.cols.order

    @structural
    @timed("conversion")
    def t(self) -> Pattern:
        """Return the transpose. Its entry k is entry ``csc_order[k]`` of this pattern."""
        found = self._transpose() if isinstance(self._transpose, weakref.ref) else self._transpose
        if found is None:
            order = self.csc_order
            found = Pattern._trusted(self.col[order], self.row[order], (self.shape[1], self.shape[0]))
            found._transpose = weakref.ref(self)  # weak, so that the pair is freed without a collection
            self._transpose = found
        return found

    def union(self, other: Pattern) -> Merge:
        """Return the union of the cells, and the position of each entry of both patterns in it (cached)."""
        return self._merged("union", other, Pattern._united)

    def intersection(self, other: Pattern) -> Merge:
        """Return the cells that both patterns store, and their entries in each pattern (cached)."""
        return self._merged("intersection", other, Pattern._intersected)

    def product(self, other: Pattern) -> Product:
        """Return the pattern of ``self @ other`` and the pairs of entries that add to each cell (cached).

        Time and memory are proportional to the number of pairs, which are the multiplications of the product.
        """
        return self._cached("product", other, Pattern._multiplied)

    def _merged(self, kind: str, other: Pattern, compute: Callable[[Pattern, Pattern], Merge]) -> Merge:
        if other is self:
            count_merge("avoided")
            places = torch.arange(self.nnz, device=self.device)
            return Merge(self, places, places)
        return self._cached(kind, other, compute)

    @structural
    def _cached(self, kind: str, other: Pattern, compute: Callable[[Pattern, Pattern], Pair]) -> Pair:
        _check_pair(kind, self, other)
        known = self._merges.setdefault(kind, weakref.WeakKeyDictionary())
        count_merge("avoided" if other in known else "done")
        if other not in known:
            known[other] = _without_owner(compute(self, other), self, other)
        made = known[other]
        owner: Pattern | weakref.ref[Pattern] = made.pattern
        return made._replace(pattern=owner()) if isinstance(owner, weakref.ref) else made

    @structural
    @timed("conversion")
    def repeat(self, num: int) -> Pattern:
        """Return the block-diagonal pattern of ``num`` copies. The entries of copy b start at ``b * nnz``."""
        if self._repeat is None or self._repeat[0] != num:
            copy = torch.arange(num, device=self.device).repeat_interleave(self.nnz)
            row = self.row.repeat(num) + copy * self.shape[0]
            col = self.col.repeat(num) + copy * self.shape[1]
            repeated = Pattern._trusted(row, col, (num * self.shape[0], num * self.shape[1]))
            self._repeat = (num, repeated)
        return self._repeat[1]

    @timed("conversion")
    def _united(self, other: Pattern) -> Merge:
        both = torch.cat([_keys(self.row, self.col, self.shape), _keys(other.row, other.col, other.shape)])
        keys, place = distinct_and_places(both)
        left, right = place.split_with_sizes([self.nnz, other.nnz])
        if len(keys) == self.nnz:
            return Merge(self, left, right)
        if len(keys) == other.nnz:
            return Merge(other, left, right)
        return Merge(Pattern._of_keys(keys, self.shape), left, right)

    @timed("conversion")
    def _intersected(self, other: Pattern) -> Merge:
        place = other._find(self.row, self.col)
        left = (place >= 0).nonzero().squeeze(1)
        right = place[left]
        if len(left) == self.nnz:
            return Merge(self, left, right)
        if len(left) == other.nnz:
            return Merge(other, left, right)
        return Merge(Pattern._trusted(self.row[left], self.col[left], self.shape), left, right)

    @timed("conversion")
    def _multiplied(self, other: Pattern) -> Product:
        """Pair each entry (i, k) with the entries of row k of ``other`` (Gustavson, ACM TOMS, 1978)."""
        counts = other.crow.diff()[self.col]  # pairs of each entry
        left = torch.repeat_interleave(torch.arange(self.nnz, device=self.device), counts)
        first = counts.cumsum(0) - counts
        right = torch.arange(len(left), device=self.device) - first[left] + other.crow[self.col[left]]
        shape = check_shape("Pattern.product(other)", (self.shape[0], other.shape[1]))
        keys, cell = distinct_and_places(_keys(self.row[left], other.col[right], shape))
        pattern = Pattern._of_keys(keys, shape)
        return Product(
            pattern,
            Segments.sorted_ids(left, self.nnz),
            Segments.grouped(right, other.nnz),
            Segments.grouped(cell, pattern.nnz),
        )

    def _find(self, row: Tensor, col: Tensor) -> Tensor:
        """Return the entry of each cell, or -1 if the cell is not stored, int64 in the shape of ``row``."""
        keys, wanted = _keys(self.row, self.col, self.shape), _keys(row, col, self.shape)
        if not self.nnz:
            return torch.full_like(wanted, -1)
        place = torch.searchsorted(keys, wanted).clamp_(max=self.nnz - 1)
        return torch.where((self.row[place] == row) & (self.col[place] == col), place, -1)

    def equals(self, other: Pattern) -> bool:
        """Return whether two patterns have the same cells. ``==`` compares the objects."""
        check_type("Pattern.equals(other)", other, Pattern)
        return self is other or (
            self.shape == other.shape
            and torch.equal(self.row, other.row.to(self.device))
            and torch.equal(self.col, other.col.to(self.device))
        )

    def to_mask(self) -> Tensor:
        """Return the boolean matrix that is true at the entries."""
        mask = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        mask[self.row, self.col] = True
        return mask

    @structural
    def to(self, device: torch.device | str) -> Pattern:
        """Return this pattern on a device. All tensors on a device share one copy."""
        row = self.row.to(device)
        if row is self.row:
            return self
        copy = self._copies.get(row.device)
        if copy is None:
            copy = Pattern._trusted(row, self.col.to(device), self.shape)
            copy._copies[self.device] = self
            self._copies[row.device] = copy
        return copy

    def __reduce__(self) -> tuple[type[Pattern], tuple[Any, ...]]:
        return Pattern, (self.row, self.col, self.shape)

    def __deepcopy__(self, memo: dict[int, object]) -> Pattern:
        return self  # immutable, and shared by a tensor and its gradients

    def __repr__(self) -> str:
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"Pattern(shape={self.shape}, nnz={self.nnz}{device})"


def _keys(row: Tensor, col: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return row-major numbers of cells. ``check_shape`` has checked that they fit into int64."""
    return row * shape[1] + col


def _check_order(row: Tensor, col: Tensor, shape: tuple[int, int]) -> None:
    keys = _keys(row, col, shape)
    bad = (keys[1:] <= keys[:-1]).nonzero()
    if len(bad):
        at = int(bad[0]) + 1
        here, before = (int(row[at]), int(col[at])), (int(row[at - 1]), int(col[at - 1]))
        what = "is given twice" if here == before else f"comes after {before}"
        raise ValueError(
            f"Pattern(row, col, shape): entries must be in row-major order without duplicates, but entry {at}, "
            f"{here}, {what}. Values would be put into the wrong cells. Use SparseTensor.from_coo(row, col, "
            "values, shape), which sorts and adds duplicates, or Pattern.coalesce(row, col, shape), which "
            "also returns where each entry went."
        )


def _without_owner(made: Any, left: Pattern, right: Pattern) -> Any:
    """Return a merge or product with a weak reference to its pattern, if one of the two patterns caches it."""
    shared = made.pattern is left or made.pattern is right
    return made._replace(pattern=weakref.ref(made.pattern)) if shared else made


def check_mask(call: str, mask: Tensor) -> None:
    """Raise ``TypeError`` unless a mask is a boolean matrix."""
    if not is_a(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        what = f"{mask.dtype}, {mask.ndim}-d" if is_a(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{call}: mask must be a boolean tensor of two dimensions, got {what}.")


def _check_pair(kind: str, left: Pattern, right: Pattern) -> None:
    check_type(f"Pattern.{kind}(other)", right, Pattern)
    fits = left.shape[1] == right.shape[0] if kind == "product" else left.shape == right.shape
    if not fits:
        need = f"{left.shape[1]} rows" if kind == "product" else f"shape {left.shape}"
        raise ValueError(
            f"Pattern.{kind}(other): this pattern is {left.shape}, so the other must have {need}, got {right.shape}."
        )
    check_device(f"Pattern.{kind}(other)", "both patterns", left, right)
