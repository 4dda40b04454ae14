"""Embedding tables in an inner loop: each task adapts only the rows that its examples use."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metagrad.core._torch import named_modules
from metagrad.core.tree import Params, tree_map
from metagrad.meta.inner.loop import InnerLoop
from metagrad.meta.objective.norms import NormPass
from metagrad.meta.objective.structured import Nested, call_on
from metagrad.meta.objective.tasks import num_tasks
from metagrad.meta.objective.vmap import call_with
from metagrad.optim.hyperparameters import values_in
from metagrad.optim.rules import Rule
from metagrad.sparse.tables.touched import find_tables, touched_rows


def check_tables(model: nn.Module, sparse: Sequence[str], rule: Rule, params: Params) -> tuple[str, ...]:
    """Return the names of tables in MAML's form. Raise for frozen tables, and for hyperparameters per row.

    Args:
        model: The model.
        sparse: The names of tables.
        rule: The inner optimizer.
        params: The adapted parameters.
    """
    tables = find_tables("MAML(..., sparse)", model, sparse)
    for name, table in tables.items():
        if not table.requires_grad:
            raise ValueError(
                f"MAML(..., sparse): {name!r} does not require grad, so it is not learned. Leave it out of sparse."
            )
    _check_embeddings(model, tables)
    chosen = {id(table) for table in tables.values()}
    names = tuple(name for name, p in model.named_parameters() if id(p) in chosen)
    for mapping in (value for _, value in values_in(rule) if isinstance(value, Mapping)):
        for name in filter(params.__contains__, names):
            value = mapping.get(name)
            if isinstance(value, Tensor) and value.ndim > 1:
                raise ValueError(
                    f"MAML(..., inner, sparse): a hyper-parameter has a value for each row of {name!r}, its shape is "
                    f"{tuple(value.shape)}, but only some rows are adapted. Give one value, or one for each column, "
                    "or leave the table out of sparse."
                )
    return names


def _check_embeddings(model: nn.Module, tables: Params) -> None:
    """Raise for embeddings with COO gradients, which have no derivative, and for in-place writes into tables."""
    named = {id(table) for table in tables.values()}
    for name, module in named_modules(model):
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.weight.requires_grad:
            continue
        kind = f"{type(module).__name__} ({name or 'the model itself'})"
        weight = f"{name}.weight".lstrip(".")
        if module.max_norm is not None:
            raise ValueError(
                f"MAML(model, ...): {kind} has max_norm={module.max_norm}, which writes into the table in place "
                "whenever rows are looked up; that has no derivative. Construct it without, or freeze its weight."
            )
        if module.sparse and id(module.weight) not in named:
            raise ValueError(
                f"MAML(model, ...): {kind} has sparse=True, and its gradients, which are sparse COO tensors, have no "
                f"derivative. Pass sparse=[{weight!r}], which adapts the rows that are looked up, or construct it "
                "without sparse."
            )


def find_rows(
    model: nn.Module,
    sparse: Sequence[str],
    inputs: Sequence[Nested],
    chunk: int,
    norms: NormPass | None = None,
) -> Params:
    """Return the rows that each task uses, ``[tasks, R]``, for each table.

    Args:
        model: The model. It is called once for each input, without a graph.
        sparse: The names of the tables.
        inputs: Inputs ``[tasks, n, ...]``.
        chunk: How many tasks run in one vectorized pass. 1 means a Python loop without vmap.
        norms: The policy of normalization layers.
    """
    if not sparse:
        return {}
    tables = find_tables("MAML(batch)", model, sparse)
    call = call_on if norms is None else functools.partial(_called, norms.uncounted())
    parts = []
    for i in range(0, num_tasks(inputs[0]), chunk):
        index = i if chunk == 1 else slice(i, i + chunk)
        calls = [(x,) for x in tree_map(operator.itemgetter(index), list(inputs))]
        rows = touched_rows(model, tables, calls, stacked=chunk != 1, call=call)
        parts.append({name: r.unsqueeze(0) for name, r in rows.items()} if chunk == 1 else rows)
    return {name: _joined([rows[name] for rows in parts]) for name in sparse}


def _called(norms: NormPass, model: nn.Module, x: Nested) -> object:
    return call_with(model, {}, x, norms)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the rows of tasks. Tasks with fewer rows repeat their last row."""
    longest = max(rows.shape[1] for rows in parts)
    return torch.cat([torch.cat([r, r[:, -1:].expand(-1, longest - r.shape[1])], 1) for r in parts])


@dataclass(frozen=True)
class AdaptedTables:
    """Predicts with adapted tables, also for rows that the support examples do not use.

    The gradient of such a row is zero in every inner step. The optimizer may still change it, by weight decay.

    Attributes:
        inner: The inner loop.
        used: The number of steps that each task took, ``[tasks]``.
        rows: Indices of the adapted rows of each table, ``[tasks, R]``.
        chunk: How many tasks run in one vectorized pass. 1 means a Python loop without vmap.
    """

    inner: InnerLoop
    used: Tensor
    rows: Params
    chunk: int

    def predict(self, params: Params, x: Nested) -> Nested:
        """Return predictions ``[tasks, n, ...]`` with adapted parameters."""
        model = self.inner.objective.model
        norms = self.inner.objective.norms
        inputs = [x] if norms is None or norms.reference is None else [x, norms.reference]
        wanted = find_rows(model, tuple(self.rows), inputs, self.chunk, norms)
        start: Params = {name: p for name, p in model.named_parameters() if name in params}
        resting = self.inner.resting(start, self.used, wanted)
        values = {
            name: _chosen(rows, self.rows[name], params[name], resting[name]) for name, rows in wanted.items()
        }
        objective = dataclasses.replace(self.inner.objective, rows=wanted)
        return objective.predict({**params, **values}, x, self.chunk)


def _chosen(wanted: Tensor, adapted_rows: Tensor, adapted: Tensor, resting: Tensor) -> Tensor:
    """Return adapted values of adapted rows, and ``resting`` values of other rows."""
    place = torch.searchsorted(adapted_rows, wanted).clamp_(max=adapted_rows.shape[1] - 1)
    is_adapted = adapted_rows.gather(1, place) == wanted
    index = place.unsqueeze(-1).expand(-1, -1, adapted.shape[-1])
    return torch.where(is_adapted.unsqueeze(-1), adapted.gather(1, index), resting)
