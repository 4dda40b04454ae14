"""The space of the parameters: parameters by name, and their coordinates as one flat vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from metagrad.core.checks import is_a, is_mapping, refuse
from metagrad.core.modules import refuse_sharded
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.entries import like
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.tables.row_sparse import RowSparse

Parameters: TypeAlias = "Mapping[str, Tensor | SparseTensor]"
"""Parameters by name."""

Vectors: TypeAlias = "Mapping[str, Tensor | SparseTensor]"
"""A vector in the space of the parameters, as a dict of tensors by parameter name. For several vectors, every
tensor has one more dimension in front."""


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one parameter.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the coordinates: the parameter's own, or the shape of a SparseTensor's values.
        pattern: Pattern of a SparseTensor. None for a dense parameter.
    """

    name: str
    shape: tuple[int, ...]
    pattern: Pattern | None = None

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)

    def read(self, value: Tensor | SparseTensor, what: str) -> Tensor:
        """Return the coordinates of one vector, or of a stack of them, ``[k, ...]``."""
        if self.pattern is not None:
            if isinstance(value, SparseTensor) and value.pattern is self.pattern:
                return value.values
            got = "one on another" if isinstance(value, SparseTensor) else type(value).__name__
            raise TypeError(
                f"{what} must be a SparseTensor on the pattern of its parameter, got {got}. Make it by "
                "parameter.with_values(values)."
            )
        if not isinstance(value, Tensor) or isinstance(value, RowSparse):
            refuse(what, "a dense tensor, as its parameter is", type(value).__name__, TypeError)
        return value

    def wrap(self, values: Tensor) -> Tensor | SparseTensor:
        """Return coordinates, or a stack of them, in the form of the parameter."""
        return values if self.pattern is None else like(SparseTensor, self.pattern, values)


class ParameterSpace:
    """Named parameters, and flat vectors of their coordinates.

    A flat vector holds the coordinates of all parameters, in the order of the dict. The coordinates of a
    :class:`~metagrad.sparse.SparseTensor` are its stored values.

    Args:
        params: Parameters by name.
        call: Name of the caller in errors.

    Raises:
        ValueError: There are no parameters, or they have several dtypes or devices.
        TypeError: ``params`` is not a mapping, or a parameter is not real floating point.

    Example:
        >>> space = metagrad.curvature.ParameterSpace({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
        >>> space.size, space.slices["b"]
        (6, slice(4, 6, None))
        >>> space.flatten({"w": torch.eye(2), "b": torch.ones(2)})
        tensor([1., 0., 0., 1., 1., 1.])
        >>> space.unflatten(torch.arange(6.0))["b"]
        tensor([4., 5.])
    """

    def __init__(self, params: Parameters, *, call: str = "ParameterSpace(params)") -> None:
        check_params(call, params)
        first = next(iter(params.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self._set([_coordinates(name, p) for name, p in params.items()])

    def _set(self, entries: list[Coordinates]) -> None:
        self.entries: list[Coordinates] = entries
        self._sizes = [entry.size for entry in entries]
        ends = list(accumulate(self._sizes))
        self.size: int = ends[-1]  # number of coordinates
        self.slices: dict[str, slice] = {
            entry.name: slice(end - entry.size, end) for entry, end in zip(entries, ends, strict=True)
        }

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [entry.name for entry in self.entries]

    def flatten(self, vectors: Vectors, *, call: str = "flatten(vectors)") -> Tensor:
        """Return a dict as a flat vector ``[n]``, or a dict of stacks as rows ``[k, n]``. Differentiable.

        Args:
            vectors: One entry for each parameter, in its form: a tensor, or a SparseTensor on the same pattern.
            call: Name of the caller in errors.

        Raises:
            ValueError: Names, shapes or dtypes differ from the parameters.
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
        """Return a flat vector ``[n]``, or rows ``[k, n]``, by name in the form of the parameters.

        Raises:
            ValueError: The last dimension is not n.
        """
        if vectors.shape[-1:] != (self.size,):
            refuse("unflatten(vectors)", f"[{self.size}] or rows [k, {self.size}]", list(vectors.shape))
        return {
            entry.name: entry.wrap(part)
            for entry, part in zip(self.entries, self.split(vectors), strict=True)
        }

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Split ``[n]`` or ``[k, n]`` into views ``[*shape]`` or ``[k, *shape]``, one for each parameter."""
        leading = vectors.shape[:-1]
        parts = vectors.split_with_sizes(self._sizes, -1)
        return [
            part.reshape((*leading, *entry.shape)) for part, entry in zip(parts, self.entries, strict=True)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`."""
        leading = parts[0].shape[: parts[0].ndim - len(self.entries[0].shape)]
        flat = [part.reshape(*leading, size) for part, size in zip(parts, self._sizes, strict=True)]
        return torch.cat(flat, -1)

    def block(self, prefix: str) -> ParameterSpace:
        """Return the subspace of one parameter, ``"head.weight"``, or of all parameters below a name, ``"head"``.

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
        made = copy.copy(self)
        made._set(chosen)
        return made

    def places(self, block: ParameterSpace) -> Tensor:
        """Return the indices of a block's coordinates, int64."""
        slices = [self.slices[name] for name in block.names]
        return torch.cat([torch.arange(place.start, place.stop, device=self.device) for place in slices])

    def name_at(self, index: int) -> str:
        """Return the name of the parameter that a coordinate belongs to."""
        return next(name for name, place in self.slices.items() if index < place.stop)

    def is_same(self, other: ParameterSpace) -> bool:
        """Return whether another space has the same parameters in the same order."""
        own, others = ((space.dtype, space.device, space.entries) for space in (self, other))
        return own == others

    def __repr__(self) -> str:
        return f"ParameterSpace({self.size} coordinates of {', '.join(self.names)})"


def _coordinates(name: str, param: Tensor | SparseTensor) -> Coordinates:
    if isinstance(param, SparseTensor):
        return Coordinates(name, tuple(param.values.shape), param.pattern)
    return Coordinates(name, tuple(param.shape))


def values_of(param: Tensor | SparseTensor) -> Tensor:
    """Return the tensor of a parameter's coordinates."""
    return param.values if isinstance(param, SparseTensor) else param


def with_values(params: Parameters, values: Mapping[str, Tensor]) -> dict[str, Tensor | SparseTensor]:
    """Return other coordinates in the form of parameters."""
    return {
        name: p.with_values(values[name]) if isinstance(p, SparseTensor) else values[name]
        for name, p in params.items()
    }


def check_params(call: str, params: Parameters) -> None:
    """Raise unless ``params`` is a dict of real floating point tensors with one dtype and one device."""
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
            refuse(f"{call}: {name!r}", "dense real floating point", (p.layout, p.dtype), TypeError)
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
        if is_lazy(values_of(p)):
            raise ValueError(f"{call}: {name!r} is a lazy parameter. Call the model once to initialize it.")
        yield name, values_of(p)
