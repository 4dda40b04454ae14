"""Predictions with adapted tables, for inputs that look up other rows than the support examples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core.tree import detached
from metagrad.meta.inner import InnerLoop, where_active, with_history_of
from metagrad.meta.objective import Objective
from metagrad.meta.structured import Nested
from metagrad.meta.tables import find_rows, look_up
from metagrad.optim.rules import Params


@dataclass(frozen=True)
class Reader:
    """Predicts with adapted tables, also where an input looks up rows that the support examples do not.

    The gradient of such a row is zero in every inner step, so its adapted value is what the rule makes of that:
    without weight decay, the row itself.

    Attributes:
        objective: The loss and the model.
        inner: The inner loop.
        steps: How many steps it had.
        used: How many of them each task took, ``[tasks]``.
        rows: The rows that were adapted, ``[tasks, R]``, by the name of the table.
        chunk: How many tasks to compute together; 1 means one by one, without vmap.
    """

    objective: Objective
    inner: InnerLoop
    steps: int
    used: Tensor
    rows: Params
    chunk: int

    def predict(self, params: Params, x: Nested) -> Nested:
        """Return the predictions ``[tasks, n, ...]`` of adapted parameters."""
        model = self.objective.model
        wanted = find_rows(model, tuple(self.rows), [x], self.chunk)
        resting = self._at_rest(wanted)
        values = {
            name: _chosen(rows, self.rows[name], params[name], resting[name]) for name, rows in wanted.items()
        }
        objective = dataclasses.replace(self.objective, rows=wanted)
        predict = objective.predict_each if self.chunk == 1 else objective.predict_stacked
        return predict({**params, **values}, x)

    def _at_rest(self, rows: Params) -> Params:
        """Return what the steps of each task make of rows whose gradient is zero."""
        start: Params = {
            name: look_up(p, rows[name]) if name in rows else p
            for name, p in self.objective.model.named_parameters()
            if p.requires_grad
        }
        zeros = {name: torch.zeros_like(p) for name, p in start.items()}
        params, state = start, self.inner.rule.init(start)
        first = self.steps - self.inner.differentiated(self.steps)
        for t in range(self.steps):
            if t == first > 0:
                params, state = detached((params, state))
                params = with_history_of(start, params)
            moved, state = self.inner.rule.update(zeros, state, params)
            params = {name: where_active(self.used > t, moved[name], params[name]) for name in rows} | {
                name: p for name, p in moved.items() if name not in rows
            }
        return {name: params[name] for name in rows}


def _chosen(wanted: Tensor, adapted_rows: Tensor, adapted: Tensor, resting: Tensor) -> Tensor:
    """Take the adapted values of the rows that have one, and those at rest of the others."""
    place = torch.searchsorted(adapted_rows, wanted).clamp_(max=adapted_rows.shape[1] - 1)
    is_adapted = adapted_rows.gather(1, place) == wanted
    index = place.unsqueeze(-1).expand(-1, -1, adapted.shape[-1])
    return torch.where(is_adapted.unsqueeze(-1), adapted.gather(1, index), resting)
