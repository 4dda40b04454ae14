"""A loss as a function of parameters, evaluated again as it was the first time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.lookups import TableRows
from metagrad.autograd.derivatives.point import Point
from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.autograd.derivatives.variables import Variable
from metagrad.core.capture import AutocastState, RandomState, restored
from metagrad.core.modules import ModuleState, modules_of
from metagrad.core.tree import Tree, tree_leaves
from metagrad.curvature.operators.space import Parameters, ParameterSpace
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.tables.embedding import embedding
from metagrad.sparse.tables.table_proxy import LocalRows

LossFn: TypeAlias = Callable[..., Tensor]
"""``loss_fn(params, *batch)``, or a function without arguments that reads the parameters where they are."""


class BatchLoss:
    """A loss function, its parameters, and one batch.

    Random numbers are drawn again as they were, and autocast, and the flags and numbers of modules that the loss
    reaches, are as they were when the objective was made, so every evaluation is of one and the same function.

    Attributes:
        params: The parameters, those that do not require grad replaced by leaves that do.
        is_closure: Whether ``loss_fn`` takes no arguments.
        padding: For tables of which some rows count: which other rows are looked up, as padding.
    """

    def __init__(self, loss_fn: LossFn, params: Parameters, args: Sequence[Tree]) -> None:
        self.loss_fn = loss_fn
        self.args: tuple[Tree, ...] = tuple(args)
        self.params: Parameters = {name: _variable(param) for name, param in params.items()}
        self.is_closure: bool = takes_nothing(loss_fn)
        self.padding: dict[str, Tensor] = {}
        self._random = RandomState()
        self._autocast = AutocastState()
        self._modules = ModuleState(modules_of(loss_fn))

    def here(self) -> Tensor:
        """Evaluate the loss at the parameters themselves, on the tape: once, before :meth:`at`."""
        with torch.enable_grad(), unfused_attention:
            loss = self.loss_fn() if self.is_closure else self.loss_fn(self.params, *self.args)
        self._random.close()
        return loss

    def find_padding(self, variables: Sequence[Variable]) -> None:
        """Find the rows of tables that are looked up as padding."""
        found = zip(self.params, variables, strict=True)
        self.padding = {name: v.lookups.padding for name, v in found if v.lookups is not None}

    def at(self, space: ParameterSpace, coordinates: Sequence[Tensor]) -> Tensor:
        """Evaluate the loss at other coordinates."""
        params: dict[str, Tensor | SparseTensor] = {}
        for entry, values in zip(space.entries, coordinates, strict=True):
            if entry.table is None:
                params[entry.name] = entry.wrap(values)
            else:
                params[entry.name] = self._proxy(entry.name, entry.table, values)
        with self.surroundings():
            return self.loss_fn(params, *self.args)

    def point(self, space: ParameterSpace) -> list[Tensor]:
        """Return the coordinates of the parameters, on the tape."""
        leaves: list[Tensor] = tree_leaves(self.params)
        return [
            leaf if entry.rows is None else embedding(entry.rows, leaf)
            for entry, leaf in zip(space.entries, leaves, strict=True)
        ]

    def made_at(self, call: str) -> Point:
        """Return the parameters, the batch and the buffers as they are now."""
        params = {
            repr(name): p.values if isinstance(p, SparseTensor) else p for name, p in self.params.items()
        }
        return Point(call, params, self.args, self._modules.buffers())

    def _proxy(self, name: str, table: TableRows, values: Tensor) -> Tensor:
        """Return the proxy of a table: its rows, and those of padding, which are constant."""
        padding, whole = self.padding[name], self.params[name]
        assert isinstance(whole, Tensor)
        rows, order = torch.cat([table.rows, padding]).sort()
        values = torch.cat([values, whole.detach().index_select(0, padding)]).index_select(0, order)
        return LocalRows(name, table.shape, rows, values).proxy()

    @contextlib.contextmanager
    def surroundings(self) -> Generator[None, None, None]:
        """Draw the same random numbers, cast alike, keep modules as they were, and attention differentiable."""
        with self.random_numbers(), restored(self._autocast, self._modules), unfused_attention:
            yield

    def random_numbers(self) -> AbstractContextManager[None]:
        """Draw the same random numbers."""
        return self._random.restored()


def _variable(param: Tensor | SparseTensor) -> Tensor | SparseTensor:
    return param if param.requires_grad else param.detach().requires_grad_()


def takes_nothing(loss_fn: LossFn) -> bool:
    """Say whether a function is called without arguments: it has none, or none without a default."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    return all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters)
