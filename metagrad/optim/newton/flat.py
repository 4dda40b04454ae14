"""All parameters of a task as one row: ``[tasks, n]``, where rules think in vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.curvature.linear_map import Rows
from metagrad.curvature.solvers.iteration import dot
from metagrad.optim.rule import Params


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The rows of parameters whose first axes, so many, count tasks.

    Args:
        params: Parameters by name, of one dtype and device.
        batch_ndim: How many axes; without any there is one row.
    """

    params: Params
    batch_ndim: int = 0

    @property
    def tasks(self) -> tuple[int, ...]:
        """The shape of what there is one of for each task."""
        return tuple(next(iter(self.params.values())).shape[: self.batch_ndim])

    @functools.cached_property
    def num_tasks(self) -> int:
        """How many rows there are."""
        return math.prod(self.tasks)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """How much of a row each parameter takes."""
        return [p.numel() // self.num_tasks for p in self.params.values()]

    @functools.cached_property
    def place(self) -> Tensor:
        """The parameters as rows."""
        return self.rows(self.params)

    def rows(self, tensors: Params) -> Tensor:
        """Write tensors in the shapes of the parameters as rows."""
        return torch.cat([tensors[key].reshape(self.num_tasks, -1) for key in self.params], 1)

    def tensors(self, rows: Tensor) -> Params:
        """Undo :meth:`rows`."""
        parts = rows.split(self.sizes, 1)
        return {key: part.reshape(p.shape) for (key, p), part in zip(self.params.items(), parts, strict=True)}

    def each(self, value: float | Tensor) -> Tensor:
        """Return a number of each task, ``[tasks]``, in the dtype of the parameters."""
        first = next(iter(self.params.values()))
        number = torch.as_tensor(value, dtype=first.dtype, device=first.device)
        return number.expand(self.tasks).reshape(-1)

    def spread(self, values: Sequence[float | Tensor]) -> Tensor:
        """Return the values of parameters, numbers or tensors of their trailing shapes, as rows."""
        columns = [
            torch.as_tensor(value, dtype=p.dtype, device=p.device).expand(p.shape)
            for value, p in zip(values, self.params.values(), strict=True)
        ]
        return self.rows(dict(zip(self.params, columns, strict=True)))

    def multiplied(self, products: Callable[[Params], Params], sign: int = 1) -> Rows:
        """Return a map of tensors by name as one of rows, times ``sign``."""
        if sign == 1:
            return lambda rows: self.rows(products(self.tensors(rows)))
        return lambda rows: sign * self.rows(products(self.tensors(rows)))


def check_uniform(call: str, params: Params) -> None:
    """Refuse complex parameters, and those that have no row in common."""
    first: tuple[str, Tensor] | None = None
    for key, p in params.items():
        if not p.is_floating_point():
            raise TypeError(
                f"{call}: {key!r} is {p.dtype}, and rules move real parameters. Make it real by "
                "torch.view_as_real, and complex again in the model."
            )
        first = first or (key, p)
        if (p.dtype, p.device) != (first[1].dtype, first[1].device):
            raise ValueError(
                f"{call}: all parameters make one vector, but {first[0]!r} is {first[1].dtype} on "
                f"{first[1].device} and {key!r} is {p.dtype} on {p.device}. Give each kind a rule, or an "
                "optimizer, of its own."
            )


def norm(rows: Tensor) -> Tensor:
    """Return the norm of each row, whose derivatives at zero are 0."""
    if not rows.requires_grad:
        return torch.linalg.vector_norm(rows, dim=-1)
    squares = dot(rows, rows)
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
