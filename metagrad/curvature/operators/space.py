"""The space that curvature acts on: parameters by name, and their coordinates as one flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.lookups import TableRows
from metagrad.autograd.derivatives.variables import Variable
from metagrad.core.checks import is_a, is_mapping
from metagrad.core.modules import refuse_sharded
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.entries import like
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.tables.row_sparse import RowSparse

Parameters: TypeAlias = "Mapping[str, Tensor | SparseTensor]"
"""Parameters by name."""

Vectors: TypeAlias = "Mapping[str, Tensor | SparseTensor]"
"""A vector by the names of the parameters, or several: then every tensor has one more dimension in front."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The coordinates of one parameter.

    Attributes:
        name: Of the parameter.
        shape: Of the tensor of its coordinates: the parameter's own; ``[nnz]`` or ``[nnz, p, q]`` of a SparseTensor;
            ``[R, D...]`` of a table of which R rows count.
        pattern: Of a SparseTensor.
        table: Of a sparse table: the rows that count, and its whole shape.
    """

    name: str
    shape: tuple[int, ...]
    pattern: Pattern | None = None
    table: TableRows | None = None

    @property
    def rows(self) -> Tensor | None:
        """Of a sparse table: which rows count, ``[R]``, ascending."""
        return None if self.table is None else self.table.rows

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def read(self, value: Tensor | SparseTensor, what: str) -> Tensor:
        """Return the coordinates of one vector, or of a stack of them, ``[k, ...]``."""
        if self.pattern is not None:
            return _values_on(self.pattern, value, what)
        if self.table is not None:
            return self.table.read(value, what)
        if not isinstance(value, Tensor) or isinstance(value, RowSparse):
            raise TypeError(
                f"{what} must be a strided tensor, as its parameter is, got {type(value).__name__}."
            )
        return value

    def wrap(self, values: Tensor) -> Tensor | SparseTensor:
        """Give coordinates, or a stack of them, the form of the parameter."""
        if self.pattern is not None:
            return like(SparseTensor, self.pattern, values)
        return values if self.table is None else self.table.wrap(values)

    def fits(self, other: Coordinates) -> bool:
        """Say whether another parameter has the same name and coordinates."""
        if (self.name, self.shape) != (other.name, other.shape) or self.pattern is not other.pattern:
            return False
        if self.table is None or other.table is None:
            return self.table is other.table
        return self.table.shape == other.table.shape and torch.equal(self.table.rows, other.table.rows)


def _values_on(pattern: Pattern, value: Tensor | SparseTensor, what: str) -> Tensor:
    if isinstance(value, SparseTensor) and value.pattern is pattern:
        return value.values
    got = "one on another" if isinstance(value, SparseTensor) else type(value).__name__
    raise TypeError(
        f"{what} must be a SparseTensor on the pattern of its parameter, got {got}. Make it by "
        "parameter.with_values(values)."
    )


class ParameterSpace:
    """Named parameters, and the flat vectors that stand for them.

    A flat vector holds the coordinates of the parameters one after the other, in the order of the dict. A strided
    parameter has all of its numbers for coordinates, a :class:`~metagrad.sparse.SparseTensor` its stored values, a
    table given by ``rows`` those rows: no vector is ever as large as a sparse parameter would be if it were dense.

    Args:
        params: Parameters by name.
        rows: Of sparse embedding tables, by name: which rows count, ``[R]``, ascending, int64.

    Raises:
        ValueError: There are no parameters, or they have several dtypes or devices.
        TypeError: ``params`` is no mapping, or a parameter is not real floating point.

    Example:
        >>> space = metagrad.curvature.ParameterSpace({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
        >>> space.size, space.slices["b"]
        (6, slice(4, 6, None))
        >>> space.flatten({"w": torch.eye(2), "b": torch.ones(2)})
        tensor([1., 0., 0., 1., 1., 1.])
        >>> space.unflatten(torch.arange(6.0))["b"]
        tensor([4., 5.])
    """

    def __init__(self, params: Parameters, *, rows: Mapping[str, Tensor] | None = None) -> None:
        check_params("ParameterSpace(params)", params)
        first = next(iter(params.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self.entries: list[Coordinates] = [
            _coordinates(name, p, (rows or {}).get(name)) for name, p in params.items()
        ]
        self.slices: dict[str, slice] = _slices(self.entries)

    @classmethod
    def of(cls, params: Parameters, variables: Sequence[Variable]) -> ParameterSpace:
        """Return the space of parameters in the graph of a loss, of tables the rows that it looks up."""
        tables = [variable.lookups for variable in variables]
        return cls(
            params, rows={n: found.table.rows for n, found in zip(params, tables, strict=True) if found}
        )

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [entry.name for entry in self.entries]

    @property
    def size(self) -> int:
        """The number n of coordinates."""
        return sum(entry.size for entry in self.entries)

    def flatten(self, vectors: Vectors, *, call: str = "flatten(vectors)") -> Tensor:
        """Return a dict as a flat vector ``[n]``, or a dict of stacks as rows ``[k, n]``; differentiable.

        Args:
            vectors: One entry for each parameter, in its form: a tensor, a SparseTensor on the same pattern, or a
                RowSparse of some of the rows.
            call: How errors name the caller.

        Raises:
            ValueError: Names, shapes or dtypes are not those of the parameters.
            TypeError: An entry has another form than its parameter.
        """
        if not is_mapping(vectors) or set(vectors) != set(self.names):
            got = sorted(vectors) if is_mapping(vectors) else type(vectors).__name__
            raise ValueError(f"{call}: expected a dict with the names {sorted(self.names)}, got {got}.")
        parts = [
            entry.read(vectors[entry.name], f"{call}: the entry of {entry.name!r}") for entry in self.entries
        ]
        num_stacked = parts[0].ndim - len(self.entries[0].shape)
        leading = parts[0].shape[:num_stacked] if num_stacked == 1 else ()
        for entry, part in zip(self.entries, parts, strict=True):
            expected = (*leading, *entry.shape)
            if tuple(part.shape) != expected or part.dtype != self.dtype:
                raise ValueError(
                    f"{call}: the entry of {entry.name!r} must have shape {expected} and dtype {self.dtype}, got "
                    f"{tuple(part.shape)} and {part.dtype}."
                )
        return self.join(parts)

    def unflatten(self, vectors: Tensor) -> dict[str, Tensor | SparseTensor]:
        """Return a flat vector ``[n]``, or rows ``[k, n]``, by name, in the form of the parameters."""
        return {
            entry.name: entry.wrap(part)
            for entry, part in zip(self.entries, self.split(vectors), strict=True)
        }

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Cut ``[n]`` or ``[k, n]`` into views ``[*shape]`` or ``[k, *shape]``, the coordinates of each parameter."""
        parts = vectors.split_with_sizes([entry.size for entry in self.entries], -1)
        return [
            part.reshape((*vectors.shape[:-1], *entry.shape))
            for part, entry in zip(parts, self.entries, strict=True)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`."""
        leading = parts[0].shape[: parts[0].ndim - len(self.entries[0].shape)]
        return torch.cat(
            [part.reshape(*leading, entry.size) for part, entry in zip(parts, self.entries, strict=True)], -1
        )

    def block(self, prefix: str) -> ParameterSpace:
        """Return the part of one parameter, ``"head.weight"``, or of all below a name, ``"head"``.

        Raises:
            ValueError: No parameter has that name.
        """
        chosen = [
            entry for entry in self.entries if entry.name == prefix or entry.name.startswith(f"{prefix}.")
        ]
        if not chosen:
            raise ValueError(
                f"H[{prefix!r}]: no parameter has this name, nor is below it. The parameters are "
                f"{', '.join(self.names)}."
            )
        made = ParameterSpace.__new__(ParameterSpace)
        made.dtype, made.device, made.entries, made.slices = self.dtype, self.device, chosen, _slices(chosen)
        return made

    def widen(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        """Return rows of a block as rows of the whole that are zero elsewhere."""
        return vectors.new_zeros(len(vectors), self.size).index_copy(1, self._index(block), vectors)

    def narrow(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        """Return the part of rows that belongs to a block."""
        return vectors.index_select(1, self._index(block))

    def _index(self, block: ParameterSpace) -> Tensor:
        places = [self.slices[name] for name in block.names]
        return torch.cat([torch.arange(place.start, place.stop, device=self.device) for place in places])

    def name_at(self, index: int) -> str:
        """Return the name of the parameter that a coordinate belongs to."""
        return next(name for name, place in self.slices.items() if index < place.stop)

    def is_same(self, other: ParameterSpace) -> bool:
        """Say whether another space has the same parameters in the same order."""
        return (
            (self.dtype, self.device, len(self.entries)) == (other.dtype, other.device, len(other.entries))
        ) and all(a.fits(b) for a, b in zip(self.entries, other.entries, strict=True))

    def __repr__(self) -> str:
        return f"ParameterSpace({self.size} coordinates of {', '.join(self.names)})"


def _slices(entries: Sequence[Coordinates]) -> dict[str, slice]:
    ends = list(accumulate(entry.size for entry in entries))
    return {entry.name: slice(end - entry.size, end) for entry, end in zip(entries, ends, strict=True)}


def _coordinates(name: str, param: Tensor | SparseTensor, rows: Tensor | None) -> Coordinates:
    if isinstance(param, SparseTensor):
        return Coordinates(name, tuple(param.values.shape), pattern=param.pattern)
    shape = tuple(param.shape)
    if rows is None:
        return Coordinates(name, shape)
    return Coordinates(name, (len(rows), *shape[1:]), table=TableRows(rows, shape))


def check_params(call: str, params: Parameters) -> None:
    """Check that parameters are a dict of real floating-point tensors, of one dtype on one device."""
    if not is_mapping(params):
        raise TypeError(
            f"{call}: expected a dict of parameters by name, such as dict(model.named_parameters()), got "
            f"{type(params).__name__}."
        )
    if not params:
        raise ValueError(f"{call}: there are no parameters.")
    refuse_sharded(call, params)
    for name, p in _values(call, params):
        if not p.dtype.is_floating_point or p.layout != torch.strided:
            raise TypeError(
                f"{call}: {name!r} must be strided and real floating point, got {p.layout} of {p.dtype}."
            )
    for what in ("dtype", "device"):
        kinds = {str(getattr(p, what)): name for name, p in _values(call, params)}
        if len(kinds) > 1:
            got = " and ".join(f"{kind} of {name!r}" for kind, name in kinds.items())
            raise ValueError(
                f"{call}: all parameters must have one {what}, got {got}. Bring them to one by .to(...)."
            )


def _values(call: str, params: Parameters) -> Iterator[tuple[str, Tensor]]:
    for name, p in params.items():
        if not is_a(p, Tensor, SparseTensor):
            raise TypeError(f"{call}: {name!r} must be a tensor or a SparseTensor, got {type(p).__name__}.")
        yield name, p.values if isinstance(p, SparseTensor) else p
